"""--ds-config and the options: which decides, what is refused before anything starts, what is filled in."""

import json
from argparse import Namespace
from pathlib import Path

import ds_settings
import pytest
from runs import ROOT, refused_here

from shared.distributed import Worker
from shared.on_ray import cluster
from shared.running.options import Options

DEEPSPEED = ROOT / "03-fsdp-deepspeed/train_ray_deepspeed.py"
NOT_GIVEN = {"batch_size": 64, "lr": 1e-3, "precision": "fp32", "zero_stage": 0}

# The keys of Hugging Face's examples for its Trainer, ds_config_zero2.json and ds_config_zero3.json.
AUTO = "auto"
HUGGING_FACE = {
    "fp16": {
        "enabled": AUTO, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "gradient_accumulation_steps": AUTO,
    "gradient_clipping": AUTO,
    "steps_per_print": 2000,
    "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO,
    "wall_clock_breakdown": False,
}  # fmt: skip
ZERO_2 = {
    "stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}, "allgather_partitions": True,
    "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}  # fmt: skip
ZERO_3 = {
    "stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True},
    "offload_param": {"device": "none", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
    "sub_group_size": 1e9, "reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO,
    "stage3_param_persistence_threshold": AUTO, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
WARM_UP = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}}
# The keys of DeepSpeedExamples' training/cifar and of DeepSpeed-Chat's get_train_ds_config.
CIFAR = {
    "train_batch_size": 16, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "bf16": {"enabled": False}, "wall_clock_breakdown": False,
    "fp16": {
        "enabled": True, "fp16_master_weights_and_grads": False, "loss_scale": 0, "loss_scale_window": 500,
        "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15,
    },
    "zero_optimization": {
        "stage": 1, "allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000, "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False,
    },
}  # fmt: skip
CHAT = {
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False,
    },
    "bfloat16": {"enabled": True}, "prescale_gradients": False, "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "release_inference_cache": False,
        "pin_parameters": True, "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "logs/", "job_name": "step1_tensorboard"},
}  # fmt: skip


def read(settings: dict | str, tmp_path: Path, **given: object) -> tuple[Options, dict]:
    """What two workers get of a file with these settings, and of options of which only `given` were given."""
    file = tmp_path / "ds.json"
    file.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    defaults = {name: ds_settings.Default(value) for name, value in NOT_GIVEN.items()}
    args = {"ds_config": str(file), "num_workers": 2, "use_gpu": None, "offload": False, **defaults, **given}
    return ds_settings.read_settings(Namespace(**args), 2, Worker(label="driver"))


@pytest.mark.parametrize(("settings", "decided"), [
    ({"bf16": {"enabled": True}, "optimizer": {"params": {"lr": 3e-5}}}, {"precision": "bf16", "lr": 3e-5}),
    ({"bfloat16": {"enabled": True}}, {"precision": "bf16"}),
    ({"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 4}}, {"precision": "fp16"}),
    ({"fp16": {"loss_scale": 128}}, {}),  # not enabled
    ({"zero_optimization": {"stage": 3}}, {"zero_stage": 3}),
    ({"train_batch_size": 32}, {"batch_size": 32}),
    ({"train_micro_batch_size_per_gpu": 8}, {"batch_size": 16}),
    ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}, {"batch_size": 48}),
    ({}, {}),
    ("// DeepSpeed reads comments\n{'gradient_clipping': 0.5,} # and more", {}),
])  # fmt: skip
def test_the_file_decides_what_no_option_says(settings, decided, tmp_path):
    args, filled_in = read(settings, tmp_path)
    assert {name: getattr(args, name) for name in NOT_GIVEN} == NOT_GIVEN | decided
    assert filled_in["optimizer"] == {"type": "AdamW", "params": {"lr": args.lr}}
    assert filled_in["zero_optimization"]["stage"] == args.zero_stage
    assert [filled_in[name]["enabled"] for name in ("bf16", "fp16")] == [
        args.precision == "bf16",
        args.precision == "fp16",
    ]
    assert (
        args.batch_size
        == filled_in["train_batch_size"]
        == (2 * filled_in["train_micro_batch_size_per_gpu"] * filled_in["gradient_accumulation_steps"])
    )


def test_own_settings_stay_and_options_fill_in_the_rest(tmp_path):
    own = {"fp16": {"hysteresis": 4}, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    _, settings = read(own, tmp_path, precision="fp16", offload=True, lr=2e-3)
    assert settings["fp16"] == {"hysteresis": 4, "enabled": True} and settings["bf16"] == {"enabled": False}
    assert settings["zero_optimization"] == own["zero_optimization"]
    assert settings["optimizer"] == {"type": "AdamW", "params": {"lr": 2e-3}}
    assert (settings["train_batch_size"], settings["train_micro_batch_size_per_gpu"]) == (64, 32)
    _, settings = read({"train_micro_batch_size_per_gpu": 8}, tmp_path, batch_size=64, offload=True)
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_our_own_file_serves_every_stage(tmp_path):
    for stage, expected in ((3, 3), (0, 0), (ds_settings.Default(0), 2)):
        args, settings = read({}, tmp_path, ds_config=str(ds_settings.OWN_FILE), zero_stage=stage)
        assert args.zero_stage == settings["zero_optimization"]["stage"] == expected


@pytest.mark.parametrize(("settings", "given", "words"), [
    ({"optimizer": {"params": {"lr": 3e-5}}}, {"lr": 1e-3}, "optimizer.params.lr is 3e-05; --lr 0.001 makes it 0.001"),
    ({"bf16": {"enabled": True}}, {"precision": "fp32"}, "bf16.enabled is true; --precision fp32 makes it false"),
    ({"bf16": {"enabled": False}}, {"precision": "bf16"}, "bf16.enabled is false; --precision bf16 makes it true"),
    ({"fp16": {"enabled": True, "loss_scale": 0}}, {"precision": "bf16"}, "fp16.enabled is true; --precision bf16"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, {}, "bf16 and fp16 are both enabled"),
    ({"zero_optimization": {"stage": 2}}, {"zero_stage": 3}, "zero_optimization.stage is 2; --zero-stage 3"),
    ({"zero_optimization": {"offload_optimizer": {"device": "none"}}}, {"offload": True}, "has no device to move to"),
    ({"train_batch_size": 32}, {"batch_size": 64}, "train_batch_size is 32; --batch-size 64 makes it 64"),
    ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}, {},
     "train_micro_batch_size_per_gpu is 8; a global batch of 64 on 2 workers with 2 accumulation steps makes it 16"),
    ({"train_micro_batch_size_per_gpu": 64}, {"batch_size": 64}, "train_micro_batch_size_per_gpu is 64; a global"),
    ({"train_micro_batch_size_per_gpu": 10}, {"batch_size": 64}, "train_micro_batch_size_per_gpu is 10; a global"),
    ({"gradient_accumulation_steps": 3}, {}, "the 32 samples of a worker's batch are not divisible by 3 gradient"),
    ({"scheduler": {"type": "WarmupLR"}}, {}, 'leave out "scheduler"'),
    ({"checkpoint": {"load_universal": True}}, {}, "leave out load_universal"),
])  # fmt: skip
def test_contradictions_are_refused(settings, given, words, tmp_path):
    with pytest.raises(ValueError) as caught:
        read(settings, tmp_path, **given)
    assert str(caught.value).startswith(f"{tmp_path / 'ds.json'}: ") and words in str(caught.value)


def test_a_batch_that_does_not_divide_is_refused_as_in_every_script(tmp_path):
    with pytest.raises(ValueError, match=r"^global batch 63 is not divisible by 2 ranks; use 62 or 64"):
        read({}, tmp_path, batch_size=63)
    with pytest.raises(ValueError, match=r"^global batch 31 is not divisible by 2 ranks; use 30 or 32"):
        read({"train_batch_size": 31}, tmp_path)


@pytest.mark.parametrize(("text", "words"), [
    ("", "the file is empty"),
    (" \n", "the file is empty"),
    ("[]", "it must hold an object of settings"),
    ("gradient clipping", "it must hold an object of settings"),
    ('{"zero_optimization": ', "Expecting value: line 1 column 23"),
    ('{"gradient_clipping": 1, "gradient_clipping": 0}', "Duplicate keys in DeepSpeed config: ['gradient_clipping']"),
    ('{"optimizer": {"params": {"lr": 1e-3, "lr": 3e-5}}}', "Duplicate keys in DeepSpeed config: ['lr']"),
    ('{"gradient_clipping": 1e999}', "infinity"),
    ('{\n"gradient_clipping": NaN\n}', 'gradient_clipping: Input should be a valid number, not "NaN"'),
    ('{\n"wall_clock_breakdown": False,\n"steps_per_print": 10}', "wall_clock_breakdown: Input should be a valid bool"),
    ('{"optimizer": {"params": {"lr": "1e-5"}}}', 'optimizer.params.lr: Input should be a valid number, not "1e-5"'),
    ('{"optimizer": {"params": {"betas": ["0.9", 0.99]}}}', "optimizer.params.betas.0: Input should be a valid number"),
    ('{"optimizer": {"params": {"lr": 1e39}}}', "optimizer.params.lr: Value error, overflows in float32, not 1e+39"),
    ('{"optimizer": {"params": {"lr": -1}}}', "optimizer.params.lr: Input should be greater than 0, not -1"),
    ('{"gradient_clipping": "1.0"}', "gradient_clipping: Input should be a valid number"),
    ('{"gradient_accumulation_steps": true}', "gradient_accumulation_steps: Input should be a valid integer"),
    ('{"gradient_accumulation_steps": "two"}', "gradient_accumulation_steps: Input should be a valid integer"),
    ('{"train_batch_size": 0}', "train_batch_size: Input should be greater than 0"),
    ('{"zero_optimization": {"stage": 5}}', "zero_optimization.stage: Input should be less than or equal to 3, not 5"),
    ('{"zero_optimization": {"stage": "2"}}', "zero_optimization.stage: Input should be a valid integer"),
    ('{"zero_optimization": true}', "zero_optimization: Input should be a valid dictionary"),
    ('{"optimizer": ["AdamW"]}', "optimizer: Input should be a valid dictionary"),
    ('{"optimizer": {"params": ["lr"]}}', "optimizer.params: Input should be a valid dictionary"),
    ('{"bf16": {"enabled": "true"}}', "bf16.enabled: Input should be a valid boolean"),
    ('{"checkpoint": true}', "checkpoint: Input should be a valid dictionary"),
])  # fmt: skip
def test_what_is_no_settings_file_is_refused(text, words, tmp_path):
    with pytest.raises(ValueError) as caught:
        read(text, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'ds.json'}: ") and words in str(caught.value)
    assert "\n" not in str(caught.value) and "://" not in str(caught.value)


@pytest.mark.parametrize(("settings", "words"), [
    ({"zero_optimization": {"reduce_bucket_sizes": 5}}, "no setting zero_optimization.reduce_bucket_sizes"),
    ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "zero_optimization.offload_optimizer.devise"),
    ({"zero_optimization": {"reduce_bucket_size": "2e8"}}, "zero_optimization.reduce_bucket_size: Input should be"),
    ({"fp16": {"loss_scales": 0}}, "DeepSpeed has no setting fp16.loss_scales"),
    ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window must be > 0"),
    ({"sparse_gradients": True}, "DeepSpeed refuses it: Sparse compression of dense"),
    ({"amp": {"enabled": True}}, "DeepSpeed refuses it: NVIDIA Apex AMP integration has been removed"),
    ({"tensorboard": 3}, "tensorboard: Input should be a valid dictionary"),
    ({"activation_checkpointing": True}, "DeepSpeed refuses it"),
    ({"communication_data_type": "fp8"}, "DeepSpeed refuses it: Invalid communication_data_type"),
    ({"gradient_cliping": 1.0}, "DeepSpeed has no setting gradient_cliping: did you mean gradient_clipping?"),
    ({"zero_optimisation": {"stage": 3}}, "did you mean zero_optimization?"),
    ({"batch_size": 64}, "did you mean train_batch_size?"),
    ({"FP16": {"enabled": True}}, "did you mean fp16?"),
    ({"optimizer": {"params": {"max_grad_norm": 1.0}}}, "DeepSpeed clips by gradient_clipping"),
    ({"optimizer": {"type": "AdamW", "lr": 3e-5}}, "DeepSpeed has no setting optimizer.lr"),
    ({"optimizer": {"type": "AdamWW"}}, "neither DeepSpeed nor PyTorch has an optimizer AdamWW"),
    ({"optimizer": {"type": "sgd"}}, "neither DeepSpeed nor PyTorch has an optimizer sgd"),
    ({"optimizer": {"params": {"torch_adam": True, "beta": [0.9, 0.99]}}}, "unexpected keyword argument 'beta'"),
    ({"optimizer": {"params": {"betas": [0.9]}}}, "optimizer.params.betas: List should have"),
    ({"optimizer": {"params": {"betas": [0.9, 9]}}}, "optimizer.params: Invalid beta parameter at index 1"),
    ({"optimizer": {"type": "SGD"}, "zero_optimization": {"stage": 1}}, "zero_allow_untested_optimizer"),
])  # fmt: skip
def test_what_deepspeed_would_refuse_in_a_worker_is_refused_on_the_driver(settings, words, tmp_path):
    with pytest.raises(ValueError) as caught:
        read(settings, tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'ds.json'}: ") and words in str(caught.value)
    assert "\n" not in str(caught.value) and "://" not in str(caught.value)


def test_other_unknown_settings_are_reported_in_one_line(tmp_path, capsys):
    settings = {
        "my_notes": "x",
        "_optimizer": {"type": "Lamb"},
        "activation_checkpointing": {"cpu_checkpointing": True},
    }
    read(settings, tmp_path)
    unknown, activations = capsys.readouterr().out.splitlines()
    assert unknown.endswith("ds.json: DeepSpeed does not know, and ignores: my_notes, _optimizer")
    assert activations.endswith("overridden by --activation-checkpointing: activation_checkpointing")


@pytest.mark.parametrize(("zero_optimization", "left"), [
    (ZERO_2, []),
    (ZERO_3, ["reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"]),
])  # fmt: skip
def test_the_examples_of_hugging_face_are_filled_in(zero_optimization, left, tmp_path, capsys):
    settings = HUGGING_FACE | {"zero_optimization": zero_optimization}
    with pytest.raises(ValueError, match=r'scheduled by this script \(--lr-step-size\); leave out "scheduler"'):
        read(settings | {"scheduler": WARM_UP}, tmp_path)
    args, filled_in = read(settings, tmp_path, batch_size=32, precision="bf16", lr=3e-5)
    assert args.zero_stage == zero_optimization["stage"]
    assert filled_in["optimizer"] == {"type": "AdamW", "params": {"lr": 3e-5}}
    assert filled_in["bf16"]["enabled"] and filled_in["fp16"] == HUGGING_FACE["fp16"] | {"enabled": False}
    assert (filled_in["train_batch_size"], filled_in["train_micro_batch_size_per_gpu"]) == (32, 16)
    assert '"auto"' not in json.dumps(filled_in)
    (line,) = capsys.readouterr().out.splitlines()
    names = [f"optimizer.params.{name}" for name in ("betas", "eps", "weight_decay")] + ["gradient_clipping"]
    names += [f"zero_optimization.{name}" for name in left]
    assert line.endswith(f'ds.json: "auto" is left to DeepSpeed where no option decides: {", ".join(names)}')


def test_the_examples_of_deepspeed_are_read(tmp_path):
    args, settings = read(CIFAR, tmp_path)
    assert [getattr(args, name) for name in NOT_GIVEN] == [16, 0.001, "fp16", 1]
    assert settings["optimizer"] == CIFAR["optimizer"]
    args, settings = read(CHAT, tmp_path)
    assert [getattr(args, name) for name in NOT_GIVEN] == [32, 0.001, "bf16", 3]
    assert settings["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(("settings", "options", "words"), [
    ({"train_batch_size": 32}, ["--batch-size", "64"], "train_batch_size is 32; --batch-size 64 makes it 64"),
    ({"gradient_cliping": 1.0}, [], "did you mean gradient_clipping?"),
])  # fmt: skip
def test_a_user_gets_one_line_and_nothing_starts(settings, options, words, tmp_path, monkeypatch, no_ray):
    monkeypatch.setattr(cluster, "start", lambda *_, **__: pytest.fail("Ray was started"))
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    runs = tmp_path / "runs"
    line = refused_here(DEEPSPEED, "--ds-config", tmp_path / "ds.json", "--storage-path", runs, *options)
    assert words in line and not runs.exists()
