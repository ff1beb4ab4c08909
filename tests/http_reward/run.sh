#!/usr/bin/env bash
# A reward plugin compared with a Python reward function over HTTP, on the same recorded episodes, in one run.
#   tests/http_reward/run.sh EPISODES.jsonl [PLUGIN...]      PLUGIN: by default plugins/reward-competition
# Creates a virtual environment .venv in this folder. Needs Python 3.11 and the episodes of a run.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[[ $# -ge 1 ]] || { echo "usage: tests/http_reward/run.sh EPISODES.jsonl [PLUGIN...]" >&2; exit 2; }
episodes=$(realpath "$1")
shift
[[ -x $here/.venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$here/.venv"
"$here/.venv/bin/python" -m pip install --quiet --requirement "$here/requirements.txt"
cd "$here/../.."
cargo build --quiet --release -p querl --example reward_over_http
port=${PORT:-8765}
(cd "$here" && exec .venv/bin/python -m uvicorn server:app --port "$port" --log-level warning) &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
cargo run --quiet --release -p querl --example reward_over_http -- "$episodes" "http://127.0.0.1:$port/reward" "${@:-plugins/reward-competition}"
