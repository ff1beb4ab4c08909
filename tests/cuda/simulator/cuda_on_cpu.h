// CUDA C++ for the host compiler: with this header first, a .cu file compiles with g++, and its kernels run on the CPU.
//
// Supported: kernels of the form `extern "C" __global__ void name(...)`, `__syncthreads`, warp functions with the suffix `_sync`,
// atomics, static and dynamic shared memory (`extern __shared__ __align__(16) unsigned char shared_memory[];`), bf16 and f16.
// Each kernel becomes a function that runs one launch, thread by thread and block by block, on one CPU thread.
// Not simulated: speed, tensor cores, inline PTX, cooperative launches, launches from kernels.
//
// `__CUDA_ARCH__` is undefined: code under `#ifdef __CUDA_ARCH__` is for the GPU and needs a portable branch.
//
// Needs CUDA's headers (cuda_runtime, from host/querl-gpu/toolkit.sh) and `-std=c++17 -fno-extern-tls-init`; see compile.sh.
#pragma once

// The standard library first: CUDA's headers define `__noinline__`, which libstdc++ uses as the name of an attribute.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include <math.h>
#include <sys/mman.h>
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __align__
#undef __launch_bounds__
#undef __grid_constant__

// compile.sh reads from the preprocessor's output the kernels of a file and the names of its dynamic shared memory.
#ifdef CUDA_ON_CPU_NAMES
#define __global__ CUDA_ON_CPU_GLOBAL
#define __shared__ CUDA_ON_CPU_SHARED
#define __align__(bytes)
#else
#define __global__
#define __shared__ thread_local
#define __align__(bytes) __attribute__((aligned(bytes)))
#endif
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

#include "on_cpu/fibers.h"
#include "on_cpu/block.h"
#include "on_cpu/warp.h"
#include "on_cpu/atomics.h"
#include "on_cpu/math.h"
#include "on_cpu/launch.h"
