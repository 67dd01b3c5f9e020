// TMA: copies of boxes by tensor maps, bulk copies of bytes, their multicast and their reductions.
#include <algorithm>
#include <functional>

#include "floats.h"

// A tensor map of 128 bytes, as the DSL's host code writes it.
struct TensorMap {
    u64 address;
    int rank, element, swizzle;              // bytes of an element; swizzle 0, 32, 64 or 128
    u32 type;
    bool to_tf32;                            // loads round fp32 numbers to TF32, to nearest even
    u64 size[5], stride[5];                  // elements; bytes
    u32 box[5];
};

static TensorMap tensor_map_at(u64 at) {
    u64 w[16];
    if (at % 64) fail("the tensor map at 0x", std::hex, at, " is no multiple of 64");
    memcpy(w, (const void*)at, sizeof w);
    static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
    static const int widths[] = {0, 32, 64, 128};
    TensorMap m;
    m.address = w[0];
    u32 flags = u32(w[1]);
    m.rank = int(flags >> 4 & 7) + 1;
    m.type = flags >> 7 & 15;
    if (m.rank > 5 || m.type > 12) fail("a tensor map of rank ", m.rank, " and element type ", m.type);
    m.element = bytes[m.type];
    if (flags >> 11 & 3) fail("an interleaved tensor map is not emulated");
    m.swizzle = widths[flags >> 13 & 3];
    m.to_tf32 = flags >> 16 & 1;  // found by making maps of fp32 numbers of both kinds
    if (m.to_tf32 && m.type != 7) fail("a tensor map that rounds elements of type ", m.type, " to TF32");
    if (flags >> 15 & 1) fail("a tensor map that fills with NaN is not emulated");
    u32 low[4] = {u32(w[1] >> 32), u32(w[2]), u32(w[2] >> 32), u32(w[3])};
    m.stride[0] = m.element;
    for (int k = 0; k < 4; k++) m.stride[k + 1] = (low[k] | (w[3] >> (32 + 4 * k) & 15) << 32) << 4;
    for (int k = 0; k < 5; k++) {
        m.size[k] = u64(u32(w[4 + k / 2] >> (k % 2 * 32))) + 1;
        m.box[k] = u32((k ? w[7] >> (8 * (k - 1)) : w[6] >> 56) & 255) + 1;
    }
    if (w[6] >> 32 & 0xffffff) fail("a tensor map with element strides is not emulated");
    if (m.box[0] * m.element % 16) fail("a box of ", m.box[0] * m.element, " contiguous bytes, no multiple of 16");
    if (m.swizzle && m.box[0] * m.element > u32(m.swizzle)) fail("a box wider than its swizzle");
    return m;
}

// Calls visit(global address, byte in shared memory before swizzling, bytes inside the tensor) for each 16 bytes.
template <class V> static void for_chunks(const TensorMap& m, const i32* at, V visit) {
    u32 row_bytes = m.box[0] * m.element, count[5] = {1, 1, 1, 1, 1};
    for (int k = 1; k < m.rank; k++) count[k] = m.box[k];
    u32 linear = 0, c[5];
    for (c[4] = 0; c[4] < count[4]; c[4]++)
        for (c[3] = 0; c[3] < count[3]; c[3]++)
            for (c[2] = 0; c[2] < count[2]; c[2]++)
                for (c[1] = 0; c[1] < count[1]; c[1]++, linear += row_bytes) {
                    bool inside = true;
                    u64 base = m.address;
                    for (int k = 1; k < m.rank; k++) {
                        i64 x = i64(at[k]) + c[k];
                        inside = inside && x >= 0 && u64(x) < m.size[k];
                        base += u64(x) * m.stride[k];
                    }
                    for (u32 b = 0; b < row_bytes; b += 16) {
                        i64 first = i64(at[0]) * m.element + b, end = i64(m.size[0]) * m.element;
                        visit(base + u64(first), linear + b, inside ? first : end, end);
                    }
                }
}

static u32 swizzled(const TensorMap& m, u32 address) {
    return m.swizzle ? address ^ ((address >> 7 & (m.swizzle / 16 - 1)) << 4) : address;
}

static u32 box_bytes(const TensorMap& m) {
    u32 n = m.element;
    for (int k = 0; k < m.rank; k++) n *= m.box[k];
    return n;
}

static void load_box(Cta& cta, const TensorMap& m, const i32* at, u32 to) {
    for_chunks(m, at, [&](u64 global, u32 byte, i64 first, i64 end) {
        u8* s = cta.shared.data() + swizzled(m, to + byte);
        i64 low = std::max<i64>(0, -first), high = std::min<i64>(16, end - first);
        memset(s, 0, 16);
        cta.writer[(s - cta.shared.data()) / GRANULE] = 0;
        if (high <= low) return;
        cta.machine->check_global(global + low, high - low, "a TMA load");
        memcpy(s + low, (const void*)(global + low), high - low);
        if (m.to_tf32)
            for (int e = 0; e < 16; e += 4) {
                u32 word;
                memcpy(&word, s + e, 4);
                word = rounded_to_tf32(word, true);
                memcpy(s + e, &word, 4);
            }
    });
}

enum Reduction { STORE, ADD, MIN, MAX };

static void combine(u8* to, const u8* from, u32 bytes, Reduction how, const std::string& type) {
    if (how == STORE) { memcpy(to, from, bytes); return; }
    auto each = [&](auto zero, auto get, auto put) {
        typedef decltype(zero) T;
        for (u32 k = 0; k < bytes / sizeof(T); k++) {
            T a, b;
            memcpy(&a, to + k * sizeof(T), sizeof(T));
            memcpy(&b, from + k * sizeof(T), sizeof(T));
            auto x = get(a), y = get(b);
            a = put(how == ADD ? x + y : how == MIN ? std::min(x, y) : std::max(x, y));
            memcpy(to + k * sizeof(T), &a, sizeof(T));
        }
    };
    auto same = [](auto x) { return x; };
    if (type == "f32") each(0.f, same, same);
    else if (type == "bf16") each(u16(), from_bf16, to_bf16);
    else if (type == "f16") each(u16(), from_f16, to_f16);
    else if (type == "s32") each(i32(), same, same);
    else if (type == "u32") each(u32(), same, same);
    else fail("a reduction of type ", type, " is not emulated");
}

static Reduction reduction_of(const std::string& name) {
    if (name.rfind("cp.reduce", 0) != 0) return STORE;
    return name.find(".add") != std::string::npos ? ADD : name.find(".min") != std::string::npos ? MIN : MAX;
}

// The type of a map's elements by the number in it.
static std::string type_named(u32 type) {
    static const char* names[] = {"u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32", "f64", "bf16", "", ""};
    return names[type];
}

static u64 address_of(const Warp& w, const Ins& i, int operand, int lane, int which) {
    return get_int(w, i, operand, lane) + u64(i.offset[which]);
}

static void poison(Cta& cta, u32 at, u32 bytes) { memset(cta.shared.data() + at, 0xff, bytes); }

// [dst], [map, {coordinates}], [mbarrier] (, CTA mask) (, cache policy)
Step tensor_load(Warp& w, const Ins& i, u32 m) {
    Machine& machine = *w.cta->machine;
    bool multicast = i.name.find(".multicast") != std::string::npos;
    int rank = i.group[1] - 1, barrier_at = 2 + rank;
    EACH_LANE(l, m) {
        TensorMap map = tensor_map_at(address_of(w, i, 1, l, 1));
        if (map.rank != rank) fail("a tensor map of rank ", map.rank, " with ", rank, " coordinates");
        std::vector<i32> at(5);
        for (int k = 0; k < rank; k++) at[k] = src<i32>(w, i, 2 + k)[l];
        u32 to = u32(address_of(w, i, 0, l, 0)), barrier = u32(address_of(w, i, barrier_at, l, 2));
        u32 bytes = box_bytes(map);
        Cta* cta;
        shared_at(w, to, bytes, map.swizzle ? 128 : 16, &cta);
        shared_at(w, barrier, 8, 8);
        u32 ctas = multicast ? src<u32>(w, i, barrier_at + 1)[l] & 0xffff : 1u << cta->rank;
        to &= 0xffffff;
        barrier &= 0xffffff;
        for (u32 r = 0; r < 16; r++) {
            if (!(ctas >> r & 1)) continue;
            if (r >= cta->cluster->ctas.size()) fail("a multicast to CTA ", r, " of a cluster of ", cta->cluster->ctas.size());
            Cta* each = cta->cluster->ctas[r].get();
            if (each->live_threads == 0) fail("a multicast to CTA ", r, ", which has ended");
            if (to + bytes > each->shared.size()) fail("a TMA load past the end of shared memory");
            poison(*each, to, bytes);
            machine.later.push_back([each, map, at, to, barrier, bytes] {
                load_box(*each, map, at.data(), to);
                complete_tx(*each, barrier, bytes);
            });
        }
    }
    return DONE;
}

static void start_store(Warp& w, int lane, u32 from, u32 bytes, std::function<void(const u8*)> write) {
    auto snapshot = std::make_shared<std::vector<u8>>();
    Cta* cta = w.cta;
    async_reads(w, *cta, from, bytes);
    auto read = [snapshot, cta, from, bytes] {
        snapshot->assign(cta->shared.begin() + from, cta->shared.begin() + from + bytes);
    };
    w.bulk_copies.push_back({lane, w.bulk_group[lane], false, read,
                             [snapshot, write] { write(snapshot->data()); }});
}

// [map, {coordinates}], [src] (, cache policy). As measured on the hardware, whole granules of 16 bytes are written.
Step tensor_store(Warp& w, const Ins& i, u32 m) {
    int rank = i.group[0] - 1;
    Machine* machine = w.cta->machine;
    Reduction how = reduction_of(i.name);
    EACH_LANE(l, m) {
        TensorMap map = tensor_map_at(address_of(w, i, 0, l, 0));
        if (map.rank != rank) fail("a tensor map of rank ", map.rank, " with ", rank, " coordinates");
        std::vector<i32> at(5);
        for (int k = 0; k < rank; k++) at[k] = src<i32>(w, i, 1 + k)[l];
        u32 from = u32(address_of(w, i, 1 + rank, l, 1)), bytes = box_bytes(map);
        shared_at(w, from, bytes, map.swizzle ? 128 : 16);
        start_store(w, l, from, bytes, [machine, map, at, from, how](const u8* data) {
            for_chunks(map, at.data(), [&](u64 global, u32 byte, i64 first, i64 end) {
                const u8* s = data + (swizzled(map, from + byte) - from);
                i64 low = std::max<i64>(0, -first);
                if (first >= end || low >= 16) return;
                machine->check_global(global + low, 16 - low, "a TMA store");
                combine((u8*)(global + low), s + low, u32(16 - low), how, type_named(map.type));
            });
        });
    }
    return DONE;
}

// [dst], [src], bytes, [mbarrier]
Step bulk_load(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        u32 to = u32(address_of(w, i, 0, l, 0)), bytes = u32(get_int(w, i, 2, l));
        u64 from = address_of(w, i, 1, l, 1);
        u32 barrier = u32(address_of(w, i, 3, l, 2)) & 0xffffff;
        Cta* cta;
        shared_at(w, to, bytes, 16, &cta);
        if (bytes % 16 || from % 16) fail("a bulk copy of ", bytes, " bytes from 0x", std::hex, from, ", not of 16");
        w.cta->machine->check_global(from, bytes, "a bulk load");
        to &= 0xffffff;
        poison(*cta, to, bytes);
        cta->machine->later.push_back([cta, to, from, bytes, barrier] {
            memcpy(cta->shared.data() + to, (const void*)from, bytes);
            complete_tx(*cta, barrier, bytes);
        });
    }
    return DONE;
}

// [dst], [src], bytes
Step bulk_store(Warp& w, const Ins& i, u32 m) {
    Machine* machine = w.cta->machine;
    Reduction how = reduction_of(i.name);
    std::string type = i.name.substr(i.name.rfind('.') + 1);
    EACH_LANE(l, m) {
        u64 to = address_of(w, i, 0, l, 0);
        u32 from = u32(address_of(w, i, 1, l, 1)), bytes = u32(get_int(w, i, 2, l));
        shared_at(w, from, bytes, 16);
        if (bytes % 16 || to % 16) fail("a bulk copy of ", bytes, " bytes to 0x", std::hex, to, ", not of 16");
        machine->check_global(to, bytes, "a bulk store");
        start_store(w, l, from, bytes, [to, bytes, how, type](const u8* data) {
            combine((u8*)to, data, bytes, how, type);
        });
    }
    return DONE;
}

Step bulk_commit(Warp& w, const Ins&, u32 m) {
    EACH_LANE(l, m) w.bulk_group[l]++;
    return DONE;
}

template <bool READ> Step bulk_wait(Warp& w, const Ins& i, u32 m) {
    wait_copies(w, w.bulk_copies, w.bulk_group, m, src<u64>(w, i, 0)[0], READ);
    return DONE;
}

void add_bulk_copies(Table& t) {
    const std::string shared[] = {"shared::cta", "shared::cluster"};
    for (int rank = 1; rank <= 5; rank++) {
        std::string d = "cp.async.bulk.tensor." + std::to_string(rank) + "d.";
        for (const std::string& s : shared)
            for (const char* tile : {".tile", ""})
                for (const char* multicast : {"", ".multicast::cluster"})
                    t[d + s + ".global" + tile + ".mbarrier::complete_tx::bytes" + multicast] = {tensor_load};
        for (const char* tile : {".tile", ""}) {
            t[d + "global.shared::cta" + tile + ".bulk_group"] = {tensor_store};
            for (const char* how : {".add", ".min", ".max"})
                t["cp.reduce.async.bulk.tensor." + std::to_string(rank) + "d.global.shared::cta" + how + tile +
                  ".bulk_group"] = {tensor_store};
        }
        for (const char* tile : {".tile", ""})
            t["cp.async.bulk.prefetch.tensor." + std::to_string(rank) + "d.L2.global" + tile] = {
                [](Warp&, const Ins&, u32) { return DONE; }};
    }
    for (const std::string& s : shared) t["cp.async.bulk." + s + ".global.mbarrier::complete_tx::bytes"] = {bulk_load};
    t["cp.async.bulk.global.shared::cta.bulk_group"] = {bulk_store};
    for (const char* how : {".add", ".min", ".max"})
        for (const char* type : {".f32", ".s32", ".u32"})
            t[std::string("cp.reduce.async.bulk.global.shared::cta.bulk_group") + how + type] = {bulk_store};
    for (const char* type : {"bf16", "f16"})
        t[std::string("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.") + type] = {bulk_store};
    t["cp.async.bulk.commit_group"] = {bulk_commit};
    t["cp.async.bulk.wait_group.read"] = {bulk_wait<true>};
    t["cp.async.bulk.wait_group"] = {bulk_wait<false>};
}
