#!/usr/bin/env bash
# test.sh TOOLKIT: tests what cuda_on_cpu.h promises, with threads and blocks in both orders. CXXFLAGS as in build.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT
read -ra more <<< "${CXXFLAGS:-}"
g++ -std=c++17 -O1 -w -ffp-contract=off -fno-extern-tls-init "${more[@]}" -I"$here" -I"$1/include" -I"$1/include/cccl" \
    -include "$here/cuda_on_cpu.h" -x c++ -o "$out/test_on_cpu" "$here/test_on_cpu.cu"
for order in forward backward; do
    # The options are AddressSanitizer's, where it is asked for: see ../run.sh.
    echo "threads $order: $(ASAN_OPTIONS=use_sigaltstack=0:detect_leaks=0 QUERL_SIMULATOR_ORDER=$order "$out/test_on_cpu")"
done
