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
case $RAY_API_SERVER_ADDRESS in
    http://* | https://*) ;;
    *) fail "RAY_API_SERVER_ADDRESS=$RAY_API_SERVER_ADDRESS has to begin with http:// or https://: the dashboard, port 8265" ;;
esac
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
import tempfile
import time
import zipfile
from pathlib import Path

from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

job, entrypoint = sys.argv[1], shlex.join(sys.argv[2:])
for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging", "ray.dashboard.modules.job.sdk"):
    logging.getLogger(name).setLevel(logging.ERROR)
for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C


async def follow():
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)


def check_size(excludes):
    """Exit if the cluster would refuse this folder for its size. It is packed for that as Ray will pack it."""
    with tempfile.TemporaryDirectory() as folder:
        create_package(".", package := Path(folder, "package.zip"), True, excludes=excludes)
        size, files = package.stat().st_size, zipfile.ZipFile(package).infolist()
    if size >= DASHBOARD_CLIENT_MAX_SIZE:
        largest = sorted(files, key=lambda file: file.file_size, reverse=True)[:3]
        names = ", ".join(f"{file.filename} ({in_mib(file.file_size)})" for file in largest)
        print(f"error: this folder has {in_mib(size)}, and a cluster takes no more than {in_mib(DASHBOARD_CLIENT_MAX_SIZE)} "
              f"with a job: list large files in {Path('.rayignore').absolute()}. The largest: {names}", file=sys.stderr)
        sys.exit(2)


def in_mib(size):
    return f"{size / 2**20:.0f} MiB"


try:
    excludes = ["/data", "/runs", "/logs", "*.egg-info", "__pycache__"]
    check_size(get_runtime_env_default_excludes() + excludes)
    client = JobSubmissionClient()
    client.submit_job(entrypoint=entrypoint, submission_id=job, runtime_env={"working_dir": ".", "excludes": excludes})
except (AuthenticationError, OSError, RuntimeError) as error:
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
