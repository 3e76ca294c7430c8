"""Run a training script on so little text that many meshes can be tried: 50 windows, and 10 for validation.

short_text.py OPTIONS... SCRIPT

In global batches of 24 the last one has two windows: where the data dimension is 3, a group gets none.
"""

import runpy
import sys
from functools import partial
from pathlib import Path

from shared import datasets

BATCH = 24

if __name__ == "__main__":
    datasets.text = partial(datasets.text, num_windows=50)
    script = sys.argv.pop()
    sys.argv[0] = script
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
