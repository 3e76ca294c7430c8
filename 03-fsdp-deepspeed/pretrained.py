"""Read and write Hugging Face folders in shards. Of the script's modules only this one talks to transformers and peft.

A base is a folder as `save_pretrained` and `hf download` leave it: config.json, a tokenizer and *.safetensors.
"""

import json
import os
import re
import shutil
import socket
import tempfile
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import distribute_tensor

from shared.distributed import Worker, fail_together, from_rank_zero, global_sum, retry
from shared.errors import StorageError, UsageError
from shared.on_ray.storage import RayRun
from shared.running.runs import CONTENTS
from shared.sharded import file_checksums

os.environ["HF_HUB_OFFLINE"] = "1"  # a base is a folder: nothing is asked of the hub

import peft
from peft.tuners.lora import LoraLayer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.utils import is_sentencepiece_available

logging.set_verbosity_error()
warnings.filterwarnings("ignore", message=".is_gradient_checkpointing. is deprecated")  # peft uses it

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
ALL_LINEAR = "all-linear"
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "additional_chat_templates",
)  # fmt: skip
NO_CHANGE = (  # keys of a base's JSON files that change nothing of what is trained
    "transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype", "tokenizer_file", "backend",
    "is_local", "chat_template", "auto_map",
)  # fmt: skip
EXPORT_AGAIN = "What was trained is saved, except in local mode: continue with --resume and another --export"


# --- Reading -------------------------------------------------------------------------------------------------------


def read_config(folder: str | Path) -> PretrainedConfig:
    """Return the base's configuration.

    Raises ValueError if `folder` holds no decoder that is read here, and says what to do.
    """
    folder = Path(folder)
    if not folder.is_dir():  # an OSError, because a node may mount it a moment late
        raise FileNotFoundError(
            f"--base {folder} is not a folder, and every node needs it. Download a model of the Hub first: "
            "hf download NAME --local-dir FOLDER"
        )
    if not (folder / "config.json").is_file():
        adapter = " It holds an adapter: export with --merge instead." * (folder / "adapter_config.json").is_file()
        raise ValueError(f"--base {folder} has no config.json, so it is not a Hugging Face model.{adapter}")
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        native = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(values.get("model_type"))  # it is taken, also with an auto_map
        own_code = "auto_map" in values and native not in (values.get("architectures") or [native or ""])
        config = None if own_code else AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # wrong values raise many kinds, some of them Hugging Face's own
        raise ValueError(f"{folder / 'config.json'} cannot be used: {first_line(error)}") from error
    if own_code:
        raise ValueError(
            f"--base {folder} brings its own Python code (auto_map in config.json), which is never run here"
        )
    if getattr(config, "quantization_config", None):
        raise ValueError(f"--base {folder} is quantized; give its float32 or bfloat16 version")
    decoder = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    architectures = config.architectures or [decoder or config.model_type]
    architectures = architectures if isinstance(architectures, list) else [architectures]
    # A model that fills in masks is a decoder too only if its configuration says so.
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if decoder not in architectures or config.is_encoder_decoder or is_encoder:
        raise ValueError(
            f"--base {folder} holds {architectures[0]}, which is not a decoder that writes text (CausalLM)"
        )
    return config


def first_line(error: BaseException) -> str:
    """Return what an error says, without the lines that follow the first."""
    return str(error).partition("\n")[0] or type(error).__name__


def read_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return the base's tokenizer. Raises ValueError if there is none."""
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"--base {folder} has no tokenizer (tokenizer.json)")
    whole = any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))
    if not whole and not is_sentencepiece_available():
        raise ValueError(
            f"--base {folder} has a tokenizer.model and no tokenizer.json: transformers makes one of it with the "
            "package sentencepiece (pip install sentencepiece, on every node)"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the tokenizers package raises plain Exceptions
        raise ValueError(f"the tokenizer in {folder} cannot be read: {first_line(error)}") from error


def weight_files(folder: Path) -> dict[str, tuple[list[int], torch.dtype | None]]:
    """Return the tensors in the base's weight files: name -> (shape, dtype, or None if it is no floating-point type).

    Raises ValueError if a file is missing or damaged, or if the weights are pickles, which can run code.
    """
    found = {path.name for path in folder.glob("*.safetensors")}
    if not found:
        pickles = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
        what = (
            f"only {pickles[0]}, a pickle, which can run code: convert it to safetensors" if pickles else "no weights"
        )
        raise ValueError(f"--base {folder} holds {what}")
    listed = {WEIGHTS}
    if WEIGHTS not in found:
        if not (folder / INDEX).is_file():
            raise ValueError(f"--base {folder} has neither {WEIGHTS} nor {INDEX}")
        try:
            listed = {str(name) for name in json.loads((folder / INDEX).read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{folder / INDEX} is damaged: {error}") from error
    if missing := sorted(listed - found):
        raise ValueError(f"--base {folder} lacks {', '.join(missing)}, which {INDEX} names")
    if surplus := sorted(found - listed):
        raise ValueError(f"--base {folder} also holds {surplus[0]}, which is not part of the model: move it away")
    tensors = {}
    for name in sorted(listed):
        try:
            with safe_open(folder / name, "pt") as file:
                slices = {key: file.get_slice(key) for key in list(file.keys())}
                tensors |= {key: (each.get_shape(), DTYPES.get(each.get_dtype())) for key, each in slices.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is damaged or cut off: {error}") from error
    return tensors


def names_in_folder(model: PreTrainedModel, stored: Iterable[str]) -> dict[str, str]:
    """Return the names of the tensors that the folder calls differently from the model: the model's -> the folder's.

    transformers renames tensors while it loads them, and adds a missing prefix, such as `transformer.` of GPT-2.
    """
    rules, known, names = get_model_conversion_mapping(model), model.state_dict(), {}
    renamings, converters = (
        [rule for rule in rules if isinstance(rule, kind)] for kind in (WeightRenaming, WeightConverter)
    )
    for name in sorted(stored):
        new_name, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if converter is None and new_name in known and new_name not in stored:
            names[new_name] = name
    return names


def check_tensors(model: PreTrainedModel, stored: dict[str, tuple[list[int], torch.dtype | None]], folder: str) -> None:
    """Raise ValueError unless the folder's tensors, from `weight_files`, are the model's, by name and shape.

    transformers merges the tensors of some architectures while it loads them. Their shards cannot be read as they are,
    so such a base is refused.
    model: on the meta device, without adapters.
    """
    wanted = base_tensors(model)
    missing = sorted(wanted.keys() - stored.keys())
    # A folder may also hold a tied head, a buffer that the model computes itself, or one of an earlier version's.
    known = {stored_name(model, name) for name in model.state_dict()} | dict(model.named_buffers()).keys()
    others = {name for name in stored.keys() - wanted.keys() - known if not name.endswith(".attn.masked_bias")}
    found = Namespace(missing_keys=set(), unexpected_keys=others)
    model._adjust_missing_and_unexpected_keys(found)
    surplus = sorted(found.unexpected_keys)
    kind = type(model).__name__
    for key in [*surplus, *wanted.keys() & stored.keys()]:
        if stored[key][1] is None:
            raise ValueError(
                f"--base {folder}: {key} is quantized, or not a number; give a float32 or bfloat16 version"
            )
    if missing and surplus:
        raise ValueError(
            f"--base {folder}: {kind} has {missing[0]}, the folder has {surplus[0]}. transformers merges tensors of "
            "this model while it loads them, which this script does not do"
        )
    if missing or surplus:
        what = f"lacks {missing[0]} of {kind}" if missing else f"holds {surplus[0]}, which {kind} does not have"
        raise ValueError(f"--base {folder} {what}")
    for name, tensor in wanted.items():
        shape, _ = stored[name]
        if list(tensor.shape) != shape:
            raise ValueError(f"--base {folder}: {name} is {shape}, but config.json says {list(tensor.shape)}")


def check_copies(model: nn.Module, folder: Path) -> None:
    """Raise ValueError if a tied tensor is stored beside its original and differs from it.

    transformers would then use one of the two. Compares some thousand rows at a time.
    """
    inner = decoder(model)
    names = {id(each): name for name, each in inner.named_parameters()}
    copies = {
        stored_name(inner, name): stored_name(inner, names[id(each)])
        for name, each in inner.named_parameters(remove_duplicate=False)
    }
    files = {}
    for path in folder.glob("*.safetensors"):
        file = safe_open(path, "pt")
        files |= dict.fromkeys(file.keys(), file)
    for copy, original in copies.items():
        if copy != original and copy in files:
            one, other = (files[name].get_slice(name) for name in (copy, original))
            rows = one.get_shape()[0]
            parts = range(0, rows, 4096)
            same = one.get_shape() == other.get_shape()
            if not same or not all(torch.equal(one[part : part + 4096], other[part : part + 4096]) for part in parts):
                raise ValueError(
                    f"--base {folder}: config.json says that {copy} is {original}, but the stored two differ. Set "
                    f"tie_word_embeddings to false there, or remove {copy}"
                )


def checksum(folder: str | Path, log: Callable[[str], None] = lambda line: None) -> str:
    """Return a checksum of the base's weights, which names it in checkpoints. log: told about a long check."""
    entries = file_checksums(folder, [path.name for path in Path(folder).glob("*.safetensors")], log)
    return "-".join(f"{crc:08x}" for _, crc in sorted(entries.values()))


def contents(folder: str | Path) -> dict[str, str]:
    """Return checksums of the base's configuration, tokenizer and chat template, which name it in checkpoints.

    What changes nothing is left out: the order of keys, line ends, and where and with which versions a file was saved.
    """
    folder = Path(folder)
    whole = (folder / "tokenizer.json").is_file()
    names = ["tokenizer.json"] if whole else ["vocab.json", "merges.txt", "tokenizer.model"]
    names += ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
    parts = {
        "base_config": meaning(folder / "config.json"),
        "base_tokenizer": {name: meaning(folder / name) for name in names if (folder / name).is_file()},
        "base_template": json.dumps(read_tokenizer(folder).chat_template).replace(r"\r\n", r"\n"),
    }
    return {name: f"{zlib.crc32(json.dumps(part, sort_keys=True).encode()):08x}" for name, part in parts.items()}


def meaning(path: Path) -> object:
    """Return what a small file says, without what changes nothing. Raises ValueError if it is damaged."""
    content = path.read_bytes().replace(b"\r\n", b"\n")
    if path.suffix != ".json":
        return zlib.crc32(content)
    try:
        return json.loads(content, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if k not in NO_CHANGE})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def check_same_base(args: Namespace, run: RayRun, worker: Worker) -> None:
    """Raise ValueError, on a node whose base is not the driver's. One process per node reads it.

    Waits for a folder that is mounted late, and raises OSError if it does not come.
    """
    retry(lambda: read_config(args.base), run.patience_s)
    if worker.local_rank == 0:
        here = {"base": f"with weights {checksum(args.base, worker.log)}", **contents(args.base)}
        for name in here:
            if run.options.get(name, here[name]) != here[name]:
                raise ValueError(f"node {socket.gethostname()} has {CONTENTS[name]} {args.base} than the driver")


# --- Building, in this order: build, fully_shard, to_empty, fill ----------------------------------------------------


def build(args: Namespace, dtype: torch.dtype) -> nn.Module:
    """Return the base on the meta device, in `dtype`, with adapters if args.lora_rank says so.

    The base is then frozen. Frozen weights stay in bfloat16 if they are stored and computed in it, since a float32 copy
    would hold no more. Raises ValueError for a LoRA target that matches nothing.
    """
    config, stored = read_config(args.base), weight_files(Path(args.base))
    config.output_hidden_states = config.output_attentions = False  # memory, and `generate` would fail
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        except Exception as error:  # wrong values in config.json raise many kinds
            raise ValueError(f"{args.base}/config.json cannot be used: {first_line(error)}") from error
        names = names_in_folder(model, stored)
        model.names_in_folder = names
        check_tensors(model, stored, args.base)
        in_bf16 = all(stored[name][1] == torch.bfloat16 for name in base_tensors(model))
        if args.lora_rank > 0 and args.precision == "bf16" and in_bf16:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
            model.names_in_folder = names
        model.generation_config = GenerationConfig()  # not the base's: `generate` is told all that it needs
        if not any(blocks(model)):
            raise ValueError(f"--base {args.base}: {type(model).__name__} does not say which of its layers are blocks")
        if args.activation_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if args.lora_rank == 0:
            return model
        if args.lora_targets != [ALL_LINEAR]:
            check_targets(model, args.lora_targets)
        model = peft.get_peft_model(model, peft.LoraConfig(
            r=args.lora_rank, lora_alpha=args.lora_alpha, lora_dropout=args.lora_dropout, task_type="CAUSAL_LM",
            target_modules=ALL_LINEAR if args.lora_targets == [ALL_LINEAR] else args.lora_targets,
        ))  # fmt: skip
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)  # peft has chosen float32, or the base's type
    return model


def check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    """Raise ValueError if a target is the end of no linear layer's name, about which peft says nothing.

    A head that is tied to the embedding has no weight of its own, and gets no adapter.
    """
    head = model.get_output_embeddings() if model.config.tie_word_embeddings else None
    linear = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not head
    ]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(
                f"--lora-targets: no linear layer for an adapter is called {target}; use some of {', '.join(ends)}, "
                f"or {ALL_LINEAR} alone"
            )


def decoder(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model: `model` itself, or the one inside a PeftModel."""
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the decoder's blocks, which are gathered one at a time. What is inside a block is not one more."""
    kinds, inside = set(decoder(model)._no_split_modules), set()
    for module in model.modules():
        if type(module).__name__ in kinds and module not in inside:
            inside.update(module.modules())
            yield module


def without_adapters(model: nn.Module) -> list[str]:
    """Return the ends of the names of matrices that LoRA leaves frozen, because they are not in linear layers.

    The experts of some models are: all of a block in one tensor of three dimensions.
    """
    found = [
        f"{path}.{name}"
        for path, module in decoder(model).named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 2 and not isinstance(module, nn.modules.conv._ConvNd)
    ]
    return sorted({re.split(r"\.\d+\.", name)[-1] for name in found})


def base_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the base's tensors by their names in its folder. A tied head is the embedding, and is not repeated."""
    inner = decoder(model)
    stored = inner.state_dict().keys()
    tensors = dict(inner.named_parameters()) | {name: each for name, each in inner.named_buffers() if name in stored}
    names = {name: name.replace(".base_layer.", ".") for name in tensors if ".lora_" not in name}
    return {stored_name(inner, plain): tensors[name] for name, plain in names.items()}


def stored_name(decoder: PreTrainedModel, name: str) -> str:
    """Return the name of a tensor in the folder of the base. `build` has noted those that differ."""
    return getattr(decoder, "names_in_folder", {}).get(name, name)


@torch.no_grad()
def fill(model: nn.Module, folder: str, seed: int) -> None:
    """Give the sharded model its values: every rank reads its slices of the base from the files. Collective.

    Adapters begin with A from `seed` and the layer's name, and B = 0. Raises UsageError, on every rank.
    """
    inner = decoder(model)
    inner.tie_weights()  # to_empty has made two tensors of a tied pair
    for module in inner.modules():
        if module._non_persistent_buffers_set:  # in no file: without this, rotary frequencies would be arbitrary
            inner._init_weights(module)
    try:
        dcp.load(base_tensors(model), storage_reader=HuggingFaceStorageReader(folder))
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise UsageError(f"cannot read --base {folder}: {first_line(cause)}") from error
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            value = torch.empty(parameter.shape)
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            nn.init.kaiming_uniform_(value, a=5**0.5, generator=generator)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(value.to(parameter), mesh, placements, src_data_rank=None))
        elif ".lora_B." in name:
            parameter.zero_()


@torch.no_grad()
def generate(model: nn.Module, prompt: torch.Tensor, max_new_tokens: int, ends: list[int]) -> torch.Tensor:
    """Return the tokens (T,) that the model writes after `prompt`, until one of `ends`, each the most probable one."""
    inner = decoder(model)
    written = inner.generate(
        prompt[None], attention_mask=torch.ones_like(prompt)[None], do_sample=False, max_new_tokens=max_new_tokens,
        eos_token_id=ends, pad_token_id=ends[0],
    )  # fmt: skip
    return written[0, len(prompt) :]


# --- Writing -------------------------------------------------------------------------------------------------------


def check_export(args: Namespace) -> None:
    """Raise ValueError if --export or --merge cannot be carried out, or has no effect."""
    if args.merge and not (args.export and args.lora_rank):
        raise ValueError("--merge goes with --export and --lora-rank")
    if args.export and os.path.lexists(args.export):
        raise ValueError(f"--export {args.export} exists already; choose a new folder")
    if args.export:
        try:
            Path(args.export).parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryDirectory(dir=Path(args.export).parent).cleanup()
        except OSError as error:
            raise ValueError(f"cannot write to --export {args.export}: {error.strerror}") from error


def check_export_is_shared(args: Namespace, worker: Worker) -> None:
    """Raise UsageError, on every rank, if a node does not see the folder in which --export will be made. Collective."""
    parent = Path(args.export).parent
    probe = None
    with fail_together():
        if worker.rank == 0:
            try:
                probe = tempfile.mkdtemp(dir=parent)
            except OSError as error:
                raise ValueError(f"cannot write to --export {args.export}: {error.strerror}") from error
    probe = from_rank_zero(probe)
    with fail_together():
        try:
            retry(lambda: os.stat(probe), seconds=10)
        except OSError as error:
            raise ValueError(
                f"node {socket.gethostname()} does not see what rank 0 writes to {parent}: --export must be in a "
                "folder that all nodes share"
            ) from error
    if worker.rank == 0:
        os.rmdir(probe)


def export(model: nn.Module, args: Namespace, run: RayRun, worker: Worker, ends: Sequence[int]) -> None:
    """Write --export: the fine-tuned model, the adapter, or with --merge the base with the adapter in it. Collective.

    The folder appears under its name when it is complete. Raises UsageError, on every rank.
    ends: the tokens with which answers end. Whoever loads the folder has to stop at them.
    """
    folder, base = Path(args.export), Path(args.base)
    partial = folder.with_name(f".{folder.name}.partial")
    note = None if run.local_mode or worker.rank > 0 else run.read_file("exporting")
    # Workers of this run may have died after the last step of this function: then the folder is the run's own.
    if from_rank_zero(folder.exists() and note is not None and note[0] == str(folder)):
        return
    with fail_together():
        stored = weight_files(base)
        if worker.rank == 0:
            if folder.exists():
                raise ValueError(f"--export {folder} was made by somebody else meanwhile. {EXPORT_AGAIN}")
            shutil.rmtree(partial, ignore_errors=True)  # of a worker that died
            try:
                partial.mkdir()
            except OSError as error:
                raise ValueError(f"cannot write to --export {folder}: {error.strerror}. {EXPORT_AGAIN}") from error
    if args.merge:
        share, error = merge(model, stored)
        if worker.rank == 0:
            worker.log(
                f"merged; rounding left {share:.1%} of the adapted weights as they were, and its error is "
                f"{error:.2g} of the update"
            )
    try:
        if args.lora_rank and not args.merge:
            write_adapter(model, base, partial, worker)
            if worker.rank == 0 and (missing := missing_ends(base, ends)):
                every = [*known_ends(base), *missing]
                worker.log(f"the base does not stop where answers end: give `generate` eos_token_id={every}")
        else:
            write_model(model, base, partial, stored, worker, ends)
        with fail_together():
            if worker.rank == 0:
                if not run.local_mode:
                    run.write_file("exporting", str(folder))
                os.rename(partial, folder)
                worker.log(f"exported: {folder}")
    except (dcp.CheckpointException, StorageError) as error:
        if worker.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        cause = next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error
        raise UsageError(f"cannot write to --export {folder}: {first_line(cause)}. {EXPORT_AGAIN}") from error


def write_model(
    model: nn.Module, base: Path, folder: Path, stored: dict, worker: Worker, ends: Sequence[int]
) -> None:  # fmt: skip
    """Write the model to `folder`, with the base's dtypes, files, config, tokenizer and template. Collective.

    Each rank writes its slices, and rank 0 joins them, one tensor at a time. stored: from `weight_files`.
    """
    with fail_together():
        files = {} if (base / WEIGHTS).is_file() else json.loads((base / INDEX).read_text())["weight_map"]
    numbers = {name: number for number, name in enumerate(sorted(set(files.values())), start=1)}
    tensors = {name: tensor.detach().to(stored[name][1]) for name, tensor in base_tensors(model).items()}
    slices = folder / "slices"
    dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(slices), save_distributed=True))
    with fail_together():  # here, and not inside dcp.save, the other ranks may wait for long
        if worker.rank == 0:
            numbered = {name: numbers.get(files.get(name), 1) for name in tensors}
            consolidate_safetensors_files(str(slices), str(folder), numbered)
            shutil.rmtree(slices)
            if not files:  # one file has no index
                (folder / INDEX).unlink()
                next(folder.glob("*.safetensors")).rename(folder / WEIGHTS)
            write_scalars(folder, {name: each for name, each in tensors.items() if each.dim() == 0})
            copy_files(base, folder, "config.json", "generation_config.json", *TOKENIZER_FILES)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            if config.pop("auto_map", None):  # the class is in transformers, and the code is not copied
                (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            if missing := missing_ends(base, ends):
                path = folder / "generation_config.json"
                settings = json.loads(path.read_text()) if path.is_file() else {}
                path.write_text(json.dumps({**settings, "eos_token_id": known_ends(base) + missing}, indent=2) + "\n")


def write_scalars(folder: Path, scalars: dict[str, torch.Tensor]) -> None:
    """Write tensors without dimensions into the files of a folder: when slices are joined, these become 0.

    A file of safetensors begins with the length of its header in eight bytes, and offsets count from the header's end.
    """
    for path in folder.glob("*.safetensors"):
        with open(path, "r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            for name in header.keys() & scalars.keys():
                file.seek(8 + length + header[name]["data_offsets"][0])
                file.write(bytes(scalars[name].cpu().reshape(1).view(torch.uint8)))


def known_ends(base: Path) -> list[int]:
    """Return the tokens at which `generate` stops with a folder's configuration. Raises ValueError if it is damaged."""
    for path in (base / "generation_config.json", base / "config.json"):
        try:
            ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        if ends is not None:
            return ends if isinstance(ends, list) else [ends]
    return []


def missing_ends(base: Path, ends: Sequence[int]) -> list[int]:
    """Return those of `ends` at which `generate` would not stop."""
    known = known_ends(base)
    return [end for end in ends if end not in known]


def write_adapter(model: peft.PeftModel, base: Path, folder: Path, worker: Worker) -> None:
    """Write the adapter as `PeftModel.save_pretrained` does, with the tokenizer. Collective.

    Its tensors are gathered one at a time, and rank 0 keeps them.
    """
    whole = {}
    for name, tensor in peft.get_peft_model_state_dict(model, save_embedding_layers=False).items():
        gathered = tensor.full_tensor()
        if worker.rank == 0:
            whole[name] = gathered.cpu()
    with fail_together():
        if worker.rank == 0:
            try:
                save_file(whole, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(first_line(error)) from error
            config = model.peft_config["default"]
            config.base_model_name_or_path, config.inference_mode = str(base), True
            config.save_pretrained(folder)
            copy_files(base, folder, *TOKENIZER_FILES)


def copy_files(base: Path, folder: Path, *patterns: str) -> None:
    """Copy what matches a pattern, and the license. Whatever else a base holds may describe something else."""
    for pattern in (*patterns, "LICENSE*", "NOTICE*"):
        for path in base.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            elif path.suffix != ".safetensors":
                shutil.copy(path, folder)


@torch.no_grad()
def merge(model: peft.PeftModel, stored: dict) -> tuple[float, float]:
    """Add the adapters to the base's weights, at least in float32, on shards. Collective.

    Each sum is then rounded to the weight's type in the folder. Returns the share of the adapted weights that stay as
    they were, and the error of the rounding relative to the update: norm over norm, over all adapted weights.
    stored: from `weight_files`.
    """
    sums, total = [], 0  # of each module: weights left as they were, squares of the errors and of the update
    for name, module in decoder(model).named_modules():
        if isinstance(module, LoraLayer):
            weight, (_, dtype) = module.get_base_layer().weight, stored[stored_name(decoder(model), f"{name}.weight")]
            precise = torch.promote_types(weight.dtype, torch.float32)
            update = module.get_delta_weight("default").to(precise).redistribute(placements=weight.placements)
            merged = weight.to(precise) + update
            rounded = merged.to(dtype)
            unchanged = (rounded == weight.to(dtype)).to_local().sum()
            error, length = ((part.to_local().double() ** 2).sum() for part in (rounded.to(precise) - merged, update))
            sums.append(torch.stack([unchanged, error, length]))
            total += weight.numel()
            module.get_base_layer().weight = nn.Parameter(rounded, requires_grad=False)
    unchanged, error, length = global_sum(torch.stack(sums).sum(dim=0)).tolist()
    return unchanged / total, (error / length) ** 0.5 if length else 0.0
