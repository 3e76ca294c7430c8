"""Say which rank makes a job hang, and in which operation, from what the hang has left behind.

python explain_hang.py FILES ...    # logs, stacks, dumps of the flight recorder, or folders of them, in any order
python explain_hang.py FILES ... --json

Needs Python 3.10 and no package, and runs nothing that is in a dump. NCCL's watchdog lines (torch 2.1 to 2.15), its
desync report and its RAS are known to it from public excerpts only. gloo's dumps and errors, the reports of
TORCH_DISTRIBUTED_DEBUG=DETAIL and py-spy's stacks were tried on ranks that hung.
"Cannot tell" is an answer: a watchdog's line comes from a rank that waits, not from the one it waits for.
"""

import argparse
import ast
import io
import json
import pickle
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

UNEVEN = re.compile("all_?to_?all|gather$|scatter$|_v(_|$)")  # here the ranks' sizes may differ
WAITING = re.compile(r"distributed_c10d\.py|_engine_run_backward|torch/cuda/.*synchronize")
LIBRARY = re.compile(
    r"(^|/)(torch|re|multiprocessing|site-packages)/|/lib/python|^<|(^|/)(threading|selectors|queue)\.py"
)
TRANSPORT = re.compile("gloo|nccl|c10d|connection|timed? ?out|watchdog|sigterm|childfailed|monitoredbarrier", re.I)


class PlainData(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def stop(message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# --- Reading. Each kind of evidence is kept by rank. ---


def rank_of(path, any_number):
    """Return the rank in a file's name or, as torchrun's --log-dir has it, in its folder's; None if there is none.

    any_number: take the last number in the name, whatever it is.
    """
    named = re.findall(r"rank\D?(\d+)|^(\d+)$", f"{path.parent.name}\n{path.name}\n{path.stem}", re.MULTILINE)
    numbers = [number for pair in named for number in pair if number] or any_number and re.findall(r"\d+", path.name)
    return int(numbers[-1]) if numbers else None


def read_dump(path, content):
    """Return a dump's calls, in order, and the ranks of its groups."""
    try:
        dump = PlainData(io.BytesIO(content)).load() if content[:1] == b"\x80" else json.loads(content)
        config = {name: ast.literal_eval(str(each["ranks"])) for name, each in (dump.get("pg_config") or {}).items()}
        calls = []
        for entry in dump["entries"]:
            (name, title), (backend, _, op) = entry["process_group"], entry["profiling_name"].rpartition(":")
            # A call without a group's name, as DETAIL makes them on gloo, cannot be compared.
            if name and not entry.get("is_p2p") and not op.startswith(("send", "recv")):
                sizes = "" if UNEVEN.search(op) else " " + str(entry["input_sizes"]).replace(" ", "")
                calls.append({
                    "group": (title if title not in ("", "undefined") else f"group {name}", name, *config.get(name, ())),
                    "number": entry.get("collective_seq_id", entry.get("seq_id")),
                    "what": " ".join([op + sizes, *(entry.get("input_dtypes") or [])]),
                    # On gloo the state never changes. On NCCL the watchdog may retire a call that has timed out.
                    "over": entry["state"] == "completed" or bool(entry["retired"]) and backend != "nccl",
                })  # fmt: skip
        return {"calls": calls, "ranks": {rank for ranks in config.values() for rank in ranks}}
    except Exception as error:  # whatever is in the file
        stop(f"{path} is not a dump that this tool can read: {type(error).__name__}: {error}")


def read_stacks(text, rank):
    """Return the main thread's frames by rank, innermost first: of py-spy, faulthandler, or the debug server."""
    stacks, inside = {}, False
    for line in text.splitlines():
        if heading := re.match(r"\W*rank\W?(\d+)\b", line, re.IGNORECASE):
            rank, inside = int(heading[1]), False
        elif re.match('Thread .*"|.*most recent call first', line):
            inside = '"' not in line or '"MainThread"' in line
            if inside:
                stacks[rank] = []  # faulthandler writes the main thread last
        frame = re.match(r'\s+(?:File "(.+)", line (\d+),? in (\S+)|(\S.*) \((\S+):(\d+)\))$', line.rstrip())
        if inside and frame:
            stacks[rank].append(frame.group(1, 2, 3) if frame[1] else frame.group(5, 6, 4))
    return {rank: frames for rank, frames in stacks.items() if frames}


def read(paths):
    """Return dumps and stacks by rank, the lines of all text files, each with its rank, and the number of files."""
    dumps, stacks, lines, files = {}, {}, [], []
    for path in paths:
        files += sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            stop(f"{path} cannot be read: {error.strerror}")
        if content[:1] == b"\x80" or content.lstrip()[:1] == b"{" and b'"entries"' in content:
            if (rank := rank_of(path, any_number=True)) is None or rank in dumps:
                stop(f"{path}: one dump per rank, please, and the rank as the last number of its name: trace_rank_3")
            dumps[rank] = read_dump(path, content)
            continue
        text = content.decode(errors="replace")
        stacks.update(read_stacks(text, rank_of(path, any_number=True)))
        rank = rank_of(path, any_number=False)
        # A terminal may have wrapped the line inside WorkNCCL(...). `[Rank 1]` is the rank in its group.
        for line in re.sub(r"(?<=[(,])[ \t]*\n\s*(?=[A-Z]\w+[=(])", " ", text).splitlines():
            prefix = re.search(r"\[rank(\d+)\]:", line) or (rank is None and re.search(r"Rank (\d+)\]", line))
            lines.append((int(prefix[1]) if prefix else rank, line))
    stacks.pop(None, None)
    return dumps, stacks, lines, len(files)


# --- The rules. Each returns ranks, an operation and a reason, or None if it has nothing to say. ---


def names(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks, key=str)))}"


def minority(kinds):
    """Return the most frequent kind, and the ranks that have another one: none if it is a tie."""
    (most, count), *others = Counter(kinds.values()).most_common()
    tie = bool(others) and others[0][1] == count
    return most, [] if tie else sorted(rank for rank in kinds if kinds[rank] != most)


def by_kind(kinds):
    ranks = defaultdict(list)
    for rank in sorted(kinds, key=str):
        ranks[kinds[rank]].append(rank)
    return "; ".join(f"{names(ranks[kind])}: {kind}" for kind in ranks)


def explicit_reports(dumps, stacks, lines):
    text = "\n".join(line for _, line in lines)
    found = re.search(r"at collective: (\w+)|OpType=(\w+)|different (\w+) operation counts", text)
    operation = found and (found[1] or found[2] or found[3])
    desync = r"\[([\d, ]+)\] (?:finished[^\n]*didn't join|joined but didn't|are the lagging)"
    for pattern in (desync, r"Ranks? ([\d, ]+) failed to pass monitoredBarrier"):
        if found := re.findall(pattern, text):
            ranks = {int(rank) for group in found for rank in re.findall(r"\d+", group)}
            return ranks, operation, f"a report names {names(ranks)} as missing"
    if "errors while waiting for send/recv from rank 0" in text:  # it watches over the barrier
        ranks = [0] if 0 in {rank for rank, _ in lines} else []
        return ranks, operation, "at a barrier all wait for rank 0" + (": its log is needed" if not ranks else "")
    # What a report says of the other rank may be empty or wrong: a rank's own report counts.
    pattern = (
        r"Rank (\d+) is running collective: CollectiveFingerPrint\((?!SequenceNumber=0OpType)(.*?)(?:, TensorDev|\))"
    )
    kinds = {int(rank): what for rank, what in re.findall("but " + pattern, text)}
    kinds |= {int(rank): what for rank, what in re.findall(r"on ranks\. " + pattern, text)}
    if kinds := {rank: re.sub(r"SequenceNumber=\d+(, )?|OpType=", "", what) for rank, what in kinds.items()}:
        most, odd = minority(kinds)
        return odd, most, by_kind(kinds)
    if counts := re.findall(r"(\d+) ranks? ha\w+ launched up to operation (\d+)", text):  # NCCL's RAS lists the fewer
        listed = sorted({int(rank) for rank in re.findall(r"Rank (\d+) -- ", text)})
        behind = int(min(counts, key=lambda count: int(count[1]))[0]) == len(listed)
        return listed * behind, operation, f"{names(listed)}: {'fewer' if behind else 'more'} calls than others"


def waiting_calls(dumps):
    """Return the first call that each rank waits in."""
    first = {rank: next((call for call in dumps[rank]["calls"] if not call["over"]), None) for rank in sorted(dumps)}
    return {rank: call for rank, call in first.items() if call}


def members(group, dumps):
    """Return the ranks of a group. A dump that gloo has written itself does not list them."""
    everyone = set(dumps).union(*(dump["ranks"] for dump in dumps.values()))
    callers = {rank for rank, dump in dumps.items() if any(call["group"] == group for call in dump["calls"])}
    return set(group[2:]) or (everyone if group[0] == "default_pg" else callers)


def shown(call):
    return f"{call['what']}, call {call['number']} of {call['group'][0]}"


def missing_dump(dumps, stacks, lines):
    waits = waiting_calls(dumps)
    missing = set().union(*(members(call["group"], dumps) for call in waits.values())) - set(dumps)
    if missing and len(missing) < len(dumps):
        kinds = {rank: shown(call) for rank, call in waits.items()}
        return missing, minority(kinds)[0], f"{names(missing)} wrote no dump; waiting: {by_kind(kinds)}"


def first_difference(dumps, stacks, lines):
    found = []
    for group in {call["group"] for dump in dumps.values() for call in dump["calls"]}:
        calls = {r: {c["number"]: (n, c["what"]) for n, c in enumerate(d["calls"]) if c["group"] == group}
                 for r, d in dumps.items()}  # fmt: skip
        calls = {rank: each for rank, each in calls.items() if each}
        start = max(min(each) for each in calls.values())  # the recorder forgets old calls
        for number in range(start, 1 + max(max(each) for each in calls.values())):
            here = {rank: each[number] for rank, each in calls.items() if number in each}
            if len({what for _, what in here.values()}) > 1:
                found.append(
                    (min(here.values())[0], number, group[0], {rank: what for rank, (_, what) in here.items()})
                )
                break
    if found:
        _, number, title, kinds = min(found, key=lambda each: each[:3])
        most, odd = minority(kinds)
        return odd, f"{most}, call {number} of {title}", f"the first call that differs: {by_kind(kinds)}"


def ranks_behind(dumps, stacks, lines):
    waits, behind = waiting_calls(dumps), set()
    for call in waits.values():
        for rank in members(call["group"], dumps) & set(dumps):
            numbers = [each["number"] for each in dumps[rank]["calls"] if each["group"] == call["group"]]
            if max(numbers, default=-1) < call["number"]:
                behind.add(rank)
    kinds, idle = {rank: shown(call) for rank, call in waits.items()}, sorted(behind - set(waits))
    if idle:
        odd = idle if len(idle) <= len(waits) else sorted(waits)
        return odd, minority(kinds)[0], f"{names(idle)} waits in no call; waiting: {by_kind(kinds)}"
    if behind:  # they wait for each other, in different groups
        return minority(kinds)[1], minority(kinds)[0], f"waiting for each other: {by_kind(kinds)}"
    if dumps:
        reason = f"nobody whose dump is here is behind in {by_kind(kinds)}" if kinds else "no recorded call waits"
        return [], None, f"{reason} (dumps of {names(dumps)}; a send or recv is not followed)"


def in_stacks(dumps, stacks, lines):
    if len(stacks) < 2:
        return None
    places, waits = {}, {}
    for rank, frames in sorted(stacks.items()):
        file, number, name = next((frame for frame in frames if not LIBRARY.search(frame[0])), frames[0])
        places[rank] = f"{name} ({file}:{number})"
        waits |= {rank: frame[2] for frame in frames[8::-1] if WAITING.search(f"{frame[0]} {frame[2]}")}
    kinds = {rank: f"{waits.get(rank, 'no collective')} in {place}" for rank, place in places.items()}
    idle = sorted(set(places) - set(waits))
    if waits and idle:
        return (
            idle if len(idle) < len(waits) else [],
            minority({rank: kinds[rank] for rank in waits})[0],
            by_kind(kinds),
        )
    most, odd = minority(kinds)
    return odd, most if len(set(kinds.values())) > 1 else None, by_kind(kinds)


def in_logs(dumps, stacks, lines):
    waits, counts, failed, errors, victims = defaultdict(set), {}, set(), {}, set()
    for rank, line in lines:
        if found := re.search(r"WorkNCCL\(SeqNum=(\d+), *OpType=(\w+)", line):
            waits[rank].add(f"{found[2]}, call {found[1]}")
        pattern = r"PG ID 0 .*last enqueued (?:NCCL )?work: (\d+),.*last completed (?:NCCL )?work: (\d+)"
        if found := re.search(pattern, line, re.IGNORECASE):
            counts.setdefault(rank, (int(found[1]), int(found[2])))
            failed |= {rank} if "detected by watchdog" in line else set()
        if found := re.search(r"\w+(Error|Exception): .*", line):
            (victims.add(rank) if TRANSPORT.search(found[0]) else errors.setdefault(rank, found[0]))
    kinds = {rank: " and ".join(sorted(calls)) for rank, calls in waits.items()}
    if errors and None not in errors and victims - set(errors):
        return sorted(errors), None, f"{by_kind(errors)}. The others lost their partner"
    most = max((counts[rank][0] for rank in failed), default=0)
    behind = [rank for rank, (enqueued, over) in counts.items() if rank not in failed and enqueued == over < most]
    if behind:  # of the default group's calls, as the dump signal counts them
        return (
            sorted(behind),
            minority(kinds)[0] if kinds else None,
            f"{names(behind)} waits in nothing; {by_kind(kinds)}",
        )
    if kinds:
        same = len(set(kinds.values())) == 1
        return [], None if same else by_kind(kinds), f"{by_kind(kinds)}. They wait, and a log does not say for whom"
    return [], None, "errors of ranks that wait or lost a partner" if victims else "no line that this tool knows"


STACKS = "the stacks of all ranks (py-spy dump --pid PID), for the line that makes the call"
DUMPS = "dumps of all ranks (NCCL: TORCH_FR_DUMP_ON_TIMEOUT; gloo: a thread that calls _dump_fr_trace)"
AGAIN = "the same once more, a minute later: where the numbers grow, the job is slow and does not hang"
TWO_READINGS = "it left a call out (among equal calls, perhaps an earlier one), or made one too many"
BEHIND = "a rank that is behind left the call out or is late, or those that wait made a call too many"
RULES = {  # the most reliable one first
    explicit_reports: ("likely", TWO_READINGS, STACKS),
    missing_dump: ("likely", "it ended, is stopped, or holds Python's lock; or its file was not collected", STACKS),
    first_difference: ("likely", TWO_READINGS, STACKS),
    ranks_behind: ("likely", BEHIND, f"{STACKS}; {AGAIN}"),
    in_stacks: ("possible", f"{BEHIND}; or a rank is not in the group that waits", f"{DUMPS}; {AGAIN}"),
    in_logs: ("possible", "it failed or is late", f"{DUMPS}; {STACKS}"),
}


def explain(paths):
    """Return the verdict of the first rule that names a rank, or else of the first that says anything."""
    dumps, stacks, lines, files = read([Path(path) for path in paths])
    answers = [(rule, *answer) for rule in RULES if (answer := rule(dumps, stacks, lines))]
    rule, ranks, operation, because = next((answer for answer in answers if answer[1]), answers[0])
    level, readings, collect = RULES[rule]
    certainty = level if ranks else "cannot tell which rank" if operation else "cannot tell"
    read_from = {"files": files, "dumps": sorted(dumps), "stacks": sorted(stacks, key=str)}
    return {"ranks": sorted(ranks), "operation": operation, "certainty": certainty, "rule": rule.__name__,
            "because": because, "readings": readings if operation or ranks else None, "collect": collect,
            "read": read_from}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILES")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    options = parser.parse_args()
    answer = explain(options.files)
    if options.json:
        return print(json.dumps(answer))
    print(
        f"{names(answer['ranks']) if answer['ranks'] else 'rank unknown'}: {answer['certainty']} (rule: {answer['rule'].replace('_', ' ')})"
    )
    for part in ("operation", "because", "readings", "collect"):
        if answer[part]:
            print(f"{part + ':':11}{answer[part]}")


if __name__ == "__main__":
    main()
