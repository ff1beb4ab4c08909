// Elementwise kernels, and kernels that gather or scatter rows by index. Launchers: src/device/elementwise.rs.
//
// Blocks of 256 threads, at most 16 per multiprocessor; a thread processes eight values at a time in a grid-stride loop. No shared
// memory, at most 48 registers. All are bound by memory bandwidth: floors count each byte that is read or written once.
#pragma once
#include "common.cuh"

// Grid-stride loop over `n` values: calls `f(at)` for each of this thread's groups of eight values.
template <class F> __device__ __forceinline__ void each_eight(i64 n, F f) {
    const i64 step = (i64)gridDim.x * blockDim.x * 8;
    for (i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < n; at += step) f(at);
}

// Grid-stride loop over `n_rows` rows of `width` values: calls `f(row, column)` for each of this thread's groups of at most eight adjacent
// values in a row.
template <class F> __device__ __forceinline__ void each_group(i64 n_rows, int width, F f) {
    const unsigned groups = ((unsigned)width + 7) / 8;
    const i64 step = (i64)gridDim.x * blockDim.x, n = n_rows * groups;
    for (i64 group = (i64)blockIdx.x * blockDim.x + threadIdx.x; group < n; group += step) {
        // A 64-bit division takes about 70 instructions, so a 32-bit one is used where it is sufficient.
        const i64 row = n <= 0xffffffffll ? (i64)((unsigned)group / groups) : group / groups;
        f(row, (int)(group - row * groups) * 8);
    }
}

// x: (n) f32; y: (n) bf16. Floor: 6 n bytes.
extern "C" __global__ void to_bf16(const float* x, bf16* y, i64 n) {
    const bool vectors = is_aligned(x) && is_aligned(y);
    each_eight(n, [&](i64 at) {
        float v[8];
        load_some(x, at, n, vectors, v);
        store_some(y, at, n, vectors, v);
    });
}

// Sets *mark to 1 if a value of x (n) is not finite in bf16. Threads write the same value without synchronisation. Floor: 4 n bytes.
extern "C" __global__ void mark_not_finite(const float* x, unsigned* mark, i64 n) {
    const bool vectors = is_aligned(x);
    bool is_finite = true;
    each_eight(n, [&](i64 at) {
        float v[8];
        load_some(x, at, n, vectors, v);
#pragma unroll
        for (int i = 0; i < 8; i++) is_finite = is_finite && isfinite(widened(__float2bfloat16(v[i])));
    });
    if (!is_finite) *mark = 1;
}

// x: (n) bf16; y: (n) f32. Floor: 6 n bytes.
extern "C" __global__ void to_f32(const bf16* x, float* y, i64 n) {
    const bool vectors = is_aligned(x) && is_aligned(y);
    each_eight(n, [&](i64 at) {
        float v[8];
        load_some(x, at, n, vectors, v);
        store_some(y, at, n, vectors, v);
    });
}

// sum += x; both (n) f32. Floor: 12 n bytes.
extern "C" __global__ void add(float* sum, const float* x, i64 n) {
    const bool vectors = is_aligned(x) && is_aligned(sum);
    each_eight(n, [&](i64 at) {
        float a[8], b[8];
        load_some(sum, at, n, vectors, a);
        load_some(x, at, n, vectors, b);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] += b[i];
        store_some(sum, at, n, vectors, a);
    });
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// y = silu(gate) * up; all (n) bf16. Floor: 6 n bytes.
extern "C" __global__ void swiglu(const bf16* gate, const bf16* up, bf16* y, i64 n) {
    const bool vectors = is_aligned(gate) && is_aligned(up) && is_aligned(y);
    each_eight(n, [&](i64 at) {
        float g[8], u[8];
        load_some(gate, at, n, vectors, g);
        load_some(up, at, n, vectors, u);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] = g[i] * sigmoid(g[i]) * u[i];
        store_some(y, at, n, vectors, g);
    });
}

// Backward pass of `swiglu`, with s = sigmoid(gate): dgate = grad up s (1 + gate (1 - s)), dup = grad gate s. Also recomputes y. All (n)
// bf16. Floor: 12 n bytes.
extern "C" __global__ void swiglu_gradients(const bf16* gate, const bf16* up, const bf16* grad, bf16* y, bf16* dgate, bf16* dup, i64 n) {
    const bool vectors = is_aligned(gate) && is_aligned(up) && is_aligned(grad) && is_aligned(y) && is_aligned(dgate) && is_aligned(dup);
    each_eight(n, [&](i64 at) {
        float g[8], u[8], d[8];
        load_some(gate, at, n, vectors, g);
        load_some(up, at, n, vectors, u);
        load_some(grad, at, n, vectors, d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float s = sigmoid(g[i]), dup = d[i] * g[i] * s, product = g[i] * s * u[i];
            d[i] *= u[i] * s * (1.0f + g[i] * (1.0f - s));
            g[i] = product;
            u[i] = dup;
        }
        store_some(y, at, n, vectors, g);
        store_some(dgate, at, n, vectors, d);
        store_some(dup, at, n, vectors, u);
    });
}

// y[i] = table[ids[i]], or zeros if ids[i] >= n_rows. table: (n_rows, width); y: (n, width).
template <class From, class To>
__device__ __forceinline__ void take_rows(const From* table, const unsigned* ids, To* y, i64 n, int width, i64 n_rows) {
    const bool vectors = width % 8 == 0 && is_aligned(table) && is_aligned(y);
    each_group(n, width, [&](i64 row, int column) {
        const i64 id = ids[row];
        float v[8];
        load_some(table + (id < n_rows ? id : 0) * width, column, id < n_rows ? width : 0, vectors, v);
        store_some(y + row * width, column, width, vectors, v);
    });
}

// Embedding lookup, converted to f32. Floor: 6 n width bytes.
extern "C" __global__ void gather_rows(const bf16* table, const unsigned* ids, float* y, i64 n, int width, i64 n_rows) {
    take_rows(table, ids, y, n, width, n_rows);
}

// Floor: 8 n width bytes.
extern "C" __global__ void pick_f32(const float* all, const unsigned* list, float* y, i64 n, int width, i64 n_rows) {
    take_rows(all, list, y, n, width, n_rows);
}

// Floor: 4 n width bytes.
extern "C" __global__ void pick_bf16(const bf16* all, const unsigned* list, bf16* y, i64 n, int width, i64 n_rows) {
    take_rows(all, list, y, n, width, n_rows);
}

// all[list[i]] += picked[i]. `list` has no row twice, so no atomics are needed. Floor: 12 n width bytes.
extern "C" __global__ void add_picked(float* all, const float* picked, const unsigned* list, i64 n, int width, i64 n_rows) {
    const bool vectors = width % 8 == 0 && is_aligned(all) && is_aligned(picked);
    each_group(n, width, [&](i64 row, int column) {
        const i64 id = list[row];
        if (id >= n_rows) return;
        float a[8], b[8];
        load_some(all + id * width, column, width, vectors, a);
        load_some(picked + row * width, column, width, vectors, b);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] += b[i];
        store_some(all + id * width, column, width, vectors, a);
    });
}

template <class To> __device__ __forceinline__ void repeat_row(const float* row, To* y, i64 n_rows, int width) {
    const bool vectors = width % 8 == 0 && is_aligned(row) && is_aligned(y);
    each_group(n_rows, width, [&](i64 index, int column) {
        float v[8];
        load_some(row, column, width, vectors, v);
        store_some(y + index * width, column, width, vectors, v);
    });
}

// y: (n_rows, width), each row a copy of `row`. Floor: 4 n_rows width bytes.
extern "C" __global__ void repeat_row_f32(const float* row, float* y, i64 n_rows, int width) { repeat_row(row, y, n_rows, width); }

// Floor: 2 n_rows width bytes.
extern "C" __global__ void repeat_row_bf16(const float* row, bf16* y, i64 n_rows, int width) { repeat_row(row, y, n_rows, width); }

// y[i] += row for every row i of y (n_rows, width) f32. Floor: 8 n_rows width bytes.
extern "C" __global__ void add_row(const float* row, float* y, i64 n_rows, int width) {
    const bool vectors = width % 8 == 0 && is_aligned(row) && is_aligned(y);
    each_group(n_rows, width, [&](i64 index, int column) {
        float a[8], b[8];
        load_some(y + index * width, column, width, vectors, a);
        load_some(row, column, width, vectors, b);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] += b[i];
        store_some(y + index * width, column, width, vectors, a);
    });
}
