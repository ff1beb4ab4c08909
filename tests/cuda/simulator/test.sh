#!/usr/bin/env bash
# test.sh TOOLKIT [OUT]: tests cuda_on_cpu.h and, if build.sh has made OUT, the simulated driver.
# CXXFLAGS as in build.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
toolkit="$1"; libraries="${2:-}"
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT
read -ra more <<< "${CXXFLAGS:-}"
flags=(-std=c++17 -O1 -w -pthread -I"$toolkit/include" -I"$toolkit/include/cccl" "${more[@]}")
export ASAN_OPTIONS=use_sigaltstack=0:detect_leaks=0 # if compiled with AddressSanitizer: see ../run.sh

g++ "${flags[@]}" -ffp-contract=off -fno-extern-tls-init -I"$here" -include "$here/cuda_on_cpu.h" -x c++ \
    -o "$out/test_on_cpu" "$here/test_on_cpu.cu"
for order in forward backward; do
    echo "threads $order: $(QUERL_SIMULATOR_ORDER=$order "$out/test_on_cpu")"
done

[ -n "$libraries" ] || exit 0
g++ "${flags[@]}" -o "$out/test_driver" "$here/test_driver.cpp" -L"$libraries" -l:libcuda.so.1
for when in now late; do
    echo "streams $when: $(LD_LIBRARY_PATH="$libraries" QUERL_SIMULATOR_STREAMS=$when "$out/test_driver" 2> "$out/refusals")"
done
if [[ "${CXXFLAGS:-}" == *address* ]]; then
    found=$(LD_LIBRARY_PATH="$libraries" "$out/test_driver" past 2>&1 || true)
    [[ "$found" == *heap-buffer-overflow* ]] || { echo "a write out of bounds was not found"; exit 1; }
    echo "a write out of bounds is found"
fi
