#!/usr/bin/env bash
# Runs the tests of this folder in the environments of setup.sh; arguments are passed to pytest. Tests of an engine that an
# environment does not have are skipped there. In .venv/track: those of the trackers alone, which need no program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for folder in .venv/main .venv/swift; do
    echo "+ $folder"
    "$folder/bin/python" -m pytest -p no:cacheprovider --ignore test_tracking.py "$@"
done
echo "+ .venv/track"
.venv/track/bin/python -m pytest -p no:cacheprovider test_tracking.py "$@"
