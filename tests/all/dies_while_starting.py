"""The script $DIES_SCRIPT on Ray, one of whose workers dies when it gets the training function; then $DIES_LOG exists.

The run that comes with the function holds something that kills the first worker which unpickles it.
"""

import os
import runpy
import sys

import ray.train.torch

DIE = """
import os, psutil
if "RayTrainWorker" in " ".join(psutil.Process().cmdline()) and not os.path.exists({log!r}):
    open({log!r}, "w").close()
    os.kill(os.getpid(), 9)
"""


class Deadly:
    """Unpickled in a worker, it kills it: the first time."""

    def __reduce__(self) -> tuple:
        return exec, (DIE.format(log=os.environ["DIES_LOG"]),)


make_trainer = ray.train.torch.TorchTrainer.__init__


def with_deadly_options(trainer: object, *args: object, train_loop_config: dict, **options: object) -> None:
    train_loop_config["run"].deadly = Deadly()
    make_trainer(trainer, *args, train_loop_config=train_loop_config, **options)


ray.train.torch.TorchTrainer.__init__ = with_deadly_options
sys.argv[0] = os.environ["DIES_SCRIPT"]
runpy.run_path(sys.argv[0], run_name="__main__")
