#!/usr/bin/env bash
# Fuzzes every parser of untrusted data: manifest, lock, episode, bundle, component.
#
# Usage: tests/fuzz/run.sh SECONDS [TARGET...]
#
# SECONDS is the time per target. Needs cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler. Stable Rust suffices, because no sanitizer
# is used: findings are panics, failed assertions, hangs and unbounded memory.
# Exit code 1 at the first input that fails, with the path of that input.
# FUZZ_TARGET_DIR: the build folder (default target/fuzz of the repository).
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:?usage: tests/fuzz/run.sh SECONDS [TARGET...]}
shift
if [[ $# -eq 0 ]]; then
  set -- manifest lock episode bundle component
fi
if ! cargo fuzz --version >/dev/null 2>&1; then
  echo "run.sh: cargo-fuzz is missing; install it with: cargo install cargo-fuzz" >&2
  exit 2
fi

target_dir=${FUZZ_TARGET_DIR:-$PWD/target/fuzz}
found=$(mktemp -d)
for target in "$@"; do
  features=()
  # A process with more memory is a finding. Wasmtime reserves address space, and its compiler needs memory in addition to the input.
  max_mb=512 max_len=65536
  if [[ $target == component ]]; then
    features=(--features component)
    max_mb=2048
  fi
  mkdir -p "$found/$target/corpus"
  echo "== $target: $seconds s"
  if ! cargo fuzz run --fuzz-dir tests/fuzz --target-dir "$target_dir" --sanitizer none "${features[@]}" "$target" \
    "$found/$target/corpus" "tests/fuzz/seeds/$target" -- \
    -max_total_time="$seconds" -max_len="$max_len" -rss_limit_mb="$max_mb" -timeout=20 -print_final_stats=1 \
    -artifact_prefix="$found/$target/"; then
    echo "run.sh: $target failed; the input lies in $found/$target" >&2
    exit 1
  fi
done
rm -rf "$found"
