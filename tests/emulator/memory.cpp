// Loads, stores, atomics, ldmatrix and stmatrix, cp.async, and addresses of other CTAs' shared memory.
#include <algorithm>

#include "floats.h"

u8* shared_at(Warp& w, u64 address, u32 bytes, u32 align, Cta** owner) {
    u32 rank = u32(address) >> 24, offset = u32(address) & 0xffffff;
    Cta* cta = w.cta;
    if (rank > w.cta->cluster->ctas.size()) fail("shared address 0x", std::hex, address, " names no CTA of the cluster");
    if (rank) cta = w.cta->cluster->ctas[rank - 1].get();
    if (cta != w.cta && cta->live_threads == 0) fail("access to shared memory of CTA ", rank - 1, ", which has ended");
    if (offset < SHARED_BASE || offset + bytes > cta->shared.size())
        fail("shared address 0x", std::hex, address, std::dec, " + ", bytes, " bytes is outside of the CTA's ",
             cta->shared.size() - SHARED_BASE, " bytes, which begin at ", SHARED_BASE);
    if (offset % align) fail("shared address 0x", std::hex, address, " is no multiple of ", std::dec, align);
    if (owner) *owner = cta;
    return cta->shared.data() + offset;
}

void Machine::check_global(u64 address, u64 bytes, const char* what) const {
    for (const Range& r : allocations)
        if (r.low <= address && address + bytes <= r.high) return;
    std::ostringstream near;
    for (const Range& r : allocations) {
        if (address < r.low && r.low - address < 1 << 20) near << "; " << r.low - address << " bytes before a tensor";
        if (address >= r.low && address - r.high + bytes < 1 << 20)
            near << "; ends " << address + bytes - r.high << " bytes after the end of a tensor of " << r.high - r.low;
    }
    fail(what, " of ", bytes, " bytes at global address 0x", std::hex, address, ", which is in no tensor of the call",
         std::dec, near.str());
}

u8* memory_at(Warp& w, char space, int lane, u64 address, u32 bytes, bool writes) {
    u64 byte = address - LOCAL, each = w.cta->machine->program->local_bytes;
    if (byte < each && byte + bytes <= each) return w.local.data() + lane * each + byte;
    if (space == 'x') {
        bool shared = (address & ~u64(~0u)) == GENERIC_SHARED;
        space = shared ? 's' : 'g';
        if (shared) address &= ~0u;
    }
    if (space == 's') return shared_at(w, address, bytes, bytes);
    if (space == 'g') {
        if (address % bytes) fail("global address 0x", std::hex, address, " is no multiple of ", std::dec, bytes);
        w.cta->machine->check_global(address, bytes, writes ? "a store" : "a load");
        if (writes) w.cta->machine->event();
    }
    return (u8*)address;
}

// An ordinary store, of which shared memory remembers the warp; see Cta::writer.
static void put(Warp& w, u8* at, const void* data, u32 bytes) {
    bool same = memcmp(at, data, bytes) == 0;
    memcpy(at, data, bytes);
    for (auto& cta : w.cta->cluster->ctas) {
        if (at < cta->shared.data() || at >= cta->shared.data() + cta->shared.size()) continue;
        size_t first = at - cta->shared.data(), last = first + bytes - 1;
        for (size_t g = first / GRANULE; g <= last / GRANULE; g++) {
            if (same) cta->witness[g] = u8(w.number + 1);
            else cta->writer[g] = u8(w.number + 1), cta->witness[g] = 0;
        }
        w.cta->machine->event();
    }
}

static u64 base_address(const Warp& w, const Ins& i, int operand, int lane, int which) {
    return get_int(w, i, operand, lane) + u64(i.offset[which]);
}

static char space_of(const std::string& name) {
    size_t dot = name.find('.');
    std::string s = name.substr(dot + 1, name.find('.', dot + 1) - dot - 1);
    return s.rfind("shared", 0) == 0 ? 's' : s == "global" ? 'g' : s == "param" || s == "const" ? 'p' : 'x';
}

template <int BYTES, bool SIGNED> Step load(Warp& w, const Ins& i, u32 m) {
    int n = i.group[0];
    char space = space_of(i.name);
    EACH_LANE(l, m) {
        u64 address = base_address(w, i, n, l, 0);
        const u8* at = memory_at(w, space, l, space == 's' ? u32(address) : address, BYTES * n, false);
        for (int k = 0; k < n; k++) {
            u64 v = 0;
            memcpy(&v, at + k * BYTES, BYTES);
            if (SIGNED) v = u64(i64(v << (64 - 8 * BYTES)) >> (64 - 8 * BYTES));
            set_int(w, i, k, l, v);
        }
    }
    return DONE;
}

template <int BYTES> Step store(Warp& w, const Ins& i, u32 m) {
    int n = i.group[1];
    char space = space_of(i.name);
    EACH_LANE(l, m) {
        u64 address = base_address(w, i, 0, l, 0);
        u8* at = memory_at(w, space, l, space == 's' ? u32(address) : address, BYTES * n, true);
        u8 data[8 * BYTES];
        for (int k = 0; k < n; k++) {
            u64 v = get_int(w, i, 1 + k, l);
            memcpy(data + k * BYTES, &v, BYTES);
        }
        put(w, at, data, n * BYTES);
    }
    return DONE;
}

template <class T, auto F, bool RETURNS> Step atomic(Warp& w, const Ins& i, u32 m) {
    int n = i.group[RETURNS ? 0 : 1], address_at = RETURNS ? n : 0;
    char space = space_of(i.name);
    EACH_LANE(l, m) {
        u64 address = base_address(w, i, address_at, l, 0);
        u8* at = memory_at(w, space, l, space == 's' ? u32(address) : address, sizeof(T) * n, true);
        for (int k = 0; k < n; k++) {
            T old, b, c{};
            memcpy(&old, at + k * sizeof(T), sizeof(T));
            b = src<T>(w, i, address_at + 1 + k)[l];
            if (int(i.op.size()) > address_at + 1 + n) c = src<T>(w, i, address_at + 1 + n)[l];
            T now = F(old, b, c);
            put(w, at + k * sizeof(T), &now, sizeof(T));
            if (RETURNS && !i.op[k].constant) dst<T>(w, i, k)[l] = old;
        }
    }
    return DONE;
}

template <u16 (*TO)(float), float (*FROM)(u16)> u32 add_halves(u32 a, u32 b, u32) {
    return u32(TO(FROM(u16(a >> 16)) + FROM(u16(b >> 16)))) << 16 | TO(FROM(u16(a)) + FROM(u16(b)));
}

template <class T, auto F> void atomics_named(Table& t, const std::string& tail, bool vectors = false) {
    for (const char* space : {"", ".global", ".shared", ".shared::cta", ".shared::cluster"})
        for (const char* v : {"", ".v2", ".v4", ".v8"}) {
            if (*v && !vectors) continue;
            size_t dot = tail.rfind('.');
            std::string name = space + tail.substr(0, dot) + v + tail.substr(dot);
            t["atom" + name] = {atomic<T, F, true>};
            t["red" + name] = {atomic<T, F, false>};
        }
}

// -- ldmatrix, stmatrix: 8 x 8 matrices of 16-bit elements ------------------------------------------------------

template <bool LOADS> Step matrices(Warp& w, const Ins& i, u32) {
    bool trans = i.name.find(".trans") != std::string::npos;
    int n = LOADS ? i.group[0] : i.group[1], base = LOADS ? n : 0, first = LOADS ? 0 : 1;
    u32 out[4][LANES] = {};
    for (int q = 0; q < n; q++)
        for (int row = 0; row < 8; row++) {
            u8* at = shared_at(w, u32(base_address(w, i, base, 8 * q + row, 0)), 16, 16);
            u16 stored[8];
            for (int col = 0; col < 8; col++) {
                int a = trans ? col : row, b = trans ? row : col, lane = 4 * a + b / 2, shift = 16 * (b % 2);
                u16 h;
                if (LOADS) {
                    memcpy(&h, at + 2 * col, 2);
                    out[q][lane] |= u32(h) << shift;
                } else {
                    stored[col] = u16(src<u32>(w, i, first + q)[lane] >> shift);
                }
            }
            if (!LOADS) put(w, at, stored, 16);
        }
    if (LOADS) for (int q = 0; q < n; q++) memcpy(dst<u32>(w, i, q), out[q], sizeof out[q]);
    return DONE;
}

// -- cp.async --------------------------------------------------------------------------------------------------

Step cp_async(Warp& w, const Ins& i, u32 m) {
    Machine& machine = *w.cta->machine;
    int written = int(i.group.size());
    EACH_LANE(l, m) {
        u32 to = u32(base_address(w, i, 0, l, 0)), bytes = u32(get_int(w, i, 2, l));
        u64 from = base_address(w, i, 1, l, 1);
        u32 valid = written > 3 ? u32(get_int(w, i, 3, l)) : bytes;
        if (valid > bytes) fail("cp.async of ", bytes, " bytes has a source of ", valid);
        u8* at = shared_at(w, to, bytes, bytes);
        if (valid) {
            if (from % bytes) fail("cp.async from global address 0x", std::hex, from, ", no multiple of ", std::dec, bytes);
            machine.check_global(from, valid, "a cp.async");
        }
        memset(at, 0xff, bytes);  // it may land at any time, and until then nobody may read what was there
        Cta* cta = w.cta;
        u8 me = u8(w.number + 1);
        auto write = [at, from, bytes, valid, cta, me] {
            memset(at, 0, bytes);
            if (valid) memcpy(at, (const void*)from, valid);
            size_t g = (at - cta->shared.data()) / GRANULE;
            cta->copied[g] = ++cta->copies, cta->copier[g] = me;
        };
        w.async_copies.push_back({l, w.async_group[l], true, nullptr, write, w.async_count});
    }
    w.async_count++;
    return DONE;
}

// Arrives at an mbarrier when all cp.async that the lane has begun have landed, and no sooner than that.
Step cp_async_arrive(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        u32 at = u32(get_int(w, i, 0, l) + i.offset[0]);
        Cta* cta;
        shared_at(w, at, 8, 8, &cta);
        u64 number = w.async_count;
        w.cta->machine->later.push_back([&w, cta, at, l, number] {
            finish_copies_before(w, l, number);
            arrive(w, *cta, at & 0xffffff, 1, 0);
        });
    }
    return DONE;
}

Step cp_async_commit(Warp& w, const Ins&, u32 m) {
    EACH_LANE(l, m) w.async_group[l]++;
    return DONE;
}

Step cp_async_wait(Warp& w, const Ins& i, u32 m) {
    bool all = i.op.empty();
    u64 left = all ? 0 : src<u64>(w, i, 0)[0];
    if (all) EACH_LANE(l, m) w.async_group[l]++;
    wait_copies(w, w.async_copies, w.async_group, m, left, false);
    return DONE;
}

// -- shared memory of other CTAs -------------------------------------------------------------------------------

Step mapa(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        u64 a = get_int(w, i, 1, l), rank = std::min(src<u32>(w, i, 2)[l], 254u);  // one that is not there fails when used
        set_int(w, i, 0, l, (a & ~u64(0xff000000u)) | (rank + 1) << 24);
    }
    return DONE;
}

Step st_async(Warp& w, const Ins& i, u32 m) {
    int n = i.group[1], bytes = i.name.back() == '4' ? 8 : 4;
    EACH_LANE(l, m) {
        Cta *to, *cta;
        u8* at = shared_at(w, u32(base_address(w, i, 0, l, 0)), n * bytes, n * bytes, &to);
        u32 barrier = u32(base_address(w, i, 1 + n, l, 1));
        shared_at(w, barrier, 8, 8, &cta);
        if (cta != to) fail("st.async writes to one CTA and counts in a barrier of another");
        std::vector<u8> data(n * bytes);
        for (int k = 0; k < n; k++) {
            u64 v = get_int(w, i, 1 + k, l);
            memcpy(data.data() + k * bytes, &v, bytes);
        }
        memset(at, 0xff, data.size());
        w.cta->machine->later.push_back([at, data, cta, barrier] {
            memcpy(at, data.data(), data.size());
            complete_tx(*cta, barrier & 0xffffff, i64(data.size()));
        });
    }
    return DONE;
}

// vprintf(format, arguments), of each lane: what it prints goes to standard output.
Step print(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        const char* f = (const char*)src<u64>(w, i, 1)[l];
        u64 at = src<u64>(w, i, 2)[l];
        auto next = [&](auto zero) {
            at = (at + sizeof zero - 1) / sizeof zero * sizeof zero;
            memcpy(&zero, memory_at(w, 'x', l, at, sizeof zero, false), sizeof zero);
            at += sizeof zero;
            return zero;
        };
        while (*f) {
            if (*f != '%' || f[1] == '%') {
                f += *f == '%';
                putchar(*f++);
                continue;
            }
            std::string kind(1, *f++);
            while (*f && !strchr("diouxXeEfgGcsp", *f)) kind += *f++;
            char type = *f ? *f++ : 'd';
            bool wide = kind.find('l') != std::string::npos || type == 'p' || type == 's';
            if (strchr("eEfgG", type)) printf((kind + type).c_str(), next(0.0));
            else if (type == 's') printf((kind + type).c_str(), (const char*)next(u64()));
            else if (wide) printf((kind + type).c_str(), next(u64()));
            else printf((kind + type).c_str(), next(u32()));
        }
    }
    fflush(stdout);
    return DONE;
}

template <int BYTES> void loads_and_stores(Table& t, const std::string& bits) {
    for (const char* space : {"", ".global", ".shared", ".shared::cta", ".shared::cluster", ".param", ".const",
                              ".local"})
        for (const char* v : {"", ".v2", ".v4", ".v8"})
            for (const char* kind : {"b", "u", "s", "f"}) {
                std::string tail = std::string(space) + v + "." + kind + bits;
                t["ld" + tail] = {*kind == 's' ? load<BYTES, true> : load<BYTES, false>};
                t["st" + tail] = {store<BYTES>};
            }
}

void add_memory(Table& t) {
    loads_and_stores<1>(t, "8"); loads_and_stores<2>(t, "16");
    loads_and_stores<4>(t, "32"); loads_and_stores<8>(t, "64");
    atomics_named<u32, [](u32 a, u32 b, u32) { return a + b; }>(t, ".add.u32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return a + b; }>(t, ".add.s32");
    atomics_named<u64, [](u64 a, u64 b, u64) { return a + b; }>(t, ".add.u64");
    atomics_named<float, [](float a, float b, float) { return a + b; }>(t, ".add.f32", true);
    atomics_named<u32, add_halves<to_bf16, from_bf16>>(t, ".add.noftz.bf16x2", true);
    atomics_named<u32, add_halves<to_f16, from_f16>>(t, ".add.noftz.f16x2", true);
    atomics_named<i32, [](i32 a, i32 b, i32) { return std::max(a, b); }>(t, ".max.s32");
    atomics_named<i32, [](i32 a, i32 b, i32) { return std::min(a, b); }>(t, ".min.s32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return std::max(a, b); }>(t, ".max.u32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return std::min(a, b); }>(t, ".min.u32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return a & b; }>(t, ".and.b32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return a | b; }>(t, ".or.b32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return a ^ b; }>(t, ".xor.b32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return b <= a ? 0 : a + 1; }>(t, ".inc.u32");
    atomics_named<u32, [](u32 a, u32 b, u32) { return a == 0 || b < a ? b : a - 1; }>(t, ".dec.u32");
    atomics_named<u32, [](u32, u32 b, u32) { return b; }>(t, ".exch.b32");
    atomics_named<u64, [](u64, u64 b, u64) { return b; }>(t, ".exch.b64");
    atomics_named<u32, [](u32 a, u32 b, u32 c) { return a == b ? c : a; }>(t, ".cas.b32");
    atomics_named<u64, [](u64 a, u64 b, u64 c) { return a == b ? c : a; }>(t, ".cas.b64");
    for (const std::string& n : {std::string("x1"), std::string("x2"), std::string("x4")})
        for (const std::string& trans : {std::string(""), std::string(".trans")})
            for (const std::string& space : {std::string("shared"), std::string("shared::cta")}) {
                t["ldmatrix.m8n8." + n + trans + "." + space + ".b16"] = {matrices<true>, true};
                t["stmatrix.m8n8." + n + trans + "." + space + ".b16"] = {matrices<false>, true};
            }
    for (const char* kind : {"ca", "cg"})
        for (const char* space : {"shared", "shared::cta"})
            t[std::string("cp.async.") + kind + "." + space + ".global"] = {cp_async};
    for (const char* space : {"", ".shared", ".shared::cta"})
        t[std::string("cp.async.mbarrier.arrive.noinc") + space + ".b64"] = {cp_async_arrive};
    t["cp.async.commit_group"] = {cp_async_commit};
    t["cp.async.wait_group"] = t["cp.async.wait_all"] = {cp_async_wait};
    t["vprintf"] = {print};
    t["mapa.shared::cluster.u32"] = t["mapa.shared::cluster.u64"] = t["mapa.u64"] = {mapa};
    for (const char* v : {"", ".v2", ".v4"})
        for (const char* type : {"b32", "b64", "u32", "u64", "s32", "s64", "f32"})
            t[std::string("st.async.shared::cluster.mbarrier::complete_tx::bytes") + v + "." + type] = {st_async};
}
