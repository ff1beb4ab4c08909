// The threads of a block as fibers: each has its own stack, and one CPU thread runs them in turn.
#pragma once

#if !defined(__x86_64__)
#error "the switch between fibers is written for x86-64 with the System V calling convention"
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_on_cpu {

// Saves the callee-saved registers, switches the stack, and returns on the other one.
// `from` receives the current stack pointer.
__attribute__((naked, noinline)) inline void switch_stack(void** /*from*/, void* /*to*/) {
    __asm__ volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

// A stack with an inaccessible guard page below it, and the stack pointer where it stopped.
class Fiber {
  public:
    using Body = void (*)();

    Fiber() {
        memory_ = static_cast<char*>(
            mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (memory_ == MAP_FAILED || mprotect(memory_, guard_, PROT_NONE) != 0) {
            std::fprintf(stderr, "simulator: no memory for the stack of a thread\n");
            std::abort();
        }
    }
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber() { munmap(memory_, bytes_); }

    // The next `resume` calls `body`, which must not return: it leaves by `yield`.
    void prepare(Body body) {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(memory_ + guard_, bytes_ - guard_); // frames that were never left have poisoned it
#endif
        void** top = reinterpret_cast<void**>(memory_ + bytes_);
        *--top = nullptr; // the return address of `body`; keeps the stack aligned as after a call
        *--top = reinterpret_cast<void*>(body);
        for (int saved = 0; saved < 6; saved++) *--top = nullptr;
        pointer_ = top;
    }

    // Runs the fiber until it yields.
    void resume() {
#if defined(__SANITIZE_ADDRESS__)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, memory_, bytes_);
#endif
        switch_stack(&resumer_, pointer_);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    }

    // Returns to the caller of `resume`; returns here when the fiber is resumed again.
    void yield() {
#if defined(__SANITIZE_ADDRESS__)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, resumer_stack_, resumer_bytes_);
#endif
        switch_stack(&pointer_, resumer_);
        arrived();
    }

    // Must be called first on a fiber after each switch to it.
    void arrived() {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &resumer_stack_, &resumer_bytes_);
#endif
    }

  private:
    static constexpr size_t bytes_ = 256 * 1024;
    static constexpr size_t guard_ = 4096;
    char* memory_ = nullptr;
    void* pointer_ = nullptr;
    void* resumer_ = nullptr;
    const void* resumer_stack_ = nullptr;
    size_t resumer_bytes_ = 0;
};

} // namespace cuda_on_cpu
