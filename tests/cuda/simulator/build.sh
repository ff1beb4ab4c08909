#!/usr/bin/env bash
# build.sh TOOLKIT OUT: builds the simulated CUDA libraries in OUT, with the names that programs load:
#
#   libcuda.so.1                                       the driver
#   libcublas.so.13, libcurand.so.10                   matrix products, random numbers
#   libnccl.so.2                                       all-reduce over devices
#   libcublasLt.so.13, libnvrtc.so.13, libcudart.so.13 only symbols, so that a program linked with them starts
#   kernels/candle-*.so, kernels/querl-*.so            candle's kernels and querl's, compiled for the CPU
#
# Libraries that are newer than their sources are kept. CXXFLAGS: further options of g++, such as `-fsanitize=address`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
toolkit="$1"; out="$2"
mkdir -p "$out/kernels"
out=$(cd "$out" && pwd)
flags=(-std=c++17 -O3 -march=native -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra
    -isystem "$toolkit/include" -isystem "$toolkit/include/cccl")
read -ra more <<< "${CXXFLAGS:-}"

newer() { # OUT FILE...: true if OUT is newer than all the files
    local made="$1" file; shift
    [ -e "$made" ] || return 1
    for file in "$@"; do [ "$made" -nt "$file" ] || return 1; done
}

# A change of options is a change of the sources, too.
if [ "$(cat "$out/options" 2> /dev/null)" != "${CXXFLAGS:-}" ]; then rm -f "$out"/lib* "$out"/kernels/*; fi
echo "${CXXFLAGS:-}" > "$out/options"

# unsupported NAME: prints C code for every function that a program may be linked with; each reports that it is not simulated.
unsupported() {
    echo '#include <stdio.h>'
    nm -D --defined-only "$toolkit/lib/stubs/lib$1.so" | sed -nE 's/.* T (\w+)$/\1/p' | while read -r function; do
        echo "__attribute__((weak)) int $function(void) { fputs(\"simulator: $function is not simulated\\n\", stderr); return ${2}; }"
    done
}

# library NAME SONAME CODE FILE...: the functions defined in the files; all other functions of the library return CODE, its "not supported".
library() {
    local name="$1" soname="$2" code="$3"; shift 3
    newer "$out/$soname" "$@" "$here"/*.h "$here"/driver/*.h "$here/build.sh" && return
    local work others=()
    work=$(mktemp -d)
    unsupported "$name" "$code" | gcc -x c -O1 -fPIC -c -o "$work/unsupported.o" -
    [ "$name" = cuda ] || others=("$out/libcuda.so.1")
    local objects=("$work/unsupported.o") file
    for file in "$@"; do
        g++ "${flags[@]}" "${more[@]}" -c "$file" -o "$work/$(basename "$file").o"
        objects+=("$work/$(basename "$file").o")
    done
    g++ -shared "${more[@]}" -Wl,-soname,"$soname" -o "$out/$soname" "${objects[@]}" "${others[@]}" -ldl
    rm -r "$work"
}

# kernels NAME FILE [OPTION]: builds one library of the kernels in a .cu file.
kernels() {
    local made="$out/kernels/$1.so" file="$2"
    newer "$made" "$(dirname "$file")"/*.cu* "$here"/*.h "$here"/on_cpu/*.h "$here/compile.sh" && return
    CXXFLAGS="${CXXFLAGS:-} ${3:-}" "$here/compile.sh" "$toolkit" "$made" "$file"
}

library cuda libcuda.so.1 801 "$here"/driver/*.cpp # CUDA_ERROR_NOT_SUPPORTED
library cublas libcublas.so.13 15 "$here/blas.cpp" # CUBLAS_STATUS_NOT_SUPPORTED
library curand libcurand.so.10 204 "$here/rand.cpp" # CURAND_STATUS_ARCH_MISMATCH: the most similar code
library cublasLt libcublasLt.so.13 15
library nvrtc libnvrtc.so.13 11 # NVRTC_ERROR_INTERNAL_ERROR
# NCCL is loaded by name and never linked: only the functions that querl calls are needed.
newer "$out/libnccl.so.2" "$here"/nccl.cpp "$here"/*.h "$here/build.sh" ||
    g++ "${flags[@]}" "${more[@]}" -shared -Wl,-soname,libnccl.so.2 -o "$out/libnccl.so.2" "$here/nccl.cpp" "$out/libcuda.so.1"
[ -e "$out/libcudart.so.13" ] || gcc -shared -Wl,-soname,libcudart.so.13 -x c -o "$out/libcudart.so.13" /dev/null

candle=$(cd "$root" && cargo metadata --format-version 1 --all-features --locked --filter-platform x86_64-unknown-linux-gnu |
    python3 -c 'import json, os, sys
print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "candle-kernels"))')
# Without the kernels for GGUF weights, which the library does not contain either, and without convolutions.
for name in affine binary cast fill indexing reduce sort ternary unary; do
    kernels "candle-$name" "$candle/src/$name.cu" "-include $here/candle.h"
done
for file in "$root"/host/querl-gpu/cuda/*.cu; do
    [ -e "$file" ] || continue
    kernels "querl-$(basename "$file" .cu)" "$file"
done
