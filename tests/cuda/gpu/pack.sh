#!/usr/bin/env bash
# pack.sh [--wheels PYTHON] [--small] [OUT]: builds the programs for a machine with a GPU and packs them (default target/cuda/gpu.tar.xz).
#
# The archive contains querl, querl-bench, libquerl_cuda.so, the test programs of querl-gpu (with the feature `cuda`) and querl-train, the
# kernel benchmark, the goldens of the tests, and the scripts. After unpacking, `gpu/run.sh` runs everything. Exits with 1 if the archive is
# larger than 64 MiB.
#
# --wheels 3.12 adds wheels of transformers, PEFT and their dependencies for that Python; torch must be installed there. --small compiles for
# compute capability 9.0 only (QUERL_CUDA_CAPABILITIES selects others). QUERL_CUDA_INSTALLED is an installed CUDA to build with, such as
# /usr/local/cuda-12.8: see host/querl-gpu/toolkit.sh. QUERL_CUDA_TOOLKIT is the toolkit's folder (default target/cuda/toolkit),
# QUERL_PROGRAM an already built querl.
set -euo pipefail
cd "$(dirname "$0")/../../.."
python=""; out="$PWD/target/cuda/gpu.tar.xz"; limit=$((64 << 20))
while [ $# -gt 0 ]; do
    case "$1" in
    --wheels) python="$2"; shift 2 ;;
    --small) export QUERL_CUDA_CAPABILITIES="${QUERL_CUDA_CAPABILITIES:-90}"; shift ;;
    *) out="$1"; shift ;;
    esac
done
toolkit="${QUERL_CUDA_TOOLKIT:-$PWD/target/cuda/toolkit}"
target="${CARGO_TARGET_DIR:-target}"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
gpu="$folder/gpu"
mkdir -p "$gpu/bin/cuda" "$gpu/golden"

echo "+ querl"
if [ -z "${QUERL_PROGRAM:-}" ]; then cargo build --release -p querl; fi
strip -o "$gpu/bin/querl" "${QUERL_PROGRAM:-$target/release/querl}"

echo "+ the library"
host/querl-gpu/build.sh "$toolkit"
cp "$target/release/cuda/libquerl_cuda.so" "$gpu/bin/cuda/"

echo "+ test programs, the kernels' program"
# shellcheck disable=SC1091
. "$toolkit/environment"
programs() { # the programs that cargo built for ARGUMENT..., a name and a path per line
    cargo "$@" --message-format=json | python3 -c '
import json, sys
for line in sys.stdin:
    found = json.loads(line)
    if found.get("executable"):
        print(found["target"]["name"], found["executable"])'
}
add() { while read -r name path; do case "$name" in querl_cuda | querl_train | decoder | candle_on_gpu | gpu_kernels | querl-bench) strip -o "$gpu/bin/$name" "$path" ;; esac; done; }
programs test --release -p querl-gpu -p querl-train --features querl-gpu/cuda --no-run --lib \
    --test decoder --test candle_on_gpu | add
programs build --release -p querl-gpu --features cuda --example gpu_kernels | add
programs build --release -p querl-bench --features cuda | add
for name in querl_cuda querl_train decoder candle_on_gpu gpu_kernels querl-bench; do
    [ -x "$gpu/bin/$name" ] || { echo "$name was not built"; exit 1; }
done

echo "+ the rest"
cp -r tests/reference/golden/{decoders,lora,sft.json} "$gpu/golden/"
cp tests/cuda/gpu/{run.sh,compare.py,libraries.py,report.py} "$gpu/"
readelf -d "$gpu/bin/cuda/libquerl_cuda.so" | sed -nE 's/.*\(NEEDED\).*\[(libcu.*|libnv.*)\]/\1/p' | grep -v '^libcuda\.' > "$gpu/needs.txt"
if [ -n "$python" ]; then
    mkdir "$gpu/wheels"
    platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64)
    # --no-deps, because torch and its libraries are 3 GB. These are the packages that compare.py imports, in tested versions.
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
        "${platforms[@]}" -d "$gpu/wheels" transformers==5.17.0 peft==0.21.2 accelerate==1.15.0 tokenizers==0.23.3 safetensors==0.8.0 \
        huggingface_hub==1.33.0 regex==2026.11.15 pyyaml==6.0.3 tqdm==4.70.1 packaging==25.0 psutil==7.2.2 hf-xet==1.8.0 httpx==0.28.1 \
        httpcore==1.0.9 h11==0.16.0 anyio==4.16.0 idna==3.20 certifi==2026.10.18 click==8.5.1
fi

mkdir -p "$(dirname "$out")"
# One compression dictionary for all programs, because they contain the same kernels.
tar -C "$folder" --sort=name --owner=0 --group=0 -cf - gpu | xz --lzma2=preset=6,dict=128MiB > "$out"
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }
echo
(cd "$gpu" && du -ab --max-depth=2 | sort -rn | awk '$1 > 1e5 { printf "%8.1f MiB  %s\n", $1 / 1048576, $2 }')
size=$(stat -c %s "$out")
echo "$out: $(mib "$size")"
[ "$size" -le "$limit" ] || { echo "that is more than $(mib "$limit"): leave the wheels out, or pack with --small"; exit 1; }
