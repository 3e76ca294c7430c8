#!/usr/bin/env bash
# Train on the Ray cluster of RAY_ADDRESS (on its head: HOST:6379), or, where it is not set, on this machine.
# Options go to distributed_training.py:  bash scripts/run_distributed_training.sh --set cluster.num_workers=4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! python -c 'import training, shared' 2> /dev/null; then
    echo "this python has no packages training and shared: activate the workshop's environment first" >&2
    exit 2
fi
exec python -m training.distributed_training "$@"
