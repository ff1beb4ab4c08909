#!/usr/bin/env bash
# Creates the virtual environment .venv in this folder and regenerates every golden. Needs Python 3.11 and 5 GB of disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python="${PYTHON:-python3}"
if [[ ! -x .venv/bin/python ]]; then
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --no-deps --requirement requirements.txt

# Installed without dependencies: their formulas are compiled one by one from the sources (trl_formulas.py).
for version in 0.11.4 0.24.0; do
    if [[ ! -d ".venv/trl-$version" ]]; then
        .venv/bin/python -m pip install --quiet --no-deps --target ".venv/trl-$version" "trl==$version"
    fi
done

# In this order: lora.py, sft.py, generation.py and classifiers.py read the checkpoints of decoders.py, control_tokens.py the tokenizers
# of encoders.py.
for script in decoders.py encoders.py lora.py sft.py ppo.py trl_golden.py template.py control_tokens.py replay.py generation.py fp8.py classifiers.py classification.py logistic.py word_weights.py; do
    .venv/bin/python "$script"
done

# The other direction, if the command is built: transformers and PEFT read querl's outputs.
querl=../../target/release/querl
if [[ -x $querl ]]; then
    .venv/bin/python classifiers_readback.py "$querl" ../../examples/tiny-qwen3 ../../examples/style/seed26.json
else
    echo "target/release/querl is not built: classifiers_readback.py is left out"
fi
