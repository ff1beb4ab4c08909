#!/usr/bin/env bash
# compile.sh TOOLKIT OUT FILE.cu...: compiles CUDA files with g++ into one shared library OUT whose kernels run on the CPU.
#
# Every `extern "C" __global__ void NAME(...)` becomes callable as `cuda_on_cpu_NAME` (see on_cpu/launch.h).
# TOOLKIT is what host/querl-gpu/toolkit.sh made (only its headers are used). In the environment: CXX, and CXXFLAGS for more
# options (`-fsanitize=address` finds what is read or written out of bounds).
set -euo pipefail
simulator=$(cd "$(dirname "$0")" && pwd)
toolkit="$1"; out="$2"; shift 2
common=(-std=c++17 -x c++ -I"$simulator" -I"$toolkit/include" -I"$toolkit/include/cccl" -include "$simulator/cuda_on_cpu.h"
    -fPIC -w -fno-extern-tls-init -fno-gnu-unique -fvisibility=hidden -ffp-contract=off)
mkdir -p "$(dirname "$out")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
objects=()
for file in "$@"; do
    name=$(basename "$file" .cu)
    unit="$work/$name.cpp"
    # The preprocessor says which kernels there are, however they were spelt: by hand, or by macros.
    "${CXX:-g++}" "${common[@]}" -DCUDA_ON_CPU_NAMES -E -P "$file" > "$work/$name.names"
    {
        echo "#include \"$(realpath "$file")\""
        tr '\n' ' ' < "$work/$name.names" | grep -oE 'extern +"C" +CUDA_ON_CPU_GLOBAL +void +\w+ *\(' |
            sed -E 's/.* (\w+) *\($/CUDA_ON_CPU_EXPORT(\1)/' || true
        # Dynamic shared memory under other names than ours is memory of its own, which comes to the same.
        tr '\n' ' ' < "$work/$name.names" | grep -oE 'extern +CUDA_ON_CPU_SHARED +[a-z_ 0-9]+ +\w+ *\[ *\]' | sort -u |
            sed -nE 's/^extern +CUDA_ON_CPU_SHARED +(.*) (\w+) *\[ *\]$/thread_local \1 \2[cuda_on_cpu::shared_bytes_limit \/ sizeof(\1)];/p' |
            grep -v ' shared_memory\[' || true
    } > "$unit"
    "${CXX:-g++}" "${common[@]}" -O2 ${CXXFLAGS:-} -c "$unit" -o "$work/$name.o"
    objects+=("$work/$name.o")
done
"${CXX:-g++}" -shared -Wl,-Bsymbolic ${CXXFLAGS:-} -o "$out" "${objects[@]}"
