"""Run every GPU path of the scripts on this machine's GPUs, and compare each with a run that it must equal.

    python benchmarks/gpu_paths.py                  some minutes; writes results/gpu-DATE-DEVICE.md and .json
    python benchmarks/gpu_paths.py --only finetune  the paths whose name holds this word, and what they are compared to

With one GPU the process groups have one rank: nccl starts, but sends nothing. With more GPUs each path uses up to four.
The references run on the CPUs of the same machine. The exit code is 1 if a path fails.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from measuring import HERE, ROOT, machine

from shared import datasets, measure, models

sys.path.insert(0, str(ROOT / "03-fsdp-deepspeed"))
import tiny_base

DDP, RAY = "01-ddp-pytorch-only/train_ddp.py", "02-ddp-pytorch-ray/train_ray_ddp.py"
RAY_DATA = "02-ddp-pytorch-ray/train_ray_ddp_with_ray_data.py"
FSDP2, ZERO = "03-fsdp-deepspeed/train_ray_fsdp2.py", "03-fsdp-deepspeed/train_ray_deepspeed.py"
FINETUNE, MESH = "03-fsdp-deepspeed/train_ray_finetune.py", "06-beyond-data-parallel/train_ray_mesh.py"
PROGRAM = ROOT / "04-ray-in-production/program"
GPUS = min(torch.cuda.device_count(), 4)
LIMIT_S = 400  # for one run
IMAGES = "--max-steps 8 --batch-size 48 --epochs 1"
TEXT = "--dataset text --max-steps 6 --batch-size 16 --epochs 1"
ROWS = "--max-steps 6 --batch-size 16 --epochs 1"
SMALL = "--set dataset.vocab_size=200 --set dataset.max_length=12 --set training.epochs=1 --set model.dropout=0"


@dataclass(frozen=True)
class Trial:
    """A script, how it is started, its options, and what its losses are compared with."""

    name: str
    script: str
    options: str
    like: str = ""  # the name of the path that must have the same losses
    within: float = 0.0  # the largest difference that is allowed
    launch: str = "python"  # or torchrun
    on: str = "gpu"  # or cpu
    first: str = ""  # options of an earlier run, which this one continues
    first_on: str = "gpu"
    kill: bool = False  # a worker, after its first checkpoint
    fails_with: str = ""  # for a path that must be refused: words of its error


def trials() -> list[Trial]:
    """Return all trials, those on Ray first, because they take longest."""
    exact = 1e-9  # float64, where only the order of sums differs
    normed = 1e-6  # transformers computes a Llama's norms and rotations in float32, whatever --precision says
    fp64, gpt, split = "--precision fp64", f"{TEXT} --preset nano", "--save-every-steps 2"
    long = "--max-steps 60 --batch-size 16 --epochs 3 --precision fp64"
    local, workers, on_cpu = "--num-workers 0", f"--num-workers {GPUS}", "--num-workers 0 --no-use-gpu"
    program = f"{SMALL} --set training.precision=fp64"
    mesh = f"{gpt} --tensor-parallel {2 if GPUS in (2, 4) else 1}"
    on_gpus = f"--set cluster.num_workers={GPUS} --set 'cluster.resources_per_worker={{CPU: 1, GPU: 1}}'"
    return [
        Trial("Ray Data", RAY_DATA, f"{IMAGES} {fp64} {workers}"),  # nothing to compare with: Ray decides the order
        Trial("Ray DDP, 60 steps, a worker killed", RAY, f"{long} {split} {workers}", "DDP, 60 steps", 1e-6, kill=True),
        Trial("FSDP2, 60 steps, a worker killed", FSDP2, f"{long} {split} {workers}", "FSDP2, 60 steps", 1e-6,
              kill=True),
        Trial("ZeRO-2, continued", ZERO, f"{gpt} --zero-stage 2 {workers}", "GPT, fp64, CPU", 0.01,
              first=f"{gpt} {split} --zero-stage 2 {workers} --max-steps 4"),
        Trial("finetune LoRA, continued", FINETUNE, f"{ROWS} {fp64} --lora-rank 4 {workers}",
              "finetune LoRA, fp64, CPU", normed, first=f"{ROWS} {split} {fp64} --lora-rank 4 {workers} --max-steps 4"),
        Trial("finetune, exported", FINETUNE, f"{ROWS} {fp64} {workers} --export {{folder}}/export",
              "finetune, fp64, CPU", normed),
        Trial("program", "training.distributed_training", f"{program} {on_gpus}", "program, fp64, CPU", exact),
        Trial("Ray DDP, two workers on CPUs beside the GPU", RAY, f"{IMAGES} {fp64} --num-workers 2 --no-use-gpu",
              "DDP, fp64, CPU", exact),
        Trial("Ray DDP", RAY, f"{IMAGES} {fp64} {workers}", "DDP, fp64, CPU", exact),
        Trial("FSDP2", FSDP2, f"{gpt} {fp64} {workers}", "GPT, fp64, CPU", exact),
        Trial("mesh", MESH, f"{mesh} {fp64} {workers}", "GPT, fp64, CPU", exact),
        Trial("ZeRO-2, fp32", ZERO, f"{gpt} --zero-stage 2 {workers}", "GPT, fp64, CPU", 0.01),
        Trial("Ray DDP, one worker more than GPUs", RAY, f"{IMAGES} --num-workers {GPUS + 1}", fails_with="GPU"),
        Trial("program, fp16", "training.distributed_training", f"{program} {on_gpus}".replace("fp64", "fp16"),
              "program, fp64, CPU", 0.1),
        # Without Ray's processes.
        Trial("DDP, fp64, CPU", DDP, f"{IMAGES} {fp64}", on="cpu"),
        Trial("DDP with BatchNorm, fp64, CPU", DDP, f"{IMAGES} {fp64} --model resnet18-batchnorm", on="cpu"),
        Trial("GPT, fp64, CPU", DDP, f"{gpt} {fp64}", on="cpu"),
        Trial("finetune, fp64, CPU", FINETUNE, f"{ROWS} {fp64} {on_cpu}", on="cpu"),
        Trial("finetune LoRA, fp64, CPU", FINETUNE, f"{ROWS} {fp64} {on_cpu} --lora-rank 4", on="cpu"),
        Trial("program, fp64, CPU", "training.local_training", program, on="cpu"),
        Trial("DDP, 60 steps", DDP, long, launch="torchrun"),
        Trial("FSDP2, 60 steps", FSDP2, f"{long} {local}", launch="torchrun"),
        *(Trial(f"ZeRO-{stage}, offload", ZERO, f"{gpt} --zero-stage {stage} --offload {local}", "GPT, fp64, CPU",
                0.01, "torchrun") for stage in (2, 3)),
        Trial("DDP, one process, fp64", DDP, f"{IMAGES} {fp64}", "DDP, fp64, CPU", exact),
        Trial("DDP, torchrun, fp64", DDP, f"{IMAGES} {fp64}", "DDP, fp64, CPU", exact, "torchrun"),
        Trial("DDP, torchrun, fp32", DDP, IMAGES, "DDP, fp64, CPU", 0.1, "torchrun"),
        Trial("DDP, torchrun, bf16", DDP, f"{IMAGES} --precision bf16", "DDP, fp64, CPU", 0.5, "torchrun"),
        Trial("DDP with BatchNorm, torchrun, fp64", DDP, f"{IMAGES} {fp64} --model resnet18-batchnorm",
              "" if GPUS > 1 else "DDP with BatchNorm, fp64, CPU", exact, "torchrun"),
        Trial("DDP, one rank more than GPUs", DDP, IMAGES, launch="torchrun+1", fails_with="one process per GPU"),
        Trial("DDP with dropout", DDP, f"{IMAGES} --model mlp", launch="torchrun"),
        Trial("DDP with dropout, continued", DDP, f"{IMAGES} --model mlp", "DDP with dropout", 1e-5,
              "torchrun", first=f"{IMAGES} {split} --model mlp --max-steps 4"),
        Trial("DDP, a CPU's checkpoint continued", DDP, f"{IMAGES} {fp64}", "DDP, fp64, CPU", exact, "torchrun",
              first=f"{IMAGES} {split} {fp64} --max-steps 4", first_on="cpu"),
        Trial("DDP, continued on a CPU", DDP, f"{IMAGES} {fp64}", "DDP, fp64, CPU", exact, on="cpu",
              first=f"{IMAGES} {split} {fp64} --max-steps 4"),
        Trial("DDP, GPT, activation checkpointing", DDP, f"{gpt} {fp64} --activation-checkpointing",
              "GPT, fp64, CPU", exact, "torchrun"),
        Trial("Ray DDP, local mode", RAY, f"{IMAGES} {fp64} {local}", "DDP, fp64, CPU", exact),
        Trial("FSDP2, local mode", FSDP2, f"{gpt} {fp64} {local}", "GPT, fp64, CPU", exact),
        Trial("FSDP2, not resharded, activation checkpointing", FSDP2,
              f"{gpt} {fp64} {local} --no-reshard-after-forward --activation-checkpointing", "GPT, fp64, CPU", exact,
              "torchrun"),
        Trial("FSDP2, offload", FSDP2, f"{gpt} {fp64} {local} --offload", "GPT, fp64, CPU", exact, "torchrun"),
        Trial("FSDP2, bf16", FSDP2, f"{gpt} --precision bf16 {local}", "GPT, fp64, CPU", 0.1, "torchrun"),
        Trial("mesh, local mode, activation checkpointing", MESH, f"{mesh} {fp64} {local} --activation-checkpointing",
              "GPT, fp64, CPU", exact, "torchrun"),
        Trial("mesh, bf16", MESH, f"{mesh} --precision bf16 {local}", "GPT, fp64, CPU", 0.1, "torchrun"),
        *(Trial(f"ZeRO-{stage}, fp32, local mode", ZERO, f"{gpt} --zero-stage {stage} {local}", "GPT, fp64, CPU",
                0.01, "torchrun") for stage in (0, 1, 3)),
        *(Trial(f"ZeRO-{stage}, {precision}", ZERO, f"{gpt} --zero-stage {stage} --precision {precision} {local}",
                "GPT, fp64, CPU", 0.2, "torchrun") for stage in (1, 3) for precision in ("bf16", "fp16")),
        Trial("finetune, accumulated, recomputed", FINETUNE,
              f"{ROWS} {fp64} {local} --accumulate 2 --activation-checkpointing", "finetune, fp64, CPU", normed,
              "torchrun"),
        Trial("finetune, bf16", FINETUNE, f"{ROWS} --precision bf16 {local}", "finetune, fp64, CPU", 0.1, "torchrun"),
        Trial("finetune LoRA, local mode", FINETUNE, f"{ROWS} {fp64} --lora-rank 4 {local}",
              "finetune LoRA, fp64, CPU", normed, "torchrun"),
        Trial("program, one process", "training.local_training", program, "program, fp64, CPU", exact),
        *(Trial(f"124m: {', '.join(key)}", *command, "124m: fsdp2, bf16", 0.5 if "fp32" in key else 0.05, "torchrun")
          for key, command in sizes().items()),
    ]  # fmt: skip


def sizes() -> dict[tuple[str, ...], tuple[str, str]]:
    """Return the runs of the GPT with 124M parameters: strategy, precision and more, then script and options."""
    common = f"--dataset text --preset 124m --batch-size {8 * GPUS} --max-steps 12 --num-workers 0"
    return {
        (strategy, precision, *special): (script, f"{common} --precision {precision} {more}")
        for script, strategy, precision, more, *special in (
            (FSDP2, "fsdp2", "fp32", ""),
            (FSDP2, "fsdp2", "bf16", ""),
            (FSDP2, "fsdp2", "bf16", "--activation-checkpointing", "activation checkpointing"),
            (FSDP2, "fsdp2", "bf16", "--offload", "offload"),
            (ZERO, "zero-0", "bf16", "--zero-stage 0"),
            (ZERO, "zero-1", "bf16", "--zero-stage 1"),
            (ZERO, "zero-2", "bf16", "--zero-stage 2"),
            (ZERO, "zero-3", "bf16", "--zero-stage 3"),
            (ZERO, "zero-2", "bf16", "--zero-stage 2 --offload", "offload"),
        )
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="only the paths whose name holds it")
    parser.add_argument("--at-once", type=int, default=5, metavar="N", help="runs at a time (default: %(default)s)")
    parser.add_argument("--start-within", type=float, default=3600, metavar="S", help="default: an hour")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="default: benchmarks/results")
    args = parser.parse_args()
    if GPUS == 0:
        sys.exit("error: there is no GPU here")
    chosen = [trial for trial in trials() if args.only in trial.name]
    needed = {trial.name for trial in chosen} | {trial.like for trial in chosen}
    needed |= {trial.like for trial in trials() if trial.name in needed}
    started = time.time()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        data = Path(folder, "data")
        data.mkdir()
        for name in (tiny_base.BASE, tiny_base.PAIRS[0]):  # once, for all
            tiny_base.make(str(data), name, print)
        with ThreadPoolExecutor(args.at_once) as pool:
            wanted = [trial for trial in trials() if trial.name in needed]
            done = pool.map(lambda trial: run(trial, Path(folder), started + args.start_within), wanted)
            optimizer = {} if args.only else {kind: optimizer_peak(kind) for kind in ("foreach", "fused", "for-loop")}
            outcomes = dict(zip([trial.name for trial in wanted], done, strict=True))
        for trial in wanted:
            judge(trial, outcomes)
            output = "\n".join(outcomes[trial.name].pop("output").splitlines()[-40:])
            if outcomes[trial.name]["verdict"] not in ("ok", "ran"):
                print(f"\n--- {trial.name}: {outcomes[trial.name]['verdict']}\n{output}", flush=True)
        result = {"date": time.strftime("%Y-%m-%d"), **machine(quick=True), "paths": outcomes}
        if not args.only:
            result |= {"memory": memory(outcomes), "optimizer": optimizer}
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"gpu-{result['date']}-{re.sub('[^a-z0-9]+', '-', result['device'].lower()).strip('-')}"
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / f"{name}.md").write_text(report(result))
    print(f"\n{report(result)}\nwritten: {args.out / name}.md and .json, after {time.time() - started:.0f} s")
    sys.exit(any(outcome["verdict"] not in ("ok", "ran") for outcome in outcomes.values()))


def command(trial: Trial, options: str, folder: Path, resume: bool) -> list[str]:
    """Return the words of a run's command."""
    words = shlex.split(options.replace("{folder}", str(folder)))
    if trial.script.startswith("training"):
        words += ["--run-name", "run", "--config-dir", str(PROGRAM / "config")]
        launch = ["-m", trial.script]
    else:
        words += ["--run-name", "run", "--quiet", "--metrics-out", str(folder / "metrics.jsonl")]
        words += ["--storage-path", str(folder), "--data-dir", str(folder.parent / "data")]
        ranks = GPUS + (trial.launch == "torchrun+1")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost"]
        launch = [*torchrun, "--nproc-per-node", str(ranks)] if trial.launch.startswith("torchrun") else []
        launch.append(str(ROOT / trial.script))
    return [sys.executable, *launch, *words, *["--resume"] * resume]


def run(trial: Trial, folder: Path, deadline: float) -> dict:
    """Run a trial and return its losses, its seconds and the end of what it printed.

    deadline: the time, as of `time.time`, after which no run starts.
    """
    if time.time() > deadline:
        return {"seconds": 0, "code": "not run", "killed": False, "losses": [], "output": ""}
    folder = folder / re.sub("[^a-z0-9]+", "-", trial.name.lower())
    folder.mkdir()
    started, code = time.time(), 0
    with open(folder / "output", "w") as output:
        starts = [(trial.first, trial.first_on, False)] if trial.first else []
        for options, where, resume in [*starts, (trial.options, trial.on, bool(trial.first))]:
            environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
            if where == "cpu":
                environment["CUDA_VISIBLE_DEVICES"] = ""
            words = command(trial, options, folder, resume)
            process = subprocess.Popen(words, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
            killed = kill_a_worker(process, folder) if trial.kill else True
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                    child.kill()
                code = "no end"
            if code != 0:
                break
    text = (folder / "output").read_text()
    outcome = {"seconds": round(time.time() - started, 1), "code": code, "killed": killed}
    lines = read_epochs(folder)
    outcome["losses"] = [loss for line in lines for loss in line.pop("step_losses")]
    outcome |= {"last": lines[-1] if lines else None, "output": text}
    print(f"{outcome['seconds']:6.1f} s  exit code {code}  {trial.name}", flush=True)
    return outcome


def kill_a_worker(process: subprocess.Popen, folder: Path) -> bool:
    """Kill one of Ray Train's workers after the run's first checkpoint; return whether one was there to kill."""
    while process.poll() is None:
        if any(folder.glob("run/checkpoint*")):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "RayTrainWorker" in "".join(child.cmdline()):
                        child.kill()
                        return True
        time.sleep(0.02)
    return False


def read_epochs(folder: Path) -> list[dict]:
    """Return the metrics of all epochs, or [] if the run wrote none."""
    if (folder / "metrics.jsonl").exists():
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if (folder / "logs/run/metrics.json").exists():
        return json.loads((folder / "logs/run/metrics.json").read_text())["epochs"]
    return []


def judge(trial: Trial, outcomes: dict) -> None:
    """Add the verdict on a trial to its outcome: "ok" for what was checked, "ran" for the rest, or what is wrong."""
    outcome = outcomes[trial.name]
    if trial.fails_with:
        refused = outcome["code"] not in (0, "no end") and trial.fails_with in outcome["output"]
        outcome["verdict"] = "ok" if refused else f"exit code {outcome['code']}, and not the words of its error"
        return
    if outcome["code"] == "not run":
        outcome["verdict"] = "not run"
        return
    if outcome["code"] != 0 or not outcome["losses"]:
        outcome["verdict"] = f"exit code {outcome['code']}, {len(outcome['losses'])} losses"
        return
    outcome["verdict"] = "ran" if outcome["killed"] else "ended before a worker could be killed"
    if trial.like and trial.like != trial.name:
        expected = outcomes[trial.like]["losses"]
        pairs = zip(outcome["losses"], expected, strict=False)
        outcome["difference"] = max((abs(a - b) for a, b in pairs), default=float("inf"))
        outcome["like"], outcome["within"] = trial.like, trial.within
        if not expected:
            outcome["verdict"] = "nothing to compare with"
        elif len(expected) != len(outcome["losses"]) or not outcome["difference"] <= trial.within:
            outcome["verdict"] = "other losses"
        elif outcome["killed"]:
            outcome["verdict"] = "ok"


def memory(outcomes: dict) -> dict:
    """Return state and peak bytes per parameter of the GPT with 124M parameters, with the formula's."""
    with torch.device("meta"):
        num_parameters = sum(weight.numel() for weight in models.GPT(models.GPT_PRESETS["124m"]).parameters())
    found = {}
    for strategy, precision, *special in sizes():
        name = ", ".join((strategy, precision, *special))
        if last := outcomes.get(f"124m: {name}", {}).get("last"):
            formula = measure.predicted_state_bytes(strategy, precision, num_parameters, GPUS)
            seen = last["state_bytes_per_rank"], formula, last["peak_memory_bytes"]
            found[name] = [size / num_parameters for size in seen]
    return found


def optimizer_peak(kind: str) -> dict:
    """Return the peak bytes per parameter of AdamW's second step, and of the passes before it, on one GPU."""
    torch.cuda.empty_cache()
    config, device = models.GPT_PRESETS["124m"], torch.device("cuda:0")
    model = models.GPT(config).to(device)
    options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "for-loop": {"foreach": False}}[kind]
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    inputs = datasets.text(config.context).train.tensors[0][:1, :8].to(device)
    peaks = []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        model(inputs).float().square().mean().backward()
        passes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        peaks.append({"passes": passes, "step": torch.cuda.max_memory_allocated()})
    num_parameters = sum(weight.numel() for weight in model.parameters())
    return {name: value / num_parameters for name, value in peaks[-1].items()}


def report(result: dict) -> str:
    """Render the result as a Markdown page."""
    page = f"""# The GPU paths on {result["device"]}, {result["date"]}

{result["system"]}; Python {result["python"]}, torch {result["torch"]}; {result["cpus"]} CPUs. Written by
[gpu_paths.py](../gpu_paths.py). A path is compared, loss by loss, with the run in the second column. *Ran* says no more
than that it came to its end.

| path | compared with | largest difference | allowed | verdict |
|---|---|---:|---:|---|
"""
    for name, outcome in result["paths"].items():
        difference = f"{outcome['difference']:.1e} | {outcome['within']:.0e}" if "difference" in outcome else "|"
        page += f"| {name} | {outcome.get('like', '')} | {difference} | {outcome['verdict']} |\n"
    if "memory" in result:
        page += """
The GPT `124m`, in bytes per parameter of one rank. State and peak are those of one step.

| | state | by formula | peak |
|---|---:|---:|---:|
"""
        for name, row in result["memory"].items():
            page += f"| {name} | {' | '.join(f'{size:.2f}' for size in row)} |\n"
        page += "\nAdamW in one process, with almost no activations: peak bytes per parameter.\n\n"
        page += "| | forward and backward | the optimizer's step |\n|---|---:|---:|\n"
        for kind, peak in result["optimizer"].items():
            page += f"| {kind} | {peak['passes']:.2f} | {peak['step']:.2f} |\n"
    return page + "".join(f"\n{note}\n" for note in result.get("notes", []))


if __name__ == "__main__":
    main()
