// AdamW: one optimizer step over all trained tensors in a single launch, and the global gradient norm. Launchers: src/device/adamw.rs.
//
// A block of 256 threads processes one chunk of 8192 values of one tensor. The table has one `TableEntry` per tensor, in six 64-bit
// words: addresses of values, gradient, first and second moment; length; index of the first chunk (lower half) and the factor
// 1 - learning_rate * weight_decay (upper half).
#pragma once
#include "common.cuh"

constexpr i64 CHUNK = 8192;

struct TableEntry {
    float *values, *gradient, *first, *second;
    u64 length;
    unsigned first_chunk;
    float decay; // factor of the values: 1 - learning_rate * weight_decay
};

// The tensor of this block's chunk, by binary search: the last tensor whose first chunk is at most blockIdx.x.
__device__ __forceinline__ TableEntry entry_of_block(const u64* table, int n_tensors) {
    const TableEntry* entries = reinterpret_cast<const TableEntry*>(table);
    int low = 0, high = n_tensors - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (entries[middle].first_chunk <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    return entries[low];
}

// parts[chunk] = sum of squares of a chunk of a gradient, in f64. Floor: 4 bytes per value.
extern "C" __global__ void squared_norm_parts(const u64* table, int n_tensors, double* parts) {
    __shared__ double memory[32];
    const TableEntry entry = entry_of_block(table, n_tensors);
    const i64 start = (blockIdx.x - entry.first_chunk) * CHUNK;
    const i64 end = min(start + CHUNK, (i64)entry.length);
    const bool vectors = is_aligned(entry.gradient);
    double sum = 0.0;
    for (i64 at = start + threadIdx.x * 8; at < end; at += blockDim.x * 8) {
        float g[8];
        load_some(entry.gradient, at, end, vectors, g);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += (double)g[i] * (double)g[i];
    }
    sum = block_sum(sum, memory);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// Gradient clipping: out[0] = norm = scale * sqrt(sum of the parts); out[1] = scale * min(1, max_norm / (norm + 1e-6)). Grid: one block.
extern "C" __global__ void gradient_norm(const double* parts, i64 n, float scale, float max_norm, float* out) {
    __shared__ double memory[32];
    double sum = 0.0;
    for (i64 at = threadIdx.x; at < n; at += blockDim.x) sum += parts[at];
    sum = block_sum(sum, memory);
    if (threadIdx.x != 0) return;
    const double norm = sqrt(sum) * (double)scale;
    const double factor = isfinite(max_norm) ? (double)max_norm / (norm + 1e-6) : 1.0;
    out[0] = (float)norm;
    out[1] = scale * (float)(factor < 1.0 ? factor : 1.0);
}

// norm: output of `gradient_norm`, whose second value multiplies the gradients, or null for a factor of 1. Floor: 28 bytes per value.
extern "C" __global__ void adamw(const u64* table, int n_tensors, const float* norm, float step_size, float correction, float beta1,
                                 float beta2, float eps) {
    const TableEntry entry = entry_of_block(table, n_tensors);
    const i64 start = (blockIdx.x - entry.first_chunk) * CHUNK;
    const i64 end = min(start + CHUNK, (i64)entry.length);
    const bool vectors =
        is_aligned(entry.values) && is_aligned(entry.gradient) && is_aligned(entry.first) && is_aligned(entry.second);
    const float scale = norm ? norm[1] : 1.0f;
    for (i64 at = start + threadIdx.x * 8; at < end; at += blockDim.x * 8) {
        float value[8], gradient[8], first[8], second[8];
        load_some(entry.values, at, end, vectors, value);
        load_some(entry.gradient, at, end, vectors, gradient);
        load_some(entry.first, at, end, vectors, first);
        load_some(entry.second, at, end, vectors, second);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float g = gradient[i] * scale;
            first[i] = beta1 * first[i] + (1.0f - beta1) * g;
            second[i] = beta2 * second[i] + (1.0f - beta2) * g * g;
            value[i] = value[i] * entry.decay - step_size * first[i] / (sqrtf(second[i]) * correction + eps);
        }
        store_some(entry.values, at, end, vectors, value);
        store_some(entry.first, at, end, vectors, first);
        store_some(entry.second, at, end, vectors, second);
    }
}
