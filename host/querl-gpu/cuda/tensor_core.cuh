// Tensor-core products of bf16 tiles (16 x 16 by 16 x 8) with f32 sums, loads of their operands from shared memory, and asynchronous
// copies. On a GPU by the PTX instructions `mma.sync`, `ldmatrix` and `cp.async`; elsewhere by portable equivalents.
//
// Fragments: lane l of a warp has g = l / 4 and t = l % 4. It holds
// - of A (16 x 16) the elements (g, 2t), (g + 8, 2t), (g, 2t + 8) and (g + 8, 2t + 8), each with the next element of its row;
// - of B (16 x 8) the elements (2t, g) and (2t + 8, g), each with the next element of its column;
// - of the sums (16 x 8) the elements (g, 2t) and (g + 8, 2t), each with the next element of its row.
//
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
#pragma once
#include "common.cuh"

// sums += A B, by `mma.sync`.
__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef __CUDA_ARCH__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float left[2][16], right[2][16]; // two rows of A, two columns of B
    for (int source = 0; source < 4; source++) {
        for (int part = 0; part < 4; part++) {
            const unsigned word = __shfl_sync(ALL_LANES, a[part], g * 4 + source);
            const int column = 2 * source + part / 2 * 8;
            left[part % 2][column] = low_half(word), left[part % 2][column + 1] = high_half(word);
        }
        for (int part = 0; part < 4; part++) {
            const unsigned word = __shfl_sync(ALL_LANES, part / 2 ? b1 : b0, (2 * t + part % 2) * 4 + source);
            const int row = 2 * source + part / 2 * 8;
            right[part % 2][row] = low_half(word), right[part % 2][row + 1] = high_half(word);
        }
    }
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) sums[i] += left[i / 2][k] * right[i % 2][k];
#endif
}

__device__ __forceinline__ unsigned word_at(const bf16* at) { return *reinterpret_cast<const unsigned*>(at); }

__device__ __forceinline__ unsigned word_of(bf16 low, bf16 high) {
    return (unsigned)__bfloat16_as_ushort(low) | (unsigned)__bfloat16_as_ushort(high) << 16;
}

#ifdef __CUDA_ARCH__
__device__ __forceinline__ unsigned shared_address(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }
#endif

// Loads A, a 16 x 16 tile in shared memory with rows `stride` values apart.
__device__ __forceinline__ void load_left(unsigned (&a)[4], const bf16* tile, int stride) {
    const int lane = threadIdx.x % 32;
#ifdef __CUDA_ARCH__
    const unsigned address = shared_address(tile + (lane % 16) * stride + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
#else
    const bf16* at = tile + lane / 4 * stride + lane % 4 * 2;
    a[0] = word_at(at), a[1] = word_at(at + 8 * stride), a[2] = word_at(at + 8), a[3] = word_at(at + 8 * stride + 8);
#endif
}

// Loads B of two adjacent products, together 16 x 16, from its transpose: each row of `tile` is a column of B. The first product takes
// b[0] and b[1], the second b[2] and b[3].
__device__ __forceinline__ void load_right_transposed(unsigned (&b)[4], const bf16* tile, int stride) {
    const int lane = threadIdx.x % 32;
#ifdef __CUDA_ARCH__
    const unsigned address = shared_address(tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
#else
    const bf16* at = tile + lane / 4 * stride + lane % 4 * 2;
    b[0] = word_at(at), b[1] = word_at(at + 8), b[2] = word_at(at + 8 * stride), b[3] = word_at(at + 8 * stride + 8);
#endif
}

// Like `load_right_transposed`, from B that is not transposed: each row of `tile` is a row of B.
__device__ __forceinline__ void load_right(unsigned (&b)[4], const bf16* tile, int stride) {
    const int lane = threadIdx.x % 32;
#ifdef __CUDA_ARCH__
    const unsigned address = shared_address(tile + (lane % 16) * stride + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
#else
    const bf16* at = tile + lane % 4 * 2 * stride + lane / 4;
    for (int part = 0; part < 4; part++) {
        const bf16* place = at + part % 2 * 8 * stride + part / 2 * 8;
        b[part] = word_of(place[0], place[stride]);
    }
#endif
}

// Converts two adjacent tiles of sums (16 x 8 each) to operand A (16 x 16) of another product.
__device__ __forceinline__ void as_left(unsigned (&a)[4], const float (&first)[4], const float (&second)[4]) {
    a[0] = packed(first[0], first[1]), a[1] = packed(first[2], first[3]);
    a[2] = packed(second[0], second[1]), a[3] = packed(second[2], second[3]);
}

// 2^x, with an error of about two units in the last place; 0 for -inf.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

// Starts an asynchronous copy of 16 bytes from global to shared memory, or writes zeros if not `exists`. Complete after `copies_done`.
__device__ __forceinline__ void start_copy(void* to, const void* from, bool exists) {
#ifdef __CUDA_ARCH__
    const int bytes = exists ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
    *reinterpret_cast<uint4*>(to) = exists ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}

// Like `start_copy`, for 4 bytes.
__device__ __forceinline__ void start_copy_of_word(void* to, const void* from, bool exists) {
#ifdef __CUDA_ARCH__
    const int bytes = exists ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
#else
    *reinterpret_cast<unsigned*>(to) = exists ? *reinterpret_cast<const unsigned*>(from) : 0;
#endif
}

// Ends a group of asynchronous copies (`cp.async.commit_group`).
__device__ __forceinline__ void end_copies() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the last `PENDING` groups of this thread's copies are in progress. Copies of other threads are visible after a
// barrier.
template <int PENDING> __device__ __forceinline__ void copies_done() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}
