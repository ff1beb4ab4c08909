#!/usr/bin/env bash
# A Ray cluster of @NODES@ machine(s) with @GPUS@ GPU(s) each. This folder must be at the same path on all of them.
set -euo pipefail
cd "$(dirname "$0")"
PORT="${PORT:-6379}"
N_GPUS=$((@NODES@ * @GPUS@))

case "${1:-}" in
    head)
        ray start --head --port="$PORT" --num-gpus=@GPUS@
        ;;
    worker)
        : "${2:?usage: ray.sh worker HEAD_ADDRESS}"
        ray start --address="$2:$PORT" --num-gpus=@GPUS@
        ;;
    train)
        shift
        export RAY_ADDRESS="${RAY_ADDRESS:-auto}"
        python3 - "$N_GPUS" <<'PYTHON'
import sys
import time

import ray

expected = int(sys.argv[1])
ray.init(address="auto", log_to_driver=False)
while (found := int(ray.cluster_resources().get("GPU", 0))) < expected:
    print(f"waiting for machines: {found} of {expected} GPUs", flush=True)
    time.sleep(10)
PYTHON
        exec ./train.sh "$@"
        ;;
    stop)
        ray stop
        ;;
    *)
        echo "usage: ray.sh head | worker HEAD_ADDRESS | train [SETTING=VALUE ...] | stop" >&2
        exit 2
        ;;
esac
