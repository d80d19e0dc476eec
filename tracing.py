"""Per-process traces of a training job: JSON lines that survive a SIGKILL, a full disk and a hang.

Copy this one file into any codebase: standard library only, Python 3.8 and newer, Linux first. torchtitan's names.

    from tracing import close_structured_logger, init_structured_logger, log_trace_scalar, log_trace_span, set_step

    init_structured_logger("training", "exp/run1/structured_logs")     # once a process; before it every call is a no-op
    for step in range(1, steps + 1):
        set_step(step)
        with log_trace_span("forward"):                  # or @log_trace_span("forward") above any kind of function
            loss = model(batch)
        log_trace_scalar({"tokens": 4096})
    close_structured_logger()                            # says that the process ended well

In data-parallel training a slow rank makes all others wait. A span in which ranks wait for each other is marked with
sync=True, and ready() says the moment at which this rank's own work is done and the rest is waiting. For plain DDP:

    def tell_when_ready(loss, span):
        # The hook runs first in backward and queues span.ready in the autograd engine. Callbacks run in the order in
        # which they were queued, after the last gradient: this one just before DDP's own, which waits for the ranks.
        loss.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback(span.ready))

    with log_trace_span("backward", sync=True) as span:      # accumulation: neither of the two under model.no_sync()
        tell_when_ready(loss, span)
        loss.backward()

queue_callback is the call that FSDP uses, but has no public name. The public one costs a hook on each parameter, once:
    register_multi_grad_hook(list(model.parameters()), lambda grads: span.ready())     # from torch.autograd.graph

Data-loader workers write files of their own: a span "fetch" around the samples and the collation of each batch. Forked
workers need nothing, spawned ones and those of a forkserver one argument, harmless otherwise:
    DataLoader(..., worker_init_fn=trace_worker_init(my_own_init_fn_or_nothing))

THE FORMAT, version 1. One JSON object a line, ASCII, no NaN. <output_dir>/<source>.rank<NNNNN>.<start, UTC>.<pid>.jsonl;
in a sub-folder for each 256 ranks in jobs of more. Rotation renames to .jsonl.1, .2 ... (higher is older).

    ph  record      fields (in brackets: only where it differs from the default)
    M   header      v, ts, mono_us (the same moment of CLOCK_MONOTONIC), boot_id, rank, local_rank, world_size, node, host,
                    pid, source, worker (data-loader worker's number, a child process's name, null), parent (its pid),
                    run, attempt, heartbeat_s, stall_timeout_s, versions, part (from 0); [continues]: file name of part - 1
    B   begin       ts, name, [step], [tid], [task], [tags], [sync: true or "soft"], [args]
    E   end         ts, name, [step], dur, [tid], [task], [tags], [err: "Type: message"]; its begin has ts = ts - dur
    C   scalars     ts, [step], [tid], [task], args: {name: number}
    i   instant     ts, name, [step], [tid], [task], [args]
    D   definition  name or tid, at: a place file:line:function that a name comes from; a thread's name. Once a file

ts: microseconds since 1970, one reading of the wall clock plus the monotonic clock. dur: microseconds, monotonic. step,
tid, task: none, the main thread, no asyncio task. NaN and infinities are text. Any record may hold lost: so many records
before it could not be written. A file with `continues` begins with the spans still open: begins whose ts is before the
header's. Reserved instants: ready (with the thread and task of its span; args: span), heartbeat (args: rss_mb, idle_s
since the last other record, lost in all), stacks (args: why, seconds, threads: the innermost call first; or why, file,
offset: what C wrote into <same name>.stacks.txt), relative_step, signal (for the owner of a handler), process_end (args:
how: ok, exception, exit, or what the owner said).

Stacks are written when nothing has come for stall_timeout_s, at `kill -USR1`, at SIGTERM (install handlers of your own
before init) and at a crash in C. What this file does not do: read traces (trace_tools.py does), or raise into your loop.
"""

import atexit
import datetime
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

_log = logging.getLogger(__name__)
_tracer: Optional["_Tracer"] = None   # the process's tracer; None: off


# ---- 1. Values to JSON: whatever comes in, one line of strict JSON comes out ----

def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... (cut, {len(text)} characters)"


def _json(value: Any) -> str:
    # ASCII, so that neither U+2028 nor a torn multi-byte character can break a line; lone surrogates become U+FFFD.
    return json.dumps(_plain(value, 8, [MAX_VALUES]), allow_nan=False, separators=(",", ":"))


def _plain(value: Any, depth: int, budget: list) -> Any:
    """value as plain JSON types. depth and budget (values left) bound cycles and giants."""
    budget[0] -= 1
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _cut(str(value)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if depth <= 0 or budget[0] < 0:
        return "... (cut)"
    try:
        if isinstance(value, int):
            return int(value) if value.bit_length() <= 64 else _cut(hex(value))
        if isinstance(value, float):
            value = float(value)
            return value if math.isfinite(value) else _NOT_FINITE[str(value)]
        if isinstance(value, (bytes, bytearray)):
            return _cut(bytes(value[:MAX_TEXT + 1]).decode("utf-8", "backslashreplace"))
        if isinstance(value, dict):
            return {_plain(str(k), 1, budget): _plain(v, depth - 1, budget) for k, v in _some(value.items(), budget)}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [_plain(v, depth - 1, budget) for v in _some(value, budget)]
        if hasattr(value, "__float__") and getattr(value, "shape", ()) == ():
            # NumPy's and torch's scalars, Decimal, Fraction. item() keeps integers; a device tensor waits for its device.
            item = value.item() if hasattr(value, "item") else value
            return _plain(item if type(item) in (bool, int, float) else float(item), depth - 1, budget)
        return _plain(str(value), depth, budget)
    except Exception as error:   # a __str__ that raises, a set that changes meanwhile
        return f"<{type(value).__name__}: {type(error).__name__}>"


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _some(values: Any, budget: list) -> list:
    return [value for value, _ in zip(values, range(max(budget[0], 0)))]


# ---- 2. The step, and its tags: an asyncio task's own where it has one, else the process's (torchtitan's rules) ----

class _Step:
    __slots__ = ("step", "relative_step", "tags", "text", "tags_text")

    def __init__(self, step: Optional[int] = None, relative_step: Optional[int] = None, tags: Tuple[str, ...] = ()):
        self.step, self.relative_step, self.tags = step, relative_step, tags
        self.text = "" if step is None else f',"step":{_json(step)}'
        self.tags_text = f',"tags":{_json(tags)}' if tags else ""


_step_everywhere = _Step()
_step_here: ContextVar = ContextVar("step", default=_step_everywhere)


def set_step(step: int, *, relative_step: Optional[int] = None) -> None:
    """Name the optimizer step that all records from now on belong to, and drop the last step's tags.

    relative_step counts from this start of the process (default: step). Where the two drift apart, an instant says so.
    """
    if _is_compiling():
        return
    global _step_everywhere
    before = _step_everywhere
    state = _Step(step, step if relative_step is None else relative_step)
    _step_everywhere = state
    _step_here.set(state)
    _find_torch()
    if _tracer is not None:
        try:
            _tracer.exit_code = None   # whoever sets a step goes on
            _tracer.look_for_rank()
            shift = state.step - state.relative_step
            if shift != (0 if before.step is None else before.step - before.relative_step):
                log_trace_instant("relative_step", {"relative_step": state.relative_step})
        except Exception as error:
            _tracer.failed(error)


def get_step() -> Optional[int]:
    """Return the current step, or None."""
    here = _step_here.get()
    return here.step if here.step is not None else _step_everywhere.step


def get_relative_step() -> Optional[int]:
    """Return the number of steps since this process started, or None."""
    here = _step_here.get()
    return here.relative_step if here.step is not None else _step_everywhere.relative_step


def get_step_tags() -> Tuple[str, ...]:
    """Return the tags of the current step."""
    return _step_here.get().tags or _step_everywhere.tags


def add_step_tag(tag: str) -> None:
    """Mark the current step ("gc", "eval"): the begins and ends of spans from now on carry the tag."""
    if not _is_compiling():
        here = _step_here.get()
        _set_tags(here.tags if _in_task() else _step_everywhere.tags, tag)


def clear_step_tags() -> None:
    """Drop the current step's tags."""
    if not _is_compiling():
        _set_tags((), None)


def _set_tags(tags: Tuple[str, ...], tag: Optional[str]) -> None:
    global _step_everywhere
    if tag is not None and tag not in tags:
        tags += (tag,)
    here, everywhere = _step_here.get(), _step_everywhere
    if _in_task() or tag is None:
        _step_here.set(_Step(here.step, here.relative_step, tags))
    if not _in_task() or tag is None:
        _step_everywhere = _Step(everywhere.step, everywhere.relative_step, tags)


def _in_task() -> bool:
    loop = _get_running_loop()
    return loop is not None and current_task(loop) is not None


def _never() -> bool:
    return False


_is_compiling: Callable[[], bool] = _never   # torch.compiler.is_compiling as soon as somebody has imported torch


def _find_torch() -> None:
    global _is_compiling
    if _is_compiling is _never and "torch" in sys.modules:
        compiler = getattr(sys.modules["torch"], "compiler", None)
        _is_compiling = getattr(compiler, "is_compiling", _never)


# ---- 3. Who this process is ----

_LAUNCHERS = (   # torchrun, SLURM, Open MPI: rank, local_rank, world_size, node, attempt, run
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_RESTART_COUNT", "SLURM_JOB_ID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "", "", "PMIX_NAMESPACE"),
)


def _number(variable: str) -> Optional[int]:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _identity(rank: Optional[int]) -> Dict[str, Any]:
    """rank, world size and so on by the first that knows: the argument, the launcher's variables, torch.distributed."""
    who = {"rank": 0, "local_rank": 0, "world_size": 1, "node": 0, "attempt": 0, "run": None, "known": False}
    for *numbers, run in _LAUNCHERS:
        if _number(numbers[0]) is not None and _number(numbers[2]) is not None:
            found = dict(zip(("rank", "local_rank", "world_size", "node", "attempt"), map(_number, numbers)))
            who.update({k: v for k, v in found.items() if v is not None}, run=os.environ.get(run), known=True)
            break
    else:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            who.update(rank=distributed.get_rank(), world_size=distributed.get_world_size(), known=True)
    if rank is not None:
        who.update(rank=int(rank), world_size=max(who["world_size"], int(rank) + 1), known=True)
    return who


def _boot_id() -> Optional[str]:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return None


# ---- 4. The file: one write a record, under a lock because of short writes and rotation ----

class _Name:
    """What a span's name needs at each call: its JSON text, the longest span so far, the call sites already written."""
    __slots__ = ("text", "longest_us", "sites")

    def __init__(self, name: str, longest_us: int):
        self.text, self.longest_us, self.sites = f'"name":{_json(str(name))}', longest_us, {}


class _Tracer:
    def __init__(self, settings: Dict[str, Any], who: Dict[str, Any], parent: Optional["_Tracer"] = None):
        self.settings, self.who, self.parent = settings, who, parent
        # One reading of the wall clock; a child goes on with its parent's, so that their files agree.
        self.offset_ns = parent.offset_ns if parent else time.time_ns() - monotonic_ns()
        self.start = datetime.datetime.now(datetime.timezone.utc)
        self.lock = threading.RLock()   # re-entrant: a signal handler may log while its thread is in here
        self.fd, self.path, self.inode, self.part, self.continues = -1, "", 0, 0, None
        self.size, self.limit = 0, int(settings["max_file_size_mb"] * 1e6)
        self.dirty, self.torn, self.retry_at, self.open_error = True, False, 0.0, OSError()   # dirty: not open yet, or something to make up for
        self.lost, self.lost_ever, self.num_records, self.num_on_disk = 0, 0, 0, 0
        self.names: Dict[str, _Name] = {}
        self.longest_us: Dict[str, int] = {}
        self.open_spans: Dict[int, tuple] = {}   # id of the begin -> (line, _Name, thread and task)
        self.threads, self.main_ident = threading.local(), threading.main_thread().ident
        self.last_us, self.warned, self.ended, self.exit_code = self.now_us(), set(), False, None
        self.watch = _Watch(self)

    def now_us(self) -> int:
        return (monotonic_ns() + self.offset_ns) // 1000

    def write(self, line: bytes, key: int = 0, opened: Optional[tuple] = None) -> None:
        """Give whole lines to the operating system: when this has returned, no SIGKILL can take them back.

        key and opened: a span begins with this line, key alone: it ends. So a file always begins with what is open.
        """
        error = None
        with self.lock:
            try:
                if self.size > self.limit:
                    self._rotate()
                if self.dirty:
                    self._make_up(line)
                else:
                    self._put(line)
                self.num_records += 1
            except OSError as failure:
                error = failure
                self.dirty = True
                self.lost += line.count(b"\n")
                self.lost_ever += line.count(b"\n")
            if opened is not None:
                self.open_spans[key] = opened
            elif key:
                self.open_spans.pop(key, None)
        if error is not None:   # outside of the lock: a logging handler may take long, or log a span itself
            self.failed(error)
        elif not self.watch.started:
            self.watch.start()

    def _put(self, line: bytes) -> None:
        written = os.write(self.fd, line)
        if written != len(line):
            try:
                while written < len(line):
                    written += os.write(self.fd, line[written:])
            finally:
                self.size += written
                self.torn = line[written - 1:written] != b"\n"
        else:
            self.size += written

    def _make_up(self, line: bytes) -> None:
        # The first record opens the file. After a failure: end the torn line, and say how many records were lost.
        if self.fd < 0:
            if time.monotonic() < self.retry_at:
                raise self.open_error
            self._open()
        if self.lost:
            line = line[:-2] + b',"lost":%d}\n' % self.lost
            self.forget_definitions()   # some of them may be among the lost
        self._put(b"\n" + line if self.torn else line)
        self.dirty, self.torn, self.lost = False, False, 0

    def failed(self, error: BaseException) -> None:
        """Warn once of each kind of failure; training goes on."""
        kind = getattr(error, "errno", None) or type(error).__name__
        if kind not in self.warned:
            self.warned.add(kind)
            _log.warning("tracing of rank %d: %s: %s. Training goes on; what is lost is counted in %s, where writing "
                         "resumes by itself.", self.who["rank"], type(error).__name__, error,
                         self.path or self.settings["output_dir"])

    # -- files

    def begin(self) -> None:
        """Open the file now, so that a process that dies before its first record has one."""
        try:
            with self.lock:
                self._open()
        except OSError as error:
            self.failed(error)
        self.watch.start()

    def _open(self) -> None:
        try:
            self._adopt(self._new_file(self._new_path()))
        except OSError as error:
            self.retry_at, self.open_error = time.monotonic() + RETRY_S, error
            raise

    def _new_path(self) -> str:
        folder, rank = self.settings["output_dir"], self.who["rank"]
        if self.who["world_size"] > RANKS_A_FOLDER:
            first = rank // RANKS_A_FOLDER * RANKS_A_FOLDER
            folder = os.path.join(folder, f"ranks{first:05d}-{first + RANKS_A_FOLDER - 1:05d}")
        os.makedirs(folder, exist_ok=True)
        while True:   # another host may have the same pid at the same time: nobody's file is ever opened twice
            name = f"{self.settings['source']}.rank{rank:05d}.{self.start:%Y%m%d-%H%M%S-%f}.{os.getpid()}.jsonl"
            path = os.path.join(folder, name)
            if not os.path.exists(path):
                return path
            self.start += datetime.timedelta(microseconds=1)

    def _new_file(self, path: str) -> tuple:
        """Create path with the header and the spans still open. Returns (path, fd, size), or raises with no file left."""
        header = (json.dumps(self._header(), separators=(",", ":"), allow_nan=False) + "\n").encode()
        text = header + b"".join(line for line, _, _ in list(self.open_spans.values()))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        try:
            written = 0
            while written < len(text):
                written += os.write(fd, text[written:])
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return path, fd, len(text)

    def _adopt(self, file: tuple) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.path, self.fd, self.size = file
        self.inode, self.torn = os.fstat(self.fd).st_ino, False
        self.limit = int(self.settings["max_file_size_mb"] * 1e6)
        self.forget_definitions()

    def _header(self) -> Dict[str, Any]:
        who, torch = self.who, sys.modules.get("torch")
        now_ns = monotonic_ns()
        versions = {"python": ".".join(map(str, sys.version_info[:3])), "torch": getattr(torch, "__version__", None)}
        header = {"ph": "M", "v": FORMAT_VERSION, "ts": (now_ns + self.offset_ns) // 1000, "mono_us": now_ns // 1000,
                  "boot_id": _boot_id(), "rank": who["rank"], "local_rank": who["local_rank"],
                  "world_size": who["world_size"], "node": who["node"], "host": socket.gethostname(), "pid": os.getpid(),
                  "source": self.settings["source"], "worker": _worker_label(self.parent is not None),
                  "parent": os.getppid() if self.parent else None, "run": who["run"], "attempt": who["attempt"],
                  "heartbeat_s": self.settings["heartbeat_s"], "stall_timeout_s": self.settings["stall_timeout_s"],
                  "versions": versions, "part": self.part}
        if self.continues:
            header["continues"] = self.continues
        return _plain(header, 8, [MAX_VALUES])

    def _continue_in(self, path: str) -> tuple:
        before = self.part, self.continues
        self.part, self.continues = self.part + 1, os.path.basename(self.path)
        try:
            return self._new_file(path)
        except BaseException:
            self.part, self.continues = before
            raise

    def _rotate(self) -> None:
        # The new file is complete before it gets the name: whoever follows the name misses nothing, and finds the rest of
        # the old file through what it has open, or as .1.
        backup_count = self.settings["backup_count"]
        try:
            new = self._continue_in(self.path[:-len(".jsonl")] + ".next")
            names = [self.path] + [f"{self.path}.{i}" for i in range(1, backup_count + 1)]
            for older, newer in zip(reversed(names[1:]), reversed(names[:-1])):
                if os.path.exists(newer):
                    os.replace(newer, older)
            os.replace(new[0], self.path)
            self._adopt((self.path, *new[1:]))
        except OSError as error:
            self.limit += int(self.settings["max_file_size_mb"] * 1e5)   # go on in the old file, try again later
            self.failed(error)

    def look_for_rank(self) -> None:
        """A rank that becomes known late (torch.distributed without a launcher's variables) goes on in a file of its own."""
        if self.who["known"]:
            return
        who = _identity(None)
        if who["known"]:
            with self.lock:
                try:
                    self.who = who
                    if self.fd >= 0:
                        self._adopt(self._continue_in(self._new_path()))
                except OSError as error:
                    self.failed(error)

    def check_file(self) -> None:
        """When the file was removed (its folder deleted), go on in a new one and count what went with the old."""
        with self.lock:
            try:
                if self.fd < 0 or os.stat(self.path).st_ino == self.inode:
                    self.num_on_disk = self.num_records
                    return
            except FileNotFoundError:
                pass
            except OSError:
                return   # cannot be told now
            try:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                self._adopt(self._continue_in(self.path))
            except OSError as error:
                self.failed(error)
                return
            gone = self.num_records - self.num_on_disk
            self.lost, self.lost_ever, self.dirty = self.lost + gone, self.lost_ever + gone, True
        self.failed(FileNotFoundError(f"{self.path} was removed"))

    # -- what goes into a line

    def name(self, name: str) -> _Name:
        if len(self.names) >= MAX_NAMES:
            self.forget_definitions()
        info = self.names[name] = _Name(name, self.longest_us.get(name, 0))
        return info

    def forget_definitions(self) -> None:
        # Each file defines its own names and threads, since older files go away.
        if len(self.longest_us) < MAX_NAMES:
            self.longest_us.update({name: info.longest_us for name, info in list(self.names.items())})
        self.names, self.threads = {}, threading.local()

    def definition(self, info: _Name, site: tuple, frame: Any, function: Any = None) -> bytes:
        code, line = frame.f_code, frame.f_lineno
        if len(info.sites) >= MAX_NAMES:
            info.sites.clear()
        info.sites[site] = code   # holds the code object, or its id could come again
        if frame.f_globals.get("__name__", "").startswith("asyncio.") and hasattr(function, "__code__"):
            code, line = function.__code__, function.__code__.co_firstlineno   # a task has no caller of its own
        place = f"{code.co_filename}:{line}:{getattr(code, 'co_qualname', code.co_name)}"
        return f'{{"ph":"D",{info.text},"at":{_json(place)}}}\n'.encode()

    def thread_text(self) -> str:
        """Where a record comes from, as JSON text: nothing for the main thread outside of asyncio."""
        text = ""
        if get_ident() != self.main_ident:
            text = getattr(self.threads, "text", None)
            if text is None:
                threads, tid = self.threads, threading.get_native_id()
                text = threads.text = f',"tid":{tid}'
                name = _json(threading.current_thread().name)
                self.write(f'{{"ph":"D","tid":{tid},"at":{name}}}\n'.encode())
        loop = _get_running_loop()
        if loop is not None:
            task = current_task(loop)
            if task is not None:
                text += f',"task":{_json(task.get_name())}'
        return text

    def instant(self, name: str, args: Any = None, where: str = "", step: Optional[str] = None) -> None:
        """An instant of the tracer's own, and of log_trace_instant."""
        info = self.names.get(name) or self.name(name)
        step = (_step_here.get().text or _step_everywhere.text) if step is None else step
        more = f',"args":{_json(args)}' if args else ""
        self.write(f'{{"ph":"i","ts":{self.now_us()},{info.text}{step}{where}{more}}}\n'.encode())

    def end(self, how: str, **details: Any) -> None:
        """Write how the process ends, once."""
        if not self.ended and self.fd >= 0:
            self.ended = True
            self.instant("process_end", {"how": how, **details})


def _worker_label(is_child: bool) -> Any:
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    if info is not None:
        return info.id
    if not is_child:
        return None
    multiprocessing = sys.modules.get("multiprocessing.process")
    name = multiprocessing.current_process().name if multiprocessing else "MainProcess"
    return "fork" if name == "MainProcess" else name


# ---- 5. Spans, scalars, instants ----

class _Span:
    """What log_trace_span returns: a context manager and a decorator; re-entrant, and good for any number of threads."""
    __slots__ = ("name", "description", "sync", "args", "stacklevel", "function", "begins")

    def __init__(self, name: str, description: Optional[str], sync: bool, args: Any, stacklevel: int):
        self.name, self.description, self.sync, self.args = name, description, sync, args
        self.stacklevel, self.function = stacklevel, None
        self.begins: list = []   # the begins without an end: (tracer, ts, texts, _Name)

    def __enter__(self) -> "_Span":
        return self

    __exit__ = "".format   # off: takes anything, returns something false, costs nothing. _switch puts in the real ones.

    def ready(self) -> None:
        """Say that this rank's own work in the span is done and that the rest is waiting for others. Any thread may."""
        try:
            tracer, _, _, where, info, step = self.begins[-1]
            if tracer is _tracer:
                tracer.last_us = tracer.now_us()
                tracer.write(f'{{"ph":"i","ts":{tracer.last_us},"name":"ready"{step}{where},'
                             f'"args":{{"span":{info.text[7:]}}}}}\n'.encode())
        except IndexError:   # off, or the span is over
            pass
        except Exception as error:
            _failed(error)

    def _once(self, function: Callable) -> "_Span":
        if _tracer is None:
            return self
        span = _Span(self.name, self.description, self.sync, self.args, self.stacklevel + 1)
        span.function = function
        return span

    def __call__(self, function: Callable) -> Callable:
        """Decorate a function, coroutine, generator or async generator: a new span for each call, until it has ended."""
        if inspect.iscoroutinefunction(function):
            @functools.wraps(function)
            async def wrapper(*args, **kwargs):
                with self._once(function):
                    return await function(*args, **kwargs)
        elif inspect.isasyncgenfunction(function):
            @functools.wraps(function)
            async def wrapper(*args, **kwargs):
                with self._once(function):
                    generator = function(*args, **kwargs)
                    try:   # what `yield from` does for plain generators
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
                with self._once(function):
                    return (yield from function(*args, **kwargs))
        else:
            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                with self._once(function):
                    return function(*args, **kwargs)
        return wrapper


def _enter(span: _Span) -> _Span:
    tracer = _tracer
    if tracer is None or _is_compiling():
        return span
    try:
        try:
            frame = sys._getframe(span.stacklevel - 1)
        except ValueError:   # a stacklevel beyond the stack
            frame = sys._getframe(1)
        info = tracer.names.get(span.name) or tracer.name(span.name)
        site = (id(frame.f_code), frame.f_lasti)
        new = site not in info.sites
        where = ""
        if get_ident() != tracer.main_ident or _get_running_loop() is not None:
            where = tracer.thread_text()
        here, everywhere = _step_here.get(), _step_everywhere
        step = here.text or everywhere.text
        more = here.tags_text or everywhere.tags_text
        if span.sync:
            more += ',"sync":"soft"' if span.sync == "soft" else ',"sync":true'
        if span.args or span.description:
            args = {"description": span.description} if span.description else {}
            more += f',"args":{_json({**args, **(span.args or {})})}'
        text = f"{info.text}{step}"
        now_us = tracer.last_us = (monotonic_ns() + tracer.offset_ns) // 1000
        line = f'{{"ph":"B","ts":{now_us},{text}{where}{more}}}\n'.encode()
        begin = (tracer, now_us, text, where, info, step)
        span.begins.append(begin)
        more = (line, info, where)
        tracer.write(tracer.definition(info, site, frame, span.function) + line if new else line, id(begin), more)
    except Exception as error:
        tracer.failed(error)
    return span


def _exit(span: _Span, kind: Any = None, error: Any = None, trace: Any = None) -> None:
    tracer = _tracer
    if not span.begins or _is_compiling():
        return
    try:
        begin = span.begins.pop() if len(span.begins) == 1 else _own_begin(span, tracer)
        owner, begin_us, text, where, info, step = begin
        if owner is not tracer:   # closed meanwhile, or this is a forked child: the begin is in another file
            return
        now_us = tracer.last_us = (monotonic_ns() + tracer.offset_ns) // 1000
        dur = now_us - begin_us
        if dur > info.longest_us:
            info.longest_us = dur
        here, everywhere = _step_here.get(), _step_everywhere
        more = here.tags_text or everywhere.tags_text
        if more and step != (here.text or everywhere.text):
            more = ""   # another step's tags
        if kind is not None and not issubclass(kind, (GeneratorExit, StopIteration, StopAsyncIteration)):
            more += f',"err":{_json(f"{kind.__name__}: {_json_text(error)}")}'
        tracer.write(f'{{"ph":"E","ts":{now_us},{text},"dur":{dur}{where}{more}}}\n'.encode(), id(begin))
    except Exception as failure:
        _failed(failure)


def _own_begin(span: _Span, tracer: Optional[_Tracer]) -> tuple:
    # One object entered several times: the last begin of this thread and task, else just the last.
    where = tracer.thread_text() if tracer is not None else ""
    for i in range(len(span.begins) - 1, -1, -1):
        if span.begins[i][3] == where:
            return span.begins.pop(i)
    return span.begins.pop()


def _json_text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<no text: {type(error).__name__}>"


def _switch(on: bool) -> None:
    # The methods themselves are exchanged: a span that is off must not cost a call of Python's more than it needs.
    _Span.__enter__, _Span.__exit__ = (_enter, _exit) if on else (_OFF_ENTER, _OFF_EXIT)


_OFF_ENTER, _OFF_EXIT = _Span.__enter__, _Span.__exit__
_spans_off: Dict[str, _Span] = {}   # while off, one span a name is enough: they are re-entrant


def log_trace_span(name: str, description: Optional[str] = None, sync: Union[bool, str] = False,
                   args: Optional[Dict[str, Any]] = None, stacklevel: int = 2) -> _Span:
    """Time a block or, as a decorator, each call of a function; the begin is on disk before the block starts.

    sync: in this span ranks wait for each other; its ready() says when this rank's own part is done. "soft": some wait
    for one, as in a broadcast, and nobody waits for all.
    description and args are written with the begin; stacklevel: one more for each helper of yours in between.
    """
    if _tracer is None and args is None and description is None and not sync:
        try:
            return _spans_off[name]
        except (KeyError, TypeError):
            pass
    span = _Span(name, description, sync, args, stacklevel)
    if _tracer is None and len(_spans_off) < MAX_NAMES and type(name) is str and stacklevel == 2 and not (
            args or description or sync):
        _spans_off[name] = span
    return span


def log_trace_scalar(scalars: Dict[str, float], *, step: Optional[int] = None, stacklevel: int = 2) -> None:
    """Write numbers of the current step, or of an earlier one that they belong to, in one record.

    NumPy's and torch's scalars will do; what is no number is skipped with one warning.
    """
    tracer = _tracer
    if tracer is None or _is_compiling():
        return
    try:
        parts, new = [], b""
        for name, value in scalars.items():
            info = tracer.names.get(name)
            if info is None:
                info = tracer.name(name)
                frame = _caller(stacklevel)
                new += tracer.definition(info, (id(frame.f_code), frame.f_lasti), frame)
            kind = type(value)
            if not (kind is float and value - value == 0.0):
                if kind is not int or not -2**63 <= value < 2**63:
                    value = _number_text(tracer, name, value)
                    if value is None:
                        continue
            parts.append(f"{info.text[7:]}:{value}")
        if parts:
            where = ""
            if get_ident() != tracer.main_ident or _get_running_loop() is not None:
                where = tracer.thread_text()
            step_text = f',"step":{_json(step)}' if step is not None else (
                _step_here.get().text or _step_everywhere.text)
            now_us = tracer.last_us = (monotonic_ns() + tracer.offset_ns) // 1000
            line = f'{{"ph":"C","ts":{now_us}{step_text}{where},"args":{{{",".join(parts)}}}}}\n'.encode()
            tracer.write(new + line if new else line)
    except Exception as error:
        tracer.failed(error)


def _number_text(tracer: _Tracer, name: str, value: Any) -> Optional[str]:
    plain = None if isinstance(value, (str, bytes, bool)) else _plain(value, 2, [2])
    if type(plain) in (int, float) or plain in _NOT_FINITE.values() or isinstance(value, int):
        return json.dumps(plain)
    tracer.failed(TypeError(f"log_trace_scalar: {_cut(str(name))!r} is {type(value).__name__}, want a number"))
    return None


def log_trace_instant(name: str, args: Optional[Dict[str, Any]] = None, *, stacklevel: int = 2) -> None:
    """Write that something happened at this moment."""
    tracer = _tracer
    if tracer is None or _is_compiling():
        return
    try:
        info = tracer.names.get(name) or tracer.name(name)
        frame = _caller(stacklevel)
        site = (id(frame.f_code), frame.f_lasti)
        if site not in info.sites:
            tracer.write(tracer.definition(info, site, frame))
        tracer.last_us = tracer.now_us()
        tracer.instant(name, args, tracer.thread_text())
    except Exception as error:
        tracer.failed(error)


def _caller(stacklevel: int) -> Any:
    try:
        return sys._getframe(stacklevel)
    except ValueError:   # a stacklevel beyond the stack
        return sys._getframe(2)


def _failed(error: BaseException) -> None:
    if _tracer is not None:
        _tracer.failed(error)


# ---- 6. Alive or not: heartbeats, stall stacks, dumps from C ----

class _Watch:
    """The heartbeat thread, and what faulthandler writes into <same name>.stacks.txt when Python cannot."""

    def __init__(self, tracer: _Tracer):
        self.tracer, self.started = tracer, False
        self.heartbeat_s, self.stall_timeout_s = tracer.settings["heartbeat_s"], tracer.settings["stall_timeout_s"]
        periods = [s for s in (self.heartbeat_s, self.stall_timeout_s / 4) if s > 0]
        self.tick_s = min(periods) if periods else 0.0
        self.stop_asked, self.thread = threading.Event(), None
        self.stacks, self.stacks_path, self.stacks_size = None, "", 0
        self.signals: Dict[int, Any] = {}        # registered with faulthandler -> the Python handler at that time
        self.arming = threading.Lock()           # held over a fork: see _before_fork
        self.timer_tid, self.timer_is_ours, self.enabled_faults = None, False, False
        self.next_stall_s = self.stall_timeout_s

    def start(self) -> None:
        if self.started or self.tracer.fd < 0:
            return
        self.started = True
        try:
            self._open_stacks()
            self._register()
            if self.tick_s:
                self.timer_is_ours = self._timer_is_free()
                self.arm()
                self.thread = threading.Thread(target=self._run, name="tracing-heartbeat", daemon=True)
                self.thread.start()
        except Exception as error:
            self.tracer.failed(error)

    def stop(self) -> None:
        """End the thread and give faulthandler back as it was, as far as it is still ours."""
        self.stop_asked.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(2.0)   # bounded: it may hang in a write to a dead file system
        self.disarm()
        self.unregister()
        if self.stacks is not None:
            try:
                self.stacks.close()
                if not os.path.getsize(self.stacks_path):
                    os.unlink(self.stacks_path)
            except OSError:
                pass

    def _open_stacks(self) -> None:
        self.stacks_path = self.tracer.path[:-len(".jsonl")] + ".stacks.txt"
        self.stacks = open(self.stacks_path, "ab", buffering=0)

    def _register(self) -> None:
        if not faulthandler.is_enabled():
            faulthandler.enable(self.stacks)
            self.enabled_faults = True
        if not hasattr(faulthandler, "register"):   # Windows
            return
        caught = _signals_caught()
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and not caught >> (signal.SIGUSR1 - 1) & 1:
            faulthandler.register(signal.SIGUSR1, self.stacks, all_threads=True)
            self.signals[signal.SIGUSR1] = signal.SIG_DFL
        if self.tracer.parent is None:   # a data-loader worker's SIGTERM is its parent's ordinary way to end it
            self.signals[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
            faulthandler.register(signal.SIGTERM, self.stacks, all_threads=True, chain=True)

    def unregister(self) -> None:
        """Also in a forked child, whose signals must not write into its parent's file."""
        for number, handler in self.signals.items():
            if signal.getsignal(number) == handler:   # else somebody came after us, whom this would undo
                faulthandler.unregister(number)
        self.signals = {}
        if self.enabled_faults:
            faulthandler.disable()
            self.enabled_faults = False

    # -- faulthandler's timer: it speaks when C code holds the GIL, and there is one a process

    def _timer_is_free(self) -> bool:
        if _timer_threads():
            _log.warning("tracing of rank %d: faulthandler.dump_traceback_later is in use by somebody else, who keeps it: "
                         "no stacks when C code hangs with the GIL", self.tracer.who["rank"])
            return False
        return True

    def arm(self) -> None:
        """Have C write all stacks unless we come back in time."""
        if not self.stall_timeout_s or self.stacks is None:
            return
        with self.arming:
            if not self.timer_is_ours or self.stop_asked.is_set():
                return
            if self.timer_tid is not None and not os.path.exists(f"/proc/self/task/{self.timer_tid}"):
                # Fired, cancelled or replaced. If replaced, it is somebody else's now.
                self.timer_is_ours, self.timer_tid = self._timer_is_free(), None
                if not self.timer_is_ours:
                    return
            before = _thread_ids()
            faulthandler.dump_traceback_later(self._patience_s() + self.tick_s, file=self.stacks)
            new = _thread_ids() - before
            self.timer_tid = new.pop() if len(new) == 1 else None

    def disarm(self) -> None:
        with self.arming:
            if self.timer_is_ours and (self.timer_tid is None or os.path.exists(f"/proc/self/task/{self.timer_tid}")):
                faulthandler.cancel_dump_traceback_later()
            self.timer_tid = None

    # -- the heartbeat thread

    def _run(self) -> None:
        due_s = last_s = time.monotonic()
        while not self.stop_asked.wait(self.tick_s):
            now_s = time.monotonic()
            # A thread that wakes far too late was frozen with its process (SIGSTOP, GIL): that says nothing about the rest.
            frozen, last_s = now_s - last_s > 3 * self.tick_s + 1.0, now_s
            try:
                idle_s = (self.tracer.now_us() - self.tracer.last_us) / 1e6
                self.tracer.check_file()
                self.tracer.look_for_rank()
                self._notice_dumps()
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
        tracer.instant("heartbeat", {"rss_mb": _rss_mb(), "idle_s": round(idle_s, 3), "lost": tracer.lost_ever})
        took_s = time.monotonic() - before_s
        if took_s > SLOW_WRITE_S and "slow" not in tracer.warned:
            tracer.warned.add("slow")
            _log.warning("tracing of rank %d: a write to %s took %.1f s. This rank's training waits for its traces: put them "
                         "on a faster disk", tracer.who["rank"], tracer.path, took_s)

    def _patience_s(self) -> float:
        """The stall time-out, or twice the longest that the innermost open span has ever taken."""
        spans = list(self.tracer.open_spans.values())
        innermost = [span for span in spans if not span[2]][-1:] or spans[-1:]   # of the main thread if it has one
        return max([self.stall_timeout_s] + [2e-6 * info.longest_us for _, info, _ in innermost])

    def _look_for_stall(self, idle_s: float) -> None:
        patience_s = self._patience_s()
        if idle_s < patience_s:
            self.next_stall_s = 0.0
        elif idle_s >= self.next_stall_s and (self.tracer.parent is None or self.tracer.open_spans):
            # A worker without an open span waits for its parent to ask, which is no stall.
            self.next_stall_s = 2 * idle_s
            self.tracer.instant("stacks", {"why": "stall", "seconds": round(idle_s, 3), "threads": _all_stacks(self.thread)})

    def _notice_dumps(self) -> None:
        if self.stacks is not None:
            size = os.fstat(self.stacks.fileno()).st_size
            if size > self.stacks_size:
                self.tracer.instant("stacks", {"why": "written in C: a signal, or the GIL held too long",
                                               "file": os.path.basename(self.stacks_path), "offset": self.stacks_size})
            self.stacks_size = size


def _all_stacks(but: Any) -> list:
    threads = {thread.ident: thread for thread in threading.enumerate()}
    stacks = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        if thread is but:
            continue
        frames = [f"{f.f_code.co_filename}:{line}:{f.f_code.co_name}" for f, line in traceback.walk_stack(frame)]
        stacks.append({"name": thread.name if thread else "?", "tid": getattr(thread, "native_id", None),
                       "stack": frames[:40]})
    return stacks[:20]


def _rss_mb() -> Optional[float]:
    try:
        with open("/proc/self/statm") as file:
            return round(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
    except (OSError, ValueError):
        return None


def _signals_caught() -> int:
    """The signals that have a handler, in C too, as a bit mask; 0 where it cannot be told."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    except (OSError, StopIteration):
        return 0


def _thread_ids() -> set:
    try:
        return set(os.listdir("/proc/self/task"))
    except OSError:
        return set()


def _timer_threads() -> set:
    """The threads that look like faulthandler's timer, which no API tells of: named as the main thread is, and with every
    signal blocked, as it alone does in CPython."""
    everything = 0x7FFBFEFF   # signals 1 to 31, without KILL and STOP
    found, main_name = set(), None
    for tid in sorted(_thread_ids(), key=lambda tid: tid != str(os.getpid())):
        try:
            with open(f"/proc/self/task/{tid}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        except OSError:
            continue
        main_name = main_name or status["Name"]
        if status["Name"] == main_name and int(status["SigBlk"], 16) & everything == everything:
            found.add(tid)
    return found


# ---- 7. Forks, workers, and the end of the process ----

def _before_fork() -> None:
    # A child that inherits an armed timer would wait for ever for the timer's thread when it exits: CPython joins it.
    tracer = _tracer
    if tracer is not None:
        tracer.watch.disarm()
        tracer.watch.arming.acquire()


def _after_fork_in_parent() -> None:
    tracer = _tracer
    if tracer is not None and tracer.watch.arming.locked():
        tracer.watch.arming.release()
        if tracer.watch.started:
            tracer.watch.arm()


def _after_fork_in_child() -> None:
    """A child never writes into its parent's file: its own one begins with its first record."""
    global _tracer, _step_everywhere
    parent = _tracer
    if parent is None:
        return
    _tracer = None
    try:
        parent.watch.unregister()
        for fd in (parent.fd, parent.watch.stacks.fileno() if parent.watch.stacks else -1):
            if fd >= 0:
                os.close(fd)
        _step_everywhere = _Step()   # a child does not follow its parent's steps
        _step_here.set(_step_everywhere)
        if parent.settings["trace_workers"]:
            _tracer = _Tracer(parent.settings, parent.who, parent)
    except Exception as error:
        parent.failed(error)


class trace_worker_init:
    """A worker_init_fn that traces data-loader workers, spawned ones too, and then calls the one it was given.

        DataLoader(dataset, num_workers=4, worker_init_fn=trace_worker_init(), multiprocessing_context="spawn")
    """

    def __init__(self, worker_init_fn: Optional[Callable[[int], None]] = None):
        self.worker_init_fn, tracer = worker_init_fn, _tracer
        self.settings = self.who = None
        if tracer is not None and tracer.settings["trace_workers"]:
            self.settings, self.who, self.offset_ns = tracer.settings, tracer.who, tracer.offset_ns
            _trace_fetches()

    def __call__(self, worker_id: int) -> None:
        global _tracer
        if _tracer is None and self.settings is not None:
            _tracer = _Tracer(self.settings, self.who, self)
            _begin_process()
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker_id)


def _trace_fetches() -> None:
    """Put a span around what PyTorch's loader does for a batch, in whichever process it does it: samples and collation."""
    fetchers = sys.modules.get("torch.utils.data._utils.fetch")
    for kind in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        fetcher = getattr(fetchers, kind, None)
        if hasattr(fetcher, "fetch") and not hasattr(fetcher.fetch, "__wrapped__"):
            fetcher.fetch = log_trace_span("fetch")(fetcher.fetch)


_settings: Optional[Dict[str, Any]] = None   # the arguments that tracing has begun with
_hooked = False
_excepthook: Callable = sys.excepthook
_sys_exit: Callable = sys.exit


def _begin_process() -> None:
    """What is registered once: the fork hooks and the ways in which a process can end."""
    global _hooked, _excepthook, _sys_exit
    _find_torch()
    _switch(True)
    if _tracer.settings["trace_workers"]:
        _trace_fetches()
    if not _hooked:
        _hooked = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent,
                            after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)
        _excepthook, sys.excepthook = sys.excepthook, _on_exception
        _sys_exit, sys.exit = sys.exit, _on_sys_exit
    if _tracer.parent is not None and "multiprocessing.util" in sys.modules:
        # Children of multiprocessing leave without atexit.
        sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=0)


def _on_exception(kind: Any, error: Any, trace: Any) -> None:
    tracer = _tracer
    if tracer is not None:
        try:
            tracer.end("exception", **_describe(error))
        except Exception as failure:
            tracer.failed(failure)
    _excepthook(kind, error, trace)


def _describe(error: BaseException) -> Dict[str, Any]:
    frames = [f"{f.f_code.co_filename}:{line}:{f.f_code.co_name}" for f, line in traceback.walk_tb(error.__traceback__)]
    return {"type": type(error).__name__, "message": _json_text(error), "frames": frames[:-11:-1]}


def _on_sys_exit(code: Any = None) -> None:
    # The only place that knows the exit code in time. When somebody catches the SystemExit, set_step forgets the code.
    tracer = _tracer
    if tracer is not None and threading.current_thread() is threading.main_thread():
        tracer.exit_code = code
    _sys_exit(code)


def _at_exit() -> None:
    if _tracer is not None and _tracer.fd >= 0:
        code = _tracer.exit_code
        close_structured_logger("exit", **({} if code is None else {"code": code}))


# ---- 8. On and off ----

def init_structured_logger(source: str, output_dir: str, rank: Optional[int] = None, enable: bool = True, *,
                           max_file_size_mb: float = 128, backup_count: int = 3, heartbeat_s: float = 5,
                           stall_timeout_s: float = 120, trace_workers: Optional[bool] = None,
                           run: Optional[str] = None, attempt: Optional[int] = None) -> None:
    """Start this process's trace in output_dir; a second call with the same arguments is quiet.

    source: what the process is ("training"), part of the file's name. rank: if the launcher's variables do not tell.
    max_file_size_mb, backup_count: a full file is renamed to .1, and so many older ones are kept. heartbeat_s,
    stall_timeout_s: 0 switches off. trace_workers: data-loader workers and other forked children; None: up to 64 ranks.
    run, attempt: name of the run and number of its start, where the caller knows better than the launcher's variables.
    Raises ValueError for a setting that makes no sense, or when tracing has begun with others.
    """
    global _tracer, _settings
    settings = {"source": str(source), "output_dir": os.path.abspath(os.fspath(output_dir)), "rank": rank,
                "enable": bool(enable), "max_file_size_mb": max_file_size_mb, "backup_count": backup_count,
                "heartbeat_s": heartbeat_s, "stall_timeout_s": stall_timeout_s, "trace_workers": trace_workers,
                "run": run, "attempt": attempt}
    _check(settings)
    if _settings is not None and not (_tracer is not None and _tracer.parent is not None and _tracer.fd < 0):
        other = [k for k in settings if settings[k] != _settings[k]]
        if other:
            raise ValueError("init_structured_logger: tracing has begun with other arguments ("
                             + ", ".join(f"{k}={_settings[k]!r}, now {settings[k]!r}" for k in other)
                             + "); call close_structured_logger() first")
        return
    _settings = settings
    if not enable:
        return
    who = _identity(rank)
    who.update({key: value for key, value in (("run", run), ("attempt", attempt)) if value is not None})
    if trace_workers is None:
        settings = {**settings, "trace_workers": who["world_size"] <= WORKERS_UP_TO}
    _tracer = _Tracer(settings, who)
    _begin_process()
    _tracer.begin()


def _check(settings: Dict[str, Any]) -> None:
    for key, least in (("max_file_size_mb", 0.01), ("backup_count", 0), ("heartbeat_s", 0), ("stall_timeout_s", 0)):
        value = settings[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < 1e9:
            raise ValueError(f"init_structured_logger: {key}={value!r}, want a number from {least}")
    if not settings["source"] or any(c in settings["source"] for c in "/\\\0"):
        raise ValueError(f"init_structured_logger: source={settings['source']!r}, want a word that can be in a file name")
    if settings["rank"] is not None and (not isinstance(settings["rank"], int) or settings["rank"] < 0):
        raise ValueError(f"init_structured_logger: rank={settings['rank']!r}, want a number from 0, or None")


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
        _switch(False)
        _tracer = None
        tracer.watch.stop()
        with tracer.lock:
            if tracer.fd >= 0:
                os.close(tracer.fd)
                tracer.fd = -1
    except Exception as error:
        tracer.failed(error)
