"""The checks of chapter 3, lessons 3.6 to 3.8: right answers pass, wrong ones are rejected with help."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from answers import Call, OnRanks, assert_rejects, judge, stub, written
from runs import ROOT
from safetensors.torch import load_file

import checks
from checks import chapter_3_finetuning, machinery

LESSONS = ROOT / "03-fsdp-deepspeed"
ON_RANKS = OnRanks({
    2: [
        "torch.distributed.fsdp",
        "peft",
        "transformers.models.llama.modeling_llama",
        "transformers.models.gemma3.modeling_gemma3",
        "torch.distributed.checkpoint.hf_storage",
    ],
    3: ["torch.distributed.fsdp", "transformers.models.llama.modeling_llama"],
})  # fmt: skip
launched, run_before = ON_RANKS.fixtures()


# --- 3.6a: the mean over all answer tokens, on three ranks ------------------------------------------------------------

HEAD_3_6A = "import torch\nimport torch.distributed as dist\nimport torch.nn.functional as F\n\n\n"
STEP = """
def train_step(model, optimizer, passes):
    answer_tokens = sum((targets != -100).sum() for _, targets in passes)
    dist.all_reduce(answer_tokens)
    optimizer.zero_grad()
    step_loss = torch.zeros((), dtype=torch.float64)
    for tokens, targets in passes:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum") / answer_tokens
        (loss * dist.get_world_size()).backward()
        step_loss += loss.detach()
    optimizer.step()
    dist.all_reduce(step_loss)
    return step_loss.item()
"""
GIVEN = """
def train_step(model, optimizer, passes):
    optimizer.zero_grad()
    step_loss = 0
    for tokens, targets in passes:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100) / len(passes)
        loss.backward()
        step_loss += loss.item()
    optimizer.step()
    return step_loss
"""
BACKWARD = "        (loss * dist.get_world_size()).backward()\n"
WRONG_3_6A = {
    "as given": (GIVEN, "the gradient is right, but rank 0 returns .* The ranks return different numbers"),
    "mean of the ranks' means": (
        GIVEN.replace("    return", "    step_loss = torch.tensor(step_loss)\n    dist.all_reduce(step_loss)\n"
                      "    step_loss /= dist.get_world_size()\n    return"),
        "but those of another rank more or fewer: the gradient is off by .* Which number has each pass",
    ),
    "not multiplied": (
        STEP.replace(BACKWARD, "        loss.backward()\n"),
        "every pass of every rank has 6 answer tokens: the gradient is off by 66.7%. The gradient is 0.333 times as",
    ),
    "own count": (STEP.replace("    dist.all_reduce(answer_tokens)\n", ""), "The gradient is 3 times as long"),
    "counted pass by pass": (
        STEP.replace("    answer_tokens = sum((targets != -100).sum() for _, targets in passes)\n"
                      "    dist.all_reduce(answer_tokens)\n", "")
        .replace("        logits =", "        answer_tokens = (targets != -100).sum() * len(passes)\n"
                 "        dist.all_reduce(answer_tokens)\n        logits ="),
        "every rank has one pass with 1 answer token and one with 9: the gradient is off by",
    ),
    "loss not reduced": (
        STEP.replace("    dist.all_reduce(step_loss)\n", ""),
        "the gradient is right, but rank 0 returns .* The ranks return different numbers",
    ),
    "no step": (STEP.replace("    optimizer.step()\n", ""), "the weights did not change. Do you call backward"),
    "nan": (
        STEP.replace('"sum") / answer_tokens', '"mean") * (targets != -100).sum() / answer_tokens'),
        "rank 0's first pass has no answer token: the loss is nan. What is the mean of no tokens",
    ),
    "empty passes left out": (
        STEP.replace("        logits =", "        if targets.max() < 0:\n            continue\n        logits ="),
        "one rank called a collective that another rank never reached. Does each rank call the model and backward",
    ),
    "returns nothing": (STEP.replace("    return step_loss.item()\n", ""), "train_step returns None: return the mean"),
}  # fmt: skip
test_3_6a = ON_RANKS.judge(checks.exercise_3_6a, 3, "gradient_accumulation", HEAD_3_6A, {"right": STEP}, WRONG_3_6A)


# --- 3.6b: a folder in parts, on two ranks ----------------------------------------------------------------------------

HEAD_3_6B = "import json\n\nimport torch.distributed as dist\nfrom safetensors.torch import save_file\n\n\n"
PARTS = """
def export_in_parts(model, folder, max_bytes):
    part, weight_map, total_size = {}, {}, 0

    def write_part():
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
        part.clear()

    for name, parameter in model.named_parameters():
        tensor = parameter.detach().full_tensor()
        if dist.get_rank() == 0:
            if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > max_bytes:
                write_part()
            part[name] = tensor
            total_size += tensor.nbytes
    if dist.get_rank() == 0:
        write_part()
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    dist.barrier()
"""
SPLIT = """            if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > max_bytes:
                write_part()
"""
GATHER_ALL = """    whole = {name: each.detach().full_tensor() for name, each in model.named_parameters()}
    for name, tensor in whole.items():
"""
CHANGES_3_6B = {  # (old, new) pairs, and the message
    "gathers all first": (
        ("""    for name, parameter in model.named_parameters():
        tensor = parameter.detach().full_tensor()
""", GATHER_ALL),
        r"the folder is right, but rank 0's tensors take up to [\d,]+ bytes, .* its slices and the whole model are",
    ),
    "only rank 0 gathers": (
        ("        tensor = parameter.detach().full_tensor()\n        if dist.get_rank() == 0:\n",
         "        if dist.get_rank() == 0:\n            tensor = parameter.detach().full_tensor()\n"),
        "one rank called a collective that another rank never reached. Which ranks call full_tensor",
    ),
    "own slices": (("full_tensor()", "to_local().clone()"),
                   r"has the shape \[48, 64\], and the whole tensor has \[96, 64\]"),
    "keeps a file's tensors": (("        part.clear()\n", ""),
                               "tensors are in more than one file. What does rank 0 forget"),
    "state_dict": (("model.named_parameters()", "model.state_dict().items()", "parameter.detach()", "parameter"),
                   r"lm_head.weight is in a file, but is none of named_parameters\(\)"),
    "no index": (('        (folder / "model.safetensors.index.json").write_text(json.dumps(index))\n', ""),
                 "model.safetensors.index.json is missing in the folder. It holds model-00001.safetensors"),
    "one large file": ((SPLIT, ""), r"model-00001.safetensors holds [\d,]+ bytes of tensors, and max_bytes is"),
    "one tensor per file": ((SPLIT, "            if part:\n                write_part()\n"),
                            r"model-00002.safetensors begins with model.layers.0.* which fits the file before"),
    "three quarters full": (("> max_bytes", "> 0.75 * max_bytes"),
                            r"begins with .*, which fits the file before: that one holds only [\d,]+ of"),
    "does not wait": (("    dist.barrier()\n", ""),
                      "when the function returns on rank 1, model.* is still missing. Who waits"),
    "index of one file": ((': weight_map}', ': dict.fromkeys(weight_map, "model-00001.safetensors")}'),
                          "is not in the file that the index names"),
}  # fmt: skip


def changed(text: str, *pairs: str) -> str:
    """Replace the first of each pair of strings, which is in `text` once, by the second."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


test_3_6b = ON_RANKS.judge(
    checks.exercise_3_6b, 2, "export_in_parts", HEAD_3_6B, {"right": PARTS},
    {name: (changed(PARTS, *pairs), because) for name, (pairs, because) in CHANGES_3_6B.items()},
)  # fmt: skip

COPIES = """
import json, sys, tracemalloc
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard

from shared import distributed

worker, folder, shares = distributed.join(), Path(sys.argv[1]), []
for rows in (512, 8 * 512):
    model = nn.Sequential(nn.Linear(512, rows, bias=False), *[nn.Linear(512, 512, bias=False) for _ in range(7)])
    weights = sum(weight.nbytes for weight in model.parameters())
    for part in (*model, model):
        fully_shard(part)
    tracemalloc.reset_peak() if tracemalloc.is_tracing() else tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    writer = HuggingFaceStorageWriter(str(folder / str(rows)), save_distributed=True, enable_consolidation=True)
    dcp.save(dict(model.named_parameters()), storage_writer=writer)
    shares.append((tracemalloc.get_traced_memory()[1] - before) / weights)
(folder / f"{worker.rank}.json").write_text(json.dumps(shares))
distributed.leave()
"""
ON_RANKS.calls[2]["the writer's bytes"] = ON_RANKS.calls[3]["the writer's bytes"] = Call(COPIES)


@pytest.mark.parametrize("nproc", [2, 3])
def test_3_6_the_writer_copies_a_ranks_slices_into_bytes(launched, nproc):
    """The bytes are in no tensor, so PeakMemory does not count them. tracemalloc does."""
    call = launched(nproc)["the writer's bytes"]
    machinery.expect_success(call.ended.exit_code, call.ended.errors)
    for rank in range(nproc):
        equal_sizes, one_large = json.loads((call.folder / f"{rank}.json").read_text())
        assert equal_sizes == pytest.approx(1 / nproc, rel=0.1)
        large = 8 / 15  # of the weights: while rank 0 joins this tensor, it also holds two ranks' slices of it
        assert one_large == pytest.approx(1 / nproc if rank else large * (1 + 2 / nproc), rel=0.1)


# --- 3.7a: how much of a frozen base is whole on each rank, on two ranks ----------------------------------------------

HEAD_3_7A = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def shard(model):
    base = model.get_base_model()
    layers, frozen = base.model.layers, {each for each in model.parameters() if not each.requires_grad}
"""
LAYERS_3_7A = "    for number, layer in enumerate(layers):\n        fully_shard(layer, {})\n"
BASE_3_7A = "    fully_shard(base)\n"
WHOLE_IF = LAYERS_3_7A.format("ignored_params=frozen if {} else None")
LAST_THREE_WHOLE = WHOLE_IF.format("number >= 3") + BASE_3_7A
ROOT_SHARDS_LAST_THREE = """
    for layer in layers[:3]:
        fully_shard(layer)
    fully_shard(base, ignored_params=frozen & set(layers[3:].parameters()))
"""
RIGHT_3_7A = {
    "the last three whole": LAST_THREE_WHOLE,
    "the first three and the root whole": WHOLE_IF.format("number < 3")
    + BASE_3_7A.replace(")", ", ignored_params=frozen)"),
    "the last three in the root's group": ROOT_SHARDS_LAST_THREE,
}
WRONG_3_7A = {
    "all sharded": (
        LAYERS_3_7A.format("") + BASE_3_7A,
        r"holds 1\.04 MB when the forward pass ends, and sends 1\.71 MB. It may send 1\.00 MB. Most of that is frozen",
    ),
    "all sharded, all kept": (
        LAYERS_3_7A.format("reshard_after_forward=False") + BASE_3_7A,
        r"holds 2\.65 MB .* sends 0\.91 MB. It may hold 1\.50 MB. Gathered weights of some blocks are still there",
    ),
    "three kept": (
        LAYERS_3_7A.format("reshard_after_forward=number < 3") + BASE_3_7A,
        r"holds 1\.85 MB .* sends 1\.31 MB. It may hold .* Gathered weights of some blocks are still there",
    ),
    "DDP": (
        "    return DistributedDataParallel(model)\n",
        r"holds 1\.95 MB .* sends 0\.14 MB. It may hold 1\.50 MB. Nothing is sharded, so the base is whole",
    ),
    "the whole base whole": (
        WHOLE_IF.format("True") + BASE_3_7A.replace(")", ", ignored_params=frozen)"),
        r"holds 1\.75 MB .* It may hold .* too much of the base is whole on each rank",
    ),
    "two whole": (WHOLE_IF.format("number < 2") + BASE_3_7A, r"sends 1\.22 MB. It may send .* how many, and which"),
    "four whole": (WHOLE_IF.format("number < 4") + BASE_3_7A, r"holds 1\.53 MB .* too much of the base is whole"),
    "only the root whole": (
        LAYERS_3_7A.format("") + BASE_3_7A.replace(")", ", ignored_params=frozen)"),
        r"holds 1\.01 MB .* sends 1\.68 MB. It may send",
    ),
    "adapters whole too": (
        LAST_THREE_WHOLE.replace("frozen if", "set(layer.parameters()) if"),
        r"42 of 84 tensors of the adapters have a gradient that is not that of one process, for example .*lora_A",
    ),
    "layers without the base": (WHOLE_IF.format("number >= 3").replace("enumerate(layers)", "enumerate(layers[:3])"),
        "42 of 84 tensors of the adapters have a gradient that is not that of one process"),
}  # fmt: skip
test_3_7a = ON_RANKS.judge(checks.exercise_3_7a, 2, "sharded_adapters", HEAD_3_7A, RIGHT_3_7A, WRONG_3_7A)


# --- 3.7b: why an adapter gives nothing -------------------------------------------------------------------------------


def is_other_base(folder: Path) -> bool:
    checksum = zlib.crc32((folder / "base/model.safetensors").read_bytes())
    return f"{checksum:08x}" not in (folder / "log.txt").read_text()


def adapter(folder: Path) -> dict:
    return load_file(folder / "adapter/adapter_model.safetensors")


def diagnose(folder: Path) -> str:
    if is_other_base(folder):
        return "base"
    if not all(name.startswith("base_model.model.") for name in adapter(folder)):
        return "names"
    return "fine" if any(each.any() for name, each in adapter(folder).items() if "lora_B" in name) else "zero"


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> dict[str, Path]:
    """A job with each cause, trained once for all answers."""
    causes = ("names", "fine", "base", "zero")
    jobs = chapter_3_finetuning.plant_adapters(tmp_path_factory.mktemp("jobs"), causes, seed=20)
    return dict(zip(causes, jobs, strict=True))


@pytest.fixture
def planted_before(planted, monkeypatch):
    def plant_adapters(folder, causes, seed):
        return [planted[cause] for cause in causes]

    monkeypatch.setattr(chapter_3_finetuning, "plant_adapters", plant_adapters)
    return lambda diagnose: diagnose


def without(cause: str):
    """An answer that overlooks one cause."""
    return lambda folder: "fine" if diagnose(folder) == cause else diagnose(folder)


test_3_7b = judge(checks.exercise_3_7b, [diagnose], [
    (stub, "not done yet"),
    (lambda folder: None, "you return None, which is not one of 'base', 'zero', 'names', 'fine'"),
    (without("base"), "The log names other weights for the base than base/model.safetensors holds"),
    (without("zero"), "Every lora_B in the file is zero, so the adapter adds nothing"),
    (without("names"), "No tensor of the file has the name that peft looks for"),
    (lambda folder: "zero" if diagnose(folder) == "fine" else diagnose(folder),
        "for one job you return 'zero', and that is not it. The base is the one in the log"),
], prepare="planted_before")  # fmt: skip


def test_3_7b_each_job_learned_and_only_the_sound_one_shows_it(planted):
    """With what production loads, the sound job counts on; the other three do not."""
    import peft
    from transformers import AutoModelForCausalLM

    tokens = ((torch.arange(20)[:, None] + 3 * torch.arange(9)) % 62) + 2
    right = {}
    for cause, job in planted.items():
        lines = (job / "log.txt").read_text().split()
        assert float(lines[lines.index("40") + 2]) < 1
        base = AutoModelForCausalLM.from_pretrained(job / "base")
        model = peft.PeftModel.from_pretrained(base, job / "adapter").eval()
        with torch.no_grad():
            guesses = model(input_ids=tokens[:, :-1], use_cache=False).logits.argmax(dim=-1)
        right[cause] = (guesses[:, 1:] == tokens[:, 2:]).double().mean().item()
    assert right["fine"] > 0.9, right
    assert right["zero"] < 0.2 and right["names"] < 0.2, right
    assert right["base"] < right["fine"], right


# --- 3.8a: prove a port, on two ranks ---------------------------------------------------------------------------------

PARTS_3_8 = ("write-helpers", "write-proof")
SOLUTION_3_8 = "".join(written(LESSONS / "solutions/08_another_architecture.ipynb", part) for part in PARTS_3_8)
GRADIENT = """    if on_any_rank(wrong):
        return "gradient"
"""
CHANGES = {  # by name: what to replace, by what, and what the check says
    "equal slices": ("    own = distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)\n"
                     "    return differs(grad.to_local(), own.to_local())\n",
                     "    rows = len(whole) // 2\n"
                     "    own = whole[grad.device_mesh.get_local_rank() * rows :][:rows]\n"
                     "    return differs(grad.to_local(), own)\n",
                     "accuse a correct port: first_fault returns 'gradient', expected None. .* a matrix has 63 rows"),
    "whole tensors": ("    own = distribute_tensor(whole, grad.device_mesh, grad.placements, src_data_rank=None)\n"
                      "    return differs(grad.to_local(), own.to_local())\n",
                      "    return differs(grad.full_tensor(), whole)\n",
                      "rank 0 raised .RuntimeError: full_tensor.. gathers the whole tensor on every rank"),
    "with autograd": ("with torch.no_grad():", "if True:", "accuse a correct port: .*memory.* do you compute"),
    "reads too early": ("wrong = worker.rank == 0 and file_differs", "wrong = file_differs",
                        "rank 1 raised 'StopIteration', and the other rank waited .* half a second after rank 1"),
    "measures too long": ("    peak = memory.stop()\n", "",
                          "rank 0 raised .PeakMemory cannot watch a backward pass: stop it before train_step"),
    "no memory": ('"memory" if on_any_rank(peak >= reference.num_bytes) else None', "None",
                  "returns None, expected 'memory'. Planted: rank 0 builds the whole model .* Only rank 0 sees it"),
    "own memory": ("on_any_rank(peak >= reference.num_bytes)", "peak >= reference.num_bytes",
                   "rank 0 returns 'memory' and rank 1 returns None. All ranks have to return the same"),
    "leaves alone": ("if on_any_rank(differs(logits, reference.logits))", "if differs(logits, reference.logits)",
                     "rank 1 returned 'load', while rank 0 still waited for it .* Only rank 1 sees it"),
    "only the loss": ("if on_any_rank(differs(logits, reference.logits))", "if False",
                      "returns 'loss', expected 'load'. Planted: on rank 1, the number by which Gemma multiplies"),
    "raises on rank 1": (GRADIENT, "    assert worker.rank == 0 or not wrong, wrong\n",
                         "rank 1 raised .AssertionError: .* and the other rank waited for it. .* return a verdict"),
    "nan is right": ("not bool(((seen - expected).abs() <= 1e-5 * largest).all())",
                     "bool(((seen - expected).abs() > 1e-5 * largest).any())",
                     "Planted: on rank 1, the number .* is nan.* Is nan a difference in your comparison"),
    "own rows": ("differs(logits, reference.logits)",
                 "differs(logits[worker.rank :: 2], reference.logits[worker.rank :: 2])",
                 "returns None, expected 'load'. Planted: the logits of row 0 are wrong on rank 1"),
    "loss on rank 0": ("if on_any_rank(not abs(loss", "if on_any_rank(worker.rank == 0 and not abs(loss",
                       "expected 'loss'. Planted: rank 1 returns a loss that is one part in ten thousand"),
    "any types": ("types[0] != types[1]", "types[0].keys() != types[1].keys()",
                  "returns None, expected 'export'. Planted: the file holds float64"),
    "any names": ("types[0] != types[1] or any(", "any(",
                  "returns None, expected 'export'. Planted: the file holds the embedding a second time"),
    "other words": ('return "load"', 'return "logits"', "returns logits, which is neither None nor one of load, loss"),
}  # fmt: skip
assert all(SOLUTION_3_8.count(old) == 1 for old, _, _ in CHANGES.values())
test_3_8a = ON_RANKS.judge(
    checks.exercise_3_8a, 2, "hidden_ports", "", {"right": SOLUTION_3_8},
    {name: (SOLUTION_3_8.replace(old, new), because) for name, (old, new, because) in CHANGES.items()},
)  # fmt: skip


# --- scripts that are stubs -------------------------------------------------------------------------------------------

STUBS = {
    checks.exercise_3_6a: HEAD_3_6A + "    raise NotImplementedError\n",
    checks.exercise_3_6b: HEAD_3_6B + "def export_in_parts(model, folder, max_bytes):\n    raise NotImplementedError\n",
    checks.exercise_3_7a: HEAD_3_7A + "    raise NotImplementedError\n",
    checks.exercise_3_8a: "def first_fault(port, reference, worker):\n    raise NotImplementedError\n",
}


@pytest.mark.parametrize("check", STUBS)
def test_a_script_that_is_a_stub_is_not_done_yet(check, tmp_path, capsys):
    (tmp_path / "answer.py").write_text(STUBS[check])
    assert_rejects(check, tmp_path / "answer.py", "not done yet", capsys)
