// mma.sync and wgmma, with fp32 accumulators, of fp16 operands with fp16 ones too.
#include "floats.h"

static Format format_named(const std::string& s) {
    if (s == "bf16") return BF16;
    if (s == "f16") return F16;
    if (s == "tf32") return TF32;
    if (s == "e4m3") return E4M3;
    if (s == "e5m2") return E5M2;
    fail("operands of type ", s, " are not emulated");
}

static std::vector<std::string> split(const std::string& s) {
    std::vector<std::string> out;
    std::istringstream in(s);
    for (std::string part; std::getline(in, part, '.');) out.push_back(part);
    return out;
}

// A (16, k) of a warp from its registers. Register r of lane t holds 4 bytes of row t / 4, plus 8 if r is odd, from
// byte 4 (t % 4) of a row's 32, plus 16 if r >= 2. (Operands of 8, 16 and 32 bits alike.)
static void a_from_registers(const Warp& w, const Ins& i, int first, int registers, Format f, float a[16][64]) {
    int bytes = format_bytes(f);
    for (int r = 0; r < registers; r++)
        for (int t = 0; t < LANES; t++) {
            u32 word = src<u32>(w, i, first + r)[t];
            for (int e = 0; e < 4 / bytes; e++)
                a[t / 4 + 8 * (r & 1)][(4 * (t % 4) + 16 * (r >> 1)) / bytes + e] = decode(f, (u8*)&word + e * bytes);
        }
}

// acc (16, n) += a (16, k) b (k, n). Lane t holds columns 8 j + 2 (t % 4) and the next of rows t / 4 and t / 4 + 8.
// With fp16 accumulators a register holds both columns of a row, the first in its lower half; sums are rounded once, at
// the end. (Hardware may round them more often.)
static void multiply(Warp& w, const Ins& i, int d, int c, int n, int k, float a[16][64], const float* b, bool accumulate,
                     bool half) {
    static thread_local float acc[16][256];
    for (int j = 0; j < n / 2; j++)
        for (int t = 0; t < LANES; t++) {
            int row = t / 4 + 8 * (j >> 1 & 1), col = 8 * (j >> 2) + 2 * (t % 4) + (j & 1);
            if (!accumulate) acc[row][col] = 0.f;
            else if (half) acc[row][col] = from_f16(u16(src<u32>(w, i, c + j / 2)[t] >> 16 * (j & 1)));
            else acc[row][col] = src<float>(w, i, c + j)[t];
        }
    for (int row = 0; row < 16; row++)
        for (int kk = 0; kk < k; kk++) {
            float x = a[row][kk];
            for (int col = 0; col < n; col++) acc[row][col] += x * b[kk * n + col];
        }
    for (int j = 0; j < n / 2; j++)
        for (int t = 0; t < LANES; t++) {
            int row = t / 4 + 8 * (j >> 1 & 1), col = 8 * (j >> 2) + 2 * (t % 4) + (j & 1);
            if (!half) dst<float>(w, i, d + j)[t] = acc[row][col];
            else if (j % 2 == 0) dst<u32>(w, i, d + j / 2)[t] = to_f16(acc[row][col]) | u32(to_f16(acc[row][col + 1])) << 16;
        }
}

// Whether a product's accumulators, whose type is `name`, are fp16.
static bool fp16_sums(const Ins& i, const std::string& name, Format a, Format b) {
    if (name != "f32" && (name != "f16" || a != F16 || b != F16)) fail(i.name, " is not emulated");
    return name == "f16";
}

// mma.m16n8k16.row.col.f32.bf16.bf16.f32 d, a, b, c
Step mma(Warp& w, const Ins& i, u32) {
    w.cta->machine->mmas++;
    std::vector<std::string> part = split(i.name);
    Format fa = format_named(part[5]), fb = format_named(part[6]);
    int k = atoi(part[1].c_str() + part[1].find('k') + 1), bytes = format_bytes(fa);
    int nd = i.group[0], na = i.group[1], nb = i.group[2], first_b = nd + na;
    bool half = fp16_sums(i, part[4], fa, fb);
    if (part[4] != part[7] || nd != (half ? 2 : 4) || na * 8 != k * bytes || nb * 2 != na) fail(i.name, " is not emulated");
    float a[16][64], b[32 * 8];
    a_from_registers(w, i, nd, na, fa, a);
    for (int r = 0; r < nb; r++)
        for (int t = 0; t < LANES; t++) {
            u32 word = src<u32>(w, i, first_b + r)[t];
            for (int e = 0; e < 4 / bytes; e++)
                b[((4 * (t % 4) + 16 * r) / bytes + e) * 8 + t / 4] = decode(fb, (u8*)&word + e * bytes);
        }
    multiply(w, i, 0, first_b + nb, 8, k, a, b, true, half);
    return DONE;
}

// a (16, 32) of 16-bit elements, or (16, 64) of 8-bit ones, of a warp's rows, from the half of them that is stored; 4 bits
// of metadata for 4 columns. As the ISA's figures have it, of lanes 4 g to 4 g + 3:
//   16 bits: the first two, or with selector 1 the last two, have the places of columns 0 to 15, and 16 to 31; in their
//            lower halves those of row g, in their upper halves of row g + 8.
//   8 bits:  all have some, and the selector is 0: the first row g's of columns 0 to 31, the second row g + 8's of these;
//            the third and the fourth those of columns 32 to 63.
// stored(row, j): the j-th stored element of a row.
template <class Stored>
static void expand(const u32* metadata, u32 selector, int bytes, Stored stored, float a[16][64]) {
    if (selector > (bytes == 2)) fail("a sparsity selector of ", selector);
    for (int lane = 0; lane < LANES; lane++) {
        if (bytes == 2 && lane % 4 / 2 != int(selector)) continue;
        for (int bit = 0; bit < 32; bit += 4) {
            int row = lane / 4 + (bytes == 2 ? bit < 16 ? 0 : 8 : lane % 2 * 8);
            int group = bytes == 2 ? 4 * (lane % 2) + bit % 16 / 4 : lane % 4 / 2 * 8 + bit / 4;
            u32 first = metadata[lane] >> bit & 3, second = metadata[lane] >> (bit + 2) & 3;
            if (first == second) fail("metadata of lane ", lane, ": both elements of a group are at place ", first);
            for (int c = 0; c < 4; c++) a[row][4 * group + c] = 0.f;
            a[row][4 * group + first] = stored(row, 2 * group);
            a[row][4 * group + second] = stored(row, 2 * group + 1);
        }
    }
}

// mma.sp::ordered_metadata.m16n8k32.row.col.f32.bf16.bf16.f32 d, a, b, c, metadata, selector; m16n8k64 of 8 bits. A's
// registers are those of 16 rows and 32 bytes of a dense A; the places of a group's elements must ascend.
Step sparse_mma(Warp& w, const Ins& i, u32) {
    std::vector<std::string> part = split(i.name);
    Format f = format_named(part[6]);
    int c = 12, meta = 16, bytes = format_bytes(f), k = 64 / bytes;
    if (i.group[0] != 4 || i.group[1] != 4 || i.group[2] != 4) fail(i.name, " is not emulated");
    float stored[16][64], a[16][64], b[64 * 8];
    a_from_registers(w, i, 4, 4, f, stored);
    const u32* words = src<u32>(w, i, meta);
    u32 selector = src<u32>(w, i, meta + 1)[0];
    for (int lane = 0; lane < LANES; lane++)
        for (int bit = 0; bit < 32 && (bytes == 1 || lane % 4 / 2 == int(selector)); bit += 4)
            if ((words[lane] >> bit & 3) > (words[lane] >> (bit + 2) & 3))
                fail("metadata of lane ", lane, ": places of a group do not ascend");
    expand(words, selector, bytes, [&](int row, int j) { return stored[row][j]; }, a);
    for (int r = 0; r < 4; r++)
        for (int t = 0; t < LANES; t++) {
            u32 word = src<u32>(w, i, 8 + r)[t];
            for (int e = 0; e < 4 / bytes; e++)
                b[((4 * (t % 4) + 16 * r) / bytes + e) * 8 + t / 4] = decode(f, (u8*)&word + e * bytes);
        }
    multiply(w, i, 0, c, 8, k, a, b, true, false);
    return DONE;
}

// -- wgmma -----------------------------------------------------------------------------------------------------

struct Matrix {  // what a descriptor says of an operand in shared memory
    u32 start, leading, stride, swizzle;  // bytes; swizzle 0, 32, 64 or 128
    bool transposed;
};

static Matrix matrix_of(u64 descriptor, bool transposed) {
    static const u32 widths[] = {0, 128, 64, 32};
    auto field = [&](int shift) { return u32(descriptor >> shift & 0x3fff) << 4; };
    if (descriptor >> 49 & 7) fail("a matrix descriptor with a base offset is not emulated");
    return {field(0), field(16), field(32), widths[descriptor >> 62], transposed};
}

// Address of the 16 bytes that begin at byte `byte` of row `row`: a row is one of the operand, its bytes along K; of a
// transposed operand (K-major no longer) a row is one of K, its bytes along M or N.
static u32 chunk_address(const Matrix& m, u32 row, u32 byte) {
    u32 width = m.swizzle, at;
    if (width == 0) {
        u32 over_rows = m.transposed ? m.leading : m.stride, along = m.transposed ? m.stride : m.leading;
        return m.start + row / 8 * over_rows + row % 8 * 16 + byte / 16 * along;
    }
    at = m.start + row / 8 * m.stride + row % 8 * width + byte / width * m.leading + byte % width;
    u32 bits = width / 16 - 1;  // 7, 3, 1
    return at ^ ((at >> 7 & bits) << 4);
}

// out[k][row] of rows `first` to `first + rows` of the operand.
static void read_matrix(Warp& w, const Matrix& m, u32 first, u32 rows, int k, Format f, float* out) {
    u32 bytes = format_bytes(f), per_chunk = 16 / bytes;
    u32 outer = m.transposed ? k : rows, outer0 = m.transposed ? 0 : first;
    u32 inner = m.transposed ? rows : k, inner0 = m.transposed ? first : 0;
    for (u32 r = 0; r < outer; r++)
        for (u32 c = 0; c < inner; c += per_chunk) {
            u32 address = chunk_address(m, outer0 + r, (inner0 + c) * bytes);
            const u8* at = shared_at(w, address, 16, 16);
            async_reads(w, *w.cta, address, 16);
            for (u32 e = 0; e < per_chunk; e++) {
                float x = decode(f, at + e * bytes);
                if (m.transposed) out[r * rows + c + e] = x;
                else out[(c + e) * rows + r] = x;
            }
        }
}

// wgmma.mma_async.m64n128k16.f32.bf16.bf16 {d}, a-desc or {a}, b-desc, scale-d, scale-a, scale-b (, tnsp-a, tnsp-b)
// wgmma.mma_async.sp.m64n128k32.f32.bf16.bf16, and k64 of 8 bits, has the metadata, and which lanes' are read, after b-desc.
static bool is_sparse(const Ins& i) { return i.name.find(".sp.") != std::string::npos; }

Step wgmma(Warp& w, const Ins& i, u32) {
    int nd = i.group[0], na = i.group[1], b = nd + na, p = b + 1 + 2 * is_sparse(i);
    if (w.cta->machine->block[0] < 128) fail("wgmma in a CTA of fewer than 128 threads");
    WgmmaCall call{&i, na == 1 ? src<u64>(w, i, nd)[0] : 0, src<u64>(w, i, b)[0], w.wgmma_group, bool(pred(w, i, p) & 1), {}};
    if (is_sparse(i)) {  // a register that must be left alone until a wait, as those of A: hardware was seen to read it late
        const u32* words = src<u32>(w, i, b + 1);
        call.metadata.assign(words, words + LANES);
        w.feeds[i.op[b + 1].offset / ROW] = w.wgmma_group + 1;
    }
    for (int k = 0; k < (na > 1 ? b : nd); k++) {
        u32 row = i.op[k].offset / ROW;
        if (w.written[row] == w.fences && (k >= nd || call.accumulate))
            fail("operand ", k, " was written after the last wgmma.fence");
        (k < nd ? w.accumulates : w.feeds)[row] = w.wgmma_group + 1;
    }
    w.unwaited = true;
    w.wgmmas.push_back(call);
    if (w.cta->machine->chance(25)) while (!w.wgmmas.empty()) land_one_wgmma(w);
    return DONE;
}

void land_one_wgmma(Warp& w) {
    WgmmaCall call = w.wgmmas.front();
    w.wgmmas.pop_front();
    const Ins& i = *call.ins;
    bool sparse = is_sparse(i);
    int nd = i.group[0], na = i.group[1], flags = nd + na + 2 + 2 * sparse;
    std::vector<std::string> part = split(i.name);
    if (sparse) part.erase(part.begin() + 2);
    size_t n_at = part[2].find('n'), k_at = part[2].find('k');
    int n = atoi(part[2].c_str() + n_at + 1), k = atoi(part[2].c_str() + k_at + 1);
    Format fa = format_named(part[4]), fb = format_named(part[5]);
    bool half = fp16_sums(i, part[3], fa, fb);
    if (n != (half ? 4 : 2) * nd) fail(i.name, " is not emulated");
    auto flag = [&](int index) { return flags + index < int(i.op.size()) ? src<i32>(w, i, flags + index)[0] : 0; };
    int sign = flag(0) * flag(1);
    static thread_local float rows[32 * 16], columns[64 * 256];
    float a[16][64];
    if (sparse) {
        if (na > 1 || format_bytes(fa) > 2) fail(i.name, " with such an A is not emulated");
        read_matrix(w, matrix_of(call.a, flag(2)), 16 * (w.number % 4), 16, k / 2, fa, rows);
        auto stored = [&](int row, int j) { return rows[j * 16 + row]; };
        expand(call.metadata.data(), src<u32>(w, i, nd + na + 2)[0], format_bytes(fa), stored, a);
    } else if (na > 1) a_from_registers(w, i, nd, na, fa, a);
    else {
        read_matrix(w, matrix_of(call.a, flag(2)), 16 * (w.number % 4), 16, k, fa, rows);
        for (int r = 0; r < 16; r++) for (int c = 0; c < k; c++) a[r][c] = rows[c * 16 + r];
    }
    read_matrix(w, matrix_of(call.b, na > 1 ? flag(2) : flag(3)), 0, n, k, fb, columns);
    if (sign < 0) for (auto& row : a) for (float& x : row) x = -x;
    multiply(w, i, 0, 0, n, k, a, columns, call.accumulate, half);
}

Step wgmma_commit(Warp& w, const Ins&, u32) {
    w.wgmma_group++;
    return DONE;
}

Step wgmma_wait(Warp& w, const Ins& i, u32) {
    u64 left = src<u64>(w, i, 0)[0], open = w.wgmma_group > left ? w.wgmma_group - left : 0;  // the first not waited for
    while (!w.wgmmas.empty() && w.wgmmas.front().group < open) land_one_wgmma(w);
    w.unwaited = false;
    for (auto* rows : {&w.accumulates, &w.feeds})
        for (u64& group : *rows) {
            if (group <= open) group = 0;
            else w.unwaited = true;
        }
    return DONE;
}

Step wgmma_fence(Warp& w, const Ins&, u32) {
    w.fences++;
    return DONE;
}

void add_tensor_cores(Table& t) {
    for (const char* type : {"bf16", "f16"})
        for (const char* k : {"k8", "k16"})
            t[std::string("mma.m16n8") + k + ".row.col.f32." + type + "." + type + ".f32"] = {mma, true};
    for (const char* type : {"bf16", "f16"})
        t[std::string("mma.sp::ordered_metadata.m16n8k32.row.col.f32.") + type + "." + type + ".f32"] = {sparse_mma, true};
    for (const char* type : {"e4m3", "e5m2"})
        t[std::string("mma.sp::ordered_metadata.m16n8k64.row.col.f32.") + type + "." + type + ".f32"] = {sparse_mma, true};
    for (const char* k : {"k8", "k16"}) t[std::string("mma.m16n8") + k + ".row.col.f16.f16.f16.f16"] = {mma, true};
    for (const char* k : {"k4", "k8"}) t[std::string("mma.m16n8") + k + ".row.col.f32.tf32.tf32.f32"] = {mma, true};
    for (const char* a : {"e4m3", "e5m2"})
        for (const char* b : {"e4m3", "e5m2"})
            for (const char* k : {"k16", "k32"})
                t[std::string("mma.m16n8") + k + ".row.col.f32." + a + "." + b + ".f32"] = {mma, true};
    for (int n = 8; n <= 256; n += 8) {
        std::string shape = "wgmma.mma_async.m64n" + std::to_string(n);
        for (const char* type : {"bf16", "f16"}) {
            t[shape + "k16.f32." + type + "." + type] = {wgmma, true};
            t["wgmma.mma_async.sp.m64n" + std::to_string(n) + "k32.f32." + type + "." + type] = {wgmma, true};
        }
        t[shape + "k16.f16.f16.f16"] = {wgmma, true};
        t[shape + "k8.f32.tf32.tf32"] = {wgmma, true};
        for (const char* a : {"e4m3", "e5m2"})
            for (const char* b : {"e4m3", "e5m2"}) {
                t[shape + "k32.f32." + a + "." + b] = {wgmma, true};
                t["wgmma.mma_async.sp.m64n" + std::to_string(n) + "k64.f32." + a + "." + b] = {wgmma, true};
            }
    }
    t["wgmma.fence"] = {wgmma_fence, true};
    t["wgmma.commit_group"] = {wgmma_commit, true};
    t["wgmma.wait_group"] = {wgmma_wait, true};
}
