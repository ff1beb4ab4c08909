// The simulated driver's inside. What goes in: calls of the driver's interface; what comes out: what they do, done on the CPU.
// What it does not simulate: time. An operation on a stream is done when it is called, or, with QUERL_SIMULATOR_STREAMS=late, when
// somebody waits for the device: a program that does not wait where it has to then reads what was there before.
//
// Settings, from the environment:
//   QUERL_SIMULATOR_MEMORY      bytes of one device (default 8 GiB)
//   QUERL_SIMULATOR_DEVICES     how many devices (default 1)
//   QUERL_SIMULATOR_CAPABILITY  80, 86, 89 or 90 (default)
//   QUERL_SIMULATOR_STREAMS     `now` (default) or `late`
//   QUERL_SIMULATOR_ORDER       `forward` (default) or `backward`: of the threads and blocks of a launch
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

// One lock for everything: the simulated device does one thing at a time.
std::recursive_mutex& lock();
#define ONE_AT_A_TIME std::lock_guard<std::recursive_mutex> guard(simulator::lock())

size_t setting(const char* name, size_t otherwise);

// Says on standard error what the driver would keep to itself, and passes the code on.
CUresult refuse(CUresult code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Devices and contexts (devices.cpp).
struct Device {
    size_t memory_bytes = 0, used_bytes = 0, peak_bytes = 0;
};
Device& device(int ordinal);
int devices();
// The device of the calling thread's context, or -1.
int current_device();

// After a kernel has failed, every call fails, as on a GPU.
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
// The allocation in which these bytes lie, or null. The place just behind one counts as within it where `bytes` is 0.
const Allocation* allocation(const void* place, size_t bytes);

// Streams (streams.cpp).
using Work = std::function<CUresult()>;
// Does the work, or keeps it: for a graph that is being captured, or until somebody waits.
CUresult submit(CUstream stream, Work work);
// Does all that was kept.
CUresult finish();
bool capturing(CUstream stream);

} // namespace simulator

// For the other simulated libraries: `work(argument)` is one operation of the stream, `discard(argument)` follows the last of them.
extern "C" int querl_simulator_submit(void* stream, void (*work)(void*), void* argument, void (*discard)(void*));
// Whether these bytes are memory of a device.
extern "C" int querl_simulator_holds(const void* place, size_t bytes);
// The device of the calling thread's context, and that whose memory these bytes are; -1 without one.
extern "C" int querl_simulator_current_device();
extern "C" int querl_simulator_device_of(const void* place, size_t bytes);
// From now on a wait for the stream lasts until it is released (`holds` is 0): something runs on it that does not end by itself.
extern "C" void querl_simulator_hold(void* stream, int holds);
// Whether the memory of a device can be read and written by another.
extern "C" int querl_simulator_is_open_to(int owner, int other);
