// Conversions between fp32 and the narrow formats, rounding to nearest even.
#pragma once
#include <cmath>
#include <cstring>

#include "machine.h"

inline float as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
inline u32 as_bits(float f) { u32 b; memcpy(&b, &f, 4); return b; }
inline float from_bf16(u16 h) { return as_float(u32(h) << 16); }
inline u16 to_bf16(float f) {
    u32 b = as_bits(f);
    if (f != f) return 0x7fff;
    return u16((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

// The bits of the nearest number with 10 bits of mantissa; of two the even one, or the larger magnitude. Infinities and
// NaN are left alone.
inline u32 rounded_to_tf32(u32 b, bool even) {
    bool special = (b & 0x7f800000) == 0x7f800000;
    return special ? b : (b + (even ? 0xfff + (b >> 13 & 1) : 0x1000)) & ~0x1fffu;
}

// A format of `e` exponent and `m` mantissa bits with subnormals. No infinity (as e4m3): its place holds numbers, and
// only all ones are NaN.
inline float from_small(u32 bits, int e, int m, bool infinity) {
    u32 sign = bits >> (e + m) & 1, exponent = bits >> m & ((1u << e) - 1), mantissa = bits & ((1u << m) - 1);
    int bias = (1 << (e - 1)) - 1;
    float value;
    if (infinity && exponent == (1u << e) - 1) value = mantissa ? NAN : INFINITY;
    else if (!infinity && exponent == (1u << e) - 1 && mantissa == (1u << m) - 1) value = NAN;
    else if (exponent == 0) value = std::ldexp(float(mantissa), 1 - bias - m);
    else value = std::ldexp(float(mantissa | 1u << m), int(exponent) - bias - m);
    return sign ? -value : value;
}

inline u32 to_small(float f, int e, int m, bool infinity, bool saturate) {
    u32 sign = (as_bits(f) >> 31) << (e + m), ones = (1u << e) - 1;
    if (f != f) return infinity ? sign | (ones << m) | (1u << (m - 1)) : sign | (ones << m) | ((1u << m) - 1);
    int bias = (1 << (e - 1)) - 1;
    u32 most = infinity ? ((ones - 1) << m) | ((1u << m) - 1) : (ones << m) | ((1u << m) - 2);
    float a = std::fabs(f);
    u32 over = saturate ? most : infinity ? ones << m : (ones << m) | ((1u << m) - 1);
    if (std::isinf(a)) return sign | over;
    if (a == 0) return sign;
    int exponent = std::max(std::ilogb(a), 1 - bias);
    double scaled = std::ldexp(double(a), m - exponent);     // 1 <= scaled / 2^m < 2, or below for subnormals
    double rounded = std::nearbyint(scaled);
    u32 code = u32(rounded) + (u32(exponent + bias - 1) << m);  // a carry moves on to the exponent
    return sign | (code > most ? over : code);
}

inline float from_f16(u16 h) { return from_small(h, 5, 10, true); }
inline u16 to_f16(float f) { return u16(to_small(f, 5, 10, true, false)); }
inline float canonical(float x) { return x != x ? as_float(0x7fffffff) : x; }
inline double canonical(double x) { return x; }
inline float flush(float f) { return std::fabs(f) < 1.17549435e-38f ? std::copysign(0.f, f) : canonical(f); }

enum Format { BF16, F16, TF32, E4M3, E5M2 };
inline int format_bytes(Format f) { return f <= F16 ? 2 : f == TF32 ? 4 : 1; }
inline float decode(Format f, const u8* at) {
    u16 h; u32 w;
    switch (f) {
        case BF16: memcpy(&h, at, 2); return from_bf16(h);
        case F16: memcpy(&h, at, 2); return from_f16(h);
        case TF32: memcpy(&w, at, 4); return as_float(w & ~0x1fffu);
        case E4M3: return from_small(*at, 4, 3, false);
        default: return from_small(*at, 5, 2, true);
    }
}
