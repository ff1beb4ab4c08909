// Internals of the simulated driver, which implements the driver API on the CPU. Time is not simulated. An operation on a stream is executed
// when it is submitted, or with QUERL_SIMULATOR_STREAMS=late when the program waits for the device: a program with a missing wait then reads
// the old values.
//
// Settings, from the environment:
//   QUERL_SIMULATOR_MEMORY      memory of one device in bytes (default 8 GiB)
//   QUERL_SIMULATOR_DEVICES     number of devices (default 1)
//   QUERL_SIMULATOR_CAPABILITY  80, 86, 89 or 90 (default)
//   QUERL_SIMULATOR_STREAMS     `now` (default) or `late`
//   QUERL_SIMULATOR_ORDER       `forward` (default) or `backward`: order of threads and blocks of a launch
#pragma once

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace simulator {

// One lock for all functions: the simulated devices execute one operation at a time.
std::recursive_mutex& lock();
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> guard(simulator::lock())

size_t setting(const char* name, size_t otherwise);

// Prints a detailed message, which the driver does not, to standard error; returns the code.
CUresult refuse(CUresult code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Devices and contexts (devices.cpp).
struct Device {
    size_t memory_bytes = 0, used_bytes = 0, peak_bytes = 0;
};
Device& device(int ordinal);
int devices();
// The device of the calling thread's context, or -1.
int current_device();

// After a failed kernel every call fails, as on a GPU.
CUresult& broken();
#define UNLESS_BROKEN                                                     \
    if (simulator::broken() != CUDA_SUCCESS) return simulator::broken(); \
    if (simulator::current_device() < 0) return CUDA_ERROR_INVALID_CONTEXT

// Memory (memory.cpp).
enum class Kind { device, pinned };
struct Allocation {
    size_t bytes;
    Kind kind;
    int device;
};
// The allocation that contains these bytes, or null. If `bytes` is 0, the address just behind an allocation belongs to it.
const Allocation* allocation(const void* place, size_t bytes);

// Streams (streams.cpp).
using Work = std::function<CUresult()>;
// Executes the work, or stores it: for a graph that is being captured, or until the program waits.
CUresult submit(CUstream stream, Work work);
// Executes all stored work.
CUresult finish();
bool capturing(CUstream stream);

} // namespace simulator

// For the other simulated libraries: `work(argument)` is one operation of the stream, `discard(argument)` is called after its last use.
extern "C" int querl_simulator_submit(void* stream, void (*work)(void*), void* argument, void (*discard)(void*));
// True if these bytes are device memory.
extern "C" int querl_simulator_holds(const void* place, size_t bytes);
// The device of the calling thread's context, and the device of an allocation; -1 if there is none.
extern "C" int querl_simulator_current_device();
extern "C" int querl_simulator_device_of(const void* place, size_t bytes);
// Waits for the stream block from now on until `holds` is 0, as if an operation without end ran on it.
extern "C" void querl_simulator_hold(void* stream, int holds);
// True if another device can access the memory of this one.
extern "C" int querl_simulator_is_open_to(int owner, int other);
