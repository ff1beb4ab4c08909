// Tests of cuda_on_cpu.h: barriers, shuffles, votes, atomics, shared memory, and that invalid kernels are detected.
// Built by tests/cuda/run.sh; exits with 0 if all tests pass.
#include <cuda_bf16.h>

extern "C" __global__ void __launch_bounds__(1024) reversed(const int* from, int* to) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    int* all = reinterpret_cast<int*>(shared_memory);
    all[threadIdx.x] = from[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    to[blockIdx.x * blockDim.x + threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}

// Thread t ends after t barriers: some end early, others wait many times.
extern "C" __global__ void staircase(int* sums) {
    __shared__ int steps;
    if (threadIdx.x == 0) steps = 0;
    __syncthreads();
    for (unsigned step = 0; step < threadIdx.x; step++) {
        atomicAdd(&steps, 1);
        __syncthreads();
    }
    atomicAdd(&sums[blockIdx.x], threadIdx.x == blockDim.x - 1 ? steps : 0);
}

extern "C" __global__ void warps(int* to) {
    const int lane = threadIdx.x % 32;
    int sum = lane, prefix = lane;
    for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
    for (int by = 1; by < 32; by *= 2) {
        const int before = __shfl_up_sync(0xffffffffu, prefix, by);
        if (lane >= by) prefix += before;
    }
    const unsigned odd = __ballot_sync(0xffffffffu, lane % 2);
    // The two halves of a warp exchange values independently.
    const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    const int first = __shfl_sync(half, lane, lane < 16 ? 0 : 16);
    const int width = __shfl_down_sync(0xffffffffu, lane, 4, 8);
    const int all[6] = {sum, prefix, int(odd), first, width, int(__reduce_max_sync(0xffffffffu, lane))};
    for (int value = 0; value < 6; value++) to[threadIdx.x * 6 + value] = all[value];
}

extern "C" __global__ void past_the_end() {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    shared_memory[threadIdx.x] = 1;
}

extern "C" __global__ void for_ever() {
    if (threadIdx.x < 8) __syncwarp();
    else __syncthreads();
}

extern "C" __global__ void rounded(const float* from, __nv_bfloat16* to, unsigned count) {
    const unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) to[at] = __float2bfloat16(from[at]);
}

#ifndef CUDA_ON_CPU_NAMES
#include <fstream>
#include <thread>

// Number of mappings in this process's address space.
static size_t pieces() {
    std::ifstream maps("/proc/self/maps");
    size_t lines = 0;
    for (std::string line; std::getline(maps, line);) lines++;
    return lines;
}

static int failures = 0;
static void expect(bool held, const char* what) {
    if (!held) std::printf("not so: %s\n", what), failures++;
}

template <class Kernel> static const char* wrong(Kernel kernel, unsigned threads, size_t shared_bytes) {
    return cuda_on_cpu::run({dim3(1), dim3(threads), shared_bytes}, [=] { kernel(); });
}

int main() {
    std::vector<int> from(3 * 1024), to(from.size());
    for (size_t at = 0; at < from.size(); at++) from[at] = int(at);
    cuda_on_cpu::launch(reversed, {dim3(3), dim3(1024), 4096}, from.data(), to.data());
    bool held = true;
    for (int at = 0; at < 3 * 1024; at++) held = held && to[at] == at / 1024 * 1024 + 1023 - at % 1024;
    expect(held, "a barrier lets every thread see what the others wrote");

    std::vector<int> sums(2);
    cuda_on_cpu::launch(staircase, {dim3(2), dim3(40), 0}, sums.data());
    expect(sums[0] == 40 * 39 / 2 && sums[1] == sums[0], "threads that have ended are not waited for");

    std::vector<int> lanes(64 * 6);
    cuda_on_cpu::launch(warps, {dim3(1), dim3(64), 0}, lanes.data());
    held = true;
    for (int thread = 0; thread < 64; thread++) {
        const int lane = thread % 32, *values = &lanes[thread * 6];
        const int expected[6] = {496, lane * (lane + 1) / 2, int(0xaaaaaaaau), lane < 16 ? 0 : 16,
                                 lane % 8 < 4 ? lane + 4 : lane, 31};
        held = held && std::equal(expected, expected + 6, values);
    }
    expect(held, "shuffles and votes read what each lane brought");

    const float floats[3] = {1.0f, 1.00390625f, 1.01171875f}; // the last two are ties, which round to even
    __nv_bfloat16 halves[3];
    void* parameters[3];
    const float* source = floats;
    __nv_bfloat16* target = halves;
    unsigned count = 3;
    parameters[0] = &source, parameters[1] = &target, parameters[2] = &count;
    expect(!cuda_on_cpu::run_with(rounded, {dim3(1), dim3(32), 0}, parameters), "parameters are taken as the driver takes them");
    expect(float(halves[1]) == 1.0f && float(halves[2]) == 1.015625f, "bf16 is rounded to nearest, ties to even");

    expect(!wrong(past_the_end, 64, 64), "shared memory is as large as asked for");
    expect(wrong(past_the_end, 65, 64), "a write past shared memory is found");
    expect(wrong(for_ever, 32, 0), "threads that wait for ever are found");
    expect(!wrong(past_the_end, 64, 64), "and the next launch is as if nothing had been");
    expect(wrong(past_the_end, 1025, 2048), "more threads than a block has are refused");

    // Symptom: each CPU thread kept its own stacks, until the system had no more memory mappings.
    auto elsewhere = [&] { cuda_on_cpu::launch(reversed, {dim3(3), dim3(1024), 4096}, from.data(), to.data()); };
    std::thread(elsewhere).join();
    const size_t before = pieces();
    for (int thread = 0; thread < 8; thread++) {
        std::fill(to.begin(), to.end(), -1);
        std::thread(elsewhere).join();
        held = to[0] == 1023 && to[3 * 1024 - 1] == 2048;
        expect(held, "a kernel does the same on another thread of the CPU");
    }
    expect(pieces() < before + 1000, "stacks of threads that have ended are used again");
    std::printf(failures ? "%d failed\n" : "all held\n", failures);
    return failures != 0;
}
#endif
