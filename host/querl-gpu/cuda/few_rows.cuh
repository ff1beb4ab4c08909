// Products of a few rows (decode steps) with a frozen weight, which is unpacked in registers and not in memory. Launcher:
// src/device/weight.rs.
//
// The product is bound by reading the weight from memory, so everything else overlaps with these reads:
//
// - A block computes 32 outputs for up to 16 rows of x, with eight warps: four warps share 16 outputs (split-K). Each of the four
//   processes every fourth stretch of 64 inputs, so that they read four adjacent stretches of a row at the same time. Their partial sums
//   are added in a fixed order.
// - In a stretch, a lane holds 16 adjacent inputs of two outputs and of one or two rows of x. The 16 codes of a weight are one load of 8
//   or 16 bytes (bf16: two loads). The order of the inputs in a tensor-core product may be permuted if both operands have the same
//   order: product s takes inputs 4s to 4s + 3 of each lane's 16.
// - The next DEPTH stretches of the weight are loaded to registers while the current one is multiplied. x is read from the L1 cache,
//   which the warps of the other 16 outputs share.
// - Codes are converted to bf16 by the same arithmetic as in `unpack`, so that the weights do not depend on the number of rows.
//
// Bounds: every stretch begins below n_in. Inputs beyond n_in are zeros in x, because code 0 of the weight need not be 0 (nf4: -1).
// Outputs beyond n_out and rows beyond n_rows are neither read nor written. Conditions around a product are the same for all lanes of a
// warp, and all threads reach both barriers.
//
// Floor: bytes of the weight over the memory bandwidth.
#pragma once
#include "frozen.cuh"
#include "tensor_core.cuh"

constexpr int STRETCH = 64; // number of inputs that share a scale
constexpr int STEP_SHARE = 16; // inputs per lane in a stretch
constexpr int N_PARTS = 4; // warps that share the same outputs
constexpr int BLOCK_OUTPUTS = 32;
constexpr int ROW_TILE = 8;

// Codes of 16 adjacent weights of a row, and their scale.
template <int FORMAT> struct Run {
    unsigned words[FORMAT == BF16 ? 8 : FORMAT == NF4 ? 2 : 4];
    float scale;
};

// Loads inputs `k` to `k + 16` of the row at `row`; zeros beyond `n_in`, and if `row` is null. `vectors`: n_in is a multiple of 16 and the
// weight is aligned to 16 bytes, so that every run is aligned and either complete or empty.
template <int FORMAT>
__device__ __forceinline__ Run<FORMAT> load_run(const unsigned char* row, const float* scales, int k, int n_in, bool vectors) {
    Run<FORMAT> run = {};
    if (!row || k >= n_in) return run;
    if (FORMAT != BF16) run.scale = scales[FORMAT == FP8 ? 0 : k / GROUP];
    if (vectors) {
        if (FORMAT == NF4) {
            const uint2 codes = *reinterpret_cast<const uint2*>(row + k / 2);
            run.words[0] = codes.x, run.words[1] = codes.y;
        } else {
            constexpr int n_loads = FORMAT == BF16 ? 2 : 1;
            const uint4* from = reinterpret_cast<const uint4*>(row + (FORMAT == BF16 ? 2 * k : k));
#pragma unroll
            for (int i = 0; i < n_loads; i++) {
                const uint4 codes = from[i];
                run.words[4 * i] = codes.x, run.words[4 * i + 1] = codes.y;
                run.words[4 * i + 2] = codes.z, run.words[4 * i + 3] = codes.w;
            }
        }
        return run;
    }
    const int n = min(STEP_SHARE, n_in - k), n_bytes = FORMAT == BF16 ? 2 * n : FORMAT == NF4 ? (n + 1) / 2 : n;
    const unsigned char* from = row + (FORMAT == BF16 ? 2 * k : FORMAT == NF4 ? k / 2 : k);
    constexpr int all = FORMAT == BF16 ? 32 : FORMAT == NF4 ? 8 : 16;
#pragma unroll
    for (int i = 0; i < all; i++)
        if (i < n_bytes) run.words[i / 4] |= (unsigned)from[i] << i % 4 * 8;
    return run;
}

// Unpacks a run to eight pairs of bf16. `shares`: the values of nf4 codes.
template <int FORMAT> __device__ __forceinline__ void widen(const Run<FORMAT>& run, const float* shares, unsigned (&pairs)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (FORMAT == BF16)
            pairs[i] = run.words[i];
        else
            pairs[i] = packed(value_of<FORMAT>(run.words, 2 * i, shares) * run.scale,
                              value_of<FORMAT>(run.words, 2 * i + 1, shares) * run.scale);
    }
}

// Loads inputs `k` to `k + 16` of a row of x, like `load_run`.
__device__ __forceinline__ void load_inputs(const bf16* row, int k, int n_in, bool vectors, unsigned (&pairs)[8]) {
    const Run<BF16> run = load_run<BF16>(reinterpret_cast<const unsigned char*>(row), nullptr, k, n_in, vectors);
#pragma unroll
    for (int i = 0; i < 8; i++) pairs[i] = run.words[i];
}

// TILES: number of tiles of 8 rows, 1 or 2. `sums`: shared memory (N_PARTS, 8 TILES, BLOCK_OUTPUTS + 1); the last value of each row is
// padding against bank conflicts.
template <int FORMAT, int TILES, class T>
__device__ __forceinline__ void few_rows(const unsigned char* weight, const float* scales, const bf16* x, T* y, int first_row, int n_rows,
                                         int n_out, int n_in, int line, float alpha, float beta, const float* shares, float* sums) {
    constexpr int DEPTH = FORMAT == NF4 ? 4 : 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, part = warp % N_PARTS;
    const int first_output = blockIdx.x * BLOCK_OUTPUTS, n_groups = FORMAT == FP8 ? 1 : (n_in + GROUP - 1) / GROUP;
    const int n_stretches = (n_in + STRETCH - 1) / STRETCH;
    const bool vectors = n_in % STEP_SHARE == 0 && is_aligned(weight) && is_aligned(x);
    const unsigned char* rows[2];
    const float* row_scales[2] = {};
    const bf16* inputs[TILES];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int output = first_output + warp / N_PARTS * 16 + g + 8 * i;
        rows[i] = output < n_out ? weight + (i64)output * line : nullptr;
        if (FORMAT != BF16 && output < n_out) row_scales[i] = scales + (i64)output * n_groups;
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        const int row = first_row + ROW_TILE * tile + g;
        inputs[tile] = row < n_rows ? x + (i64)row * n_in : nullptr;
    }
    float found[TILES][4] = {};
    Run<FORMAT> ahead[DEPTH][2];
#pragma unroll
    for (int stage = 0; stage < DEPTH; stage++) {
        const int k = (part + N_PARTS * stage) * STRETCH + STEP_SHARE * t;
#pragma unroll
        for (int i = 0; i < 2; i++) ahead[stage][i] = load_run<FORMAT>(rows[i], row_scales[i], k, n_in, vectors);
    }
    for (int first = part; first < n_stretches; first += N_PARTS * DEPTH) {
#pragma unroll
        for (int stage = 0; stage < DEPTH; stage++) {
            const int stretch = first + N_PARTS * stage;
            if (stretch >= n_stretches) continue;
            const int k = stretch * STRETCH + STEP_SHARE * t;
            unsigned right[TILES][8], left[2][8];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) load_inputs(inputs[tile], k, n_in, vectors, right[tile]);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                widen<FORMAT>(ahead[stage][i], shares, left[i]);
                const int later = k + N_PARTS * DEPTH * STRETCH;
                ahead[stage][i] = load_run<FORMAT>(rows[i], row_scales[i], later, n_in, vectors);
            }
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const unsigned a[4] = {left[0][2 * step], left[1][2 * step], left[0][2 * step + 1], left[1][2 * step + 1]};
#pragma unroll
                for (int tile = 0; tile < TILES; tile++) multiply(found[tile], a, right[tile][2 * step], right[tile][2 * step + 1]);
            }
        }
    }
    constexpr int row_of_sums = BLOCK_OUTPUTS + 1;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = part * ROW_TILE * TILES + ROW_TILE * tile + 2 * t + i % 2;
            sums[row * row_of_sums + warp / N_PARTS * 16 + g + i / 2 * 8] = found[tile][i];
        }
    __syncthreads();
    for (int at = threadIdx.x; at < ROW_TILE * TILES * BLOCK_OUTPUTS; at += blockDim.x) {
        const int output = first_output + at % BLOCK_OUTPUTS, row = first_row + at / BLOCK_OUTPUTS;
        if (output >= n_out || row >= n_rows) continue;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N_PARTS; i++) sum += sums[(i * ROW_TILE * TILES + at / BLOCK_OUTPUTS) * row_of_sums + at % BLOCK_OUTPUTS];
        T* to = y + (i64)row * n_out + output;
        narrow(alpha * sum + (beta != 0.0f ? beta * widened(*to) : 0.0f), *to);
    }
}

// y = alpha x W^T + beta y. x: (n_rows, n_in) bf16; y: (n_rows, n_out); `line`: bytes per row of the weight. A block of 256 threads for 32
// outputs and 16 rows.
template <int FORMAT, class T>
__device__ __forceinline__ void few_rows(const unsigned char* weight, const float* scales, const bf16* x, T* y, int n_rows, int n_out,
                                         int n_in, int line, float alpha, float beta) {
    __shared__ float sums[N_PARTS * 2 * ROW_TILE * (BLOCK_OUTPUTS + 1)];
    __shared__ float shares[16];
    if (FORMAT == NF4) {
        if (threadIdx.x < 16) shares[threadIdx.x] = nf4_value(threadIdx.x);
        __syncthreads();
    }
    const int first_row = blockIdx.y * 2 * ROW_TILE;
    if (n_rows - first_row <= ROW_TILE)
        few_rows<FORMAT, 1>(weight, scales, x, y, first_row, n_rows, n_out, n_in, line, alpha, beta, shares, sums);
    else
        few_rows<FORMAT, 2>(weight, scales, x, y, first_row, n_rows, n_out, n_in, line, alpha, beta, shares, sums);
}

#define FEW_ROWS(name, FORMAT, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256)                                                                            \
        few_rows_##name(const unsigned char* weight, const float* scales, const bf16* x, T* y, int n_rows, int n_out, int n_in,  \
                        int line, float alpha, float beta) {                                                                     \
        few_rows<FORMAT>(weight, scales, x, y, n_rows, n_out, n_in, line, alpha, beta);                                          \
    }

FEW_ROWS(bf16_f32, BF16, float)
FEW_ROWS(bf16_bf16, BF16, bf16)
FEW_ROWS(int8_f32, INT8, float)
FEW_ROWS(int8_bf16, INT8, bf16)
FEW_ROWS(nf4_f32, NF4, float)
FEW_ROWS(nf4_bf16, NF4, bf16)
FEW_ROWS(fp8_f32, FP8, float)
FEW_ROWS(fp8_bf16, FP8, bf16)
