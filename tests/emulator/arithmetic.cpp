// Instructions that compute registers from registers.
#include <algorithm>

#include "floats.h"

template <class D, class A, auto F> Step unary(Warp& w, const Ins& i, u32 m) {
    D* d = dst<D>(w, i, 0);
    const A* a = src<A>(w, i, 1);
    EACH_LANE(l, m) d[l] = F(a[l]);
    return DONE;
}

template <class D, class A, class B, auto F> Step binary(Warp& w, const Ins& i, u32 m) {
    D* d = dst<D>(w, i, 0);
    const A* a = src<A>(w, i, 1);
    const B* b = src<B>(w, i, 2);
    if (m == ~0u) for (int l = 0; l < LANES; l++) d[l] = F(a[l], b[l]);
    else EACH_LANE(l, m) d[l] = F(a[l], b[l]);
    return DONE;
}

template <class D, class A, class C, auto F> Step ternary(Warp& w, const Ins& i, u32 m) {
    D* d = dst<D>(w, i, 0);
    const A *a = src<A>(w, i, 1), *b = src<A>(w, i, 2);
    const C* c = src<C>(w, i, 3);
    EACH_LANE(l, m) d[l] = F(a[l], b[l], c[l]);
    return DONE;
}

// setp: one or two predicates, "p|q", of which the second is the first one's opposite; .and/.or/.xor with another.
static void put_predicates(Warp& w, const Ins& i, u32 m, u32 bits) {
    int first = i.group[0];
    auto combined = [&](u32 x) {
        if (int(i.op.size()) == first + 2) return x;
        u32 other = pred(w, i, first + 2);
        return i.name.find(".and.") != std::string::npos ? x & other
               : i.name.find(".or.") != std::string::npos ? x | other : x ^ other;
    };
    set_pred(w, i, 0, m, combined(bits));
    if (first == 2) set_pred(w, i, 1, m, combined(~bits));
}

template <class T, auto F> Step compare(Warp& w, const Ins& i, u32 m) {
    int first = i.group[0];
    const T *a = src<T>(w, i, first), *b = src<T>(w, i, first + 1);
    u32 bits = 0;
    EACH_LANE(l, m) bits |= u32(bool(F(a[l], b[l]))) << l;
    put_predicates(w, i, m, bits);
    return DONE;
}

template <auto F> Step pred_binary(Warp& w, const Ins& i, u32 m) {
    set_pred(w, i, 0, m, F(pred(w, i, 1), pred(w, i, 2)));
    return DONE;
}

template <bool NOT> Step pred_unary(Warp& w, const Ins& i, u32 m) {
    set_pred(w, i, 0, m, NOT ? ~pred(w, i, 1) : pred(w, i, 1));
    return DONE;
}

template <class T> Step select(Warp& w, const Ins& i, u32 m) {
    T* d = dst<T>(w, i, 0);
    const T *a = src<T>(w, i, 1), *b = src<T>(w, i, 2);
    u32 p = pred(w, i, 3);
    EACH_LANE(l, m) d[l] = p >> l & 1 ? a[l] : b[l];
    return DONE;
}

// mov, and mov between a register and a vector of narrower ones: "mov.b64 {%r1, %r2}, %rd1".
template <class T> Step move(Warp& w, const Ins& i, u32 m) {
    int nd = i.group[0], ns = i.group[1];
    auto part = [&](auto zero, int wide, int narrow, int parts, bool split) {
        typedef decltype(zero) N;
        for (int k = 0; k < parts; k++) {
            if (split) EACH_LANE(l, m) dst<N>(w, i, narrow + k)[l] = N(src<T>(w, i, wide)[l] >> (k * 8 * sizeof(N)));
            else EACH_LANE(l, m) {
                T& d = dst<T>(w, i, wide)[l];
                d = (k ? d : T(0)) | T(src<N>(w, i, narrow + k)[l]) << (k * 8 * sizeof(N));
            }
        }
    };
    if (nd == 1 && ns == 1) {
        T* d = dst<T>(w, i, 0);
        const T* a = src<T>(w, i, 1);
        EACH_LANE(l, m) d[l] = a[l];
        return DONE;
    }
    bool split = nd > 1;
    int parts = split ? nd : ns, wide = split ? nd : 0, narrow = split ? 0 : 1;
    switch (sizeof(T) / parts) {
        case 4: part(u32(), wide, narrow, parts, split); break;
        case 2: part(u16(), wide, narrow, parts, split); break;
        default: part(u8(), wide, narrow, parts, split);
    }
    return DONE;
}

Step prmt(Warp& w, const Ins& i, u32 m) {
    u32* d = dst<u32>(w, i, 0);
    const u32 *a = src<u32>(w, i, 1), *b = src<u32>(w, i, 2), *c = src<u32>(w, i, 3);
    EACH_LANE(l, m) {
        u64 both = a[l] | u64(b[l]) << 32;
        u32 out = 0;
        for (int k = 0; k < 4; k++) {
            u32 pick = c[l] >> (4 * k), byte = both >> (8 * (pick & 7)) & 255;
            out |= (pick & 8 ? (byte & 128 ? 255 : 0) : byte) << (8 * k);
        }
        d[l] = out;
    }
    return DONE;
}

template <bool LEFT> Step funnel(Warp& w, const Ins& i, u32 m) {
    u32* d = dst<u32>(w, i, 0);
    const u32 *a = src<u32>(w, i, 1), *b = src<u32>(w, i, 2), *c = src<u32>(w, i, 3);
    bool wrap = i.name.find(".wrap") != std::string::npos;
    EACH_LANE(l, m) {
        u64 both = a[l] | u64(b[l]) << 32;
        u32 n = wrap ? c[l] & 31 : std::min(c[l], 32u);
        d[l] = LEFT ? u32(both << n >> 32) : u32(both >> n);
    }
    return DONE;
}

template <class T> T divide(T a, T b) { return b == 0 ? T(-1) : b == T(-1) && T(-1) < T(0) ? T(0) - a : a / b; }
template <class T> T remain(T a, T b) { return b == 0 ? a : b == T(-1) && T(-1) < T(0) ? T(0) : a % b; }

template <class T, class WIDE> void integers(Table& t, const std::string& s) {
    constexpr int bits = 8 * sizeof(T);
    typedef std::make_unsigned_t<T> U;
    t["add." + s] = {binary<T, T, T, [](T a, T b) { return T(U(a) + U(b)); }>};
    t["sub." + s] = {binary<T, T, T, [](T a, T b) { return T(U(a) - U(b)); }>};
    t["mul.lo." + s] = {binary<T, T, T, [](T a, T b) { return T(WIDE(a) * WIDE(b)); }>};
    t["mul.hi." + s] = {binary<T, T, T, [](T a, T b) { return T((WIDE(a) * WIDE(b)) >> bits); }>};
    t["mad.lo." + s] = {ternary<T, T, T, [](T a, T b, T c) { return T(WIDE(a) * WIDE(b) + WIDE(c)); }>};
    t["mad.hi." + s] = {ternary<T, T, T, [](T a, T b, T c) { return T(U((WIDE(a) * WIDE(b)) >> bits) + U(c)); }>};
    if constexpr (bits < 64) {
        t["mul.wide." + s] = {binary<WIDE, T, T, [](T a, T b) { return WIDE(a) * WIDE(b); }>};
        t["mad.wide." + s] = {ternary<WIDE, T, WIDE, [](T a, T b, WIDE c) { return WIDE(a) * WIDE(b) + c; }>};
    }
    t["div." + s] = {binary<T, T, T, divide<T>>};
    t["rem." + s] = {binary<T, T, T, remain<T>>};
    t["min." + s] = {binary<T, T, T, [](T a, T b) { return std::min(a, b); }>};
    t["max." + s] = {binary<T, T, T, [](T a, T b) { return std::max(a, b); }>};
    t["min.relu." + s] = {binary<T, T, T, [](T a, T b) { return std::max(std::min(a, b), T(0)); }>};
    t["max.relu." + s] = {binary<T, T, T, [](T a, T b) { return std::max(std::max(a, b), T(0)); }>};
    t["neg." + s] = {unary<T, T, [](T a) { return T(U(0) - U(a)); }>};
    t["abs." + s] = {unary<T, T, [](T a) { return a < T(0) ? T(U(0) - U(a)) : a; }>};
    t["shr." + s] = {binary<T, T, u32, [](T a, u32 n) { return n < bits ? T(a >> n) : a < T(0) ? T(-1) : T(0); }>};
}

template <class T> void bits_of(Table& t, const std::string& s) {
    constexpr u32 width = 8 * sizeof(T);
    t["and." + s] = {binary<T, T, T, [](T a, T b) { return T(a & b); }>};
    t["or." + s] = {binary<T, T, T, [](T a, T b) { return T(a | b); }>};
    t["xor." + s] = {binary<T, T, T, [](T a, T b) { return T(a ^ b); }>};
    t["not." + s] = {unary<T, T, [](T a) { return T(~a); }>};
    t["shl." + s] = {binary<T, T, u32, [](T a, u32 n) { return n < width ? T(a << n) : T(0); }>};
    t["shr." + s] = {binary<T, T, u32, [](T a, u32 n) { return n < width ? T(a >> n) : T(0); }>};
    for (const char* kind : {"b", "u", "s", "f"}) {
        t["selp." + (kind + s.substr(1))] = {select<T>};
        t["mov." + (kind + s.substr(1))] = {move<T>};
    }
}

template <class T, bool IS_FLOAT> void comparisons(Table& t, const std::string& s) {
#define COMPARE(NAME, EXPRESSION) \
    for (const char* how : {"", ".and", ".or", ".xor"}) \
        t[std::string("setp." NAME) + how + "." + s] = {compare<T, [](T a, T b) { return (EXPRESSION); }>};
    COMPARE("eq", a == b) COMPARE("lt", a < b) COMPARE("le", a <= b) COMPARE("gt", a > b) COMPARE("ge", a >= b)
    COMPARE("ne", a != b && a == a && b == b)
    if (IS_FLOAT) {
        COMPARE("equ", !(a < b || a > b)) COMPARE("neu", !(a == b)) COMPARE("ltu", !(a >= b)) COMPARE("leu", !(a > b))
        COMPARE("gtu", !(a <= b)) COMPARE("geu", !(a < b)) COMPARE("nan", a != a || b != b)
        COMPARE("num", a == a && b == b)
    } else {
        COMPARE("lo", a < b) COMPARE("ls", a <= b) COMPARE("hi", a > b) COMPARE("hs", a >= b)
    }
#undef COMPARE
}

template <class T> T larger(T a, T b) { return a != a ? b : b != b ? a : a > b || (a == b && !std::signbit(a)) ? a : b; }
template <class T> T smaller(T a, T b) { return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b; }
// A result in FP32 that is NaN has the bits of floats.h, whatever the operands were; in FP64 they are left alone.
template <class T> T or_nan(T a, T b, T c) { return a != a || b != b ? canonical(T(NAN)) : c; }

template <class T> void floats(Table& t, const std::string& s) {
    t["add." + s] = {binary<T, T, T, [](T a, T b) { return canonical(a + b); }>};
    t["sub." + s] = {binary<T, T, T, [](T a, T b) { return canonical(a - b); }>};
    t["mul." + s] = {binary<T, T, T, [](T a, T b) { return canonical(a * b); }>};
    t["div." + s] = t["div.full." + s] = t["div.approx." + s] = {binary<T, T, T, [](T a, T b) { return a / b; }>};
    t["fma." + s] = {ternary<T, T, T, [](T a, T b, T c) { return canonical(std::fma(a, b, c)); }>};
    t["min." + s] = {binary<T, T, T, smaller<T>>};
    t["max." + s] = {binary<T, T, T, larger<T>>};
    t["min.NaN." + s] = {binary<T, T, T, [](T a, T b) { return or_nan(a, b, smaller(a, b)); }>};
    t["max.NaN." + s] = {binary<T, T, T, [](T a, T b) { return or_nan(a, b, larger(a, b)); }>};
    t["neg." + s] = {unary<T, T, [](T a) { return -a; }>};
    t["abs." + s] = {unary<T, T, [](T a) { return std::fabs(a); }>};
    t["copysign." + s] = {binary<T, T, T, [](T a, T b) { return std::copysign(b, a); }>};
    t["sqrt." + s] = t["sqrt.approx." + s] = {unary<T, T, [](T a) { return std::sqrt(a); }>};
    t["rcp." + s] = t["rcp.approx." + s] = {unary<T, T, [](T a) { return T(1) / a; }>};
    t["rsqrt.approx." + s] = {unary<T, T, [](T a) { return T(1) / std::sqrt(a); }>};
    comparisons<T, true>(t, s);
}

// Arithmetic of packed or single 16-bit floats: computed in fp32, then rounded once.
template <u16 (*TO)(float), float (*FROM)(u16), auto F> Step halves(Warp& w, const Ins& i, u32 m) {
    bool packed = i.name.back() == '2';
    int operands = int(i.op.size()) - 1;
    EACH_LANE(l, m) for (int h = 0; h <= packed; h++) {
        float x[3] = {};
        for (int k = 0; k < operands; k++)
            x[k] = FROM(packed ? u16(src<u32>(w, i, k + 1)[l] >> (16 * h)) : src<u16>(w, i, k + 1)[l]);
        u16 r = TO(F(x[0], x[1], x[2]));
        if (packed) {
            u32& d = dst<u32>(w, i, 0)[l];
            u32 other = h ? d & 0xffff : d & 0xffff0000;
            d = other | u32(r) << (16 * h);
        } else dst<u16>(w, i, 0)[l] = r;
    }
    return DONE;
}

template <float (*FROM)(u16)> struct Half {  // only to be compared
    u16 bits;
    float value() const { return FROM(bits); }
    bool operator==(Half o) const { return value() == o.value(); }
    bool operator!=(Half o) const { return value() != o.value(); }
    bool operator<(Half o) const { return value() < o.value(); }
    bool operator<=(Half o) const { return value() <= o.value(); }
    bool operator>(Half o) const { return value() > o.value(); }
    bool operator>=(Half o) const { return value() >= o.value(); }
};

template <u16 (*TO)(float), float (*FROM)(u16)> void half_floats(Table& t, const std::string& s) {
    for (const std::string& k : {s, s + "x2"}) {
        t["add." + k] = {halves<TO, FROM, [](float a, float b, float) { return a + b; }>};
        t["sub." + k] = {halves<TO, FROM, [](float a, float b, float) { return a - b; }>};
        t["mul." + k] = {halves<TO, FROM, [](float a, float b, float) { return a * b; }>};
        t["fma." + k] = {halves<TO, FROM, [](float a, float b, float c) { return float(double(a) * b + c); }>};
        t["fma.relu." + k] = {halves<TO, FROM, [](float a, float b, float c) {
            return larger(0.f, float(double(a) * b + c)); }>};
        t["min." + k] = {halves<TO, FROM, [](float a, float b, float) { return smaller(a, b); }>};
        t["max." + k] = {halves<TO, FROM, [](float a, float b, float) { return larger(a, b); }>};
        t["max.NaN." + k] = {halves<TO, FROM, [](float a, float b, float) { return or_nan(a, b, larger(a, b)); }>};
        t["neg." + k] = {halves<TO, FROM, [](float a, float, float) { return -a; }>};
        t["abs." + k] = {halves<TO, FROM, [](float a, float, float) { return std::fabs(a); }>};
        t["tanh.approx." + k] = {halves<TO, FROM, [](float a, float, float) { return std::tanh(a); }>};
        t["ex2.approx." + k] = {halves<TO, FROM, [](float a, float, float) { return std::exp2(a); }>};
    }
    comparisons<Half<FROM>, true>(t, s);
}

void add_arithmetic(Table& t) {
    bits_of<u16>(t, "b16"); bits_of<u32>(t, "b32"); bits_of<u64>(t, "b64");
    integers<i16, i32>(t, "s16"); integers<i32, i64>(t, "s32"); integers<i64, __int128>(t, "s64");
    integers<u16, u32>(t, "u16"); integers<u32, u64>(t, "u32"); integers<u64, unsigned __int128>(t, "u64");
    floats<float>(t, "f32"); floats<double>(t, "f64");
    half_floats<to_bf16, from_bf16>(t, "bf16"); half_floats<to_f16, from_f16>(t, "f16");
    comparisons<i16, false>(t, "s16"); comparisons<i32, false>(t, "s32"); comparisons<i64, false>(t, "s64");
    comparisons<u16, false>(t, "u16"); comparisons<u32, false>(t, "u32"); comparisons<u64, false>(t, "u64");
    comparisons<u16, false>(t, "b16"); comparisons<u32, false>(t, "b32"); comparisons<u64, false>(t, "b64");
    t["add.ftz.f32"] = {binary<float, float, float, [](float a, float b) { return flush(flush(a) + flush(b)); }>};
    t["sub.ftz.f32"] = {binary<float, float, float, [](float a, float b) { return flush(flush(a) - flush(b)); }>};
    t["mul.ftz.f32"] = {binary<float, float, float, [](float a, float b) { return flush(flush(a) * flush(b)); }>};
    t["fma.ftz.f32"] = {ternary<float, float, float, [](float a, float b, float c) {
        return flush(std::fma(flush(a), flush(b), flush(c))); }>};
    // Of ptx.py's fuse.
    t["fms.f32"] = {ternary<float, float, float, [](float a, float b, float c) {
        return canonical(std::fma(a, b, -c)); }>};
    t["fnma.f32"] = {ternary<float, float, float, [](float a, float b, float c) {
        return canonical(std::fma(-a, b, c)); }>};
    t["fms.ftz.f32"] = {ternary<float, float, float, [](float a, float b, float c) {
        return flush(std::fma(flush(a), flush(b), -flush(c))); }>};
    t["fnma.ftz.f32"] = {ternary<float, float, float, [](float a, float b, float c) {
        return flush(std::fma(-flush(a), flush(b), flush(c))); }>};
    t["max.ftz.f32"] = {binary<float, float, float, [](float a, float b) { return larger(flush(a), flush(b)); }>};
    t["min.ftz.f32"] = {binary<float, float, float, [](float a, float b) { return smaller(flush(a), flush(b)); }>};
    t["div.approx.ftz.f32"] = t["div.full.ftz.f32"] = {binary<float, float, float, [](float a, float b) {
        return flush(flush(a) / flush(b)); }>};
    t["ex2.approx.f32"] = {unary<float, float, [](float a) { return std::exp2(a); }>};
    t["lg2.approx.f32"] = {unary<float, float, [](float a) { return std::log2(a); }>};
    t["sin.approx.f32"] = {unary<float, float, [](float a) { return std::sin(a); }>};
    t["cos.approx.f32"] = {unary<float, float, [](float a) { return std::cos(a); }>};
    t["tanh.approx.f32"] = {unary<float, float, [](float a) { return std::tanh(a); }>};
    t["ex2.approx.ftz.f32"] = {unary<float, float, [](float a) { return flush(std::exp2(flush(a))); }>};
    t["lg2.approx.ftz.f32"] = {unary<float, float, [](float a) { return std::log2(flush(a)); }>};
    t["rcp.approx.ftz.f32"] = {unary<float, float, [](float a) { return flush(1 / flush(a)); }>};
    t["rsqrt.approx.ftz.f32"] = {unary<float, float, [](float a) { return 1 / std::sqrt(flush(a)); }>};
    t["sqrt.approx.ftz.f32"] = {unary<float, float, [](float a) { return std::sqrt(flush(a)); }>};
    t["and.pred"] = {pred_binary<[](u32 a, u32 b) { return a & b; }>};
    t["or.pred"] = {pred_binary<[](u32 a, u32 b) { return a | b; }>};
    t["xor.pred"] = {pred_binary<[](u32 a, u32 b) { return a ^ b; }>};
    t["not.pred"] = {pred_unary<true>};
    t["mov.pred"] = {pred_unary<false>};
    t["popc.b32"] = {unary<u32, u32, [](u32 a) { return u32(__builtin_popcount(a)); }>};
    t["popc.b64"] = {unary<u32, u64, [](u64 a) { return u32(__builtin_popcountll(a)); }>};
    t["clz.b32"] = {unary<u32, u32, [](u32 a) { return a ? u32(__builtin_clz(a)) : 32u; }>};
    t["bfind.u32"] = {unary<u32, u32, [](u32 a) { return a ? u32(31 - __builtin_clz(a)) : ~0u; }>};
    t["brev.b32"] = {unary<u32, u32, [](u32 a) {
        u32 r = 0;
        for (int k = 0; k < 32; k++) r |= (a >> k & 1) << (31 - k);
        return r; }>};
    t["prmt.b32"] = {prmt};
    for (const char* how : {".wrap", ".clamp"}) {
        t["shf.l" + std::string(how) + ".b32"] = {funnel<true>};
        t["shf.r" + std::string(how) + ".b32"] = {funnel<false>};
    }
    for (auto it = t.begin(); it != t.end();) it = it->second.run ? std::next(it) : t.erase(it);
}
