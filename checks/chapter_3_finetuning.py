"""The exercise checks of chapter 3's lessons on fine-tuning: 3.6, 3.7 and 3.8."""

import math
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from checks.machinery import Wrong, exercise, refuse_stub, reports_of_ranks

# --- Lesson 3.6: from a pretrained folder into shards, and back ------------------------------------------------------

WHAT_DIFFERS = {  # in the cases of gradient_accumulation.py
    "equal": "every pass of every rank has 6 answer tokens",
    "ranks": "the passes of a rank have equally many answer tokens, but those of another rank more or fewer",
    "passes": "every rank has one pass with 1 answer token and one with 9",
    "mixed": "passes and ranks all have different numbers of answer tokens",
    "empty pass": "rank 0's first pass has no answer token",
    "empty rank": "rank 1 has no answer token",
}
MEAN_OF_NOTHING = "What is the mean of no tokens?"


def judge_train_step(reports: list[dict[str, dict]]) -> None:
    """Raise Wrong for the first case in which a rank's update or loss is not that of one process."""
    for case, where in WHAT_DIFFERS.items():
        for rank, report in enumerate(reports):
            seen = report[case]
            error, factor, returned, expected = (seen[key] for key in ("error", "factor", "returned", "expected"))
            if math.isnan(error) or (isinstance(returned, float) and math.isnan(returned)):
                raise Wrong(f"{where}: the {'weights are' if math.isnan(error) else 'loss is'} nan. {MEAN_OF_NOTHING}")
            if abs(factor) < 1e-9:
                raise Wrong(f"{where}: the weights did not change. Do you call backward() and optimizer.step()?")
            if error > 1e-9:
                if abs(error - abs(factor - 1)) < 1e-6:  # the right direction
                    hint = f"The gradient is {factor:.3g} times as long as it should be. Who divides by what?"
                else:
                    hint = "Which number has each pass of each rank to divide its sum by?"
                raise Wrong(f"{where}: the gradient is off by {error:.1%}. {hint}")
            if not isinstance(returned, int | float):
                raise Wrong(f"train_step returns {returned}: return the mean loss of the step, a number")
            if not math.isclose(returned, expected, rel_tol=1e-5):
                others = len({each[case]["returned"] for each in reports}) > 1
                hint = "The ranks return different numbers." if others else "Every rank returns this."
                raise Wrong(
                    f"{where}: the gradient is right, but rank {rank} returns {returned:.6f}, and the mean over all "
                    f"answer tokens is {expected:.6f}. {hint}"
                )


@exercise("3.6a", "every answer token counts once, in whichever pass and on whichever rank it is.")
def exercise_3_6a(script: str | Path) -> None:
    """A file with train_step(model, optimizer, passes), for a sharded model on three ranks."""
    refuse_stub(script)
    question = "Does each rank call the model and backward() in every pass, and every collective, equally often?"
    judge_train_step(reports_of_ranks("gradient_accumulation", 3, str(script), question=question))


def judge_parts(reports: list[dict]) -> None:
    """Raise Wrong for the first promise of export_in_parts that a rank's report breaks."""
    first = reports[0]
    if first["lacks later"]:
        written = ", ".join(first["written"][:3]) or "nothing"
        raise Wrong(f"{first['lacks later']} is missing in the folder. It holds {written}")
    for key, what in (("lost", "is in no file"), ("surplus", "is in a file, but is none of named_parameters()")):
        if first[key]:
            raise Wrong(f"{first[key][0]} {what}")
    if first["twice"]:
        raise Wrong(f"{first['twice']} tensors are in more than one file. What does rank 0 forget after a file?")
    if first["wrong"]:
        name, seen, expected = first["wrong"][0]
        what = f"has the shape {seen}, and the whole tensor has {expected}" if seen != expected else "has other values"
        raise Wrong(f"{name} {what} in the file. Are these whole tensors, or a rank's slices?")
    if first["misplaced"]:
        raise Wrong(f"{first['misplaced'][0]} is not in the file that the index names")
    if first["too large"]:
        file, size = first["too large"][0]
        raise Wrong(f"{file} holds {size:,} bytes of tensors, and max_bytes is {first['max_bytes']:,}")
    if first["early"]:
        file, name, size = first["early"]
        raise Wrong(
            f"{file} begins with {name}, which fits the file before: that one holds only {size:,} of "
            f"{first['max_bytes']:,} bytes"
        )
    for rank, report in enumerate(reports):
        if report["peak"] > report["limit"]:
            whole = " and the whole model" * (report["peak"] >= report["slices"] + report["whole"])
            raise Wrong(
                f"the folder is right, but rank {rank}'s tensors take up to {report['peak']:,} bytes, and the limit is "
                f"{report['limit']:,}: its slices{whole} are among them. Which whole tensors are alive at once?"
            )
    for rank, report in enumerate(reports):
        if report["lacks"]:
            raise Wrong(
                f"when the function returns on rank {rank}, {report['lacks']} is still missing. Who waits for rank 0?"
            )
    if "load_error" in first or first["apart"] > 0:
        problem = first.get("load_error") or f"logits that are off by {first['apart']:.2g}"
        raise Wrong(f"plain transformers cannot use the folder: {problem}")


@exercise("3.6b", "rank 0 wrote the whole model, in parts, and no rank ever held it.")
def exercise_3_6b(script: str | Path) -> None:
    """A file with export_in_parts(model, folder, max_bytes), for a sharded Llama on two ranks."""
    refuse_stub(script)
    question = "Which ranks call full_tensor(), and for which tensors? It is a collective."
    judge_parts(reports_of_ranks("export_in_parts", 2, str(script), question=question))


# --- Lesson 3.7: LoRA on shards --------------------------------------------------------------------------------------


HOLDS, SENDS = 1.5e6, 1.0e6  # bytes per rank: when the forward pass ends, and in a step


def judge_sharded_adapters(reports: list[dict]) -> None:
    """Raise Wrong unless every rank's report of sharded_adapters.py is within both limits, with the right gradients."""
    for rank, report in enumerate(reports):
        held, sent, calls, wrong = (report[key] for key in ("held", "sent", "calls", "wrong"))
        needs = f"rank {rank} holds {held / 1e6:.2f} MB when the forward pass ends, and sends {sent / 1e6:.2f} MB"
        if wrong:
            raise Wrong(
                f"on rank {rank}, {len(wrong)} of {report['adapters']} tensors of the adapters have a gradient that is "
                f"not that of one process, for example {wrong[0]}. Whose rows has it seen? Who averages the gradient "
                "of a parameter that fully_shard ignores?"
            )
        if held > HOLDS:
            gathers = calls.get("allgather", 0)
            if not gathers:
                hint = "Nothing is sharded, so the base is whole on each rank."
            elif gathers >= 12:  # two for each of the six blocks: none keeps what it has gathered
                hint = "Every block frees what it gathers, so too much of the base is whole on each rank."
            else:
                hint = (
                    "Gathered weights of some blocks are still there. Compare, for a frozen weight: how many bytes "
                    "more does a rank hold if it keeps the gathered copy, or if the weight was never sharded? How many "
                    "fewer does it send?"
                )
            raise Wrong(f"{needs}. It may hold {HOLDS / 1e6:.2f} MB. {hint}")
        if sent > SENDS:
            raise Wrong(
                f"{needs}. It may send {SENDS / 1e6:.2f} MB. Most of that is frozen weights, gathered twice. There is "
                "room to hold some of them whole: how many, and which?"
            )


@exercise("3.7a", "the base is whole where there is room, the rest is sharded, and every adapter learns from all rows.")
def exercise_3_7a(script: str | Path) -> str:
    """A file with shard(model), for a PeftModel on two ranks."""
    refuse_stub(script)
    reports = reports_of_ranks("sharded_adapters", 2, str(script))
    judge_sharded_adapters(reports)
    held, sent = (max(report[key] for report in reports) / 1e6 for key in ("held", "sent"))
    return f"A rank holds {held:.2f} MB when the forward pass ends, and sends {sent:.2f} MB."


def plant_adapters(
    folder: str | Path, causes: Sequence[str] = ("zero", "fine", "names", "base"), seed: int = 0
) -> list[Path]:
    """Train one adapter for each of `causes` on a very small Llama, and damage what production loads accordingly.

    Returns the jobs' folders, `folder`/A and so on, each with log.txt, base/ and adapter/.
    """
    import peft
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")  # peft uses it
    jobs = []
    for number, cause in enumerate(causes):
        job = Path(folder, "ABCDEFGH"[number])
        shutil.rmtree(job, ignore_errors=True)
        (job / "base").mkdir(parents=True)
        with torch.random.fork_rng():
            torch.manual_seed(seed + number)
            base = LlamaForCausalLM(config)
            _train(base, stride=1, steps=40)  # the pretraining: counting by one
            weights = {name: value.detach().clone() for name, value in base.named_parameters()}
            lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(base, lora)
            untrained = {key: value.clone() for key, value in peft.get_peft_model_state_dict(model).items()}
            lines = _train(model, stride=3, steps=40)
            elsewhere = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
        base_file, adapter_file = job / "base/model.safetensors", job / "adapter/adapter_model.safetensors"
        save_file(weights, base_file, metadata={"format": "pt"})
        trained_on = f"{zlib.crc32(base_file.read_bytes()):08x}"
        if cause == "base":
            save_file(elsewhere, base_file, metadata={"format": "pt"})
        config.save_pretrained(job / "base")
        adapter = untrained if cause == "zero" else peft.get_peft_model_state_dict(model)
        if cause == "names":  # as the inner model calls them, without peft's prefix
            adapter = {key.removeprefix("base_model.model."): value for key, value in adapter.items()}
        adapter_file.parent.mkdir()
        save_file({key: value.detach().contiguous() for key, value in adapter.items()}, adapter_file)
        model.peft_config["default"].base_model_name_or_path = "base"
        model.peft_config["default"].inference_mode = True
        model.peft_config["default"].save_pretrained(adapter_file.parent)
        head = [f"base: weights {trained_on}", f"LoRA: rank 4, alpha 8, {len(load_file(adapter_file))} tensors"]
        (job / "log.txt").write_text("\n".join([*head, *lines, "exported: adapter", ""]))
        jobs.append(job)
    return jobs


def _train(model, stride: int, steps: int) -> list[str]:
    """Teach `model` to count in steps of `stride`, and return the lines of its log."""
    import torch
    from torch.nn.functional import cross_entropy

    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.02)
    lines = []
    for step in range(1, steps + 1):
        tokens = (torch.randint(0, 62, (16, 1)) + stride * torch.arange(9)) % 62 + 2
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits[:, 1:].flatten(0, 1), tokens[:, 2:].flatten())  # the first two numbers are given
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            lines.append(f"step {step:2}  loss {loss.item():.3f}")
    return lines


SYMPTOMS = {  # what production loads, for each cause
    "base": "The log names other weights for the base than base/model.safetensors holds",
    "zero": "Every lora_B in the file is zero, so the adapter adds nothing",
    "names": "No tensor of the file has the name that peft looks for",
    "fine": "The base is the one in the log, the adapter is not zero, and its names fit",
}


@exercise("3.7b", "three causes, each with evidence of its own, and none of them raises an error.")
def exercise_3_7b(diagnose: Callable[[Path], str]) -> None:
    """diagnose(folder) -> "base", "zero", "names" or "fine", for a job of plant_adapters."""
    causes = ("names", "fine", "base", "zero")
    with tempfile.TemporaryDirectory() as folder:
        seen = [diagnose(job) for job in plant_adapters(folder, causes, seed=20)]
    for answer, cause in zip(seen, causes, strict=True):
        if answer not in SYMPTOMS:
            choices = ", ".join(map(repr, SYMPTOMS))
            raise Wrong(f"you return {answer!r}, which is not one of {choices}")
        if answer != cause:
            raise Wrong(f"for one job you return {answer!r}, and that is not it. {SYMPTOMS[cause]}")


# --- Lesson 3.8: prove a port ----------------------------------------------------------------------------------------

FAULTS = "load", "loss", "gradient", "export", "memory"
PLANTED = {  # in the ports of hidden_ports.py: the verdict, what was planted, and where it can be seen
    "right": (None, "a correct port, with even shards", ""),
    "uneven": (None, "a correct port, in which a matrix has 63 rows: rank 0 holds 32 and rank 1 holds 31", ""),
    "slow export": (None, "a correct port, whose rank 0 finishes its export half a second after rank 1 returns", ""),
    "wrong row": (
        "load", "the logits of row 0 are wrong on rank 1",
        "Only rank 1 sees it, in a row on which rank 0 trains.",
    ),
    "wrong loss": (
        "loss", "rank 1 returns a loss that is one part in ten thousand too large",
        "Only rank 1 sees it. How large a difference do you allow?",
    ),
    "no scale on rank 1": (
        "load", "on rank 1, the number by which Gemma multiplies its embeddings is wrong",
        "Only rank 1 sees it, in its logits. Rank 0's logits are right.",
    ),
    "nan on rank 1": (
        "load", "on rank 1, the number by which Gemma multiplies its embeddings is nan, and so are all its logits",
        "Only rank 1 sees it. Is nan a difference in your comparison?",
    ),
    "mean of means": (
        "loss", "each rank takes the mean over its own answer tokens, and the ranks average these means",
        "Both ranks return the same loss, and it is not the reference's. Rank r trains on the rows r, r + 2, ...",
    ),
    "no world size": (
        "gradient", "FSDP divides by the number of ranks, and nobody has multiplied by it",
        "The loss is right on both ranks. On both, every slice of every gradient is half as large as it should be.",
    ),
    "wrong slice": (
        "gradient", "a single slice of a single gradient is doubled, on rank 1",
        "Only rank 1 sees it. Every slice of rank 0 is right, and so is the loss.",
    ),
    "untied": (
        "export", "the file holds the embedding a second time, as lm_head.weight",
        "Every rank that compares the file's names can see it. All values are right.",
    ),
    "float64": (
        "export", "the file holds float64 instead of float32, with the right values",
        "Every rank that compares the file's types can see it.",
    ),
    "root only": (
        "memory", "only the root is sharded, so the forward pass gathers all weights at once",
        "All numbers are right. Both ranks see it in their peak in the forward pass.",
    ),
    "no meta": (
        "memory", "every rank builds the whole model before it is sharded",
        "All numbers are right. Both ranks see it in their peak in `load`.",
    ),
    "whole on rank 0": (
        "memory", "rank 0 builds the whole model before it loads its slices",
        "All numbers are right. Only rank 0 sees it, in its peak in `load`.",
    ),
}  # fmt: skip
ACCUSED = {  # by the verdict about a correct port: what to ask
    "memory": "Autograd keeps activations: do you compute the logits without it?",
    "gradient": "Are your slices cut as FSDP cut them? How large a difference do you allow, and of what?",
    "export": "Do all ranks export to the same folder? Which rank reads the file, and when?",
}
WAITED = re.compile("[Cc]onnection|[Tt]imed out|timeout|[Bb]roken pipe")


def judge_verdicts(reports: list[list[dict]]) -> None:
    """Raise Wrong for the first port about which a rank of hidden_ports.py returns what it should not, or nothing."""
    for seen in zip(*reports, strict=False):
        port = seen[0]["port"]
        expected, planted, visible = PLANTED[port]
        where = f"Planted: {planted}. {visible}".strip() if expected else f"The port: {planted}."
        raised = {rank: each["raised"] for rank, each in enumerate(seen) if "raised" in each}
        returned = {rank: each["returned"] for rank, each in enumerate(seen) if "returned" in each}
        own = {rank: error for rank, error in raised.items() if not WAITED.search(error)}
        if own:
            rank, error = next(iter(own.items()))
            others = ", and the other rank waited for it" if len(raised) > len(own) or returned else ""
            what = error if len(error) <= 100 else f"{error[:100]}..."
            if "MemTracker does not support" in error:
                what = "PeakMemory cannot watch a backward pass: stop it before train_step"
            raise Wrong(f"rank {rank} raised {what!r}{others}. first_fault should return a verdict. {where}")
        if raised and returned:
            rank, verdict = next(iter(returned.items()))
            raise Wrong(
                f"rank {rank} returned {verdict!r}, while rank {next(iter(raised))} still waited for it in a "
                f"collective. How does a rank learn what another rank has seen? {where}"
            )
        if raised:
            raise Wrong(f"both ranks waited for each other, in different collectives. {where}")
        if len(set(returned.values())) > 1:
            verdicts = " and ".join(f"rank {rank} returns {verdict!r}" for rank, verdict in returned.items())
            raise Wrong(f"{verdicts}. All ranks have to return the same. {where}")
        verdict = returned[0]
        if expected is None and verdict is not None:
            hint = f" {ACCUSED[verdict]}" if verdict in ACCUSED else ""
            raise Wrong(f"you accuse a correct port: first_fault returns {verdict!r}, expected None. {where}{hint}")
        if verdict is not None and verdict not in FAULTS:
            raise Wrong(f"first_fault returns {verdict}, which is neither None nor one of {', '.join(FAULTS)}")
        if verdict != expected:
            raise Wrong(f"first_fault returns {verdict!r}, expected {expected!r}. {where}")


@exercise("3.8a", "your proof finds every planted fault, on whichever rank it is, and accuses no correct port.")
def exercise_3_8a(script: str | Path) -> None:
    """A file with first_fault(port, reference, worker), which judges hidden ports on two ranks."""
    refuse_stub(script)
    judge_verdicts(reports_of_ranks("hidden_ports", 2, str(script)))
