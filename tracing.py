"""Per-process traces of a training job: JSON lines that survive a SIGKILL, a full disk and a hang.

Copy this one file into any codebase: standard library only, Python 3.8 and newer, Linux first. The names are
torchtitan's.

    from tracing import (close_structured_logger, init_structured_logger, log_trace_scalar, log_trace_span,
                         set_step)

    init_structured_logger("training", "exp/run1/structured_logs")   # each process; else calls do nothing
    for step in range(1, steps + 1):
        set_step(step)
        with log_trace_span("forward"):          # or @log_trace_span("forward") above any kind of function
            loss = model(batch)
        log_trace_scalar({"tokens": 4096})
    close_structured_logger()                        # says that the process ended well

In data-parallel training a slow rank makes all others wait. A span in which ranks wait for each other is
marked with sync=True, and ready() says the moment at which this rank's own work is done and the rest is
waiting. For plain DDP:

    def tell_when_ready(loss, span):
        # The hook runs first in backward and queues span.ready in the autograd engine. Callbacks run after
        # the last gradient, in the order in which they were queued: this one before DDP's, which waits.
        loss.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(span.ready))

    with log_trace_span("backward", sync=True) as span:      # neither of the two under model.no_sync()
        tell_when_ready(loss, span)
        loss.backward()

queue_callback is what FSDP uses, but has no public name. The public way costs a hook a parameter, once:
    from torch.autograd.graph import register_multi_grad_hook
    register_multi_grad_hook(list(model.parameters()), lambda grads: span.ready())

Data-loader workers write files of their own, with a span "fetch" around the samples and the collation of each
batch. Forked workers need nothing, spawned ones and a forkserver's one argument, which is harmless otherwise:
    DataLoader(..., worker_init_fn=trace_worker_init(my_own_init_fn_or_nothing))

Stacks of all threads are written when nothing has come for stall_timeout_s, at `kill -USR1`, at SIGTERM
(install handlers of your own before init) and at a crash in C. What this file does not do: read traces
(trace_tools.py does), or raise into your loop.

THE FORMAT, version 1. One JSON object a line, ASCII, no NaN, in
<output_dir>/<source>.rank<NNNNN>.<start, UTC>.<pid>.jsonl; jobs of more than 256 ranks have a folder for each
256. A full file is renamed to .jsonl.1, .2 ... (higher is older).

    ph  record      fields (in brackets: only where they differ from the default)
    M   header      v, ts, mono_us (the same moment of CLOCK_MONOTONIC), boot_id, rank, local_rank,
                    world_size, node, host, pid, source, worker (a data-loader worker's number, a child's
                    name, null), parent (a child's: pid), run, attempt, heartbeat_s, stall_timeout_s,
                    versions, part (from 0), [continues]: the file name of part - 1
    B   begin       ts, name, [step], [tid], [task], [tags], [sync: true or "soft"], [args]
    E   end         ts, name, [step], dur, [tid], [task], [tags], [err: "Type: message"]. Its begin: ts - dur
    C   scalars     ts, [step], [tid], [task], args: {name: number}
    i   instant     ts, name, [step], [tid], [task], [args]
    D   definition  name or tid, at: a place file:line:function with that name; the thread's name. Once a file

ts: microseconds since 1970, one reading of the wall clock plus the monotonic clock. dur: microseconds,
monotonic. Defaults: no step, the main thread, no asyncio task. NaN and infinities are text. Any record may
have lost: so many records before it could not be written. A file with `continues` begins with the spans that
are still open, whose ts is before the header's. Reserved instants, with their args: ready (span; with the
thread and task of the span), heartbeat (rss_mb, idle_s since the last other record, lost in all), stacks
(why, seconds, threads, the innermost call first; or why, file, offset of what C wrote into <same
name>.stacks.txt), relative_step, signal (for the owner of a handler), process_end (how: ok, exception, exit,
or what the owner of the process said).
"""

import atexit
import datetime
import errno
import faulthandler
import functools
import inspect
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from asyncio import _get_running_loop, current_task
from contextvars import ContextVar
from os import write as _os_write
from sys import _getframe
from threading import get_ident
from time import monotonic_ns
from typing import Any, Callable, Dict, Optional, Tuple, Union

__all__ = ["init_structured_logger", "close_structured_logger", "log_trace_span", "log_trace_scalar",
           "log_trace_instant", "set_step", "get_step", "get_relative_step", "add_step_tag", "get_step_tags",
           "clear_step_tags", "trace_worker_init"]

FORMAT_VERSION = 1
MAX_TEXT = 1000       # characters of a name, or of any text in args; a longer one is cut, and says so
MAX_VALUES = 1000     # values in the args of one record
MAX_NAMES = 4096      # names remembered with their JSON text and call sites
RANKS_A_FOLDER = 256  # larger jobs get a sub-folder for each so many ranks
WORKERS_UP_TO = 64    # ranks up to which data-loader workers are traced unless trace_workers says otherwise
SLOW_WRITE_S = 1.0    # a write that takes longer is named, once
RETRY_S = 1.0         # between attempts to open a file that could not be opened
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")   # floats that strict JSON has as text only

_log = logging.getLogger(__name__)
_tracer: Optional["_Tracer"] = None   # the process's tracer; None: off


# How this file is built. A record is one write(2) of one line, at once: no buffer that a SIGKILL could take,
# no thread that could fall behind. A span costs two system calls, and all else is kept out of its way: lines
# are put together by hand from texts that were made once (names, steps), and what is wrong is asked only when
# a write did not do all that it should. The calls of the API catch every Exception that is not the user's:
# the worst that tracing does to training is one warning.


# ---- 1. Values to JSON: whatever comes in, one line of strict JSON comes out ----

def _json(value: Any) -> str:
    # ASCII, so that neither U+2028 nor a torn character can break a line.
    return json.dumps(_plain(value, 8, [MAX_VALUES]), allow_nan=False, separators=(",", ":"))


def _plain(value: Any, depth: int, budget: list) -> Any:
    """value as plain JSON types. depth and budget (values left) bound cycles and giants."""
    budget[0] -= 1
    # What ends the recursion comes before its bounds: a text may take the place of anything.
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):   # lone surrogates, which strict readers refuse, become U+FFFD
        return _cut(str(value)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if depth <= 0 or budget[0] < 0:
        return "... (cut)"
    try:
        # Numbers; int() and float() take the value of an IntEnum or of another subclass, not its text.
        if isinstance(value, int):
            return int(value) if value.bit_length() <= 64 else _cut(hex(value))
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else json.dumps(float(value))
        # What holds many values, each of which may be of any kind again.
        if isinstance(value, (bytes, bytearray)):
            return _cut(bytes(value[:MAX_TEXT + 1]).decode("utf-8", "backslashreplace"))
        if isinstance(value, dict):
            pairs = _some(value.items(), budget)
            return {_plain(str(k), 1, budget): _plain(v, depth - 1, budget) for k, v in pairs}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [_plain(v, depth - 1, budget) for v in _some(value, budget)]
        if hasattr(value, "__float__") and getattr(value, "shape", ()) == ():
            # NumPy's and torch's scalars, Decimal, Fraction. item() keeps integers, and waits for a device.
            item = value.item() if hasattr(value, "item") else value
            return _plain(item if type(item) in (bool, int, float) else float(item), depth - 1, budget)
    except Exception:   # a set that changes meanwhile, a scalar that is none
        pass
    return _plain(_text(value), depth, budget)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... (cut, {len(text)} characters)"


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:   # a __str__ of the user's
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _some(values: Any, budget: list) -> list:
    return [value for value, _ in zip(values, range(max(budget[0], 0)))]


# ---- 2. The step and its tags: an asyncio task's own where it has some, else the process's ----

class _Step:
    """A step, its tags, and both as text in records. Never changed: a new one takes its place."""
    __slots__ = ("step", "relative_step", "tags", "texts")

    def __init__(self, step: Optional[int] = None, relative_step: Optional[int] = None, tags: tuple = ()):
        self.step, self.relative_step, self.tags = step, relative_step, tags
        self.texts = (f',"step":{_json(step)}' if step is not None else "",
                      f',"tags":{_json(tags)}' if tags else "")


# Two places: a context variable alone would leave threads without the step that the main thread has set, and
# a global alone would give the step of one task to all others.
_step_everywhere = _Step()
_step_here: ContextVar = ContextVar("step", default=_step_everywhere)


def _task() -> Any:
    """The asyncio task that is running in this thread, or None."""
    loop = _get_running_loop()
    return None if loop is None else current_task(loop)


def _step_texts(here: _Step) -> Tuple[str, str]:
    everywhere = _step_everywhere
    return here.texts[0] or everywhere.texts[0], here.texts[1] or everywhere.texts[1]


def set_step(step: int, *, relative_step: Optional[int] = None) -> None:
    """Name the optimizer step that all records from now on belong to, and drop the last step's tags.

    relative_step counts from this start of the process (default: step); an instant says where the two part.
    """
    if _is_compiling():
        return
    global _step_everywhere
    if relative_step is None:
        relative_step = step
    before = _step_everywhere
    _step_everywhere = _Step(step, relative_step)
    _step_here.set(_step_everywhere)
    _find_torch()
    tracer = _tracer
    if tracer is not None:
        try:
            tracer.tagged, tracer.exit_code = False, None   # whoever sets a step has not left
            tracer.look_for_rank()
            # The distance is new at the first step after a resume, not at each step.
            if step - relative_step != (before.step or 0) - (before.relative_step or 0):
                tracer.instant("relative_step", {"relative_step": relative_step})
        except Exception as error:
            tracer.failed(error)


def _numbered() -> _Step:
    here = _step_here.get()
    return here if here.step is not None else _step_everywhere


def get_step() -> Optional[int]:
    """Return the current step, or None."""
    return _numbered().step


def get_relative_step() -> Optional[int]:
    """Return the number of steps since this process started, or None."""
    return _numbered().relative_step


def get_step_tags() -> Tuple[str, ...]:
    """Return the tags of the current step."""
    return _step_here.get().tags or _step_everywhere.tags


def add_step_tag(tag: str) -> None:
    """Mark the current step ("gc", "eval"): begins and ends of spans carry the tag from now on."""
    global _step_everywhere
    if _is_compiling():
        return
    task = _task()
    # A task keeps its tags to itself; a thread without one speaks for the whole process.
    before = _step_everywhere if task is None else _step_here.get()
    if tag not in before.tags:
        tagged = _Step(before.step, before.relative_step, before.tags + (tag,))
        if task is None:
            _step_everywhere = tagged
        else:
            _step_here.set(tagged)
    if _tracer is not None:
        _tracer.tagged = True


def clear_step_tags() -> None:
    """Drop the current step's tags."""
    global _step_everywhere
    if not _is_compiling():
        here, everywhere = _step_here.get(), _step_everywhere
        _step_here.set(_Step(here.step, here.relative_step))
        _step_everywhere = _Step(everywhere.step, everywhere.relative_step)


# Under torch.compile the API does nothing: Dynamo turns this question into a constant and drops the rest of
# the call. torch is looked for, never imported: a program without it has nothing to compile.

def _never() -> bool:
    return False


_is_compiling: Callable[[], bool] = _never   # torch.compiler.is_dynamo_compiling once torch is imported


def _find_torch() -> None:
    global _is_compiling
    if _is_compiling is _never and "torch" in sys.modules:
        compiler = getattr(sys.modules["torch"], "compiler", None)
        _is_compiling = getattr(compiler, "is_dynamo_compiling", _never)


_find_torch()


# ---- 3. Who this process is ----

_SLURM = ("SLURM_NODEID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID")
# Variables of rank, local_rank, world_size, node, attempt and run, by launcher: torchrun, SLURM, Open MPI. A
# SLURM step (srun) may have fewer tasks than its job: its number comes before the job's.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", *_SLURM),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", *_SLURM),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "", "", "PMIX_NAMESPACE"),
)


def _number(variable: str) -> Optional[int]:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _identity(rank: Optional[int]) -> Dict[str, Any]:
    """Rank, world size and so on, by the first that knows: the argument, the launcher, torch.distributed."""
    who = {"rank": 0, "local_rank": 0, "world_size": 1, "node": 0, "attempt": 0, "run": None, "known": False}
    for *numbers, run in _LAUNCHERS:
        if _number(numbers[0]) is not None and _number(numbers[2]) is not None:
            found = dict(zip(("rank", "local_rank", "world_size", "node", "attempt"), map(_number, numbers)))
            who.update({k: v for k, v in found.items() if v is not None}, run=os.environ.get(run), known=True)
            break
    else:   # a launcher that sets none of these: known as soon as the process group is there
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            who.update(rank=distributed.get_rank(), world_size=distributed.get_world_size(), known=True)
    if rank is not None:   # and nobody may have told the size, which is at least this
        who.update(rank=int(rank), world_size=max(who["world_size"], int(rank) + 1), known=True)
    return who


def _proc(name: str) -> str:
    """What a file under /proc says, or nothing where there is none: a thread that is gone, another system."""
    try:
        with open(f"/proc/{name}", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _status(task: str = "self") -> Dict[str, str]:
    return dict(line.split(":\t", 1) for line in _proc(f"{task}/status").splitlines() if ":\t" in line)


# ---- 4. The file: one write a record, and what to do when a write fails ----

# Short writes and rotation are why there is a lock at all: O_APPEND alone keeps whole records apart.

class _Name:
    """What a name needs at each call: its JSON text, the longest span so far, where it was last called."""
    __slots__ = ("text", "longest_us", "code", "lasti", "places")

    def __init__(self, name: str):
        self.text, self.longest_us = f'"name":{_json(name)}', 0
        self.forget()

    def forget(self) -> None:
        self.code, self.lasti = None, -1   # the last call site, as Python's own objects: quick to compare
        self.places: set = set()           # all, as the file has them


class _Tracer:
    """One process's trace. offset_ns: from CLOCK_MONOTONIC to 1970; a child is given its parent's."""

    def __init__(self, settings: Dict[str, Any], who: Dict[str, Any], offset_ns: Optional[int] = None):
        self.settings, self.who, self.is_child = settings, who, offset_ns is not None
        self.offset_ns = offset_ns if self.is_child else time.time_ns() - monotonic_ns()
        self.lock = threading.RLock()   # re-entrant: a signal handler may log while its thread is in here
        # The file.
        self.fd, self.path, self.part = -1, "", 0
        self.limit = int(settings["max_file_size_mb"] * 1e6)
        self.room = -1          # bytes until the file is full; below 0 too if there is something to make up
        self.torn, self.closed = False, False   # torn: the file ends in half a line
        self.lost, self.lost_ever = 0, 0        # records: since the last that was written, and in all
        self.checked = 0        # bytes of the file that were written when it certainly had a name
        self.retry_s, self.open_error = 0.0, OSError()   # not to be opened again before, and why
        # What records are made of.
        self.names: Dict[str, _Name] = {}
        self.open_spans: Dict["log_trace_span", None] = {}   # in the order of their begins
        self.threads, self.main_ident = threading.local(), threading.main_thread().ident
        self.last_us = self.now_us()   # of the last record that was not a heartbeat's
        self.tagged = False            # the step has tags, of which ends must tell
        self.exit_code, self.ended = None, False   # given to sys.exit; process_end has been written
        # What the owner of the process hears of.
        self.warned: set = set()       # kinds of failure
        self.complaints: list = []     # errors to warn of once the lock is free: a logging handler may trace
        self.watch = _Watch(self)

    def now_us(self) -> int:
        return (monotonic_ns() + self.offset_ns) // 1000

    def write(self, line: bytes) -> None:
        """Give a record to the operating system: when this has returned, no SIGKILL can take it back."""
        try:
            with self.lock:   # the fast path; spans have a copy of it: a call takes a tenth of their time
                written = _os_write(self.fd, line) if self.room > 0 else 0
                self.room -= written
                if written != len(line):
                    self.put_rest(line, written)
        except OSError as error:
            self.lose(line, error)

    def lose(self, line: bytes, error: OSError) -> None:
        """Count a record that could not be written. Not under the lock: a logging handler may trace."""
        if not self.closed:
            with self.lock:
                self.room = -1
                self.lost += line.count(b"\n")
                self.lost_ever += line.count(b"\n")
            self.failed(error)

    def put_rest(self, line: bytes, written: int) -> None:
        """Write what the fast path has not: the rest after a short write, or all when it could not try."""
        if self.closed:
            return
        trouble = not written
        if trouble:
            # First mend what is known to be wrong: there is no file yet, or it is full.
            if self.fd < 0:
                self.open()
            elif os.fstat(self.fd).st_size >= self.limit:
                self._rotate()
            # Then make up for what went wrong: say what was lost, and end the line that was torn.
            if self.lost:
                line = line[:-2] + b',"lost":%d}\n' % self.lost
            if self.torn:
                line = b"\n" + line
        try:
            while written < len(line):
                written += _os_write(self.fd, line[written:]) or _no_progress()
        finally:
            if written:
                self.torn = line[written - 1:written] != b"\n"
        if trouble:   # all is well again: back to the fast path
            if self.lost:
                self._forget_definitions()   # some of them may be among the lost
            self.lost, self.room = 0, self.limit - os.fstat(self.fd).st_size
            self.watch.start()

    def failed(self, error: BaseException) -> None:
        """Warn once of each kind of failure; training goes on."""
        kind = getattr(error, "errno", None) or type(error).__name__
        if kind not in self.warned:
            self.warned.add(kind)
            self.warn(f"{type(error).__name__}: {error}. Training goes on; what is lost is counted in "
                      f"{self.path or self.settings['output_dir']}, where writing resumes by itself.")

    def warn(self, message: str) -> None:
        _log.warning("tracing of rank %d: %s", self.who["rank"], message)

    def complain(self) -> None:
        while self.complaints:
            self.failed(self.complaints.pop())

    # -- which file

    def open(self) -> None:
        """Open the first file. Records that come while this fails must not each wait for a dead disk."""
        if time.monotonic() < self.retry_s:
            raise self.open_error.with_traceback(None)   # which would grow with each record
        try:
            path = self._new_path()
            self._adopt(path, self._new_file(path, 0), 0)
        except OSError as error:
            self.retry_s, self.open_error = time.monotonic() + RETRY_S, error
            raise
        # Children of multiprocessing leave by os._exit, past atexit, but run its own finalizers.
        if self.is_child and "multiprocessing.util" in sys.modules:
            sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=0)

    def _new_path(self) -> str:
        folder, rank = self.settings["output_dir"], self.who["rank"]
        if self.who["world_size"] > RANKS_A_FOLDER:   # shared file systems are slow with huge folders
            first = rank // RANKS_A_FOLDER * RANKS_A_FOLDER
            folder = os.path.join(folder, f"ranks{first:05d}-{first + RANKS_A_FOLDER - 1:05d}")
        os.makedirs(folder, exist_ok=True)
        start = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        return os.path.join(folder, f"{self.settings['source']}.rank{rank:05d}.{start}.{os.getpid()}.jsonl")

    def _new_file(self, path: str, part: int) -> int:
        """Create path with the header and the spans still open, or leave nothing. Never somebody else's file:
        O_EXCL, since another host may have the same pid in the same microsecond."""
        text = (_json(self._header(part)) + "\n").encode()
        text += b"".join(span.line for span in list(self.open_spans))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        try:
            while text:
                text = text[_os_write(fd, text) or _no_progress():]
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return fd

    def _adopt(self, path: str, fd: int, part: int) -> None:
        """Write into this file from now on."""
        old, size = self.fd, os.fstat(fd).st_size
        self.path, self.fd, self.part, self.torn, self.checked = path, fd, part, False, size
        self.limit = max(int(self.settings["max_file_size_mb"] * 1e6), 2 * size)   # much may be open
        self.room = -1 if self.lost else self.limit - size
        self._forget_definitions()
        if old >= 0:
            os.close(old)


    def _rotate(self) -> None:
        """Give the full file the name .1 and go on in a new one, complete before it gets the full one's."""
        path, new = self.path, self.path[:-len(".jsonl")] + ".next"
        try:
            fd = self._new_file(new, self.part + 1)
            try:
                self._shift(path)
                os.replace(new, path)
            except BaseException:
                os.close(fd)
                os.unlink(new)
                raise
            self._adopt(path, fd, self.part + 1)
        except OSError as error:   # go on in the old file, and try again later
            self.limit = os.fstat(self.fd).st_size + int(self.settings["max_file_size_mb"] * 1e5)
            self.complaints.append(error)

    def _shift(self, path: str) -> None:
        names = [path] + [f"{path}.{i + 1}" for i in range(self.settings["backup_count"])]
        for older, newer in zip(names[:1:-1], names[-2:0:-1]):
            if os.path.exists(newer):
                os.replace(newer, older)
        if len(names) > 1:
            # A follower always finds a file under the name: the full one, called .1 as well, or the new one.
            try:
                os.link(path, names[1])
            except OSError:   # a file system without hard links
                os.replace(path, names[1])


    def look_for_rank(self) -> None:
        """Give a rank that becomes known late (torch.distributed, no launcher) a file of its own."""
        if self.who["known"]:
            return
        who = _identity(None)
        if who["known"]:
            self.who = {**who, "run": self.who["run"], "attempt": self.who["attempt"]}
            self._move(self._new_path())

    def check_file(self) -> None:
        """When the file was removed, perhaps with its folder, go on in a new one and count what is gone."""
        if self.fd < 0:
            return
        state = os.fstat(self.fd)
        if state.st_nlink:
            self.checked = state.st_size
            return
        # No name is left. Writes go on without an error, into a file that nobody will ever see: what has been
        # written since the last look is lost, and is counted by its newlines.
        with self.lock:
            size = os.fstat(self.fd).st_size
            gone = os.pread(self.fd, size - self.checked, self.checked).count(b"\n")
            self.lost, self.lost_ever = self.lost + gone, self.lost_ever + gone
            self.checked, self.room = size, -1
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._move(self.path)
        self.failed(FileNotFoundError(f"{self.path} was removed"))

    def _move(self, path: str) -> None:
        """Go on in a new file, whose header says which one it continues."""
        try:
            with self.lock:
                if self.fd >= 0:
                    self._adopt(path, self._new_file(path, self.part + 1), self.part + 1)
            if self.watch.started:
                self.watch.follow()
        except OSError as error:
            self.failed(error)

    def _header(self, part: int) -> Dict[str, Any]:
        now_ns, settings = monotonic_ns(), self.settings
        header = {"ph": "M", "v": FORMAT_VERSION, "ts": (now_ns + self.offset_ns) // 1000,
                  "mono_us": now_ns // 1000, "boot_id": _proc("sys/kernel/random/boot_id").strip() or None,
                  **self.who, "host": socket.gethostname(), "pid": os.getpid(), "source": settings["source"],
                  "worker": _worker_label(self.is_child), "parent": os.getppid() if self.is_child else None,
                  "heartbeat_s": settings["heartbeat_s"], "stall_timeout_s": settings["stall_timeout_s"],
                  "part": part,
                  "versions": {"python": "%d.%d.%d" % sys.version_info[:3],
                               "torch": getattr(sys.modules.get("torch"), "__version__", None)}}
        del header["known"]   # ours: whether the rank is more than a guess
        if part:
            header["continues"] = os.path.basename(self.path)
        return header

    # -- what goes into a line

    def name(self, name: str) -> _Name:
        """The entry of a name that has none yet."""
        if len(self.names) >= MAX_NAMES:   # somebody numbers his names
            self.names.clear()
        name = name if type(name) is str else _text(name)
        if name not in self.names:
            self.names[name] = _Name(name)
        return self.names[name]

    def _forget_definitions(self) -> None:
        # Each file defines its own names and threads, since older files go away.
        for info in list(self.names.values()):
            info.forget()
        self.threads = threading.local()

    def definition(self, info: _Name, frame: Any, function: Any = None) -> bytes:
        """The D record of a call site, or nothing if this file has it."""
        if frame.f_lasti == info.lasti and frame.f_code is info.code:
            return b""   # where it was last called
        code, line = frame.f_code, frame.f_lineno
        info.code, info.lasti = code, frame.f_lasti
        # A task's caller is the event loop: of a decorated coroutine, its own place is worth more.
        if frame.f_globals.get("__name__", "").startswith("asyncio.") and hasattr(function, "__code__"):
            code, line = function.__code__, function.__code__.co_firstlineno
        place = f"{code.co_filename}:{line}:{getattr(code, 'co_qualname', code.co_name)}"
        if place in info.places:
            return b""
        info.places.add(place)
        return f'{{"ph":"D",{info.text},"at":{_json(place)}}}\n'.encode()

    def where(self) -> str:
        """The thread and the asyncio task that a record comes from, as JSON text."""
        text = ""
        if get_ident() != self.main_ident:
            text = getattr(self.threads, "text", None)
            if text is None:   # this thread's first record in this file
                text = self.threads.text = f',"tid":{threading.get_native_id()}'
                name = _json(threading.current_thread().name)
                self.write(f'{{"ph":"D"{text},"at":{name}}}\n'.encode())
        task = _task()
        return text if task is None else f'{text},"task":{_json(task.get_name())}'

    def instant(self, name: str, args: Any = None, definition: bytes = b"", where: str = "") -> None:
        text = self.name(name).text
        more = f',"args":{_json(args)}' if args else ""
        step = _step_texts(_step_here.get())[0]
        self.write(definition + f'{{"ph":"i","ts":{self.now_us()},{text}{step}{where}{more}}}\n'.encode())

    def end(self, how: str, **details: Any) -> None:
        """Write how the process ends, once."""
        if not self.ended and self.fd >= 0:
            self.ended = True
            self.instant("process_end", {"how": how, **details})


def _no_progress() -> int:
    raise OSError(errno.EIO, "write(2) wrote nothing")


def _worker_label(is_child: bool) -> Any:
    # A data-loader worker's number, else the name that multiprocessing gave the child, else "fork".
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is not None:
        return info.id
    if not is_child:
        return None
    process = sys.modules.get("multiprocessing.process")
    name = process.current_process().name if process else "MainProcess"
    return "fork" if name == "MainProcess" else name


# ---- 5. Spans, scalars, instants ----

class log_trace_span:
    """Time a block or, as a decorator, each call of a function; the begin is on disk before the block starts.

    sync: in this span ranks wait for each other; its ready() says when this rank's own part is done. "soft":
    some wait for one, as in a broadcast, and nobody for all. description and args are written with the begin.
    stacklevel: one more for each helper of yours in between. One object may be entered again while it is
    open, by any number of threads.
    """
    __slots__ = ("name", "description", "sync", "args", "stacklevel", "function",        # what it is
                 "tracer", "begin_us", "info", "rest", "where", "line", "copies")        # while it is open

    def __init__(self, name: str, description: Optional[str] = None, sync: Union[bool, str] = False,
                 args: Optional[Dict[str, Any]] = None, stacklevel: int = 2):
        self.name, self.description, self.sync, self.args = name, description, sync, args
        self.stacklevel, self.tracer = stacklevel, None

    def __enter__(self) -> "log_trace_span":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass   # while off; _switch puts _enter and _exit in the place of these two

    def ready(self) -> None:
        """Say that this rank's own work in the span is done and the rest is waiting. Any thread may."""
        tracer = self.tracer
        if tracer is not None and tracer is _tracer:
            # The thread and task written are the span's, not the caller's: readers match the two by them.
            span = self.copies[-1] if self.copies else self
            tracer.last_us = now_us = tracer.now_us()
            args = f'"args":{{"span":{span.info.text[7:]}}}'
            tracer.write(f'{{"ph":"i","ts":{now_us},"name":"ready"{span.rest},{args}}}\n'.encode())

    def _copy(self, function: Any = None) -> "log_trace_span":
        # stacklevel: whoever enters a copy is a function of this file, one more than its user.
        copy = log_trace_span(self.name, self.description, self.sync, self.args, self.stacklevel + 1)
        copy.function = function
        return copy

    def __call__(self, function: Callable) -> Callable:
        """Decorate a function, coroutine, generator or async generator: one span a call, until its end."""
        if inspect.iscoroutinefunction(function):
            @functools.wraps(function)
            async def wrapper(*args, **kwargs):
                with self._copy(function):
                    return await function(*args, **kwargs)
        elif inspect.isasyncgenfunction(function):
            @functools.wraps(function)
            async def wrapper(*args, **kwargs):
                with self._copy(function):
                    # What `yield from` does for plain generators: values and exceptions pass both ways.
                    generator = function(*args, **kwargs)
                    try:
                        item = await generator.__anext__()
                        while True:
                            try:
                                sent = yield item
                            except GeneratorExit:
                                await generator.aclose()
                                raise
                            except BaseException as error:
                                item = await generator.athrow(error)
                            else:
                                item = await generator.asend(sent)
                    except StopAsyncIteration:
                        pass
        elif inspect.isgeneratorfunction(function):
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                with self._copy(function):
                    return (yield from function(*args, **kwargs))
        else:
            @functools.wraps(function)
            def wrapper(*args, **kwargs):   # only here is a call short enough for the question to pay
                if _tracer is None or _is_compiling():
                    return function(*args, **kwargs)
                with self._copy(function):
                    return function(*args, **kwargs)
        return wrapper


# The two ends of a span, as functions so that _switch can put them into the class. Nearly all that tracing
# costs is spent here: hence the locals, the copies of _Tracer.now_us and .write, and a lock held for no more
# than the write and the room it took.

def _enter(span: log_trace_span) -> log_trace_span:
    tracer = _tracer
    if tracer is None or _is_compiling():
        return span
    if span.tracer is tracer:   # entered again while it is open: by recursion, another thread, another task
        copy = span._copy()
        span.copies = (span.copies or []) + [copy]
        return _enter(copy)
    try:
        try:
            info = tracer.names[span.name]
        except (KeyError, TypeError):   # a new name, or one that cannot be a key
            info = tracer.name(span.name)
        try:
            frame = _getframe(span.stacklevel - 1)
        except ValueError:   # a stacklevel beyond the stack
            frame = _getframe(1)
        # What the begin says beyond its name. step and where are the end's too; tags, sync and args are not.
        here = _step_here.get()
        step, more = here.texts if here is _step_everywhere else _step_texts(here)
        if span.sync:
            more += ',"sync":"soft"' if span.sync == "soft" else ',"sync":true'
        if span.args is not None or span.description is not None:
            more += _begin_args(span)
        is_plain = get_ident() == tracer.main_ident and _get_running_loop() is None
        span.where = where = "" if is_plain else tracer.where()
        span.tracer, span.info, span.copies = tracer, info, None
        span.rest = rest = step + where
        # The clock is read as late as the line permits, so that the span is the user's time and not ours.
        span.begin_us = tracer.last_us = now_us = (monotonic_ns() + tracer.offset_ns) // 1000
        span.line = line = f'{{"ph":"B","ts":{now_us},{info.text}{rest}{more}}}\n'.encode()
        if frame.f_lasti != info.lasti or frame.f_code is not info.code:   # not where it was last entered
            line = tracer.definition(info, frame, getattr(span, "function", None)) + line
        with tracer.lock:
            written = _os_write(tracer.fd, line) if tracer.room > 0 else 0
            tracer.room -= written
            if written != len(line):
                tracer.put_rest(line, written)
            tracer.open_spans[span] = None
    except OSError as error:
        tracer.lose(line, error)
        tracer.open_spans[span] = None   # the next file will repeat it
    except Exception as error:
        tracer.failed(error)
    return span


def _exit(span: log_trace_span, kind: Any = None, error: Any = None, trace: Any = None) -> None:
    tracer = span.tracer
    if tracer is None:
        return
    try:
        if tracer is not _tracer:   # closed meanwhile, or a forked child: the begin is in another file
            span.tracer = span.copies = None
            return
        if span.copies and _exit_copy(span, kind, error):
            return
        span.tracer, info = None, span.info
        tracer.last_us = now_us = (monotonic_ns() + tracer.offset_ns) // 1000
        dur = now_us - span.begin_us
        if dur > info.longest_us:
            info.longest_us = dur
        more = _end_texts(span, kind, error) if tracer.tagged or kind is not None else ""
        line = f'{{"ph":"E","ts":{now_us},{info.text}{span.rest},"dur":{dur}{more}}}\n'.encode()
        with tracer.lock:
            tracer.open_spans.pop(span, None)
            written = _os_write(tracer.fd, line) if tracer.room > 0 else 0
            tracer.room -= written
            if written != len(line):
                tracer.put_rest(line, written)
    except OSError as failure:
        tracer.lose(line, failure)
    except Exception as failure:
        tracer.failed(failure)


def _exit_copy(span: log_trace_span, kind: Any, error: Any) -> bool:
    """End the last begin of this thread and task: that of a copy, or (False) that of the object itself."""
    where = span.tracer.where()
    for i in range(len(span.copies) - 1, -1, -1):
        if span.copies[i].where == where:
            _exit(span.copies.pop(i), kind, error)
            return True
    return False


def _begin_args(span: log_trace_span) -> str:
    args = {} if span.description is None else {"description": span.description}
    if span.args is not None:
        args.update(span.args if isinstance(span.args, dict) else {"args": span.args})
    return f',"args":{_json(args)}'


def _end_texts(span: log_trace_span, kind: Any, error: Any) -> str:
    step, more = _step_texts(_step_here.get())
    if not span.rest.startswith(step):
        more = ""   # another step's tags
    # Exceptions that only say that a generator is done are no errors.
    if kind is not None and not issubclass(kind, (GeneratorExit, StopIteration, StopAsyncIteration)):
        more += f',"err":{_json(f"{kind.__name__}: {_text(error)}")}'
    return more


def _switch(on: bool) -> None:
    """Exchange the methods themselves, so that a span that is off does not even ask whether it is."""
    log_trace_span.__enter__, log_trace_span.__exit__ = (_enter, _exit) if on else _OFF


_OFF = (log_trace_span.__enter__, log_trace_span.__exit__)


def log_trace_scalar(scalars: Dict[str, float], *, step: Optional[int] = None, stacklevel: int = 2) -> None:
    """Write numbers of the current step, or of an earlier one that they belong to, in one record.

    NumPy's and torch's scalars will do (a device tensor waits for its device); what is no number is skipped
    with one warning.
    """
    tracer = _tracer
    if tracer is None or _is_compiling():
        return
    try:
        texts, definitions = [], b""
        for name, value in scalars.items():
            info = tracer.names.get(name) or tracer.name(name)
            if not info.places:
                definitions += tracer.definition(info, _caller(stacklevel))
            # Ordinary numbers are their own JSON text; value - value tells NaN and infinities.
            kind = type(value)
            if not (kind is float and value - value == 0.0 or kind is int and -2**63 <= value < 2**63):
                value = _number_text(value)
                if value is None:
                    tracer.failed(TypeError(f"log_trace_scalar: {name!r} is {kind.__name__}, want a number"))
                    continue
            texts.append(f"{info.text[7:]}:{value}")
        if not texts:
            return
        where = tracer.where()
        step_text = _step_texts(_step_here.get())[0] if step is None else f',"step":{_json(step)}'
        tracer.last_us = now_us = (monotonic_ns() + tracer.offset_ns) // 1000
        line = f'{{"ph":"C","ts":{now_us}{step_text}{where},"args":{{{",".join(texts)}}}}}\n'
        tracer.write(definitions + line.encode())
    except Exception as error:
        tracer.failed(error)


def _number_text(value: Any) -> Optional[str]:
    """Any other number as JSON text, or None for what is none: a text that reads like one is no number."""
    if isinstance(value, (str, bytes, bool)):
        return None
    plain = _plain(value, 2, [2])
    is_number = type(plain) in (int, float) or isinstance(value, int) or plain in _NOT_FINITE
    return json.dumps(plain) if is_number else None


def log_trace_instant(name: str, args: Optional[Dict[str, Any]] = None, *, stacklevel: int = 2) -> None:
    """Write that something happened at this moment."""
    tracer = _tracer
    if tracer is None or _is_compiling():
        return
    try:
        name = _text(name)
        definition = tracer.definition(tracer.name(name), _caller(stacklevel))
        tracer.last_us = tracer.now_us()
        tracer.instant(name, args, definition, tracer.where())
    except Exception as error:
        tracer.failed(error)


def _caller(stacklevel: int) -> Any:
    try:
        return _getframe(stacklevel)
    except ValueError:   # a stacklevel beyond the stack
        return _getframe(2)


# ---- 6. Alive or not: heartbeats, stall stacks, dumps from C ----

class _Watch:
    """The heartbeat thread, and what faulthandler writes into <same name>.stacks.txt when Python cannot."""

    def __init__(self, tracer: _Tracer):
        self.tracer, self.started = tracer, False
        self.heartbeat_s = tracer.settings["heartbeat_s"]
        self.stall_timeout_s = tracer.settings["stall_timeout_s"]
        self.tick_s = min((s for s in (self.heartbeat_s, self.stall_timeout_s / 4) if s), default=0.0)
        self.stop_asked, self.thread = threading.Event(), None
        self.stacks, self.stacks_path, self.stacks_size = None, "", 0   # the file that C writes into
        self.signals: Dict[int, Any] = {}   # registered with faulthandler -> the Python handler at that time
        self.enabled_faults = False         # faulthandler.enable was called here
        self.arming = threading.RLock()     # of the timer; held over a fork: see _before_fork
        self.timer_tid, self.timer_is_ours = None, False   # its thread's id as text, where it is known
        self.next_stall_s = 0.0

    def start(self) -> None:
        """Begin, once there is a file; all further calls do nothing."""
        if self.started:
            return
        self.started = True
        try:
            self.follow()
            if self.tick_s:
                self.timer_is_ours = self._timer_is_free()
                self.arm()
                self.thread = threading.Thread(target=self._run, name="tracing-heartbeat", daemon=True)
                self.thread.start()
        except Exception as error:
            self.tracer.complaints.append(error)

    def stop(self) -> None:
        """End the thread and give faulthandler back as it was, as far as it is still ours."""
        self.stop_asked.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(2.0)   # bounded: it may hang in a write to a dead file system
        with self.arming:
            self.disarm()
        self.unregister()
        if self.stacks is not None:
            _close_stacks(self.stacks, self.stacks_path)

    def follow(self) -> None:
        """Have C write beside the trace: at first, and when that has moved."""
        old, old_path = self.stacks, self.stacks_path
        self.stacks_path = self.tracer.path[:-len(".jsonl")] + ".stacks.txt"
        self.stacks, self.stacks_size = open(self.stacks_path, "ab", buffering=0), 0
        self._register()
        if old is not None:
            self.arm()   # the timer, too, must not write into a closed file
            _close_stacks(old, old_path)

    def _register(self) -> None:
        # Crashes in C (SIGSEGV and so on), unless the owner of the process has them written elsewhere.
        if self.enabled_faults or not faulthandler.is_enabled():
            faulthandler.enable(self.stacks)
            self.enabled_faults = True
        if not hasattr(faulthandler, "register"):   # Windows
            return
        # SIGUSR1 only where nobody has it, in Python or in C: faulthandler would take it away from its owner.
        usr1, term = signal.SIGUSR1, signal.SIGTERM
        caught = int(_status().get("SigCgt", "0"), 16)   # a bit mask
        is_free = signal.getsignal(usr1) == signal.SIG_DFL and not caught >> (usr1 - 1) & 1
        if usr1 in self.signals or is_free:
            faulthandler.register(usr1, self.stacks, all_threads=True)
            self.signals[usr1] = signal.SIG_DFL
        # SIGTERM in passing (chain). A data-loader worker's is its parent's ordinary way to end it: no news.
        if not self.tracer.is_child:
            self.signals.setdefault(term, signal.getsignal(term))
            faulthandler.register(term, self.stacks, all_threads=True, chain=True)

    def unregister(self) -> None:
        """Also in a forked child, whose signals must not write into its parent's file."""
        for number, handler in self.signals.items():
            if signal.getsignal(number) == handler:   # else somebody came after us, whom this would undo
                faulthandler.unregister(number)
        self.signals = {}
        if self.enabled_faults:
            faulthandler.disable()
            self.enabled_faults = False

    # -- faulthandler's timer, which speaks when C code holds the GIL. There is one a process, to arm it takes
    # it from its owner, and no API says whose it is; but it is a thread, which can be seen among the others.

    def _timer_is_free(self) -> bool:
        for _ in range(10):   # a cancelled timer's thread takes a moment to go
            if not _timer_threads():
                return True
            time.sleep(0.01)
        self.tracer.warn("faulthandler.dump_traceback_later is in use by somebody else, who keeps it: no "
                         "stacks when C code hangs with the GIL")
        return False

    def arm(self) -> None:
        """Have C write all stacks unless we come back in time."""
        if not self.stall_timeout_s or self.stacks is None:
            return
        with self.arming:
            if not self.timer_is_ours or self.stop_asked.is_set():
                return
            if self.timer_tid is not None and not self._timer_lives():
                # Fired, cancelled or replaced. If replaced, it is somebody else's now.
                self.timer_is_ours, self.timer_tid = self._timer_is_free(), None
                if not self.timer_is_ours:
                    return
            # The thread that is new afterwards is the timer, if no other has started just now.
            before = _thread_ids()
            faulthandler.dump_traceback_later(self._patience_s() + self.tick_s, file=self.stacks)
            new = _thread_ids() - before
            self.timer_tid = new.pop() if len(new) == 1 else None

    def disarm(self) -> None:
        """Call with self.arming held."""
        if self.timer_is_ours and (self.timer_tid is None or self._timer_lives()):
            faulthandler.cancel_dump_traceback_later()
        self.timer_tid = None

    def _timer_lives(self) -> bool:
        return os.path.exists(f"/proc/self/task/{self.timer_tid}")

    # -- the heartbeat thread

    def _run(self) -> None:
        due_s = last_s = time.monotonic()
        while not self.stop_asked.wait(self.tick_s):
            now_s = time.monotonic()
            # A thread that wakes far too late was frozen with its process (SIGSTOP, GIL): nobody stalled.
            frozen, last_s = now_s - last_s > 3 * self.tick_s + 1.0, now_s
            try:
                self.tracer.complain()   # of what failed under the lock
                idle_s = (self.tracer.now_us() - self.tracer.last_us) / 1e6
                # What may have changed meanwhile: the file, the rank, dumps from C.
                self.tracer.check_file()
                self.tracer.look_for_rank()
                self._notice_dumps()
                # Due half a tick early: a wait that ends a little too soon would else skip a whole beat.
                if self.heartbeat_s and now_s >= due_s:
                    due_s = now_s + self.heartbeat_s - self.tick_s / 2
                    self._beat(idle_s)
                if self.stall_timeout_s and not frozen:
                    self._look_for_stall(idle_s)
                self.arm()
                _find_torch()
            except Exception as error:
                self.tracer.failed(error)

    def _beat(self, idle_s: float) -> None:
        tracer, before_s = self.tracer, time.monotonic()
        args = {"rss_mb": _rss_mb(), "idle_s": round(idle_s, 3), "lost": tracer.lost_ever}
        tracer.instant("heartbeat", args)
        took_s = time.monotonic() - before_s
        if took_s > SLOW_WRITE_S and "slow" not in tracer.warned:
            tracer.warned.add("slow")
            tracer.warn(f"a write to {tracer.path} took {took_s:.1f} s. This rank's training waits for its "
                        "traces: put them on a faster disk")

    def _patience_s(self) -> float:
        """The stall time-out, or twice the longest that the innermost open span has ever taken."""
        spans = list(self.tracer.open_spans)
        innermost = [s for s in spans if not s.where][-1:] or spans[-1:]   # the main thread's, if it has one
        return max([self.stall_timeout_s] + [2e-6 * span.info.longest_us for span in innermost])

    def _look_for_stall(self, idle_s: float) -> None:
        patience_s = self._patience_s()
        if idle_s < patience_s:
            self.next_stall_s = 0.0
        elif idle_s >= self.next_stall_s and (self.tracer.open_spans or not self.tracer.is_child):
            # A worker without an open span waits for its parent to ask, which is no stall.
            self.next_stall_s = 2 * idle_s
            args = {"why": "stall", "seconds": round(idle_s, 3), "threads": _all_stacks(self.thread)}
            self.tracer.instant("stacks", args)

    def _notice_dumps(self) -> None:
        # faulthandler tells nobody that it wrote: the trace says where to look.
        if self.stacks is not None:
            size = os.fstat(self.stacks.fileno()).st_size
            if size > self.stacks_size:
                why = "written in C: a signal, or the GIL held too long"
                name = os.path.basename(self.stacks_path)
                self.tracer.instant("stacks", {"why": why, "file": name, "offset": self.stacks_size})
            self.stacks_size = size


def _close_stacks(stacks: Any, path: str) -> None:
    try:
        empty = not os.fstat(stacks.fileno()).st_size   # nothing has happened, nothing to keep
        stacks.close()
        if empty:
            os.unlink(path)
    except OSError:
        pass


def _all_stacks(but: Any) -> list:
    """Every Python thread's stack, but for one, innermost calls first; as much as a record can hold."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)   # None: a thread of C's that has run Python
        if thread is not but:
            stacks.append({"name": thread.name if thread else "?", "tid": getattr(thread, "native_id", None),
                           "stack": _places(traceback.walk_stack(frame))[:40]})
    return stacks[:20]


def _places(frames: Any) -> list:
    return [f"{frame.f_code.co_filename}:{line}:{frame.f_code.co_name}" for frame, line in frames]


def _rss_mb() -> Optional[float]:
    pages = _proc("self/statm").split()
    return round(int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1) if pages else None


def _thread_ids() -> set:
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()


def _timer_threads() -> set:
    """The threads that look like faulthandler's timer, which no API tells of: named as the main thread is,
    and with every signal blocked, which nothing else in CPython does."""
    everything = 0x7FFBFEFF   # signals 1 to 31, without KILL and STOP
    main_name, found = _status().get("Name"), set()
    for tid in _thread_ids():
        status = _status(f"self/task/{tid}")
        if status.get("Name") == main_name and int(status["SigBlk"], 16) & everything == everything:
            found.add(tid)
    return found


# ---- 7. Forks, workers, and the end of the process ----

_forking: Optional[_Tracer] = None   # the tracer whose timer is held off while the process forks


def _before_fork() -> None:
    """Hold the timer off: a child that inherits an armed one never exits, but waits for a thread it lacks."""
    global _forking
    tracer = _tracer
    if tracer is not None:
        tracer.watch.arming.acquire()
        tracer.watch.disarm()
        _forking = tracer


def _after_fork_in_parent() -> None:
    global _forking
    tracer, _forking = _forking, None
    if tracer is not None:
        tracer.watch.arm()
        tracer.watch.arming.release()


def _after_fork_in_child() -> None:
    """A child never writes into its parent's file: its own one begins with its first record."""
    global _tracer, _settings, _forking, _step_everywhere
    parent = _tracer
    if parent is None:
        return
    _tracer = _settings = _forking = None
    try:
        # Let go of all that is the parent's. Its locks are left behind, whoever held them at the fork.
        parent.watch.unregister()
        if parent.fd >= 0:
            os.close(parent.fd)
        if parent.watch.stacks is not None:
            parent.watch.stacks.close()
        # The step as well, which a child does not follow: a worker fetches ahead of it.
        _step_everywhere = _Step()
        _step_here.set(_step_everywhere)
        if parent.settings["trace_workers"]:
            _tracer = _Tracer(parent.settings, parent.who, parent.offset_ns)
    except Exception as error:
        parent.failed(error)


class trace_worker_init:
    """A worker_init_fn that traces data-loader workers, spawned ones too, then calls the given one:
    DataLoader(dataset, num_workers=4, worker_init_fn=trace_worker_init())."""

    def __init__(self, worker_init_fn: Optional[Callable[[int], None]] = None):
        self.worker_init_fn, self.parents, tracer = worker_init_fn, None, _tracer
        if tracer is not None and tracer.settings["trace_workers"]:
            self.parents = tracer.settings, tracer.who, tracer.offset_ns   # pickled for spawned workers
            _trace_fetches()

    def __call__(self, worker_id: int) -> None:
        global _tracer
        if _tracer is None and self.parents is not None:   # not forked, or it would have one
            _tracer = _Tracer(*self.parents)
            _begin_process()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _trace_fetches() -> None:
    """Put a span around what PyTorch's loader does for a batch, samples and collation, in any process."""
    # Private names of PyTorch's: where they are missing, there is no "fetch", and nothing else is amiss.
    fetchers = sys.modules.get("torch.utils.data._utils.fetch")
    for kind in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(fetchers, kind, None)
        if hasattr(fetcher, "fetch") and not hasattr(fetcher.fetch, "__wrapped__"):
            fetcher.fetch = log_trace_span("fetch")(fetcher.fetch)


_settings: Optional[Dict[str, Any]] = None   # the arguments that tracing has begun with
_excepthook: Optional[Callable] = None   # what was there before ours; None: nothing has been hooked yet
_sys_exit: Optional[Callable] = None


def _begin_process() -> None:
    """What is registered once: the fork hooks and the ways in which a process can end."""
    global _excepthook, _sys_exit
    _find_torch()
    _switch(True)
    if _tracer.settings["trace_workers"]:
        _trace_fetches()
    if _excepthook is None:
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent,
                                after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)
        _excepthook, sys.excepthook = sys.excepthook, _on_exception
        _sys_exit, sys.exit = sys.exit, _on_sys_exit


def _on_exception(kind: Any, error: Any, trace: Any) -> None:
    tracer = _tracer
    if tracer is not None:
        try:
            tracer.end("exception", **_describe(error))
        except Exception as failure:
            tracer.failed(failure)
    _excepthook(kind, error, trace)


def _describe(error: BaseException) -> Dict[str, Any]:
    frames = _places(traceback.walk_tb(error.__traceback__))
    return {"type": type(error).__name__, "message": _text(error), "frames": frames[:-11:-1]}


def _on_sys_exit(code: Any = None) -> None:
    # atexit is not told the exit code: it is kept from here. set_step forgets it if the exit was caught.
    tracer = _tracer
    if tracer is not None and threading.current_thread() is threading.main_thread():
        tracer.exit_code = code
    _sys_exit(code)


def _at_exit() -> None:
    # Nobody closed: the interpreter ends all the same, which is less than "ok". No file, nothing to end.
    if _tracer is not None and _tracer.fd >= 0:
        code = _tracer.exit_code
        close_structured_logger("exit", **({} if code is None else {"code": code}))


# ---- 8. On and off ----

def init_structured_logger(source: str, output_dir: str, rank: Optional[int] = None, enable: bool = True, *,
                           max_file_size_mb: float = 128, backup_count: int = 3, heartbeat_s: float = 5,
                           stall_timeout_s: float = 120, trace_workers: Optional[bool] = None,
                           run: Optional[str] = None, attempt: Optional[int] = None) -> None:
    """Start this process's trace in output_dir; a second call with the same arguments is quiet.

    source: what the process is ("training"), part of the file's name. rank: if the launcher's variables do
    not tell. max_file_size_mb, backup_count: a full file is renamed to .1, and so many older ones are kept.
    heartbeat_s, stall_timeout_s: 0 switches off. trace_workers: data-loader workers and other forked
    children; None: up to 64 ranks. run, attempt: the run's name and the number of its start, where the caller
    knows better than the launcher's variables. Raises ValueError for a setting that makes no sense, or when
    tracing has begun with others.
    """
    global _tracer, _settings
    settings = {"source": str(source), "output_dir": os.path.abspath(os.fspath(output_dir)), "rank": rank,
                "enable": bool(enable), "max_file_size_mb": max_file_size_mb, "backup_count": backup_count,
                "heartbeat_s": heartbeat_s, "stall_timeout_s": stall_timeout_s,
                "trace_workers": trace_workers, "run": run, "attempt": attempt}
    _check(settings)
    # Called again: the same is quiet, since libraries and scripts may both call; another is a mistake.
    if _settings is not None:
        other = [k for k in settings if settings[k] != _settings[k]]
        if other:
            raise ValueError("init_structured_logger: tracing has begun with other arguments ("
                             + ", ".join(f"{k}={_settings[k]!r}, now {settings[k]!r}" for k in other)
                             + "); call close_structured_logger() first")
        return
    close_structured_logger()   # a child that has already traced as a child
    _settings = settings
    if not enable:
        return
    # Who we are decides whether workers are traced, where nobody has said so.
    who = _identity(rank)
    who.update({key: value for key, value in (("run", run), ("attempt", attempt)) if value is not None})
    if trace_workers is None:
        settings = {**settings, "trace_workers": who["world_size"] <= WORKERS_UP_TO}
    _tracer = _Tracer(settings, who)
    _begin_process()
    try:   # to open the file now: a process that dies before its first record has one
        with _tracer.lock:
            _tracer.open()
        _tracer.watch.start()
    except OSError as error:
        _tracer.failed(error)


def _check(settings: Dict[str, Any]) -> None:
    def want(key: str, is_good: bool, wanted: str) -> None:
        if not is_good:
            raise ValueError(f"init_structured_logger: {key}={settings[key]!r}, want {wanted}")

    for key in ("max_file_size_mb", "backup_count", "heartbeat_s", "stall_timeout_s"):
        number, least = settings[key], 0.01 if key == "max_file_size_mb" else 0
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        want(key, is_number and least <= number < 1e9, f"a number from {least}")
    want("backup_count", isinstance(settings["backup_count"], int), "a whole number")
    source, rank = settings["source"], settings["rank"]
    want("source", source and not set(source) & set("/\\\0"), "a word that can be in a file name")
    want("rank", rank is None or isinstance(rank, int) and rank >= 0, "a number from 0, or None")


def close_structured_logger(how: str = "ok", **details: Any) -> None:
    """Write how the process ends and stop tracing: "ok", or what else the owner of the process knows.

    how="exception" adds type, message and innermost frames of the exception that is being handled.
    """
    global _tracer, _settings
    tracer, _settings = _tracer, None
    if tracer is None:
        return
    try:
        error = sys.exc_info()[1]
        if how == "exception" and error is not None:
            details = {**_describe(error), **details}
        tracer.end(how, **details)
        # From here on the API does nothing. A thread that is inside it finds the tracer closed.
        _switch(False)
        _tracer = None
        tracer.watch.stop()
        tracer.complain()
        with tracer.lock:
            tracer.closed, tracer.room = True, -1
            if tracer.fd >= 0:
                os.close(tracer.fd)
                tracer.fd = -1
    except Exception as error:
        tracer.failed(error)
