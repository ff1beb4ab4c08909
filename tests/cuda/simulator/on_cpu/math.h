// Mathematical functions that CUDA has and C++ lacks. The fast variants are computed exactly: a GPU may differ by a few units in the last
// place.
#pragma once

using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

#define CUDA_ON_CPU_MIN_MAX(type)                                                                                                \
    inline type min(type a, type b) { return b < a ? b : a; }                                                                    \
    inline type max(type a, type b) { return a < b ? b : a; }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(unsigned)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned long min(unsigned long a, unsigned b) { return min(a, (unsigned long)(b)); }
inline unsigned long max(unsigned long a, unsigned b) { return max(a, (unsigned long)(b)); }
inline unsigned long min(unsigned a, unsigned long b) { return min((unsigned long)(a), b); }
inline unsigned long max(unsigned a, unsigned long b) { return max((unsigned long)(a), b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752440f); }
inline double normcdf(double x) { return 0.5 * erfc(-x * 0.70710678118654752440); }

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = sinf(x), *cosine = cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline float __saturatef(float x) { return x >= 0.0f ? fminf(x, 1.0f) : 0.0f; }

namespace cuda_on_cpu {
template <class To, class From> To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits are kept, not converted");
    To to;
    std::memcpy(&to, &value, sizeof to);
    return to;
}
} // namespace cuda_on_cpu

inline int __float_as_int(float x) { return cuda_on_cpu::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::bits<unsigned>(x); }
inline float __int_as_float(int x) { return cuda_on_cpu::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_on_cpu::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda_on_cpu::bits<double>(x); }

inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return unsigned(nearbyintf(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __double2float_rn(double x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int bit = 0; bit < 32; bit++) y |= (x >> bit & 1u) << (31 - bit);
    return y;
}
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned((unsigned long long)x * y >> 32); }
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline int __dp4a(int x, int y, int z) {
    for (int byte = 0; byte < 4; byte++) z += int((signed char)(x >> 8 * byte)) * int((signed char)(y >> 8 * byte));
    return z;
}

// Loads and stores with cache hints, which have no effect here.
template <class T> T __ldg(const T* place) { return *place; }
template <class T> T __ldcs(const T* place) { return *place; }
template <class T> T __ldcg(const T* place) { return *place; }
template <class T> T __ldca(const T* place) { return *place; }
template <class T> T __ldlu(const T* place) { return *place; }
template <class T> T __ldcv(const T* place) { return *place; }
template <class T> void __stcs(T* place, cuda_on_cpu::operand<T> value) { *place = value; }
template <class T> void __stcg(T* place, cuda_on_cpu::operand<T> value) { *place = value; }
template <class T> void __stwb(T* place, cuda_on_cpu::operand<T> value) { *place = value; }
template <class T> void __stwt(T* place, cuda_on_cpu::operand<T> value) { *place = value; }

inline long long clock64() { return 0; }
inline void __trap() {
    std::fprintf(stderr, "simulator: a kernel called __trap\n");
    std::abort();
}

// Functions of f16 and bf16: computed in f32, rounded once.
#define CUDA_ON_CPU_HALF(name, expression)                                                                                       \
    inline __half name(__half half) {                                                                                            \
        const float x = __half2float(half);                                                                                      \
        return __float2half(expression);                                                                                         \
    }                                                                                                                            \
    inline __nv_bfloat16 name(__nv_bfloat16 half) {                                                                              \
        const float x = __bfloat162float(half);                                                                                  \
        return __float2bfloat16(expression);                                                                                     \
    }
CUDA_ON_CPU_HALF(hsqrt, sqrtf(x))
CUDA_ON_CPU_HALF(hrsqrt, rsqrtf(x))
CUDA_ON_CPU_HALF(hrcp, 1.0f / x)
CUDA_ON_CPU_HALF(hcos, cosf(x))
CUDA_ON_CPU_HALF(hsin, sinf(x))
CUDA_ON_CPU_HALF(hlog, logf(x))
CUDA_ON_CPU_HALF(hexp, expf(x))
CUDA_ON_CPU_HALF(hexp2, exp2f(x))
CUDA_ON_CPU_HALF(htanh, tanhf(x))
CUDA_ON_CPU_HALF(hfloor, floorf(x))
CUDA_ON_CPU_HALF(hceil, ceilf(x))
CUDA_ON_CPU_HALF(hrint, rintf(x))
#undef CUDA_ON_CPU_HALF
