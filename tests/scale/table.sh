#!/usr/bin/env bash
# Runs a large csv file through `querl run --to validate` and prints the memory of the process over time.
#   tests/scale/table.sh [ROWS] [STAGE]
# QUERL names the program (default: target/release/querl). Needs Linux and python3.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
querl="${QUERL:-$root/target/release/querl}"
n_rows="${1:-1000000}"
stage="${2:-validate}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 - "$work" "$n_rows" "$root" <<'PY'
import itertools, json, pathlib, sys
work, n_rows, root = pathlib.Path(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
example = root / "examples/fivedoctors"
base = [json.loads(line) for line in open(example / "teacher_rewrites.jsonl", encoding="utf-8")]
with open(work / "queries.csv", "w", encoding="gb18030") as table, open(work / "teacher.jsonl", "w", encoding="utf-8") as teacher:
    table.write("问题,用户画像,历史摘要\n")
    for index, row in zip(range(n_rows), itertools.cycle(base)):
        query = f'{row["original_query"]} 第{index}位顾客'
        table.write(",".join('"' + text.replace('"', '""') + '"' for text in (query, row["user_profile"], row["history_summary"])) + "\n")
        teacher.write(json.dumps(dict(row, original_query=query), ensure_ascii=False) + "\n")
# Few passages, because the processing of rows is measured, not retrieval.
passages = open(example / "knowledge_base.jsonl", encoding="utf-8").readlines()[:20]
(work / "passages.jsonl").write_text("".join(passages), encoding="utf-8")
(work / "querl.toml").write_text(f'''
tenant = "fivedoctors"
[data]
input = "queries.csv"
[teacher]
kind = "recorded"
path = "teacher.jsonl"
[retrieval]
kind = "embedded"
knowledge_base = "passages.jsonl"
lexicon = "{example}/lexicon.json"
top_k = 1
[model]
path = "{root}/examples/tiny-qwen3"
[plugins.prompt]
path = "{root}/plugins/tenant-fivedoctors"
[[plugins.filters]]
path = "{root}/plugins/filter-quality"
[[plugins.rewards]]
path = "{root}/plugins/reward-competition"
''', encoding="utf-8")
PY
ls -l "$work/queries.csv" | awk '{ printf "%d bytes of csv\n", $5 }'

"$querl" run "$work/querl.toml" --to "$stage" --out "$work/run" > "$work/said" 2> "$work/progress" &
pid=$!
start=$SECONDS
while kill -0 "$pid" 2> /dev/null; do
    memory="$(awk '/^VmRSS/ { print $2 }' "/proc/$pid/status" 2> /dev/null || true)"
    at="$(tail -n 1 "$work/progress" | tr -d '\n')"
    [[ -n "$memory" ]] && printf '%5d s  %7d KiB  %s\n' "$((SECONDS - start))" "$memory" "$at"
    sleep "${EVERY_S:-15}"
done
wait "$pid"
cat "$work/said"
grep -v '/[0-9]* *$' "$work/progress" | tail -n 20
ls -l "$work/run/data" | awk 'NR > 1 { print $5, $9 }'
