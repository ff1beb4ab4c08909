#!/usr/bin/env bash
# Builds the three probes into host/querl-conformance/probes: tests/guests/host-probe/build.sh
set -euo pipefail
cd "$(dirname "$0")"
for probe in plain functions group; do
  features=()
  [[ $probe == plain ]] || features=(--features "$probe")
  # Optimised for size; without paths of this machine in panic messages.
  CARGO_PROFILE_RELEASE_OPT_LEVEL=s CARGO_PROFILE_RELEASE_STRIP=symbols \
    RUSTFLAGS="--remap-path-prefix=$(cd ../../.. && pwd)=. --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo" \
    cargo build --release --target wasm32-wasip2 "${features[@]}"
  cp ../../../plugins/target/wasm32-wasip2/release/host_probe.wasm "../../../host/querl-conformance/probes/$probe.wasm"
done
