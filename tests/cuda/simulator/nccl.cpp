// The part of NCCL that we call. Ranks are threads of one process, each with a device of its own. A sum is put on the streams when
// the last rank has asked for it; until then the others wait in their calls, which NCCL allows itself as well.
#include "libraries.h"

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace {

enum Status { success = 0, unhandled_cuda_error = 1, invalid_argument = 4, invalid_usage = 5, remote_error = 6 };
enum Type { float32 = 7, bfloat16 = 9 };

struct Call {
    const void* from;
    void* to;
    size_t count;
    int type;
    void* stream;
};

// What all ranks of a communicator share.
struct World {
    std::mutex mutex;
    std::condition_variable changed;
    size_t n_ranks = 0, round = 0;
    std::map<int, int> devices; // by rank
    std::map<int, Call> calls;  // of this round, by rank
    int outcome = success;      // of the round before
    bool refused = false;       // two ranks came with one device
    bool aborted = false;
};

struct Comm {
    std::shared_ptr<World> world;
    int rank, device;
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
uint16_t narrow(float value) { // to the nearest, of two the even
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

// Puts the sum of all ranks' values on a stream: those of all ranks do their work in the order in which it was submitted.
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

} // namespace

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
    case remote_error: return "remote process exited or there was a network error";
    default: return "unknown result code";
    }
}
EXPORTED int ncclGetUniqueId(Id* id) {
    std::lock_guard<std::mutex> guard(worlds_mutex);
    const uint64_t number = worlds().size() + 1;
    worlds()[number] = std::make_shared<World>();
    *id = {};
    std::memcpy(id->internal, &number, sizeof number);
    return success;
}
EXPORTED int ncclCommInitRank(Comm** comm, int n_ranks, Id id, int rank) {
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
            world->changed.notify_all();
            return invalid_usage;
        }
    world->devices[rank] = device;
    world->n_ranks = size_t(n_ranks);
    world->changed.notify_all();
    world->changed.wait(guard, [&] { return world->devices.size() == size_t(n_ranks) || world->refused; });
    if (world->refused) return invalid_usage;
    *comm = new Comm{world, rank, device};
    return success;
}
EXPORTED int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, Comm* comm, void* stream) {
    const std::shared_ptr<World> kept = comm->world; // an abort ends the communicator, not what its ranks share
    World& world = *kept;
    const Call call{from, to, count, type, stream};
    if (operation != 0 || (type != float32 && type != bfloat16)) return invalid_argument;
    if (!on_own_device(*comm, call)) {
        std::fprintf(stderr, "simulator: rank %d sums values that are not on device %d\n", comm->rank, comm->device);
        return invalid_argument;
    }
    std::unique_lock<std::mutex> guard(world.mutex);
    const size_t round = world.round;
    world.calls[comm->rank] = call;
    if (world.calls.size() == world.n_ranks) {
        world.outcome = submitted(world.calls);
        world.calls.clear();
        world.round++;
        world.changed.notify_all();
        return world.outcome;
    }
    world.changed.wait(guard, [&] { return world.round != round || world.aborted; });
    return world.round != round ? world.outcome : int(remote_error);
}
EXPORTED int ncclCommAbort(Comm* comm) {
    const std::shared_ptr<World> world = comm->world;
    std::lock_guard<std::mutex> guard(world->mutex);
    world->aborted = true;
    world->changed.notify_all();
    delete comm;
    return success;
}
EXPORTED int ncclCommDestroy(Comm* comm) {
    delete comm;
    return success;
}
