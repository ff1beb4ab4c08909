// Dropout whose masks depend on a key of the row, not on its position in the batch. CPU counterpart: `dropout.rs` of querl-model.
#pragma once

#include "random.cuh"

// Dropout of two adjacent values: a value is set to 0 if its 32 random bits are below `threshold`, else multiplied by `scale`.
__device__ __forceinline__ void drop_pair(u64 row_key, u64 layer_seed, i64 pair, unsigned threshold, float scale, float (&v)[2]) {
    const u64 bits = mix64(mix64(row_key ^ layer_seed) + (u64)(pair + 1) * 0x9e3779b97f4a7c15ull);
    v[0] = (unsigned)bits < threshold ? 0.0f : v[0] * scale;
    v[1] = (unsigned)(bits >> 32) < threshold ? 0.0f : v[1] * scale;
}

// to = dropout(x), or to += dropout(x) if `adds`. x, to: (n_rows, width); row_keys: (n_rows); first_pair: index of x's first pair of
// columns in the complete layer (tensor parallelism). Blocks of 256 threads, one pair of adjacent columns per thread.
template <class T>
__device__ __forceinline__ void drop(
    const bf16* x, const u64* row_keys, T* to, i64 n_rows, i64 width, i64 first_pair, u64 layer_seed, unsigned threshold, float scale,
    int adds
) {
    const i64 n_pairs = (width + 1) / 2, step = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < n_rows * n_pairs; at += step) {
        const i64 row = at / n_pairs, pair = at - row * n_pairs, first = row * width + 2 * pair;
        const bool has_second = 2 * pair + 1 < width;
        float v[2] = {widened(x[first]), has_second ? widened(x[first + 1]) : 0.0f};
        drop_pair(row_keys[row], layer_seed, first_pair + pair, threshold, scale, v);
        narrow(adds ? widened(to[first]) + v[0] : v[0], to[first]);
        if (has_second) narrow(adds ? widened(to[first + 1]) + v[1] : v[1], to[first + 1]);
    }
}

extern "C" __global__ void drop_f32(
    const bf16* x, const u64* row_keys, float* to, i64 n_rows, i64 width, i64 first_pair, u64 layer_seed, unsigned threshold, float scale,
    int adds
) {
    drop(x, row_keys, to, n_rows, width, first_pair, layer_seed, threshold, scale, adds);
}

extern "C" __global__ void drop_bf16(
    const bf16* x, const u64* row_keys, bf16* to, i64 n_rows, i64 width, i64 first_pair, u64 layer_seed, unsigned threshold, float scale,
    int adds
) {
    drop(x, row_keys, to, n_rows, width, first_pair, layer_seed, threshold, scale, adds);
}
