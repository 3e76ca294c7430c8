"""The checks of lesson 1.5: the stub and plausible wrong answers are told apart from the right one, with help."""

import pytest

from shared import checks


def stub(*_):
    raise NotImplementedError


def place_of(rank, processes):
    for node, count in enumerate(processes):
        if rank < count:
            return node, rank
        rank -= count


def rank_of(node, local_rank, processes):
    return sum(processes[:node]) + local_rank


def node_command(node, hosts, nproc, arguments):
    return [
        "torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", str(nproc), "--rdzv-id", "first",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0]}:29500", "train_ddp.py", *arguments,
    ]  # fmt: skip


def changed(old: str, new: str):
    """`node_command` with one word in place of another; {node}, {host} and {n} stand for this node's."""

    def answer(node, hosts, nproc, arguments):
        words = node_command(node, hosts, nproc, arguments)
        return [new.format(node=node, host=hosts[node], n=len(hosts)) if word == old else word for word in words]

    return answer


def static_command(node, hosts, nproc, arguments):
    """As older tutorials have it."""
    return [
        "torchrun", "--nnodes", str(len(hosts)), "--nproc-per-node", str(nproc), "--node-rank", str(node),
        "--master-addr", hosts[0], "--master-port", "29500", "train_ddp.py", *arguments,
    ]  # fmt: skip


def test_right_answers_are_accepted():
    assert checks.exercise_1_5a((place_of, rank_of), strict=True)
    assert checks.exercise_1_5a((lambda rank, processes: tuple(place_of(rank, processes)), rank_of), strict=True)
    assert checks.exercise_1_5a((lambda rank, processes: list(place_of(rank, processes)), rank_of), strict=True)
    assert checks.exercise_1_5b(node_command, strict=True)


@pytest.mark.parametrize("per_node", ["--nproc_per_node={}", "--nproc-per-node={}"])
def test_other_spellings_of_the_command_are_accepted(per_node):
    def answer(node, hosts, nproc, arguments):
        return [
            "python", "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", per_node.format(nproc),
            "--rdzv_backend=c10d", f"--rdzv_endpoint={hosts[0]}", "--rdzv_id=7", "--max-restarts=2", "--local-addr",
            hosts[node], "train_ddp.py", *arguments,
        ]  # fmt: skip

    assert checks.exercise_1_5b(answer, strict=True)


@pytest.mark.parametrize(
    ("answer", "help_in_message"),
    [
        ((stub, stub), "not done yet"),
        ((place_of, stub), "not done yet"),
        ((lambda rank, processes: divmod(rank, processes[0]), rank_of), "equally many processes"),
        ((place_of, lambda node, local, processes: node * processes[0] + local), "equally many processes"),
        ((place_of, lambda node, local, processes: node * processes[node] + local), "equally many processes"),
        ((place_of, lambda node, local, processes: sum(processes[: node + 1]) + local), "count from 0"),
        ((lambda rank, processes: place_of(rank, processes)[::-1], rank_of), "place_of(1, [2, 2]) is (0, 1)"),
        ((lambda rank, processes: None, rank_of), "you say None"),
    ],
)
def test_wrong_places_are_rejected_with_help(answer, help_in_message, capsys):
    with pytest.raises(AssertionError) as error:
        checks.exercise_1_5a(answer, strict=True)
    assert help_in_message in str(error.value)
    assert checks.exercise_1_5a(answer) is False
    assert help_in_message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "help_in_message"),
    [
        (stub, "not done yet"),
        (lambda *_: None, "return a list of strings"),
        (lambda *_: [], "the list is empty"),
        (lambda *a: " ".join(node_command(*a)), "return a list of strings"),
        (lambda node, hosts, nproc, arguments: ["torchrun", "--nproc-per-node", nproc], "str(8)"),
        (lambda *a: node_command(*a)[1:], "the first word should be torchrun"),
        (lambda *a: ["torchrun", "--standalone", *node_command(*a)[1:]], "every node trains by itself"),
        (lambda *a: ["torchrun", *a[3], *node_command(*a)[1 : -len(a[3])]], "torchrun refuses it"),
        (lambda *a: [*node_command(*a), "--seed", "1"], "torchrun's options, then train_ddp.py"),
        (changed("first", "node-{node}"), "one --rdzv-id"),
        (changed("--rdzv-id", "--role"), "none where it is missing"),
        (changed("c10d", "static"), "--rdzv-backend should be c10d"),
        (static_command, "the older way: section 1"),
        (changed("2", "1"), "--nnodes should be 2"),
        (changed("gpu-1:29500", "{host}:29500"), "on node 1 (gpu-2)"),
        (changed("gpu-1:29500", "gpu-1:2950{node}"), "several ports"),
        (changed("8", "{n}"), "--nproc-per-node should be 8"),
    ],
)
def test_wrong_commands_are_rejected_with_help(answer, help_in_message, capsys):
    with pytest.raises(AssertionError) as error:
        checks.exercise_1_5b(answer, strict=True)
    assert help_in_message in str(error.value)
    assert checks.exercise_1_5b(answer) is False
    assert help_in_message in capsys.readouterr().out
