// Atomics. One CPU thread runs everything, so that plain reads and writes are atomic. Each function returns the previous value.
#pragma once

namespace cuda_on_cpu {
// The second operand is converted to the type of the first, as in CUDA's overloads, which are not templates.
template <class T> struct same {
    using type = T;
};
template <class T> using operand = typename same<T>::type;

template <class T, class Change> T replaced(T* place, Change change) {
    const T before = *place;
    *place = change(before);
    return before;
}
} // namespace cuda_on_cpu

#define CUDA_ON_CPU_ATOMIC(name, expression)                                                                                     \
    template <class T> T name(T* place, cuda_on_cpu::operand<T> value) {                                                         \
        return cuda_on_cpu::replaced(place, [value](T before) -> T { return expression; });                                      \
    }
CUDA_ON_CPU_ATOMIC(atomicAdd, before + value)
CUDA_ON_CPU_ATOMIC(atomicSub, before - value)
CUDA_ON_CPU_ATOMIC(atomicMax, before > value ? before : value)
CUDA_ON_CPU_ATOMIC(atomicMin, before < value ? before : value)
CUDA_ON_CPU_ATOMIC(atomicExch, ((void)before, value))
CUDA_ON_CPU_ATOMIC(atomicOr, before | value)
CUDA_ON_CPU_ATOMIC(atomicAnd, before & value)
CUDA_ON_CPU_ATOMIC(atomicXor, before ^ value)
CUDA_ON_CPU_ATOMIC(atomicInc, before >= value ? 0 : before + 1)
CUDA_ON_CPU_ATOMIC(atomicDec, before == 0 || before > value ? value : before - 1)
#undef CUDA_ON_CPU_ATOMIC

template <class T> T atomicCAS(T* place, cuda_on_cpu::operand<T> expected, cuda_on_cpu::operand<T> value) {
    return cuda_on_cpu::replaced(place, [=](T before) { return before == expected ? T(value) : before; });
}
