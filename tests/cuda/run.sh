#!/usr/bin/env bash
# run.sh [--sanitize] [ARGUMENT...]: builds the crates with the feature `cuda` and runs their tests on the simulated GPU.
#
# Needs the requirements of host/querl-gpu/toolkit.sh, and g++ on x86-64; no GPU, no driver, no CUDA. Arguments are passed to `cargo test`
# (for example `--lib device`, or `--test candle_on_gpu`). Without arguments all tests of the crates with GPU code run twice: the second
# time with threads and blocks in reverse order, and with work delayed until the program waits for it. `--sanitize` compiles the kernels
# with AddressSanitizer, which ends the program at the first access outside of an allocation.
#
# Environment: QUERL_CUDA_TOOLKIT, a folder made by toolkit.sh (default target/cuda/toolkit); the settings of the simulator
# (simulator/driver/driver.h).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
toolkit="${QUERL_CUDA_TOOLKIT:-$PWD/target/cuda/toolkit}"
simulator="$PWD/target/cuda/simulator"
options=""
if [ "${1:-}" = --sanitize ]; then
    shift
    options=-fsanitize=address
    simulator+=-sanitized
    # LeakSanitizer would report memory that Rust's test harness keeps; its alternate signal stack does not work with fibers.
    set_sanitizer="LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0:use_sigaltstack=0:detect_stack_use_after_return=0"
fi

echo "+ the compiler, the simulated libraries"
host/querl-gpu/toolkit.sh "$toolkit"
# shellcheck disable=SC1091
. "$toolkit/environment"
export QUERL_CUDA_CAPABILITIES="${QUERL_CUDA_CAPABILITIES:-90}" # the executed kernels are compiled by g++, so that one capability suffices
CXXFLAGS="$options" tests/cuda/simulator/build.sh "$toolkit" "$simulator"

echo "+ what the simulator promises"
CXXFLAGS="$options" tests/cuda/simulator/test.sh "$toolkit" "$simulator"

# Only the tests use the simulated libraries; cargo and the compiler do not.
tests() { # WHEN ORDER ARGUMENT...
    local when="$1" order="$2"; shift 2
    echo "+ (streams $when, threads $order) cargo test --release $*"
    CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env LD_LIBRARY_PATH=$simulator QUERL_SIMULATOR_DEVICES=2 QUERL_SIMULATOR_STREAMS=$when QUERL_SIMULATOR_ORDER=$order ${set_sanitizer:-}" \
        cargo test --release --features querl-gpu/cuda "$@" -- --include-ignored
}

crates=(-p querl-model -p querl-train -p querl-gpu)
if [ $# -gt 0 ]; then
    tests "${QUERL_SIMULATOR_STREAMS:-now}" "${QUERL_SIMULATOR_ORDER:-forward}" "${crates[@]}" "$@"
else
    tests now forward "${crates[@]}"
    tests late backward "${crates[@]}"
fi
