// One block: its threads, the barriers at which they wait, and its shared memory.
#pragma once

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_cpu {
// Maximum sizes of a block (compute capability 9.0); the driver checks its own limit at the launch.
constexpr size_t shared_bytes_limit = 227 * 1024;
} // namespace cuda_on_cpu

#ifndef CUDA_ON_CPU_NAMES
thread_local __attribute__((aligned(128), weak)) unsigned char shared_memory[cuda_on_cpu::shared_bytes_limit];
#endif

namespace cuda_on_cpu {

// State of a thread.
enum class State { fresh, ready, at_block, at_warp, done };

// The kind of barrier. Threads that wait for one another must have called the same.
enum class Point { block, warp, shuffle, vote };

struct Thread {
    uint3 index;
    State state = State::fresh;
    Point point = Point::block;
    unsigned mask = 0;                // lanes that it waits for
    unsigned taking_part = 0;         // lanes of the mask that had not ended
    int predicate = 0;                // its input to a vote of the block
    unsigned char given[16];          // its input to a shuffle or a vote of the warp
    Fiber* fiber = nullptr;
};

// The inputs of all lanes, which the threads of a released warp read.
struct Warp {
    unsigned char given[32][16];
};

// Order of blocks and threads where CUDA leaves it undefined. A program whose result depends on it is wrong.
enum class Order { forward, backward };

inline Order order() {
    static const Order chosen = [] {
        const char* wanted = std::getenv("QUERL_SIMULATOR_ORDER");
        return wanted && std::strcmp(wanted, "backward") == 0 ? Order::backward : Order::forward;
    }();
    return chosen;
}

class Block {
  public:
    // The block whose thread is running. A CPU thread owns one until it ends; the next CPU thread reuses it with its stacks.
    static Block& current() {
        static thread_local Block* own = nullptr;
        if (!own) {
            own = take();
            static thread_local GivenBack given_back{own};
        }
        return *own;
    }

    // Runs all threads of a block of this size to their end. Returns an error message, or null.
    template <class Call> const char* run(dim3 size, const Call& call) {
        begin(size);
        call_ = [](const void* call) { (*static_cast<const Call*>(call))(); };
        argument_ = &call;
        for (;;) {
            if (next_ < threads_.size()) {
                run_fresh();
            } else if (!run_ready() && !release()) {
                return stuck();
            }
        }
    }

    // Suspends the running thread at `point` until the threads that it waits for are there.
    void wait(State state, Point point, unsigned mask) {
        Thread& self = threads_[running_];
        self.state = state;
        self.point = point;
        self.mask = mask;
        self.fiber->yield();
    }

    Thread& self() { return threads_[running_]; }
    Warp& warp() { return warps_[running_ / 32]; }
    unsigned lane() const { return running_ % 32; }
    int votes() const { return votes_; }
    int voters() const { return voters_; }

    // The lanes of the running thread's warp that have not ended.
    unsigned lanes_alive() const { return alive(running_ / 32); }

  private:
    // At the end of a CPU thread. Objects that are destroyed later and still launch take a block again.
    struct GivenBack {
        Block*& own;
        ~GivenBack() {
            std::lock_guard<std::mutex> guard(spare_lock());
            spare().push_back(own);
            own = nullptr;
        }
    };

    // Never destroyed, because programs launch kernels during exit.
    static std::vector<Block*>& spare() {
        static auto* all = new std::vector<Block*>;
        return *all;
    }
    static std::mutex& spare_lock() {
        static auto* lock = new std::mutex;
        return *lock;
    }

    static Block* take() {
        std::lock_guard<std::mutex> guard(spare_lock());
        if (spare().empty()) return new Block;
        Block* block = spare().back();
        spare().pop_back();
        // A suspended fiber holds addresses of the previous CPU thread (such as that of `threadIdx`) in its frames; preparing it discards them.
        for (Fiber* fiber : block->idle_) fiber->prepare(body);
        return block;
    }

    std::vector<Thread> threads_;
    std::vector<Warp> warps_;
    std::vector<Fiber*> idle_;
    Fiber* starting_ = nullptr;
    size_t running_ = 0, next_ = 0;
    int votes_ = 0, voters_ = 0;
    void (*call_)(const void*) = nullptr;
    const void* argument_ = nullptr;

    size_t at(size_t turn) const { return order() == Order::forward ? turn : threads_.size() - 1 - turn; }

    void begin(dim3 size) {
        for (Thread& thread : threads_) {
            if (!thread.fiber) continue; // otherwise the fiber belongs to a block that was abandoned
            thread.fiber->prepare(body);
            idle_.push_back(thread.fiber);
        }
        threads_.assign(size_t(size.x) * size.y * size.z, Thread());
        warps_.resize((threads_.size() + 31) / 32);
        next_ = 0;
        size_t at = 0;
        for (unsigned z = 0; z < size.z; z++)
            for (unsigned y = 0; y < size.y; y++)
                for (unsigned x = 0; x < size.x; x++) threads_[at++].index = make_uint3(x, y, z);
    }

    // Runs threads that have not started, one after another. If a thread waits, this fiber belongs to it until its end, so that a kernel
    // without barriers needs only one fiber.
    static void body() {
        Block& block = Block::current();
        Fiber* fiber = block.starting_;
        fiber->arrived();
        for (;;) {
            while (block.next_ < block.threads_.size()) {
                block.enter(block.at(block.next_++));
                block.self().fiber = fiber;
                block.call_(block.argument_);
                block.self().state = State::done;
                block.self().fiber = nullptr;
            }
            block.idle_.push_back(fiber);
            fiber->yield();
        }
    }

    void enter(size_t thread) {
        running_ = thread;
        threadIdx = threads_[thread].index;
    }

    void run_fresh() {
        if (idle_.empty()) {
            idle_.push_back(new Fiber); // reused by the next blocks
            idle_.back()->prepare(body);
        }
        starting_ = idle_.back();
        idle_.pop_back();
        starting_->resume();
    }

    // Runs every released thread; false if there is none.
    bool run_ready() {
        bool any = false;
        for (size_t turn = 0; turn < threads_.size(); turn++) {
            const size_t thread = at(turn);
            if (threads_[thread].state != State::ready) continue;
            any = true;
            enter(thread);
            threads_[thread].fiber->resume();
        }
        return any;
    }

    // Releases the threads whose barrier is complete; false if there are none.
    bool release() {
        bool any = false;
        for (size_t warp = 0; warp < warps_.size(); warp++) any = release_warp(warp) || any;
        return any || release_block();
    }

    unsigned alive(size_t warp) const {
        unsigned lanes = 0;
        for (size_t lane = 0; lane < 32 && warp * 32 + lane < threads_.size(); lane++)
            if (threads_[warp * 32 + lane].state != State::done) lanes |= 1u << lane;
        return lanes;
    }

    // Lanes that have ended are not waited for, as on a GPU; the value that a shuffle reads from them is undefined.
    bool release_warp(size_t warp) {
        const unsigned lanes = alive(warp);
        unsigned released = 0;
        for (unsigned lane = 0; lane < 32; lane++) {
            if (!(lanes >> lane & 1) || released >> lane & 1) continue;
            const Thread& first = threads_[warp * 32 + lane];
            const unsigned group = first.mask & lanes;
            bool complete = first.state == State::at_warp;
            for (unsigned other = 0; other < 32 && complete; other++) {
                const Thread* thread = &threads_[warp * 32];
                if (group >> other & 1)
                    complete = thread[other].state == State::at_warp && thread[other].point == first.point &&
                               thread[other].mask == first.mask;
            }
            if (complete) released |= group, pass(warp, group);
        }
        return released != 0;
    }

    void pass(size_t warp, unsigned group) {
        for (unsigned lane = 0; lane < 32; lane++) {
            if (!(group >> lane & 1)) continue;
            Thread& thread = threads_[warp * 32 + lane];
            thread.taking_part = group;
            std::memcpy(warps_[warp].given[lane], thread.given, sizeof thread.given);
            thread.state = State::ready;
        }
    }

    bool release_block() {
        votes_ = voters_ = 0;
        for (const Thread& thread : threads_) {
            if (thread.state == State::done) continue;
            if (thread.state != State::at_block) return false;
            voters_++;
            votes_ += thread.predicate != 0;
        }
        for (Thread& thread : threads_)
            if (thread.state == State::at_block) thread.state = State::ready;
        return voters_ != 0;
    }

    // Names the first waiting thread; null if all have ended.
    const char* stuck() const {
        static char message[200];
        for (size_t thread = 0; thread < threads_.size(); thread++) {
            const Thread& waiting = threads_[thread];
            if (waiting.state == State::done) continue;
            std::snprintf(message, sizeof message,
                          "thread %zu of block (%u, %u, %u) waits for ever at a barrier of its %s (lanes %08x): "
                          "others wait elsewhere or with another mask",
                          thread, blockIdx.x, blockIdx.y, blockIdx.z,
                          waiting.state == State::at_block ? "block" : "warp", waiting.mask);
            return message;
        }
        return nullptr;
    }
};

} // namespace cuda_on_cpu
