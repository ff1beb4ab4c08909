#!/usr/bin/env bash
# An OpenAI-compatible server that this project did not write: transformers' own `serve` command, on loopback, on the CPU.
# It loads whatever local directory a request names as its model.
#
#   tests/foreign/serve.sh [PORT]        (8123)
#
# `install.sh` in this folder installs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

./install.sh
cd ../..
# Offline: a mistyped model must not become a download. `main` is what the entry point `transformers` calls.
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES='' exec tests/foreign/.venv/bin/python -c 'from transformers.cli.transformers import main; main()' \
    serve --host 127.0.0.1 --port "${1:-8123}" --device cpu --dtype float32
