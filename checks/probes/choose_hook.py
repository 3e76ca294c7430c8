"""Let two ranks choose a communication hook by planned step times, for exercise 4.4b.

torchrun --nproc-per-node 2 choose_hook.py FOLDER FILE

FILE defines choose(step, hooks, mbit). checks/data/hooks_to_choose.json has the jobs: for each the bandwidth, and for
each hook the bytes that a rank sends per step and the milliseconds of each rank's steps, the last of which holds for
all further steps. Each rank writes to FOLDER/RANK.json, for each job, the `name` that choose returned, and under
`different` the hooks of both ranks in the first step in which they differed.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shared import distributed

JOBS = Path(__file__).resolve().parents[1] / "data" / "hooks_to_choose.json"


class Job:
    """A job whose steps take planned times."""

    def __init__(self, mbit: int, hooks: dict[str, list]) -> None:
        self.mbit, self.hooks = mbit, hooks
        self.taken, self.different = dict.fromkeys(hooks, 0), []

    def step(self, hook: str) -> tuple[float, int]:
        """Take a step with this hook. Return this rank's milliseconds and the bytes that it sent. Collective."""
        names, chosen = list(self.hooks), torch.zeros(worker.world_size, dtype=torch.int64)
        chosen[worker.rank] = names.index(hook)
        dist.all_reduce(chosen)
        if len(set(chosen.tolist())) > 1 and not self.different:
            self.different = [names[each] for each in chosen.tolist()]
        sent, by_rank = self.hooks[hook]
        self.taken[hook] += 1
        return float(by_rank[worker.rank][: self.taken[hook]][-1]), sent


folder, path = sys.argv[1:]
worker, report = distributed.join(timeout_s=20), {}
choose = runpy.run_path(path)["choose"]
for name, planned in json.loads(JOBS.read_text()).items():
    job = Job(**planned)
    chosen = choose(job.step, list(job.hooks), job.mbit)
    report[name] = {"name": chosen if isinstance(chosen, str) else repr(chosen), "different": job.different}
    distributed.gather_objects(name)  # a rank that is still in a step meets this one here
Path(folder, f"{worker.rank}.json").write_text(json.dumps(report))
distributed.leave()
