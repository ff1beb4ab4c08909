#!/usr/bin/env bash
# The stages with external servers: teacher and judge behind transformers' `serve` command, retrieval behind `querl serve rag`. Prints the
# results, and fails if a row is lost or no row succeeds.
#
#   cargo build --release && tests/foreign/run.sh [OUT]      (OUT: tests/foreign/out)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="$(realpath -m "${1:-tests/foreign/out}")"
querl="${QUERL:-target/release/querl}"
chat_port="${CHAT_PORT:-8123}" rag_port="${RAG_PORT:-8124}" n_rows=60
rm -rf "$out" && mkdir -p "$out"

log() { printf '== %s\n' "$*"; }
stop() { kill "${pids[@]}" 2>/dev/null || true; }
pids=()
trap stop EXIT

wait_for() { # URL LOG
    for _ in $(seq 120); do
        curl --silent --fail --output "$out/health" "$1" && return
        sleep 1
    done
    tail -20 "$2" >&2
    return 1
}

# Before the servers start: the build may take longer than the timeout for them.
log "installation"
tests/foreign/install.sh
log "servers"
tests/foreign/serve.sh "$chat_port" >"$out/serve.log" 2>&1 &
pids+=($!)
"$querl" serve rag examples/fivedoctors/querl.toml --addr "127.0.0.1:$rag_port" >"$out/rag.log" 2>&1 &
pids+=($!)
if [[ ! -f "${JUDGE_MODEL:-$out/judge}/config.json" ]]; then
    HF_HUB_OFFLINE=1 tests/foreign/.venv/bin/python tests/foreign/judge_model.py "$out/judge"
fi
judge="$(realpath "${JUDGE_MODEL:-$out/judge}")"
wait_for "http://127.0.0.1:$chat_port/health" "$out/serve.log"
wait_for "http://127.0.0.1:$rag_port/health" "$out/rag.log"

# The server uses the directory as the model's name.
head -n "$n_rows" examples/fivedoctors/teacher_rewrites.jsonl >"$out/queries.jsonl"
settings=(
    data.input="$out/queries.jsonl" data.query_column=original_query data.profile_column=user_profile
    data.history_column=history_summary
    teacher.kind=openai teacher.base_url="http://127.0.0.1:$chat_port/v1" teacher.api_key_env=''
    teacher.model="$PWD/examples/tiny-qwen3" teacher.max_tokens=64 teacher.temperature=0.0
    teacher.max_concurrent=4 teacher.price_prompt_per_million=0.0 teacher.price_completion_per_million=0.0
    judge.kind=openai judge.base_url="http://127.0.0.1:$chat_port/v1" judge.api_key_env='' judge.model="$judge"
    judge.max_tokens=64 judge.temperature=0.0 judge.max_concurrent=4
    retrieval.kind=http retrieval.url="http://127.0.0.1:$rag_port/api/chat/general_rag"
    cache.path="$out/answers.redb" 'eval.systems=["raw", "teacher"]'
)
flags=()
for setting in "${settings[@]}"; do flags+=(--set "$setting"); done
run() { "$querl" "$@" "${flags[@]}"; }

log "rag check"
run rag check examples/fivedoctors/querl.toml
log "estimate"
run run examples/fivedoctors/querl.toml --to validate --dry-run --out "$out/run"
log "rewrite, validate, convert"
run run examples/fivedoctors/querl.toml --to convert --out "$out/run"
log "eval: raw query and teacher, both judged"
run eval examples/fivedoctors/querl.toml --out "$out/run"
log "the same from the cache"
run run examples/fivedoctors/querl.toml --to validate --out "$out/again"

python3 - "$out" "$n_rows" <<'CHECK'
import json, sys
out, n_rows = sys.argv[1], int(sys.argv[2])
lines = lambda name: [json.loads(line) for line in open(f"{out}/{name}")]
rewrites, validated, records = lines("run/data/rewrites.jsonl"), lines("run/data/validated.jsonl"), lines("run/eval/records.jsonl")
n_rewritten = sum("Ok" in record["rewrite"] for record in rewrites)
n_found = sum("Ok" in (record["retrieval"] or {}) for record in validated)
sides = [record["outcome"]["Ok"]["candidate"] for record in records if "Ok" in record["outcome"]]
n_judged = sum(isinstance(side["judgement"], dict) and "scored" in side["judgement"] for side in sides)
again = json.load(open(f"{out}/again/calls.json"))["rewrite"]
n_asked_again = sum(provider["calls"] for provider in again.values())
print(f"rows {len(rewrites)}, rewritten {n_rewritten}, looked up {n_found}, answers evaluated {len(sides)}, judged {n_judged}, asked again {n_asked_again}")
assert len(rewrites) == len(validated) == n_rows, "a row is lost"
assert n_rewritten and n_found and n_judged, "nothing succeeded"
assert n_asked_again == 0, "the cache was not used"
CHECK
log "all as it should be"
