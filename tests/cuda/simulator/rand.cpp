// The part of cuRAND that candle calls: uniform and normal numbers, with cuRAND's distributions but another generator.
#include "libraries.h"

#include <cmath>
#include <random>

namespace {

struct Generator {
    void* stream = nullptr;
    std::mt19937_64 bits;
};

enum Status { success = 0, length_not_multiple = 105, launch_failure = 201 };

// Uniform in (0, 1], as in cuRAND.
template <class Real> Real uniform(std::mt19937_64& bits) { return Real(double((bits() >> 40) + 1) / double(1 << 24)); }

template <class Fill> int submitted(void* handle, Fill fill) {
    auto* generator = static_cast<Generator*>(handle);
    return simulator::submit(generator->stream, [=] { fill(generator->bits); }) == 0 ? success : launch_failure;
}

template <class Real> int uniforms(void* handle, Real* to, size_t count) {
    return submitted(handle, [=](std::mt19937_64& bits) {
        for (size_t at = 0; at < count; at++) to[at] = uniform<Real>(bits);
    });
}

template <class Real> int normals(void* handle, Real* to, size_t count, Real mean, Real deviation) {
    if (count % 2 != 0) return length_not_multiple; // cuRAND generates pairs, and rejects odd counts
    return submitted(handle, [=](std::mt19937_64& bits) {
        for (size_t at = 0; at < count; at += 2) {
            const double radius = std::sqrt(-2.0 * std::log(uniform<double>(bits))), angle = 2.0 * M_PI * uniform<double>(bits);
            to[at] = Real(mean + deviation * radius * std::cos(angle));
            to[at + 1] = Real(mean + deviation * radius * std::sin(angle));
        }
    });
}

} // namespace

EXPORTED int curandCreateGenerator(void** handle, int) {
    *handle = new Generator;
    return success;
}
EXPORTED int curandDestroyGenerator(void* handle) {
    auto* generator = static_cast<Generator*>(handle);
    return simulator::submit(generator->stream, [=] { delete generator; }) == 0 ? success : launch_failure;
}
EXPORTED int curandSetStream(void* handle, void* stream) {
    static_cast<Generator*>(handle)->stream = stream;
    return success;
}
EXPORTED int curandSetPseudoRandomGeneratorSeed(void* handle, unsigned long long seed) {
    static_cast<Generator*>(handle)->bits.seed(seed);
    return success;
}
EXPORTED int curandGenerateUniform(void* handle, float* to, size_t count) { return uniforms(handle, to, count); }
EXPORTED int curandGenerateUniformDouble(void* handle, double* to, size_t count) { return uniforms(handle, to, count); }
EXPORTED int curandGenerateNormal(void* handle, float* to, size_t count, float mean, float deviation) {
    return normals(handle, to, count, mean, deviation);
}
EXPORTED int curandGenerateNormalDouble(void* handle, double* to, size_t count, double mean, double deviation) {
    return normals(handle, to, count, mean, deviation);
}
