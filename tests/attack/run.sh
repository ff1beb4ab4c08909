#!/usr/bin/env bash
# Runs the attack cases: every test of this repository that damages, kills, floods or misuses the program, then the attacks on the built
# program through its command line (outside.py, which can also be run alone). Prints the number of attacks tried and held by group, as a
# Markdown table. Exit code 1 if one did not hold.
#
# Usage: tests/attack/run.sh [--long]
#
# --long adds 100 kills of training and of data stages, a thousand rows under injected faults, workbooks opened in LibreOffice (if it is
# installed), ten times as many kills and interrupts by outside.py, and an hour of fuzzing (if cargo-fuzz is installed).
# Needs Python 3.11.
set -euo pipefail
cd "$(dirname "$0")/../.."

long=
case ${1:-} in
'') ;;
--long) long=1 ;;
*)
  echo "usage: tests/attack/run.sh [--long]" >&2
  exit 2
  ;;
esac

# GROUP: PACKAGE:TARGET... ; the target `lib` is the unit tests of a package.
groups=(
  "results, kills, restarts: querl:run querl:kill querl:rm querl-train:lib"
  "mistakes on the command line: querl:bad_input querl:commands"
  "tables, configurations, journals: querl:data querl-data:lib querl-core:lib querl-pipeline:lib"
  "models, templates, tokenizers: querl:model querl:model_hub querl-model:model querl-model:lib querl-encoder:parity querl-encoder:lib"
  "calls and money: querl:calls querl:batch querl:rag"
  "plugins and bundles: querl:plugins querl:plugin_faults querl:plugin_registry querl:plugin_trust querl:replay querl-bundle:* querl-eval:output"
  "hostile components: querl-plugin:* querl-conformance:breaches"
  "servers: querl:rm_serve querl-serve:*"
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cargo test --release --workspace --no-run --message-format json >"$work/messages"
# Lines `PACKAGE TARGET FOLDER PROGRAM`.
python3 - "$work/messages" >"$work/programs" <<'PYTHON'
import json, os, sys

for line in open(sys.argv[1]):
    message = json.loads(line)
    if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
        folder = os.path.dirname(message["manifest_path"])
        kinds = message["target"]["kind"]
        target = message["target"]["name"] if kinds == ["test"] else kinds[0]
        print(os.path.basename(folder), target, folder, message["executable"])
PYTHON

tried_in_all=0 held_in_all=0
# run GROUP PACKAGE:TARGET ARGUMENT...: runs a test program. If it was not built, this script fails.
run() {
  local name=$1 package=${2%:*} target=${2#*:} found=
  shift 2
  while read -r of_package of_target folder program; do
    [[ $of_package == "$package" ]] || continue
    [[ $target == "$of_target" || ($target == '*' && $of_target != bin) ]] || continue
    found=1
    local status=0
    (cd "$folder" && CARGO_MANIFEST_DIR=$folder "$program" "$@" </dev/null) >"$work/output" 2>&1 || status=$?
    grep -E '^test .* FAILED$' "$work/output" | sed "s/^/$package /" >&2 || true
    read -r passed failed < <(awk '/^test result:/ { p += $4; f += $6 } END { print p + 0, f + 0 }' "$work/output")
    # A program that crashed, or in which a filter matches no test.
    if [[ $status -ne 0 && $failed == 0 ]] || [[ $# -gt 0 && $passed == 0 && $failed == 0 ]]; then
      tail -5 "$work/output" >&2
      echo "$package $of_target $*: no result, or no such test; status $status" >&2
      failed=1
    fi
    tried=$((tried + passed + failed)) held=$((held + passed))
  done <"$work/programs"
  if [[ -z $found ]]; then
    echo "$name: $package has no test program $target" >&2
    exit 1
  fi
}

row() {
  echo "| $1 | $2 | $3 |"
  tried_in_all=$((tried_in_all + $2)) held_in_all=$((held_in_all + $3))
}

echo "| group | tried | held |"
echo "| --- | --- | --- |"
for group in "${groups[@]}"; do
  name=${group%%: *} tried=0 held=0
  read -ra programs <<<"${group#*: }"
  for program in "${programs[@]}"; do
    run "$name" "$program"
  done
  row "$name" "$tried" "$held"
done

cargo build --release
tests/attack/outside.py ${long:+--long} >"$work/outside" || true
grep -q ' tried, ' "$work/outside" || { echo "outside.py did not end" >&2; exit 1; }
while IFS='|' read -r _ name tried held _; do
  row "from outside: $(xargs <<<"$name")" "$((tried))" "$((held))"
done < <(grep '^| ' "$work/outside" | tail -n +3)

if [[ -n $long ]]; then
  tried=0 held=0
  export QUERL_KILLS=100
  run "100 kills" querl:kill killed
  run "100 kills" querl:calls killed
  unset QUERL_KILLS
  row "100 kills of training, 100 of data stages" "$tried" "$held"
  tried=0 held=0
  run "figures" querl:calls --ignored thousand_rows_under_injected_faults
  row "a thousand rows under injected faults" "$tried" "$held"
  if command -v soffice >/dev/null; then
    tried=0 held=0
    run "LibreOffice" querl-data:lib --ignored libreoffice
    row "workbooks in LibreOffice" "$tried" "$held"
  else
    echo "skipped: workbooks in LibreOffice, since soffice is not installed" >&2
  fi
  if cargo fuzz --version >/dev/null 2>&1; then
    if tests/fuzz/run.sh 720 >"$work/fuzz" 2>&1; then
      row "fuzz targets, an hour in all" 5 5
    else
      tail -20 "$work/fuzz" >&2
      n_begun=$(grep -c '^== ' "$work/fuzz" || true)
      row "fuzz targets, an hour in all" 5 "$((n_begun > 0 ? n_begun - 1 : 0))"
    fi
  else
    echo "skipped: fuzzing, since cargo-fuzz is not installed" >&2
  fi
fi
row_total="$tried_in_all tried, $held_in_all held"
echo
echo "$row_total"
[[ $tried_in_all == "$held_in_all" ]]
