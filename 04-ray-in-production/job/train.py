"""The driver of lesson 4.5's job: start one worker per machine, and write their losses to a file."""

import argparse
import json
from pathlib import Path

import ray.train
from loop import train
from ray.train.torch import TorchTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--save-to", nargs="+", required=True, help="folders for newest.pt and losses.json")
parser.add_argument("--steps", type=int, required=True, help="the last step of this run")
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--avoid", default="none", help="a machine that gets no worker")
args = parser.parse_args()

scaling = ray.train.ScalingConfig(num_workers=args.workers, label_selector={"machine": f"!{args.avoid}"})
run = TorchTrainer(train, train_loop_config={"save_to": args.save_to, "steps": args.steps}, scaling_config=scaling)
losses = run.fit().return_value

for folder in args.save_to:
    results = Path(folder).expanduser() / "losses.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(losses))
print(f"wrote {len(losses)} losses")
