// Shared by the simulated CUDA libraries: submitting work to a stream of the simulated driver.
#pragma once

#include <cstddef>
#include <cstdio>
#include <functional>

#define EXPORTED extern "C" __attribute__((visibility("default")))

extern "C" int querl_simulator_submit(void* stream, void (*work)(void*), void* argument, void (*discard)(void*));
extern "C" int querl_simulator_holds(const void* place, size_t bytes);
extern "C" int querl_simulator_current_device();
extern "C" int querl_simulator_is_open_to(int owner, int other);
extern "C" void querl_simulator_hold(void* stream, int holds);
extern "C" int querl_simulator_device_of(const void* place, size_t bytes);

namespace simulator {

// Returns 0, or the driver's code.
inline int submit(void* stream, std::function<void()> work) {
    using Work = std::function<void()>;
    return querl_simulator_submit(
        stream, [](void* work) { (*static_cast<Work*>(work))(); }, new Work(std::move(work)),
        [](void* work) { delete static_cast<Work*>(work); });
}

} // namespace simulator
