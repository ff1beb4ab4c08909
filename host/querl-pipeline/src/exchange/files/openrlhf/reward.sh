#!/usr/bin/env bash
# Serves the reward of this folder. Arguments are those of `querl serve reward`, such as --rejected_reward.
set -euo pipefail
cd "$(dirname "$0")"
exec querl serve reward querl.toml --addr "${ADDR:-127.0.0.1:8000}" "$@"
