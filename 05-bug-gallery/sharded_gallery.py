"""The exhibits of lesson 5.2: each as it was found, with a mistake (`..._before`), and without it (`..._fixed`).

run_gallery.py runs them on two ranks. An exhibit takes the rank's `Worker` and a folder of its own, and returns what
the rank reports. Exhibits have no docstrings, because the lesson prints them and asks what is wrong.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from three_questions import ThreeQuestions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from shared import datasets, distributed, models
from shared.distributed import Worker

STEPS, LR = 8, 0.5


# --- What several exhibits use. None of it contains a mistake. -------------------------------------------------------


def new_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return models.MLP(input_dim=64, hidden_dim=64, dropout=0.0).double()


def shard(model: torch.nn.Module, worker: Worker) -> None:
    mesh = init_device_mesh("cpu", (worker.world_size,))
    fully_shard(model.layers[4], mesh=mesh)  # the middle one of three linear layers, on its own
    fully_shard(model, mesh=mesh)


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = datasets.load("digits").train.tensors
    return images[64 * step : 64 * (step + 1)].double(), labels[64 * step : 64 * (step + 1)]


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LR)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: Worker, rule: Callable = sgd) -> dict:
    losses, questions = [], ThreeQuestions(model, optimizer, new_model(), rule, *global_batch(0))
    for step in range(STEPS):
        images, labels = (tensor[worker.rank :: worker.world_size] for tensor in global_batch(step))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        questions.before_step()
        optimizer.step()
        questions.after_step()
        losses.append(distributed.global_sum(loss).item() / worker.world_size)
    return {"losses": losses, "accuracy": accuracy(model), "answers": questions.answers}


def accuracy(model: torch.nn.Module) -> float:
    images, labels = datasets.load("digits").val.tensors
    with torch.no_grad():
        return (model(images.double()).argmax(dim=1) == labels).double().mean().item()


# --- 1 ---------------------------------------------------------------------------------------------------------------


def exhibit_1_before(worker, folder):
    model = new_model()
    optimizer = sgd(model.parameters())
    shard(model, worker)
    return train(model, optimizer, worker)


def exhibit_1_fixed(worker, folder):
    model = new_model()
    shard(model, worker)
    optimizer = sgd(model.parameters())
    return train(model, optimizer, worker)


# --- 2 ---------------------------------------------------------------------------------------------------------------


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Bring all but the smallest singular values near 1, by five Newton-Schulz steps with the constants of Muon."""
    matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = 3.4445 * matrix + (-4.7750 * gram + 2.0315 * gram @ gram) @ matrix
    return matrix


class MatrixOptimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[torch.Tensor]):
        super().__init__([parameter for parameter in parameters if parameter.ndim == 2], {})


class MuonBefore(MatrixOptimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            update = orthogonalize(parameter.grad.to_local())
            parameter.to_local().sub_(0.1 * update)


class MuonFixed(MatrixOptimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            update = orthogonalize(parameter.grad.full_tensor())
            placement = (parameter.device_mesh, parameter.placements)
            parameter.sub_(0.1 * distribute_tensor(update, *placement, src_data_rank=None))


class MuonOnOneProcess(MatrixOptimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(0.1 * orthogonalize(parameter.grad))


rule_2 = MuonOnOneProcess  # the lesson uses this name, which gives nothing away


def exhibit_2_before(worker, folder):
    model = new_model()
    shard(model, worker)
    return train(model, MuonBefore(model.parameters()), worker, rule=MuonOnOneProcess)


def exhibit_2_fixed(worker, folder):
    model = new_model()
    shard(model, worker)
    return train(model, MuonFixed(model.parameters()), worker, rule=MuonOnOneProcess)


def muon_of_torch(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    return torch.optim.Muon(matrices, lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)


def exhibit_2_torch(worker, folder):
    model = new_model()
    shard(model, worker)
    return train(model, muon_of_torch(model.parameters()), worker, rule=muon_of_torch)


@contextmanager
def norm_in_float64() -> Iterator[None]:
    """Let torch.optim.Muon compute the norm of a gradient in float64, and all else in bfloat16 as before."""
    norm = torch.Tensor.norm

    def patched(self, *args, **kwargs):
        return norm(self.double() if self.dtype == torch.bfloat16 else self, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "norm", patched):
        yield


def exhibit_2_float64_norm(worker, folder):
    with norm_in_float64():
        return exhibit_2_torch(worker, folder)


# --- 3 ---------------------------------------------------------------------------------------------------------------


def new_engine(stage: int, **more):
    """Return a DeepSpeed engine that takes SGD steps on `new_model`, in float32."""
    import deepspeed  # slow to import

    deepspeed.ops.__compatible_ops__ = {}  # otherwise DeepSpeed compiles an extension for the CPU
    deepspeed.init_distributed(dist_init_required=False)
    model = new_model().float()
    settings = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # none
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    }
    return deepspeed.initialize(model=model, optimizer=sgd(model.parameters()), config=settings | more)[0]


def micro_batches(worker: Worker, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return two halves of this rank's 32 images of a step."""
    images, labels = (tensor[worker.rank :: worker.world_size] for tensor in global_batch(step))
    return list(zip(images.float().chunk(2), labels.chunk(2), strict=True))


def questions_for(engine) -> ThreeQuestions:
    """Return the questions, without any where DeepSpeed has no gradient to show before the step, or only slices."""
    shows_gradients = engine.managed_gradient_accumulation() and engine.gradient_accumulation_steps() == 1
    if engine.zero_optimization_stage() != 2 or not shows_gradients:
        return mock.Mock(answers={})
    return ThreeQuestions(engine.module, None, new_model().float(), sgd, *global_batch(0))


def full_gradient(parameter: torch.Tensor) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter)


def exhibit_3_before(worker, folder, stage=2, **more):
    engine, losses = new_engine(stage, **more), []
    questions = questions_for(engine)
    for step in range(STEPS):
        total = torch.zeros(())
        for images, labels in micro_batches(worker, step):
            loss = F.cross_entropy(engine(images), labels) / 2
            engine.backward(loss)
            total += loss.detach()
        questions.before_step(full_gradient)
        engine.step()
        questions.after_step()
        losses.append(distributed.global_sum(total).item() / worker.world_size)
    return {"losses": losses, "answers": questions.answers}


def exhibit_3_fixed(worker, folder, stage=2, **more):
    engine, losses = new_engine(stage, **more), []
    questions = questions_for(engine)
    for step in range(STEPS):
        total = torch.zeros(())
        for part, (images, labels) in enumerate(micro_batches(worker, step)):
            loss = F.cross_entropy(engine(images), labels) / 2
            engine.set_gradient_accumulation_boundary(part == 1)
            engine.backward(loss)
            total += loss.detach()
        questions.before_step(full_gradient)
        engine.step()
        questions.after_step()
        losses.append(distributed.global_sum(total).item() / worker.world_size)
    return {"losses": losses, "answers": questions.answers}


def exhibit_3_unmanaged(worker, folder):
    return exhibit_3_before(worker, folder, managed_gradient_accumulation=False)


def exhibit_3_set_to_2(worker, folder):
    return exhibit_3_before(worker, folder, gradient_accumulation_steps=2)


def exhibit_3_stage_0(worker, folder):
    return exhibit_3_before(worker, folder, stage=0)


def exhibit_3_stage_1(worker, folder):
    return exhibit_3_before(worker, folder, stage=1)


def exhibit_3_stage_3(worker, folder):
    return exhibit_3_before(worker, folder, stage=3)


# --- 4 ---------------------------------------------------------------------------------------------------------------


def exhibit_4_before(worker, folder):
    model = new_model()
    shard(model, worker)
    worker.log(f"accuracy before training: {accuracy(model):.3f}")
    optimizer = sgd(model.parameters())
    return train(model, optimizer, worker)


def exhibit_4_fixed(worker, folder):
    model = new_model()
    shard(model, worker)
    optimizer = sgd(model.parameters())
    worker.log(f"accuracy before training: {accuracy(model):.3f}")
    return train(model, optimizer, worker)


def exhibit_4_resharded(worker, folder):
    model = new_model()
    shard(model, worker)
    worker.log(f"accuracy before training: {accuracy(model):.3f}")
    model.reshard()
    optimizer = sgd(model.parameters())
    return train(model, optimizer, worker)
