// Epilogues of the products of a layer in decode steps: LoRA B, DoRA factor, bias, per-head norm, RoPE, and writing keys and values into
// the paged KV cache. Launchers: src/device/paged_attention.rs.
//
// A thread computes one output (column) for several rows, so that each weight of LoRA B is read once for all of them. Weights and
// outputs of LoRA A are loaded eight at a time, in 16 bytes if aligned. The products with LoRA B do not use tensor cores: at usual ranks
// they take less time than reading B. No atomics; sums over the rank are in ascending order.
#pragma once
#include "common.cuh"

// Epilogue of a product y: (y + scale * B lora_a_out) * factor + bias. Each pointer may be null.
struct Epilogue {
    const bf16* b;       // (outputs, rank)
    const float* bias;   // (outputs)
    const float* factor; // DoRA: magnitude over norm of the row; (outputs)
    int rank, first;     // columns `first` to `first + rank` of `lora_a_out` belong to this layer
    float scale;
    int unused;
};

// Applies an epilogue to output `column` of rows `first_row` to `first_row + ROWS` of y (n, n_out); rows from n on are skipped.
// lora_a_out: (n, lora_width).
template <int ROWS>
__device__ __forceinline__ void finished(const Epilogue& epilogue, const bf16* y, const bf16* lora_a_out, int lora_width, i64 first_row, i64 n,
                                         int column, int n_out, float (&values)[ROWS]) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) values[i] = 0.0f;
    if (epilogue.b) {
        const bf16* b = epilogue.b + (i64)column * epilogue.rank;
        const bf16* own = lora_a_out + first_row * lora_width + epilogue.first;
        const bool b_vectors = epilogue.rank % 8 == 0 && is_aligned(epilogue.b);
        const bool lora_vectors = lora_width % 8 == 0 && epilogue.first % 8 == 0 && is_aligned(lora_a_out);
        for (int at = 0; at < epilogue.rank; at += 8) {
            float weights[8], inputs[8];
            load_some(b, at, epilogue.rank, b_vectors, weights);
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                if (first_row + i >= n) continue;
                load_some(own + (i64)i * lora_width, at, epilogue.rank, lora_vectors, inputs);
#pragma unroll
                for (int k = 0; k < 8; k++) values[i] += weights[k] * inputs[k];
            }
        }
    }
    const float bias = epilogue.bias ? epilogue.bias[column] : 0.0f, factor = epilogue.factor ? epilogue.factor[column] : 1.0f;
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (first_row + i < n) values[i] = (widened(y[(first_row + i) * n_out + column]) + epilogue.scale * values[i]) * factor + bias;
}

constexpr int FINISHED_ROWS = 8, FINISHED_GROUPS = 2, WIDEST_HEAD = 128;

// Epilogues of q, k and v, with per-head norm and RoPE. Queries are written to q in place; keys and values to their slots of the KV cache.
// q: (n, heads, head_dim); k, v: (n, kv_heads, head_dim); epilogues: of q, k, v; q_norm, k_norm: (head_dim) or null; slots: block number
// * 16 + position within the block, (n); keys, values: (n_blocks, kv_heads, 16, head_dim). A slot outside the pool is skipped. A thread
// block processes one head of 16 rows. Grid: heads + 2 kv_heads, ceil(n / 16). Static shared memory: 8 KiB. Floor: 4 bytes per value,
// and the epilogues' LoRA B.
extern "C" __global__ void __launch_bounds__(256)
    finish_heads(bf16* q, const bf16* k, const bf16* v, const bf16* lora_a_out, int lora_width, const Epilogue* epilogues, const float* q_norm,
                 const float* k_norm, const float* cos, const float* sin, const unsigned* positions, const unsigned* slots, bf16* keys,
                 bf16* values, i64 n, int n_heads, int n_kv_heads, int head_dim, i64 n_blocks, float eps) {
    __shared__ float found[FINISHED_ROWS * FINISHED_GROUPS][WIDEST_HEAD];
    const int part = blockIdx.x < n_heads ? 0 : blockIdx.x < n_heads + n_kv_heads ? 1 : 2;
    const int head = blockIdx.x - (part == 0 ? 0 : part == 1 ? n_heads : n_heads + n_kv_heads);
    const int n_out = (part == 0 ? n_heads : n_kv_heads) * head_dim;
    const bf16* y = part == 0 ? q : part == 1 ? k : v;
    const Epilogue epilogue = epilogues[part];
    const i64 first_row = (i64)blockIdx.y * FINISHED_ROWS * FINISHED_GROUPS;
    for (int item = threadIdx.x; item < head_dim * FINISHED_GROUPS; item += blockDim.x) {
        const int column = item % head_dim, group = item / head_dim;
        float rows[FINISHED_ROWS];
        finished(epilogue, y, lora_a_out, lora_width, first_row + group * FINISHED_ROWS, n, head * head_dim + column, n_out, rows);
#pragma unroll
        for (int i = 0; i < FINISHED_ROWS; i++) found[group * FINISHED_ROWS + i][column] = rows[i];
    }
    __syncthreads();
    const float* norm = part == 0 ? q_norm : part == 1 ? k_norm : nullptr;
    const int lane = threadIdx.x % 32, half = head_dim / 2;
    for (int i = threadIdx.x / 32; i < FINISHED_ROWS * FINISHED_GROUPS; i += blockDim.x / 32) {
        const i64 row = first_row + i;
        if (row >= n) break; // the same for all lanes
        const i64 slot = slots[row];
        if (part > 0 && slot >= n_blocks * 16) continue;
        bf16* to = part == 0 ? q + row * n_out + head * head_dim
                             : (part == 1 ? keys : values) + ((slot / 16 * n_kv_heads + head) * 16 + slot % 16) * head_dim;
        float squares = 0.0f;
        if (norm)
            for (int j = lane; j < head_dim; j += 32) squares += found[i][j] * found[i][j];
        const float inverse = norm ? 1.0f / sqrtf(warp_sum(squares) / head_dim + eps) : 1.0f;
        const i64 angles = (i64)positions[row] * half;
        for (int j = lane; j < half; j += 32) {
            float a = found[i][j], b = found[i][j + half];
            if (norm) a *= inverse * norm[j], b *= inverse * norm[j + half];
            const float c = part < 2 ? cos[angles + j] : 1.0f, s = part < 2 ? sin[angles + j] : 0.0f;
            to[j] = __float2bfloat16(a * c - b * s);
            to[j + half] = __float2bfloat16(b * c + a * s);
        }
    }
}

// gate = silu(epilogue(gate)) * epilogue(up), (n, n_out); epilogues: of gate and up. Grid: ceil(n_out / 256), ceil(n / 8). Floor: 6 bytes
// per value, and the epilogues' LoRA B.
extern "C" __global__ void __launch_bounds__(256)
    finish_gated(bf16* gate, const bf16* up, const bf16* lora_a_out, int lora_width, const Epilogue* epilogues, i64 n, int n_out) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 first_row = (i64)blockIdx.y * FINISHED_ROWS;
    if (column >= n_out) return;
    float gates[FINISHED_ROWS], ups[FINISHED_ROWS];
    finished(epilogues[0], gate, lora_a_out, lora_width, first_row, n, column, n_out, gates);
    finished(epilogues[1], up, lora_a_out, lora_width, first_row, n, column, n_out, ups);
#pragma unroll
    for (int i = 0; i < FINISHED_ROWS; i++)
        if (first_row + i < n) gate[(first_row + i) * n_out + column] = __float2bfloat16(gates[i] * sigmoid(gates[i]) * ups[i]);
}

// Residual sum += epilogue(y), (n, n_out). Grid: as in `finish_gated`. Floor: 10 bytes per value, and the epilogue's LoRA B.
extern "C" __global__ void __launch_bounds__(256)
    finish_added(float* sum, const bf16* y, const bf16* lora_a_out, int lora_width, const Epilogue* epilogue, i64 n, int n_out) {
    const int column = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 first_row = (i64)blockIdx.y * FINISHED_ROWS;
    if (column >= n_out) return;
    float values[FINISHED_ROWS];
    finished(epilogue[0], y, lora_a_out, lora_width, first_row, n, column, n_out, values);
#pragma unroll
    for (int i = 0; i < FINISHED_ROWS; i++)
        if (first_row + i < n) sum[(first_row + i) * n_out + column] += values[i];
}
