#!/usr/bin/env bash
# Starts a third-party OpenAI-compatible server, transformers' `serve` command, on loopback and on the CPU. It loads any local directory
# that a request names as its model.
#
#   tests/foreign/serve.sh [PORT]        (8123)
#
# `install.sh` in this folder installs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

./install.sh
cd ../..
# Offline: a mistyped model name must not start a download. `main` is the function behind the entry point `transformers`.
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES='' exec tests/foreign/.venv/bin/python -c 'from transformers.cli.transformers import main; main()' \
    serve --host 127.0.0.1 --port "${1:-8123}" --device cpu --dtype float32
