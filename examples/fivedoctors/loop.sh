#!/usr/bin/env bash
# One round from requests to the next model, with simulated users: serve, collect, retrain, check, promote. About three minutes on two cores.
#
#     examples/fivedoctors/loop.sh [FOLDER]     # default runs/loop; QUERL names the program, PORT the port
#
# docs/feedback.md explains each step. Ends with the exit code of the check that fails, without promoting.
set -euo pipefail
querl=${QUERL:-target/release/querl}
out=${1:-runs/loop}
url=http://127.0.0.1:${PORT:-8017}
config=examples/fivedoctors/querl.toml

# The model that serves now: a short training.
"$querl" run "$config" --out "$out/first" --set rl.max_steps=10
"$querl" release check "$out/first" --against raw
"$querl" release promote "$out/first" --releases "$out/releases"

# Serve and collect. Users and clicks are simulated.
"$querl" serve rewrite "$out/first" --addr "${url#http://}" --request_log "$out/requests" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
examples/fivedoctors/traffic.py "$out/first" --url "$url"
kill "$server"
wait "$server" || true

# Retrain.
"$querl" data from-log "$out/requests" --out "$out/logged.jsonl" --force
"$querl" run "$config" --out "$out/second" --set data.input="$out/logged.jsonl" --set data.group_column=group

# Check and promote. 112 queries cannot exclude a smaller loss than that of the margin.
"$querl" release check "$out/second" --against "$out/first" --margin 0.05
"$querl" release promote "$out/second" --releases "$out/releases"
"$querl" release history --releases "$out/releases"
