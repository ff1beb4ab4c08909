// Paged attention of decode steps: new tokens attend to a paged KV cache in blocks of 16 tokens, which sequences may share. Launchers:
// src/device/paged_attention.rs. In this file, "block" is a block of the KV cache, and "thread block" one of CUDA.
//
// Split-K: a thread block of four warps processes 256 keys (a split) of one key-value head. If a sequence has several splits,
// `decode_attention_join` merges their results.
// Rows: a tensor-core product has 16 rows, which are filled with the query heads of the group times up to four adjacent rows of the
// batch. With few thread blocks in the grid fewer rows are processed together; with more than 16 heads per group, one row, with 16
// heads at a time.
// Warps: a warp processes every fourth block. It loads a block once for all its rows that attend to it, directly into registers. The
// results of the warps are merged in ascending order in shared memory.
// Lanes: keys and queries are assigned to lanes in pieces of 16 bytes as they are in memory, which permutes the terms of the dot
// products and does not change them.
// A row that does not attend to a block adds exactly 0 to its sums, so its result does not depend on the other rows, bit for bit.
//
// Shared memory: 4 * 16 * (D + 2) floats (33 KiB at D = 128). Floor: bytes of all keys and values, 4 D per token and key-value
// head, over the memory bandwidth; blocks that several thread blocks read come from the L2 cache.
#pragma once
#include "tensor_core.cuh"

constexpr int BLOCK_TOKENS = 16, SPLIT_KEYS = 256, DECODE_WARPS = 4, HEADS_AT_ONCE = 16, MOST_TOGETHER = 4;

// Copy-on-write of blocks. keys, values: (layers, n_blocks, values of a block); copies: (source, destination) pairs of block numbers, no
// block in two pairs; words: size of a block in units of 16 bytes. Grid: pairs, layers, 2 (keys, values). Floor: 8 bytes per value.
extern "C" __global__ void copy_blocks(bf16* keys, bf16* values, const unsigned* copies, i64 n_blocks, i64 words) {
    const i64 from = copies[2 * blockIdx.x], to = copies[2 * blockIdx.x + 1];
    if (from >= n_blocks || to >= n_blocks) return;
    uint4* all = reinterpret_cast<uint4*>(blockIdx.z == 0 ? keys : values) + (i64)blockIdx.y * n_blocks * words;
    for (i64 i = threadIdx.x; i < words; i += blockDim.x) all[to * words + i] = all[from * words + i];
}

__device__ __forceinline__ uint4 sixteen_bytes(const bf16* at, bool exists) {
    return exists ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ unsigned word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The lower (half = 0) or upper halves of two words, as one word.
__device__ __forceinline__ unsigned joined(unsigned a, unsigned b, int half) {
    return half == 0 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
}

// q, out: (n, heads, head_dim); keys, values: (n_blocks, kv_heads, 16, head_dim); tables: block tables, (lines, width); lines: line of
// `tables` for each row, (n), or null if row i has line i; lengths: number of keys of each row, (n); parts: partial results,
// (n, heads, splits, head_dim + 2), or null for a single split. Grid: splits, kv_heads * ceil(group / 16), ceil(n / n_together).
template <int D>
__device__ __forceinline__ void decode_attention(const bf16* q, const bf16* keys, const bf16* values, const unsigned* tables,
                                                 const unsigned* lines, const unsigned* lengths, bf16* out, float* parts, i64 n, int n_together,
                                                 int n_heads, int n_kv_heads, int head_dim, i64 width, i64 n_blocks, int n_splits, float scale) {
    float* found = reinterpret_cast<float*>(shared_memory); // (warps, 16, head_dim + 2): sums, maximum score, total
    constexpr int PIECES = (D + 31) / 32;                   // pieces of 32 values: four lanes with 16 bytes each
    constexpr int FIELDS = (D + 63) / 64;                   // fields of 64 values: eight lanes with 16 bytes each
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = n_heads / n_kv_heads, n_chunks = (group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    const int of_row = min(group, HEADS_AT_ONCE);
    const int kv_head = blockIdx.y / n_chunks, first_head = blockIdx.y % n_chunks * HEADS_AT_ONCE;
    const int n_own = min(of_row, group - first_head);
    const i64 first_row = (i64)blockIdx.z * n_together;
    const i64 first_key = (i64)blockIdx.x * SPLIT_KEYS;

    // For each row: end of its keys within this split, and its line of `tables`.
    int ends[MOST_TOGETHER], line_of[MOST_TOGETHER], last_key = (int)first_key;
#pragma unroll
    for (int i = 0; i < MOST_TOGETHER; i++) {
        const i64 row = first_row + i;
        const bool exists = i < n_together && row < n;
        line_of[i] = exists ? (lines ? (int)lines[row] : (int)row) : 0;
        ends[i] = exists ? (int)min(first_key + SPLIT_KEYS, min((i64)lengths[row], width * BLOCK_TOKENS)) : 0;
        last_key = max(last_key, ends[i]);
    }
    if (parts && first_key >= last_key) return; // `decode_attention_join` does not read this split

    // Row `place` of the products is head `place % of_row` of row `place / of_row`.
    auto exists = [&](int place) { return place / of_row < n_together && first_row + place / of_row < n && place % of_row < n_own; };
    auto head_of = [&](int place) { return (first_row + place / of_row) * n_heads + (i64)kv_head * group + first_head + place % of_row; };
    const int own_row[2] = {exists(g) ? g / of_row : -1, exists(g + 8) ? (g + 8) / of_row : -1};
    unsigned own[PIECES][2][4]; // queries: for each piece, operand A of two products
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int column = piece * 32 + t * 8;
        const uint4 low = sixteen_bytes(q + head_of(own_row[0] < 0 ? 0 : g) * head_dim + column, own_row[0] >= 0 && column < head_dim);
        const uint4 high = sixteen_bytes(q + head_of(own_row[1] < 0 ? 0 : g + 8) * head_dim + column, own_row[1] >= 0 && column < head_dim);
        own[piece][0][0] = low.x, own[piece][0][1] = high.x, own[piece][0][2] = low.y, own[piece][0][3] = high.y;
        own[piece][1][0] = low.z, own[piece][1][1] = high.z, own[piece][1][2] = low.w, own[piece][1][3] = high.w;
    }
    float sums[FIELDS][8][4] = {}, max[2] = {-INFINITY, -INFINITY}, total[2] = {};
    const float factor = scale * 1.44269504088896f;

    for (int start = (int)first_key + warp * BLOCK_TOKENS; start < last_key; start += DECODE_WARPS * BLOCK_TOKENS) {
        int blocks[MOST_TOGETHER]; // block of each row; -1 if it has none at this position
#pragma unroll
        for (int i = 0; i < MOST_TOGETHER; i++) {
            const i64 block = start < ends[i] ? (i64)tables[line_of[i] * width + start / BLOCK_TOKENS] : -1;
            blocks[i] = block < n_blocks ? (int)block : -1;
        }
#pragma unroll
        for (int first = 0; first < MOST_TOGETHER; first++) {
            const int block = blocks[first];
            bool is_first = block >= 0;
            int n_tokens = 0, seen[2] = {};
#pragma unroll
            for (int i = 0; i < MOST_TOGETHER; i++) {
                if (i < first) is_first = is_first && blocks[i] != block;
                const int n_visible = blocks[i] == block ? min(ends[i] - start, BLOCK_TOKENS) : 0;
                n_tokens = n_visible > n_tokens ? n_visible : n_tokens;
                if (own_row[0] == i) seen[0] = n_visible;
                if (own_row[1] == i) seen[1] = n_visible;
            }
            if (!is_first) continue; // the same for all lanes
            const i64 place = ((i64)block * n_kv_heads + kv_head) * BLOCK_TOKENS * head_dim;
            uint4 key[PIECES][2], value[FIELDS][4];
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int column = piece * 32 + t * 8, token = g + 8 * half;
                    key[piece][half] = sixteen_bytes(keys + place + token * head_dim + column, token < n_tokens && column < head_dim);
                }
#pragma unroll
            for (int field = 0; field < FIELDS; field++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int column = field * 64 + g * 8, token = 2 * t + i % 2 + i / 2 * 8;
                    value[field][i] = sixteen_bytes(values + place + token * head_dim + column, token < n_tokens && column < head_dim);
                }

            float p[2][4] = {}; // scores of tokens 0 to 7 and 8 to 15
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    multiply(p[half], own[piece][0], key[piece][half].x, key[piece][half].y);
                    multiply(p[half], own[piece][1], key[piece][half].z, key[piece][half].w);
                }
#pragma unroll
            for (int row = 0; row < 2; row++) {
                float most = -INFINITY;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& score = p[i / 2][2 * row + i % 2];
                    score = i / 2 * 8 + 2 * t + i % 2 < seen[row] ? score * factor : -INFINITY;
                    most = fmaxf(most, score);
                }
                most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
                most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
                most = fmaxf(max[row], most);
                const float base = most == -INFINITY ? 0.0f : most, kept = power_of_two(max[row] - base);
                max[row] = most;
                total[row] *= kept;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& score = p[i / 2][2 * row + i % 2];
                    score = power_of_two(score - base);
                    total[row] += score;
                }
#pragma unroll
                for (int field = 0; field < FIELDS; field++)
#pragma unroll
                    for (int i = 0; i < 8; i++) sums[field][i][2 * row] *= kept, sums[field][i][2 * row + 1] *= kept;
            }
            // Product i of a field has its columns i, 8 + i, 16 + i, ...: value i of each lane's 16 bytes.
            unsigned a[4];
            as_left(a, p[0], p[1]);
#pragma unroll
            for (int field = 0; field < FIELDS; field++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const unsigned b0 = joined(word(value[field][0], i / 2), word(value[field][1], i / 2), i % 2);
                    const unsigned b1 = joined(word(value[field][2], i / 2), word(value[field][3], i / 2), i % 2);
                    multiply(sums[field][i], a, b0, b1);
                }
        }
    }

    const int line = head_dim + 2;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        total[row] += __shfl_xor_sync(ALL_LANES, total[row], 1);
        total[row] += __shfl_xor_sync(ALL_LANES, total[row], 2);
        if (total[row] != total[row]) max[row] = total[row]; // NaN among the scores: fmaxf ignores it, so pass it on
        float* to = found + (warp * HEADS_AT_ONCE + g + 8 * row) * line;
#pragma unroll
        for (int field = 0; field < FIELDS; field++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int column = field * 64 + (2 * t + j) * 8 + i;
                    if (column < head_dim) to[column] = sums[field][i][2 * row + j];
                }
        if (t == 0) to[head_dim] = max[row], to[head_dim + 1] = total[row];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < HEADS_AT_ONCE * head_dim; at += blockDim.x) {
        const int head = at / head_dim, column = at % head_dim;
        if (!exists(head)) continue;
        float most = -INFINITY, sum = 0.0f, all = 0.0f;
        for (int other = 0; other < DECODE_WARPS; other++)
            most = fmaxf(most, found[(other * HEADS_AT_ONCE + head) * line + head_dim]);
        for (int other = 0; other < DECODE_WARPS; other++) {
            const float* from = found + (other * HEADS_AT_ONCE + head) * line;
            const float kept = from[head_dim] == -INFINITY ? 0.0f : power_of_two(from[head_dim] - most);
            sum += kept * from[column], all += kept * from[head_dim + 1];
        }
        const i64 place = head_of(head);
        if (parts) {
            float* to = parts + (place * n_splits + blockIdx.x) * line;
            to[column] = sum;
            if (column == 0) to[head_dim] = all == all ? most : all, to[head_dim + 1] = all;
        } else {
            out[place * head_dim + column] = __float2bfloat16(all == 0.0f ? 0.0f : sum / all);
        }
    }
}

// Merges the splits of each head of each row, in ascending order. One warp per head.
extern "C" __global__ void decode_attention_join(const float* parts, const unsigned* lengths, bf16* out, i64 n, int n_heads, int head_dim,
                                                 int n_splits) {
    const i64 place = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (place >= n * n_heads) return;
    const int line = head_dim + 2;
    const int n_own = min((int)((lengths[place / n_heads] + SPLIT_KEYS - 1) / SPLIT_KEYS), n_splits);
    const float* from = parts + place * n_splits * line;
    float most = -INFINITY, all = 0.0f;
    for (int split = 0; split < n_own; split++) most = fmaxf(most, from[split * line + head_dim]);
    auto kept = [&](int split) {
        const float max = from[split * line + head_dim];
        return max == -INFINITY ? 0.0f : power_of_two(max - most);
    };
    for (int split = 0; split < n_own; split++) all += kept(split) * from[split * line + head_dim + 1];
    for (int column = threadIdx.x % 32; column < head_dim; column += 32) {
        float sum = 0.0f;
        for (int split = 0; split < n_own; split++) sum += kept(split) * from[split * line + column];
        out[place * head_dim + column] = __float2bfloat16(all == 0.0f ? 0.0f : sum / all);
    }
}

#define DECODE_OF_WIDTH(D)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(DECODE_WARPS * 32)                                                              \
        decode_attention_##D(const bf16* q, const bf16* keys, const bf16* values, const unsigned* tables, const unsigned* lines, \
                             const unsigned* lengths, bf16* out, float* parts, i64 n, int n_together, int n_heads,               \
                             int n_kv_heads, int head_dim, i64 width, i64 n_blocks, int n_splits, float scale) {                 \
        decode_attention<D>(q, keys, values, tables, lines, lengths, out, parts, n, n_together, n_heads, n_kv_heads, head_dim,   \
                            width, n_blocks, n_splits, scale);                                                                   \
    }

DECODE_OF_WIDTH(32)
DECODE_OF_WIDTH(64)
DECODE_OF_WIDTH(96)
DECODE_OF_WIDTH(128)
