#!/usr/bin/env bash
# build.sh [TOOLKIT]: builds libquerl_cuda.so, the library that `querl` opens if there is a GPU, and prints its size.
#
# TOOLKIT is a folder made by toolkit.sh (default target/cuda/toolkit, made where it is missing). The library is for the
# capabilities in QUERL_CUDA_CAPABILITIES (default 80, 86, 89, 90) and for later ones, which the driver compiles it for.
# Ends with 1 where the library lacks a function of the interface, or `querl` needs anything of CUDA. What the library needs is shown.
set -euo pipefail
cd "$(dirname "$0")/../.."
toolkit="${1:-$PWD/target/cuda/toolkit}"
host/querl-gpu/toolkit.sh "$toolkit"
# shellcheck disable=SC1091
. "$toolkit/environment"

cargo build --release -p querl-gpu --features cuda
target="${CARGO_TARGET_DIR:-target}/release"
mkdir -p "$target/cuda"
library="$target/cuda/libquerl_cuda.so"
strip --strip-unneeded -o "$library" "$target/libquerl_cuda.so"

needed() { readelf -d "$1" | sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p'; }
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f MiB", bytes / 1048576 }'; }
echo "$library: $(mib "$(stat -c %s "$library")"), $(mib "$(gzip -9 -c "$library" | wc -c)") compressed"
echo "needs: $(needed "$library" | tr '\n' ' ')"

missing=$(comm -23 <(printf '%s\n' querl_cuda_abi querl_cuda_describe querl_cuda_free querl_cuda_run | sort) \
    <(nm -D --defined-only "$library" | sed -nE 's/.* T (querl_cuda_\w+)$/\1/p' | sort))
[ -z "$missing" ] || { echo "the library lacks $missing"; exit 1; }
if [ -e "$target/querl" ] && needed "$target/querl" | grep -E '^lib(cu|nv)'; then
    echo "querl needs the above: it would not start without CUDA"
    exit 1
fi
