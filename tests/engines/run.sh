#!/usr/bin/env bash
# Runs the tests of this folder in both environments of setup.sh; arguments are passed to pytest. Tests of an engine that
# an environment does not have are skipped there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for folder in .venv/main .venv/swift; do
    echo "+ $folder"
    "$folder/bin/python" -m pytest -p no:cacheprovider "$@"
done
