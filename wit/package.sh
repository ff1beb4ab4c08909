#!/usr/bin/env bash
# Writes the contract as a binary WIT package and as an OCI image layout: wit/package.sh OUT [VERSION]
set -euo pipefail
out=$(realpath -m "${1:?expected an output folder}")
cd "$(dirname "$0")/.."
cargo run --release -q -p querl-conformance --example wit_package -- "wit/${2:-0.2.0}" "$out"
