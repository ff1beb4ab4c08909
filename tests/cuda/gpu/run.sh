#!/usr/bin/env bash
# run.sh [--out FOLDER] [--seconds N] [--simulated FOLDER] [--only PATTERN]: all tests and measurements that need a real GPU.
#
# Builds nothing: run it in the folder to which pack.sh's archive is unpacked. Parts run in order, each with a time limit, all together within
# --seconds (default 470). A failed part does not stop the next. FOLDER (default ./results) always contains the results so far: a log and a JSON
# file for each part, and at the end RESULTS.md and results.json, which report.py makes of the available results. --only runs the parts whose
# names match a pattern (`measure-7b-*`). Exits with 1 if a part failed or reached its time limit.
#
# Needs a driver, python3 with torch for the comparison (also transformers and PEFT, unless the archive contains wheels), and CUDA's libraries,
# which are searched in torch's wheels (libraries.py). --simulated runs tiny shapes on the simulated GPU in FOLDER: its times mean nothing.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=results; seconds=470; simulated=""; only="*"
while [ $# -gt 0 ]; do
    case "$1" in
    --out) out="$2"; shift 2 ;;
    --seconds) seconds="$2"; shift 2 ;;
    --simulated) simulated=$(cd "$2" && pwd) || exit 2; shift 2 ;;
    --only) only="$2"; shift 2 ;;
    *) echo "unknown option $1"; exit 2 ;;
    esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
rm -f "$out"/*.log "$out"/*.json "$out/parts.jsonl" "$out/RESULTS.md"
started=$SECONDS
work=$(mktemp -d -p "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)")
trap 'rm -rf "$work"' EXIT
export TMPDIR="$work" QUERL_TEST_GOLDENS="$here/golden" CANDLE_NUM_THREADS=1

# CUDA's libraries.
if [ -n "$simulated" ]; then
    export LD_LIBRARY_PATH="$simulated:${LD_LIBRARY_PATH:-}"
else
    # shellcheck disable=SC2046
    folders=$(python3 "$here/libraries.py" $(cat "$here/needs.txt") 2> "$out/libraries.log") || cat "$out/libraries.log"
    export LD_LIBRARY_PATH="$folders:${LD_LIBRARY_PATH:-}"
fi
if compgen -G "$here/wheels/*.whl" > /dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$here"/wheels/*.whl > "$out/wheels.log" 2>&1
    export PYTHONPATH="$work/site:${PYTHONPATH:-}"
fi

# note NAME CODE SECONDS WHY
note() { printf '{"name": "%s", "code": %s, "seconds": %s, "why": "%s"}\n' "$@" >> "$out/parts.jsonl"; }

# part NAME LIMIT COMMAND...: stdout and stderr are written to NAME.log.
part() {
    local name="$1" limit="$2" left begin code; shift 2
    # shellcheck disable=SC2053
    [[ "$name" == $only ]] || return 0
    left=$((seconds - (SECONDS - started) - 3))
    if [ "$left" -lt 5 ]; then note "$name" null 0 "no time was left"; return 0; fi
    [ "$limit" -lt "$left" ] || limit="$left"
    echo "+ $name (at most $limit s)"
    begin=$SECONDS
    # On SIGTERM a measurement prints its results so far: it gets some seconds for that.
    timeout -k 6 "$((limit > 20 ? limit - 6 : limit))" "$@" > "$out/$name.log" 2>&1
    code=$?
    note "$name" "$code" "$((SECONDS - begin))" ""
    [ "$code" = 0 ] || { echo "  ended with $code:"; tail -n 3 "$out/$name.log" | sed 's/^/  /'; }
}

# measure NAME LIMIT SHAPE OPTION...: the result is a separate JSON file.
measure() {
    local name="$1" limit="$2" shape="$3"; shift 3
    # shellcheck disable=SC2016
    part "$name" "$limit" bash -c 'trap : TERM; "$0" --device cuda:0 --json "${@:2}" > "$1.new"; code=$?; [ ! -s "$1.new" ] || mv "$1.new" "$1"; exit $code' \
        "$here/bin/querl-bench" "$out/$name.json" --shape "$shape" "$@"
}

tests() { # NAME LIMIT PROGRAM FILTER: one filter per call, because one of several that matches no test would not be noticed
    local name="$1" limit="$2" program="$3"; shift 3
    part "$name" "$limit" "$here/bin/$program" --test-threads 1 --include-ignored "$@"
    # A test may have been renamed: without this check a filter that matches no test would pass.
    if grep -q "^running 0 tests" "$out/$name.log" 2> /dev/null; then note "$name" 1 0 "no test has that name"; fi
}

compare() { # SHAPE LIMIT OPTION...
    local shape="$1" limit="$2"; shift 2
    part "compare-$shape" "$limit" python3 "$here/compare.py" --shape "$shape" --out "$out/compare-$shape.json" --seconds "$((limit - 12))" "$@"
}

part doctor 15 "$here/bin/querl" doctor
if [ -n "$simulated" ]; then
    small=(--rows 4 --own-tokens 4,9 --shared-tokens 8 --answer-tokens 3 --batch 4 --sequences 1,4 --max-new-tokens 3)
    tests test-kernels 120 querl_cuda device::tests::elementwise
    tests test-candle 120 candle_on_gpu
    tests test-decoder 180 decoder logits
    tests test-train 180 querl_train gpu
    part kernels 300 "$here/bin/gpu_kernels" --shape tiny --rows 16 --sequences 2 --repeats 1 --json "$out/kernels.json"
    measure measure-tiny-a 300 tiny --what sft,rollout --repeats 1 "${small[@]}"
    measure measure-tiny-b 300 tiny --what ppo --repeats 1 "${small[@]}"
    compare tiny 200 --device cpu --repeats 1 "${small[@]}" --micro-batches 2,4
else
    tests test-kernels 40 querl_cuda device
    tests test-answers 30 querl_cuda decode
    tests test-decoder 25 decoder
    tests test-candle 10 candle_on_gpu
    tests test-train 20 querl_train gpu
    sanitizer=$(command -v compute-sanitizer || compgen -G '/usr/local/cuda*/bin/compute-sanitizer' | head -n 1)
    if [ -n "$sanitizer" ]; then
        part sanitizer 30 "$sanitizer" --tool memcheck --error-exitcode 9 "$here/bin/querl_cuda" --test-threads 1 device::tests
    else
        note sanitizer null 0 "there is no compute-sanitizer"
    fi
    part kernels 30 "$here/bin/gpu_kernels" --shape qwen2.5-7b --json "$out/kernels.json"
    measure measure-0.5b-a 20 qwen2.5-0.5b --repeats 3
    measure measure-7b-a 40 qwen2.5-7b --what sft,rollout --repeats 3
    measure measure-7b-b 40 qwen2.5-7b --what ppo --repeats 1
    compare 7b 65 --repeats 1
    # One epoch of updates instead of four, on both sides: a 32B iteration with four epochs takes a minute.
    measure measure-32b-a 40 qwen2.5-32b --what sft,rollout --repeats 1 --sequences 1,64
    measure measure-32b-b 45 qwen2.5-32b --what ppo --repeats 1 --ppo-epochs 1
    compare 32b 90 --repeats 1 --sequences 1,64 --micro-batches 8,16 --ppo-epochs 1
    compare 0.5b 40 --repeats 2
fi
python3 "$here/report.py" "$out"
