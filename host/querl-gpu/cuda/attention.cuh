// Causal attention over packed sequences that share what they begin with. Launchers: src/device/attention.rs.
//
// Queries and keys stand in tiles of 64. Which tiles see each other the host has listed, so a block goes through its list alone.
// A key is seen by the queries from itself to the end of what branches off its run of rows. A block has four warps; each holds 16
// rows of a tile, and a row's values stay in four neighbouring lanes, so that only these exchange anything.
//
// Three passes: `attend` and `query_gradients` take a tile of queries of one head; `key_gradients` takes a tile of keys of one
// key-value head and goes through the queries of all heads that share it. The second and third compute the scores again. That is
// two products of seven more than one pass would take, which would have to add gradients of queries with atomics, in any order.
//
// D is the head's width, padded with zeros to 32, 64, 96 or 128. Rows of shared memory are D + 8 values wide: the eight rows that
// a tensor core reads at once lie in different banks.
//
// Source: Dao 2023, "FlashAttention-2".
#pragma once
#include "tensor_core.cuh"

constexpr int TILE = 64, TILE_THREADS = 128, QUERIES_AT_ONCE = 32;
constexpr float LOG2_E = 1.44269504088896f, LN_2 = 0.693147180559945f;

// How queries, keys and values stand: (rows, heads, head_dim).
struct Attended {
    int n_queries, n_rows, n_heads, n_kv_heads, head_dim;
    float scale;
};

// Starts to copy rows `first` to `first + ROWS` of one head to shared memory; zeros below `n_rows` and beyond head_dim.
template <int D, int ROWS>
__device__ __forceinline__ void start_rows(bf16* to, const bf16* from, i64 first, i64 n_rows, int head, int n_heads, int head_dim) {
    constexpr int GROUPS = D / 8;
    const bool vectors = head_dim % 8 == 0 && is_aligned(from);
    for (int at = threadIdx.x; at < ROWS * GROUPS; at += TILE_THREADS) {
        const int row = at / GROUPS, column = at % GROUPS * 8;
        const bool exists = first + row < n_rows && column < head_dim;
        const bf16* place = from + (exists ? ((first + row) * n_heads + head) * head_dim + column : 0);
        bf16* target = to + row * (D + 8) + column;
        if (vectors) {
            start_copy(target, place, exists);
        } else {
            for (int i = 0; i < 8; i++) target[i] = exists && column + i < head_dim ? place[i] : __float2bfloat16(0.0f);
        }
    }
}

// sums[i] = left right^T for 16 rows and 8 N columns: `left` has 16 rows in shared memory, `right` 8 N.
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

// sums += p values for 16 rows: p has 8 N columns, `values` as many rows in shared memory.
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

// Writes 16 rows of sums times a factor for either row of a lane, through the warp's own 16 rows of shared memory so that global
// memory is written in whole vectors. `first`: row of the result of the warp's first row.
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

__device__ __forceinline__ float over_row(float x, bool takes_max) {
#pragma unroll
    for (int other = 1; other < 4; other *= 2) {
        const float theirs = __shfl_xor_sync(ALL_LANES, x, other);
        x = takes_max ? fmaxf(x, theirs) : x + theirs;
    }
    return x;
}

// The row that a query stands in; what is no query stands before all rows and sees none.
__device__ __forceinline__ i64 row_of(const unsigned* rows, i64 query, i64 n_queries) {
    return query < n_queries ? (i64)rows[query] : -1;
}

// q: (n_queries, heads, D); k, v: (n_rows, kv_heads, D); out as q; logsumexp: (heads, n_queries). forward: (tiles, 3); keys: the lists
// that it cuts; rows: (n_queries); ends: (n_rows). Grid: tiles of queries, heads.
//
// Dynamic shared memory: 3 * 64 rows (52 KiB at D = 128): queries, keys, values; while scores are computed the values are on their
// way, while values are weighed the next keys. At D = 128 136 registers on sm_90. Floor: 4 D flops for each query and key that see
// each other, over the tensor cores' rate; for short sequences the bytes of q, k, v and out.
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
        __syncthreads(); // the keys are there, and nobody reads the last values any more
        start(values_here, v, entry);
        float p[TILE / 8][4];
        scores<D, TILE / 8>(p, own_queries, keys_here);
        __syncthreads(); // nobody reads the keys any more
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
        __syncthreads(); // the values are there
        add_products<D, TILE / 8>(sums, p, values_here);
    }

    copies_done<0>();
    const float low = over_row(total[0], false), high = over_row(total[1], false); // 0 where nothing is seen; else NaN stays NaN
    __syncthreads(); // a list may be empty: then the copies of other threads end here
    write_rows<D>(out, own_queries, sums, low == 0.0f ? 0.0f : 1.0f / low, high == 0.0f ? 0.0f : 1.0f / high, first + warp * 16,
                  shape.n_queries, head, shape.n_heads, shape.head_dim);
    if (t != 0) return;
    float* own_sums = logsumexp + (i64)head * shape.n_queries;
    if (own < shape.n_queries) own_sums[own] = (max[0] + log2f(low)) * LN_2;
    if (own + 8 < shape.n_queries) own_sums[own + 8] = (max[1] + log2f(high)) * LN_2;
}

// deltas[head][query] = sum(grad * out) of a head of a query. A warp takes one. Floor: 4 bytes a value.
extern "C" __global__ void attention_delta(const bf16* out, const bf16* grad, float* deltas, i64 n_queries, int n_heads, int head_dim) {
    const i64 place = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (place >= n_queries * n_heads) return;
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (int i = lane; i < head_dim; i += 32) sum += widened(out[place * head_dim + i]) * widened(grad[place * head_dim + i]);
    sum = warp_sum(sum);
    if (lane == 0) deltas[place % n_heads * n_queries + place / n_heads] = sum;
}

// Gradient of the queries: with P the probabilities and g the gradient, dP = g V^T, dS = P (dP - pull), dQ = scale dS K.
// Grid, lists: as `attend`. Dynamic shared memory: 4 * 64 rows (68 KiB at D = 128): queries, their gradients, keys, values. Scores
// stand in two halves of 32 keys: at D = 128 130 registers on sm_90. Floor: 6 D flops a pair.
template <int D>
__device__ __forceinline__ void query_gradients(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,
                                                const float* deltas, bf16* dq, const unsigned* forward, const unsigned* keys,
                                                const unsigned* rows, const unsigned* ends, const Attended& shape) {
    constexpr int SPACE = TILE * (D + 8);
    bf16* queries_here = reinterpret_cast<bf16*>(shared_memory);
    bf16 *grad_here = queries_here + SPACE, *keys_here = grad_here + SPACE, *values_here = keys_here + SPACE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int head = blockIdx.y, kv_head = head / (shape.n_heads / shape.n_kv_heads);
    const i64 first = (i64)forward[3 * blockIdx.x] * TILE, own = first + warp * 16 + g;
    const unsigned begin = forward[3 * blockIdx.x + 1], end = forward[3 * blockIdx.x + 2];
    start_rows<D, TILE>(queries_here, q, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
    start_rows<D, TILE>(grad_here, grad, first, shape.n_queries, head, shape.n_heads, shape.head_dim);

    i64 row[2];
    float log_sum[2], pull[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const i64 query = own + 8 * half, place = (i64)head * shape.n_queries + query;
        row[half] = row_of(rows, query, shape.n_queries);
        log_sum[half] = query < shape.n_queries ? logsumexp[place] * LOG2_E : 0.0f;
        pull[half] = query < shape.n_queries ? deltas[place] : 0.0f;
    }
    const float factor = shape.scale * LOG2_E;
    float sums[D / 8][4] = {};
    const bf16 *own_queries = queries_here + warp * 16 * (D + 8), *own_grad = grad_here + warp * 16 * (D + 8);

    for (unsigned entry = begin; entry < end; entry++) {
        const i64 first_key = (i64)(keys[entry] >> 1) * TILE;
        __syncthreads(); // nobody reads the last keys and values any more
        start_rows<D, TILE>(keys_here, k, first_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
        start_rows<D, TILE>(values_here, v, first_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
        end_copies();
        copies_done<0>();
        __syncthreads();
#pragma unroll
        for (int part = 0; part < 2; part++) {
            float p[4][4], dp[4][4];
            scores<D, 4>(p, own_queries, keys_here + part * 32 * (D + 8));
            scores<D, 4>(dp, own_grad, values_here + part * 32 * (D + 8));
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float share = power_of_two(p[i][j] * factor - log_sum[j / 2]);
                    if (keys[entry] & 1) {
                        const i64 key = first_key + part * 32 + i * 8 + 2 * t + j % 2;
                        if (key > row[j / 2] || key >= shape.n_rows || row[j / 2] >= (i64)ends[key]) share = 0.0f;
                    }
                    p[i][j] = share * (dp[i][j] - pull[j / 2]);
                }
            add_products<D, 4>(sums, p, keys_here + part * 32 * (D + 8));
        }
    }
    end_copies();
    copies_done<0>();
    __syncthreads(); // a list may be empty: then the copies of other threads end here
    write_rows<D>(dq, queries_here + warp * 16 * (D + 8), sums, shape.scale, shape.scale, first + warp * 16, shape.n_queries, head,
                  shape.n_heads, shape.head_dim);
}

// Gradients of keys and values of one item, a part of the list of one tile of keys: dV = P^T g, dK = scale dS^T Q, with P and dS
// computed transposed, so that a warp's 16 rows are keys. backward: (items, 4): tile of keys, its list in `queries`, place of the sums.
// dk_sums, dv_sums: (items, kv_heads, 64, D) f32. Grid: items, kv_heads.
//
// Dynamic shared memory: 2 * 64 + 2 * 32 rows (52 KiB at D = 128): keys, values, and 32 queries and gradients at a time. At D = 128
// 238 registers on sm_90. Floor: 8 D flops a pair.
template <int D>
__device__ __forceinline__ void key_gradients(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,
                                              const float* deltas, float* dk_sums, float* dv_sums, const unsigned* backward,
                                              const unsigned* queries, const unsigned* rows, const unsigned* ends, const Attended& shape) {
    __shared__ float logsumexp_here[QUERIES_AT_ONCE], deltas_here[QUERIES_AT_ONCE];
    __shared__ int rows_here[QUERIES_AT_ONCE];
    bf16* keys_here = reinterpret_cast<bf16*>(shared_memory);
    bf16* values_here = keys_here + TILE * (D + 8);
    bf16* queries_here = values_here + TILE * (D + 8);
    bf16* grad_here = queries_here + QUERIES_AT_ONCE * (D + 8);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int kv_head = blockIdx.y, group = shape.n_heads / shape.n_kv_heads;
    const i64 first_key = (i64)backward[4 * blockIdx.x] * TILE, own_key = first_key + warp * 16 + g;
    const unsigned begin = backward[4 * blockIdx.x + 1], end = backward[4 * blockIdx.x + 2];
    start_rows<D, TILE>(keys_here, k, first_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
    start_rows<D, TILE>(values_here, v, first_key, shape.n_rows, kv_head, shape.n_kv_heads, shape.head_dim);
    // A key that is not there ends before any query.
    const i64 ends_at[2] = {own_key < shape.n_rows ? (i64)ends[own_key] : -1, own_key + 8 < shape.n_rows ? (i64)ends[own_key + 8] : -1};
    const float factor = shape.scale * LOG2_E;
    float dk[D / 8][4] = {}, dv[D / 8][4] = {};
    const bf16 *own_keys = keys_here + warp * 16 * (D + 8), *own_values = values_here + warp * 16 * (D + 8);

    // Tiles of queries, their halves, the heads that share the key-value head: one loop over all.
    const int n_steps = (int)(end - begin) * (TILE / QUERIES_AT_ONCE) * group;
    for (int step = 0; step < n_steps; step++) {
        const unsigned entry = queries[begin + step / ((TILE / QUERIES_AT_ONCE) * group)];
        const int head = kv_head * group + step % group, part = step / group % (TILE / QUERIES_AT_ONCE);
        const i64 first = (i64)(entry >> 1) * TILE + part * QUERIES_AT_ONCE;
        if (first >= shape.n_queries) continue;
        __syncthreads(); // nobody reads the last queries any more
        start_rows<D, QUERIES_AT_ONCE>(queries_here, q, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
        start_rows<D, QUERIES_AT_ONCE>(grad_here, grad, first, shape.n_queries, head, shape.n_heads, shape.head_dim);
        end_copies();
        if (threadIdx.x < QUERIES_AT_ONCE) {
            const i64 query = first + threadIdx.x, place = (i64)head * shape.n_queries + query;
            const bool exists = query < shape.n_queries;
            logsumexp_here[threadIdx.x] = exists ? logsumexp[place] * LOG2_E : 0.0f;
            deltas_here[threadIdx.x] = exists ? deltas[place] : 0.0f;
            rows_here[threadIdx.x] = (int)row_of(rows, query, shape.n_queries);
        }
        copies_done<0>();
        __syncthreads();
        float p[QUERIES_AT_ONCE / 8][4], ds[QUERIES_AT_ONCE / 8][4];
        scores<D, QUERIES_AT_ONCE / 8>(p, own_keys, queries_here);
#pragma unroll
        for (int i = 0; i < QUERIES_AT_ONCE / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int column = i * 8 + 2 * t + j % 2;
                p[i][j] = power_of_two(p[i][j] * factor - logsumexp_here[column]);
                const i64 row = rows_here[column];
                if ((entry & 1 || row < 0) && (own_key + j / 2 * 8 > row || row >= ends_at[j / 2])) p[i][j] = 0.0f;
            }
        add_products<D, QUERIES_AT_ONCE / 8>(dv, p, grad_here);
        scores<D, QUERIES_AT_ONCE / 8>(ds, own_values, grad_here);
#pragma unroll
        for (int i = 0; i < QUERIES_AT_ONCE / 8; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) ds[i][j] = p[i][j] * (ds[i][j] - deltas_here[i * 8 + 2 * t + j % 2]);
        add_products<D, QUERIES_AT_ONCE / 8>(dk, ds, queries_here);
    }

    end_copies();
    copies_done<0>();
    const i64 place = ((i64)backward[4 * blockIdx.x + 3] * shape.n_kv_heads + kv_head) * TILE + warp * 16 + g;
#pragma unroll
    for (int i = 0; i < D / 8; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int column = i * 8 + 2 * t + j % 2;
            if (column >= shape.head_dim) continue;
            const i64 at = (place + j / 2 * 8) * shape.head_dim + column;
            dk_sums[at] = dk[i][j] * shape.scale, dv_sums[at] = dv[i][j];
        }
}

// out[row] = sum of the parts of the row's tile of keys in the order of its items; parts: (items, kv_heads, 64, D) f32; sums:
// (tiles + 1), the first item of each tile; out: (n_rows, kv_heads, D). Grid: tiles of keys, kv_heads. Floor: 4 bytes a value of the
// parts, 2 of the result.
extern "C" __global__ void key_gradient_sums(const float* parts, const unsigned* sums, bf16* out, i64 n_rows, int n_kv_heads,
                                             int head_dim) {
    const i64 first = (i64)blockIdx.x * TILE;
    const unsigned begin = sums[blockIdx.x], end = sums[blockIdx.x + 1];
    for (int at = threadIdx.x; at < TILE * head_dim; at += blockDim.x) {
        const i64 row = first + at / head_dim;
        if (row >= n_rows) return;
        float sum = 0.0f;
        for (unsigned item = begin; item < end; item++) sum += parts[((i64)item * n_kv_heads + blockIdx.y) * TILE * head_dim + at];
        out[(row * n_kv_heads + blockIdx.y) * head_dim + at % head_dim] = __float2bfloat16(sum);
    }
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
    extern "C" __global__ void __launch_bounds__(TILE_THREADS)                                                                   \
        key_gradients_##D(const bf16* q, const bf16* k, const bf16* v, const bf16* grad, const float* logsumexp,                 \
                          const float* deltas, float* dk_sums, float* dv_sums, const unsigned* backward,                         \
                          const unsigned* queries, const unsigned* rows, const unsigned* ends, int n_queries, int n_rows,       \
                          int n_heads, int n_kv_heads, int head_dim, float scale) {                                              \
        const Attended shape = {n_queries, n_rows, n_heads, n_kv_heads, head_dim, scale};                                        \
        key_gradients<D>(q, k, v, grad, logsumexp, deltas, dk_sums, dv_sums, backward, queries, rows, ends, shape);                \
    }

ATTENTION_OF_WIDTH(32)
ATTENTION_OF_WIDTH(64)
ATTENTION_OF_WIDTH(96)
ATTENTION_OF_WIDTH(128)
