// cvt, and changes of address space.
#include <algorithm>
#include <limits>

#include "floats.h"

typedef int8_t i8;

template <class D, class A> Step integer(Warp& w, const Ins& i, u32 m) {  // 8 bits live in a wider register
    EACH_LANE(l, m) set_int(w, i, 0, l, u64(i64(D(A(get_int(w, i, 1, l))))));
    return DONE;
}

template <class D, class A> Step to_float(Warp& w, const Ins& i, u32 m) {
    const A* a = src<A>(w, i, 1);
    EACH_LANE(l, m) dst<D>(w, i, 0)[l] = D(a[l]);
    return DONE;
}

template <class D, class A, auto ROUND> Step to_integer(Warp& w, const Ins& i, u32 m) {
    const A* a = src<A>(w, i, 1);
    D* d = dst<D>(w, i, 0);
    EACH_LANE(l, m) {
        double x = ROUND(double(a[l]));
        constexpr double low = double(std::numeric_limits<D>::min()), high = double(std::numeric_limits<D>::max());
        d[l] = x != x ? D(0) : x <= low ? std::numeric_limits<D>::min() : x >= high ? std::numeric_limits<D>::max() : D(x);
    }
    return DONE;
}

template <auto F> Step float_to_float(Warp& w, const Ins& i, u32 m) {
    const float* a = src<float>(w, i, 1);
    EACH_LANE(l, m) dst<float>(w, i, 0)[l] = F(a[l]);
    return DONE;
}

template <u16 (*TO)(float)> Step narrow(Warp& w, const Ins& i, u32 m) {
    bool relu = i.name.find(".relu") != std::string::npos;
    const float* a = src<float>(w, i, 1);
    EACH_LANE(l, m) dst<u16>(w, i, 0)[l] = TO(relu && a[l] < 0 ? 0.f : a[l]);
    return DONE;
}

template <u16 (*TO)(float)> Step narrow_two(Warp& w, const Ins& i, u32 m) {
    bool relu = i.name.find(".relu") != std::string::npos;
    const float *high = src<float>(w, i, 1), *low = src<float>(w, i, 2);
    auto f = [&](float x) { return TO(relu && x < 0 ? 0.f : x); };
    EACH_LANE(l, m) dst<u32>(w, i, 0)[l] = u32(f(high[l])) << 16 | f(low[l]);
    return DONE;
}

template <float (*FROM)(u16)> Step widen(Warp& w, const Ins& i, u32 m) {
    const u16* a = src<u16>(w, i, 1);
    EACH_LANE(l, m) dst<float>(w, i, 0)[l] = FROM(a[l]);
    return DONE;
}

template <int E, int M> Step to_fp8(Warp& w, const Ins& i, u32 m) {
    const float *high = src<float>(w, i, 1), *low = src<float>(w, i, 2);
    auto f = [](float x) { return to_small(x, E, M, E == 5, true); };
    EACH_LANE(l, m) dst<u16>(w, i, 0)[l] = u16(f(high[l]) << 8 | f(low[l]));
    return DONE;
}

template <int E, int M> Step from_fp8(Warp& w, const Ins& i, u32 m) {  // two at once, to f16x2
    const u16* a = src<u16>(w, i, 1);
    auto f = [](u32 b) { return u32(to_f16(from_small(b & 255, E, M, E == 5))); };
    EACH_LANE(l, m) dst<u32>(w, i, 0)[l] = f(a[l] >> 8) << 16 | f(a[l]);
    return DONE;
}

Step to_tf32(Warp& w, const Ins& i, u32 m) {
    const u32* a = src<u32>(w, i, 1);
    bool even = i.name.find(".rn.") != std::string::npos;
    EACH_LANE(l, m) dst<u32>(w, i, 0)[l] = rounded_to_tf32(a[l], even);
    return DONE;
}

Step same_address(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) dst<u64>(w, i, 0)[l] = src<u64>(w, i, 1)[l];
    return DONE;
}

Step shared_to_generic(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) dst<u64>(w, i, 0)[l] = GENERIC_SHARED | (src<u64>(w, i, 1)[l] & ~0u);
    return DONE;
}

Step generic_to_shared(Warp& w, const Ins& i, u32 m) {
    EACH_LANE(l, m) {
        u64 a = src<u64>(w, i, 1)[l];
        if ((a & ~u64(~0u)) != GENERIC_SHARED) fail("address 0x", std::hex, a, " is not one of shared memory");
        dst<u64>(w, i, 0)[l] = a & ~0u;
    }
    return DONE;
}

template <class D, class... A> void integers_from(Table& t, const std::string& d, A...) {
    (void)std::initializer_list<int>{(t["cvt." + d + "." + (std::is_signed_v<A> ? "s" : "u") +
                                        std::to_string(8 * sizeof(A))] = {integer<D, A>}, 0)...};
}

template <class T> void float_and_integer(Table& t, const std::string& s) {
    for (const std::string& f : {std::string("f32"), std::string("f64")}) {
        bool wide = f == "f64";
        t["cvt.rn." + f + "." + s] = {wide ? to_float<double, T> : to_float<float, T>};
        t["cvt." + f + "." + s] = t["cvt.rn." + f + "." + s];
    }
    for (const std::string& z : {std::string(""), std::string(".ftz")}) {
        std::string tail = z + "." + s + ".f32";
        t["cvt.rzi" + tail] = {to_integer<T, float, [](double x) { return std::trunc(x); }>};
        t["cvt.rni" + tail] = {to_integer<T, float, [](double x) { return std::nearbyint(x); }>};
        t["cvt.rmi" + tail] = {to_integer<T, float, [](double x) { return std::floor(x); }>};
        t["cvt.rpi" + tail] = {to_integer<T, float, [](double x) { return std::ceil(x); }>};
    }
}

void add_conversions(Table& t) {
    auto from_all = [&](auto zero, const std::string& name) {
        integers_from<decltype(zero)>(t, name, i8(), u8(), i16(), u16(), i32(), u32(), i64(), u64());
    };
    from_all(i8(0), "s8"); from_all(u8(), "u8"); from_all(i16(), "s16"); from_all(u16(), "u16");
    from_all(i32(), "s32"); from_all(u32(), "u32"); from_all(i64(), "s64"); from_all(u64(), "u64");
    float_and_integer<i32>(t, "s32"); float_and_integer<u32>(t, "u32");
    float_and_integer<i64>(t, "s64"); float_and_integer<u64>(t, "u64");
    float_and_integer<i16>(t, "s16"); float_and_integer<u16>(t, "u16");
    for (const std::string& z : {std::string(""), std::string(".ftz")}) {
        t["cvt.rzi" + z + ".f32.f32"] = {float_to_float<[](float x) { return std::trunc(x); }>};
        t["cvt.rni" + z + ".f32.f32"] = {float_to_float<[](float x) { return std::nearbyint(x); }>};
        t["cvt.rmi" + z + ".f32.f32"] = {float_to_float<[](float x) { return std::floor(x); }>};
        t["cvt.rpi" + z + ".f32.f32"] = {float_to_float<[](float x) { return std::ceil(x); }>};
    }
    t["cvt.sat.f32.f32"] = {float_to_float<[](float x) { return 0 < x ? std::min(x, 1.f) : 0.f; }>};
    t["cvt.f64.f32"] = {to_float<double, float>};
    t["cvt.rn.f32.f64"] = {to_float<float, double>};
    for (const std::string& r : {std::string("cvt.rn."), std::string("cvt.rn.relu.")}) {
        t[r + "bf16.f32"] = {narrow<to_bf16>};
        t[r + "f16.f32"] = {narrow<to_f16>};
        t[r + "bf16x2.f32"] = {narrow_two<to_bf16>};
        t[r + "f16x2.f32"] = {narrow_two<to_f16>};
    }
    t["cvt.f32.bf16"] = {widen<from_bf16>};
    t["cvt.f32.f16"] = {widen<from_f16>};
    t["cvt.rn.satfinite.e4m3x2.f32"] = {to_fp8<4, 3>};
    t["cvt.rn.satfinite.e5m2x2.f32"] = {to_fp8<5, 2>};
    t["cvt.rn.f16x2.e4m3x2"] = {from_fp8<4, 3>};
    t["cvt.rn.f16x2.e5m2x2"] = {from_fp8<5, 2>};
    t["cvt.rna.tf32.f32"] = t["cvt.rn.tf32.f32"] = {to_tf32};
    for (const char* space : {"global", "param", "const", "local"}) {
        t[std::string("cvta.") + space + ".u64"] = {same_address};
        t[std::string("cvta.to.") + space + ".u64"] = {same_address};
    }
    for (const std::string& space : {std::string("shared"), std::string("shared::cta"), std::string("shared::cluster")}) {
        t["cvta." + space + ".u64"] = {shared_to_generic};
        t["cvta.to." + space + ".u64"] = {generic_to_shared};
    }
}
