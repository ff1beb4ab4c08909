// Causal attention over packed sequences with shared prefixes (a prefix tree). Launchers: src/device/attention.rs.
//
// Tiles: queries and keys are divided into tiles of 64 rows. The host lists for each tile of queries the tiles of keys that it attends
// to, and the reverse; a block processes only its list.
// Mask: row r attends to key k if k <= r < ends[k], where ends[k] is the end of the subtree below the node of key k.
// Threads: a block has four warps. The values of a row are in four adjacent lanes of one warp, so that reductions over a row need
// shuffles between these lanes only.
//
// Three kernels: `attend` (forward) and `query_gradients` process a tile of queries of one head, 16 queries per warp; `key_gradients`
// processes a tile of keys of one key-value head and iterates over the queries of all heads of its group, 32 at a time. Both backward
// kernels recompute the scores: 7 matrix products instead of the 5 of a single backward kernel, which would have to add the
// gradients of queries with atomics, in an undefined order.
//
// D is the head size, padded with zeros to 32, 64, 96 or 128. Rows in shared memory have a stride of D + 8 values, so that the eight
// rows that `ldmatrix` reads at once are in different banks.
//
// Source: Dao 2023, "FlashAttention-2".
#pragma once
#include "tensor_core.cuh"

constexpr int TILE = 64, TILE_THREADS = 128, QUERIES_AT_ONCE = 32;
constexpr unsigned ALONE = 0xffffffffu; // marks the only item of a tile of keys, which has no partial sums in `parts`
constexpr float LOG2_E = 1.44269504088896f, LN_2 = 0.693147180559945f;

// Shapes: queries (n_queries, n_heads, head_dim); keys and values (n_rows, n_kv_heads, head_dim). `scale`: factor of the scores.
struct Attended {
    int n_queries, n_rows, n_heads, n_kv_heads, head_dim;
    float scale;
};

// Starts asynchronous copies of rows `first` to `first + ROWS` of one head to shared memory; zeros for rows from `n_rows` on and columns
// from head_dim on.
template <int D, int ROWS>
__device__ __forceinline__ void start_rows(bf16* to, const bf16* from, i64 first, i64 n_rows, int head, int n_heads, int head_dim) {
    constexpr int GROUPS = D / 8, N_COPIES = ROWS * GROUPS / TILE_THREADS;
    static_assert(N_COPIES * TILE_THREADS == ROWS * GROUPS, "every thread copies as much");
    const int line = n_heads * head_dim, n_here = (int)min(n_rows - first, (i64)ROWS); // offsets within a tile are below 2^31
    const bf16* corner = from + first * line + head * head_dim;
    if (head_dim % 8 == 0 && is_aligned(from)) {
#pragma unroll
        for (int i = 0; i < N_COPIES; i++) {
            const int at = threadIdx.x + i * TILE_THREADS, row = at / GROUPS, column = at % GROUPS * 8;
            const bool exists = row < n_here && column < head_dim;
            start_copy(to + row * (D + 8) + column, exists ? corner + row * line + column : from, exists);
        }
        return;
    }
#pragma unroll 1
    for (int at = threadIdx.x; at < ROWS * D; at += TILE_THREADS) {
        const int row = at / D, column = at % D;
        to[row * (D + 8) + column] = row < n_here && column < head_dim ? corner[row * line + column] : __float2bfloat16(0.0f);
    }
}

// sums = left right^T, (16, 8 N) in N tiles. `left`: 16 rows in shared memory; `right`: 8 N rows in shared memory.
template <int D, int N>
__device__ __forceinline__ void scores(float (&sums)[N][4], const bf16* left, const bf16* right) {
#pragma unroll
    for (int i = 0; i < N; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        unsigned a[4], b[4];
        load_left(a, left + k, D + 8);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            load_right_transposed(b, right + i * 8 * (D + 8) + k, D + 8);
            multiply(sums[i], a, b[0], b[1]);
            multiply(sums[i + 1], a, b[2], b[3]);
        }
    }
}

// sums += p values, (16, D). p: (16, 8 N) in registers, converted to bf16; `values`: 8 N rows in shared memory.
template <int D, int N>
__device__ __forceinline__ void add_products(float (&sums)[D / 8][4], const float (&p)[N][4], const bf16* values) {
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        unsigned a[4], b[4];
        as_left(a, p[k], p[k + 1]);
#pragma unroll
        for (int i = 0; i < D / 8; i += 2) {
            load_right(b, values + k * 8 * (D + 8) + i * 8, D + 8);
            multiply(sums[i], a, b[0], b[1]);
            multiply(sums[i + 1], a, b[2], b[3]);
        }
    }
}

// Writes 16 rows of sums as bf16, multiplied by `low` (rows 0 to 7) or `high` (rows 8 to 15), which belong to the two rows of a lane. The
// rows pass through `memory`, 16 rows of shared memory that only this warp uses, so that global memory is written in vectors of 16
// bytes. `first`: index in `to` of the first row.
template <int D>
__device__ __forceinline__ void write_rows(bf16* to, bf16* memory, const float (&sums)[D / 8][4], float low, float high, i64 first,
                                           i64 n_rows, int head, int n_heads, int head_dim) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        *reinterpret_cast<unsigned*>(memory + g * (D + 8) + i * 8 + 2 * t) = packed(sums[i][0] * low, sums[i][1] * low);
        *reinterpret_cast<unsigned*>(memory + (g + 8) * (D + 8) + i * 8 + 2 * t) = packed(sums[i][2] * high, sums[i][3] * high);
    }
    __syncwarp();
    const bool vectors = head_dim % 8 == 0 && is_aligned(to);
    for (int at = lane; at < 16 * (D / 8); at += 32) {
        const int row = at / (D / 8), column = at % (D / 8) * 8;
        if (first + row >= n_rows || column >= head_dim) continue;
        bf16* place = to + ((first + row) * n_heads + head) * head_dim + column;
        const bf16* source = memory + row * (D + 8) + column;
        if (vectors) {
            *reinterpret_cast<uint4*>(place) = *reinterpret_cast<const uint4*>(source);
        } else {
            for (int i = 0; i < 8 && column + i < head_dim; i++) place[i] = source[i];
        }
    }
}

// Maximum or sum over the four lanes that share a row.
__device__ __forceinline__ float over_row(float x, bool takes_max) {
#pragma unroll
    for (int other = 1; other < 4; other *= 2) {
        const float theirs = __shfl_xor_sync(ALL_LANES, x, other);
        x = takes_max ? fmaxf(x, theirs) : x + theirs;
    }
    return x;
}

// Row of a query; -1, a row that attends to no key, if `query` is n_queries or more.
__device__ __forceinline__ i64 row_of(const unsigned* rows, i64 query, i64 n_queries) {
    return query < n_queries ? (i64)rows[query] : -1;
}

// Forward pass. q, out: (n_queries, heads, head_dim); k, v: (n_rows, kv_heads, head_dim); logsumexp: (heads, n_queries).
// forward: (tiles, 3): tile of queries, start and end of its list in `keys`; keys: tile of keys times 2, plus 1 if the mask is needed;
// rows: (n_queries); ends: (n_rows). Grid: tiles of queries, heads.
//
// Dynamic shared memory: 3 * 64 rows (52 KiB at D = 128) for queries, keys and values. Copies overlap with products: values are copied
// while scores are computed, and the next keys while values are multiplied. 166 registers at D = 128 on sm_90.
// Floor: 4 D flops per pair of query and key at the tensor cores' rate; for short sequences the bytes of q, k, v and out.
template <int D>
__device__ __forceinline__ void attend(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* logsumexp, const unsigned* forward,
                                       const unsigned* keys, const unsigned* rows, const unsigned* ends, const Attended& shape) {
    bf16* queries_here = reinterpret_cast<bf16*>(shared_memory);
    bf16* keys_here = queries_here + TILE * (D + 8);
    bf16* values_here = keys_here + TILE * (D + 8);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, kv_head = head / (shape.n_heads / shape.n_kv_heads);
    const i64 first = (i64)forward[3 * blockIdx.x] * TILE;
    const unsigned begin = forward[3 * blockIdx.x + 1], end = forward[3 * blockIdx.x + 2];
    auto start = [&](bf16* to, const bf16* from, unsigned entry) {
        if (entry < end)
            start_rows<D, TILE>(to, from, (i64)(keys[entry] >> 1) * TILE, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
        end_copies();
    };

    start_rows<D, TILE>(queries_here, q, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
    start(keys_here, k, begin);
    const i64 own = first + warp * 16 + g;
    const i64 low_row = row_of(rows, own, shape.n_queries), high_row = row_of(rows, own + 8, shape.n_queries);
    const float factor = shape.scale * LOG2_E;
    float sums[D / 8][4] = {}, max[2] = {-INFINITY, -INFINITY}, total[2] = {};
    bf16* own_queries = queries_here + warp * 16 * (D + 8);

    for (unsigned entry = begin; entry < end; entry++) {
        copies_done<0>();
        __syncthreads(); // the keys were copied, and no warp reads the previous values any more
        start(values_here, v, entry);
        float p[TILE / 8][4];
        scores<D, TILE / 8>(p, own_queries, keys_here);
        __syncthreads(); // no warp reads the keys any more
        start(keys_here, k, entry + 1);

        if (keys[entry] & 1) {
            const i64 first_key = (i64)(keys[entry] >> 1) * TILE;
#pragma unroll
            for (int i = 0; i < TILE / 8; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const i64 key = first_key + i * 8 + 2 * t + j % 2, row = j < 2 ? low_row : high_row;
                    if (key > row || key >= shape.n_rows || row >= (i64)ends[key]) p[i][j] = -INFINITY;
                }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -INFINITY;
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) most = fmaxf(most, fmaxf(p[i][2 * half], p[i][2 * half + 1]));
            most = fmaxf(max[half], over_row(most, true) * factor);
            const float base = most == -INFINITY ? 0.0f : most, kept = power_of_two(max[half] - base);
            max[half] = most;
            total[half] *= kept;
#pragma unroll
            for (int i = 0; i < TILE / 8; i++)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    p[i][j] = power_of_two(p[i][j] * factor - base);
                    total[half] += p[i][j];
                }
#pragma unroll
            for (int i = 0; i < D / 8; i++) sums[i][2 * half] *= kept, sums[i][2 * half + 1] *= kept;
        }
        copies_done<1>();
        __syncthreads(); // the values were copied
        add_products<D, TILE / 8>(sums, p, values_here);
    }

    copies_done<0>();
    const float low = over_row(total[0], false), high = over_row(total[1], false); // 0 for a row that attends to no key; NaN stays NaN
    __syncthreads(); // with an empty list, the copies of the other threads end here
    write_rows<D>(out, own_queries, sums, low == 0.0f ? 0.0f : 1.0f / low, high == 0.0f ? 0.0f : 1.0f / high, first + warp * 16,
                  shape.n_queries, head, shape.n_heads, shape.head_dim);
    if (t != 0) return;
    float* own_sums = logsumexp + (i64)head * shape.n_queries;
    if (own < shape.n_queries) own_sums[own] = (max[0] + log2f(low)) * LN_2;
    if (own + 8 < shape.n_queries) own_sums[own + 8] = (max[1] + log2f(high)) * LN_2;
}

// deltas[head][query] = sum(grad * out) over head_dim. One warp per head of a query. Floor: 4 bytes per value.
extern "C" __global__ void attention_delta(const bf16* out, const bf16* grad, float* deltas, i64 n_queries, int n_heads, int head_dim) {
    const i64 place = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (place >= n_queries * n_heads) return;
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int i = lane; i < head_dim; i += 32) sum += widened(out[place * head_dim + i]) * widened(grad[place * head_dim + i]);
    sum = warp_sum(sum);
    if (lane == 0) deltas[place % n_heads * n_queries + place / n_heads] = sum;
}

// Backward pass for queries. P: probabilities, g: gradient of the output, delta: `attention_delta`.
// dP = g V^T, dS = P (dP - delta), dQ = scale dS K. Grid and lists: as in `attend`. Dynamic shared memory: 4 * 64 rows (68 KiB at
// D = 128) for queries, gradients, and two buffers of 32 keys and values: the next are copied during a step. Floor: 6 D flops per
// pair of query and key.
template <int D>
__device__ __forceinline__ void query_gradients(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,
                                                const float* deltas, bf16* dq, const unsigned* forward, const unsigned* keys,
                                                const unsigned* rows, const unsigned* ends, const Attended& shape) {
    constexpr int SPACE = TILE * (D + 8), KEYS = TILE / 2;
    bf16* queries_here = reinterpret_cast<bf16*>(shared_memory);
    bf16 *grad_here = queries_here + SPACE, *keys_here = grad_here + SPACE, *values_here = keys_here + SPACE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, kv_head = head / (shape.n_heads / shape.n_kv_heads);
    const i64 first = (i64)forward[3 * blockIdx.x] * TILE, own = first + warp * 16 + g;
    const unsigned end = forward[3 * blockIdx.x + 2];
    unsigned place = forward[3 * blockIdx.x + 1], next = place < end ? keys[place] : 0;
    int n_steps = 2 * (int)(end - place);
    auto start = [&](int part) { // half a tile of keys
        const unsigned entry = next;
        if (place < end) {
            const i64 first_key = (i64)(entry >> 1) * TILE + part * KEYS;
            const int at = part * KEYS * (D + 8);
            start_rows<D, KEYS>(keys_here + at, k, first_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
            start_rows<D, KEYS>(values_here + at, v, first_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
            if (part == 1 && ++place < end) next = keys[place];
        }
        end_copies();
        return entry;
    };
    start_rows<D, TILE>(queries_here, q, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
    start_rows<D, TILE>(grad_here, grad, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
    unsigned copied = start(0);

    int row[2];
    float log_sum[2], pull[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 query = own + 8 * half, at = (i64)head * shape.n_queries + query;
        row[half] = (int)row_of(rows, query, shape.n_queries);
        log_sum[half] = query < shape.n_queries ? logsumexp[at] * LOG2_E : 0.0f;
        pull[half] = query < shape.n_queries ? deltas[at] : 0.0f;
    }
    const int last_row = __reduce_max_sync(ALL_LANES, max(row[0], row[1]));
    const float factor = shape.scale * LOG2_E;
    float sums[D / 8][4] = {};
    const bf16 *own_queries = queries_here + warp * 16 * (D + 8), *own_grad = grad_here + warp * 16 * (D + 8);

    for (int part = 0; n_steps > 0; n_steps--, part = 1 - part) {
        const int first_key = (int)(copied >> 1) * TILE + part * KEYS;
        const bool masked = copied & 1;
        copies_done<0>();
        __syncthreads(); // keys and values were copied, and no warp reads the previous ones any more
        copied = start(1 - part);
        if (first_key > last_row) continue; // the warp's queries attend to none of these keys
        const bf16 *keys_now = keys_here + part * KEYS * (D + 8), *values_now = values_here + part * KEYS * (D + 8);
        float p[KEYS / 8][4], dp[KEYS / 8][4];
        scores<D, KEYS / 8>(p, own_queries, keys_now);
        scores<D, KEYS / 8>(dp, own_grad, values_now);
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float share = power_of_two(p[i][j] * factor - log_sum[j / 2]);
                if (masked) {
                    const int key = first_key + i * 8 + 2 * t + j % 2;
                    if (key > row[j / 2] || key >= shape.n_rows || row[j / 2] >= (int)ends[key]) share = 0.0f;
                }
                p[i][j] = share * (dp[i][j] - pull[j / 2]);
            }
        add_products<D, KEYS / 8>(sums, p, keys_now);
    }
    copies_done<0>();
    __syncthreads(); // with an empty list, the copies of the other threads end here
    write_rows<D>(dq, queries_here + warp * 16 * (D + 8), sums, shape.scale, shape.scale, first + warp * 16, shape.n_queries, head,
                  shape.n_heads, shape.head_dim);
}

// Backward pass for keys and values: dV = P^T g, dK = scale dS^T Q. A block processes one item: a tile of keys and a part of the tile's
// list of queries. P and dS are computed transposed, so that the rows of a warp are keys.
// backward: (items, 4): tile of keys, start and end of the item's list in `queries`, index of its partial sums in `parts`, or ALONE for
// the only item of a tile, which writes dk and dv directly. queries: tiles of 32 queries, encoded as in `keys`.
// parts: (n_parts, kv_heads, 2, 64, D) f32, dK before dV. Grid: items, kv_heads.
//
// Two warps share 32 keys. The first computes P from K Q^T, passes it on through shared memory, and adds P g to dV. The second computes
// dP from V g^T, then dS, and adds dS Q to dK. So a warp holds one of the two gradients for 32 keys, and each operand that it reads
// from shared memory is used in two products: 192 bytes per product at D = 128, 1.5 cycles. A warp with both gradients of 16 keys
// would read 320 bytes per product, which takes longer than the product. Up to D = 96, keys and values are kept in registers. A warp
// skips a step if none of the 32 queries attends to its keys. The next queries and gradients are copied during a step.
//
// Dynamic shared memory: 2 * 64 + 4 * 32 rows (68 KiB at D = 128) for keys, values, and two buffers of 32 queries and gradients.
// Registers on sm_90: 235 at D = 128 (two blocks per multiprocessor), 168 at D = 64 (three). Floor: 8 D flops per pair.
template <int D>
__device__ __forceinline__ void key_gradients(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,
                                              const float* deltas, bf16* dk, bf16* dv, float* parts, const unsigned* backward,
                                              const unsigned* queries, const unsigned* rows, const unsigned* ends, const Attended& shape) {
    constexpr int WIDTH = D + 8, N = QUERIES_AT_ONCE / 8, SPACE = QUERIES_AT_ONCE * WIDTH;
    constexpr bool HELD = D <= 96;
    __shared__ float4 shares_here[2][2 * N][32]; // P for the keys of two warps, in the layout of the sums of `multiply`
    __shared__ float logsumexp_here[2][QUERIES_AT_ONCE], deltas_here[2][QUERIES_AT_ONCE];
    __shared__ int rows_here[2][QUERIES_AT_ONCE];
    bf16* keys_here = reinterpret_cast<bf16*>(shared_memory);
    bf16 *values_here = keys_here + TILE * WIDTH, *queries_here = values_here + TILE * WIDTH, *grad_here = queries_here + 2 * SPACE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, half = warp % 2;
    const bool of_values = warp < 2;
    const int kv_head = blockIdx.y, group = shape.n_heads / shape.n_kv_heads;
    const unsigned* item = backward + 4 * blockIdx.x;
    const int tile_key = (int)item[0] * TILE, first_key = tile_key + half * 32;
    start_rows<D, TILE>(keys_here, k, tile_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
    start_rows<D, TILE>(values_here, v, tile_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);

    // Position of the next copy: a tile of queries, and a head of the group that shares this key-value head.
    const unsigned end = item[2];
    unsigned place = item[1], next = queries[place];
    int next_head = 0, n_steps = (int)(end - place) * group;
    auto start = [&](int stage) {
        const unsigned entry = next;
        if (place < end) {
            const i64 first = (i64)(entry >> 1) * QUERIES_AT_ONCE;
            const int head = kv_head * group + next_head;
            start_rows<D, QUERIES_AT_ONCE>(queries_here + stage * SPACE, q, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
            start_rows<D, QUERIES_AT_ONCE>(grad_here + stage * SPACE, grad, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
            const bool exists = first + lane < shape.n_queries; // zeros beyond the last query: they do not change the sums
            const i64 query = exists ? first + lane : 0, at = (i64)head * shape.n_queries + query;
            if (warp == 0) start_copy_of_word(&logsumexp_here[stage][lane], logsumexp + at, exists);
            if (warp == 1) start_copy_of_word(&deltas_here[stage][lane], deltas + at, exists);
            if (warp == 2) start_copy_of_word(&rows_here[stage][lane], rows + query, exists);
            if (++next_head == group) {
                next_head = 0;
                if (++place < end) next = queries[place];
            }
        }
        end_copies();
        return entry;
    };
    unsigned copied = start(0);

    // For each of the lane's four keys: number of rows that attend to it, counted from the key's own row.
    unsigned seen[4];
    int most_end = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int key = first_key + g + 8 * i, until = key < shape.n_rows ? (int)ends[key] : key;
        seen[i] = until - key, most_end = max(most_end, until);
    }
    most_end = __reduce_max_sync(ALL_LANES, most_end);
    bf16* own = (of_values ? keys_here : values_here) + half * 32 * WIDTH;
    unsigned held[HELD ? D / 16 : 1][2][4];
    copies_done<0>();
    __syncthreads();
    if (HELD) {
#pragma unroll
        for (int k = 0; k < D / 16; k++)
#pragma unroll
            for (int m = 0; m < 2; m++) load_left(held[k][m], own + m * 16 * WIDTH + k * 16, WIDTH);
    }

    const float factor = shape.scale * LOG2_E;
    float sums[2][D / 8][4] = {};
    for (int stage = 0; n_steps > 0; n_steps--, stage = 1 - stage) {
        const int first = (int)(copied >> 1) * QUERIES_AT_ONCE;
        const bool masked = copied & 1;
        copies_done<0>();
        __syncthreads(); // the queries were copied, and no warp reads the previous ones or their P any more
        copied = start(1 - stage);
        const bf16* left_factor = (of_values ? queries_here : grad_here) + stage * SPACE;
        const bf16* right_factor = (of_values ? grad_here : queries_here) + stage * SPACE;
        const int last_row = rows_here[stage][min(QUERIES_AT_ONCE, shape.n_queries - first) - 1];
        const bool sees = !masked || (first_key <= last_row && rows_here[stage][0] < most_end);
        float x[2][N][4] = {};
        if (sees) {
#pragma unroll
            for (int k = 0; k < D / 16; k++) {
                unsigned a[2][4], b[4];
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    if (HELD) {
#pragma unroll
                        for (int i = 0; i < 4; i++) a[m][i] = held[HELD ? k : 0][m][i];
                    } else {
                        load_left(a[m], own + m * 16 * WIDTH + k * 16, WIDTH);
                    }
                }
#pragma unroll
                for (int i = 0; i < N; i += 2) {
                    load_right_transposed(b, left_factor + i * 8 * WIDTH + k * 16, WIDTH);
#pragma unroll
                    for (int m = 0; m < 2; m++) multiply(x[m][i], a[m], b[0], b[1]), multiply(x[m][i + 1], a[m], b[2], b[3]);
                }
            }
        }
        if (sees && of_values) {
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int column = i * 8 + 2 * t + j, row = rows_here[stage][column] - (first_key + g);
                    const float log_sum = logsumexp_here[stage][column] * LOG2_E;
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        float& p = x[r / 2][i][r % 2 * 2 + j];
                        p = power_of_two(p * factor - log_sum);
                        if (masked && (unsigned)(row - 8 * r) >= seen[r]) p = 0.0f;
                    }
                }
#pragma unroll
            for (int i = 0; i < 2 * N; i++) {
                const float(&p)[4] = x[i / N][i % N];
                shares_here[half][i][lane] = make_float4(p[0], p[1], p[2], p[3]);
            }
        }
        __syncthreads(); // P was written
        if (!sees) continue;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            unsigned a[2][4], b[4];
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int j = i; j < i + 2 && !of_values; j++) {
                    const float4 p = shares_here[half][m * N + j][lane];
                    const float* pull = deltas_here[stage] + j * 8 + 2 * t;
                    float(&ds)[4] = x[m][j];
                    ds[0] = p.x * (ds[0] - pull[0]), ds[1] = p.y * (ds[1] - pull[1]);
                    ds[2] = p.z * (ds[2] - pull[0]), ds[3] = p.w * (ds[3] - pull[1]);
                }
                as_left(a[m], x[m][i], x[m][i + 1]);
            }
#pragma unroll
            for (int column = 0; column < D / 8; column += 2) {
                load_right(b, right_factor + i * 8 * WIDTH + column * 8, WIDTH);
#pragma unroll
                for (int m = 0; m < 2; m++) multiply(sums[m][column], a[m], b[0], b[1]), multiply(sums[m][column + 1], a[m], b[2], b[3]);
            }
        }
    }

    const float scale = of_values ? 1.0f : shape.scale;
    if (item[3] == ALONE) { // buffer: the warp's keys or values, which no other warp reads and which are no longer needed
#pragma unroll
        for (int m = 0; m < 2; m++)
            write_rows<D>(of_values ? dv : dk, own + m * 16 * WIDTH, sums[m], scale, scale, first_key + m * 16, shape.n_rows, kv_head,
                          shape.n_kv_heads, shape.head_dim);
        return;
    }
    float* to = parts + ((((i64)item[3] * shape.n_kv_heads + kv_head) * 2 + of_values) * TILE + half * 32 + g) * D + 2 * t;
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            const float* sum = sums[r / 2][i] + r % 2 * 2;
            *reinterpret_cast<float2*>(to + r * 8 * D + i * 8) = make_float2(sum[0] * scale, sum[1] * scale);
        }
}

// dk, dv: sums of `parts` over the items of a tile, in their order, for tiles with several items or none. joined: (tiles, 3): tile of
// keys, start and end of its indices in `parts` (see `key_gradients`); width: D there. Blocks of 256 threads, four values per thread.
// Grid: width / 16 blocks per tile, kv_heads, 2 (dk, dv). Floor: 4 bytes per value of `parts`, 2 per value of the result.
extern "C" __global__ void key_gradient_sums(const float* parts, const unsigned* joined, bf16* dk, bf16* dv, i64 n_rows, int n_kv_heads,
                                             int head_dim, int width) {
    const int blocks = width / 16, at = 4 * (blockIdx.x % blocks * blockDim.x + threadIdx.x), column = at % width;
    const unsigned* tile = joined + 3 * (blockIdx.x / blocks);
    const i64 row = (i64)tile[0] * TILE + at / width;
    if (row >= n_rows) return;
    float sum[4] = {};
    for (unsigned item = tile[1]; item < tile[2]; item++) {
        const float* from = parts + (((i64)item * n_kv_heads + blockIdx.y) * 2 + blockIdx.z) * TILE * width + at;
        const float4 part = *reinterpret_cast<const float4*>(from);
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
    bf16* to = (blockIdx.z == 0 ? dk : dv) + (row * n_kv_heads + blockIdx.y) * head_dim;
    for (int i = column; i < column + 4 && i < head_dim; i++) to[i] = __float2bfloat16(sum[i - column]);
}

#define ATTENTION_OF_WIDTH(D)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                                   \
        attend_##D(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* logsumexp, const unsigned* forward,            \
                   const unsigned* keys, const unsigned* rows, const unsigned* ends, int n_queries, int n_rows, int n_heads,    \
                   int n_kv_heads, int head_dim, float scale) {                                                                  \
        const Attended shape = {n_queries, n_rows, n_heads, n_kv_heads, head_dim, scale};                                        \
        attend<D>(q, k, v, out, logsumexp, forward, keys, rows, ends, shape);                                                     \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                                   \
        query_gradients_##D(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,               \
                            const float* deltas, bf16* dq, const unsigned* forward, const unsigned* keys, const unsigned* rows,  \
                            const unsigned* ends, int n_queries, int n_rows, int n_heads, int n_kv_heads, int head_dim,         \
                            float scale) {                                                                                       \
        const Attended shape = {n_queries, n_rows, n_heads, n_kv_heads, head_dim, scale};                                        \
        query_gradients<D>(q, k, v, grad, logsumexp, deltas, dq, forward, keys, rows, ends, shape);                                \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(TILE_THREADS, D == 32 ? 4 : D == 64 ? 3 : 2)                                    \
        key_gradients_##D(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,                 \
                          const float* deltas, bf16* dk, bf16* dv, float* parts, const unsigned* backward,                       \
                          const unsigned* queries, const unsigned* rows, const unsigned* ends, int n_queries, int n_rows,        \
                          int n_heads, int n_kv_heads, int head_dim, float scale) {                                              \
        const Attended shape = {n_queries, n_rows, n_heads, n_kv_heads, head_dim, scale};                                        \
        key_gradients<D>(q, k, v, grad, logsumexp, deltas, dk, dv, parts, backward, queries, rows, ends, shape);                 \
    }

ATTENTION_OF_WIDTH(32)
ATTENTION_OF_WIDTH(64)
ATTENTION_OF_WIDTH(96)
ATTENTION_OF_WIDTH(128)
