// Launches: a grid of blocks, run one after another.
#pragma once

namespace cuda_on_cpu {

struct Grid {
    dim3 blocks, threads;
    size_t shared_bytes;
};

inline size_t count(dim3 size) { return size_t(size.x) * size.y * size.z; }

// The reason why a GPU would reject this launch, or null.
inline const char* refused(const Grid& grid) {
    if (count(grid.blocks) == 0 || count(grid.threads) == 0) return "a launch of no blocks or no threads";
    if (count(grid.threads) > 1024 || grid.threads.z > 64) return "more than 1024 threads in a block, or more than 64 in z";
    if (grid.blocks.x > 0x7fffffffu || grid.blocks.y > 65535 || grid.blocks.z > 65535) return "more blocks than y or z may have";
    if (grid.shared_bytes > shared_bytes_limit) return "more dynamic shared memory than a block can have";
    return nullptr;
}

// The bytes behind the requested shared memory, which must not change.
constexpr unsigned char untouched = 0xa5;

inline void prepare_shared_memory(size_t bytes) {
    std::memset(shared_memory, 0xff, bytes); // NaN, and the largest integers, because shared memory is uninitialised
    std::memset(shared_memory + bytes, untouched, std::min<size_t>(256, shared_bytes_limit - bytes));
}

inline const char* written_past(size_t bytes) {
    const size_t end = std::min<size_t>(bytes + 256, shared_bytes_limit);
    for (size_t at = bytes; at < end; at++)
        if (shared_memory[at] != untouched) return "written past the dynamic shared memory that the launch asked for";
    return nullptr;
}

// Calls `call` once for each thread of each block. Returns an error message, or null.
template <class Call> const char* run(const Grid& grid, const Call& call) {
    if (const char* reason = refused(grid)) return reason;
    blockDim = grid.threads;
    gridDim = grid.blocks;
    const size_t blocks = count(grid.blocks);
    for (size_t turn = 0; turn < blocks; turn++) {
        const size_t at = order() == Order::forward ? turn : blocks - 1 - turn;
        blockIdx = make_uint3(unsigned(at % grid.blocks.x), unsigned(at / grid.blocks.x % grid.blocks.y),
                              unsigned(at / grid.blocks.x / grid.blocks.y));
        prepare_shared_memory(grid.shared_bytes);
        if (const char* wrong = Block::current().run(grid.threads, call)) return wrong;
        if (const char* wrong = written_past(grid.shared_bytes)) return wrong;
    }
    return nullptr;
}

template <class... Parameters, size_t... At>
const char* run_with(void (*kernel)(Parameters...), const Grid& grid, void** parameters, std::index_sequence<At...>) {
    return run(grid, [=] { kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<Parameters>>*>(parameters[At])...); });
}

// With parameters in the driver's form: an array of pointers to the values.
template <class... Parameters>
const char* run_with(void (*kernel)(Parameters...), const Grid& grid, void** parameters) {
    return run_with(kernel, grid, parameters, std::index_sequence_for<Parameters...>());
}

// What the driver needs to know of a kernel's parameters: their sizes, and which of them are pointers.
struct Parameter {
    size_t bytes;
    bool is_pointer;
};

template <class... Parameters> const Parameter* parameters_of(void (*)(Parameters...)) {
    static const Parameter all[] = {{sizeof(Parameters), std::is_pointer_v<Parameters>}..., {0, false}};
    return all;
}

// For a test in C++: `launch(kernel, {blocks, threads, shared_bytes}, arguments...)`. Ends the program on an error.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, Arguments... arguments) {
    if (const char* wrong = run(grid, [=] { kernel(arguments...); })) {
        std::fprintf(stderr, "simulator: %s\n", wrong);
        std::abort();
    }
}

} // namespace cuda_on_cpu

// Makes a kernel callable by name from another library: `cuda_on_cpu_NAME(blocks, threads, shared_bytes, parameters)`; the first two are
// three numbers each. Returns an error message, or null. `cuda_on_cpu_parameters_NAME` lists the parameters; an entry of size 0 ends the
// list.
#define CUDA_ON_CPU_EXPORT(name)                                                                                                 \
    extern "C" __attribute__((visibility("default"))) const char* cuda_on_cpu_##name(                                            \
        const unsigned* blocks, const unsigned* threads, size_t shared_bytes, void** parameters) {                               \
        const cuda_on_cpu::Grid grid{dim3(blocks[0], blocks[1], blocks[2]), dim3(threads[0], threads[1], threads[2]),            \
                                     shared_bytes};                                                                              \
        return cuda_on_cpu::run_with(name, grid, parameters);                                                                    \
    }                                                                                                                            \
    extern "C" __attribute__((visibility("default"))) const cuda_on_cpu::Parameter* cuda_on_cpu_parameters_##name() {            \
        return cuda_on_cpu::parameters_of(name);                                                                                 \
    }
