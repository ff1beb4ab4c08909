// Attention of one new token of each sequence over keys and values in blocks of 16 tokens, which sequences may share. Launchers:
// src/device/decode.rs.
//
// A block of four warps takes 256 keys of one key-value head of one sequence, with all query heads that share it (16 at a time):
// keys and values are read once, straight into registers. A warp takes every fourth block of 16 tokens. The tensor cores multiply
// 16 heads by 8 tokens; since a dot product may be summed in any order, the values of a head are dealt to lanes in pieces of 16
// bytes as memory has them, and the queries alike. What the warps found is joined in their order through shared memory, what the
// 256s of a longer sequence found by a second kernel. So a sequence's result depends on nothing but its own keys.
//
// Shared memory 4 * 16 * (D + 2) floats (33 KiB at D = 128); 168 registers at D = 128 on sm_90. Floor: the bytes of all keys and
// values in reach, 4 D a token and key-value head, over the memory's bandwidth; blocks that sequences share come from the
// second-level cache.
#pragma once
#include "tensor_core.cuh"

constexpr int BLOCK_TOKENS = 16, SPLIT_KEYS = 256, DECODE_WARPS = 4, HEADS_AT_ONCE = 16;

// rows: (n, kv_heads, head_dim); cache: (n_blocks, kv_heads, 16, head_dim); slots: (n) places block * 16 + token. A warp copies one
// head of one row. Floor: 4 bytes a value.
extern "C" __global__ void store(const bf16* rows, const unsigned* slots, bf16* cache, i64 n, int n_kv_heads, int head_dim, i64 n_blocks) {
    const i64 place = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (place >= n * n_kv_heads) return;
    const i64 slot = slots[place / n_kv_heads], head = place % n_kv_heads;
    if (slot >= n_blocks * BLOCK_TOKENS) return;
    const bf16* from = rows + place * head_dim;
    bf16* to = cache + ((slot / BLOCK_TOKENS * n_kv_heads + head) * BLOCK_TOKENS + slot % BLOCK_TOKENS) * head_dim;
    const int lane = threadIdx.x % 32;
    if (head_dim % 8 == 0 && is_aligned(rows) && is_aligned(cache)) {
        for (int i = lane; i < head_dim / 8; i += 32) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
        for (int i = lane; i < head_dim; i += 32) to[i] = from[i];
    }
}

__device__ __forceinline__ uint4 sixteen_bytes(const bf16* at, bool exists) {
    return exists ? *reinterpret_cast<const uint4*>(at) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ unsigned word(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// The lower (or upper) halves of two words.
__device__ __forceinline__ unsigned joined(unsigned a, unsigned b, int half) {
    return half == 0 ? (a & 0xffffu) | b << 16 : a >> 16 | (b & 0xffff0000u);
}

// q, out: (n, heads, head_dim); keys, values: (n_blocks, kv_heads, 16, head_dim); tables: (n, width); lengths: (n); parts: (n, heads,
// splits, head_dim + 2) or null where there is one split. Grid: splits, kv_heads times sixteens of heads, n.
template <int D>
__device__ __forceinline__ void decode_attention(const bf16* q, const bf16* keys, const bf16* values, const unsigned* tables,
                                                 const unsigned* lengths, bf16* out, float* parts, int n_heads, int n_kv_heads,
                                                 int head_dim, i64 width, i64 n_blocks, int n_splits, float scale) {
    float* found = reinterpret_cast<float*>(shared_memory); // (warps, 16, head_dim + 2): sums, largest score, total
    constexpr int PIECES = (D + 31) / 32;                   // of 32 values: four lanes of 16 bytes
    constexpr int FIELDS = (D + 63) / 64;                   // of 64 values: eight lanes of 16 bytes
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = n_heads / n_kv_heads, n_chunks = (group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    const int kv_head = blockIdx.y / n_chunks, first_head = blockIdx.y % n_chunks * HEADS_AT_ONCE;
    const int n_own = min(HEADS_AT_ONCE, group - first_head);
    const i64 sequence = blockIdx.z, length = min((i64)lengths[sequence], width * BLOCK_TOKENS);
    const i64 first_key = (i64)blockIdx.x * SPLIT_KEYS, last_key = min(first_key + SPLIT_KEYS, length);
    if (parts && first_key >= length) return; // what joins the splits does not read this one
    q += (sequence * n_heads + (i64)kv_head * group + first_head) * head_dim;

    unsigned own[PIECES][2][4]; // of each piece the A of two products
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
        const int column = piece * 32 + t * 8;
        const uint4 low = sixteen_bytes(q + (i64)g * head_dim + column, g < n_own && column < head_dim);
        const uint4 high = sixteen_bytes(q + (i64)(g + 8) * head_dim + column, g + 8 < n_own && column < head_dim);
        own[piece][0][0] = low.x, own[piece][0][1] = high.x, own[piece][0][2] = low.y, own[piece][0][3] = high.y;
        own[piece][1][0] = low.z, own[piece][1][1] = high.z, own[piece][1][2] = low.w, own[piece][1][3] = high.w;
    }
    float sums[FIELDS][8][4] = {}, max[2] = {-INFINITY, -INFINITY}, total[2] = {};
    const float factor = scale * 1.44269504088896f;

    for (i64 start = first_key + warp * BLOCK_TOKENS; start < last_key; start += DECODE_WARPS * BLOCK_TOKENS) {
        const i64 block = tables[sequence * width + start / BLOCK_TOKENS];
        const bool exists = block < n_blocks;
        const i64 place = ((exists ? block : 0) * n_kv_heads + kv_head) * BLOCK_TOKENS * head_dim;
        const int n_tokens = (int)min(last_key - start, (i64)BLOCK_TOKENS);
        uint4 key[PIECES][2], value[FIELDS][4];
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int column = piece * 32 + t * 8, token = g + 8 * half;
                key[piece][half] = sixteen_bytes(keys + place + token * head_dim + column, exists && token < n_tokens && column < head_dim);
            }
#pragma unroll
        for (int field = 0; field < FIELDS; field++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int column = field * 64 + g * 8, token = 2 * t + i % 2 + i / 2 * 8;
                value[field][i] = sixteen_bytes(values + place + token * head_dim + column, exists && token < n_tokens && column < head_dim);
            }

        float p[2][4] = {}; // of tokens 0 to 7 and 8 to 15
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
                score = exists && i / 2 * 8 + 2 * t + i % 2 < n_tokens ? score * factor : -INFINITY;
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
        // Product i of a field is over its columns i, 8 + i, 16 + i, ...: those that stand i-th in each lane's sixteen bytes.
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

    const int line = head_dim + 2;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        total[row] += __shfl_xor_sync(ALL_LANES, total[row], 1);
        total[row] += __shfl_xor_sync(ALL_LANES, total[row], 2);
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
    for (int at = threadIdx.x; at < n_own * head_dim; at += blockDim.x) {
        const int head = at / head_dim, column = at % head_dim;
        float most = -INFINITY, sum = 0.0f, all = 0.0f;
        for (int other = 0; other < DECODE_WARPS; other++)
            most = fmaxf(most, found[(other * HEADS_AT_ONCE + head) * line + head_dim]);
        for (int other = 0; other < DECODE_WARPS; other++) {
            const float* from = found + (other * HEADS_AT_ONCE + head) * line;
            const float kept = from[head_dim] == -INFINITY ? 0.0f : power_of_two(from[head_dim] - most);
            sum += kept * from[column], all += kept * from[head_dim + 1];
        }
        const i64 place = sequence * n_heads + (i64)kv_head * group + first_head + head;
        if (parts) {
            float* to = parts + (place * n_splits + blockIdx.x) * line;
            to[column] = sum;
            if (column == 0) to[head_dim] = most, to[head_dim + 1] = all;
        } else {
            out[place * head_dim + column] = __float2bfloat16(all > 0.0f ? sum / all : 0.0f);
        }
    }
}

// Joins the splits of each head of each sequence in their order. A warp takes one head.
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
        out[place * head_dim + column] = __float2bfloat16(all > 0.0f ? sum / all : 0.0f);
    }
}

#define DECODE_OF_WIDTH(D)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(DECODE_WARPS * 32)                                                              \
        decode_attention_##D(const bf16* q, const bf16* keys, const bf16* values, const unsigned* tables,                       \
                             const unsigned* lengths, bf16* out, float* parts, int n_heads, int n_kv_heads, int head_dim,       \
                             i64 width, i64 n_blocks, int n_splits, float scale) {                                               \
        decode_attention<D>(q, keys, values, tables, lengths, out, parts, n_heads, n_kv_heads, head_dim, width, n_blocks,       \
                            n_splits, scale);                                                                                    \
    }

DECODE_OF_WIDTH(32)
DECODE_OF_WIDTH(64)
DECODE_OF_WIDTH(96)
DECODE_OF_WIDTH(128)
