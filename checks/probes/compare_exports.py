"""Fine-tune on one process, and compare losses and export with what the learner's script wrote, for exercise 3.8a.

python compare_exports.py PLAIN EXPORT REPORT.json

PLAIN is a script that fine-tunes on one process and exports into the folder that is its argument; it gets
REPORT.json.plain. REPORT.json gets the losses of both, EXPORT's first; how far EXPORT's logits are from PLAIN's; the
weights that EXPORT lacks; and its dtype.
"""

import json
import runpy
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

plain, export, report_path = sys.argv[1:]
expected = f"{report_path}.plain"
sys.argv = [plain, expected]
runpy.run_path(plain, run_name="__main__")
losses = [json.loads(Path(folder, "losses.json").read_text()) for folder in (export, expected)]
loaded, info = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
models = loaded, AutoModelForCausalLM.from_pretrained(expected)
tokens = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(5))
with torch.no_grad():
    logits = [model.eval()(tokens).logits for model in models]
report = {
    "losses": losses,
    "apart": (logits[0] - logits[1]).abs().max().item(),
    "missing": sorted(map(str, info["missing_keys"])),
    "dtype": str(loaded.dtype).removeprefix("torch."),
}
Path(report_path).write_text(json.dumps(report))
