#!/usr/bin/env bash
# compile.sh TOOLKIT: compiles the CUDA kernels as the build of the library does, with warnings as errors, and for the simulated GPU.
#
# Names each kernel with register spills, per compute capability: such a kernel is correct, but slow.
set -euo pipefail
cd "$(dirname "$0")/../.."
toolkit="$1"
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT
for_gpus() {
    "$toolkit/bin/nvcc" --fatbin -O3 -std=c++17 --threads 2 -Werror all-warnings -Xptxas -v -o "$out/kernels.fatbin" \
        -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_86,code=sm_86 -gencode=arch=compute_89,code=sm_89 \
        -gencode=arch=compute_90,code=sm_90 -gencode=arch=compute_90,code=compute_90 host/querl-gpu/cuda/kernels.cu
}
for_gpus > "$out/log" 2>&1 || { grep -v '^ptxas info' "$out/log"; exit 1; }
awk '/Compiling entry function/ { kernel = $7 " for " $9; n[$9]++ }
     /bytes spill stores/ && $5 > 0 { print "spilled: " kernel ", " $5 " bytes" }
     END { for (gpu in n) print n[gpu] " kernels compiled for " gpu }' "$out/log"
echo "kernels.fatbin: $(stat -c %s "$out/kernels.fatbin") bytes"
grep -q 'Compiling entry function' "$out/log" || { echo "kernels.cu has no kernel"; exit 1; }
tests/cuda/simulator/compile.sh "$toolkit" "$out/kernels.so" host/querl-gpu/cuda/kernels.cu
echo "$(nm -D --defined-only "$out/kernels.so" | grep -c ' T cuda_on_cpu_parameters_') kernels compiled for the simulated GPU"
