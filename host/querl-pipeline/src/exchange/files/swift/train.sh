#!/usr/bin/env bash
# Trains with GRPO of ms-swift on N_GPUS GPUs of this machine, or on the CPU without one. Arguments are added to the settings.
set -euo pipefail
cd "$(dirname "$0")"
HERE="$(pwd)"
MODEL="${MODEL:-@MODEL@}"
export QUERL_CONFIG="${QUERL_CONFIG:-$HERE/querl.toml}"
N_GPUS="${N_GPUS:-1}"
# Passes of an optimizer step, which all processes share.
N_PASSES=@ACCUMULATION@
if ((N_PASSES % N_GPUS)); then
    echo "an optimizer step has $N_PASSES passes, which cannot be divided evenly over $N_GPUS GPUs; set N_GPUS to a divisor of it" >&2
    exit 2
fi
if ((N_GPUS > 1)); then
    export NPROC_PER_NODE="$N_GPUS"
fi
set -- --gradient_accumulation_steps "$((N_PASSES / N_GPUS))" "$@"
if [ -d adapter ]; then
    set -- --adapters "$HERE/adapter" --ref_adapters "$HERE/adapter" "$@"
fi
if [ -s val.jsonl ]; then
    set -- --val_dataset "$HERE/val.jsonl" --eval_strategy steps "$@"
else
    set -- --eval_strategy no "$@"
fi
exec swift rlhf --rlhf_type grpo \
    --model "$MODEL" \
    --dataset "$HERE/train.jsonl" \
    --split_dataset_ratio 0 \
    --external_plugins "$HERE/plugin.py" \
    --reward_funcs querl \
    --output_dir "$HERE/out" \
    --add_version false \
@SETTINGS@    "$@"
