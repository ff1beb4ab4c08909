// Barriers, shuffles and votes.
#pragma once

namespace cuda_on_cpu {

inline void give(const void* value, size_t bytes) { std::memcpy(Block::current().self().given, value, bytes); }

// The input of `lane` to the last exchange. A lane that does not exist, has ended or is not in the mask gives bytes 0xff, which are NaN in
// f32, f16 and bf16, so that no sum hides them.
template <class T> T taken(unsigned lane) {
    Block& block = Block::current();
    T value;
    if (lane < 32 && block.self().taking_part >> lane & 1) {
        std::memcpy(&value, block.warp().given[lane], sizeof value);
    } else {
        std::memset(static_cast<void*>(&value), 0xff, sizeof value);
    }
    return value;
}

template <class T> void exchange(unsigned mask, const T& value, Point point) {
    static_assert(sizeof(T) <= 16, "no more than 16 bytes are exchanged");
    give(&value, sizeof value);
    Block::current().wait(State::at_warp, point, mask);
}

// Lanes outside of a section of `width` lanes are not read: the thread keeps its own value, as on a GPU.
template <class T> T from_lane(unsigned mask, T value, int lane, bool inside) {
    exchange(mask, value, Point::shuffle);
    return inside ? taken<T>(unsigned(lane)) : value;
}

inline int section(int width) { return int(Block::current().lane()) / width * width; }

inline unsigned vote(unsigned mask, int predicate) {
    exchange(mask, predicate, Point::vote);
    Block& block = Block::current();
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (block.self().taking_part >> lane & 1 && taken<int>(lane) != 0) lanes |= 1u << lane;
    return lanes;
}

inline void block_vote(int predicate) {
    Block& block = Block::current();
    block.self().predicate = predicate;
    block.wait(State::at_block, Point::block, 0);
}

template <class T, class Combine> T reduce(unsigned mask, T value, Combine combine) {
    exchange(mask, value, Point::shuffle);
    const unsigned lanes = Block::current().self().taking_part;
    T all = value;
    bool first = true;
    for (unsigned lane = 0; lane < 32; lane++) {
        if (!(lanes >> lane & 1)) continue;
        all = first ? taken<T>(lane) : combine(all, taken<T>(lane));
        first = false;
    }
    return all;
}

} // namespace cuda_on_cpu

inline void __syncthreads() { cuda_on_cpu::block_vote(0); }
// Every thread reads the votes before it waits again, and new votes need all threads.
inline int __syncthreads_count(int predicate) {
    cuda_on_cpu::block_vote(predicate);
    return cuda_on_cpu::Block::current().votes();
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
inline int __syncthreads_and(int predicate) {
    return __syncthreads_count(predicate) == cuda_on_cpu::Block::current().voters();
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_on_cpu::exchange(mask, 0, cuda_on_cpu::Point::warp);
}

template <class T> T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return cuda_on_cpu::from_lane(mask, value, cuda_on_cpu::section(width) + (lane & (width - 1)), true);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
    const int lane = int(cuda_on_cpu::Block::current().lane()) ^ other;
    return cuda_on_cpu::from_lane(mask, value, lane, lane < cuda_on_cpu::section(width) + width);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = int(cuda_on_cpu::Block::current().lane() + by);
    return cuda_on_cpu::from_lane(mask, value, lane, lane < cuda_on_cpu::section(width) + width);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    const int lane = int(cuda_on_cpu::Block::current().lane()) - int(by);
    return cuda_on_cpu::from_lane(mask, value, lane, lane >= cuda_on_cpu::section(width));
}

inline unsigned __ballot_sync(unsigned mask, int predicate) { return cuda_on_cpu::vote(mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return cuda_on_cpu::vote(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return cuda_on_cpu::vote(mask, !predicate) == 0; }
// On a GPU: the lanes that run together at the moment. Here: all that have not ended.
inline unsigned __activemask() { return cuda_on_cpu::Block::current().lanes_alive(); }

#define CUDA_ON_CPU_REDUCE(name, type, expression)                                                                                \
    inline type name(unsigned mask, type value) {                                                                                \
        return cuda_on_cpu::reduce(mask, value, [](type a, type b) -> type { return expression; });                              \
    }
CUDA_ON_CPU_REDUCE(__reduce_add_sync, unsigned, a + b)
CUDA_ON_CPU_REDUCE(__reduce_add_sync, int, a + b)
CUDA_ON_CPU_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
CUDA_ON_CPU_REDUCE(__reduce_max_sync, int, a > b ? a : b)
CUDA_ON_CPU_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
CUDA_ON_CPU_REDUCE(__reduce_min_sync, int, a < b ? a : b)
CUDA_ON_CPU_REDUCE(__reduce_or_sync, unsigned, a | b)
CUDA_ON_CPU_REDUCE(__reduce_and_sync, unsigned, a & b)
#undef CUDA_ON_CPU_REDUCE

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
