#!/usr/bin/env bash
# Makes the virtual environment in .venv beside this file and remakes every golden. Needs Python 3.11 and 5 GB of disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python="${PYTHON:-python3}"
if [[ ! -x .venv/bin/python ]]; then
    "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --no-deps --requirement requirements.txt

# In this order: lora.py reads the checkpoints that decoders.py writes.
for script in decoders.py lora.py ppo.py template.py replay.py; do
    .venv/bin/python "$script"
done
