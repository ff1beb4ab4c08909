#!/bin/sh
# Installs the build and test tools of the first-party plugins in Python and JavaScript, at pinned versions, into .venv and node_modules of
# this folder (about 600 MB). Needs python3 (3.10 or later), Node.js (20 or later), npm, and access to their registries. Builds then need no
# network.
#
#     plugins/setup.sh
set -eu
cd "$(dirname "$0")"
python3 -m venv .venv
.venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
# Without install scripts, which no package needs. Without a lock file: npm 11 rejects the one that it writes, because of an optional
# package for another platform. package.json lists preview2-shim, because componentize-js uses it and does not always install it.
npm install --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
.venv/bin/componentize-py --version
node --version
