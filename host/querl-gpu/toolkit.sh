#!/usr/bin/env bash
# toolkit.sh [FOLDER]: a CUDA 13.0 compiler in FOLDER (default target/cuda/toolkit), on a machine without CUDA, GPU or root.
#
# nvcc and its parts come from NVIDIA's own wheels of the Python package index (licence: NVIDIA's, in FOLDER/licences; nothing of
# them is in this repository). The libraries of CUDA are only linked against: for that, shared libraries of the right names whose
# functions all fail are enough, and they are generated here (900 MB are not fetched). Writes FOLDER/environment, to be sourced
# before a build with the feature `cuda`. Does nothing where FOLDER is complete. Ends with 3 where the wheels cannot be had.
#
# QUERL_CUDA_INSTALLED names an installed CUDA (12 or 13, such as /usr/local/cuda-12.8) to take instead of the wheels: a library that was built
# with CUDA 12 runs with drivers and PyTorches for CUDA 12. There are no wheels with its compiler.
#
# Needs python3 with pip, cargo and gcc.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder="${1:-$root/target/cuda/toolkit}"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
installed="${QUERL_CUDA_INSTALLED:-}"
wanted=$( (cat "$here"/toolkit.sh "$here"/nvcc-for-candle.sh "$root/Cargo.lock"; echo "$installed") | sha256sum | cut -d' ' -f1)
if [ "$(cat "$folder/complete" 2> /dev/null)" = "$wanted" ]; then exit 0; fi
rm -f "$folder/complete"

wheels="nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85"

# Wheels that are there stay, if they are all there and of these versions.
fetch() {
    local wheel missing=""
    for wheel in $wheels; do
        [ -d "$folder/wheels/$(tr - _ <<< "${wheel%==*}")-${wheel#*==}.dist-info" ] || missing="$wheel"
    done
    [ -n "$missing" ] || return 0
    rm -rf "$folder/wheels"
    # --no-deps: the compiler asks for nothing else, and the libraries would be 900 MB. An option that a pip older than 22.1 does not
    # know would end it, a variable does not.
    # shellcheck disable=SC2086
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder/wheels" $wheels ||
        { echo "the wheels $wheels cannot be had: look at pip's words above"; exit 3; }
}

# nvcc finds its tree from where it really lies, so it is a copy and all others are links.
link() {
    local cuda="$folder/wheels/nvidia/cu13" file
    rm -rf "$folder/bin" "$folder/lib" "$folder/lib64" "$folder/licences"
    mkdir -p "$folder/bin" "$folder/lib/stubs" "$folder/licences"
    for file in "$cuda"/bin/*; do ln -sfn "$file" "$folder/bin/"; done
    rm -f "$folder/bin/nvcc" "$folder/bin/nvcc.profile"
    cp "$cuda/bin/nvcc" "$cuda/bin/nvcc.profile" "$folder/bin/"
    cp "$here/nvcc-for-candle.sh" "$folder/bin/nvcc-for-candle"
    chmod +x "$folder"/wheels/nvidia/cu13/bin/* "$folder"/wheels/nvidia/cu13/nvvm/bin/* "$folder"/bin/nvcc*
    ln -sfn "$cuda/include" "$folder/include"
    ln -sfn "$cuda/nvvm" "$folder/nvvm"
    ln -sfn lib "$folder/lib64"
    for file in "$cuda"/lib/*; do ln -sfn "$file" "$folder/lib/"; done
    ln -sfn "$cuda/lib/libcudart.so.13" "$folder/lib/libcudart.so"
    for file in "$folder"/wheels/*.dist-info; do
        cp "$file/licenses/License.txt" "$folder/licences/$(basename "$file" .dist-info).txt"
    done
}

# An installed CUDA is a whole tree: links to its parts are enough.
link_installed() {
    local file
    [ -x "$installed/bin/nvcc" ] || { echo "QUERL_CUDA_INSTALLED is $installed, where there is no bin/nvcc"; exit 3; }
    rm -rf "$folder/bin" "$folder/lib" "$folder/lib64" "$folder/licences" "$folder/wheels"
    mkdir -p "$folder/bin" "$folder/lib/stubs" "$folder/licences"
    for file in "$installed"/bin/*; do ln -sfn "$file" "$folder/bin/"; done
    cp "$here/nvcc-for-candle.sh" "$folder/bin/nvcc-for-candle"
    chmod +x "$folder/bin/nvcc-for-candle"
    ln -sfn "$installed/include" "$folder/include"
    ln -sfn "$installed/nvvm" "$folder/nvvm"
    ln -sfn lib "$folder/lib64"
    for file in "$installed"/lib64/libcudart*; do ln -sfn "$file" "$folder/lib/"; done
}

# stub NAME SONAME FILE...: a library that has every function of the Rust bindings FILE, each returning CUDA_ERROR_STUB_LIBRARY.
stub() {
    local name="$1" soname="$2"; shift 2
    grep -ohE 'pub (unsafe )?fn (cu|nvrtc)[A-Za-z0-9_]+ *\(' "$@" | sed -E 's/.*fn (\w+) *\(/int \1(void) { return 34; }/' | sort -u |
        gcc -shared -fPIC -w -x c -Wl,-soname,"$soname" -o "$folder/lib/stubs/lib$name.so" -
}

stubs() {
    local cudarc major
    major=$("$folder/bin/nvcc" --version | sed -nE 's/.*release ([0-9]+)\..*/\1/p')
    cudarc=$(cd "$root" && cargo metadata --format-version 1 --all-features --locked --filter-platform x86_64-unknown-linux-gnu |
        python3 -c 'import json, os, sys
print(next(os.path.dirname(p["manifest_path"]) for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
    stub cuda libcuda.so.1 "$cudarc/src/driver/sys/mod.rs"
    stub cublas "libcublas.so.$major" "$cudarc/src/cublas/sys/mod.rs"
    stub cublasLt "libcublasLt.so.$major" "$cudarc/src/cublaslt/sys/mod.rs"
    stub curand libcurand.so.10 "$cudarc/src/curand/sys/mod.rs"
    stub nvrtc "libnvrtc.so.$major" "$cudarc/src/nvrtc/sys/mod.rs"
}

environment() {
    cat > "$folder/environment" << END
export CUDA_HOME="$folder" CUDA_PATH="$folder" NVCC="$folder/bin/nvcc-for-candle" PATH="$folder/bin:\$PATH"
# candle's own kernels are shipped as PTX; that of 8.0 is compiled by the driver for every later GPU, that of 9.0 for Hopper only.
export CUDA_COMPUTE_CAP=80
END
}

if [ -n "$installed" ]; then
    link_installed
else
    fetch
    link
fi
stubs
environment
echo "$wanted" > "$folder/complete"
echo "toolkit: $("$folder/bin/nvcc" --version | sed -n 's/.*release //p') in $folder"
