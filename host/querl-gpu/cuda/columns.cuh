// Column-wise operations on matrices: scaling by a factor per column, and column sums. Launchers: src/device/elementwise.rs.
#pragma once
#include "elementwise.cuh"

// y = factors * x + bias in each row, or y += the same if `adds`. x, y: (n_rows, width); factors: (width); bias: (width) or null. A
// thread reads only the values that it writes, so x may be y. Launch configuration: see elementwise.cuh.
template <class From, class To>
__device__ __forceinline__ void scale_columns(const From* x, const float* factors, const float* bias, To* y, i64 n_rows, int width, int adds) {
    const bool vectors = width % 8 == 0 && is_aligned(x) && is_aligned(y) && is_aligned(factors) && is_aligned(bias);
    each_group(n_rows, width, [&](i64 row, int column) {
        float v[8], f[8], more[8] = {}, sum[8] = {};
        load_some(x + row * width, column, width, vectors, v);
        load_some(factors, column, width, vectors, f);
        if (bias) load_some(bias, column, width, vectors, more);
        if (adds) load_some(y + row * width, column, width, vectors, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = sum[i] + (f[i] * v[i] + more[i]);
        store_some(y + row * width, column, width, vectors, v);
    });
}

#define SCALE_COLUMNS(name, From, To)                                                                                           \
    extern "C" __global__ void scale_columns_##name(const From* x, const float* factors, const float* bias, To* y, i64 n_rows,   \
                                                    int width, int adds) {                                                       \
        scale_columns(x, factors, bias, y, n_rows, width, adds);                                                                 \
    }

// Floor: 8 n_rows width bytes, 12 if `adds`.
SCALE_COLUMNS(f32_f32, float, float)
// Floor: 6 n_rows width bytes.
SCALE_COLUMNS(f32_bf16, float, bf16)
// Floor: 4 n_rows width bytes.
SCALE_COLUMNS(bf16_bf16, bf16, bf16)

// sums[c] = sum over rows of a[row][c] * b[row][c], or of a[row][c] if b is null. a, b: (n_rows, width) bf16.
// A block of 256 threads processes 64 columns, as 32 groups of 8 threads with 8 columns per thread. A group sums every 32nd row, in
// ascending order; then one thread per column adds the 32 partial sums in the order of the groups. All threads reach the barrier, which
// separates the writes to `parts` from the reads. Floor: 2 n_rows width bytes, 4 with b.
extern "C" __global__ void column_totals(const bf16* a, const bf16* b, float* sums, i64 n_rows, int width) {
    __shared__ float parts[32][65];
    const int group = threadIdx.x % 8, first = threadIdx.x / 8, column = blockIdx.x * 64 + 8 * group;
    const bool vectors = width % 8 == 0 && is_aligned(a) && is_aligned(b);
    float sum[8] = {};
    if (column < width) {
        for (i64 row = first; row < n_rows; row += 32) {
            float x[8], y[8];
            load_some(a + row * width, column, width, vectors, x);
            if (b) load_some(b + row * width, column, width, vectors, y);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += b ? x[i] * y[i] : x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) parts[first][8 * group + i] = sum[i];
    __syncthreads();
    const int mine = blockIdx.x * 64 + threadIdx.x;
    if (threadIdx.x >= 64 || mine >= width) return;
    float all = 0.0f;
    for (int i = 0; i < 32; i++) all += parts[i][threadIdx.x];
    sums[mine] = all;
}
