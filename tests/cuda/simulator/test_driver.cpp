// Tests of the simulated driver through the driver API: memory is limited, invalid calls are rejected, work on a stream is executed before a
// wait returns, a captured graph can be launched repeatedly. Built and run by test.sh.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static int failures = 0;
static void expect(bool held, const char* what) {
    if (!held) std::printf("not so: %s\n", what), failures++;
}

static const size_t count = 1000;
static CUfunction fill;

// candle's kernel, by its name in the PTX.
static CUresult filled(CUdeviceptr to, float value, CUstream stream, unsigned threads = 128, size_t numbers = count) {
    float* place = reinterpret_cast<float*>(to);
    void* parameters[] = {&place, &value, &numbers};
    return cuLaunchKernel(fill, 8, 1, 1, threads, 1, 1, 0, stream, parameters, nullptr);
}

static float first_of(CUdeviceptr from) {
    float value = 0;
    cuMemcpyDtoH(&value, from, sizeof value);
    return value;
}

static void memory(CUdeviceptr place) {
    size_t free = 0, total = 0;
    expect(cuMemGetInfo(&free, &total) == CUDA_SUCCESS && total == 1 << 20 && free == total - count * 4, "memory is counted");
    CUdeviceptr large = 0;
    expect(cuMemAlloc(&large, free + 1) == CUDA_ERROR_OUT_OF_MEMORY, "memory ends");
    expect(cuMemAlloc(&large, free) == CUDA_SUCCESS && cuMemFree(large) == CUDA_SUCCESS, "and no sooner");
    expect(cuMemFree(large) == CUDA_ERROR_INVALID_VALUE, "memory is freed once");
    expect(first_of(place) != first_of(place), "memory begins as NaN");
    char bytes[8] = {};
    expect(cuMemcpyHtoD(place + count * 4 - 4, bytes, 8) == CUDA_ERROR_INVALID_VALUE, "a copy stays within its allocation");
    expect(cuMemsetD32(place, 0, count + 1) == CUDA_ERROR_INVALID_VALUE, "and so does a fill");
}

static void launches(CUdeviceptr place, CUstream stream) {
    expect(filled(place, 1, stream, 2048) == CUDA_ERROR_INVALID_VALUE, "a block has no more than 1024 threads");
    expect(filled(place, 3, stream) == CUDA_SUCCESS && cuStreamSynchronize(stream) == CUDA_SUCCESS, "a kernel runs");
    std::vector<float> all(count);
    expect(cuMemcpyDtoH(all.data(), place, count * 4) == CUDA_SUCCESS, "what it wrote is copied");
    expect(all == std::vector<float>(count, 3.0f), "and is what it should have written");
    expect(cuFuncSetAttribute(fill, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 228 * 1024) == CUDA_ERROR_INVALID_VALUE,
           "shared memory ends");
}

// With QUERL_SIMULATOR_STREAMS=late pinned memory has the old value until the program waits.
static void waiting(CUdeviceptr place, CUstream stream) {
    const char* when = std::getenv("QUERL_SIMULATOR_STREAMS");
    const bool late = when && std::strcmp(when, "late") == 0;
    float* pinned = nullptr;
    expect(cuMemHostAlloc(reinterpret_cast<void**>(&pinned), count * 4, 0) == CUDA_SUCCESS, "pinned memory is had");
    pinned[0] = 1;
    filled(place, 4, stream);
    cuMemcpyDtoHAsync(pinned, place, count * 4, stream);
    expect(pinned[0] == (late ? 1.0f : 4.0f), "late work is not done before somebody waits");
    CUevent event;
    cuEventCreate(&event, 0);
    cuEventRecord(event, stream);
    expect(cuEventSynchronize(event) == CUDA_SUCCESS && pinned[0] == 4, "and is done when somebody has waited");
    cuEventDestroy(event);
    float pageable = 5;
    cuMemcpyHtoDAsync(place, &pageable, 4, stream);
    pageable = 6; // the driver has already read it
    cuStreamSynchronize(stream);
    expect(first_of(place) == 5, "pageable memory is read when the copy is asked for");
    cuMemFreeHost(pinned);
}

static void graphs(CUdeviceptr place, CUstream stream) {
    filled(place, 7, stream);
    CUgraph graph;
    CUgraphExec ready;
    expect(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS, "a graph is captured");
    expect(filled(place, 8, stream) == CUDA_SUCCESS, "launches go into it");
    expect(cuStreamSynchronize(stream) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "nobody waits meanwhile");
    expect(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS && first_of(place) == 7, "and nothing runs");
    expect(cuGraphInstantiateWithFlags(&ready, graph, 0) == CUDA_SUCCESS && cuGraphDestroy(graph) == CUDA_SUCCESS, "it is made ready");
    for (int round = 0; round < 2; round++) {
        filled(place, 7, stream);
        expect(cuGraphLaunch(ready, stream) == CUDA_SUCCESS && cuStreamSynchronize(stream) == CUDA_SUCCESS && first_of(place) == 8,
               "it runs as often as it is launched");
    }
    cuGraphExecDestroy(ready);
}

// The last test: after a failed kernel everything fails.
static void broken(CUdeviceptr place, CUstream stream) {
    std::vector<float> host(count);
    const CUresult launched = filled(reinterpret_cast<CUdeviceptr>(host.data()), 1, stream);
    const CUresult waited = cuStreamSynchronize(stream);
    expect(launched == CUDA_ERROR_LAUNCH_FAILED || waited == CUDA_ERROR_LAUNCH_FAILED, "a pointer to the host is refused");
    expect(filled(place, 1, stream) == CUDA_ERROR_LAUNCH_FAILED, "and the device is lost from then on");
}

// `test_driver past` writes one number too many: AddressSanitizer has to end the program.
int main(int n_arguments, char**) {
    setenv("QUERL_SIMULATOR_MEMORY", "1048576", 1);
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUmodule module;
    CUdeviceptr place = 0;
    expect(cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS, "there is a device");
    expect(cuDeviceGet(&device, 1) == CUDA_ERROR_INVALID_DEVICE, "and no second one");
    cuDeviceGet(&device, 0);
    expect(cuMemAlloc(&place, 4) == CUDA_ERROR_INVALID_CONTEXT, "nothing is done without a context");
    expect(cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS && cuCtxSetCurrent(context) == CUDA_SUCCESS, "there is a context");
    expect(cuStreamCreate(&stream, 0) == CUDA_SUCCESS && cuMemAlloc(&place, count * 4) == CUDA_SUCCESS, "and memory");
    expect(cuModuleLoadData(&module, ".version 9.0\n.visible .entry fill_f32(\n") == CUDA_SUCCESS, "PTX is loaded");
    expect(cuModuleGetFunction(&fill, module, "fill_f64") == CUDA_ERROR_NOT_FOUND, "it has the kernels that it names and no others");
    if (cuModuleGetFunction(&fill, module, "fill_f32") != CUDA_SUCCESS) return std::printf("no kernel `fill_f32`\n"), 1;
    if (n_arguments > 1) return filled(place, 1, stream, 128, count + 1), cuStreamSynchronize(stream), 0;
    memory(place);
    launches(place, stream);
    waiting(place, stream);
    graphs(place, stream);
    broken(place, stream);
    std::printf(failures ? "%d failed\n" : "all held\n", failures);
    return failures != 0;
}
