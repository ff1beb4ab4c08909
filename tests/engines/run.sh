#!/usr/bin/env bash
# Runs the tests of this folder in the environments made by setup.sh. Arguments are passed to pytest. Tests of an engine that is not
# installed in an environment are skipped there. .venv/track runs only the tests of the trackers, which do not need the program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for folder in .venv/main .venv/swift; do
    echo "+ $folder"
    "$folder/bin/python" -m pytest -p no:cacheprovider --ignore test_tracking.py "$@"
done
echo "+ .venv/track"
.venv/track/bin/python -m pytest -p no:cacheprovider test_tracking.py "$@"
