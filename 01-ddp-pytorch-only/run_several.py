"""Run several scripts in turn on the same ranks, so that torchrun starts them only once: run_several.py SCRIPT ...

Lesson 1.3 starts it with torchrun. Each script joins a process group and leaves it again.
"""

import gc
import runpy
import sys

if __name__ == "__main__":
    for script in sys.argv[1:]:
        runpy.run_path(script, run_name="__main__")
        gc.collect()  # what a script leaves behind must be gone before the process ends
