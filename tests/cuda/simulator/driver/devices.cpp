// Devices, contexts and their attributes. Attributes are those of a GPU of the requested compute capability, except for a small number of
// multiprocessors, so that a program that sizes a grid by them does not take long.
#include "driver.h"

#include <set>

namespace simulator {

// A context is identified with its device: programs use one context per device.
struct Context {
    int ordinal;
};

static thread_local Context* current = nullptr;

int devices() {
    static const int count = int(setting("QUERL_SIMULATOR_DEVICES", 1));
    return count;
}

Device& device(int ordinal) {
    static auto* all = new std::vector<Device>(size_t(devices()), Device{setting("QUERL_SIMULATOR_MEMORY", size_t(8) << 30), 0});
    return (*all)[size_t(ordinal)];
}

static Context* context(int ordinal) {
    static auto* all = [] {
        auto* contexts = new std::vector<Context>;
        for (int at = 0; at < devices(); at++) contexts->push_back({at});
        return contexts;
    }();
    return &(*all)[size_t(ordinal)];
}

int current_device() { return current ? current->ordinal : -1; }

static int capability() {
    static const int value = int(setting("QUERL_SIMULATOR_CAPABILITY", 90));
    return value;
}

static bool known(CUdevice ordinal) { return ordinal >= 0 && ordinal < devices(); }

// CUDA C++ Programming Guide, "Compute Capabilities": maximum shared memory per block (opt-in) and per multiprocessor, in KiB.
static int shared_kib(bool of_block) {
    switch (capability()) {
    case 80: return of_block ? 163 : 164;
    case 86:
    case 89: return of_block ? 99 : 100;
    default: return of_block ? 227 : 228;
    }
}

static int attribute(CUdevice_attribute which, int* value) {
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return *value = capability() / 10, true;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return *value = capability() % 10, true;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return *value = 4, true;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return *value = 32, true;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return *value = 1024, true;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return *value = 64, true;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return *value = 0x7fffffff, true;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return *value = 65535, true;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return *value = capability() == 80 || capability() == 90 ? 2048 : 1536, true;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return *value = 48 * 1024, true;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return *value = shared_kib(true) * 1024, true;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return *value = shared_kib(false) * 1024, true;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return *value = 65536, true;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return *value = 65536, true;
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: return *value = 1, true;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return *value = 1000000, true;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return *value = 1024, true;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return *value = 4 << 20, true;
    case CU_DEVICE_ATTRIBUTE_INTEGRATED:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: return *value = 0, true;
    default: return false;
    }
}

} // namespace simulator

using namespace simulator;

EXPORTED CUresult cuInit(unsigned flags) { return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
EXPORTED CUresult cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetCount(int* count) {
    *count = devices();
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGet(CUdevice* found, int ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *found = ordinal;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    std::snprintf(name, size_t(length), "Simulated %d.%d", capability() / 10, capability() % 10);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceTotalMem(size_t* bytes, CUdevice ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *bytes = device(ordinal).memory_bytes;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    std::memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = char(ordinal);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    if (!attribute(which, value)) return refuse(CUDA_ERROR_INVALID_VALUE, "attribute %d of a device is not simulated", int(which));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceCanAccessPeer(int* can, CUdevice ordinal, CUdevice peer) {
    if (!known(ordinal) || !known(peer)) return CUDA_ERROR_INVALID_DEVICE;
    *can = ordinal != peer;
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuDevicePrimaryCtxRetain(CUcontext* retained, CUdevice ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *retained = reinterpret_cast<CUcontext>(context(ordinal));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal) { return known(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
EXPORTED CUresult cuCtxSetCurrent(CUcontext wanted) {
    current = reinterpret_cast<Context*>(wanted);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetCurrent(CUcontext* found) {
    *found = reinterpret_cast<CUcontext>(current);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxGetDevice(CUdevice* found) {
    if (!current) return CUDA_ERROR_INVALID_CONTEXT;
    *found = current->ordinal;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuCtxSetFlags(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORTED CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return CUDA_SUCCESS;
}

// Memory pools release memory at once: only the peak and access from other devices can be set.
static std::set<std::pair<int, int>>& opened() {
    static auto* all = new std::set<std::pair<int, int>>;
    return *all;
}
EXPORTED CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc* access, size_t count) {
    ONE_AT_A_TIME;
    const int owner = reinterpret_cast<Context*>(pool)->ordinal;
    for (size_t at = 0; at < count; at++) {
        const CUmemAccessDesc& one = access[at];
        if (one.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !known(one.location.id) || one.location.id == owner)
            return CUDA_ERROR_INVALID_VALUE;
        if (one.flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) opened().insert({owner, one.location.id});
        else opened().erase({owner, one.location.id});
    }
    return CUDA_SUCCESS;
}
EXPORTED int querl_simulator_is_open_to(int owner, int other) {
    ONE_AT_A_TIME;
    return owner == other || opened().count({owner, other});
}
EXPORTED CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice ordinal) {
    if (!known(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
    *pool = reinterpret_cast<CUmemoryPool>(context(ordinal));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceGetMemPool(CUmemoryPool* pool, CUdevice ordinal) { return cuDeviceGetDefaultMemPool(pool, ordinal); }
EXPORTED CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void* value) {
    ONE_AT_A_TIME;
    if (which != CU_MEMPOOL_ATTR_USED_MEM_HIGH) return CUDA_SUCCESS;
    if (*static_cast<cuuint64_t*>(value) != 0) return CUDA_ERROR_INVALID_VALUE;
    Device& owner = device(reinterpret_cast<Context*>(pool)->ordinal);
    owner.peak_bytes = owner.used_bytes;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void* value) {
    ONE_AT_A_TIME;
    switch (which) {
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *static_cast<cuuint64_t*>(value) = device(reinterpret_cast<Context*>(pool)->ordinal).peak_bytes;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *static_cast<cuuint64_t*>(value) = device(reinterpret_cast<Context*>(pool)->ordinal).used_bytes;
        return CUDA_SUCCESS;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}
EXPORTED CUresult cuMemPoolTrimTo(CUmemoryPool, size_t) { return CUDA_SUCCESS; }

namespace {
struct Name {
    CUresult code;
    const char *name, *sentence;
};
// Names and descriptions of the error codes that the simulator returns, as in the driver.
const Name names[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported (by the simulator)"},
};
const Name& name_of(CUresult code) {
    static const Name unknown{code, "CUDA_ERROR_UNKNOWN", "unknown error"};
    for (const Name& name : names)
        if (name.code == code) return name;
    return unknown;
}
} // namespace

EXPORTED CUresult cuGetErrorName(CUresult code, const char** name) {
    *name = name_of(code).name;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorString(CUresult code, const char** sentence) {
    *sentence = name_of(code).sentence;
    return CUDA_SUCCESS;
}
