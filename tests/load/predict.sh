#!/usr/bin/env bash
# Load test of /predict with wrk: 1, 8 and 64 clients, with batching across requests (--max_batch 32) and without (1), alternating.
#
#   tests/load/predict.sh QUERL MODEL_DIR FILE [ROUNDS]     (rounds of 10 s each: 3)
#
# FILE is a list of dialogues as in examples/style. Needs wrk (Debian: apt install wrk). Prints one line of JSON a measurement.
set -euo pipefail
querl="$(realpath "$1")" model="$2" file="$3" rounds="${4:-3}" port="${PORT:-8126}"
here="$(dirname "${BASH_SOURCE[0]}")"
trap '[[ -z "${server:-}" ]] || kill "$server" 2>/dev/null || true' EXIT

for round in $(seq "$rounds"); do
    for max_batch in 1 32; do
        "$querl" -q rm serve --model "$model" --addr "127.0.0.1:$port" --max_batch "$max_batch" &
        server=$!
        for _ in $(seq 300); do
            curl --silent --fail --output /dev/null "http://127.0.0.1:$port/ready" && break
            sleep 0.1
        done
        for clients in 1 8 64; do
            figures="$(wrk --threads 1 --connections "$clients" --duration 10s --timeout 60s \
                --script "$here/predict.lua" "http://127.0.0.1:$port" -- "$file" | tail -1)"
            echo "{\"round\": $round, \"max_batch\": $max_batch, \"clients\": $clients, ${figures#\{}"
        done
        kill "$server" && wait "$server" || true
    done
done
