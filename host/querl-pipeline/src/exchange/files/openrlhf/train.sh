#!/usr/bin/env bash
# Trains with OpenRLHF on N_GPUS GPUs of this machine; ./reward.sh must run. Arguments are added to the settings.
set -euo pipefail
cd "$(dirname "$0")"
HERE="$(pwd)"
MODEL="${MODEL:-@MODEL@}"
N_GPUS="${N_GPUS:-8}"
REWARD_URL="${REWARD_URL:-http://127.0.0.1:8000/openrlhf}"
if [ -d adapter ]; then
    # OpenRLHF begins with a model, not with an adapter.
    [ -d merged ] || querl model merge --model "$MODEL" --adapter adapter --out merged
    MODEL="$HERE/merged"
fi
if [ -s val.jsonl ]; then
    set -- --eval.dataset "$HERE/val.jsonl" "$@"
fi
exec python3 -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --reward.remote_url "$REWARD_URL" \
    --data.prompt_dataset "$HERE/train.jsonl" \
    --data.input_key prompt \
    --data.apply_chat_template \
    --data.label_key querl \
    --actor.num_gpus_per_node "$N_GPUS" \
    --ref.num_gpus_per_node "$N_GPUS" \
    --critic.num_gpus_per_node "$N_GPUS" \
    --vllm.num_engines "$N_GPUS" \
    --vllm.gpu_memory_utilization 0.5 \
    --vllm.enable_sleep \
    --ds.enable_sleep \
    --train.colocate_all \
    --ckpt.output_dir "$HERE/out" \
    --ckpt.path "$HERE/checkpoints" \
@SETTINGS@    "$@"
