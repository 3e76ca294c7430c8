"""Call the learner's function for the accuracy over all ranks, for exercise 1.2c.

torchrun global_accuracy.py FOLDER FILE CASES

FILE defines global_accuracy(hits, samples). CASES is JSON: for each case, each rank's [hits, samples]. Each rank writes
to FOLDER/RANK.json what the function returns in each case.
"""

import json
import runpy
import sys
from pathlib import Path

from shared import distributed

folder, path, cases = sys.argv[1:]
worker = distributed.join(timeout_s=20)
global_accuracy = runpy.run_path(path)["global_accuracy"]
answers = [global_accuracy(*counts[worker.rank]) for counts in json.loads(cases)]
numbers = [answer.item() if hasattr(answer, "item") else answer for answer in answers]
Path(folder, f"{worker.rank}.json").write_text(json.dumps(numbers, default=repr))
distributed.leave()
