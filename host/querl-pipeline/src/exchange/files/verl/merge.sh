#!/usr/bin/env bash
# Makes a PEFT adapter of a checkpoint: merge.sh checkpoints/global_step_N. Then: querl import verl checkpoints/global_step_N --run RUN_DIR
set -euo pipefail
CHECKPOINT="${1:?usage: merge.sh CHECKPOINT}"
exec python3 -m verl.model_merger merge --backend fsdp --local_dir "$CHECKPOINT/actor" --target_dir "$CHECKPOINT/merged"
