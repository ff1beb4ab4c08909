#!/usr/bin/env bash
# test.sh: tests the exit codes of run.sh, with fake programs instead of the archive's. Needs python3, no GPU and no build.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
gpu="$folder/gpu"
mkdir -p "$gpu/bin" "$gpu/golden"
cp "$here"/{run.sh,report.py,libraries.py} "$gpu/"
touch "$gpu/needs.txt"
for name in querl querl_cuda decoder; do
    # The fake programs print FAKE_OUTPUT and exit with FAKE_CODE.
    printf '#!/bin/sh\necho "$FAKE_OUTPUT"; exit "${FAKE_CODE:-0}"\n' > "$gpu/bin/$name"
    chmod +x "$gpu/bin/$name"
done

# ends CODE PARTS: run.sh --only PARTS must exit with CODE.
ends() {
    local code=0
    "$gpu/run.sh" --out "$folder/results" --only "$2" > "$folder/output" 2>&1 || code=$?
    [ "$code" = "$1" ] || { echo "--only $2 ended with $code; expected $1"; cat "$folder/output"; exit 1; }
}

export FAKE_OUTPUT="running 3 tests"
ends 0 doctor
ends 0 'test-kernels'
ends 1 'no-such-part'
FAKE_CODE=1 ends 1 doctor
FAKE_CODE=101 ends 1 'test-decoder'
grep -q 'failed, or cut off: test-decoder' "$folder/output"
# A filter that matches no test.
FAKE_OUTPUT="running 0 tests" ends 1 'test-answers'
# Each call has one filter: one of several that matches no test would not be noticed.
if grep -nE '^ +tests [^ ]+ [0-9]+ [^ ]+ [^ ]+ [^ ]+' "$gpu/run.sh"; then echo "a call of tests has several filters"; exit 1; fi
echo "run.sh ends with 1 where a part failed, and with 0 where none did"
