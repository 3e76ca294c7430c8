"""explain_hang.py of chapter 4 on logs, stacks and dumps that are made up, in every format that it claims to read.

The lines imitate real ones. Those that come from a public thread, named by its repository and number, have its ranks,
calls and numbers. tests/all/test_hangs.py has ranks that really hang.
"""

import importlib
import json
import pickle
import subprocess
import sys

import pytest
from notebook_rules import ROOT

TOOL = ROOT / "04-ray-in-production/explain_hang.py"
ALL_FOUR = "[0, 1, 2, 3]"


@pytest.fixture
def explain(monkeypatch, tmp_path):
    """Writes files, {name: content}, and returns what explain_hang.py says of them."""
    monkeypatch.syspath_prepend(TOOL.parent)
    tool = importlib.import_module("explain_hang")

    def run(files: dict[str, str | bytes], reverse: bool = False) -> dict:
        paths = [tmp_path / name for name in files]
        for path, content in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return tool.explain(paths[::-1] if reverse else paths)

    return run


def says(answer: dict) -> tuple:
    return answer["ranks"], answer["certainty"], answer["rule"]


# --- Dumps ---


def call(
    number: int, op: str = "all_reduce", size: int = 4, over: bool = True, group=("0", "default_pg"), **more
) -> dict:
    """An entry of gloo's flight recorder; with `backend="nccl"` one of NCCL's."""
    backend = more.pop("backend", "gloo")
    entry = {"process_group": group, "collective_seq_id": number, "profiling_name": f"{backend}:{op}", "is_p2p": False}
    entry |= {"input_sizes": [[size]], "input_dtypes": ["Float"], "retired": over}
    entry["state"] = "completed" if over and backend == "nccl" else "scheduled"
    return entry | more


def dump(*calls: dict, groups: dict[str, str] | None = None) -> bytes:
    config = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in (groups or {"0": ALL_FOUR}).items()}
    return pickle.dumps({"version": "2.10", "pg_config": config, "entries": list(calls)})


def dumps(*calls_of_ranks: list[dict], **options) -> dict[str, bytes]:
    return {f"rank_{rank}": dump(*calls, **options) for rank, calls in enumerate(calls_of_ranks)}


ONCE, WAITS, BARRIER = call(1), call(2, over=False), call(2, "barrier", over=False)
HERE, LATE = [ONCE, WAITS], [ONCE]
HANGS = {  # the files, the ranks that the verdict names, and its rule
    "one calls something else": (dumps(HERE, HERE, [ONCE, BARRIER], HERE), [2], "first_difference"),
    "the odd one is rank 0": (dumps([BARRIER], [WAITS], [WAITS], [WAITS]), [0], "first_difference"),
    "a different size": (dumps([WAITS], [call(2, size=5)], [WAITS], [WAITS]), [1], "first_difference"),
    "two against two": (dumps([WAITS], [WAITS], [BARRIER], [BARRIER]), [], "first_difference"),
    "one is behind": (dumps(HERE, HERE, HERE, LATE), [3], "ranks_behind"),
    "one is ahead": (dumps(HERE, LATE, LATE, LATE), [0], "ranks_behind"),
    "nobody is behind": (dumps([WAITS], [WAITS], [WAITS], [WAITS]), [], "ranks_behind"),
    "nothing waits": (dumps(LATE, LATE, LATE, LATE), [], "ranks_behind"),
    "a dump is missing": ({f"rank_{rank}": dump(WAITS) for rank in (0, 2, 3)}, [1], "missing_dump"),
    "most dumps are missing": ({"rank_2": dump(WAITS)}, [], "ranks_behind"),
}


@pytest.mark.parametrize("name", HANGS)
def test_dumps_in_any_order(name, explain):
    files, ranks, rule = HANGS[name]
    answers = [explain(files, reverse) for reverse in (False, True)]
    assert answers[0] == answers[1]
    assert answers[0]["ranks"] == ranks and answers[0]["rule"] == rule, answers[0]
    sure = "possible" if name == "one is ahead" else "likely"  # or the others are slow
    assert answers[0]["certainty"] in ([sure] if ranks else ["cannot tell", "cannot tell which rank"])


def test_a_verdict_names_the_operation_both_readings_and_what_to_collect(explain):
    answer = explain(HANGS["one calls something else"][0])
    assert answer["operation"] == "all_reduce [[4]] Float, call 2 of default_pg"
    assert answer["because"].endswith("ranks 0, 1, 3: all_reduce [[4]] Float; rank 2: barrier [[4]] Float")
    assert "left a call out" in answer["readings"] and "one too many" in answer["readings"]
    assert "py-spy" in answer["collect"]
    tie = explain(HANGS["two against two"][0])
    assert tie["certainty"] == "cannot tell which rank"
    assert tie["operation"] == "all_reduce [[4]] Float against barrier [[4]] Float, call 2 of default_pg"
    assert "number has moved" in explain(HANGS["one is behind"][0])["collect"]  # slow looks like hung


def test_of_a_thousand_ranks_one_is_behind(explain):
    everyone = {"groups": {"0": str(list(range(1000)))}}
    files = {f"rank_{rank}": dump(*(LATE if rank == 640 else HERE), **everyone) for rank in range(1000)}
    answer = explain(files)
    assert says(answer) == ([640], "likely", "ranks_behind")
    assert "rank 640 waits in no call; waiting: ranks 0-639, 641-999: all_reduce" in answer["because"]


def test_the_recorder_forgets_and_only_what_all_ranks_remember_is_compared(explain):
    long = [call(number) for number in range(1, 9)]
    answer = explain(dumps([*long, call(9, over=False)], long[4:], [*long[4:], call(9, over=False)], long[6:]))
    assert answer["ranks"] == [1, 3] and answer["rule"] == "ranks_behind"


def test_groups_are_followed_and_who_is_outside_is_not_named(explain):
    group = ("5", "trainers")
    first, second = call(1, group=group), call(2, group=group, over=False)
    three = {"groups": {"0": ALL_FOUR, "5": "[0, 1, 2]"}}
    files = dumps([first, second], [first], [first, second], [call(1)], **three)
    assert says(explain(files)) == ([1], "likely", "ranks_behind")
    # Two groups in opposite order: everybody waits.
    a, b = (call(1, group=(name, ""), over=False) for name in "56")
    both = {"groups": {"0": ALL_FOUR, "5": ALL_FOUR, "6": ALL_FOUR}}
    answer = explain(dumps([a], [a], [a], [b], **both))
    assert answer["ranks"] == [3] and answer["operation"] == "all_reduce [[4]] Float, call 1 of group 5"
    # The difference that comes first counts, in whichever group.
    x, y = call(1, group=("6", "")), call(1, "barrier", group=("6", ""))
    late = [call(1, "broadcast", over=False), call(1, over=False)]
    answer = explain(dumps([x, late[1]], [x, late[0]], [y, late[1]], [x, late[1]], **both))
    assert answer["ranks"] == [2] and answer["operation"].endswith("group 6")


def test_what_is_different_without_being_wrong(explain):
    uneven = [[call(1, "all_to_all", size), call(2, over=False)] for size in (3, 4, 4)] + [[call(1, "all_to_all", 5)]]
    assert explain(dumps(*uneven))["ranks"] == [3]
    talks = call(0, "send 0->1", is_p2p=True)
    assert explain(dumps([talks, WAITS], [call(0, "recv 1<-0"), WAITS], [WAITS], [call(1)]))["ranks"] == [3]
    # DETAIL on gloo records calls without the name of their group.
    nameless = [call(1, group=("", "")), call(1, "barrier", group=("", ""))]
    assert says(explain(dumps(nameless[:1], nameless[1:], nameless[1:], nameless[1:]))) == (
        [],
        "cannot tell",
        "ranks_behind",
    )


def test_a_dump_of_nccl_and_one_in_json(explain):
    over, waits = call(1, backend="nccl"), call(2, backend="nccl", over=False, state="started")
    waits |= {"retired": True}  # by the watchdog, after the timeout
    files = dumps([over, waits], [over, waits], [over], [over, waits])
    assert says(explain(files)) == ([2], "likely", "ranks_behind")
    as_json = {f"{name}.json": json.dumps(pickle.loads(content)) for name, content in files.items()}
    assert explain(as_json) == explain(files)
    host = {f"nccl_trace_rank_node02_{name[-1]}": content for name, content in files.items()}
    assert explain(host)["ranks"] == [2]


def test_dumps_that_gloo_wrote_itself(explain):
    """They lack the groups' names, and have the ranks of the group that was made last."""
    files = dumps([call(1), WAITS], [call(1), WAITS], [call(1)], groups={"": "[0, 1, 2]"})
    assert says(explain(files)) == ([2], "likely", "ranks_behind")
    other = ("1", "undefined")
    files = dumps([call(1), call(1, group=other, over=False)], [call(1)], groups={"": "[0, 1]"})
    assert explain(files)["certainty"] == "cannot tell"  # who is in that group?


# --- Stacks ---


def py_spy(*frames: str, thread: str = "MainThread") -> str:
    lines = "".join(f"    {frame}\n" for frame in frames)
    other = '\nThread 9 (idle): "pt_autograd_0"\n    wait (threading.py:331)\n'
    head = "Process 7: python train.py --rank 5\nPython v3.11.2 (/usr/bin/python3.11)\n\n"
    return f'{head}Thread 7 (idle): "{thread}"\n{lines}{other}'


IN_REDUCE = py_spy(
    "all_reduce (torch/distributed/distributed_c10d.py:4181)", "wrapper (torch/distributed/c10d_logger.py:83)",
    "step (train.py:12)", "<module> (train.py:44)",
)  # fmt: skip
IN_BARRIER = py_spy("barrier (torch/distributed/distributed_c10d.py:6614)", "<module> (train.py:50)")
LOADS = py_spy("select (selectors.py:415)", "_get_data (torch/utils/data/dataloader.py:1295)", "<module> (train.py:40)")
IN_BACKWARD = py_spy("_engine_run_backward (torch/autograd/graph.py:829)", "step (train.py:20)")
FAULTHANDLER = (
    'Fatal\n\nCurrent thread 0x00007f (most recent call first):\n  File "/app/train.py", line 40 in <module>\n'
)


def stacks(*texts: str) -> dict[str, str]:
    return {f"stack_{rank}.txt": text for rank, text in enumerate(texts)}


STACKS = {  # the ranks, the certainty, and a piece of the operation
    "one loads data": (stacks(IN_REDUCE, IN_REDUCE, LOADS), [2], "possible", "all_reduce in step (train.py:12)"),
    "one is in another line": (stacks(IN_BARRIER, IN_REDUCE, IN_REDUCE), [0], "possible", "all_reduce"),
    "one waits alone": (stacks(IN_REDUCE, LOADS, LOADS), [], "cannot tell which rank", "all_reduce"),
    "one against one": (stacks(IN_BACKWARD, IN_BARRIER), [], "cannot tell which rank", "_engine_run_backward"),
    "all in one line": (stacks(IN_REDUCE, IN_REDUCE), [], "cannot tell", None),
    "of faulthandler": (stacks(IN_REDUCE, FAULTHANDLER, IN_REDUCE), [1], "possible", "all_reduce"),
    "of the debug server": ({"stacks.txt": "".join(f"=== Rank {r}: http://host:1 ===\n{text}" for r, text in enumerate(
        [IN_REDUCE, LOADS, IN_REDUCE]))}, [1], "possible", "all_reduce"),
}  # fmt: skip


@pytest.mark.parametrize("name", STACKS)
def test_stacks_in_any_order(name, explain):
    files, ranks, certainty, operation = STACKS[name]
    answers = [explain(files, reverse) for reverse in (False, True)]
    assert answers[0] == answers[1]
    assert says(answers[0]) == (ranks, certainty, "in_stacks"), answers[0]
    assert operation in answers[0]["operation"] if operation else answers[0]["operation"] is None


# --- Logs ---


def timeout(rank: int, number: int = 12, op: str = "ALLREDUCE", sizes: str = ", NumelIn=8, NumelOut=8") -> str:
    work = f"WorkNCCL(SeqNum={number}, OpType={op}{sizes}, Timeout(ms)=600000)"
    end = "ran for 600029 milliseconds before timing out.\n"
    return f"[Rank {rank}] Watchdog caught collective operation timeout: {work} {end}"


def watchdog(version: str, rank: int, **work) -> str:
    """What the watchdog of a rank logs, in a version's format."""
    stamp, number = f"[rank{rank}]:[E123 01:02:03.456 ProcessGroupNCCL.cpp:", work.get("number", 12)
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    counts = f"last enqueued NCCL work: {number + 2}, last completed NCCL work: {number - 1}.\n"
    detected = f"Exception (either an error or timeout) detected by watchdog at work: {number}, {counts}"
    return {
        "2.1": f"[E ProcessGroupNCCL.cpp:474] {timeout(rank, sizes='', **work)}",
        "2.2": f"[E ProcessGroupNCCL.cpp:523] {timeout(rank, **work)}",
        "2.3": f"{stamp}563] {timeout(rank, **work)}",
        "2.4": f"{stamp}607] {timeout(rank, **work)}{stamp}1664] [PG 1 Rank {rank}] {detected}",
        "2.5": f"{stamp}616] {timeout(rank, **work)}{stamp}1785] {group} {detected}",
        "2.6": f"{stamp}629] {timeout(rank, **work)}{stamp}2168] {group}  failure detected by watchdog at work "
        f"sequence id: {number} PG status: last enqueued work: {number + 2}, last completed work: {number - 1}\n",
    }[version]


def dump_signal(rank: int, enqueued: int, completed: int) -> str:
    where = f"[rank{rank}]:[E123 01:02:03.456 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    signal = (
        "Received a dump signal due to a collective timeout from  rank 2 and we will try our best to dump the debug"
    )
    return (
        f"{where} {signal} info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}.This is\n"
    )


@pytest.mark.parametrize("version", ["2.1", "2.2", "2.3", "2.4", "2.5", "2.6"])
def test_a_watchdogs_line_comes_from_a_victim(version, explain):
    same = "".join(watchdog(version, rank) for rank in (3, 0, 2))
    answer = explain({"train.log": same})
    assert says(answer) == ([], "cannot tell", "in_logs") and answer["operation"] is None
    assert answer["because"].startswith("ranks 0, 2, 3: ALLREDUCE, call 12. A log does not say whom")
    assert "dumps of all ranks" in answer["collect"] and "stacks of all ranks" in answer["collect"]
    cut = same.replace(", OpType", ",\n  OpType").replace("(SeqNum", "(\nSeqNum").replace("] Watchdog", "]\n Watchdog")
    wrapped = explain({"train.log": cut})
    assert wrapped["because"] == answer["because"]
    different = same + watchdog(version, 1, op="_ALLGATHER_BASE")
    answer = explain({"train.log": different})
    assert says(answer) == ([], "cannot tell which rank", "in_logs")
    assert "rank 1: _ALLGATHER_BASE, call 12" in answer["operation"]


def test_the_watchdog_of_torch_2_15_comes_from_a_victim_and_names_no_operation(explain):
    """This backend, nccl2, is the default of torch 2.15. We know its lines from the library alone."""
    start = "[rank{}]:[E123 01:02:03.456 "
    line = f"{start}WorkNCCL.cpp:99] Watchdog caught collective operation timeout: NCCL operation timed out\n"
    reason = "timeout - timeout watchdog detected operation timeout"
    line += f"{start}ProcessGroupNCCL.cpp:9] Aborting process on rank {{}} due to {reason}\n"
    answer = explain({"train.log": "".join(line.format(*[rank] * 3) for rank in (0, 1)) + "[rank2]: step 7\n"})
    assert says(answer) == ([], "cannot tell", "in_logs") and answer["operation"] is None
    assert answer["because"].startswith("ranks 0, 1: a call that the line does not name. A log does not say whom")
    assert "rank 2 reports nothing" in answer["because"] and "dumps of all ranks" in answer["collect"]


@pytest.mark.parametrize("version", ["2.5", "2.6"])
def test_a_rank_that_waits_for_nothing_while_the_watchdogs_of_others_report(version, explain):
    victims = "".join(watchdog(version, rank) for rank in (0, 2, 3))
    answer = explain({"train.log": victims + dump_signal(1, 11, 11)})
    assert says(answer) == ([1], "possible", "in_logs") and answer["operation"] == "ALLREDUCE, call 12"
    assert explain({"train.log": victims + dump_signal(1, 14, 11)})["ranks"] == []  # it waits, too
    assert explain({"train.log": dump_signal(0, 11, 11) + dump_signal(1, 11, 11)})["ranks"] == []  # in another group
    alone = watchdog(version, 0) + "".join(dump_signal(rank, 11, 11) for rank in (1, 2, 3))
    assert explain({"train.log": alone})["ranks"] == []  # rank 0 may have made a call too many


def finger(rank: int, op: str, shape: str = "4", number: int = 3) -> str:
    devices = "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, memory_format=(nullopt))"
    tensors = f", OpType={op}, TensorShape=[{shape}], TensorDtypes=Float, {devices}" if shape else f"OpType={op}"
    return f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber={number}{tensors})"


def mismatch(own: str, other: str) -> str:
    text = f"Detected mismatch between collectives on ranks. {own}, but {other}.Collectives differ in the following"
    return f"[rank{own.split()[1]}]: RuntimeError: {text} aspects: Op type: ...\n"


GARBAGE = finger(0, "GATHER", shape="", number=0)  # what a barrier's report says of the other rank
RAS = """
#0-0 (fa93) MISMATCH
  Communicator ranks have different AllReduce operation counts
  {} ranks have launched up to operation 64{}
  2 ranks have launched up to operation 643
  Rank 6 -- GPU 6 managed by process 11 on node 10.0.0.1
  Rank 7 -- GPU 7 managed by process 12 on node 10.0.0.1
"""
DESYNC = """[rank0]:[E123 01:02:03.4 ProcessGroupNCCL.cpp:1937] Rank 0
\t - [0] Timeout at collective: ALLREDUCE, #31
\t - To our best knowledge, {}
\t - Snapshot of ranks' latest states:
\t   #18 finished ranks:
\t     [5] finished ALLREDUCE
\t   #31 started ranks:
\t     [0, 1, 2] started ALLREDUCE
"""
LAGGING = DESYNC.format("the lagging/dead/mismatched ranks that caused the desync are:\n\t   - [{}")
NEVER = DESYNC.format("ranks [3] are the lagging ranks that caused this timeout. They never joined any collectives")
WAITS_FOR_0 = (
    "[rank1]: RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for "
    "send/recv from rank 0. Please check rank 0 logs for faulty rank.\n"
)
IN_A_BARRIER = finger(1, "BARRIER", "", 7)
FOUR_FLOATS = "TensorShape=[4], TensorDtypes=Float"
REPORTS = {  # the log, the ranks and the operation of the verdict
    "desync": (LAGGING.format("5] finished collective #18, but didn't join collective #19"), [5], "ALLREDUCE"),
    "desync of two": (LAGGING.format("5, 6] joined but didn't finish collective #18"), [5, 6], "ALLREDUCE"),
    "never joined": (NEVER, [3], "ALLREDUCE"),
    "barrier": ("RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 8000 ms\n", [2, 3], None),
    "barrier, rank 0": ("[rank0]: starts\n" + WAITS_FOR_0, [0], None),
    "barrier, rank 0's log is missing": (WAITS_FOR_0, [], None),
    "fingerprints": (
        "".join(mismatch(finger(rank, "ALLREDUCE"), finger(2, "BROADCAST")) for rank in (0, 1, 3)),
        [2],
        f"ALLREDUCE, {FOUR_FLOATS}",
    ),
    "fingerprints, and what a barrier says of others": (
        mismatch(IN_A_BARRIER, GARBAGE)
        + mismatch(finger(2, "BARRIER", "", 7), GARBAGE)
        + mismatch(finger(0, "ALLREDUCE"), IN_A_BARRIER),
        [0],
        "BARRIER",
    ),
    "fingerprints, two": (
        mismatch(finger(1, "ALLREDUCE"), finger(0, "BROADCAST")),
        [],
        f"ALLREDUCE, {FOUR_FLOATS} against BROADCAST, {FOUR_FLOATS}",
    ),
    "RAS, ahead": (RAS.format(30, 0), [], "AllReduce"),
    "RAS, behind": (RAS.format(30, 5), [6, 7], "AllReduce"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_explicit_reports(name, explain):
    text, ranks, operation = REPORTS[name]
    answer = explain({"train.log": text})
    assert answer["rule"] == "explicit_reports" and answer["ranks"] == ranks, answer
    assert answer["operation"] == operation
    assert (answer["certainty"] == "likely") == bool(ranks)
    victims = "".join(watchdog("2.6", rank) for rank in (1, 2, 3))
    assert explain({"a.log": victims, "train.log": text, "stack_0.txt": IN_REDUCE})["ranks"] == ranks  # it comes first


GLOO = "[rank{}]: RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation\n"


def test_gloos_errors_name_nobody_and_a_rank_with_an_error_of_its_own_is_named(explain):
    victims = "".join(GLOO.format(rank) for rank in range(3))
    assert says(explain({"train.log": victims})) == ([], "cannot tell", "in_logs")
    silent = explain({"train.log": victims + "[rank3]: training starts\n"})  # a hint, and no verdict
    assert says(silent) == ([], "cannot tell", "in_logs") and "rank 3 reports nothing" in silent["because"]
    answer = explain({"train.log": victims + "[rank3]: ZeroDivisionError: division by zero\n"})
    assert says(answer) == ([3], "possible", "in_logs") and "division by zero" in answer["because"]
    # torchrun's --log-dir has a folder per rank
    files = {f"attempt_0/{rank}/stderr.log": GLOO.format(rank)[9:] for rank in range(3)}
    files["attempt_0/3/stderr.log"] = "Traceback (most recent call last):\nValueError: no such file\n"
    assert says(explain(files)) == ([3], "possible", "in_logs")


# --- Public threads: what their excerpts say, and what the tool says of it ---

WATCHDOGS = {  # all ranks of the excerpt report the same call, so it names nobody: format, operation, number, ranks
    "OFA-Sys/OFA#271": ("2.1", "ALLREDUCE", 469508, [1, 2, 3, 5, 6, 7]),
    "huggingface/picotron_tutorial#6": ("2.2", "ALLREDUCE", 1, [1, 2, 4, 5, 7]),
    "OpenRLHF/OpenRLHF#427": ("2.3", "_ALLGATHER_BASE", 57599, [3]),
    "vllm-project/vllm#6042": ("2.3", "GATHER", 158046, [1]),
    "Project-MONAI/model-zoo#685": ("2.4", "ALLREDUCE", 7, [0]),
    "hiyouga/LlamaFactory#6269": ("2.4", "_REDUCE_SCATTER_BASE", 7753, [0, 3, 4]),
    "hiyouga/LlamaFactory#7396": ("2.4", "ALLREDUCE", 1580, [0, 2, 4]),
    "sgl-project/sglang#1693": ("2.4", "_ALLGATHER_BASE", 9141, [1, 4]),
    "XPixelGroup/BasicSR#737": ("2.5", "ALLREDUCE", 808, [0, 1, 2]),
    "mlfoundations/open_clip#1024": ("2.5", "ALLGATHER", 14217, [4, 5, 7]),
    "modelscope/DiffSynth-Studio#458": ("2.5", "COALESCED", 610, [4, 6]),
    "sgl-project/sglang#3709": ("2.5", "ALLREDUCE", 91885, [4]),
    "ecmwf/WeatherGenerator#1572": ("2.6", "_ALLGATHER_BASE", 1090479, [2]),
    "hiyouga/EasyR1#300": ("2.6", "ALLREDUCE", 1, [4]),
    "modelscope/DiffSynth-Engine#51": ("2.6", "BROADCAST", 4, [1]),
}


@pytest.mark.parametrize("thread", WATCHDOGS)
def test_watchdogs_of_public_threads_name_nobody(thread, explain):
    version, op, number, ranks = WATCHDOGS[thread]
    answer = explain({"train.log": "".join(watchdog(version, rank, op=op, number=number) for rank in ranks)})
    assert says(answer) == ([], "cannot tell", "in_logs") and answer["operation"] is None
    assert answer["because"].startswith(f"{importlib.import_module('explain_hang').names(ranks)}: {op}, call {number}.")


def cut(text: str, width: int) -> str:
    """The text as a terminal of this width shows it."""
    return "".join(text[at : at + width] + "\n" for at in range(0, len(text), width))


def seen(rank: int, op: str, number: int, where: str) -> str:
    """What a watchdog has seen, after whatever stands before it in the thread."""
    return where + timeout(rank, number, op)


DEFAULT = "[PG ID 0 PG GUID 0(default_pg) Rank {}]"
STUCK = f"[rank6]:[E429 01:02:03.4 ProcessGroupNCCL.cpp:1743] {DEFAULT.format(6)} ProcessGroupNCCL's watchdog got stuck"
SUMMARY = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : {} (local_rank: {})
  exitcode  : {} (pid: 7)
  error_file: <N/A>
"""
EXCERPTS = {  # the thread: its lines, the ranks and the certainty of the verdict, and what it says of calls
    "pytorch/pytorch#118369": (
        seen(0, "ALLREDUCE", 96120, "Epoch 0:   6%|") + timeout(0, 96117) + timeout(7, 64088),
        [], "cannot tell which rank", "rank 0: ALLREDUCE, call 96117 and ALLREDUCE, call 96120; rank 7: ALLREDUCE",
    ),
    "agiresearch/InstructGLM#3": (timeout(0, 49, sizes="")[9:], [], "cannot tell", "rank ?: ALLREDUCE, call 49"),
    "NVIDIA/Megatron-LM#1207": ("# [BUG] " + timeout(0, 5)[9:], [], "cannot tell", "rank ?: ALLREDUCE, call 5"),
    "HKUDS/GraphGPT#44": (
        "[E ProcessGroupNCCL.cpp:915] [Rank 1] NCCL watchdog thread terminated with \nexception: "
        + timeout(1, 778778).replace("(S", "(\nS").replace("000)", "000\n)")
        + timeout(1, 778778).replace("pT", "pT\n"),
        [], "cannot tell", "rank 1: ALLREDUCE, call 778778.",
    ),
    "mila-iqia/milabench#269": (
        "".join(seen(rank, "REDUCE", 2070, f"node-4 [stderr] [rank{rank}]:[E909 01:02:03.4] ").replace(": W", ": \nW")
                for rank in (11, 12, 14, 15)),
        [], "cannot tell", "ranks 11, 12, 14, 15: REDUCE, call 2070.",
    ),
    "huggingface/open-r1#620": (
        "".join(cut(seen(rank, "BROADCAST", 4, f"[rank{rank}]:[E424 01:11:21.160832730 Process.cpp:629] "), 128)
                for rank in range(1, 7)),
        [], "cannot tell", "ranks 1-6: BROADCAST, call 4.",
    ),
    "modelscope/ms-swift#5409": (  # a status line of the terminal has overwritten a piece of rank 2's
        watchdog("2.6", 0, op="_ALLGATHER_BASE", number=137429)
        + watchdog("2.6", 2, op="_ALLGATHER_BASE", number=137429).replace("SE, NumelI", "[451/1919]\n"),
        [], "cannot tell", "_ALLGATHER_BASE, call 137429.",
    ),
    "NVIDIA/nccl#1409": (
        watchdog("2.4", 7, op="BROADCAST", number=80078) + watchdog("2.4", 3, number=80078),
        [], "cannot tell which rank", "rank 3: ALLREDUCE, call 80078; rank 7: BROADCAST, call 80078",
    ),
    "NVIDIA/nccl#1610": (  # two groups, in each of which the rank has another number
        seen(1, "ALLTOALL_BASE", 216, "12:54 [rank13]:[E218 01:02:03.4] ")
        + seen(1, "ALLREDUCE", 57, "12:54 [rank15]:[E218 01:02:03.4] "),
        [], "cannot tell which rank", "rank 13: ALLTOALL_BASE, call 216; rank 15: ALLREDUCE, call 57",
    ),
    "KaiqiangXiong/CL-MVSNet#14": (
        watchdog("2.6", 0, number=716) + dump_signal(0, 747, 715), [], "cannot tell", "rank 0: ALLREDUCE, call 716.",
    ),
    "snowflakedb/ArcticTraining#219": (
        watchdog("2.6", 2, op="_ALLGATHER_BASE", number=120049) + STUCK.replace("6]", "7]"),
        [], "cannot tell", "rank 2: _ALLGATHER_BASE, call 120049.",
    ),
    "om-ai-lab/VLM-R1#257": (cut(STUCK, 116), [], "cannot tell", ""),
    "OpenRLHF/OpenRLHF#1126": (
        watchdog("2.6", 7, number=460631) + dump_signal(2, 460631, 460630) + dump_signal(5, 460631, 460630),
        [], "cannot tell", "rank 7: ALLREDUCE, call 460631.",
    ),
    "lsdefine/simple_GRPO#46": (  # the timeout is in a group of which the default group's numbers say nothing
        watchdog("2.6", 2, number=45390).replace("[PG ID 0 PG GUID 0(default_pg)", "[PG ID 1 PG GUID 1")
        + dump_signal(2, 136, 136) + dump_signal(5, 136, 136),
        [], "cannot tell", "rank 2: ALLREDUCE, call 45390.",
    ),
    "vllm-project/vllm-omni#2928": (
        dump_signal(1, 233659, 233659) + dump_signal(0, 233659, 233659), [], "cannot tell", "",
    ),
    "PrimeIntellect-ai/prime-rl#3186": (dump_signal(0, 1261, 1259), [], "cannot tell", ""),
    "meta-pytorch/torchtune#2651": (dump_signal(7, 9387, 9386) + dump_signal(6, 9387, 9386), [], "cannot tell", ""),
    "hiyouga/LlamaFactory#8261": (dump_signal(1, 6, 6) + dump_signal(6, 6, 6), [], "cannot tell", ""),
    "modelscope/ms-swift#6301": (dump_signal(2, 79209, 79196), [], "cannot tell", ""),
    "pytorch/pytorch#152623": (
        watchdog("2.6", 0, number=241)
        + LAGGING.format("7] finished collective #182, but didn't join collective #183 (count from 1)"),
        [7], "likely", "ALLREDUCE",
    ),
    "NVIDIA/nccl#849": (
        "RuntimeError: [Rank 0]: Ranks 4, 5, 6, 7 failed to pass monitoredBarrier in 2000000 ms\n",
        [4, 5, 6, 7], "likely", "a report names ranks 4-7 as missing",
    ),
    "HorizonRobotics/RoboOrchardLab#33": (  # the launcher names rank 1, which waited for rank 0
        WAITS_FOR_0[9:] + "Original exception:\n" + GLOO.format(1)[9:] + SUMMARY.format(1, 1, 1),
        [], "cannot tell", "all wait for rank 0, see its log",
    ),
    "pytorch/pytorch#121606": (WAITS_FOR_0[9:].replace("Rank 1", "Rank 2"), [], "cannot tell", "all wait for rank 0"),
    "aurekaresearch/OpenDDE#23": (
        mismatch(*(finger(rank, "_ALLGATHER_BASE", f"359, 1, {1434 + rank}, 16", 0) for rank in (1, 2)))[9:],
        [], "cannot tell which rank", "_ALLGATHER_BASE, TensorShape=[359, 1, 1435, 16], TensorDtypes=Float against",
    ),
    "modelscope/ms-swift#9443": (
        mismatch(finger(1, "ALLREDUCE", "195812480", 3104), finger(0, "ALLREDUCE", "51123456", 3104)),
        [], "cannot tell which rank", "ALLREDUCE, TensorShape=[195812480], TensorDtypes=Float against ALLREDUCE",
    ),
    "EchoseChen/SPA-VL-RLHF#2": (
        mismatch(finger(0, "BROADCAST", "33554432", 14370), finger(2, "BROADCAST", "38838272", 14370))[9:],
        [], "cannot tell which rank", "BROADCAST, TensorShape=[33554432], TensorDtypes=Float against BROADCAST",
    ),
    "bghira/SimpleTuner#2712": (
        mismatch(finger(1, "ALLGATHER", "1", 101), finger(7, "REDUCE", "", 0))[9:],
        [], "cannot tell which rank", "ALLGATHER, TensorShape=[1]",
    ),
    "pytorch/pytorch#148976": (  # a bug of DETAIL, and no mismatch
        mismatch(finger(1, "BARRIER", "", 1), finger(2, "BARRIER", "", 0)), [], "cannot tell which rank", "BARRIER",
    ),
    "NVIDIA/nccl#1911": (
        RAS.replace("AllReduce", "AllGather").format(30, 1).replace("Rank 6", "Rank 12").replace("Rank 7", "Rank 13"),
        [], "cannot tell which rank", "ranks 12, 13: ahead of the others",
    ),
    "pytorch/gloo#511": ("[trainer22|6]:" + GLOO.format(6)[9:], [], "cannot tell", "all errors come from ranks that"),
    "Intellindust-AI-Lab/DEIMv2#65": (GLOO.format(0)[9:], [], "cannot tell", "all errors come from ranks that"),
    "czp16/Bridge-LLM-reasoning#1": (SUMMARY.format(1, 1, -6), [], "cannot tell", ""),
}  # fmt: skip


def test_two_of_47_public_threads_name_a_rank():
    assert len(WATCHDOGS) + len(EXCERPTS) == 47
    named = {thread for thread, (_, ranks, *_) in EXCERPTS.items() if ranks}
    assert named == {"pytorch/pytorch#152623", "NVIDIA/nccl#849"}


@pytest.mark.parametrize("thread", EXCERPTS)
def test_excerpts_of_public_threads(thread, explain):
    text, ranks, certainty, about = EXCERPTS[thread]
    answer = explain({"train.log": text})
    assert (answer["ranks"], answer["certainty"]) == (ranks, certainty), answer
    assert about in f"{answer['operation']}; {answer['because']}", answer


def error_file(message: str) -> str:
    return json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": "c10d, gloo", "timestamp": "1"}}})


def test_torchruns_error_files_and_its_summary(explain, capsys):
    """A rank that ended first is mostly a victim: it is named only if a signal has ended it."""
    victims = {f"attempt_0/{rank}/error.json": error_file(GLOO.format(rank)[9:]) for rank in (0, 1)}
    own = {"attempt_0/2/error.json": error_file("ValueError: no such file")}
    assert says(explain(victims)) == ([], "cannot tell", "in_logs")
    answer = explain(victims | own)
    assert says(answer) == ([2], "possible", "in_logs") and "rank 2: ValueError: no such file." in answer["because"]
    broken = {"attempt_0/2/error.json": own["attempt_0/2/error.json"][:-9]}
    assert says(explain(victims | broken)) == ([], "cannot tell", "in_logs")
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "2/error.json is not an error file that this tool can read" in told

    log = GLOO.format(0) + GLOO.format(1)
    assert explain({"train.log": log + SUMMARY.format(1, 1, -6)})["ranks"] == []  # NCCL's watchdog ends its own rank
    assert explain({"train.log": log + SUMMARY.format(1, 1, -15)})["ranks"] == []  # torchrun ends the others
    answer = explain({"train.log": log + SUMMARY.format(2, 2, -9)})
    assert says(answer) == ([2], "possible", "in_logs") and "rank 2: ended by signal 9" in answer["because"]


def test_all_kinds_together_and_the_best_one_counts(explain):
    victims = {"train.log": "".join(watchdog("2.6", rank) for rank in (0, 1, 3))}
    files = HANGS["one is behind"][0] | stacks(IN_REDUCE, IN_REDUCE, LOADS, IN_REDUCE) | victims
    answer = explain(files)
    assert says(answer) == ([3], "possible", "ranks_behind")  # the dumps say more than the stacks, which contradict
    assert answer["but"] == "in_stacks names rank 2"
    files = HANGS["nobody is behind"][0] | stacks(IN_REDUCE, IN_REDUCE, LOADS, IN_REDUCE) | victims
    assert says(explain(files)) == ([2], "possible", "in_stacks")
    assert explain(files)["read"] == {
        "dumps": [0, 1, 2, 3],
        "stacks": [0, 1, 2, 3],
        "lines": explain(files)["read"]["lines"],
    }


def test_rules_that_contradict_each_other_are_named_and_lower_the_certainty(explain):
    """A dump was not collected: its rank waits, by its stack, for another one."""
    files = {name: content for name, content in HANGS["one is behind"][0].items() if name != "rank_1"}
    answer = explain(files | stacks(IN_REDUCE, IN_REDUCE, IN_REDUCE, LOADS))
    assert says(answer) == ([1], "possible", "missing_dump")
    assert answer["but"] == "ranks_behind names rank 3; in_stacks names rank 3"
    agree = explain(HANGS["one is behind"][0] | stacks(IN_REDUCE, IN_REDUCE, IN_REDUCE, LOADS))
    assert says(agree) == ([3], "likely", "ranks_behind") and agree["but"] is None


def test_an_exception_in_the_log_of_a_rank_that_waits_is_not_its_fault(explain):
    victims = "".join(GLOO.format(rank) for rank in range(3))
    skipped = "[rank2]: WARNING loader: ValueError: bad sample 17, skipped\n"
    assert says(explain({"train.log": skipped + victims})) == ([], "cannot tell", "in_logs")


def test_two_snapshots_of_stacks_are_compared(explain):
    waits = {f"{when}/rank_{rank}.txt": IN_REDUCE for when in "ab" for rank in (0, 2)}
    still = explain(waits | {"a/rank_1.txt": LOADS, "b/rank_1.txt": LOADS})
    assert says(still) == ([1], "possible", "in_stacks")
    assert still["because"].endswith("Between the snapshots no rank moved") and "minute later" not in still["collect"]
    files = waits | {"a/rank_1.txt": LOADS, "b/rank_1.txt": py_spy("decode (train.py:31)", "<module> (train.py:40)")}
    moved = explain(files)
    assert moved["ranks"] == [1] and moved["because"].endswith("Between the snapshots rank 1 moved")
    assert "no collective in decode (train.py:31)" in moved["because"]  # where it was last
    assert explain(files, reverse=True) == moved


OTHER_PROCESS = IN_REDUCE.replace("Process 7", "Process 8")
COLLIDE = {
    "dumps": {"a/rank_1": dump(call(1)), "b/rank_1": dump(call(1))},
    "a rank that is only the last number": {"node0-gpu0.txt": IN_REDUCE, "node1-gpu0.txt": LOADS},
    "stacks of two processes": {"a/rank_0.txt": IN_REDUCE, "b/rank_0.txt": OTHER_PROCESS},
}


@pytest.mark.parametrize("name", COLLIDE)
def test_two_files_of_one_rank_are_refused(name, explain, capsys):
    with pytest.raises(SystemExit) as ended:
        explain(COLLIDE[name])
    assert ended.value.code == 2 and "a second file of rank" in capsys.readouterr().err


def test_what_has_been_read_is_not_to_be_collected(explain):
    tie = HANGS["two against two"][0]
    assert explain(tie)["collect"].startswith("stacks of all ranks")
    whole = explain(tie | stacks(IN_REDUCE, IN_REDUCE, IN_BARRIER, IN_BARRIER))
    assert whole["collect"].startswith("nothing more of this run") and "DETAIL" in whole["collect"]
    part = explain(tie | {"stack_1.txt": IN_REDUCE, "stack_2.txt": IN_BARRIER})
    assert part["collect"].startswith("stacks of all ranks")
    assert "dumps of all ranks" in explain(stacks(IN_REDUCE, IN_REDUCE, LOADS))["collect"]
    half = explain({f"rank_{rank}": dump(WAITS) for rank in (0, 1)})  # ranks 2 and 3 may be to blame
    assert says(half) == ([], "cannot tell", "ranks_behind")
    assert half["because"].startswith("no rank with a dump is behind; waiting: ranks 0, 1: all_reduce")
    assert half["collect"].startswith("dumps of ranks 2, 3, if there are any; stacks of all ranks")
    assert explain(HANGS["a dump is missing"][0])["collect"].startswith("dumps of rank 1, if there are any; stacks")


def test_one_bad_file_does_not_lose_the_verdict(explain, capsys):
    files = HANGS["one is behind"][0]
    bad = {"rank_3.part": files["rank_3"][:-20], "core.bin": b"ELF\0\1", "rank_1.log": GLOO.format(1)}
    assert says(explain(files | bad)) == ([3], "likely", "ranks_behind")
    told = capsys.readouterr().err
    assert told.count("warning: ") == told.count("\n") == 2
    # A rank with a broken dump could still write, so it is not missing.
    answer = explain({"x/rank_0": dump(WAITS), "x/rank_1": dump(WAITS)[:-20], "x/rank_2": dump(WAITS)} | {
        "x/rank_3": dump(WAITS)})  # fmt: skip
    assert says(answer) == ([], "cannot tell", "ranks_behind")


def test_a_stack_that_could_not_be_taken_is_named(explain):
    failed = "Error: Failed to find python version from target process\n"
    answer = explain(stacks(IN_REDUCE, failed, IN_REDUCE))
    assert says(answer) == ([], "cannot tell which rank", "in_stacks")
    assert "rank 1: no stack, Error: Failed to find python version" in answer["because"]
    assert explain(stacks(IN_REDUCE, failed, IN_REDUCE, LOADS))["ranks"] == [3]
    # With --subprocesses, py-spy adds the processes of the loader, each with a main thread of its own.
    child = py_spy("recv (multiprocessing/connection.py:250)").replace("Process 7", "Process 8")
    assert explain(stacks(IN_REDUCE + child, LOADS, IN_REDUCE + child))["ranks"] == [1]


# --- What the user sees ---


def command(*words: str) -> subprocess.CompletedProcess:
    """Run the tool with the standard library alone."""
    return subprocess.run([sys.executable, "-I", "-S", TOOL, *words], capture_output=True, text=True)


def test_the_command_prints_a_verdict_or_json_and_cannot_tell_is_an_answer(tmp_path):
    for name, content in HANGS["one is behind"][0].items():
        (tmp_path / name).write_bytes(content)
    shown = command(str(tmp_path))
    assert shown.returncode == 0 and shown.stdout.splitlines()[0] == "rank 3: likely"
    parts = [line.split(":")[0] for line in shown.stdout.splitlines()[1:]]
    assert parts == ["operation", "because", "readings", "collect", "rule", "read"]
    assert shown.stdout.endswith("read:      dumps: ranks 0-3, stacks: none, lines: none\n")
    assert json.loads(command("--json", str(tmp_path)).stdout)["ranks"] == [3]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.md").write_text("Nothing hangs here.\n")
    shown = command(str(tmp_path / "notes"))
    assert shown.returncode == 1 and shown.stdout.startswith(
        "no rank: cannot tell\nbecause:   no line that this tool knows"
    )


class Attack:
    def __reduce__(self):
        return print, ("this must not be printed",)


BAD = {
    "rank_1": (pickle.dumps({"entries": [Attack()]}), "it wants to call builtins.print"),
    "rank_2": (dump(call(1))[:-20], "is not a dump that this tool can read"),
    "rank_3": (pickle.dumps([{"seq_id": 1}]), "is not a dump that this tool can read"),  # torch 2.2 and older: a list
    "trace": (dump(call(1)), "each named by its rank"),
    "core.7": (b"ELF\0\1", "neither text nor a dump"),
    "empty.log": (b"", "nothing in these files can be read"),
    "missing.log": (None, "No such file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_alone_gets_a_line_for_its_cause(name, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOL.parent)
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["explain_hang.py", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("explain_hang").main()
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    *warnings, error = printed.err.splitlines()
    assert error.startswith("error: ") and len(warnings) < 2 and message in [*warnings, error][0]
