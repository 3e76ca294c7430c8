#!/usr/bin/env bash
# Submit distributed_training.py to a Ray cluster as a job, follow its log, and exit with its exit code.
#
#   STORAGE=/mnt/shared scripts/run_distributed_training.sh [--set cluster.num_workers=4 ...]
#
# Ctrl-C leaves the job running and prints how to follow and how to stop it. The options are distributed_training.py's.
# Ray uploads this folder with the job: config/ and your data files. The packages must be installed on all nodes.
#
#   STORAGE   a folder that all nodes see; the job writes data/, runs/ and logs/ there
#   RAY_API_SERVER_ADDRESS   where the cluster accepts jobs: http://HEAD:8265, or a tunnel to it
#   RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH   for a cluster with a token (ray_cluster_setup.sh writes a file with all of these)
#   PYTHON    the cluster's interpreter, as a full path if it is not the first on the head's PATH (default: python)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $*" >&2
    exit 2
}

[ -n "${RAY_API_SERVER_ADDRESS:-}" ] || fail "no cluster to submit to: set RAY_API_SERVER_ADDRESS=http://HEAD:8265." \
    "To train on this machine alone: python -m training.distributed_training"
case "${STORAGE:-}" in
    /*) ;;
    *) fail "set STORAGE to the full path of a folder that all nodes see: a job's own folder is deleted after the job" ;;
esac
python -c 'import ray' 2> /dev/null || fail "this Python cannot import ray: activate the workshop's environment first"

job=training-$(date +%Y%m%d-%H%M%S)-$$
name=(--run-name "$job")
for option in "$@"; do
    case $option in --run-name*) name=() ;; esac
done
paths=(--set "paths.processed_data_dir=$STORAGE/data" --set "paths.model_save_dir=$STORAGE/runs" --set "paths.log_dir=$STORAGE/logs")

exec python - "$job" "${PYTHON:-python}" -m training.distributed_training "${paths[@]}" "${name[@]}" "$@" <<'END'
import asyncio
import logging
import shlex
import signal
import sys
import time

from ray.job_submission import JobSubmissionClient

job, entrypoint = sys.argv[1], shlex.join(sys.argv[2:])
for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging", "ray.dashboard.modules.job.sdk"):
    logging.getLogger(name).setLevel(logging.WARNING)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C


async def follow():
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


try:
    client = JobSubmissionClient()
    excludes = ["/data", "/runs", "/logs", "*.egg-info", "__pycache__"]
    client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env={"working_dir": ".", "excludes": excludes})
except (ConnectionError, RuntimeError) as error:
    sys.exit(f"error: the cluster does not accept the job: {str(error).splitlines()[0]}")
print(f"job {job}", flush=True)
try:
    asyncio.run(follow())
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(1)  # the connection was lost, but the job continues
except KeyboardInterrupt:
    print(f"\njob {job} continues. To follow it: ray job logs --follow {job}   To stop it: ray job stop {job}")
    sys.exit(130)
code = info.driver_exit_code
print(f"job {job}: {info.status.lower()}" + (f": {info.message}" if code is None else f", exit code {code}"))
sys.exit(1 if code is None else code)
END
