// Helpers of all kernels: vectorised loads and stores of eight bf16 or f32 values, and warp and block reductions in a fixed order.
//
// Kernels are CUDA C++ that also compiles for the CPU (tests/cuda/simulator): inline assembly is only used inside `__CUDA_ARCH__`, next
// to a portable branch. Floats are never added with atomics, so that results are deterministic.
//
// "Floor" in the comments of a kernel is its minimum work, by bytes of memory traffic or flops; see "Floors" in docs/cuda.md.
#pragma once

#include <cuda_bf16.h>

typedef __nv_bfloat16 bf16;
typedef long long i64;
typedef unsigned long long u64;

// Dynamic shared memory; its size is an argument of the launch.
extern __shared__ __align__(16) unsigned char shared_memory[];

constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(float x, bf16& to) { to = __float2bfloat16(x); }

// Converts two floats to bf16 and packs them into a word, the first in the lower half.
__device__ __forceinline__ unsigned packed(float low, float high) {
    const bf16 a = __float2bfloat16(low), b = __float2bfloat16(high);
    return (unsigned)__bfloat16_as_ushort(a) | (unsigned)__bfloat16_as_ushort(b) << 16;
}

__device__ __forceinline__ float low_half(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

// True if the address is a multiple of 16 bytes, as vector loads and stores require; true for null.
template <class T> __device__ __forceinline__ bool is_aligned(const T* at) { return ((size_t)at & 15) == 0; }

// Loads eight values, in one (bf16) or two (f32) loads of 16 bytes.
__device__ __forceinline__ void load_eight(const float* from, float (&x)[8]) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ __forceinline__ void load_eight(const bf16* from, float (&x)[8]) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    x[0] = low_half(words.x), x[1] = high_half(words.x), x[2] = low_half(words.y), x[3] = high_half(words.y);
    x[4] = low_half(words.z), x[5] = high_half(words.z), x[6] = low_half(words.w), x[7] = high_half(words.w);
}

__device__ __forceinline__ void store_eight(float* to, const float (&x)[8]) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void store_eight(bf16* to, const float (&x)[8]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(packed(x[0], x[1]), packed(x[2], x[3]), packed(x[4], x[5]), packed(x[6], x[7]));
}

// Loads the values `at` to `at + 8` of `n`; zeros beyond. `vectors`: `from + at` is aligned for every `at` that is a multiple of 8.
template <class T> __device__ __forceinline__ void load_some(const T* from, i64 at, i64 n, bool vectors, float (&x)[8]) {
    if (vectors && at + 8 <= n) {
        load_eight(from + at, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = at + i < n ? widened(from[at + i]) : 0.0f;
}

template <class T> __device__ __forceinline__ void store_some(T* to, i64 at, i64 n, bool vectors, const float (&x)[8]) {
    if (vectors && at + 8 <= n) {
        store_eight(to + at, x);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (at + i < n) narrow(x[i], to[at + i]);
}

template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) x += __shfl_xor_sync(ALL_LANES, x, other);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, other));
    return x;
}

// Sum over the block, returned to every thread: first within each warp, then over the warps in ascending order. `memory`: 32 values of
// shared memory, which can be reused after the call. blockDim.x must be a multiple of 32.
template <class T> __device__ __forceinline__ T block_sum(T x, T* memory) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
    __syncthreads();
    T all = 0;
    for (int warp = 0; warp < (int)(blockDim.x / 32); warp++) all += memory[warp];
    __syncthreads();
    return all;
}

__device__ __forceinline__ float block_max(float x, float* memory) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) memory[threadIdx.x / 32] = x;
    __syncthreads();
    float all = memory[0];
    for (int warp = 1; warp < (int)(blockDim.x / 32); warp++) all = fmaxf(all, memory[warp]);
    __syncthreads();
    return all;
}
