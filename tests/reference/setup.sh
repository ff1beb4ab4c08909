#!/usr/bin/env bash
# Creates the virtual environment .venv in this folder and makes every golden again. Needs Python 3.11 and 5 GB of disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python="${PYTHON:-python3}"
if [[ ! -x .venv/bin/python ]]; then
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --no-deps --requirement requirements.txt

# Sources alone: their formulas are compiled one by one (trl_formulas.py).
for version in 0.11.4 0.24.0; do
    if [[ ! -d ".venv/trl-$version" ]]; then
        .venv/bin/python -m pip install --quiet --no-deps --target ".venv/trl-$version" "trl==$version"
    fi
done

# In this order: lora.py, sft.py, generation.py and classifiers.py read the checkpoints that decoders.py writes, control_tokens.py the
# tokenizers that encoders.py writes.
for script in decoders.py encoders.py lora.py sft.py ppo.py trl_golden.py template.py control_tokens.py replay.py generation.py fp8.py classifiers.py classification.py; do
    .venv/bin/python "$script"
done

# The other way round, where the command is built: what querl writes, read by transformers and PEFT.
querl=../../target/release/querl
if [[ -x $querl ]]; then
    .venv/bin/python classifiers_readback.py "$querl" ../../examples/tiny-qwen3 ../../examples/style/seed26.json
else
    echo "target/release/querl is not built: classifiers_readback.py is left out"
fi
