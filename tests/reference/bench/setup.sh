#!/usr/bin/env bash
# Installs the requirements of the comparison into this folder: a virtual environment that adds TRL to that of the goldens, the last TRL with
# PPOTrainer in a separate folder, and models, adapters and token ids in work/ (about 1.5 GB with the shape M).
# Needs ../.venv (made by ../setup.sh), and a built `querl` and benchmark:
#   cargo build --release -p querl && cargo build --release -p querl-train --example bench
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if [[ ! -x .venv/bin/python ]]; then
    ../.venv/bin/python -m venv .venv
fi
# torch takes 4 GB: the packages of the goldens are used in place.
packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
(cd .. && .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') >"$packages/reference.pth"
.venv/bin/python -m pip install --quiet --no-deps --requirement requirements.txt
if [[ ! -d .ppo/trl ]]; then
    .venv/bin/python -m pip install --quiet --no-deps --target .ppo --requirement requirements-ppo.txt
fi
.venv/bin/python prepare.py "$@"
