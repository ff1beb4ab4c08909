// RoPE, alone or after the per-head RMSNorm. Launchers: src/device/norm_rope.rs.
//
// One warp per head; lane j processes the pairs j, j + 32, ..., where pair i is (x[i], x[i + head_dim / 2]). head_dim is at most 256, so
// that a lane has at most four pairs. Blocks of eight warps, at most 56 registers.
#pragma once
#include "common.cuh"

constexpr int PAIRS = 4;

struct HeadPlace {
    int lane, half;
    i64 head;
    const float *cos, *sin; // of the head's position

    __device__ HeadPlace(i64 head, i64 n_per_row, int head_dim, const float* cos, const float* sin, const unsigned* positions)
        : lane(threadIdx.x % 32), half(head_dim / 2), head(head) {
        const i64 angles = (i64)positions[head / n_per_row] * half;
        this->cos = cos + angles, this->sin = sin + angles;
    }
};

// x, y: (n_heads, head_dim) bf16, with n_per_row heads per position; weight: of the norm, (head_dim), or null without norm; direction: 1
// applies RoPE, -1 its inverse. Floor: 4 n_heads head_dim bytes.
extern "C" __global__ void norm_rope(const bf16* x, const float* weight, const float* cos, const float* sin, const unsigned* positions,
                                  bf16* y, i64 n_heads, i64 n_per_row, int head_dim, float eps, float direction) {
    const i64 head = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (head >= n_heads) return; // the same for all lanes
    const HeadPlace place(head, n_per_row, head_dim, cos, sin, positions);
    x += head * head_dim, y += head * head_dim;
    float a[PAIRS], b[PAIRS], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int j = place.lane + 32 * i;
        a[i] = j < place.half ? widened(x[j]) : 0.0f;
        b[i] = j < place.half ? widened(x[j + place.half]) : 0.0f;
        squares += a[i] * a[i] + b[i] * b[i];
    }
    const float inverse = weight ? 1.0f / sqrtf(warp_sum(squares) / head_dim + eps) : 1.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int j = place.lane + 32 * i;
        if (j >= place.half) continue;
        if (weight) a[i] *= inverse * weight[j], b[i] *= inverse * weight[j + place.half];
        const float c = place.cos[j], s = direction * place.sin[j];
        y[j] = __float2bfloat16(a[i] * c - b[i] * s);
        y[j + place.half] = __float2bfloat16(b[i] * c + a[i] * s);
    }
}

// Backward pass of `norm_rope` with a norm: g is grad with the inverse RoPE, then dx = g w r - x r^3 / head_dim * sum(g w x), with
// r = 1 / sqrt(mean(x^2) + eps). parts: gradient of the weight, (gridDim, head_dim), or null; each block's sum of g x r, in the order of
// its heads and warps. Dynamic shared memory with parts: 8 head_dim floats. Floor: 6 n_heads head_dim bytes.
extern "C" __global__ void norm_rope_gradients(const bf16* x, const float* weight, const float* cos, const float* sin,
                                            const unsigned* positions, const bf16* grad, bf16* dx, float* parts, i64 n_heads,
                                            i64 n_per_row, int head_dim, float eps) {
    const int warp = threadIdx.x / 32, n_warps = blockDim.x / 32, lane = threadIdx.x % 32, half = head_dim / 2;
    float dwa[PAIRS] = {}, dwb[PAIRS] = {};
    for (i64 head = (i64)blockIdx.x * n_warps + warp; head < n_heads; head += (i64)gridDim.x * n_warps) {
        const HeadPlace place(head, n_per_row, head_dim, cos, sin, positions);
        const i64 start = head * head_dim;
        float a[PAIRS], b[PAIRS], ga[PAIRS], gb[PAIRS], squares = 0.0f, dots = 0.0f;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int j = lane + 32 * i;
            const bool inside = j < half;
            a[i] = inside ? widened(x[start + j]) : 0.0f, b[i] = inside ? widened(x[start + j + half]) : 0.0f;
            const float u = inside ? widened(grad[start + j]) : 0.0f, v = inside ? widened(grad[start + j + half]) : 0.0f;
            const float c = inside ? place.cos[j] : 0.0f, s = inside ? place.sin[j] : 0.0f;
            ga[i] = u * c + v * s, gb[i] = v * c - u * s;
            squares += a[i] * a[i] + b[i] * b[i];
            if (inside) dots += ga[i] * weight[j] * a[i] + gb[i] * weight[j + half] * b[i];
        }
        const float inverse = 1.0f / sqrtf(warp_sum(squares) / head_dim + eps);
        const float pull = warp_sum(dots) * inverse * inverse * inverse / head_dim;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const int j = lane + 32 * i;
            if (j >= half) continue;
            dx[start + j] = __float2bfloat16(ga[i] * weight[j] * inverse - a[i] * pull);
            dx[start + j + half] = __float2bfloat16(gb[i] * weight[j + half] * inverse - b[i] * pull);
            dwa[i] += ga[i] * a[i] * inverse, dwb[i] += gb[i] * b[i] * inverse;
        }
    }
    if (!parts) return;
    float* sums = reinterpret_cast<float*>(shared_memory);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int j = lane + 32 * i;
        if (j < half) sums[warp * head_dim + j] = dwa[i], sums[warp * head_dim + j + half] = dwb[i];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < head_dim; column += blockDim.x) {
        float sum = 0.0f;
        for (int other = 0; other < n_warps; other++) sum += sums[other * head_dim + column];
        parts[(i64)blockIdx.x * head_dim + column] = sum;
    }
}
