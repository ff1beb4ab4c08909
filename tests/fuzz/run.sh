#!/usr/bin/env bash
# Feeds random bytes to everything that reads other people's: manifest, lock, episode, bundle, component.
#
# Usage: tests/fuzz/run.sh SECONDS [TARGET...]
#
# SECONDS is for each target. Needs cargo-fuzz (cargo install cargo-fuzz) and a C++ compiler; stable Rust will do, as no sanitizer
# is used: what is looked for are panics, failed assertions, hangs and memory without bound.
# Ends with exit code 1 at the first input that breaks a target, and says where that input lies.
# FUZZ_TARGET_DIR: where to build; the repository's target/fuzz where unset.
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
  # Memory beyond this is a finding. Wasmtime reserves address space and its compiler works in memory of its own.
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
