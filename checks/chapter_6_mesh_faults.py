"""The check of exercise 6.4a: find the fault in a mesh."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from checks import mesh_ports
from checks.machinery import Wrong, exercise, on_ranks
from checks.mesh_ports import Case, Port, Reference

WAIT_S = 30  # for ranks that are in a collective which others have left out
# Faults that come in several forms on 2 x 2: a field of the recipe, and its values. The check tries each.
FORMS = {
    "samples": ("deal_over", ("tensor", "world")),
    "weights": ("copied_over", ("data", "tensor", "world")),
    "sum": ("left_out", ((2 * mesh_ports.LAYERS,), tuple(range(2 * mesh_ports.LAYERS + 1)))),
}
# By the answer, or by the answer and what was said instead of it.
HINTS = {
    "none": "Nothing is wrong with this port. What did you compare with what?",
    ("none", "samples"): "Which ranks of a mesh read different samples?",
    ("none", "weights"): "Which part of the reference's weight does this rank have?",
    ("none", "heads"): "Which ranks' shares make up the loss of the batch, and is the rest more than rounding?",
    "samples": "What a rank computes from wrong samples is wrong too, and can look like any other fault.",
    ("samples", "none"): "Whose list did you compare with whose? Each sample has one tensor group to read it.",
    "weights": "What a rank computes from wrong weights is wrong too.",
    ("weights", "none"): "On some ranks, some slices are wrong here.",
    "heads": "Samples and weights are right here. What is the first number that is wrong?",
    "scale": "The loss is right here. And the gradients?",
    ("scale", "sum"): "Which gradient is right even if it is multiplied by 2? Does every rank have one like that?",
    "sum": "The loss is right here. And the gradients?",
    ("sum", "scale"): "Some gradients are right here.",
}


class Watch:
    """Notes what an answer moves outside the calls of its port, on this rank.

    largest: the bytes of the largest input of a collective over the world or a group of a mesh that `add` knows.
    gathered: whether it called `full_tensor`.
    """

    def __init__(self) -> None:
        self.groups, self.paused = {}, True
        self.start()

    def start(self) -> None:
        """Forget what was noted."""
        self.largest, self.gathered = 0, False

    def add(self, mesh: DeviceMesh) -> None:
        """Watch the groups of a mesh, and the world."""
        for group in (dist.group.WORLD, *map(mesh.get_group, mesh.mesh_dim_names)):
            if group.group_name not in self.groups:
                self.groups[group.group_name] = group
                group.register_pre_hook(1, self.note)

    def end(self) -> None:
        """Watch no group any more."""
        for group in self.groups.values():
            group.unregister_pre_hook(1)

    def note(self, call: object) -> None:
        """Note a collective; called by torch when it starts."""
        if not self.paused:
            self.largest = max([self.largest, *(each.nbytes for each in call.input_tensors)])

    @contextmanager
    def set_paused(self, paused: bool) -> Iterator[None]:
        """Note nothing in this context, or, with False, everything."""
        before, self.paused = self.paused, paused
        try:
            yield
        finally:
            self.paused = before

    def unwatched(self, function: Callable) -> Callable:
        """Return a function that does the same, unwatched."""

        def call(*args: object) -> object:
            with self.set_paused(True):
                return function(*args)

        return call

    @contextmanager
    def watching_full_tensor(self) -> Iterator[None]:
        """Note calls of `full_tensor` in this context."""
        from torch.distributed.tensor import DTensor

        original = DTensor.full_tensor

        def full_tensor(tensor: DTensor, **options: object) -> torch.Tensor:
            self.gathered |= not self.paused
            with self.set_paused(True):
                return original(tensor, **options)

        with mock.patch.object(DTensor, "full_tensor", full_tensor):
            yield


class Parted(Exception):
    """The ranks do different things; `doing` says what, by rank."""

    def __init__(self, doing: list[tuple[str, object]]) -> None:
        super().__init__(str(doing))
        self.doing = doing


def meet(group: dist.ProcessGroup, action: str, value: object = None) -> list:
    """Return the values of all ranks. Raises Parted on every rank if they are not at the same action."""
    doing = [None] * group.size()
    try:
        dist.all_gather_object(doing, (action, value), group=group)
    except RuntimeError:  # gloo's for a timeout
        waited = f"this rank {action}, and has waited {WAIT_S} s for the others"
        raise RuntimeError(f"{waited}. Do all ranks reach every collective?") from None
    if len({each for each, _ in doing}) > 1:
        raise Parted(doing)
    return [value for _, value in doing]


def try_port(answer: Callable, port: Port, reference: Reference, watch: Watch, group: dist.ProcessGroup) -> dict:
    """Report all ranks' verdicts on a port, or, as `parted`, what they do if they do different things."""

    def build() -> torch.nn.Module:
        meet(group, "calls build()")  # without this, ranks that do different things would hang inside the port
        return port.build()

    def backward(model: torch.nn.Module) -> float:
        meet(group, "calls backward()")
        return port.backward(model)

    watch.start()
    watched = Port(port.mesh, *map(watch.unwatched, (build, port.sample_ids, backward)))
    try:
        with watch.watching_full_tensor(), watch.set_paused(False):
            verdict = answer(watched, reference)
        found = meet(group, "returns", (verdict, watch.largest, watch.gathered))
    except Parted as error:
        return {"parted": [f"{action} {value[0]!r}" if value else action for action, value in error.doing]}
    verdicts, largest, gathered = zip(*found, strict=True)
    return {"verdicts": list(verdicts), "largest": max(largest), "gathered": any(gathered)}


def try_ports(answer: Callable, cases: list[Case], references: list[Reference]) -> list[dict]:
    """Return, on this rank, the report on each port, until one has a problem."""
    watch, meshes, reports = Watch(), {}, []
    group = dist.new_group(timeout=timedelta(seconds=WAIT_S))
    for case, reference in zip(cases, references, strict=True):
        recipe = mesh_ports.draw(case)
        where = (case.data, case.tensor, recipe.places)
        if where not in meshes:
            meshes[where] = mesh_ports.new_mesh(case, recipe)
            watch.add(meshes[where])
        reports.append(try_port(answer, mesh_ports.open_port(case, meshes[where]), reference, watch, group))
        if problem_with(case, reference, reports[-1]):
            break
    watch.end()
    return reports


def in_form(case: Case, dice: random.Random, field: str = "", value: object = None) -> Case:
    """Return the case with a seed for which `field` of its recipe has this value."""
    while True:
        drawn = replace(case, seed=dice.randrange(10**6))
        if not field or getattr(mesh_ports.draw(drawn), field) == value:
            return drawn


def draw_cases(seed: int) -> list[Case]:
    """Draw the ports: the right ones first, then each fault on each mesh that can have it, in some order."""
    dice = random.Random(seed)
    right, faulty = [], []
    norms = dict(zip(mesh_ports.SHAPES, dice.sample(("plan", "hand"), 2), strict=False))
    for data, tensor in mesh_ports.SHAPES:
        by_norms = ("norms", norms[data, tensor]) if tensor > 1 else ()
        right += [in_form(Case("none", data, tensor), dice, *by_norms)]
        right += [in_form(Case("none", data, tensor, sequence=False), dice)]
        for fault in mesh_ports.FAULTS:
            if tensor == 1 and fault in ("heads", "sum"):
                continue
            field, forms = FORMS[fault] if fault in FORMS and data == tensor else ("", (None,))
            for form in forms:
                case = Case(fault, data, tensor, fault == "sum" or dice.random() < 0.5)
                faulty.append(in_form(case, dice, field, form))
    dice.shuffle(right)
    dice.shuffle(faulty)
    return right + faulty


def problem_with(case: Case, reference: Reference, report: dict) -> str:
    """Say what is wrong with the verdicts on a port, or with how they were found. Empty if nothing is."""
    alone = "What a rank sees, the others don't know unless it tells them"
    if doing := report.get("parted"):
        rank = next(rank for rank, each in enumerate(doing) if each != doing[0])
        return f"{case}: rank 0 {doing[0]}, and rank {rank} {doing[rank]}. {alone}"
    verdicts = report["verdicts"]
    first, possible = verdicts[0], ("none", *mesh_ports.FAULTS)
    if unknown := [verdict for verdict in verdicts if verdict not in possible]:
        return f"{case}: you say {unknown[0]!r}, which is not one of {', '.join(map(repr, possible))}"
    if differing := [rank for rank, verdict in enumerate(verdicts) if verdict != first]:
        rank = differing[0]
        return f"{case}: rank 0 says {first!r}, and rank {rank} {verdicts[rank]!r}. {alone}"
    if first != case.fault:
        hint = HINTS.get((case.fault, first), HINTS[case.fault])
        return f"{case}: you say {first!r}. {hint}"
    if report["gathered"]:
        return f"{case}: right, but you call full_tensor(). Compare each slice with the same slice of the reference"
    limit = max(weight.nbytes for weight in reference.weights.values())
    if report["largest"] > limit:
        moved = f"one collective outside the port's calls moves {report['largest']:,} bytes"
        hint = "Compare first, then send what you found"
        return f"{case}: right, but {moved}; the largest parameter has {limit:,}. {hint}"
    return ""


@exercise("6.4a", "the verdict on every port is right, and the same on every rank.")
def exercise_6_4a(answer: Callable) -> str:
    """A function find_fault(port, reference) -> "none" or one of mesh_ports.FAULTS, called on every rank."""
    cases = draw_cases(random.SystemRandom().randrange(10**6))
    references = [mesh_ports.reference_of(case) for case in cases]
    reports = on_ranks(try_ports, mesh_ports.NUM_RANKS, answer, cases, references)[0]
    for case, reference, report in zip(cases, references, reports, strict=False):
        if problem := problem_with(case, reference, report):
            done = f" ({reports.index(report)} of {len(cases)} ports were right)" if len(reports) > 1 else ""
            raise Wrong(problem + done)
    return f"{len(cases)} ports, {sum(case.fault == 'none' for case in cases)} of them right."
