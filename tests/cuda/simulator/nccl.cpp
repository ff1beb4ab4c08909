// The used part of NCCL. Ranks are threads of one process, each with its own device. An all-reduce is submitted to the streams when the last
// rank has called it. Until then it is in progress; with a blocking communicator the other ranks wait in their calls.
//
// Stricter than NCCL, to find errors: an abort returns when all ranks that joined are aborted, a destroy when all ranks are destroyed, and a
// mix of both blocks; a missing rank is waited for without limit. Use of a communicator after its end, or by two threads at a time, is
// counted and reported on standard error.
//
// For tests, in addition to NCCL's functions:
//   querl_simulator_nccl_refuse(fault)  injects the next failure in the calling thread, see `Fault`
//   querl_simulator_nccl_misuses()      number of invalid uses of a communicator
#include "libraries.h"

#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

enum Status { success = 0, unhandled_cuda_error = 1, invalid_argument = 4, invalid_usage = 5, in_progress = 7 };
enum Type { float32 = 7, bfloat16 = 9 };

struct Call {
    const void* from;
    void* to;
    size_t count;
    int type;
    void* stream;
};

// State shared by all ranks of a communicator.
struct World {
    std::mutex mutex;
    std::condition_variable changed;
    size_t n_ranks = 0, round = 0;
    std::map<int, int> devices; // by rank
    std::map<int, Call> calls;  // of this round, by rank
    int outcome = success;      // of the round before
    bool refused = false;       // two ranks came with one device
    bool held = false;          // a rank was refused whose sum the others' devices wait for
    size_t aborted = 0, destroyed = 0;
};

// Never freed, so that uses after its end can be detected.
struct Comm {
    std::shared_ptr<World> world;
    int rank, device;
    bool blocks;
    std::atomic<int> n_users{0};
    std::atomic<bool> ended{false};
    // The all-reduce in progress, protected by the world's lock.
    bool waits = false;
    size_t round = 0;
    void* stream = nullptr;
};

struct Config { // the used fields
    size_t size;
    unsigned magic, version;
    int blocking;
};

// Injected failure of a thread: of joining, of an all-reduce while the other ranks' calls are in progress, or of an all-reduce while the other
// ranks' devices wait for it. Each reports out of memory.
enum Fault { none = 0, join = 1, sum_in_progress = 2, sum_on_the_device = 3 };
thread_local int fault = none;
thread_local const char* last_error = "";

bool refuses(int what) {
    if (fault != what) return false;
    fault = none;
    last_error = "Cuda failure 2 'out of memory'";
    return true;
}

std::atomic<size_t> n_misuses{0};

// Guard for one call that uses a communicator.
class Use {
    Comm& comm;

  public:
    Use(Comm& comm, const char* call) : comm(comm) {
        if (comm.ended) tell(call, "after its end");
        if (comm.n_users++ > 0) tell(call, "while another thread is in a call of it");
    }
    ~Use() { comm.n_users--; }
    static void tell(const char* call, const char* when) {
        n_misuses++;
        std::fprintf(stderr, "simulator: %s uses a communicator %s\n", call, when);
    }
};

struct Id {
    char internal[128];
};

std::mutex worlds_mutex;
std::map<uint64_t, std::shared_ptr<World>>& worlds() {
    static auto* all = new std::map<uint64_t, std::shared_ptr<World>>;
    return *all;
}

float wide(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
uint16_t narrow(float value) { // round to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class Value, class Add> void sum(const std::vector<Call>& calls, Add add) {
    std::vector<Value> total(calls[0].count);
    std::memcpy(total.data(), calls[0].from, total.size() * sizeof(Value));
    for (size_t rank = 1; rank < calls.size(); rank++)
        for (size_t at = 0; at < total.size(); at++) total[at] = add(total[at], static_cast<const Value*>(calls[rank].from)[at]);
    for (const Call& call : calls) std::memcpy(call.to, total.data(), total.size() * sizeof(Value));
}

// Submits the all-reduce to one stream, which suffices because work of all streams is executed in the order of submission.
int submitted(const std::map<int, Call>& by_rank) {
    std::vector<Call> calls;
    for (const auto& [rank, call] : by_rank) calls.push_back(call);
    for (const Call& call : calls)
        if (call.count != calls[0].count || call.type != calls[0].type) {
            std::fputs("simulator: ranks sum different numbers of values, or different types\n", stderr);
            return invalid_argument;
        }
    const int code = simulator::submit(calls[0].stream, [calls] {
        if (calls[0].type == float32) sum<float>(calls, [](float a, float b) { return a + b; });
        else sum<uint16_t>(calls, [](uint16_t a, uint16_t b) { return narrow(wide(a) + wide(b)); });
    });
    return code == 0 ? success : unhandled_cuda_error;
}

bool on_own_device(const Comm& comm, const Call& call) {
    const size_t bytes = call.count * (call.type == float32 ? 4 : 2);
    return querl_simulator_current_device() == comm.device && querl_simulator_device_of(call.from, bytes) == comm.device &&
           querl_simulator_device_of(call.to, bytes) == comm.device;
}

// State of a communicator. The caller holds the world's lock.
int state(Comm& comm) {
    World& world = *comm.world;
    if (world.refused) return invalid_usage;
    if (world.devices.size() < world.n_ranks) return in_progress;
    if (!comm.waits) return success;
    if (world.round != comm.round) {
        comm.waits = false;
        return world.outcome;
    }
    if (!world.held) return in_progress;
    querl_simulator_hold(comm.stream, 1); // NCCL's kernel runs on it until that of the last rank, or an abort, ends it
    return success;
}

int settled(Comm& comm, std::unique_lock<std::mutex>& guard) {
    int now = state(comm);
    while (comm.blocks && now == in_progress) {
        comm.world->changed.wait(guard);
        now = state(comm);
    }
    return now;
}

} // namespace

EXPORTED size_t querl_simulator_nccl_misuses() { return n_misuses; }
EXPORTED void querl_simulator_nccl_refuse(int what) { fault = what; }

EXPORTED int ncclGetVersion(int* version) {
    *version = 22809;
    return success;
}
EXPORTED const char* ncclGetErrorString(int status) {
    switch (status) {
    case success: return "no error";
    case unhandled_cuda_error: return "unhandled cuda error";
    case invalid_argument: return "invalid argument";
    case invalid_usage: return "invalid usage";
    case in_progress: return "NCCL operation in progress";
    default: return "unknown result code";
    }
}
EXPORTED const char* ncclGetLastError(Comm*) { return last_error; }
EXPORTED int ncclGetUniqueId(Id* id) {
    std::lock_guard<std::mutex> guard(worlds_mutex);
    const uint64_t number = worlds().size() + 1;
    worlds()[number] = std::make_shared<World>();
    *id = {};
    std::memcpy(id->internal, &number, sizeof number);
    return success;
}
EXPORTED int ncclCommInitRankConfig(Comm** comm, int n_ranks, Id id, int rank, const Config* config) {
    *comm = nullptr;
    if (!config || config->size < 24 || config->magic != 0xcafebeef || config->version < 21400) {
        std::fputs("simulator: a config of a communicator that is none\n", stderr);
        return invalid_argument;
    }
    if (refuses(join)) return unhandled_cuda_error;
    std::shared_ptr<World> world;
    {
        std::lock_guard<std::mutex> guard(worlds_mutex);
        uint64_t number;
        std::memcpy(&number, id.internal, sizeof number);
        if (!worlds().count(number) || rank < 0 || rank >= n_ranks) return invalid_argument;
        world = worlds()[number];
    }
    std::unique_lock<std::mutex> guard(world->mutex);
    const int device = querl_simulator_current_device();
    if (device < 0) return invalid_usage;
    for (const auto& [other, other_device] : world->devices)
        if (other == rank || other_device == device) {
            std::fprintf(stderr, "simulator: ranks %d and %d are on device %d\n", other, rank, device);
            world->refused = true;
        }
    world->devices[rank] = device;
    world->n_ranks = size_t(n_ranks);
    world->changed.notify_all();
    const bool blocks = config->blocking == INT_MIN || config->blocking == 1;
    *comm = new Comm{world, rank, device, blocks};
    return settled(**comm, guard);
}
EXPORTED int ncclCommGetAsyncError(Comm* comm, int* status) {
    Use use(*comm, "ncclCommGetAsyncError");
    std::lock_guard<std::mutex> guard(comm->world->mutex);
    *status = state(*comm);
    return success;
}
EXPORTED int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Comm* comm, void* stream) {
    Use use(*comm, "ncclAllReduce");
    World& world = *comm->world;
    const Call call{from, to, count, type, stream};
    if (operation != 0 || (type != float32 && type != bfloat16)) return invalid_argument;
    if (!on_own_device(*comm, call)) {
        std::fprintf(stderr, "simulator: rank %d sums values that are not on device %d\n", comm->rank, comm->device);
        return invalid_argument;
    }
    std::unique_lock<std::mutex> guard(world.mutex);
    if (comm->waits || world.devices.size() < world.n_ranks) {
        Use::tell("ncclAllReduce", "before what was asked of it is done");
        return invalid_usage;
    }
    for (const auto& [other, device] : world.devices)
        if (!querl_simulator_is_open_to(comm->device, device)) {
            std::fprintf(stderr, "simulator: device %d cannot reach the memory of device %d\n", device, comm->device);
            return unhandled_cuda_error;
        }
    if (const bool held = refuses(sum_on_the_device); held || refuses(sum_in_progress)) {
        world.held = held;
        world.changed.notify_all();
        return unhandled_cuda_error;
    }
    comm->waits = true;
    comm->round = world.round;
    comm->stream = stream;
    world.calls[comm->rank] = call;
    if (world.calls.size() == world.n_ranks) {
        world.outcome = submitted(world.calls);
        world.calls.clear();
        world.round++;
        world.changed.notify_all();
    }
    return settled(*comm, guard);
}
EXPORTED int ncclCommAbort(Comm* comm) {
    Use use(*comm, "ncclCommAbort");
    std::unique_lock<std::mutex> guard(comm->world->mutex);
    World& world = *comm->world;
    comm->ended = true;
    world.aborted++;
    world.calls.erase(comm->rank);
    if (comm->waits && world.held) querl_simulator_hold(comm->stream, 0);
    world.changed.notify_all();
    world.changed.wait(guard, [&] { return world.aborted >= world.devices.size(); });
    return success;
}
EXPORTED int ncclCommDestroy(Comm* comm) {
    Use use(*comm, "ncclCommDestroy");
    std::unique_lock<std::mutex> guard(comm->world->mutex);
    World& world = *comm->world;
    comm->ended = true;
    world.destroyed++;
    world.changed.notify_all();
    world.changed.wait(guard, [&] { return world.destroyed == world.n_ranks; });
    return success;
}
