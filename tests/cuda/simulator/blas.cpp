// The used part of cuBLAS: matrix products with f32 sums in ascending order of k and one rounding at the end.
//
// Differences from cuBLAS: the order of sums is fixed, and TF32 is computed as f32. As in cuBLAS, unsupported combinations of types are
// rejected; so are matrices that exceed their allocation.
#include "libraries.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

namespace {

// The used values of cublasStatus_t, cublasOperation_t and cublasComputeType_t.
enum Status { success = 0, not_initialized = 1, invalid_value = 7, execution_failed = 13, not_supported = 15 };
enum Operation { as_is = 0, transposed = 1, conjugated = 2 };
enum Compute {
    compute_f32 = 68, compute_f32_pedantic = 69, compute_f64 = 70, compute_i32 = 72,
    compute_f32_fast_f16 = 74, compute_f32_fast_bf16 = 75, compute_f32_fast_tf32 = 77
};

struct Handle {
    void* stream = nullptr;
    int pointer_mode = 0; // 0: alpha and beta are in host memory
    // The caller's workspace; null is cuBLAS's own. Not used, but it must remain allocated while products are in progress.
    const void* workspace = nullptr;
    size_t workspace_bytes = 0;
};

struct Matrix {
    const void* data;
    int type, leading;
    long long stride;
};

struct Product {
    int transpose_a, transpose_b, m, n, k;
    Matrix a, b, c;
    int batch, compute;
};

size_t bytes_of(int type) {
    switch (type) {
    case CUDA_R_64F: return 8;
    case CUDA_R_32F:
    case CUDA_R_32I: return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF: return 2;
    case CUDA_R_8I: return 1;
    default: return 0;
    }
}

template <class Sum> Sum loaded(const void* data, int type, size_t at) {
    switch (type) {
    case CUDA_R_64F: return Sum(static_cast<const double*>(data)[at]);
    case CUDA_R_32F: return Sum(static_cast<const float*>(data)[at]);
    case CUDA_R_32I: return Sum(static_cast<const int32_t*>(data)[at]);
    case CUDA_R_8I: return Sum(static_cast<const int8_t*>(data)[at]);
    case CUDA_R_16F: return Sum(__half2float(static_cast<const __half*>(data)[at]));
    default: return Sum(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]));
    }
}

template <class Sum> void store(void* data, int type, size_t at, Sum value) {
    switch (type) {
    case CUDA_R_64F: static_cast<double*>(data)[at] = double(value); break;
    case CUDA_R_32F: static_cast<float*>(data)[at] = float(value); break;
    case CUDA_R_32I: static_cast<int32_t*>(data)[at] = int32_t(value); break;
    case CUDA_R_16F: static_cast<__half*>(data)[at] = __float2half(float(value)); break;
    default: static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16(float(value)); break;
    }
}

// The combinations of types that cuBLAS supports (documentation of `cublasGemmEx`, table of supported types).
bool supported(const Product& p) {
    if (p.a.type != p.b.type) return false;
    const int in = p.a.type, out = p.c.type;
    switch (p.compute) {
    case compute_f64: return in == CUDA_R_64F && out == CUDA_R_64F;
    case compute_i32: return in == CUDA_R_8I && out == CUDA_R_32I;
    case compute_f32:
    case compute_f32_pedantic:
        if (in == CUDA_R_8I) return out == CUDA_R_32F;
        if (in == CUDA_R_16F || in == CUDA_R_16BF) return out == in || out == CUDA_R_32F;
        return in == CUDA_R_32F && out == CUDA_R_32F;
    case compute_f32_fast_f16:
    case compute_f32_fast_bf16:
    case compute_f32_fast_tf32: return in == CUDA_R_32F && out == CUDA_R_32F;
    default: return false;
    }
}

bool lies_on_the_device(const Matrix& matrix, int rows, int columns, int batch, const char* name) {
    if (matrix.leading < rows) {
        std::fprintf(stderr, "simulator: the leading dimension of %s is %d, less than its %d rows\n", name, matrix.leading, rows);
        return false;
    }
    const size_t last = size_t(batch - 1) * size_t(matrix.stride) + size_t(columns - 1) * size_t(matrix.leading) + size_t(rows);
    if (querl_simulator_holds(matrix.data, last * bytes_of(matrix.type))) return true;
    std::fprintf(stderr, "simulator: matrix %s of %d x %d x %d leaves its allocation\n", name, batch, rows, columns);
    return false;
}

// Converts the factors: `op(A)` to columns of m, `op(B)` to columns of k, both without gaps.
template <class Sum>
std::vector<Sum> gathered(const Matrix& matrix, int transpose, int rows, int columns, size_t offset) {
    std::vector<Sum> all(size_t(rows) * columns);
    for (int column = 0; column < columns; column++)
        for (int row = 0; row < rows; row++) {
            const size_t at = transpose ? size_t(row) * matrix.leading + column : size_t(column) * matrix.leading + row;
            all[size_t(column) * rows + row] = loaded<Sum>(matrix.data, matrix.type, offset + at);
        }
    return all;
}

template <class Sum> void multiply(const Product& p, Sum alpha, Sum beta) {
    std::vector<Sum> sums(size_t(p.m));
    for (int batch = 0; batch < p.batch; batch++) {
        const auto a = gathered<Sum>(p.a, p.transpose_a, p.m, p.k, size_t(batch) * p.a.stride);
        const auto b = gathered<Sum>(p.b, p.transpose_b, p.k, p.n, size_t(batch) * p.b.stride);
        void* c = const_cast<void*>(p.c.data);
        for (int column = 0; column < p.n; column++) {
            std::fill(sums.begin(), sums.end(), Sum(0));
            for (int k = 0; k < p.k; k++) {
                const Sum factor = b[size_t(column) * p.k + k];
                const Sum* from = &a[size_t(k) * p.m];
                for (int row = 0; row < p.m; row++) sums[size_t(row)] += from[row] * factor;
            }
            for (int row = 0; row < p.m; row++) {
                const size_t at = size_t(batch) * p.c.stride + size_t(column) * p.c.leading + row;
                // With beta 0 the old value is not read: it may be NaN.
                const Sum before = beta == Sum(0) ? Sum(0) : beta * loaded<Sum>(c, p.c.type, at);
                store(c, p.c.type, at, alpha * sums[size_t(row)] + before);
            }
        }
    }
}

template <class Sum> Status submitted(const Handle& handle, const Product& p, const void* alpha, const void* beta) {
    if (handle.pointer_mode != 0) return not_supported;
    const Sum scale = *static_cast<const Sum*>(alpha), keep = *static_cast<const Sum*>(beta);
    return simulator::submit(handle.stream, [=] { multiply<Sum>(p, scale, keep); }) == 0 ? success : execution_failed;
}

Status product(void* handle, const Product& p, const void* alpha, const void* beta) {
    if (!handle) return not_initialized;
    if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) return invalid_value;
    if (p.m == 0 || p.n == 0 || p.batch == 0) return success;
    if (!supported(p)) {
        std::fprintf(stderr, "simulator: cuBLAS has no product of types %d x %d -> %d with compute type %d\n", p.a.type, p.b.type, p.c.type, p.compute);
        return not_supported;
    }
    const bool lies = lies_on_the_device(p.a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.batch, "A") &&
                      lies_on_the_device(p.b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.batch, "B") &&
                      lies_on_the_device(p.c, p.m, p.n, p.batch, "C");
    if (!lies) return invalid_value;
    const Handle& known = *static_cast<Handle*>(handle);
    if (known.workspace && !querl_simulator_holds(known.workspace, known.workspace_bytes)) {
        std::fprintf(stderr, "simulator: the workspace of cuBLAS was given back\n");
        return execution_failed;
    }
    if (p.compute == compute_f64) return submitted<double>(known, p, alpha, beta);
    if (p.compute == compute_i32) return submitted<int32_t>(known, p, alpha, beta);
    return submitted<float>(known, p, alpha, beta);
}

} // namespace

EXPORTED int cublasCreate_v2(void** handle) {
    *handle = new Handle;
    return success;
}
EXPORTED int cublasDestroy_v2(void* handle) {
    delete static_cast<Handle*>(handle);
    return success;
}
EXPORTED int cublasSetStream_v2(void* handle, void* stream) {
    // Resets the workspace to cuBLAS's own, as documented for `cublasSetStream`, even if the stream is the same.
    *static_cast<Handle*>(handle) = {stream, static_cast<Handle*>(handle)->pointer_mode};
    return success;
}
EXPORTED int cublasGetStream_v2(void* handle, void** stream) {
    *stream = static_cast<Handle*>(handle)->stream;
    return success;
}
EXPORTED int cublasSetPointerMode_v2(void* handle, int mode) {
    static_cast<Handle*>(handle)->pointer_mode = mode;
    return success;
}
EXPORTED int cublasGetPointerMode_v2(void* handle, int* mode) {
    *mode = static_cast<Handle*>(handle)->pointer_mode;
    return success;
}
EXPORTED int cublasSetMathMode(void*, int) { return success; }
EXPORTED int cublasSetWorkspace_v2(void* handle, void* workspace, size_t bytes) {
    static_cast<Handle*>(handle)->workspace = workspace;
    static_cast<Handle*>(handle)->workspace_bytes = bytes;
    return success;
}
EXPORTED int cublasGetVersion_v2(void*, int* version) {
    *version = 130000;
    return success;
}

EXPORTED int cublasGemmStridedBatchedEx(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                                        const void* a, int type_a, int leading_a, long long stride_a, const void* b, int type_b,
                                        int leading_b, long long stride_b, const void* beta, void* c, int type_c, int leading_c,
                                        long long stride_c, int batch, int compute, int) {
    return product(handle,
                   {transpose_a, transpose_b, m, n, k, {a, type_a, leading_a, stride_a}, {b, type_b, leading_b, stride_b},
                    {c, type_c, leading_c, stride_c}, batch, compute},
                   alpha, beta);
}
EXPORTED int cublasGemmEx(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha, const void* a,
                          int type_a, int leading_a, const void* b, int type_b, int leading_b, const void* beta, void* c, int type_c,
                          int leading_c, int compute, int algorithm) {
    return cublasGemmStridedBatchedEx(handle, transpose_a, transpose_b, m, n, k, alpha, a, type_a, leading_a, 0, b, type_b, leading_b,
                                      0, beta, c, type_c, leading_c, 0, 1, compute, algorithm);
}

#define GEMM(gemm, batched, Real, type, compute)                                                                                  \
    EXPORTED int batched(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const Real* alpha, const Real* a,   \
                         int leading_a, long long stride_a, const Real* b, int leading_b, long long stride_b, const Real* beta,   \
                         Real* c, int leading_c, long long stride_c, int batch) {                                                 \
        return cublasGemmStridedBatchedEx(handle, transpose_a, transpose_b, m, n, k, alpha, a, type, leading_a, stride_a, b,      \
                                          type, leading_b, stride_b, beta, c, type, leading_c, stride_c, batch, compute, 0);      \
    }                                                                                                                             \
    EXPORTED int gemm(void* handle, int transpose_a, int transpose_b, int m, int n, int k, const Real* alpha, const Real* a,      \
                      int leading_a, const Real* b, int leading_b, const Real* beta, Real* c, int leading_c) {                    \
        return batched(handle, transpose_a, transpose_b, m, n, k, alpha, a, leading_a, 0, b, leading_b, 0, beta, c, leading_c, 0, \
                       1);                                                                                                        \
    }
GEMM(cublasSgemm_v2, cublasSgemmStridedBatched, float, CUDA_R_32F, compute_f32)
GEMM(cublasDgemm_v2, cublasDgemmStridedBatched, double, CUDA_R_64F, compute_f64)
