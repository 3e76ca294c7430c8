"""Read DeepSpeed's settings from --ds-config, check them on the driver, and complete them from the options."""

import difflib
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from shared.distributed import Worker
from shared.running.options import Options
from shared.sampling import check_divisible, local_batch_size

OWN_FILE = Path(__file__).with_name("ds_config.json")


@dataclass(frozen=True)
class Default:
    """The default of an option that --ds-config may replace."""

    value: object

    def __str__(self) -> str:
        return f"as in --ds-config, or {self.value}"


class Section(BaseModel):
    """A part of --ds-config. DeepSpeed checks the types of most settings, but not of these, which we need."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Precision(Section):
    enabled: bool | None = None


def check_lr(lr: float) -> float:
    """Return `lr`. Raises ValueError for one that overflows in the optimizer, which computes in float32."""
    if lr > 1e37:
        raise ValueError("overflows in float32")
    return lr


class AdamParams(Section):
    lr: Annotated[PositiveFloat, AfterValidator(check_lr)] | None = None
    betas: Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)] | None = None
    eps: NonNegativeFloat | None = None
    weight_decay: NonNegativeFloat | None = None


class Optimizer(Section, extra="forbid"):  # an lr outside of params would have no effect
    type: str = "AdamW"
    params: AdamParams = AdamParams()
    legacy_fusion: bool = False


class ZeroOptimization(Section):
    stage: Annotated[int, Field(ge=0, le=3)] | None = None
    offload_optimizer: Section | None = None


class Settings(Section):
    train_batch_size: PositiveInt | None = None
    train_micro_batch_size_per_gpu: PositiveInt | None = None
    gradient_accumulation_steps: PositiveInt | None = None
    gradient_clipping: NonNegativeFloat = 1.0
    prescale_gradients: bool = False
    wall_clock_breakdown: bool = False
    steps_per_print: int | None = None
    fp16: Precision = Precision()
    bf16: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    checkpoint: Section = Section()


def read_settings(args: Namespace, world_size: int, driver: Worker) -> tuple[Options, dict]:
    """Read --ds-config, and return (options, DeepSpeed's settings).

    An option that was not given gets its value from the file. Raises ValueError if the file contradicts an option, or
    if DeepSpeed would refuse it in the workers.
    """
    file = Path(args.ds_config)
    # DeepSpeed chooses its back end when it is first imported, and in local mode this process trains.
    trains_on_gpu = args.num_workers == 0 and args.use_gpu is not False and torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if trains_on_gpu else "cpu")
    with errors_about(file):
        settings = load(file.read_text())
        automatic = remove_auto(settings)
        options = take_options(settings, args, world_size)
        if file == OWN_FILE and not isinstance(args.zero_stage, Default):
            settings.get("zero_optimization", {}).pop("stage", None)  # this file serves every --zero-stage
    check_divisible(options.batch_size, world_size)
    with errors_about(file):
        filled_in = fill_in(settings, options, world_size)
        check_optimizer(settings)
        unknown = check(settings)
    notes = {
        '"auto" is left to DeepSpeed where no option decides': [name for name in automatic if name not in filled_in],
        "DeepSpeed does not know, and ignores": unknown,
        "overridden by --activation-checkpointing": settings.keys() & {"activation_checkpointing"},
    }
    for what, names in notes.items():
        if names and driver.rank == 0:
            driver.log(f"note: {file}: {what}: {', '.join(names)}")
    return options, settings


@contextmanager
def errors_about(file: Path) -> Iterator[None]:
    """Raise a ValueError of the block as a single line that begins with the file's name."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(f"{file}: {in_words(error)}") from error
    except (ValueError, OverflowError) as error:  # OverflowError for a number like 1e999
        raise ValueError(f"{file}: {error}") from error


def in_words(error: ValidationError, section: str = "") -> str:
    """Return the error's first finding in one line, without pydantic's link.

    section: the path to the part that was validated.
    """
    first = error.errors(include_url=False)[0]
    path = ".".join([section, *map(str, first["loc"])]).strip(".")
    if first["type"] == "extra_forbidden":
        return f"DeepSpeed has no setting {path}"
    return f"{path}: {first['msg']}, not {json.dumps(first['input'], default=str)}"


def load(text: str) -> dict:
    """Return the settings in a file's text, which may hold comments, as DeepSpeed allows.

    Raises ValueError if the text is not an object of settings.
    """
    import hjson  # DeepSpeed's reader
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    if not text.strip():
        raise ValueError("the file is empty")
    settings = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    if not isinstance(settings, dict):
        raise ValueError("it must hold an object of settings, as ds_config.json does")
    if "bfloat16" in settings:  # the older name, which DeepSpeed reads only if there is no bf16
        settings.setdefault("bf16", settings.pop("bfloat16"))
    return settings


def remove_auto(section: dict, prefix: str = "") -> list[str]:
    """Remove every setting that is "auto", and return their paths.

    "auto" is Hugging Face's word for "whatever the options say".
    """
    removed = []
    for name, value in list(section.items()):
        if isinstance(value, dict):
            removed += remove_auto(value, f"{prefix}{name}.")
        elif value == "auto":
            del section[name]
            removed.append(prefix + name)
    return removed


def take_options(settings: dict, args: Namespace, world_size: int) -> Options:
    """Return the options, with values of `settings` for those that were not given.

    Raises ValueError for values of a wrong type.
    """
    file = Settings.model_validate(settings)
    micro_batch, accumulation = file.train_micro_batch_size_per_gpu, file.gradient_accumulation_steps or 1
    enabled = [name for name in ("bf16", "fp16") if getattr(file, name).enabled]
    if len(enabled) > 1:
        raise ValueError("bf16 and fp16 are both enabled: disable one of them")
    found = {
        "batch_size": file.train_batch_size or (micro_batch and micro_batch * accumulation * world_size),
        "lr": file.optimizer.params.lr,
        "precision": enabled[0] if enabled else None,
        "zero_stage": file.zero_optimization.stage,
    }
    missing = {name: default.value for name, default in vars(args).items() if isinstance(default, Default)}
    return Options(**vars(args) | {
        name: default if found[name] is None else found[name] for name, default in missing.items()
    })  # fmt: skip


def fill_in(settings: dict, args: Namespace, world_size: int) -> list[str]:
    """Put into `settings` what the options decide, and return the paths.

    Raises ValueError where `settings` contradict the options.
    """
    if "scheduler" in settings:
        raise ValueError('the learning rate is scheduled by this script (--lr-step-size); leave out "scheduler"')
    if settings.get("checkpoint", {}).get("load_universal"):
        raise ValueError("the number of workers decides which checkpoints are converted; leave out load_universal")
    per_rank_batch = local_batch_size(args.batch_size, world_size)
    # As in DeepSpeed, the micro-batch and the number of accumulation steps determine each other.
    micro_batch = settings.get("train_micro_batch_size_per_gpu") or per_rank_batch
    parts = 1 if per_rank_batch % micro_batch else per_rank_batch // micro_batch
    accumulation = settings.get("gradient_accumulation_steps") or parts
    if per_rank_batch % accumulation:
        raise ValueError(
            f"the {per_rank_batch} samples of a worker's batch are not divisible by {accumulation} "
            "gradient_accumulation_steps"
        )
    batch = f"a global batch of {args.batch_size} on {world_size} workers with {accumulation} accumulation steps"
    decided = {
        "zero_optimization.stage": (args.zero_stage, f"--zero-stage {args.zero_stage}"),
        "optimizer.params.lr": (args.lr, f"--lr {args.lr}"),
        "bf16.enabled": (args.precision == "bf16", f"--precision {args.precision}"),
        "fp16.enabled": (args.precision == "fp16", f"--precision {args.precision}"),
        "train_batch_size": (args.batch_size, f"--batch-size {args.batch_size}"),
        "gradient_accumulation_steps": (accumulation, batch),
        "train_micro_batch_size_per_gpu": (per_rank_batch // accumulation, batch),
    }
    for path, (value, reason) in decided.items():
        *parents, name = path.split(".")
        section = settings
        for parent in parents:
            section = section.setdefault(parent, {})
        if section.setdefault(name, value) != value:
            was, becomes = json.dumps(section[name]), json.dumps(value)
            raise ValueError(f"{path} is {was}; {reason} makes it {becomes}. Leave it out, and it is filled in")
    settings["optimizer"].setdefault("type", "AdamW")
    if args.offload:
        device = {"device": "cpu", "pin_memory": True}
        if settings["zero_optimization"].setdefault("offload_optimizer", device).get("device", "none") == "none":
            raise ValueError("zero_optimization.offload_optimizer has no device to move to; leave it out for --offload")
    return list(decided)


# Parameters that DeepSpeed's own Adams take, and PyTorch's do not.
DEEPSPEED_ADAM = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")


def check_optimizer(settings: dict) -> None:
    """Raise ValueError for an optimizer that a worker could not make.

    Except for Adam, DeepSpeed's own optimizers are not tried.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    kind, params = settings["optimizer"]["type"], settings["optimizer"]["params"]
    if "max_grad_norm" in params:
        raise ValueError("optimizer.params.max_grad_norm: DeepSpeed clips by gradient_clipping, outside of optimizer")
    if kind.lower() in ("adam", "adamw"):
        kind, params = "AdamW", {name: params[name] for name in params if name not in DEEPSPEED_ADAM}
    elif kind.lower() in DEEPSPEED_OPTIMIZERS:
        return
    if not isinstance(getattr(torch.optim, kind, None), type):  # torch.optim.sgd is a module
        raise ValueError(f"optimizer.type: neither DeepSpeed nor PyTorch has an optimizer {kind}")
    try:
        optimizer = getattr(torch.optim, kind)([torch.zeros(1)], **params)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer.params: {error}") from error
    untested = settings["zero_optimization"]["stage"] > 0 and type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS
    if untested and not settings.get("zero_allow_untested_optimizer"):
        raise ValueError(f'ZeRO is not tested with {kind}: add "zero_allow_untested_optimizer": true, or use AdamW')


class NotesNames(dict):
    """Settings that record which names DeepSpeed looks up, because it has no list of known names."""

    def __init__(self, settings: dict) -> None:
        super().__init__(settings)
        self.names = set()

    def get(self, name: str, default: object = None) -> object:
        """Return this setting, as a dict does, and note its name."""
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: str) -> bool:
        self.names.add(name)
        return super().__contains__(name)

    def keys(self) -> "NotesNames":  # for `name in settings.keys()`
        return self


def check(settings: dict) -> list[str]:
    """Return the names that DeepSpeed does not know.

    Raises ValueError for settings that it would refuse, and for likely typos.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    # DeepSpeed multiplies by the number of ranks, and here it sees one.
    noting = NotesNames({name: settings[name] for name in settings if name != "train_batch_size"})
    try:
        DeepSpeedConfig(noting)
    except ValidationError as error:
        name = error.errors(include_url=False)[0]["loc"][:1]
        sections = [section for section, part in settings.items() if isinstance(part, dict) and {*name} & {*part}]
        raise ValueError(in_words(error, "".join(sections[:1]))) from error
    except Exception as error:  # of any kind, even AssertionError
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"DeepSpeed refuses it: {re.sub(r' See https?://[^ ]+', '', text)}") from error
    unknown = [name for name in settings if name not in noting.names]
    for name in unknown:
        if name[:1].isalpha() and (close := difflib.get_close_matches(name.lower(), noting.names, cutoff=0.75)):
            raise ValueError(f"DeepSpeed has no setting {name}: did you mean {close[0]}?")
    return unknown
