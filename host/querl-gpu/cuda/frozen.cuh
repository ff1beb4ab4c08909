// Quantized frozen weights: packed once on the GPU, and unpacked to bf16 before a product of many rows (of few rows: few_rows.cuh).
// Launchers: src/device/weight.rs. CPU counterpart: kernels/packed_weight of querl-model, with the same codes and scales, but in panels;
// here a row is contiguous.
//
// | format | bytes per weight | code |
// |---|---|---|
// | int8 | 1.0625 | whole number from -127 to 127; the scale is the absolute maximum of 64 adjacent weights of a row, over 127 |
// | nf4 | 0.5625 | index of one of 16 values from -1 to 1, the first in the lower half of a byte; the scale is that absolute maximum |
// | fp8 | 1 | e4m3: 4 bits of exponent, 3 of mantissa; the scale is the absolute maximum of the row, over 448 |
//
// Sources: Dettmers et al. 2022, "LLM.int8()"; Dettmers et al. 2023, "QLoRA", appendix E; Micikevicius et al. 2022, "FP8 Formats for
// Deep Learning".
#pragma once
#include "elementwise.cuh"

enum Format { INT8 = 0, NF4 = 1, FP8 = 2, BF16 = 3 };

constexpr int GROUP = 64;
constexpr float FP8_MAX = 448.0f;

__device__ __forceinline__ float nf4_value(int index) {
    constexpr float values[16] = {-1.0f,         -0.6961928f,  -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
                                  -0.091050036f, 0.0f,         0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
                                  0.44070983f,   0.562617f,    0.72295684f,  1.0f};
    return values[index];
}

__device__ __forceinline__ unsigned nf4_code(float share) {
    unsigned code = 0;
#pragma unroll
    for (int i = 0; i < 15; i++) code += share > (nf4_value(i) + nf4_value(i + 1)) / 2.0f;
    return code;
}

// Converts to e4m3, rounding to nearest, ties to even; |x| must be at most 448.
__device__ __forceinline__ unsigned fp8_code(float x) {
    const unsigned sign = __float_as_uint(x) >> 24 & 0x80u;
    const float size = fabsf(x);
    if (size < 0.015625f) return sign | (unsigned)rintf(size * 512.0f); // subnormal, below 2^-6: multiples of 2^-9
    const unsigned bits = __float_as_uint(size), rounded = bits + 0x7ffffu + (bits >> 20 & 1u);
    return sign | min((rounded >> 20) - (120u << 3), 0x7eu);
}

// Converts e4m3 to f32: places exponent and mantissa bits in an f32 and multiplies by 2^120, the difference of the exponent biases. Also
// correct for subnormal codes.
__device__ __forceinline__ float fp8_value(unsigned code) {
    return __uint_as_float((code & 0x7fu) << 20) * 1.329227995784916e36f * (code & 0x80u ? -1.0f : 1.0f);
}

// Value of weight `i` of packed codes, without the scale; the first code is in the lowest bits. `shares`: the values of nf4 codes in shared
// memory, because registers cannot be indexed.
template <int FORMAT> __device__ __forceinline__ float value_of(const unsigned* words, int i, const float* shares) {
    if (FORMAT == NF4) return shares[words[i / 8] >> i % 8 * 4 & 15u];
    const unsigned code = words[i / 4] >> i % 4 * 8 & 255u;
    return FORMAT == INT8 ? (float)(signed char)code : fp8_value(code);
}

// Quantizes a weight. values: (n_out, n_in) bf16 or f32; codes: (n_out, line) bytes; scales: (n_out, groups) f32, with groups of 64 inputs
// (fp8: all inputs of a row). One warp per group. Floor: bytes of values, codes and scales.
template <int FORMAT, class T>
__device__ __forceinline__ void pack(const T* values, unsigned char* codes, float* scales, i64 n_out, int n_in, int line) {
    const int size = FORMAT == FP8 ? n_in : GROUP, n_groups = (n_in + size - 1) / size, lane = threadIdx.x % 32;
    const i64 n_warps = (i64)gridDim.x * (blockDim.x / 32);
    for (i64 at = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; at < n_out * n_groups; at += n_warps) {
        const i64 row = at / n_groups;
        const int start = (int)(at % n_groups) * size, end = min(start + size, n_in);
        const T* from = values + row * n_in;
        unsigned char* to = codes + row * line;
        float largest = 0.0f;
        for (int i = start + lane; i < end; i += 32) largest = fmaxf(largest, fabsf(widened(from[i])));
        largest = warp_max(largest);
        const float steps = FORMAT == INT8 ? 127.0f : FORMAT == FP8 ? FP8_MAX : 1.0f;
        // If all values are 0, or so small that the inverse scale overflows, all codes are 0.
        const float inverse = steps / largest < INFINITY ? steps / largest : 0.0f;
        if (lane == 0) scales[at] = largest / steps;
        // A lane packs two adjacent weights, which share a byte in nf4; groups begin at even inputs.
        for (int i = start + 2 * lane; i < end; i += 64) {
            const float first = widened(from[i]) * inverse, second = i + 1 < end ? widened(from[i + 1]) * inverse : 0.0f;
            if (FORMAT == NF4) {
                to[i / 2] = (unsigned char)(nf4_code(first) | (i + 1 < end ? nf4_code(second) << 4 : 0u));
            } else if (FORMAT == INT8) {
                to[i] = (unsigned char)(signed char)fminf(fmaxf(roundf(first), -127.0f), 127.0f);
                if (i + 1 < end) to[i + 1] = (unsigned char)(signed char)fminf(fmaxf(roundf(second), -127.0f), 127.0f);
            } else {
                to[i] = (unsigned char)fp8_code(first);
                if (i + 1 < end) to[i + 1] = (unsigned char)fp8_code(second);
            }
        }
    }
}

// Unpacks rows first, first + 1, ... or, if `ids` is not null, the rows `ids`, to y (n, n_in) bf16; zeros for a row from n_out on. Launch
// configuration: see elementwise.cuh. Floor: bytes of the codes, and 2 per weight; with more than a few hundred rows the product that
// follows takes longer.
template <int FORMAT>
__device__ __forceinline__ void unpack(const unsigned char* codes, const float* scales, const unsigned* ids, i64 first, bf16* y, i64 n,
                                       i64 n_out, int n_in, int line) {
    __shared__ float shares[16];
    if (threadIdx.x < 16) shares[threadIdx.x] = nf4_value(threadIdx.x);
    __syncthreads();
    const int n_groups = FORMAT == FP8 ? 1 : (n_in + GROUP - 1) / GROUP;
    const bool vectors = n_in % 8 == 0 && is_aligned(y) && is_aligned(codes);
    each_group(n, n_in, [&](i64 index, int column) {
        const i64 row = ids ? (i64)ids[index] : first + index;
        float v[8] = {};
        if (row < n_out) {
            const unsigned char* from = codes + row * line + (FORMAT == NF4 ? column / 2 : column);
            const float scale = scales[row * n_groups + (FORMAT == FP8 ? 0 : column / GROUP)];
            const int n_bytes = FORMAT == NF4 ? 4 : 8, n_there = FORMAT == NF4 ? (n_in - column + 1) / 2 : n_in - column;
            unsigned words[2] = {};
            if (vectors) {
                words[0] = reinterpret_cast<const unsigned*>(from)[0];
                if (FORMAT != NF4) words[1] = reinterpret_cast<const unsigned*>(from)[1];
            } else {
                for (int i = 0; i < n_bytes && i < n_there; i++) words[i / 4] |= (unsigned)from[i] << i % 4 * 8;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = value_of<FORMAT>(words, i, shares) * scale;
        }
        store_some(y + index * n_in, column, n_in, vectors, v);
    });
}

#define FROZEN_FORMAT(name, FORMAT)                                                                                              \
    extern "C" __global__ void pack_##name##_bf16(const bf16* values, unsigned char* codes, float* scales, i64 n_out, int n_in,  \
                                                  int line) {                                                                    \
        pack<FORMAT>(values, codes, scales, n_out, n_in, line);                                                                  \
    }                                                                                                                            \
    extern "C" __global__ void pack_##name##_f32(const float* values, unsigned char* codes, float* scales, i64 n_out, int n_in,  \
                                                 int line) {                                                                     \
        pack<FORMAT>(values, codes, scales, n_out, n_in, line);                                                                  \
    }                                                                                                                            \
    extern "C" __global__ void unpack_##name(const unsigned char* codes, const float* scales, const unsigned* ids, i64 first,   \
                                             bf16* y, i64 n, i64 n_out, int n_in, int line) {                                   \
        unpack<FORMAT>(codes, scales, ids, first, y, n, n_out, n_in, line);                                                      \
    }

FROZEN_FORMAT(int8, INT8)
FROZEN_FORMAT(nf4, NF4)
FROZEN_FORMAT(fp8, FP8)
