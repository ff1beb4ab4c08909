// candle's kernels are written for GPUs only: they test `__CUDA_ARCH__` for supported features. This file has what they need in addition
// to cuda_on_cpu.h.
#pragma once

#include <cuda/std/limits>

#define __CUDA_ARCH__ 800
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
