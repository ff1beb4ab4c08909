// Device memory is counted host memory. It is initialised with bytes 0xff (NaN), so that reads of uninitialised memory are noticed.
#include "driver.h"

#include <algorithm>
#include <cstdint>

namespace simulator {

static std::map<uintptr_t, Allocation>& allocations() {
    static auto* all = new std::map<uintptr_t, Allocation>; // never destroyed: programs free memory during exit
    return *all;
}

const Allocation* allocation(const void* place, size_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(place);
    auto after = allocations().upper_bound(at);
    if (after == allocations().begin()) return nullptr;
    const auto& [begin, found] = *--after;
    return at + bytes <= begin + found.bytes ? &found : nullptr;
}

static CUresult allocate(void** place, size_t bytes, Kind kind) {
    if (!place || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    const int ordinal = current_device();
    Device& owner = device(ordinal);
    if (kind == Kind::device && bytes > owner.memory_bytes - owner.used_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
    if (posix_memalign(place, 256, bytes) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    std::memset(*place, 0xff, bytes);
    allocations()[reinterpret_cast<uintptr_t>(*place)] = {bytes, kind, ordinal};
    if (kind == Kind::device) owner.peak_bytes = std::max(owner.peak_bytes, owner.used_bytes += bytes);
    return CUDA_SUCCESS;
}

static CUresult release(void* place, Kind kind) {
    if (!place) return CUDA_SUCCESS;
    const auto found = allocations().find(reinterpret_cast<uintptr_t>(place));
    if (found == allocations().end() || found->second.kind != kind)
        return refuse(CUDA_ERROR_INVALID_VALUE, "%p is freed, which was not allocated or is freed twice", place);
    if (kind == Kind::device) device(found->second.device).used_bytes -= found->second.bytes;
    allocations().erase(found);
    std::free(place);
    return CUDA_SUCCESS;
}

static bool on_device(CUdeviceptr place, size_t bytes) { return allocation(reinterpret_cast<void*>(place), bytes); }

static CUresult fill(CUdeviceptr to, size_t bytes, const Work& work, CUstream stream) {
    if (bytes == 0) return CUDA_SUCCESS;
    if (!on_device(to, bytes))
        return refuse(CUDA_ERROR_INVALID_VALUE, "a fill of %zu bytes at %p leaves the allocation", bytes, (void*)to);
    return submit(stream, work);
}

enum class Waits { no, yes };

// Pinned memory is accessed when the copy is executed. As in the driver, pageable memory was read when the call returns, and a copy to it
// is synchronous.
static CUresult copy(void* to, const void* from, size_t bytes, CUstream stream, Waits waits) {
    if (bytes == 0) return CUDA_SUCCESS;
    const bool pageable_source = !allocation(from, bytes), pageable_target = !allocation(to, bytes);
    if (capturing(stream) && (pageable_source || pageable_target || waits == Waits::yes))
        return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a copy from or to pageable memory while a graph is captured");
    if (pageable_source && !pageable_target) {
        std::vector<char> staged(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
        CUresult result = submit(stream, [to, staged = std::move(staged)] {
            std::memcpy(to, staged.data(), staged.size());
            return CUDA_SUCCESS;
        });
        return result == CUDA_SUCCESS && waits == Waits::yes ? finish() : result;
    }
    const CUresult result = submit(stream, [=] {
        std::memmove(to, from, bytes);
        return CUDA_SUCCESS;
    });
    return result == CUDA_SUCCESS && (waits == Waits::yes || pageable_target) ? finish() : result;
}

static CUresult to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream stream, Waits waits) {
    if (bytes != 0 && !on_device(to, bytes))
        return refuse(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes to %p leaves the allocation", bytes, (void*)to);
    return copy(reinterpret_cast<void*>(to), from, bytes, stream, waits);
}

static CUresult from_device(void* to, CUdeviceptr from, size_t bytes, CUstream stream, Waits waits) {
    if (bytes != 0 && !on_device(from, bytes))
        return refuse(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes from %p leaves the allocation", bytes, (void*)from);
    return copy(to, reinterpret_cast<void*>(from), bytes, stream, waits);
}

static CUresult within_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, Waits waits) {
    if (bytes != 0 && !on_device(from, bytes))
        return refuse(CUDA_ERROR_INVALID_VALUE, "a copy of %zu bytes from %p leaves the allocation", bytes, (void*)from);
    return to_device(to, reinterpret_cast<void*>(from), bytes, stream, waits);
}

template <class Value> static CUresult set(CUdeviceptr to, Value value, size_t count, CUstream stream, Waits waits) {
    const CUresult result = fill(to, count * sizeof(Value), [=] {
        for (size_t at = 0; at < count; at++) reinterpret_cast<Value*>(to)[at] = value;
        return CUDA_SUCCESS;
    }, stream);
    return result == CUDA_SUCCESS && waits == Waits::yes ? finish() : result;
}

} // namespace simulator

using namespace simulator;

EXPORTED CUresult cuMemAlloc(CUdeviceptr* place, size_t bytes) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    finish();
    return allocate(reinterpret_cast<void**>(place), bytes, Kind::device);
}
EXPORTED CUresult cuMemFree(CUdeviceptr place) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    finish(); // waits for operations that still use it
    return release(reinterpret_cast<void*>(place), Kind::device);
}
EXPORTED CUresult cuMemAllocAsync(CUdeviceptr* place, size_t bytes, CUstream stream) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (capturing(stream)) return refuse(CUDA_ERROR_NOT_SUPPORTED, "an allocation while a graph is captured: the simulator has none");
    return allocate(reinterpret_cast<void**>(place), bytes, Kind::device);
}
EXPORTED CUresult cuMemAllocFromPoolAsync(CUdeviceptr* place, size_t bytes, CUmemoryPool, CUstream stream) {
    return cuMemAllocAsync(place, bytes, stream);
}
EXPORTED CUresult cuMemFreeAsync(CUdeviceptr place, CUstream stream) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (capturing(stream)) return refuse(CUDA_ERROR_NOT_SUPPORTED, "memory is freed while a graph is captured: the simulator has none");
    return submit(stream, [=] { return release(reinterpret_cast<void*>(place), Kind::device); });
}
EXPORTED CUresult cuMemHostAlloc(void** place, size_t bytes, unsigned) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return allocate(place, bytes, Kind::pinned);
}
EXPORTED CUresult cuMemFreeHost(void* place) {
    ONE_AT_A_TIME;
    finish();
    return release(place, Kind::pinned);
}
EXPORTED CUresult cuMemGetInfo(size_t* free, size_t* total) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    finish();
    const Device& owner = device(current_device());
    *free = owner.memory_bytes - owner.used_bytes;
    *total = owner.memory_bytes;
    return CUDA_SUCCESS;
}

#define COPY(now, async, function, To, From)                                   \
    EXPORTED CUresult now(To to, From from, size_t bytes) {                    \
        ONE_AT_A_TIME;                                                         \
        UNLESS_BROKEN;                                                         \
        return function(to, from, bytes, nullptr, Waits::yes);                 \
    }                                                                          \
    EXPORTED CUresult async(To to, From from, size_t bytes, CUstream stream) { \
        ONE_AT_A_TIME;                                                         \
        UNLESS_BROKEN;                                                         \
        return function(to, from, bytes, stream, Waits::no);                   \
    }
COPY(cuMemcpyHtoD, cuMemcpyHtoDAsync, to_device, CUdeviceptr, const void*)
COPY(cuMemcpyDtoH, cuMemcpyDtoHAsync, from_device, void*, CUdeviceptr)
COPY(cuMemcpyDtoD, cuMemcpyDtoDAsync, within_device, CUdeviceptr, CUdeviceptr)

EXPORTED CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
    return cuMemcpyDtoDAsync(to, from, bytes, stream);
}

#define SET(now, async, Value)                                                       \
    EXPORTED CUresult now(CUdeviceptr to, Value value, size_t count) {               \
        ONE_AT_A_TIME;                                                               \
        UNLESS_BROKEN;                                                               \
        return set<Value>(to, value, count, nullptr, Waits::yes);                    \
    }                                                                                \
    EXPORTED CUresult async(CUdeviceptr to, Value value, size_t count, CUstream on) { \
        ONE_AT_A_TIME;                                                               \
        UNLESS_BROKEN;                                                               \
        return set<Value>(to, value, count, on, Waits::no);                          \
    }
SET(cuMemsetD8, cuMemsetD8Async, unsigned char)
SET(cuMemsetD16, cuMemsetD16Async, unsigned short)
SET(cuMemsetD32, cuMemsetD32Async, unsigned)

EXPORTED int querl_simulator_device_of(const void* place, size_t bytes) {
    ONE_AT_A_TIME;
    const Allocation* found = allocation(place, bytes);
    return found && found->kind == Kind::device ? found->device : -1;
}
EXPORTED int querl_simulator_current_device() { return current_device(); }
EXPORTED int querl_simulator_holds(const void* place, size_t bytes) {
    ONE_AT_A_TIME;
    return allocation(place, bytes) != nullptr;
}
