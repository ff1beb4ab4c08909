// One block: its threads, the barriers at which they wait, and its shared memory.
#pragma once

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_cpu {
// What one block can have at most (compute capability 9.0); the driver's own limit is checked at the launch.
constexpr size_t shared_bytes_limit = 227 * 1024;
} // namespace cuda_on_cpu

#ifndef CUDA_ON_CPU_NAMES
thread_local __attribute__((aligned(128), weak)) unsigned char shared_memory[cuda_on_cpu::shared_bytes_limit];
#endif

namespace cuda_on_cpu {

// Where a thread stands.
enum class State { fresh, ready, at_block, at_warp, done };

// What a thread calls at a barrier; threads that wait for one another must have called the same.
enum class Point { block, warp, shuffle, vote };

struct Thread {
    uint3 index;
    State state = State::fresh;
    Point point = Point::block;
    unsigned mask = 0;                // of the lanes it waits for
    unsigned taking_part = 0;         // of those, the ones that had not ended
    int predicate = 0;                // what it brought to a block's vote
    unsigned char given[16];          // what it brought to a shuffle or a warp's vote
    Fiber* fiber = nullptr;
};

// What the threads of a released warp read: what each lane brought.
struct Warp {
    unsigned char given[32][16];
};

// In which order blocks and threads run where the program leaves it open. A result that depends on it is wrong.
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
    // The block whose thread runs now. A thread of the CPU has one until it ends; then the next takes it, with its stacks.
    static Block& current() {
        static thread_local Block* own = nullptr;
        if (!own) {
            own = take();
            static thread_local GivenBack given_back{own};
        }
        return *own;
    }

    // Runs all threads of a block of this size to their end; returns what went wrong, or null.
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

    // The running thread waits at `point` until the threads it waits for are there.
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
    // At the end of a thread; what is destroyed behind this, and still launches, takes a block again.
    struct GivenBack {
        Block*& own;
        ~GivenBack() {
            std::lock_guard<std::mutex> guard(spare_lock());
            spare().push_back(own);
            own = nullptr;
        }
    };

    // Never destroyed: programs launch while they end.
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
        // What a fiber has kept of the thread before (where its `threadIdx` is) goes with the frames that kept it.
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
            if (!thread.fiber) continue; // else it is of a block that was given up
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

    // Takes threads that have not begun, one after another; where one of them waits, this fiber is its own until it ends. So a
    // kernel without barriers needs one fiber in all.
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
            idle_.push_back(new Fiber); // kept for the next blocks
            idle_.back()->prepare(body);
        }
        starting_ = idle_.back();
        idle_.pop_back();
        starting_->resume();
    }

    // Runs every thread that was released; false where there is none.
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

    // Releases the threads whose barrier is complete; false where there are none.
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

    // Lanes that have ended are not waited for, as on a GPU; what a shuffle reads from them is not defined.
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

    // Names the first thread that waits; null where all have ended.
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
