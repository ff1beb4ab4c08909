// Normal numbers that depend on their seed and place alone: fresh weights, without a copy of them on the host.
#pragma once

#include "common.cuh"

// Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (mix64 of SplitMix).
__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// values[i] = scale * a standard normal number (Box and Muller); two neighbours share a draw. Twin of `random::normal`.
extern "C" __global__ void normal_bf16(bf16* values, u64 n, u64 seed, float scale) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 pair = (u64)blockIdx.x * blockDim.x + threadIdx.x; pair < (n + 1) / 2; pair += step) {
        const u64 bits = mix64(seed + (pair + 1) * 0x9e3779b97f4a7c15ull);
        // Above 0 and at most 1; 24 bits are what a float holds exactly.
        const float u = ((float)(unsigned)(bits >> 40) + 1.0f) * 0x1p-24f;
        const float angle = 6.28318530717958648f * ((float)(unsigned)((bits >> 8) & 0xffffffu) * 0x1p-24f);
        const float radius = scale * sqrtf(-2.0f * logf(u));
        values[2 * pair] = __float2bfloat16(radius * cosf(angle));
        if (2 * pair + 1 < n) values[2 * pair + 1] = __float2bfloat16(radius * sinf(angle));
    }
}
