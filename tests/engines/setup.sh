#!/usr/bin/env bash
# Creates the virtual environments .venv/main, .venv/swift and .venv/track in this folder, with the engines, the experiment trackers and
# the package querl, and clones slime.
#
# Usage: tests/engines/setup.sh && tests/engines/run.sh
#
# Needs Python 3.11, Rust, target/release/querl, and 16 GB of disk. Everything runs on the CPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
package=../../host/querl-python

# Creates an environment in the folder $1 with the requirements in the file $2, and the packages that follow without their dependencies.
environment() {
    local folder=$1 requirements=$2
    shift 2
    # The package that is installed last: if it is missing, an interrupted installation is repeated.
    if [[ ! -e $folder/installed ]] || ! cmp --silent "$requirements" "$folder/installed"; then
        "${PYTHON:-python3}" -m venv "$folder"
        "$folder/bin/python" -m pip install --quiet --requirement "$requirements"
        if (($#)); then
            "$folder/bin/python" -m pip install --quiet --no-deps "$@"
        fi
        cp "$requirements" "$folder/installed"
    fi
}

# OpenRLHF requires flash-attn and deepspeed, which need CUDA to build. The tested modules do not import them.
environment .venv/main requirements.txt openrlhf==0.11.2
environment .venv/swift requirements-swift.txt
environment .venv/track requirements-track.txt

# slime is not on a package index. The tested modules import nothing that is not in .venv/main.
if [[ ! -d .venv/slime ]]; then
    git clone --quiet --depth 1 --branch v0.3.1 https://github.com/THUDM/slime .venv/slime
fi

# The package with the program, built once from the sources.
mkdir -p "$package/python/querl/bin"
cp ../../target/release/querl "$package/python/querl/bin/querl"
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
.venv/main/bin/python -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$package"
for folder in .venv/main .venv/swift .venv/track; do
    "$folder/bin/python" -m pip install --quiet --force-reinstall --no-deps "$wheels"/querl-*.whl
done
