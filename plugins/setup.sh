#!/bin/sh
# Installs what builds and tests the first-party plugins in Python and JavaScript, at pinned versions and into this folder alone:
# a virtual environment in .venv, packages in node_modules. Needs python3 (3.10 or later), Node.js (20 or later), npm, and their
# registries; afterwards no build needs a network. About 600 MB.
#
#     plugins/setup.sh
set -eu
cd "$(dirname "$0")"
python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
# The packages run nothing when they are installed. Without a lock file: npm 11 does not take the one that it writes itself, for an
# optional package of another platform. preview2-shim is named because componentize-js uses it and does not always bring it.
npm install --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
.venv/bin/componentize-py --version
node --version
