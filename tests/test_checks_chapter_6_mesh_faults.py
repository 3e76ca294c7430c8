"""The check of exercise 6.4a accepts right answers, and rejects the stub and plausible mistakes with help.

One launch of four ranks serves all of them, and the proof that the ports are what they should be.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from answers import cell, judge, stub
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import checks
from checks import chapter_6_mesh_faults as mesh_faults
from checks import mesh_ports
from shared import ranks

SOLUTION = Path(__file__).parent.parent / "06-beyond-data-parallel/solutions/04_find_the_fault_in_a_mesh.ipynb"
DRAWN = mesh_faults.draw_cases(3)
# The solution's notebook tries all of them; here, one form of each fault is enough.
CASES = [*DRAWN[:6], *{(each.fault, each.tensor == 1): each for each in DRAWN[6:]}.values()]


def answer(*changes: tuple[str, str]) -> Callable:
    """The solution, with changes, each (old, new)."""
    names = {"__name__": "lesson_6_4"}  # no module: its functions travel to the ranks as those of a notebook do
    for identity in ("imports", "slices"):
        exec(cell(SOLUTION, identity), names)
    text = cell(SOLUTION, "exercise-a-solution")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    exec(text, names)
    return names["find_fault"]


def by_neighbors(port, reference):
    """Compare ranks with each other where that is possible, and judge the scale by its ratio."""

    def on_all(value):
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, value)
        return everybody

    place = tuple(port.mesh.get_local_rank(name) for name in ("data", "tensor"))
    everybody = on_all((place, set(port.sample_ids())))
    if any((a[0] == b[0]) != (x == y) for a, x in everybody for b, y in everybody):
        return "samples"
    model = port.build()
    named = dict(model.named_parameters())
    for parameter in named.values():
        # Slices differ along a dimension over which the parameter is cut. Every one is cut over `data`.
        cut = [True, parameter.device_mesh.ndim == 2 and not parameter.placements[1].is_replicate()]
        numbers = on_all(
            (tuple(a for a, is_cut in zip(place, cut, strict=True) if is_cut), parameter.to_local().sum().item())
        )
        if len({number for _, number in numbers}) < len({where for where, _ in numbers}):
            return "weights"
    shares = on_all((place, port.backward(model)))
    if abs(sum(share for (_, column), share in shares if column == 0) - reference.loss) > 1e-9:
        return "heads"
    for parameter in named.values():
        if parameter.device_mesh.ndim == 1 or parameter.placements[1].is_replicate():
            squares = parameter.grad.to_local().square().sum().item()
            copies = [other for (row, _), other in on_all((place, squares)) if row == place[0]]
            if any(on_all(max(copies) - min(copies) > 1e-9 * max(copies))):
                return "sum"
    name, parameter = next(item for item in named.items() if item[1].device_mesh.ndim == 2)
    squares = sum(on_all(parameter.grad.to_local().square().sum().item()))
    return "none" if abs(squares / reference.gradients[name].square().sum() - 1) < 1e-9 else "scale"


def gathers(port, reference):
    model = port.build()
    next(model.parameters()).full_tensor()
    return "none"


def sends_all(port, reference):
    model = port.build()
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, [each.to_local().detach() for each in model.parameters()])
    return "none"


AGREE = "    dist.all_reduce(errors, op=dist.ReduceOp.MAX)\n"
OVERLAP = " or len(set(read_once)) < len(read_once)"
SHARES = '    dist.all_reduce(loss, group=port.mesh.get_group("data"))\n'
WEIGHTS = "if any_rank([error_of(each.detach(), reference.weights[name]) for name, each in parameters.items()]).any()"
WRONG = {
    "stub": (stub, "not done yet"),
    "each rank alone": (answer((AGREE, "")), "What a rank sees, the others don't know unless it tells them"),
    "any rank's smallest": (answer(("ReduceOp.MAX", "ReduceOp.MIN")), "computes from wrong weights is wrong too."),
    "overlap not seen": (answer((OVERLAP, "")), "can look like any other fault"),
    "only overlap": (answer(("any(of_group[group] != ids for group, ids in lists) or ", "")), "can look like"),
    "all lists differ": (
        answer(("for ids in of_group.values() for", "for _, ids in lists for")), "Which ranks of a mesh"),
    "weights not compared": (answer((WEIGHTS, "if False")), "What a rank computes from wrong weights is wrong too."),
    "own share": (answer((SHARES, "")), "Which ranks' shares make up the loss of the batch"),
    "all shares": (answer((', group=port.mesh.get_group("data"))', ")")), "Which ranks' shares make up the loss"),
    "exactly equal": (answer(("errors > 1e-9", "errors > 0")), "is the rest more than rounding?"),
    "tolerant": (answer(("errors > 1e-9", "errors > 1")), "right here"),
    "no gradients": (answer(('"scale" if wrong.all() else "sum" if wrong.any() else "none"', '"none"')), "gradients?"),
    "any is scale": (answer(("if wrong.all() else", "if wrong.any() else")), "Some gradients are right here."),
    "full_tensor": (gathers, "right, but you call full_tensor()"),
    "sends slices": (sends_all, "the largest parameter has 32,768. Compare first"),
    "another word": (lambda port, reference: "fine", "you say 'fine', which is not one of 'none', 'samples'"),
}  # fmt: skip
RIGHT = [answer(), by_neighbors]


def remembering(function: Callable, key: Callable) -> Callable:
    """Return a function that calls `function` once for all arguments with the same key."""
    known = {}

    def call(*args: object) -> object:
        if key(*args) not in known:
            known[key(*args)] = function(*args)
        return known[key(*args)]

    return call


def cheap(port: mesh_ports.Port) -> mesh_ports.Port:
    """Return a port that builds its model and computes its gradients once, for all answers."""
    built, computed = [], []

    def build():
        if not built:
            built.append(port.build())
        for parameter in built[0].parameters():
            parameter.grad = None
        return built[0]

    def backward(model):
        if not computed:
            loss = port.backward(model)
            computed.append((loss, [each.grad.detach().clone() for each in model.parameters()]))
        loss, gradients = computed[0]
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        return loss

    return mesh_ports.Port(port.mesh, build, port.sample_ids, backward)


def judge_all(answers: list, cases: list, references: list) -> tuple[list, list]:
    """Return, on this rank, the reports for each answer, and what each port computes."""
    new_mesh, open_port, reports = mesh_ports.new_mesh, mesh_ports.open_port, []
    # This process ends with this function, so nothing has to be restored.
    mesh_ports.new_mesh = remembering(new_mesh, lambda case, recipe: (case.data, recipe.places))
    mesh_ports.open_port = remembering(lambda case, mesh: cheap(open_port(case, mesh)), lambda case, mesh: case)
    for each in answers:
        try:
            reports.append(mesh_faults.try_ports(each, cases, references))
        except NotImplementedError as error:
            reports.append(error)
    return reports, mesh_ports.open_all(measure, cases, references)


def measure(port: mesh_ports.Port, reference: mesh_ports.Reference) -> dict:
    """Gather everything, and return the largest differences from the reference."""
    model = port.build()
    share = torch.tensor(port.backward(model), dtype=torch.float64)
    dist.all_reduce(share, group=port.mesh.get_group("data"))
    found = {"loss": abs(share.item() - reference.loss), "ids": port.sample_ids()}
    for what, of_one in (("weights", reference.weights), ("gradients", reference.gradients)):
        found[what] = {}
        for name, parameter in model.named_parameters():
            tensor = (parameter.detach() if what == "weights" else parameter.grad).full_tensor()
            found[what][name] = ((tensor - of_one[name]).abs().max() / of_one[name].abs().max()).item()
    return found


@pytest.fixture(scope="module")
def launched() -> list:
    """What `judge_all` returns on each rank."""
    answers = [*RIGHT, *(each for each, _ in WRONG.values())]
    references = [mesh_ports.reference_of(case) for case in CASES]
    return ranks.run(judge_all, mesh_ports.NUM_RANKS, answers, CASES, references)


@pytest.fixture
def replayed(launched, monkeypatch) -> Callable:
    """Let the check find what its ranks have done already."""
    answers = [*RIGHT, *(each for each, _ in WRONG.values())]

    def on_ranks(function, num_ranks, each, cases, references):
        assert (function, num_ranks, cases) == (mesh_faults.try_ports, mesh_ports.NUM_RANKS, CASES)
        found = [reports[answers.index(each)] for reports, _ in launched]
        if isinstance(found[0], NotImplementedError):
            raise found[0]
        return found

    monkeypatch.setattr(mesh_faults, "on_ranks", on_ranks)
    monkeypatch.setattr(mesh_faults, "draw_cases", lambda seed: CASES)
    return lambda each: each


test_6_4a = judge(checks.exercise_6_4a, RIGHT, WRONG, prepare="replayed")


def test_right_ports_compute_what_one_process_does_and_each_fault_shows_where_the_lesson_says(launched):
    by_case = zip(CASES, *(ports for _, ports in launched), strict=True)
    for case, *of_ranks in by_case:
        off = {
            what: [value > 1e-9 for found in of_ranks for value in found[what].values()]
            for what in ("weights", "gradients")
        }
        worst = max(max(found["gradients"].values()) for found in of_ranks)
        loss = max(found["loss"] for found in of_ranks)
        assert any(off["weights"]) == (case.fault == "weights"), case
        assert (loss < 1e-9) if case.fault in ("none", "scale", "sum") else (loss > 1e-4), case
        assert (worst < 1e-9) if case.fault == "none" else (worst > 1e-3), case
        assert all(off["gradients"]) or case.fault in ("none", "sum"), case
        assert case.fault != "sum" or not all(off["gradients"]), case


def test_the_check_tries_each_fault_on_each_mesh_that_can_have_it():
    for seed in range(5):
        cases = mesh_faults.draw_cases(seed)
        assert [case.fault for case in cases[:6]] == ["none"] * 6 and len(cases) == 23
        right = {(case.data, case.tensor, case.sequence) for case in cases[:6]}
        assert right == {(*shape, sequence) for shape in mesh_ports.SHAPES for sequence in (True, False)}
        assert {mesh_ports.draw(case).norms for case in cases[:6]} == {"", "plan", "hand"}
        faults = {(case.data, case.tensor, case.fault) for case in cases[6:]}
        assert len(faults) == 13 and not {(4, 1, "heads"), (4, 1, "sum")} & faults


@pytest.mark.parametrize(("case", "because"), [
    ({"fault": "heads", "data": 4, "tensor": 1}, "a port with tensor=1 can't have the fault 'heads'"),
    ({"fault": "sum", "sequence": False}, "without sequence parallelism"),
    ({"data": 3, "tensor": 1}, "possible are 2 and 2, 1 and 4, 4 and 1"),
    ({"fault": "tied"}, "unknown fault 'tied'; possible are none, float32, samples"),
])  # fmt: skip
def test_a_case_that_cannot_be_is_refused(case, because):
    with pytest.raises(ValueError, match=because):
        mesh_ports.Case(**case)


def cut_and_save(preserve: bool, path: Path) -> tuple:
    """Cut a matrix on a mesh of the ranks 1 and 0, by hand and by FSDP2, and save FSDP2's slices."""
    mesh = DeviceMesh("cpu", [1, 0], preserve_rank_order=preserve)
    layer = nn.Linear(3, 4, bias=False)
    layer.weight.data = torch.arange(12.0).view(4, 3)
    by_hand = distribute_tensor(layer.weight.data.clone(), mesh, [Shard(0)], src_data_rank=None)
    weight = fully_shard(layer, mesh=mesh).weight
    dcp.save({"weight": weight}, checkpoint_id=path)
    agree = torch.equal(by_hand.to_local(), weight.to_local()), (mesh.get_local_rank(),) == mesh.get_coordinate()
    return by_hand.full_tensor(), weight.detach().full_tensor(), *agree


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process loads, on purpose
@pytest.mark.parametrize("preserve", [False, True])
def test_a_mesh_whose_ranks_do_not_ascend_swaps_slices_unless_it_preserves_their_order(preserve, tmp_path):
    whole = torch.arange(12.0).view(4, 3)
    expected = whole if preserve else whole.roll(2, 0)
    for by_hand, of_fsdp2, same_slices, group_rank_is_coordinate in ranks.run(cut_and_save, 2, preserve, tmp_path):
        assert torch.equal(by_hand, expected)
        assert torch.equal(of_fsdp2, whole)  # FSDP2 cuts and gathers by the ranks of the group
        assert (same_slices, group_rank_is_coordinate) == (preserve, preserve)
    loaded = {"weight": torch.zeros(4, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["weight"], expected)
