// Streams, events and graphs. Work of all streams is executed in the order of submission.
#include "driver.h"

#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <set>

namespace simulator {

std::recursive_mutex& lock() {
    static auto* mutex = new std::recursive_mutex; // never destroyed: programs call the driver during exit
    return *mutex;
}

size_t setting(const char* name, size_t otherwise) {
    const char* value = std::getenv(name);
    return value ? std::strtoull(value, nullptr, 10) : otherwise;
}

CUresult refuse(CUresult code, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fputs("simulator: ", stderr);
    std::vfprintf(stderr, format, arguments);
    std::fputc('\n', stderr);
    va_end(arguments);
    return code;
}

CUresult& broken() {
    static CUresult code = CUDA_SUCCESS;
    return code;
}

struct Graph {
    std::vector<Work> steps;
};

struct Stream {
    Graph* captured = nullptr;
};

struct Event {
    bool recorded = false;
    std::chrono::steady_clock::time_point at;
};

static std::vector<Work>& kept() {
    static auto* all = new std::vector<Work>;
    return *all;
}

// Three predefined streams always exist. Of these, the per-thread stream, which candle uses, can be captured.
static Stream& stream_of(CUstream stream) {
    static Stream legacy, per_thread;
    if (stream == nullptr || stream == CU_STREAM_LEGACY) return legacy;
    return stream == CU_STREAM_PER_THREAD ? per_thread : *reinterpret_cast<Stream*>(stream);
}

static bool late() {
    static const char* when = std::getenv("QUERL_SIMULATOR_STREAMS");
    return when && std::strcmp(when, "late") == 0;
}

static CUresult done(const Work& work) {
    const CUresult result = work();
    if (result == CUDA_ERROR_LAUNCH_FAILED) broken() = result;
    return result;
}

CUresult submit(CUstream stream, Work work) {
    if (Graph* graph = stream_of(stream).captured) {
        graph->steps.push_back(std::move(work));
        return CUDA_SUCCESS;
    }
    if (!late()) return done(work);
    kept().push_back(std::move(work));
    return CUDA_SUCCESS;
}

CUresult finish() {
    std::vector<Work> all;
    std::swap(all, kept());
    for (const Work& work : all)
        if (const CUresult result = done(work); result != CUDA_SUCCESS) return result;
    return broken();
}

bool capturing(CUstream stream) { return stream_of(stream).captured != nullptr; }

static CUresult waited(CUstream stream) {
    if (capturing(stream)) return refuse(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a stream is waited for while its graph is captured");
    return finish();
}

// Streams with a simulated operation without end.
struct Held {
    std::mutex mutex;
    std::condition_variable changed;
    std::set<void*> streams;
};
static Held& held() {
    static auto* all = new Held;
    return *all;
}

// Without the global lock, because another thread has to release the stream.
static void until_let_go(void* stream) {
    std::unique_lock<std::mutex> guard(held().mutex);
    held().changed.wait(guard, [stream] { return !held().streams.count(stream); });
}

} // namespace simulator

using namespace simulator;

EXPORTED void querl_simulator_hold(void* stream, int holds) {
    std::lock_guard<std::mutex> guard(held().mutex);
    if (holds) held().streams.insert(stream);
    else held().streams.erase(stream);
    held().changed.notify_all();
}

EXPORTED int querl_simulator_submit(void* stream, void (*work)(void*), void* argument,
                                    void (*discard)(void*)) {
    ONE_AT_A_TIME;
    const std::shared_ptr<void> kept(argument, discard);
    return submit(static_cast<CUstream>(stream), [work, kept] {
        work(kept.get());
        return CUDA_SUCCESS;
    });
}

EXPORTED CUresult cuStreamCreate(CUstream* stream, unsigned) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    *stream = reinterpret_cast<CUstream>(new Stream);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
EXPORTED CUresult cuStreamDestroy(CUstream stream) {
    ONE_AT_A_TIME;
    finish();
    if (&stream_of(stream) == reinterpret_cast<Stream*>(stream)) delete reinterpret_cast<Stream*>(stream);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamSynchronize(CUstream stream) {
    until_let_go(stream);
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return waited(stream);
}
EXPORTED CUresult cuStreamQuery(CUstream stream) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return waited(stream);
}
EXPORTED CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return CUDA_SUCCESS; // earlier work is executed first: the order of submission is kept
}
EXPORTED CUresult cuCtxSynchronize() {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return finish();
}
EXPORTED CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return submit(stream, [=] {
        function(argument);
        return CUDA_SUCCESS;
    });
}

EXPORTED CUresult cuEventCreate(CUevent* event, unsigned) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    *event = reinterpret_cast<CUevent>(new Event);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuEventDestroy(CUevent event) {
    ONE_AT_A_TIME;
    finish();
    delete reinterpret_cast<Event*>(event);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuEventRecord(CUevent event, CUstream stream) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (capturing(stream)) return CUDA_SUCCESS; // adds nothing to the captured order
    return submit(stream, [=] {
        *reinterpret_cast<Event*>(event) = {true, std::chrono::steady_clock::now()};
        return CUDA_SUCCESS;
    });
}
EXPORTED CUresult cuEventSynchronize(CUevent) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return finish();
}
EXPORTED CUresult cuEventQuery(CUevent) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    return finish();
}
EXPORTED CUresult cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (const CUresult result = finish(); result != CUDA_SUCCESS) return result;
    const auto *first = reinterpret_cast<Event*>(from), *last = reinterpret_cast<Event*>(to);
    if (!first->recorded || !last->recorded) return CUDA_ERROR_INVALID_HANDLE;
    *milliseconds = std::chrono::duration<float, std::milli>(last->at - first->at).count();
    return CUDA_SUCCESS;
}

EXPORTED CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (stream == nullptr || stream == CU_STREAM_LEGACY) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (capturing(stream)) return CUDA_ERROR_ILLEGAL_STATE;
    stream_of(stream).captured = new Graph;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    if (!capturing(stream)) return CUDA_ERROR_ILLEGAL_STATE;
    *graph = reinterpret_cast<CUgraph>(std::exchange(stream_of(stream).captured, nullptr));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    ONE_AT_A_TIME;
    *status = capturing(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphInstantiateWithFlags(CUgraphExec* ready, CUgraph graph, unsigned long long) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    *ready = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<Graph*>(graph)));
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    ONE_AT_A_TIME;
    UNLESS_BROKEN;
    for (const Work& step : reinterpret_cast<Graph*>(graph)->steps)
        if (const CUresult result = submit(stream, step); result != CUDA_SUCCESS) return result;
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphUpload(CUgraphExec, CUstream) { return CUDA_SUCCESS; }
EXPORTED CUresult cuGraphDestroy(CUgraph graph) {
    ONE_AT_A_TIME;
    delete reinterpret_cast<Graph*>(graph);
    return CUDA_SUCCESS;
}
EXPORTED CUresult cuGraphExecDestroy(CUgraphExec graph) {
    ONE_AT_A_TIME;
    finish();
    delete reinterpret_cast<Graph*>(graph);
    return CUDA_SUCCESS;
}
