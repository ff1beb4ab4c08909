#!/usr/bin/env bash
# Trains with verl on the GPUs of this machine, or on the Ray cluster that RAY_ADDRESS names (ray.sh). Arguments are added to the settings.
set -euo pipefail
cd "$(dirname "$0")"
HERE="$(pwd)"
MODEL="${MODEL:-@MODEL@}"
case "$HERE$MODEL" in
    *[\"\\\$]*)
        echo "$HERE or $MODEL has a quote, a backslash or a dollar sign, which verl's settings cannot hold; rename the folder" >&2
        exit 2
        ;;
esac
# verl writes its metrics here; `querl import verl` reads them.
export VERL_FILE_LOGGER_PATH="${VERL_FILE_LOGGER_PATH:-$HERE/metrics.jsonl}"
exec python3 -m verl.trainer.main_ppo \
@SETTINGS@    "$@"
