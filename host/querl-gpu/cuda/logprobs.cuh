// Log-probabilities and entropies of tokens, computed in chunks of the vocabulary (online softmax), and the gradients of the logits. The
// logits of a chunk are the output of a product and already divided by the temperature. Launchers: src/device/logprobs.rs.
//
// A block of 512 threads processes a row. It reads the logits twice, the second time from caches (a chunk of a row has 2 KiB to
// 600 KiB). At most 40 registers. Floor: 4 bytes per logit, 6 with the gradient; the products before and after take longer.
#pragma once
#include "common.cuh"

// Running softmax statistics of a row: maximum x_max of the logits, sum of e^(x - x_max), sum of (x - x_max) e^(x - x_max), and the
// target's logit.
struct RowState {
    double max, sum, weighted, target;
};

// Adds the logits (n_rows, size) of the tokens start, start + 1, ... to state (n_rows); start = 0 initialises the state.
extern "C" __global__ void logprob_part(const float* logits, const unsigned* targets, RowState* state, i64 start, int size) {
    __shared__ float memory[32];
    const float* row = logits + (i64)blockIdx.x * size;
    const bool vectors = size % 8 == 0 && is_aligned(logits);
    float max = -INFINITY;
    for (int at = threadIdx.x * 8; at < size; at += blockDim.x * 8) {
        float v[8];
        load_some(row, at, size, vectors, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (at + i < size) max = fmaxf(max, v[i]);
    }
    max = block_max(max, memory);
    RowState before = {-INFINITY, 0.0, 0.0, 0.0};
    if (start > 0) before = state[blockIdx.x];
    const float all = fmaxf(max, (float)before.max);
    float sum = 0.0f, weighted = 0.0f;
    for (int at = threadIdx.x * 8; at < size; at += blockDim.x * 8) {
        float v[8];
        load_some(row, at, size, vectors, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (at + i >= size) continue;
            const float x = v[i] - all, e = expf(x);
            sum += e;
            weighted += e > 0.0f ? e * x : 0.0f; // a logit of -inf adds 0, not NaN
        }
    }
    sum = block_sum(sum, memory);
    weighted = block_sum(weighted, memory);
    if (threadIdx.x != 0) return;
    const double shift = before.sum > 0.0 ? before.max - (double)all : 0.0;
    RowState after = before;
    after.weighted = exp(shift) * (before.weighted + shift * before.sum) + (double)weighted;
    after.sum = exp(shift) * before.sum + (double)sum;
    after.max = all;
    const i64 target = (i64)targets[blockIdx.x] - start;
    if (target >= 0 && target < size) after.target = row[target];
    state[blockIdx.x] = after;
}

// out: (n_rows, 2), log-probability of the target and entropy; sums: (n_rows, 2), logsumexp and entropy, for the backward pass.
extern "C" __global__ void logprob_end(const RowState* state, float* out, float* sums, i64 n_rows) {
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n_rows) return;
    const RowState all = state[row];
    const float log_sum = (float)(all.max + log(all.sum)), entropy = (float)(log(all.sum) - all.weighted / all.sum);
    out[2 * row] = (float)all.target - log_sum, out[2 * row + 1] = entropy;
    sums[2 * row] = log_sum, sums[2 * row + 1] = entropy;
}

// dlogits = factor * (grad[0] [token = target] - p (grad[0] + grad[1] (ln p + entropy))), (n_rows, size) bf16; grad: gradients of
// log-probability and entropy, (n_rows, 2).
extern "C" __global__ void logit_gradients(const float* logits, const unsigned* targets, const float* sums, const float* grad,
                                           bf16* dlogits, i64 start, int size, float factor) {
    const i64 place = (i64)blockIdx.x * size;
    const bool vectors = size % 8 == 0 && is_aligned(logits) && is_aligned(dlogits);
    const float log_sum = sums[2 * blockIdx.x], entropy = sums[2 * blockIdx.x + 1];
    const float a = grad[2 * blockIdx.x], b = grad[2 * blockIdx.x + 1];
    const i64 target = (i64)targets[blockIdx.x] - start;
    for (int at = threadIdx.x * 8; at < size; at += blockDim.x * 8) {
        float v[8];
        load_some(logits + place, at, size, vectors, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float log_p = v[i] - log_sum, p = expf(log_p);
            v[i] = p > 0.0f ? -factor * p * (a + b * (log_p + entropy)) : 0.0f;
            if (at + i == target) v[i] += factor * a;
        }
        store_some(dlogits + place, at, size, vectors, v);
    }
}
