// RMSNorm. Launchers: src/device/norm_rope.rs.
//
// One block per row; a thread processes eight adjacent columns at a time, in steps of blockDim * 8. A row is read twice, the second time
// from the L1 cache. At most 48 registers.
#pragma once
#include "common.cuh"

template <class T> __device__ __forceinline__ float inverse_rms(const T* x, int width, float eps, bool vectors, float* memory) {
    float squares = 0.0f;
    for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
        float v[8];
        load_some(x, at, width, vectors, v);
#pragma unroll
        for (int i = 0; i < 8; i++) squares += v[i] * v[i];
    }
    return 1.0f / sqrtf(block_sum(squares, memory) / width + eps);
}

// y = x / sqrt(mean(x^2) + eps) * weight; x: (n_rows, width); weight: (width) f32; y: (n_rows, width) bf16.
template <class T> __device__ __forceinline__ void rms_norm(const T* x, const float* weight, bf16* y, int width, float eps) {
    __shared__ float memory[32];
    const bool vectors = width % 8 == 0 && is_aligned(x) && is_aligned(weight) && is_aligned(y);
    x += (i64)blockIdx.x * width;
    y += (i64)blockIdx.x * width;
    const float inverse = inverse_rms(x, width, eps, vectors, memory);
    for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
        float v[8], w[8];
        load_some(x, at, width, vectors, v);
        load_some(weight, at, width, vectors, w);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = v[i] * inverse * w[i];
        store_some(y, at, width, vectors, v);
    }
}

// Floor: 6 n_rows width bytes.
extern "C" __global__ void rms_norm_f32(const float* x, const float* weight, bf16* y, i64, int width, float eps) {
    rms_norm(x, weight, y, width, eps);
}

// Floor: 4 n_rows width bytes.
extern "C" __global__ void rms_norm_bf16(const bf16* x, const float* weight, bf16* y, i64, int width, float eps) {
    rms_norm(x, weight, y, width, eps);
}

// dx = g w r - x r^3 / width * sum(g w x), with g = grad, w = weight, r = 1 / sqrt(mean(x^2) + eps); plus `more`, (n_rows, width), if not
// null. All f32. Floor: 12 n_rows width bytes, 16 with `more`.
extern "C" __global__ void rms_norm_gradients(const float* x, const float* weight, const float* grad, const float* more, float* dx, i64,
                                          int width, float eps) {
    __shared__ float memory[32];
    const bool vectors = width % 8 == 0 && is_aligned(x) && is_aligned(weight) && is_aligned(grad) && is_aligned(more) && is_aligned(dx);
    const i64 start = (i64)blockIdx.x * width;
    x += start, grad += start, dx += start;
    float squares = 0.0f, dots = 0.0f;
    for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
        float v[8], w[8], g[8];
        load_some(x, at, width, vectors, v);
        load_some(weight, at, width, vectors, w);
        load_some(grad, at, width, vectors, g);
#pragma unroll
        for (int i = 0; i < 8; i++) squares += v[i] * v[i], dots += g[i] * w[i] * v[i];
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, memory) / width + eps);
    const float pull = block_sum(dots, memory) * inverse * inverse * inverse / width;
    for (int at = threadIdx.x * 8; at < width; at += blockDim.x * 8) {
        float v[8], w[8], g[8], d[8] = {};
        load_some(x, at, width, vectors, v);
        load_some(weight, at, width, vectors, w);
        load_some(grad, at, width, vectors, g);
        if (more) load_some(more + start, at, width, vectors, d);
#pragma unroll
        for (int i = 0; i < 8; i++) d[i] += g[i] * w[i] * inverse - v[i] * pull;
        store_some(dx, at, width, vectors, d);
    }
}

// Gradient of the weight: parts[block] = sum of g x r over the rows block, block + gridDim, ...; parts: (gridDim, width). Dynamic shared
// memory: width floats. Floor: 8 n_rows width bytes.
extern "C" __global__ void norm_weight_gradient(const float* x, const float* grad, float* parts, i64 n_rows, int width, float eps) {
    __shared__ float memory[32];
    float* sums = reinterpret_cast<float*>(shared_memory);
    const bool vectors = width % 8 == 0 && is_aligned(x);
    for (int column = threadIdx.x; column < width; column += blockDim.x) sums[column] = 0.0f;
    for (i64 row = blockIdx.x; row < n_rows; row += gridDim.x) {
        const float inverse = inverse_rms(x + row * width, width, eps, vectors, memory);
        for (int column = threadIdx.x; column < width; column += blockDim.x)
            sums[column] += grad[row * width + column] * x[row * width + column] * inverse;
    }
    for (int column = threadIdx.x; column < width; column += blockDim.x)
        parts[(i64)blockIdx.x * width + column] = sums[column];
}

// sums[c] = sum of x[., c]; x: (n_rows, width). A block processes 32 columns; with n warps, each warp sums every n-th row, and the sums of
// the warps are added in ascending order. Floor: bytes of x.
template <class T> __device__ __forceinline__ void column_sums(const T* x, float* sums, i64 n_rows, int width) {
    __shared__ float parts[32][33];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_warps = blockDim.x / 32;
    const int column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < width)
        for (i64 row = warp; row < n_rows; row += n_warps) sum += widened(x[row * width + column]);
    parts[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= width) return;
    for (int other = 1; other < n_warps; other++) sum += parts[other][lane];
    sums[column] = sum;
}

extern "C" __global__ void column_sums_f32(const float* x, float* sums, i64 n_rows, int width) { column_sums(x, sums, n_rows, width); }
extern "C" __global__ void column_sums_bf16(const bf16* x, float* sums, i64 n_rows, int width) { column_sums(x, sums, n_rows, width); }
