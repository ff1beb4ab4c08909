// Modules, functions and launches. A module's image is only used for the names of its kernels; the executed kernels are compiled for the CPU
// into the libraries of the folder `kernels` next to this one (see compile.sh).
#include "driver.h"

#include <algorithm>
#include <dlfcn.h>
#include <glob.h>
#include <set>

namespace simulator {

using Run = const char* (*)(const unsigned* blocks, const unsigned* threads, size_t shared_bytes, void** parameters);

// As in on_cpu/launch.h.
struct Parameter {
    size_t bytes;
    bool is_pointer;
};

struct Function {
    std::string name;
    Run run;
    const Parameter* parameters;
    int shared_bytes_allowed = 48 * 1024; // until the program requests more
};

// Images: PTX is text that names its kernels; a fatbin is not parsed.
struct Module {
    std::string ptx;
    std::map<std::string, Function> functions;
};

static const std::vector<void*>& libraries() {
    static const std::vector<void*> all = [] {
        Dl_info here;
        dladdr(reinterpret_cast<void*>(&libraries), &here);
        const std::string path = here.dli_fname;
        glob_t found;
        std::vector<void*> opened;
        glob((path.substr(0, path.rfind('/')) + "/kernels/*.so").c_str(), 0, nullptr, &found);
        for (size_t at = 0; at < found.gl_pathc; at++) {
            void* library = dlopen(found.gl_pathv[at], RTLD_NOW | RTLD_LOCAL);
            if (!library) refuse(CUDA_ERROR_NOT_FOUND, "%s", dlerror());
            else opened.push_back(library);
        }
        globfree(&found);
        return opened;
    }();
    return all;
}

static bool names(const std::string& ptx, const std::string& kernel) {
    return ptx.empty() || ptx.find(".entry " + kernel + "(") != std::string::npos;
}

// The library with candle's kernels is the first in alphabetical order; a fatbin is querl's, whose libraries are searched from the end.
static bool find(const Module& module, Function& function) {
    if (!names(module.ptx, function.name)) return false;
    std::vector<void*> order = libraries();
    if (module.ptx.empty()) std::reverse(order.begin(), order.end());
    for (void* library : order) {
        function.run = reinterpret_cast<Run>(dlsym(library, ("cuda_on_cpu_" + function.name).c_str()));
        if (!function.run) continue;
        const auto parameters = dlsym(library, ("cuda_on_cpu_parameters_" + function.name).c_str());
        function.parameters = reinterpret_cast<const Parameter* (*)()>(parameters)();
        return true;
    }
    return false;
}

// Copies of a launch's parameters, kept until it is executed.
struct Arguments {
    std::vector<std::vector<char>> values;

    Arguments(const Function& function, void** given) {
        for (size_t at = 0; function.parameters[at].bytes != 0; at++) {
            const char* value = static_cast<const char*>(given[at]);
            values.emplace_back(value, value + function.parameters[at].bytes);
        }
    }

    std::vector<void*> pointers() {
        std::vector<void*> all;
        for (auto& value : values) all.push_back(value.data());
        return all;
    }
};

// A pointer to host memory would work here, but not on a GPU.
static bool pointers_are_of_the_device(const Function& function, const Arguments& arguments) {
    for (size_t at = 0; at < arguments.values.size(); at++) {
        void* pointer = nullptr;
        if (!function.parameters[at].is_pointer) continue;
        std::memcpy(&pointer, arguments.values[at].data(), sizeof pointer);
        if (pointer && !allocation(pointer, 0)) {
            refuse(CUDA_SUCCESS, "parameter %zu of `%s` points to %p, which is no memory of the device", at, function.name.c_str(), pointer);
            return false;
        }
    }
    return true;
}

static CUresult launch(const Function& function, const std::vector<unsigned>& sizes, size_t shared_bytes, Arguments& arguments) {
    if (!pointers_are_of_the_device(function, arguments)) return CUDA_ERROR_LAUNCH_FAILED;
    std::vector<void*> pointers = arguments.pointers();
    if (const char* wrong = function.run(&sizes[0], &sizes[3], shared_bytes, pointers.data()))
        return refuse(CUDA_ERROR_LAUNCH_FAILED, "`%s`: %s", function.name.c_str(), wrong);
    return CUDA_SUCCESS;
}

static CUresult checked(const Function& function, const std::vector<unsigned>& sizes, size_t shared_bytes) {
    const size_t threads = size_t(sizes[3]) * sizes[4] * sizes[5];
    if (std::count(sizes.begin(), sizes.end(), 0u) != 0 || threads > 1024 || sizes[5] > 64 || sizes[1] > 65535 || sizes[2] > 65535)
        return refuse(CUDA_ERROR_INVALID_VALUE, "`%s` is launched with (%u, %u, %u) blocks of (%u, %u, %u) threads", function.name.c_str(),
                      sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5]);
    if (shared_bytes > size_t(function.shared_bytes_allowed))
        return refuse(CUDA_ERROR_INVALID_VALUE, "`%s` is launched with %zu bytes of shared memory; %d are allowed", function.name.c_str(),
                      shared_bytes, function.shared_bytes_allowed);
    return CUDA_SUCCESS;
}

} // namespace simulator

using namespace simulator;

EXPORTED CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    const unsigned fatbin = 0xba55ed50, elf = 0x464c457f;
    unsigned magic;
    std::memcpy(&magic, image, sizeof magic);
    auto loaded = std::make_unique<Module>();
    if (magic != fatbin && magic != elf) {
        loaded->ptx = static_cast<const char*>(image);
        if (loaded->ptx.find(".version") == std::string::npos) return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = reinterpret_cast<CUmodule>(loaded.release());
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) {
    return cuModuleLoadData(module, image);
}
EXPORTED CUresult cuModuleUnload(CUmodule module) {
    ONE_AT_A_TIME;
    finish();
    delete reinterpret_cast<Module*>(module);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    auto& functions = reinterpret_cast<Module*>(module)->functions;
    if (!functions.count(name)) {
        Function wanted{name, nullptr, nullptr};
        if (!find(*reinterpret_cast<Module*>(module), wanted))
            return refuse(CUDA_ERROR_NOT_FOUND, "no kernel `%s` in this module, or none compiled for the CPU", name);
        functions.emplace(name, wanted);
    }
    *function = reinterpret_cast<CUfunction>(&functions.at(name));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
    switch (which) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return *value = 1024, CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        return *value = reinterpret_cast<Function*>(function)->shared_bytes_allowed, CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return *value = 32, CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES: return *value = 0, CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
EXPORTED CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    ONE_AT_A_TIME;
    if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    int most = 0;
    cuDeviceGetAttribute(&most, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0);
    if (value < 0 || value > most)
        return refuse(CUDA_ERROR_INVALID_VALUE, "a block has at most %d bytes of shared memory; asked for %d", most, value);
    reinterpret_cast<Function*>(function)->shared_bytes_allowed = value;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction, int threads, size_t, unsigned) {
    *blocks = std::max(1, 1024 / std::max(1, threads));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, bytes, 0);
}

EXPORTED CUresult cuLaunchKernel(CUfunction handle, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                                 unsigned threads_y, unsigned threads_z, unsigned shared_bytes, CUstream stream, void** parameters,
                                 void** extra) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (extra) return CUDA_ERROR_NOT_SUPPORTED;
    const auto& function = *reinterpret_cast<Function*>(handle);
    const std::vector<unsigned> sizes = {blocks_x, blocks_y, blocks_z, threads_x, threads_y, threads_z};
    if (const CUresult result = checked(function, sizes, shared_bytes); result != CUDA_SUCCESS) return result;
    const auto arguments = std::make_shared<Arguments>(function, parameters);
    return submit(stream, [=, &function] { return launch(function, sizes, shared_bytes, *arguments); });
}
