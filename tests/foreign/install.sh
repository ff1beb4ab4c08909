#!/usr/bin/env bash
# Creates the virtual environment of the server, .venv in this folder, if it is missing. Needs Python 3.11 and 6 GB of disk.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The package that is installed last: if it is missing, an interrupted installation is repeated.
if [[ ! -e .venv/installed ]] || ! cmp --silent requirements.txt .venv/installed; then
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --requirement requirements.txt
    cp requirements.txt .venv/installed
fi
