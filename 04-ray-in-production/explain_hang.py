"""Say which rank makes a job hang, and in which operation, from what the hang has left behind.

python explain_hang.py FILES ...    # logs, stacks, dumps, torchrun's error files, or folders of them, in any order
python explain_hang.py FILES ... --json    # ends with 0 if it names a rank, 1 if it cannot tell, 2 on bad input

Needs Python 3.10 or later and no packages, and runs nothing that is in a dump. Stacks may be of several moments, dumps
of the flight recorder only of one. NCCL's watchdog lines (torch 2.1 to 2.15; the default backend of 2.15 names no
operation), its desync report, its RAS and its dumps are known to it from public excerpts and torch's source only.
gloo's dumps and errors, the reports of TORCH_DISTRIBUTED_DEBUG=DETAIL and py-spy's stacks were tried on ranks that
hung.
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
LIBRARY = re.compile(r"(^|/)((torch|re|multiprocessing|site-packages)/|(threading|selectors|queue)\.py)|/lib/python|^<")
TRANSPORT = re.compile("gloo|nccl|c10d|collective|connection|timed? ?out|watchdog|sigterm|childfailed|barrier", re.I)

STACKS = "stacks of all ranks: py-spy dump --pid PID"
DUMPS = "dumps of all ranks: with NCCL a timeout writes the rank's own, with gloo a thread has to call _dump_fr_trace"
AGAIN = "the same a minute later: if a stack or a call's number has moved, the job is slow and does not hang"
RERUN = "nothing more of this run: compare the code of the calls, or run again with TORCH_DISTRIBUTED_DEBUG=DETAIL"
ODD = "the rank left a call out (among equal calls, perhaps an earlier one), or made one too many"
BEHIND = "the rank that is behind left a call out or is late, or the waiting ranks made one too many"
NO_DUMP = (
    "the process has ended, is stopped, holds Python's global lock (gloo) or is in no collective (NCCL of torch 2.15), "
    "or its file was not collected"
)
BROKEN = {"calls": {}, "waits": None, "ranks": set(), "broken": True}  # its rank could still write a dump


class PlainData(pickle.Unpickler):
    """Reads lists, dicts, strings and numbers: no dump holds anything else."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it wants to call {module}.{name}")


def warn(message, fatal=False):
    print(f"{'error' if fatal else 'warning'}: {message}", file=sys.stderr)
    if fatal:
        raise SystemExit(2)


# --- Reading. Each kind of evidence is kept by rank. ---


def rank_of(path, any_number):
    """Return the rank in the name of a file or of torchrun's folder, or else the last number if any_number, or None."""
    words = f"{path.parent.name}\n{path.name}\n{path.stem}"
    named = re.findall(r"(?:rank\D?(?=\d)|^(?=\d+$))(\d+)", words, re.MULTILINE)
    numbers = named or (re.findall(r"\d+", path.name) if any_number else [])
    return int(numbers[-1]) if numbers else None


def read_dump(path, content):
    """Return a dump's calls by group and number, the first call that waits, and the ranks of each group.

    A group is its title, its name and, as text, its ranks: "" if the dump does not say.
    """
    try:
        dump = PlainData(io.BytesIO(content)).load() if content[:1] == b"\x80" else json.loads(content)
        ranks = {name: str(each["ranks"]) for name, each in (dump.get("pg_config") or {}).items()}
        assert all(re.fullmatch(r"\[[\d, ]*\]", each) for each in ranks.values()), ranks
        calls, waits = defaultdict(dict), None
        for at, entry in enumerate(dump["entries"]):
            (name, title), (backend, _, op) = entry["process_group"], entry["profiling_name"].rpartition(":")
            # A call without a group's name, as DETAIL makes them on gloo, cannot be compared.
            if not name or entry.get("is_p2p") or op.startswith(("send", "recv")):
                continue
            group = (f"group {name}" if title in ("", "undefined") else title, name, ranks.get(name, ""))
            number = entry.get("collective_seq_id", entry.get("seq_id"))
            sizes = "" if UNEVEN.search(op) else str(entry["input_sizes"]).replace(" ", "")
            what = " ".join(filter(None, [op, sizes, *(entry.get("input_dtypes") or [])]))
            calls[group][number] = (at, what)
            # On gloo the state never changes. On NCCL the watchdog may retire a call that has timed out.
            over = entry["state"] == "completed" or (entry["retired"] and backend != "nccl")
            if not over and not waits:
                waits = (group, number, f"{what}, call {number} of {group[0]}")
        return {"calls": calls, "waits": waits, "ranks": set(ranks.values())}
    except Exception as error:  # whatever is in the file
        warn(f"{path} is not a dump that this tool can read: {type(error).__name__}: {error}")
        return BROKEN


def read_stacks(text, rank):
    """Return the main thread's frames by rank, innermost first: of py-spy, faulthandler, or the debug server."""
    stacks, inside = {}, False
    for line in text.splitlines():
        if heading := re.match(r"\W*rank\W?(\d+)\b", line, re.IGNORECASE):
            rank, inside = int(heading[1]), False
        elif re.match('Thread .*"|.*most recent call first', line):
            inside = '"' not in line or ('"MainThread"' in line and rank not in stacks)  # not a child's
            if inside:
                stacks[rank] = []  # faulthandler writes the main thread last
        frame = re.match(r'\s+(?:File "(.+)", line (\d+),? in (\S+)|(\S.*) \((\S+):(\d+)\))$', line.rstrip())
        if inside and frame:
            stacks[rank].append(frame.group(1, 2, 3) if frame[1] else frame.group(5, 6, 4))
    return {each: frames for each, frames in stacks.items() if frames and each is not None}


def read(paths):
    """Return a dump and a list of stacks, the oldest first, by rank, and the lines of all logs, each with its rank."""
    dumps, stacks, lines, origin = {}, defaultdict(list), [], {}
    files = {each for path in paths for each in (path.rglob("*") if path.is_dir() else [path]) if not each.is_dir()}
    for path in sorted(files):
        rank, named = rank_of(path, any_number=True), rank_of(path, any_number=False)
        whose = f"{path}: a second file of rank {{}}? Give files of one job, each named by its rank: trace_rank_3"
        try:
            content = path.read_bytes()
            is_dump = content[:1] == b"\x80" or (content.lstrip()[:1] == b"{" and b'"entries"' in content)
            if b"\0" in content and not is_dump:
                raise OSError(0, "neither text nor a dump")
        except OSError as error:
            warn(f"{path} cannot be read: {error.strerror}")
            continue
        if is_dump:
            dump = read_dump(path, content)
            if dump is not BROKEN and (rank is None or dumps.get(rank, BROKEN) is not BROKEN):
                warn(whose.format(rank), fatal=True)
            if rank is not None and (dump is not BROKEN or rank not in dumps):
                dumps[rank] = dump
            continue
        text = content.decode(errors="replace")
        if re.match(r'\s*\{"message"', text):  # torchrun's error file
            try:
                message = json.loads(text)["message"]
                text = str(message["message"] if isinstance(message, dict) else message)
            except (ValueError, KeyError) as error:
                warn(f"{path} is not an error file that this tool can read: {type(error).__name__}: {error}")
                continue
        failed = rank is not None and re.match("Error: .*", text)  # py-spy's
        for each, frames in (read_stacks(text, rank) or ({rank: [("", "0", failed[0])]} if failed else {})).items():
            # A second snapshot has the same process, and a rank that is not merely a number in another file's name.
            process = (re.findall(r"^Process \d+", text, re.M) or [""])[0], path.name if each == rank != named else ""
            if any(a and b and a != b for a, b in zip(origin.setdefault(each, process), process, strict=True)):
                warn(whose.format(each), fatal=True)
            stacks[each].append(frames)
        # A terminal may have wrapped a watchdog's line, even inside a word. `[Rank 1]` is the rank in its group.
        wrapped = r"Rank \d+\s*\]\s*Watchdog|timeout:\s*WorkNCCL\([^)]{,200}\)"
        whole = re.sub(wrapped, lambda found: re.sub(r"\s*\n", "", found[0]), text)
        for line in whole.splitlines():
            prefix = re.search(r"\[rank(\d+)\]:", line) or (named is None and re.search(r"Rank (\d+)\]", line))
            lines.append((int(prefix[1]) if prefix else named, line))
    return dumps, dict(stacks), lines


# --- The rules. Each returns ranks, an operation, a reason, and perhaps how sure it is; or None if it is silent. ---


def names(ranks):
    """Return the ranks in words, such as "ranks 0-62, 64". A line in a log may come from an unknown rank, None."""
    spans = []
    for rank in sorted(ranks, key=lambda rank: -1 if rank is None else rank):
        if spans and spans[-1][-1] is not None and spans[-1][-1] + 1 == rank:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = [f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(words)}".replace("None", "?")


def by_kind(kinds):
    """Describe who does what, by the dict `kinds` from ranks to what they do."""
    ranks = defaultdict(list)
    for rank in sorted(kinds, key=lambda rank: -1 if rank is None else rank):
        ranks[kinds[rank]].append(rank)
    return "; ".join(f"{names(ranks[kind])}: {kind}" for kind in ranks)


def majority(kinds):
    """Return the most frequent kind and the ranks of the others. In a tie: all kinds, and no rank."""
    (most, count), *others = Counter(kinds.values()).most_common()
    if others and others[0][1] == count:
        return " against ".join(sorted(set(kinds.values()))), []
    return most, [rank for rank in kinds if kinds[rank] != most]


def explicit_reports(dumps, stacks, lines):
    """Find who is named by a desync report, a monitored barrier, the fingerprints of DETAIL, or NCCL's RAS."""
    text = "\n".join(line for _, line in lines)
    found = re.search(r"at collective: (\w+)|OpType=(\w+)|different (\w+) operation counts", text)
    operation = found and (found[1] or found[2] or found[3])
    desync = r"\[([\d, ]+)\] (?:finished[^\n]*didn't join|joined but didn't|are the lagging)"
    for pattern in (desync, r"Ranks? ([\d, ]+) failed to pass monitoredBarrier"):
        if found := re.findall(pattern, text):
            ranks = {int(rank) for group in found for rank in re.findall(r"\d+", group)}
            return ranks, operation, f"a report names {names(ranks)} as missing"
    if "errors while waiting for send/recv from rank 0" in text:
        seen = 0 in {rank for rank, _ in lines}
        return [0] * seen, operation, "all wait for rank 0, " + ("which reports nothing" if seen else "see its log")
    # What a report says of the other rank may be empty or wrong: a rank's report on itself counts.
    pattern = r"Rank (\d+) is running collective: CollectiveFingerPrint\((?!SequenceNumber=0Op)(.*?)(?:, TensorDev|\))"
    kinds = dict(re.findall("but " + pattern, text)) | dict(re.findall(r"on ranks\. " + pattern, text))
    if kinds := {int(rank): re.sub(r"SequenceNumber=\d+(, )?|OpType=", "", kind) for rank, kind in kinds.items()}:
        most, odd = majority(kinds)
        return odd, most, by_kind(kinds)
    if counts := re.findall(r"(\d+) ranks? ha\w+ launched up to operation (\d+)", text):
        listed = {int(rank) for rank in re.findall(r"Rank (\d+) -- ", text)}  # RAS lists those that are fewer
        behind = int(min(counts, key=lambda count: int(count[1]))[0]) == len(listed)
        return listed if behind else [], operation, f"{names(listed)}: {'behind' if behind else 'ahead of'} the others"


def members(group, dumps):
    """Return the ranks of a group. A dump that gloo has written itself does not list them."""
    if group[2]:
        return set(ast.literal_eval(group[2]))
    if group[0] == "default_pg":
        return set(dumps).union(*map(ast.literal_eval, set().union(*(dump["ranks"] for dump in dumps.values()))))
    return {rank for rank, dump in dumps.items() if group in dump["calls"]}


def waiting(dumps):
    """Return the groups in which ranks wait, with the highest number waited for, and each rank's call."""
    groups, kinds = {}, {}
    for rank, dump in sorted(dumps.items()):
        if dump["waits"]:
            group, number, kinds[rank] = dump["waits"]
            groups[group] = max(number, groups.get(group, number))
    return groups, kinds


def missing_dump(dumps, stacks, lines):
    """Find the members of groups that wait whose dumps are missing, unless most dumps are."""
    groups, kinds = waiting(dumps)
    missing = set().union(*(members(group, dumps) for group in groups)) - set(dumps)
    if missing and len(missing) < len(dumps):
        return missing, majority(kinds)[0], f"{names(missing)} wrote no dump; waiting: {by_kind(kinds)}"


def first_difference(dumps, stacks, lines):
    """Find the first call of a group that is not the same on all ranks, and the ranks that differ from most."""
    found = []
    for group in set().union(*(dump["calls"] for dump in dumps.values())):
        calls = {rank: dump["calls"][group] for rank, dump in dumps.items() if group in dump["calls"]}
        start = max(min(each) for each in calls.values())  # the recorder forgets old calls
        for number in range(start, 1 + max(max(each) for each in calls.values())):
            here = {rank: each[number] for rank, each in calls.items() if number in each}
            if len({what for _, what in here.values()}) > 1:
                found.append((min(here.values())[0], number, group[0], {rank: here[rank][1] for rank in here}))
                break
    if found:
        _, number, title, kinds = min(found, key=lambda each: each[:3])  # in the group where it comes first
        most, odd = majority(kinds)
        return odd, f"{most}, call {number} of {title}", f"the first call that differs: {by_kind(kinds)}"


def ranks_behind(dumps, stacks, lines):
    """Find the ranks that have not reached a call in which others wait, and that wait in none themselves."""
    groups, kinds = waiting(dumps)
    behind = set()
    for group, number in groups.items():
        for rank in members(group, dumps) & set(dumps):
            if "broken" not in dumps[rank] and max(dumps[rank]["calls"].get(group, {}), default=-1) < number:
                behind.add(rank)
    idle = behind - set(kinds)
    if idle:
        level = "likely" if len(idle) < len(kinds) else "possible"
        odd = idle if len(idle) <= len(kinds) else set(kinds)
        return odd, majority(kinds)[0], f"{names(idle)} waits in no call; waiting: {by_kind(kinds)}", level
    if behind:  # they wait for each other, in different groups
        most, odd = majority(kinds)
        return odd, most, f"waiting for each other: {by_kind(kinds)}"
    if dumps:
        reason = f"no rank with a dump is behind; waiting: {by_kind(kinds)}" if kinds else "no recorded call waits"
        return [], None, f"{reason} (dumps of {names(dumps)}; sends and receives are not followed)"


def in_stacks(dumps, stacks, lines):
    """Find the ranks that are in no collective, if they are few, or else those at a different line."""
    if len(stacks) < 2:
        return None
    places, waits, tops = {}, {}, {rank: snapshots[-1][0][2] for rank, snapshots in stacks.items()}
    failed = {rank: f"no stack, {top}" for rank, top in tops.items() if top.startswith("Error: ")}
    for rank, (*_, frames) in sorted(each for each in stacks.items() if each[0] not in failed):
        file, number, name = next((frame for frame in frames if not LIBRARY.search(frame[0])), frames[0])
        inside = [frame[2] for frame in frames[:9] if WAITING.search(f"{frame[0]} {frame[2]}")]
        places[rank] = f"{inside[0] if inside else 'no collective'} in {name} ({file}:{number})"
        if inside:
            waits[rank] = places[rank]
    moved = {rank for rank, snapshots in stacks.items() if any(each != snapshots[0] for each in snapshots)}
    note = f". Between the snapshots {names(moved) if moved else 'no rank'} moved"
    because = by_kind(places | failed) + note * (max(map(len, stacks.values())) > 1)
    idle = set(places) - set(waits)
    if waits and idle:
        return idle if len(idle) < len(waits) else [], majority(waits)[0], because
    most, odd = majority(places) if places else (None, [])
    return odd, most if len(set((places | failed).values())) > 1 else None, because


def in_logs(dumps, stacks, lines):
    """Find a rank that failed by itself, or that waited in nothing when the watchdogs of others reported."""
    waits, counts, failed, errors, victims = defaultdict(set), {}, set(), {}, set()
    for rank, line in lines:
        if found := re.search(r"WorkNCCL\(\s*SeqNum=(\d+),\s*OpType=(\w+)[,)]", line):
            waits[rank].add(f"{found[2]}, call {found[1]}")
        elif "operation timeout: NCCL operation timed out" in line:  # the default backend of torch 2.15
            waits[rank].add("a call that the line does not name")
        state = r"PG ID 0 .*last enqueued (?:NCCL )?work: (\d+),.*last completed (?:NCCL )?work: (\d+)"
        if found := re.search(state, line, re.IGNORECASE):  # of the default group
            counts.setdefault(rank, (int(found[1]), int(found[2])))
            if "detected by watchdog" in line:
                failed.add(rank)
        if found := re.search(r"\w+(Error|Exception): .*|Watchdog caught.*", line):
            victims.add(rank) if TRANSPORT.search(found[0]) else errors.setdefault(rank, found[0])
    # What torchrun calls the root cause is the rank that ended first: mostly a victim, but not if it was killed.
    summary = r"Root Cause.*(?:\n.*){,5}?rank +: (\d+).*\n.*exitcode +: (-9|-11) "
    for rank, code in re.findall(summary, "\n".join(line for _, line in lines)):
        errors[int(rank)] = f"ended by signal {code[1:]}, before all others"
    kinds = {rank: " and ".join(sorted(calls)) for rank, calls in waits.items()}
    errors = {rank: error for rank, error in errors.items() if rank not in victims}  # it went on, and waited
    if errors and None not in errors and victims:
        return set(errors), None, f"{by_kind(errors)}. The others lost the connection"
    most = max((counts[rank][0] for rank in failed), default=0)
    behind = {rank for rank, (enqueued, over) in counts.items() if rank not in failed and enqueued == over < most}
    if kinds and 0 < len(behind) <= len(failed):
        return behind, majority(kinds)[0], f"{names(behind)} waits in no call; {by_kind(kinds)}"
    silent = {rank for rank, _ in lines} - {rank for rank, line in lines if TRANSPORT.search(line)} - {None}
    hint = f". {names(silent)} reports nothing: not waiting, or killed before it could print" if silent else ""
    if kinds:
        operation = by_kind(kinds) if len(set(kinds.values())) > 1 else None  # the numbers count per group
        because = f"{by_kind(kinds)}. A log does not say whom a rank waits for{hint}"
        return [], operation, f"{because} (this tool never saw NCCL's lines in a run)"
    waited = f"all errors come from ranks that were waiting or had lost a connection{hint}"
    return [], None, waited if victims else "no line that this tool knows"


RULES = {  # the most reliable one first: how sure it is, what its verdict may mean, what to collect next
    explicit_reports: ("likely", ODD, [STACKS]),
    missing_dump: ("likely", NO_DUMP, [DUMPS, STACKS]),
    first_difference: ("likely", ODD, [DUMPS, STACKS]),
    ranks_behind: ("likely", BEHIND, [DUMPS, STACKS, AGAIN]),
    in_stacks: ("possible", f"{BEHIND}, or a rank does not belong to the group that waits", [DUMPS, AGAIN]),
    in_logs: ("possible", "the rank failed, or is late", [DUMPS, STACKS]),
}


def explain(paths):
    """Return the verdict of the first rule that names a rank, or else of the first that says anything."""
    dumps, stacks, lines = read([Path(path) for path in paths])
    if not stacks and not lines and all("broken" in dump for dump in dumps.values()):
        warn("nothing in these files can be read", fatal=True)
    answers = [(rule, *answer) for rule in RULES if (answer := rule(dumps, stacks, lines))]
    rule, ranks, operation, because, *level = next((answer for answer in answers if answer[1]), answers[0])
    usual, readings, collect = RULES[rule]
    but = [f"{other.__name__} names {names(odd)}" for other, odd, *_ in answers if not set(odd) <= set(ranks)]
    level = ["possible"] if but else [*level, usual]
    certainty = level[0] if ranks else "cannot tell which rank" if operation else "cannot tell"
    everyone = {rank for rank, _ in lines} - {None} | set(stacks) | members(("default_pg", "", ""), dumps)
    whole = {rank for rank, dump in dumps.items() if "broken" not in dump}
    twice = any(len(snapshots) > 1 for snapshots in stacks.values())
    done = {STACKS: everyone <= set(stacks), DUMPS: everyone <= whole, AGAIN: twice}
    missing = f"dumps of {names(everyone - whole)}, if there are any"
    collect = [missing if each is DUMPS and whole else each for each in collect if not done[each]]
    answer = {"ranks": sorted(ranks), "operation": operation, "certainty": certainty, "because": because}
    answer |= {"but": "; ".join(but) or None, "readings": readings if ranks or operation else None}
    answer |= {"collect": "; ".join(collect) or RERUN, "rule": rule.__name__}
    return answer | {"read": {"dumps": sorted(dumps), "stacks": sorted(stacks), "lines": len(lines)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILES", help="logs, stacks, dumps, or folders of them")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    options = parser.parse_args()
    answer = explain(options.files)
    if options.json:
        print(json.dumps(answer))
    else:
        print(f"{names(answer['ranks']) if answer['ranks'] else 'no rank'}: {answer['certainty']}")
        parts = ("operation", "because", "but", "readings", "collect", "rule")
        print(*(f"{part + ':':11}{answer[part]}" for part in parts if answer[part]), sep="\n")
        spans = {kind: names(what) if what and kind != "lines" else what for kind, what in answer["read"].items()}
        print("read:      " + ", ".join(f"{kind}: {what or 'none'}" for kind, what in spans.items()))
    sys.exit(0 if answer["ranks"] else 1)


if __name__ == "__main__":
    main()
