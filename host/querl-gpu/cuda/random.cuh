// Normally distributed initial weights, generated on the GPU. A number is a function of seed and index only.
#pragma once

#include "common.cuh"

// Source: Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators" (mix64 of SplitMix).
__device__ __forceinline__ u64 mix64(u64 z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Numbers 2 * pair and 2 * pair + 1 of the sequence of standard normal numbers, times `scale`, by one Box-Muller transform.
__device__ __forceinline__ void normal_pair(u64 pair, u64 seed, float scale, float (&v)[2]) {
    const u64 bits = mix64(seed + (pair + 1) * 0x9e3779b97f4a7c15ull);
    // u is in (0, 1]; 24 bits are exact in f32.
    const float u = ((float)(unsigned)(bits >> 40) + 1.0f) * 0x1p-24f;
    const float angle = 6.28318530717958648f * ((float)(unsigned)((bits >> 8) & 0xffffffu) * 0x1p-24f);
    const float radius = scale * sqrtf(-2.0f * logf(u));
    v[0] = radius * cosf(angle);
    v[1] = radius * sinf(angle);
}

// values[i]: number i of the sequence. CPU counterpart: `random::normal` of querl-model.
extern "C" __global__ void normal_bf16(bf16* values, u64 n, u64 seed, float scale) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 pair = (u64)blockIdx.x * blockDim.x + threadIdx.x; pair < (n + 1) / 2; pair += step) {
        float v[2];
        normal_pair(pair, seed, scale, v);
        values[2 * pair] = __float2bfloat16(v[0]);
        if (2 * pair + 1 < n) values[2 * pair + 1] = __float2bfloat16(v[1]);
    }
}

// A shard of a weight with rows of `width` numbers: values (n / n_columns, n_columns), where values[r][c] is number
// first + r * width + c of the sequence. CPU counterpart: `random::normal_part` of querl-model.
extern "C" __global__ void normal_part_bf16(bf16* values, u64 n, u64 n_columns, u64 first, u64 width, u64 seed, float scale) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        const u64 row = i / n_columns, number = first + row * width + (i - row * n_columns);
        float v[2];
        normal_pair(number / 2, seed, scale, v);
        values[i] = __float2bfloat16(v[number % 2]);
    }
}
