// Gradient of a row lookup in which rows occur more than once, such as that of an embedding; added in a fixed order.
#pragma once

#include "common.cuh"

// out[row] = sum of grad[index[j]] for j from starts[row] to starts[row + 1], in that order; zeros for a row without entries in `index`.
// grad: (n, width); out: (n_rows, width); starts: (n_rows + 1). One block per row.
extern "C" __global__ void sum_rows(
    const float* grad, const unsigned* starts, const unsigned* index, float* out, i64 n_rows, i64 width
) {
    const i64 row = blockIdx.x;
    if (row >= n_rows) return;
    const unsigned start = starts[row], end = starts[row + 1];
    for (i64 column = threadIdx.x; column < width; column += blockDim.x) {
        float sum = 0.0f;
        for (unsigned j = start; j < end; j++) sum += grad[(i64)index[j] * width + column];
        out[row * width + column] = sum;
    }
}
