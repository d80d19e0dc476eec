"""Hooks: what watches a training loop, and the dispatcher that calls them. Needs torch; works copied alone.

In somebody else's loop, five lines:

    from types import SimpleNamespace
    from hooks import HookDispatcher, GradientNormLogger
    hooks = HookDispatcher({"GradientNormLogger": GradientNormLogger(log_frequency=10)})
    state = SimpleNamespace(model=model, optimizer=optimizer, step=step, clip_norm=1.0)
    numbers = hooks.call("after_backward", state)      # {"grad_norm/total": 0.71, ...}, {} on most steps

An own hook is any object with some of these methods. Each takes the loop's state and returns None or a flat
dict of key -> number; 0-dim tensors are welcome: they go to the host in one copy for the whole event.

    before_train                 once
      before_epoch
        before_step              each micro-batch: on the device, before forward
        after_backward           gradients final: reduced, unscaled, not yet clipped
        after_step               after optimizer.step, before zero_grad
      after_evaluate             state.metrics has val/*
      after_epoch
    after_train                  always; when state.error is set, without collectives

state is any object with the attributes that a hook reads: model (unwrapped), optimizer, step (from 1),
max_steps, epoch (from 0), batch, outputs, metrics, lr, data_s, num_samples, num_tokens, clip_norm,
grad_scale, step_skipped, run_dir, run, rank, local_rank, world_size, device, error, and paused_s: seconds of
evaluation and saving so far.

In this file, in order: the dispatcher; IterationTimer, InformationWriter, GarbageCollector; what hooks share;
ParameterCounter, GradientNormLogger; FeatureStdMonitor, PrototypeUsageLogger, LogitEntropyLogger;
ResourceUtilizationLogger; RuntimeProfiler. Each says what it emits and what it costs.

Nothing here changes the model, the gradients or the loop, prints, or writes metrics: the loop does.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import gzip
import inspect
import json
import logging
import math
import numbers
import os
import re
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

logger = logging.getLogger("rankscope.hooks")

EVENTS = ("before_train", "before_epoch", "before_step", "after_backward", "after_step", "after_evaluate",
          "after_epoch", "after_train")


# -------------------- the dispatcher


class HookError(RuntimeError):
    """A hook failed: the message names hook, event and step; the cause is the hook's own exception."""


class HookDispatcher:
    """Call hooks in order at each event and gather what they return.

    hooks: name -> hook object. span: callable name -> context manager; each call runs in a span "Name.event".
    Raises ValueError for an object that is no hook, or for a method whose name is nearly an event's.
    """

    def __init__(self, hooks: Mapping[str, Any], span: Callable | None = None):
        self._span = span or _no_span
        self._owners: dict[str, str] = {}  # metric key -> the first hook that returned it
        self._clashes: set[tuple[str, str]] = set()  # pairs of hooks that share a key, warned of once
        self._calls: dict[str, list] = {event: [] for event in EVENTS}
        for name, hook in hooks.items():
            # Looked up once: an event without hooks costs a dict access.
            _check_methods(name, hook)
            for event in EVENTS:
                if hasattr(hook, event):
                    self._calls[event].append((name, getattr(hook, event)))

    def has(self, event: str) -> bool:
        """Whether any hook listens to this event."""
        return bool(self._calls[event])

    def call(self, event: str, state: Any) -> dict[str, float]:
        """Call every hook that has this event; returns its numbers as floats: at most one device sync."""
        found = self.collect(event, state)
        return to_floats(found) if found else found

    def collect(self, event: str, state: Any) -> dict[str, Any]:
        """Like call, but leaves 0-dim tensors where they are: no device sync, for loops that copy later."""
        if event not in self._calls:
            raise ValueError(f"no event {event!r}{_nearest(event, EVENTS)}; there are {', '.join(EVENTS)}")
        found: dict[str, Any] = {}
        failed = None
        for name, method in self._calls[event]:
            try:
                with self._span(f"{name}.{event}"):
                    returned = method(state)
                if returned is not None:
                    self._merge(found, name, event, returned)
            except Exception as error:
                step = getattr(state, "step", None)
                text = f"hook {name!r} failed in {event} at step {step}: {type(error).__name__}: {error}"
                if event != "after_train":
                    raise HookError(text) from error
                # The end is everybody's chance to clean up: the others still get theirs.
                failed = failed or (HookError(text), error)
        if failed:
            raise failed[0] from failed[1]
        return found

    def _merge(self, found: dict, name: str, event: str, returned: Any) -> None:
        """Add what one hook returned, checked: a flat dict of key -> number or one-element tensor."""
        if not isinstance(returned, Mapping):
            raise TypeError(f"it returned {type(returned).__name__}; wanted None or a dict of key -> number")
        for key, value in returned.items():
            is_tensor = isinstance(value, torch.Tensor)
            is_number = value.numel() == 1 if is_tensor else isinstance(value, numbers.Real)
            if not (is_number and isinstance(key, str)):
                got = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
                raise TypeError(f"it returned {got} for {key!r}; wanted text -> number or one-element tensor")
            # Two hooks may not share a key unnoticed: a writer would keep only one of them.
            owner = self._owners.setdefault(key, name)
            if owner != name and (owner, name) not in self._clashes:
                self._clashes.add((owner, name))
                logger.warning("hooks %r and %r both write %r (in %s): the later one wins; give one of them"
                               " a prefix or other modules", owner, name, key, event)
            found[key] = value


def _check_methods(name: str, hook: Any) -> None:
    """Refuse what is no hook: a class, no events at all, a method that is nearly one, a wrong signature."""
    if isinstance(hook, type):
        raise ValueError(f"hook {name!r} is a class; wanted an object: {hook.__name__}(...)")
    who = f"hook {name!r} ({type(hook).__name__})"
    # getattr_static: a property of the user's is not computed here, it may need what is not there yet.
    methods = [m for m in dir(hook) if not m.startswith("_") and callable(inspect.getattr_static(hook, m))]
    for method in methods:
        # A misspelt event would never be called, and nobody would notice.
        near = method.startswith(("before_", "after_")) or difflib.get_close_matches(method, EVENTS, 1, 0.8)
        if method not in EVENTS and near:
            raise ValueError(f"{who} has a method {method!r}, which is no event{_nearest(method, EVENTS)};"
                             f" there are {', '.join(EVENTS)}. If it is none of them, begin its name with _")
    mine = [event for event in EVENTS if hasattr(hook, event)]
    if not mine:
        raise ValueError(f"{who} has none of the events {', '.join(EVENTS)}")
    for event in mine:
        try:
            inspect.signature(getattr(hook, event)).bind(None)
        except TypeError:
            raise ValueError(f"{who}: {event} must take one argument, the state") from None


class _NoSpan:
    def ready(self) -> None:
        pass


def _no_span(name: str, sync: bool = False) -> Any:
    """Stands in for a tracer's span when none is given."""
    return contextlib.nullcontext(_NoSpan())


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and one-element tensors -> floats, with one copy to the host from each device."""
    result = dict(values)  # keeps the order
    by_device: dict[torch.device, dict[torch.dtype, list]] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor):
                value = value.full_tensor()  # a collective
            same = by_device.setdefault(value.device, {}).setdefault(value.dtype, [])
            same.append((key, value.reshape(()) if value.dim() else value))
        else:
            result[key] = float(value)
    # Stacking by type first takes one conversion a type, where one a tensor would start a kernel each;
    # everything then crosses to the host together. float64 holds whole numbers up to 2**53.
    for device, by_dtype in by_device.items():
        wide = _wide(device)
        stacked = [torch.stack([value for _, value in group]).to(wide) for group in by_dtype.values()]
        keys = [key for group in by_dtype.values() for key, _ in group]
        result.update(zip(keys, torch.cat(stacked).tolist()))  # the event's device sync
    return result


def _wide(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device: Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _nearest(name: str, known: Any) -> str:
    """', did you mean ...?' with the nearest known name, or nothing."""
    match = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_period(hook: Any, log_frequency: int | None, default: int = 10) -> int:
    """log_frequency as a whole number of steps; None (nobody filled it in) is the default."""
    if log_frequency is None:
        return default
    if type(log_frequency) is not int or log_frequency < 1:  # True is an int for isinstance
        raise ValueError(f"{type(hook).__name__}: log_frequency is {log_frequency!r}; wanted a whole number"
                         f" of steps, 1 or more (to switch the hook off, leave it out)")
    return log_frequency


# -------------------- time, log lines, gc


def _log_step(state: Any, log_frequency: int) -> bool:
    """Every log_frequency-th step, and the planned last one, so that a short run has numbers too."""
    return state.step % log_frequency == 0 or state.step == getattr(state, "max_steps", None)


class _StepTimer:
    """Base of hooks that time optimizer steps by the wall clock, without evaluation and saving.

    It reads the host's clock only. On a GPU kernels run later than the calls that start them, so one step's
    time says little there, while the mean over the steps between two log lines is right.
    """

    def __init__(self, log_frequency: int | None = None):
        self.log_frequency = _check_period(self, log_frequency)
        self._last = None  # clock reading at the end of the last step
        self._window: Counter[str] = Counter()  # sums over the steps since the last reading
        self._total: Counter[str] = Counter()  # the same since the start

    @staticmethod
    def _now(state: Any) -> float:
        # Time that the loop spent in evaluation and saving stops this clock.
        return time.perf_counter() - (getattr(state, "paused_s", None) or 0.0)

    def before_epoch(self, state):
        # The clock starts with the first epoch. In a loop that does not count paused_s it starts anew after
        # each evaluation; what the loop does between that and the next epoch is no step either.
        if self._last is None or getattr(state, "paused_s", None) is None:
            self._last = self._now(state)

    after_evaluate = before_epoch

    def _end_step(self, state: Any) -> None:
        """Call in after_step, at every step."""
        now = self._now(state)
        if self._last is not None:
            self._window.update(steps=1, batch_s=now - self._last)
            for key, name in (("data_s", "data_s"), ("samples", "num_samples"), ("tokens", "num_tokens")):
                self._window[key] += getattr(state, name, None) or 0
        self._last = now

    def _read(self, state: Any) -> dict[str, float]:
        """Means over the steps since the last reading, `mean_` ones since the start; {} without steps."""
        # A new window begins with each reading.
        window, self._window = self._window, Counter()
        if not window["steps"]:
            return {}
        self._total.update(window)
        seconds = max(window["batch_s"], 1e-9)  # two readings of a coarse clock can be equal
        found = {"steps_per_s": window["steps"] / seconds}
        for key in ("batch_s", "data_s"):
            found[key] = window[key] / window["steps"]
            found[f"mean_{key}"] = self._total[key] / self._total["steps"]
        for key in ("samples", "tokens"):
            found[f"{key}_per_s"] = window[key] * getattr(state, "world_size", 1) / seconds
        return found


class IterationTimer(_StepTimer):
    """Speed of the whole job: samples, tokens and steps per second; seconds that a step and its data take.

    Figures are means over the steps since the last log step; evaluation and saving are not in them. Samples
    and tokens are this rank's times the world size (ranks take batches of one size): no rank waits for
    another here.

    emits: speed/*. costs: no device sync, no collective; a few clock readings a step.
    """

    emits = {
        "speed/samples_per_s": "1/s, all ranks",
        "speed/tokens_per_s": "1/s, all ranks, where the loop counts tokens",
        "speed/steps_per_s": "1/s",
        "speed/batch_s": "s",
        "speed/data_s": "s waiting for data, a part of batch_s",
        "speed/peak_memory_mb": "MB allocated by torch on this rank's GPU at most, since the start",
    }

    def after_step(self, state):
        self._end_step(state)
        speed = self._read(state) if _log_step(state, self.log_frequency) else None
        if not speed:
            return None
        names = ["steps_per_s", "batch_s", "data_s"]
        names += [name for name in ("samples_per_s", "tokens_per_s") if speed[name]]  # what the loop counts
        found = {f"speed/{name}": speed[name] for name in names}
        device = torch.device(getattr(state, "device", "cpu"))
        if device.type == "cuda":
            found["speed/peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        return found


class InformationWriter(_StepTimer):
    """One log line a log step: step, epoch, loss and scalars, lr, data and batch time, throughput, time left.

        step 120/2000 | epoch 0 | loss 2.3456 | lr 3.00e-04 | data 0.001 (0.002) s | batch 0.105 (0.110) s
        | 152 samples/s | remaining 0:03:27

    Data and batch time: mean since the last line, and in brackets since the start. What remains is reckoned
    from the wall clock since the first step, so evaluation and saving are in it. Only rank 0 writes, through
    logging.

    emits: nothing. costs: on rank 0 one device sync a log step; no collective.
    """

    emits: dict[str, str] = {}

    def __init__(self, log_frequency: int | None = None):
        super().__init__(log_frequency)
        self._began = None  # (perf_counter, step) at the end of the first step

    def after_step(self, state):
        self._end_step(state)
        now = time.perf_counter()
        # From the end of the first step on: compilation and warm-up say nothing about the steps to come.
        self._began = self._began or (now, state.step)
        if getattr(state, "rank", 0) != 0 or not _log_step(state, self.log_frequency):
            return

        # Each part is in the line when the loop has it.
        max_steps = getattr(state, "max_steps", None)
        epoch, lr, metrics = (getattr(state, name, None) for name in ("epoch", "lr", "metrics"))
        parts = [f"step {state.step}/{max_steps}" if max_steps else f"step {state.step}"]
        if epoch is not None:
            parts.append(f"epoch {epoch}")
        if metrics:
            # The one device sync of this hook.
            parts.append(" ".join(f"{key} {value:.4f}" for key, value in to_floats(metrics).items()))
        if lr is not None:
            parts.append(f"lr {lr:.2e}")
        parts += self._speed_parts(state)
        if getattr(state, "step_skipped", False):
            parts.append("step skipped: gradients overflowed")
        steps_seen = state.step - self._began[1]
        if max_steps and steps_seen > 0:
            remaining_s = (now - self._began[0]) / steps_seen * max(max_steps - state.step, 0)
            parts.append(f"remaining {_clock_text(remaining_s)}")
        logger.info(" | ".join(parts), extra={"progress": True})  # a console may show it as one live line

    def _speed_parts(self, state) -> list[str]:
        speed = self._read(state)
        if not speed:
            return []
        parts = [f"{name} {speed[name + '_s']:.3f} ({speed['mean_' + name + '_s']:.3f}) s"
                 for name in ("data", "batch")]
        rates = ((name, speed[f"{name}_per_s"]) for name in ("samples", "tokens"))
        rates = " ".join(f"{rate:,.{0 if rate >= 100 else 2}f} {name}/s" for name, rate in rates if rate)
        return [*parts, rates] if rates else parts


def _clock_text(seconds: float) -> str:
    """3725.2 -> '1:02:05'; days are counted in hours."""
    whole = int(round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class GarbageCollector:
    """Collect Python's garbage every log_frequency steps, on all ranks at the same step, never in between.

    Automatic collections come at another moment on each rank, and each time all ranks wait for that one. What
    exists when training begins is frozen out of the collections, which makes them short; after_train puts
    everything back. Forked data-loader workers collect as usual.

    emits: nothing. costs: no device sync, no collective; a collection (some ms) every log_frequency steps.
    """

    emits: dict[str, str] = {}

    def __init__(self, log_frequency: int = 50, span: Callable | None = None):
        self.log_frequency = _check_period(self, log_frequency, default=50)
        self._span = span or _no_span
        self._active = False

    def before_train(self, state):
        # Data-loader workers are forked with collection off and would never collect; there is no way to take
        # the registration back, so the function looks whether the hook is still active.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._enable_in_child)
        if gc.isenabled():
            gc.collect()
            gc.freeze()
            gc.disable()
            self._active = True
        else:
            logger.warning("GarbageCollector: automatic collection was off already and is left so at the end")

    def after_step(self, state):
        if state.step % self.log_frequency == 0:
            with self._span("gc"):
                gc.collect()

    def after_train(self, state):
        if self._active:
            self._active = False
            gc.unfreeze()
            gc.enable()

    def _enable_in_child(self):
        if self._active:
            gc.enable()


# -------------------- what several of the hooks below share


# Attributes under which wrappers keep the module they wrap; names in recipes and metrics are without them.
_WRAPPED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def _walk(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """(name without wrappers, module), outermost first; a wrapper has the name of the module in it."""
    yield name, module
    for child_name, child in module.named_children():
        is_inner = child_name in _WRAPPED or (child_name == "module" and isinstance(module, _PARALLEL))
        yield from _walk(child, name if is_inner else f"{name}.{child_name}".lstrip("."))


def clean_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Every module under its name without wrappers ("" is the model); the wrapper where there is one."""
    # The first under a name is the outermost: hooks on a wrapper see what the loop sees.
    found: dict[str, torch.nn.Module] = {}
    for name, module in _walk(model):
        found.setdefault(name, module)
    return found


def _match(patterns: Any, names: list[str]) -> tuple[list[str], list[str]]:
    """Names that match any pattern, in the names' order, and the patterns that match none.

    * and ? stay within one component of a dotted name; ** crosses the dots.
    """
    hits: dict[str, set] = {}
    for pattern in patterns:
        # Longest first, or ** would be read as two *.
        escaped = re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
        hits[pattern] = {name for name in names if re.fullmatch(escaped, name)}
    matched = set().union(*hits.values())
    return [name for name in names if name in matched], [pattern for pattern in hits if not hits[pattern]]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_gather(numbers: list, dtype: torch.dtype, device: torch.device) -> list:
    """The numbers of every rank, as lists: one collective and, with nccl, a device sync."""
    mine = torch.tensor(numbers, dtype=dtype, device=device)
    gathered = [torch.empty_like(mine) for _ in range(_world_size())]
    dist.all_gather(gathered, mine)
    return torch.stack(gathered).tolist()


def _all_reduce(parts: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The sums of these tensors over the ranks, each in its shape, on device: one collective for all."""
    packed = torch.cat([part.flatten().to(device) for part in parts])
    dist.all_reduce(packed)
    return [total.view_as(part) for total, part in zip(packed.split([p.numel() for p in parts]), parts)]


def _exchange_device(*devices: Any) -> torch.device:
    """The first of these devices whose tensors the process group can move (nccl moves no CPU tensors)."""
    # For example "cpu:gloo,cuda:nccl".
    served = str(dist.get_backend_config())
    candidates = [torch.device(device) for device in devices]
    return next((device for device in candidates if f"{device.type}:" in served), candidates[-1])


class _Owned(NamedTuple):
    """A parameter and the module that it belongs to."""

    owner: str  # the module's name without wrappers
    module: torch.nn.Module
    attribute: str
    parameter: torch.nn.Parameter


def _owned_parameters(model: torch.nn.Module) -> list[_Owned]:
    """Every parameter once, by identity: a tied one with its first owner."""
    owned: dict[int, _Owned] = {}
    for name, module in _walk(model):
        for attribute, parameter in module.named_parameters(recurse=False):
            owned.setdefault(id(parameter), _Owned(name or "(root)", module, attribute, parameter))
    return list(owned.values())


def _quote(names: Any, limit: int = 8) -> str:
    """'a', 'b', 'c' and 12 more."""
    names = list(names)
    text = ", ".join(repr(name) for name in names[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "") if names else "none"


# -------------------- parameters and gradients


class ParameterCounter:
    """How many parameters there are, where, and which of them train: a table in the log at the start.

    Tied parameters count once, sharded ones (DTensor) with their whole size, quantised ones with their
    logical number of values and the bytes that they really take. Lazy ones are counted after the first step.

    show_details: a row per module that owns parameters, largest first. min_params: leave out smaller modules'
    rows.
    emits: params/*, once. costs: nothing after the start; no device sync, no collective.
    """

    emits = {"params/total": "parameters", "params/trainable": "parameters", "params/frozen": "parameters",
             "params/size_mb": "MB"}

    def __init__(self, show_details: bool = True, min_params: int = 0):
        if type(min_params) is not int or min_params < 0:
            raise ValueError(f"ParameterCounter: min_params is {min_params!r}; wanted a whole number >= 0")
        self.show_details = show_details
        self.min_params = min_params
        self._has_lazy = False

    def before_train(self, state):
        return self._count(state)

    def after_step(self, state):
        return self._count(state) if self._has_lazy else None

    def _count(self, state) -> dict[str, float]:
        # Lazy parameters have no shape yet: they are named now and counted after the first step.
        rows: dict[str, dict] = {}  # per module: counts, class name
        bytes_by_dtype: Counter[str] = Counter()
        lazy = []
        for name, module, is_trainable, parameter in _countable(state.model):
            if torch.nn.parameter.is_lazy(parameter):
                lazy.append(name)
                continue
            row = rows.setdefault(name, {"total": 0, "trainable": 0, "kind": type(module).__name__})
            count = _num_values(parameter)
            row["total"] += count
            row["trainable"] += count if is_trainable else 0
            bytes_by_dtype.update(_bytes_by_dtype(parameter))  # a Counter adds
        self._has_lazy = bool(lazy)
        total, trainable = (sum(row[part] for row in rows.values()) for part in ("total", "trainable"))
        found = {"params/total": total, "params/trainable": trainable, "params/frozen": total - trainable,
                 "params/size_mb": sum(bytes_by_dtype.values()) / 2**20}
        if getattr(state, "rank", 0) == 0:
            logger.info("\n".join(self._lines(found, bytes_by_dtype, lazy, rows)))
        return found

    def _lines(self, found: dict, bytes_by_dtype: dict, lazy: list[str], rows: dict) -> list[str]:
        total, trainable, frozen, size_mb = found.values()
        sizes = ", ".join(f"{dtype} {size / 2**20:.2f} MB" for dtype, size in bytes_by_dtype.items())
        lines = [f"parameters: {total:,} total, {trainable:,} trainable, {frozen:,} frozen,"
                 f" {size_mb:.2f} MB ({sizes or 'no bytes'})"]
        if lazy:
            lines.append(f"not counted yet, lazy until the first forward: {_quote(dict.fromkeys(lazy))}")
        return lines + (self._table(rows, total) if self.show_details else [])

    def _table(self, rows: dict, total: int) -> list[str]:
        shown = sorted((item for item in rows.items() if item[1]["total"] >= self.min_params),
                       key=lambda item: -item[1]["total"])
        width = max([len("module"), *(len(name) for name, _ in shown)])
        lines = [f"  {'module':<{width}}  {'parameters':>14}  {'share':>6}  {'trains':>7}  class"]
        for name, row in shown:
            # A module can own both kinds.
            trains = {0: "no", row["total"]: "yes"}.get(row["trainable"], "partly")
            count, share = row["total"], 100 * row["total"] / max(total, 1)
            lines.append(f"  {name:<{width}}  {count:>14,}  {share:>5.1f}%  {trains:>7}  {row['kind']}")
        if len(shown) < len(rows):
            lines.append(f"  not shown: {len(rows) - len(shown)} modules with fewer than {self.min_params:,}")
        frozen = [name for name, row in rows.items() if not row["trainable"]]
        return [*lines, f"  frozen modules: {_quote(frozen, 20)}"]


def _countable(model):
    """(module name, module, trains, parameter): parameters, and the packed weights of quantised modules."""
    for name, module, _, parameter in _owned_parameters(model):
        yield name, module, parameter.requires_grad, parameter
    for name, module in _walk(model):
        # torch.ao's quantised layers keep weight and bias in a packed object, behind methods.
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            for getter in (getattr(module, "weight", None), getattr(module, "bias", None)):
                packed = getter() if inspect.ismethod(getter) else None
                if isinstance(packed, torch.Tensor):
                    yield name or "(root)", module, False, packed


def _num_values(parameter: torch.Tensor) -> int:
    """Logical number of values; bitsandbytes packs two 4-bit values into a byte and keeps the shape aside."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return math.prod(shape) if shape is not None else parameter.numel()


def _bytes_by_dtype(tensor: torch.Tensor) -> Counter[str]:
    """Bytes that a tensor takes over all ranks; for a quantised subclass, those of the tensors inside it."""
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, DTensor):
        inside = (getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0])
        return sum(map(_bytes_by_dtype, inside), Counter())
    return Counter({str(tensor.dtype).replace("torch.", ""): tensor.numel() * tensor.element_size()})


class GradientNormLogger:
    """The true gradient norms: reduced over the ranks, unscaled, before clipping; the same on every rank.

    total is the norm over all trainable parameters, layers/<name> over those that the module owns itself.
    nonfinite_params is the number of parameters whose gradient norm is inf or NaN. With state.clip_norm,
    clip_coef is the factor that clipping by the 2-norm is about to apply. When GradScaler's scale made the
    step overflow (state.grad_scale is set and a norm is not finite) that is said in the log and no norm is
    returned.

    emits: grad_norm/*. costs: on log steps one fused norm over all gradients, and with sharded ones an
    all-reduce of one number a parameter; no device sync of its own, except one under a GradScaler. Nothing on
    other steps.
    """

    emits = {"grad_norm/total": "norm", "grad_norm/layers/<name>": "norm",
             "grad_norm/nonfinite_params": "parameters", "grad_norm/clip_coef": "factor, 1 = not clipped"}
    max_layers = 200

    def __init__(self, log_frequency: int = 10, norm_type: float = 2.0, log_per_layer: bool = True,
                 prefix: str = "grad_norm", span: Callable | None = None):
        self.log_frequency = _check_period(self, log_frequency)
        try:
            self.norm_type = float(norm_type)
        except (TypeError, ValueError):
            self.norm_type = math.nan
        if not self.norm_type > 0:
            raise ValueError(f"GradientNormLogger: norm_type is {norm_type!r}; wanted a number > 0, or inf")
        self.log_per_layer = log_per_layer
        self.prefix = prefix
        self._span = span or _no_span
        self._owned: list[_Owned] = []
        self._num_optimized = -1
        self._trainable_ids: list[int] = []
        self._has_warned = False

    def after_backward(self, state):
        if state.step % self.log_frequency:
            return None
        # Everything stays on the device, in 0-dim tensors, for the event's one copy to the host.
        parameters = self._trainable(state)
        if not parameters:
            return {f"{self.prefix}/total": 0.0, f"{self.prefix}/nonfinite_params": 0}
        with torch.no_grad():
            norms = _parameter_norms(parameters, self.norm_type, self._span)
            num_nonfinite = (~torch.isfinite(norms)).sum()
            # A device sync, only under a GradScaler, which has one at each step itself.
            if getattr(state, "grad_scale", None) is not None and num_nonfinite.item():
                return self._overflowed(state, norms, num_nonfinite)
            total = torch.linalg.vector_norm(norms, self.norm_type)
            found = {f"{self.prefix}/total": total, f"{self.prefix}/nonfinite_params": num_nonfinite}
            if getattr(state, "clip_norm", None):
                # Clipping is by the 2-norm, whichever norm is logged; 1e-6 as in torch's clip_grad_norm_.
                norm = total
                if self.norm_type != 2:
                    norm = torch.linalg.vector_norm(_parameter_norms(parameters, 2.0, self._span))
                found[f"{self.prefix}/clip_coef"] = (state.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            # All layers at once: each parameter's norm is added to the place of its layer.
            if self.log_per_layer:
                self._layer_of = self._layer_of.to(norms.device)
                layers = _layer_norms(norms, self.norm_type, self._layer_of, len(self._layers))
                keys = (f"{self.prefix}/layers/{name}" for name in self._layers[:self.max_layers])
                found.update(zip(keys, layers.unbind()))
        return found

    def _overflowed(self, state, norms, num_nonfinite) -> dict:
        # A device sync, on overflowing log steps only.
        first = self._names[int((~torch.isfinite(norms)).nonzero()[0])]
        logger.warning("step %d: gradients overflowed at loss scale %g in %d parameters (first: %s);"
                       " GradScaler skips this step", state.step, state.grad_scale, num_nonfinite, first)
        return {f"{self.prefix}/nonfinite_params": num_nonfinite}

    def _trainable(self, state) -> list[torch.nn.Parameter]:
        """Parameters that train now; names and layers are made anew when some came, went, froze or thawed."""
        # Walking the model takes longer than all norms of a small one. It is done again only when parameters
        # came (the optimizer has more of them) or were replaced; freezing and thawing show at each log step.
        groups = getattr(getattr(state, "optimizer", None), "param_groups", ())
        num_optimized = sum(len(group["params"]) for group in groups)
        is_replaced = any(entry.module._parameters.get(entry.attribute) is not entry.parameter
                          for entry in self._owned)
        if is_replaced or num_optimized != self._num_optimized:
            self._owned = _owned_parameters(state.model)
            self._num_optimized = num_optimized
        trainable = [entry for entry in self._owned if entry.parameter.requires_grad]
        ids = [id(entry.parameter) for entry in trainable]
        if ids != self._trainable_ids:
            self._trainable_ids = ids
            self._names = [f"{entry.owner}.{entry.attribute}" for entry in trainable]
            self._layers = list(dict.fromkeys(entry.owner for entry in trainable))
            position = {name: index for index, name in enumerate(self._layers)}
            self._layer_of = torch.tensor([position[entry.owner] for entry in trainable])
            if self.log_per_layer and len(self._layers) > self.max_layers and not self._has_warned:
                self._has_warned = True
                logger.warning("GradientNormLogger: %d modules own parameters; norms of the first %d are"
                               " logged, the total is over all", len(self._layers), self.max_layers)
        return [entry.parameter for entry in trainable]


def _layer_norms(norms: torch.Tensor, norm_type: float, layer_of: torch.Tensor, num_layers: int):
    """Norm of each layer (num_layers,), from its parameters' norms and the layer's number for each."""
    layers = norms.new_zeros(num_layers)
    if math.isinf(norm_type):
        return layers.scatter_reduce_(0, layer_of, norms, "amax")
    return layers.index_add_(0, layer_of, norms**norm_type) ** (1 / norm_type)


def _parameter_norms(parameters: list, norm_type: float, span: Callable) -> torch.Tensor:
    """Norm of each whole gradient, float64, 0 where there is none; ranks meet only for sharded ones."""
    home = parameters[0].device
    wide = _wide(home)
    # Is everything dense, whole and of one type? Then one fused call does, without sorting.
    grads = [parameter.grad for parameter in parameters]
    kinds = {grad if grad is None else (type(grad), grad.layout, grad.device, grad.dtype) for grad in grads}
    if len(kinds) == 1 and (kinds.pop() or ())[:2] == (torch.Tensor, torch.strided):
        return _fused_norms(grads, norm_type).to(wide)  # the ordinary case

    # One fused call for each device, type and way of sharding. Where a rank has no gradient it takes part all
    # the same: ranks must meet for the same parameters in the same order.
    groups: dict[tuple, tuple[list[int], list[torch.Tensor]]] = {}
    for position, (parameter, grad) in enumerate(zip(parameters, grads)):
        mesh, dims = None, ()
        if isinstance(parameter, DTensor):
            grad, mesh, dims = _local_gradient(parameter)
        if grad is None:
            grad = torch.zeros(0, device=parameter.device, dtype=parameter.dtype)
        if grad.is_sparse:
            grad = grad.coalesce().values()
        positions, same = groups.setdefault((mesh, dims, grad.device, grad.dtype), ([], []))
        positions.append(position)
        same.append(grad)
    # Back into the order of the parameters.
    joined = torch.zeros(len(parameters), dtype=wide, device=home)
    for (mesh, dims, *_), (positions, same) in groups.items():
        norms = _fused_norms(same, norm_type).to(wide)
        if dims:
            norms = _join_shards(norms, norm_type, mesh, dims, span)
        joined[torch.tensor(positions, device=home)] = norms.to(home)
    return joined


def _fused_norms(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm of each tensor (len(grads),), in float32 where they are in half precision; of an empty one 0."""
    if math.isinf(norm_type):  # torch knows no largest element of an empty tensor
        grads = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
    # Squares of gradients leave the range of half precision soon.
    narrow = grads[0].dtype in (torch.float16, torch.bfloat16)
    return torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float32 if narrow else None))


def _local_gradient(parameter: DTensor) -> tuple:
    """This rank's part of a sharded gradient, its mesh, and the mesh dimensions that it is sharded over."""
    grad = parameter.grad
    placed = parameter if grad is None else grad
    if any(placement.is_partial() for placement in placed.placements):  # not reduced yet: reduce a copy
        whole = [Replicate() if placement.is_partial() else placement for placement in placed.placements]
        grad = placed = grad.redistribute(placements=whole)
    dims = tuple(dim for dim, placement in enumerate(placed.placements) if placement.is_shard())
    return (None if grad is None else grad.to_local()), placed.device_mesh, dims


def _join_shards(norms: torch.Tensor, norm_type: float, mesh: Any, dims: tuple, span: Callable):
    """Norms of the whole gradients from each rank's norms of its shards: one all-reduce a mesh dimension."""
    is_max = math.isinf(norm_type)
    # Gradients that are offloaded to the host meet on the mesh's device: its process group may know no other.
    powers = (norms if is_max else norms**norm_type).to(mesh.device_type)
    with span("GradientNormLogger.reduce", sync=True) as meeting:
        meeting.ready()
        for dim in dims:
            how = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
            dist.all_reduce(powers, how, group=mesh.get_group(dim))
    return powers if is_max else powers ** (1 / norm_type)


# -------------------- what self-supervised training looks at


class _OutputMonitor:
    """Base of hooks that watch outputs of modules: finds them by pattern, listens to them on log steps only.

    A subclass says how outputs are accumulated over the forwards of a step (`_accumulate`), joined over the
    ranks (`_join_ranks`) and made into numbers (`_statistics`).

    The forward hooks are there from start to end and return at once on other steps, so that torch.compile,
    which looks at them when it traces, sees them; recomputation by activation checkpointing is not counted
    twice.
    """

    prefix = ""  # of the metrics
    default_modules: tuple[str, ...] = ()
    channel_dim = -1

    def __init__(self, log_frequency: int, modules: Any, span: Callable | None):
        self.log_frequency = _check_period(self, log_frequency)
        if isinstance(modules, str):
            modules = [modules]
        if modules is not None and not (isinstance(modules, (list, tuple)) and modules
                                        and all(isinstance(pattern, str) for pattern in modules)):
            raise ValueError(f"{type(self).__name__}: modules is {modules!r}; wanted names or patterns of"
                             f" modules, as ['student.backbone', '**.head']")
        self.modules = modules
        self._span = span or _no_span
        self._handles: list = []
        self._names: list[str] = []  # of the watched modules
        self._listening = False
        self._compiled: list[tuple] = []  # (name, output) from compiled code, looked at after it has run
        self._seen: dict[str, Any] = {}  # name -> what was accumulated since the last log step
        self._silent: set[str] = set()  # modules without an output, warned of once

    def before_train(self, state):
        self.after_train(state)  # a second start, as in a notebook, must not listen twice
        # Patterns that the user named must all match; of the defaults any may.
        candidates = clean_modules(state.model)
        names = list(candidates)
        self._names, unmatched = _match(self.modules or self.default_modules, names)
        if self.modules and unmatched:
            near = difflib.get_close_matches(unmatched[0].replace("*", ""), names, 5, 0.3)
            raise ValueError(f"modules: no module of the model matches {_quote(unmatched)}; nearest of"
                             f" {len(names)} names: {_quote(near or names)} (** crosses dots, * does not)")
        if not self._names:
            logger.warning("%s watches nothing: no module matches its defaults %s; name some with"
                           " modules=[...]; there are %s", type(self).__name__, _quote(self.default_modules),
                           _quote(names[1:], 20))
        self._handles = [candidates[name].register_forward_hook(self._listener(name)) for name in self._names]

    def before_step(self, state):
        self._observe_compiled()  # the last micro-batch's, before this one's can take its memory
        self._listening = state.step % self.log_frequency == 0

    def _listener(self, name: str) -> Callable:
        def listen(module, arguments, output):
            if not self._listening:
                return
            if torch.compiler.is_compiling():
                # Only what the compiler can trace; the rest waits until compiled code has run.
                self._compiled.append((name, _features(output)))
            elif torch._C._current_graph_task_id() == -1:  # not inside backward, where checkpoints run again
                self._observe(name, _features(output))
        return listen

    def _observe(self, name: str, features: torch.Tensor | None) -> None:
        with torch.no_grad():
            rows = _rows(name, features, self.channel_dim)
            self._seen[name] = self._accumulate(self._seen.get(name), rows)

    def _observe_compiled(self) -> None:
        compiled, self._compiled = self._compiled, []
        for name, features in compiled:
            self._observe(name, features)

    def after_backward(self, state):
        self._listening = False

    def after_step(self, state):
        self._listening = False
        if state.step % self.log_frequency or not self._names:
            return None
        self._observe_compiled()
        seen, self._seen = self._seen, {}
        # Not an error: a module may have its turn on other steps only.
        for name in self._names:
            if name not in seen and name not in self._silent:
                self._silent.add(name)
                logger.warning("%s: module %r gave no output at step %d", type(self).__name__, name,
                               state.step)
        found = {}
        with torch.no_grad():
            if _world_size() > 1:
                device = _exchange_device(getattr(state, "device", "cpu"))
                with self._span(f"{type(self).__name__}.exchange", sync=True) as span:
                    span.ready()
                    seen = self._join_ranks(seen, device)
            for name, accumulated in seen.items():
                numbers = self._statistics(accumulated)
                found.update((f"{self.prefix}/{name or '(root)'}/{part}", numbers[part]) for part in numbers)
        return found

    def after_train(self, state):
        for handle in self._handles:
            handle.remove()
        self._handles, self._names, self._listening = [], [], False
        self._compiled, self._seen = [], {}

    def _gather_sizes(self, sizes: list[tuple[int, int]], device: torch.device) -> list[tuple[int, int]]:
        """For each module the tokens on all ranks and the width, which a rank without output learns here."""
        together = []
        for name, of_ranks in zip(self._names, zip(*_all_gather(sizes, torch.int64, device))):
            # Before the next collective, in which tensors of unlike sizes would hang or crash all ranks.
            widths = {width for _, width in of_ranks if width}
            if len(widths) > 1:
                raise ValueError(f"module {name!r} has outputs of different width on the ranks: {widths}")
            together.append((sum(num_tokens for num_tokens, _ in of_ranks), max(widths, default=0)))
        return together


def _features(output: Any) -> torch.Tensor | None:
    """The feature tensor in a module's output: itself, its .feat, a dict's "feat", or the first inside."""
    if isinstance(output, torch.Tensor):
        return output.detach() if output.is_floating_point() else None
    # By the field's name first, as point-cloud and vision backbones have it, then whatever comes first.
    feat = output.get("feat") if isinstance(output, Mapping) else getattr(output, "feat", None)
    if isinstance(feat, torch.Tensor):
        return feat.detach()
    inside = output if isinstance(output, (list, tuple)) else ()
    inside = output.values() if isinstance(output, Mapping) else inside
    return next((found for found in map(_features, inside) if found is not None), None)


def _rows(name: str, features: torch.Tensor | None, channel_dim: int) -> torch.Tensor:
    """Features (..., C), or with the channels elsewhere, as (tokens, C)."""
    if features is None or features.dim() == 0:
        raise ValueError(f"module {name!r}: its output holds no feature tensor; wanted a floating-point"
                         f" tensor (..., C), or a tuple, a dict or an object with .feat that has one")
    return features.movedim(channel_dim, -1).reshape(-1, features.shape[channel_dim])


class FeatureStdMonitor(_OutputMonitor):
    """Whether features collapse: standard deviations and effective rank of modules' outputs, over all tokens.

    The tokens of a step are those of all its micro-batches and views, on all ranks, each with the same
    weight. global is the standard deviation of all values together; channel_* are over the channels' own ones
    (population form, so one token has 0). effective_rank is exp(entropy of the shares of variance along the
    principal axes): 1 = all on one line, C = all directions alike, 0 = all tokens the same (Roy and Vetterli,
    2007, with variances).

    A collapse shows in channel_mean and effective_rank. global can stay, or rise: where a layer norm gives
    each token the same spread, what the tokens lose is found again between the channels' means.

    modules: names or patterns; * stays within a part of a dotted name, ** crosses dots. Default: the
    student's and teacher's backbones. track_channels: channels/<i> as well, the first 256. channel_dim: where
    the channels are, -1 = last. effective_rank: False saves a C x C matrix and its eigenvalues, which is much
    from C = 1,000 on.

    emits: feature_std/*. costs: on log steps float64 sums over the outputs, with several ranks three
    collectives and a device sync. On other steps one Python call per watched forward.
    """

    emits = {"feature_std/<module>/global": "std", "feature_std/<module>/channel_mean": "std",
             "feature_std/<module>/channel_min": "std", "feature_std/<module>/channel_max": "std",
             "feature_std/<module>/effective_rank": "directions, 0 to C",
             "feature_std/<module>/channels/<i>": "std, with track_channels"}
    prefix = "feature_std"
    default_modules = ("**student.backbone", "**student_backbone", "**teacher.backbone", "**teacher_backbone")
    max_channels = 256

    def __init__(self, log_frequency: int = 10, modules: Any = None, track_channels: bool = False,
                 channel_dim: int = -1, effective_rank: bool = True, span: Callable | None = None):
        super().__init__(log_frequency, modules, span)
        self.track_channels = track_channels
        self.channel_dim = channel_dim
        self.effective_rank = effective_rank

    def _accumulate(self, before, rows):
        wide = _wide(rows.device)
        # Blocks of at most 32 MB, however many tokens there are.
        for block in rows.split(max(1, 2**22 // max(rows.shape[1], 1))):
            block = block.to(wide)
            if len(block):
                # From the first token on, so that a constant has a scatter of exactly 0 in any precision.
                shifted = block - block[0]
                mean = shifted.mean(0)
                found = _Moments(len(block), block[0] + mean, self._scatter(shifted - mean))
            else:
                found = self._no_moments(rows.shape[1], wide, rows.device)
            before = found if before is None else before.merge(found)
        return before

    def _scatter(self, centred: torch.Tensor) -> torch.Tensor:
        return centred.T @ centred if self.effective_rank else centred.square().sum(0)

    def _no_moments(self, width: int, dtype: torch.dtype, device: torch.device) -> "_Moments":
        nothing = torch.zeros(0, width, dtype=dtype, device=device)
        return _Moments(0, nothing.sum(0), self._scatter(nothing))

    def _join_ranks(self, seen, device):
        """Over the tokens of all ranks: the mean first, then every rank's scatter around it."""
        local = [seen.get(name) for name in self._names]
        sizes = self._gather_sizes([(m.num_tokens, len(m.mean)) if m else (0, 0) for m in local], device)
        local = [m or self._no_moments(width, torch.float64, device) for m, (_, width) in zip(local, sizes)]
        sums = _all_reduce([m.num_tokens * m.mean for m in local], device)
        means = [total / max(num_tokens, 1) for total, (num_tokens, _) in zip(sums, sizes)]
        scatters = _all_reduce([m.scatter_around(mean) for m, mean in zip(local, means)], device)
        return {name: _Moments(num_tokens, mean, scatter) for name, (num_tokens, _), mean, scatter
                in zip(self._names, sizes, means, scatters)}

    def _statistics(self, moments):
        num_tokens, mean, scatter = moments
        if not num_tokens:
            return {}
        squares = scatter.diagonal() if self.effective_rank else scatter  # (C,), around the channels' means
        std = (squares / num_tokens).sqrt()
        # All values together: the channels' own spread, and that of their means; from the first channel's on,
        # so that channels which are alike have none.
        offsets = mean - mean[0]
        spread = num_tokens * (offsets - offsets.mean()).square().sum()
        found = {"global": ((squares.sum() + spread) / (num_tokens * len(mean))).sqrt(),
                 "channel_mean": std.mean(), "channel_min": std.min(), "channel_max": std.max()}
        if self.effective_rank:
            found["effective_rank"] = _effective_rank(scatter)
        if self.track_channels:
            found.update((f"channels/{i}", value) for i, value in enumerate(std[:self.max_channels].unbind()))
        return found


class _Moments(NamedTuple):
    """First and second moments of a set of tokens; sets join without a difference of large sums."""

    num_tokens: int
    mean: torch.Tensor  # (C,)
    scatter: torch.Tensor  # sum of outer products around the mean (C, C), or only its diagonal (C,)

    def merge(self, other: "_Moments") -> "_Moments":
        """Moments of both sets together (Chan, Golub and LeVeque, 1983)."""
        num_tokens = self.num_tokens + other.num_tokens
        if not num_tokens:
            return self
        mean = self.mean + (other.mean - self.mean) * (other.num_tokens / num_tokens)
        return _Moments(num_tokens, mean, self.scatter_around(mean) + other.scatter_around(mean))

    def scatter_around(self, centre: torch.Tensor) -> torch.Tensor:
        """Scatter around another point than the mean."""
        offset = self.mean - centre.to(self.mean.device)
        square = torch.outer(offset, offset) if self.scatter.dim() == 2 else offset.square()
        return self.scatter + self.num_tokens * square


def _effective_rank(scatter: torch.Tensor) -> torch.Tensor:
    """exp(entropy) of the eigenvalues' shares, 0-dim; NaN when the features are not finite."""
    # eigvalsh raises on NaN. Asking first would be a device sync, so it gets a matrix that it can do, and
    # the result is thrown away.
    is_finite = torch.isfinite(scatter).all()
    variances = torch.linalg.eigvalsh(torch.where(is_finite, scatter, torch.eye(len(scatter)).to(scatter)))
    variances = variances.clamp(min=0)
    rank = torch.special.entr(variances / variances.sum()).sum().exp()
    rank = torch.where(variances.sum() > 0, rank, torch.zeros_like(rank))
    return torch.where(is_finite, rank, torch.full_like(rank, math.nan))


class PrototypeUsageLogger(_OutputMonitor):
    """How many prototypes the heads use: each token counts for the prototype of its largest output.

    Counts are over the tokens of all micro-batches, views and ranks. used is the number of prototypes with at
    least one token, perplexity = exp(entropy of the shares): 1 = all tokens on one prototype, K = all
    prototypes alike. Tokens with a NaN are left out; without any token entropy, perplexity and
    tokens_per_used are NaN.

    modules: as in FeatureStdMonitor; default: the student's and teacher's heads, whose outputs are (..., K).
    emits: prototypes/*. costs: on log steps an argmax over the outputs, with several ranks two collectives
    and a device sync. On other steps one Python call per watched forward.
    """

    emits = {"prototypes/<module>/used": "prototypes", "prototypes/<module>/unused_percent": "per cent",
             "prototypes/<module>/tokens_per_used": "tokens", "prototypes/<module>/entropy": "nats",
             "prototypes/<module>/perplexity": "prototypes"}
    prefix = "prototypes"
    default_modules = ("**student.*head", "**student_*head", "**teacher.*head", "**teacher_*head")

    def __init__(self, log_frequency: int = 10, modules: Any = None, span: Callable | None = None):
        super().__init__(log_frequency, modules, span)

    def _accumulate(self, before, rows):
        """Tokens of each prototype, (K,) int64."""
        counts = before
        if counts is None:
            counts = torch.zeros(rows.shape[1], dtype=torch.int64, device=rows.device)
        # Adding 0 for tokens with a NaN leaves them out without a device sync.
        if rows.numel():
            counts.scatter_add_(0, rows.argmax(1), (~rows.isnan().any(1)).to(torch.int64))
        return counts

    def _join_ranks(self, seen, device):
        local = [seen.get(name) for name in self._names]
        sizes = self._gather_sizes([(0, 0 if counts is None else len(counts)) for counts in local], device)
        local = [torch.zeros(width, dtype=torch.int64, device=device) if counts is None else counts
                 for counts, (_, width) in zip(local, sizes)]
        return {name: counts for name, counts in zip(self._names, _all_reduce(local, device)) if len(counts)}

    def _statistics(self, counts):
        wide = _wide(counts.device)
        total, used = counts.sum().to(wide), (counts > 0).sum().to(wide)
        entropy = torch.special.entr(counts / total).sum()
        return {"used": used, "unused_percent": 100 - 100 * used / len(counts),
                "tokens_per_used": total / used, "entropy": entropy, "perplexity": entropy.exp()}


class LogitEntropyLogger:
    """Entropy of the softmax of logits, in nats: mean over the rows of this rank's last micro-batch.

    normalized is entropy / log K: 0 = every row is sure, 1 = every row is uniform. Logits of -inf have
    probability 0, half precision is computed in float32.

    logits_key: which of the model's outputs, (..., K). temperature: a number that divides the logits, or the
    path of an attribute of the model that holds it ("teacher_temperature", "loss.temperature").
    emits: entropy/*. costs: one softmax over the logits on log steps, which are all steps by default; no
    collective, no device sync of its own.
    """

    emits = {"entropy/mean": "nats", "entropy/normalized": "share of log K", "entropy/temperature": "factor"}

    def __init__(self, log_frequency: int = 1, logits_key: str = "logits", temperature: float | str = 1.0,
                 prefix: str = "entropy"):
        self.log_frequency = _check_period(self, log_frequency)
        is_path = isinstance(temperature, str) and temperature != ""
        if not is_path and not (type(temperature) in (int, float) and 0 < temperature < math.inf):
            raise ValueError(f"LogitEntropyLogger: temperature is {temperature!r}; wanted a number above 0,"
                             f" or the path of an attribute of the model")
        self.logits_key = logits_key
        self.temperature = temperature
        self.prefix = prefix
        self._has_warned = False

    def before_train(self, state):
        if isinstance(self.temperature, str):
            _attribute(state.model, self.temperature)

    def after_step(self, state):
        if state.step % self.log_frequency:
            return None
        # A model that returns no such tensor is named in the log, once, with what it has; the run goes on.
        outputs = getattr(state, "outputs", None) or {}
        logits = outputs.get(self.logits_key) if isinstance(outputs, Mapping) else None
        if not isinstance(logits, torch.Tensor) or logits.dim() == 0:
            if not self._has_warned:
                self._has_warned = True
                keys = [key for key, value in dict(outputs).items() if getattr(value, "ndim", 0)]
                logger.warning("LogitEntropyLogger logs nothing: the model's outputs have no tensor (..., K)"
                               " %r%s; they have %s", self.logits_key, _nearest(self.logits_key, keys),
                               _quote(keys))
            return None
        if not logits.numel():
            return None
        temperature = self.temperature
        if isinstance(temperature, str):
            temperature = _attribute(state.model, temperature)
        entropy = _mean_entropy(logits.detach(), temperature)
        return {f"{self.prefix}/mean": entropy,
                f"{self.prefix}/normalized": entropy / (math.log(logits.shape[-1]) or 1.0),  # one class: 0
                f"{self.prefix}/temperature": temperature}


def _mean_entropy(logits: torch.Tensor, temperature: Any) -> torch.Tensor:
    """Entropy of softmax(logits / temperature) in nats, mean over the rows of (..., K), 0-dim."""
    num_classes = logits.shape[-1]
    rows = logits.reshape(-1, num_classes)
    # float32 in blocks of at most 16 MB: all logits of a language model at once can be gigabytes.
    total = torch.zeros((), device=rows.device)
    for block in rows.split(max(1, 2**22 // num_classes)):
        probabilities = torch.softmax(block.float() / temperature, dim=-1)
        total += torch.special.entr(probabilities).sum()  # 0 where the probability is 0
    return (total / len(rows)).clamp(0, math.log(num_classes))  # rounding must not leave the range


def _attribute(model: Any, path: str) -> Any:
    """model.a.b for "a.b"; ValueError with the nearest name where the path ends."""
    found = model
    for part in path.split("."):
        if not hasattr(found, part):
            known = [name for name in dir(found) if not name.startswith("_")]
            raise ValueError(f"temperature: {type(model).__name__} has no attribute {path!r}:"
                             f" {type(found).__name__} has no {part!r}{_nearest(part, known)}")
        found = getattr(found, part)
    is_number = isinstance(found, numbers.Real) or isinstance(found, torch.Tensor) and found.numel() == 1
    if not is_number:
        raise ValueError(f"temperature: {path!r} of {type(model).__name__} is {type(found).__name__};"
                         f" wanted a number")
    return found


# -------------------- what the machine is doing


class ResourceUtilizationLogger:
    """CPU, memory and GPUs of the job: a thread samples once a second, log steps take the latest sample.

    Host figures come from local rank 0 of each host: mean over the hosts, and <key>_max when there are
    several. In a container its limits (cgroup v1 and v2: CPU quota, CPU set, memory) stand for the host's.
    GPU figures are those of the GPUs that the run's ranks use, found by UUID or PCI address: mean, and
    <key>_max. gpu<i> is rank i's GPU. What a device or system does not support is absent, never 0. throttled
    is 1 when heat or a power brake slows the GPU down. Seen from a container without the host's process ids,
    gpu_mem_mb of a process is absent.

    per_process: figures of each rank's process. cpu_percent (100 = one core), rss_mb and pss_mb are with its
    child processes: data-loader workers, which come and go with each epoch, and on rank 0 W&B's service.
    pss_mb counts shared pages once. Reading it walks the page tables: in the thread, but not free.
    emits: system/*. costs: no device sync; with several ranks one all-gather of 20 numbers each on log steps
    when there are GPUs or per_process is set, else no collective.
    """

    emits = {
        "system/cpu_percent": "per cent of the host's or container's CPUs", "system/ram_used_mb": "MB",
        "system/ram_percent": "per cent", "system/cpu_percent_max": "busiest host",
        "system/ram_used_mb_max": "fullest host", "system/ram_percent_max": "fullest host",
        "system/gpu_util_percent": "per cent of the time, mean over GPUs",
        "system/gpu_util_percent_max": "per cent, busiest GPU",
        "system/gpu_mem_used_mb": "MB, mean over GPUs", "system/gpu_mem_used_mb_max": "MB, fullest GPU",
        "system/gpu<i>/util_percent": "per cent", "system/gpu<i>/mem_used_mb": "MB",
        "system/gpu<i>/power_w": "W", "system/gpu<i>/temp_c": "degrees Celsius",
        "system/gpu<i>/throttled": "0 or 1", "system/rank<r>/cpu_percent": "per cent of one core",
        "system/rank<r>/rss_mb": "MB", "system/rank<r>/pss_mb": "MB", "system/rank<r>/gpu_mem_mb": "MB",
        "system/rank<r>/torch_allocated_mb": "MB", "system/rank<r>/torch_reserved_mb": "MB",
        "system/rank<r>/torch_peak_mb": "MB",
    }
    _host = ("cpu_percent", "ram_used_mb", "ram_percent")
    _gpu = ("util_percent", "mem_used_mb", "power_w", "temp_c", "throttled")
    _process = ("cpu_percent", "rss_mb", "pss_mb", "gpu_mem_mb", "torch_allocated_mb", "torch_reserved_mb",
                "torch_peak_mb")

    def __init__(self, log_frequency: int = 10, log_per_gpu: bool = False, per_process: bool = False,
                 sample_s: float = 1.0, span: Callable | None = None):
        self.log_frequency = _check_period(self, log_frequency)
        if type(sample_s) not in (int, float) or not 0 < sample_s < 1e6:
            raise ValueError(f"ResourceUtilizationLogger: sample_s is {sample_s!r}; wanted seconds above 0")
        try:
            import psutil  # noqa: F401
        except ImportError:
            raise ValueError("ResourceUtilizationLogger needs psutil: pip install psutil") from None
        self.log_per_gpu = log_per_gpu
        self.per_process = per_process
        self.sample_s = sample_s
        self._span = span or _no_span
        self._thread = None
        self._latest: dict[str, float] = {}  # the thread's figures: "host/cpu_percent", "gpu/power_w", ...

    def before_train(self, state):
        # What this rank samples: its host if it is the host's first rank, its GPU, its processes.
        self._device = torch.device(getattr(state, "device", "cpu"))
        self._rank = getattr(state, "rank", 0)
        has_host = getattr(state, "local_rank", 0) == 0
        self._sources = [("host", HostUsage())] if has_host else []
        if self._device.type != "cpu":
            self._sources.append(("gpu", GpuUsage(self._device)))
        if self.per_process:
            self._sources.append(("process", ProcessUsage(self._device)))
        self._stop, self._sampled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._sample_forever, name="resources", daemon=True)
        self._thread.start()
        self._sampled.wait(2.0)  # so that the first log step has figures; no step waits for a sample

    def after_step(self, state):
        if state.step % self.log_frequency or self._thread is None:
            return None
        # The thread makes a new dict for each sample: no lock is needed.
        by_rank = {self._rank: self._latest}
        if _world_size() > 1 and (self.per_process or self._device.type != "cpu"):
            by_rank = self._gather(self._latest)
        return self._figures(by_rank)

    def after_train(self, state):
        if self._thread is not None:
            self._stop.set()
            self._thread.join(timeout=5.0)  # a sample that hangs in a driver does not hold the run up
            self._thread, self._latest = None, {}

    def _sample_forever(self) -> None:
        wait_s = min(0.1, self.sample_s)
        self._sample()  # where the figures that are differences start from
        while not self._stop.wait(wait_s):
            self._latest = self._sample()
            self._sampled.set()
            wait_s = min(2 * wait_s, self.sample_s)  # short runs get figures too

    def _sample(self) -> dict[str, float]:
        latest = {}
        for kind, source in list(self._sources):
            try:
                latest.update((f"{kind}/{name}", value) for name, value in source.sample().items())
            except Exception as error:  # a system without /proc, say: watching must not become the trouble
                self._sources.remove((kind, source))
                logger.warning("ResourceUtilizationLogger: no figures of this %s any more: %s: %s", kind,
                               type(error).__name__, error)
        if "gpu/own_mem_mb" in latest:  # NVML knows it, but it is a figure of the process
            latest["process/gpu_mem_mb"] = latest.pop("gpu/own_mem_mb")
        return latest

    def _gather(self, mine: dict) -> dict[int, dict]:
        """Rank -> figures, by one all-gather; NaN stands for absent on the way."""
        groups = {"host": self._host, "gpu": (*self._gpu, "id"), "process": self._process}
        names = [f"{kind}/{name}" for kind, group in groups.items() for name in group]
        values = [mine.get(name, math.nan) for name in names]
        with self._span("ResourceUtilizationLogger.gather", sync=True) as span:
            span.ready()
            rows = _all_gather(values, torch.float64, _exchange_device("cpu", self._device))
        return {rank: {name: value for name, value in zip(names, row) if not math.isnan(value)}
                for rank, row in enumerate(rows)}

    def _figures(self, by_rank: dict[int, dict]) -> dict[str, float]:
        """Metrics from the figures of each rank (or of this one alone)."""
        found: dict[str, float] = {}

        def add_mean_and_max(key: str, figure: str, rows: Any, least_for_max: int) -> None:
            values = [row[figure] for row in rows if figure in row]
            if values:
                found[key] = sum(values) / len(values)
            if len(values) >= least_for_max:
                found[f"{key}_max"] = max(values)

        def add_each(owner: str, kind: str, names: tuple, rows: dict[int, dict]) -> None:
            found.update((f"system/{owner}{rank}/{name}", row[f"{kind}/{name}"]) for rank, row in rows.items()
                         for name in names if f"{kind}/{name}" in row)

        # A GPU that ranks share counts once, for the first of them.
        first_ranks: dict[float, int] = {}
        for rank, row in by_rank.items():
            if "gpu/id" in row:
                first_ranks.setdefault(row["gpu/id"], rank)
        gpus = {rank: by_rank[rank] for rank in first_ranks.values()}
        for name in self._host:
            add_mean_and_max(f"system/{name}", f"host/{name}", by_rank.values(), least_for_max=2)
        for name in ("util_percent", "mem_used_mb"):
            add_mean_and_max(f"system/gpu_{name}", f"gpu/{name}", gpus.values(), least_for_max=1)
        if self.log_per_gpu:
            add_each("gpu", "gpu", self._gpu, gpus)
        if self.per_process:
            add_each("rank", "process", self._process, by_rank)
        return found


class HostUsage:
    """CPU and memory of the host, or of the container when it has limits of its own."""

    def __init__(self):
        self._before = None  # (busy, possible) CPU seconds at the last sample that had any

    def sample(self) -> dict[str, float]:
        """cpu_percent since the last sample (absent in the first), ram_used_mb, ram_percent."""
        import psutil
        # Read anew each time: limits of a running container can be changed.
        limits = read_cgroup()
        memory = psutil.virtual_memory()
        used, size = memory.total - memory.available, memory.total
        if limits.get("memory_bytes", math.inf) < memory.total:
            used, size = limits["memory_used_bytes"], limits["memory_bytes"]
        found = {"ram_used_mb": used / 2**20, "ram_percent": 100 * used / size}
        # A percentage needs two readings; the first only says where to count from.
        busy_s, possible_s = self._cpu_seconds(limits)
        if self._before is not None and busy_s > self._before[0] and possible_s > self._before[1]:
            percent = 100 * (busy_s - self._before[0]) / (possible_s - self._before[1])
            found["cpu_percent"] = min(percent, 100.0)
        if self._before is None or "cpu_percent" in found:
            self._before = busy_s, possible_s  # a window without a tick of the clock goes on
        return found

    @staticmethod
    def _cpu_seconds(limits: dict) -> tuple[float, float]:
        """CPU seconds used so far, and those there were: of the quota's cores, else of the CPUs there are."""
        import psutil
        if "cpu_cores" in limits and "cpu_used_s" in limits:
            return limits["cpu_used_s"], time.monotonic() * limits["cpu_cores"]
        busy_s = possible_s = 0.0
        for cpu, times in enumerate(psutil.cpu_times(percpu=True)):
            if cpu in limits.get("cpus", (cpu,)):
                # Guests' time is in user time already.
                spent = {name: getattr(times, name) for name in times._fields if not name.startswith("guest")}
                possible_s += sum(spent.values())
                busy_s += sum(spent.values()) - spent["idle"] - spent.get("iowait", 0.0)
        return busy_s, possible_s


def read_cgroup(root: Any = "/sys/fs/cgroup", membership: Any = "/proc/self/cgroup") -> dict:
    """This process's limits from cgroup v1 or v2, the tightest on the way up; a key without limit is absent.

    memory_bytes and memory_used_bytes (without page cache that can go at once), cpu_cores (quota) and
    cpu_used_s, cpus (a set of CPU numbers).
    """
    found: dict[str, Any] = {}
    for line in (_read_text(membership) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # v2, also beside v1 under "unified"
            names, bases = {"memory", "cpu"}, (Path(root), Path(root, "unified"))
        else:  # v1: a tree for each set of controllers, mounted under all their names or the first one's
            names = set(controllers.split(","))
            bases = (Path(root, controllers), Path(root, controllers.split(",")[0]))
        for base in bases:
            # The group's own folder and those above it; in a container the path can be the host's.
            own = Path(base, path.lstrip("/"))
            for level in (own, *own.parents):
                if level.is_relative_to(base) and level.is_dir():
                    if "memory" in names:
                        _read_cgroup_memory(found, level)
                    if names & {"cpu", "cpuset"}:
                        _read_cgroup_cpu(found, level)
    return found


def _read_cgroup_memory(found: dict, level: Path) -> None:
    # v2, then v1: the limit, what is used, and the page cache in it that can go at once.
    for limit, used, cache in (("memory.max", "memory.current", "inactive_file"),
                               ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        text = _read_text(level / limit) or ""
        if text.isdigit() and int(text) < found.get("memory_bytes", math.inf):
            used_bytes = int(_read_text(level / used) or 0) - _read_stat(level / "memory.stat").get(cache, 0)
            found.update(memory_bytes=int(text), memory_used_bytes=max(used_bytes, 0))


def _read_cgroup_cpu(found: dict, level: Path) -> None:
    quota, period = (_read_text(level / "cpu.max") or "max 1").split()  # v2
    if _read_text(level / "cpu.cfs_quota_us"):  # v1, -1 = no limit
        quota, period = _read_text(level / "cpu.cfs_quota_us"), _read_text(level / "cpu.cfs_period_us")
    if quota.isdigit() and int(quota) / int(period) < found.get("cpu_cores", math.inf):
        found["cpu_cores"] = int(quota) / int(period)
        stat = _read_stat(level / "cpu.stat")
        nanoseconds = _read_text(level / "cpuacct.usage")  # v1
        if nanoseconds:
            found["cpu_used_s"] = int(nanoseconds) / 1e9
        elif "usage_usec" in stat:
            found["cpu_used_s"] = stat["usage_usec"] / 1e6
    texts = (_read_text(level / f"cpuset.{name}") for name in ("cpus.effective", "effective_cpus", "cpus"))
    cpus = next(filter(None, texts), None)
    if cpus and "cpus" not in found:
        ranges = (part.split("-") for part in cpus.split(","))  # "0-2,5"
        found["cpus"] = {cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)}


def _read_stat(path: Path) -> dict[str, int]:
    """Lines "name number" as a dict."""
    lines = (line.split() for line in (_read_text(path) or "").splitlines())
    return {name: int(number) for name, number, *_ in lines}


def _read_text(path: Any) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


class GpuUsage:
    """What NVML says about the GPU behind a torch device. Whatever fails is absent; trouble is said once."""

    # Slowed down by hardware, by heat (software and hardware), by an external power brake.
    _throttling = 0x08 | 0x20 | 0x40 | 0x80

    def __init__(self, device: torch.device):
        self._device = device
        self._has_warned = False
        self._handle = None
        try:
            if device.type != "cuda" or torch.version.hip:
                raise LookupError(f"{device.type} devices of this vendor are not known to NVML")
            import pynvml
            self._nvml = pynvml
            pynvml.nvmlInit()
            self._handle = self._find_handle()
        except Exception as error:  # no pynvml, no driver, an unknown device: all mean the same for the run
            self._warn(f"no figures of {device}: {type(error).__name__}: {error}")

    def _find_handle(self) -> Any:
        """By UUID, since CUDA_VISIBLE_DEVICES renumbers devices; by PCI address where that is unknown."""
        properties = torch.cuda.get_device_properties(self._device)
        # A MIG instance has a UUID of its own, with another prefix.
        ways = [(self._nvml.nvmlDeviceGetHandleByUUID, f"{prefix}-{properties.uuid}")
                for prefix in ("GPU", "MIG") if getattr(properties, "uuid", None)]
        if getattr(properties, "pci_bus_id", None) is not None:
            domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
            address = f"{domain:08X}:{bus:02X}:{slot:02X}.0"
            ways.append((self._nvml.nvmlDeviceGetHandleByPciBusId, address))
        for way, name in ways:
            try:
                return way(name)
            except self._nvml.NVMLError_NotFound:
                continue
        raise LookupError(f"NVML knows none of {[name for _, name in ways]}")

    def sample(self) -> dict[str, float]:
        """util_percent, mem_used_mb, power_w, temp_c, throttled, own_mem_mb (of this process), id (GPU's)."""
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        # Renamed in newer versions of nvidia-ml-py.
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons",
                          getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None))
        ways = {
            "util_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "mem_used_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**20,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temp_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttled": lambda: float(bool(reasons(handle) & self._throttling)),
            "own_mem_mb": self._own_memory_mb,
            # A number, so that it travels with the others to find out which ranks share a GPU.
            "id": lambda: float(zlib.crc32(str(nvml.nvmlDeviceGetUUID(handle)).encode())),
        }
        figures = {name: self._ask(name, way) for name, way in ways.items()}
        return {name: value for name, value in figures.items() if value is not None}

    def _own_memory_mb(self) -> float | None:
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        used = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
        return used[0] / 2**20 if used and used[0] is not None else None

    def _ask(self, name: str, way: Callable) -> float | None:
        try:
            return way()
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission,
                self._nvml.NVMLError_FunctionNotFound):
            return None
        except Exception as error:  # the card fell off the bus, the driver went
            self._warn(f"no {name} of {self._device}: {type(error).__name__}: {error}")
            return None

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("ResourceUtilizationLogger: %s", text)


class ProcessUsage:
    """CPU and memory of this process and its children (data-loader workers), and of torch's allocator."""

    def __init__(self, device: torch.device):
        self._device = device
        self._before: tuple | None = None  # (monotonic seconds, {pid: CPU seconds})

    def sample(self) -> dict[str, float]:
        """cpu_percent since the last sample (absent in the first), rss_mb, pss_mb, torch_*_mb."""
        import psutil
        now, cpu_s, rss_bytes, pss_bytes = time.monotonic(), {}, 0, 0
        # Workers come and go between samples; one that is new since the last counts from its start.
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # a worker that ended just now
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                rss_bytes += process.memory_info().rss
                pss_bytes += _pss_bytes(process.pid)
        found = {"rss_mb": rss_bytes / 2**20}
        if pss_bytes:
            found["pss_mb"] = pss_bytes / 2**20
        if self._before is not None and now > self._before[0]:
            used_s = sum(seconds - self._before[1].get(pid, 0.0) for pid, seconds in cpu_s.items())
            found["cpu_percent"] = 100 * used_s / (now - self._before[0])
        self._before = now, cpu_s
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device)
            for name, function in (("allocated", "memory_allocated"), ("reserved", "memory_reserved"),
                                   ("peak", "max_memory_allocated")):
                if hasattr(module, function):
                    found[f"torch_{name}_mb"] = getattr(module, function)(self._device) / 2**20
        return found


def _pss_bytes(pid: int) -> int:
    """Proportional set size: a page that n processes share counts 1/n in each. 0 where it is not known."""
    match = re.search(r"^Pss:\s+(\d+) kB", _read_text(f"/proc/{pid}/smaps_rollup") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


# -------------------- where the time goes inside a step


class RuntimeProfiler:
    """A torch.profiler trace of a few steps, for Perfetto; top operators and kernels as a table in the log.

    start_step is the first step in the trace, active the number of steps in it; the profiler runs for warmup
    steps before that. ranks: which ranks record, or "all". memory: allocations too, with the memory timeline
    as a counter track in the trace, and on CUDA an allocator snapshot (<trace>.memory.pickle, for
    pytorch.org/memory_viz).

    ProfilerStep#<n> in the trace is the run's step n. A run that ends inside the window keeps what was
    recorded; one that ends before it says so.

    emits: nothing; files profiler/<run>-rank<N>-step<S>.json.gz. costs: steps of the window are slower, and
    its last one waits while the trace is written; nothing before and after. Memory grows with active (at most
    100) until then.
    """

    emits: dict[str, str] = {}

    def __init__(self, start_step: int = 10, warmup: int = 2, active: int = 3, ranks: Any = (0,),
                 memory: bool = False, with_stack: bool = False, record_shapes: bool = True):
        limits = {"start_step": (start_step, 1, 10**9), "warmup": (warmup, 0, 1000),
                  "active": (active, 1, 100)}
        for name, (value, low, high) in limits.items():
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"RuntimeProfiler: {name} is {value!r}; wanted a whole number of steps,"
                                 f" {low} to {high:,}")
        is_list = isinstance(ranks, (list, tuple)) and all(type(rank) is int and rank >= 0 for rank in ranks)
        if ranks != "all" and not (is_list and ranks):
            raise ValueError(f"RuntimeProfiler: ranks is {ranks!r}; wanted a list as [0, 3], or all")
        self.start_step, self.warmup, self.active, self.ranks = start_step, warmup, active, ranks
        self.memory, self.with_stack, self.record_shapes = memory, with_stack, record_shapes
        self.last_step = start_step + active - 1
        self._profile = None
        self._first_active = None  # the first step in the trace, once there is one
        self._is_done = False

    def before_train(self, state):
        world_size = getattr(state, "world_size", 1)
        beyond = [] if self.ranks == "all" else [rank for rank in self.ranks if rank >= world_size]
        if beyond:
            raise ValueError(f"ranks: {beyond} are not in this run of {world_size} ranks")
        self._is_done = self.ranks != "all" and getattr(state, "rank", 0) not in self.ranks
        max_steps = getattr(state, "max_steps", None)
        if not self._is_done and max_steps is not None and max_steps < self.last_step:
            logger.warning("RuntimeProfiler: the run has %d steps, the window is steps %d to %d: start_step"
                           " or active is too large", max_steps, self.start_step, self.last_step)

    def before_step(self, state):
        if self._is_done:
            return
        if self._profile is None and self.start_step - self.warmup <= state.step <= self.last_step:
            self._start(state)
        if self._profile is not None and self._first_active is None and state.step >= self.start_step:
            self._first_active = state.step

    def after_step(self, state):
        if self._profile is None:
            return
        # Written at once, not at the end of the run: its memory is free from here on.
        if state.step >= self.last_step:
            self._finish(state)
        else:
            self._profile.step()

    def after_train(self, state):
        if self._profile is not None:
            self._finish(state)
        elif not self._is_done and state.step <= self.last_step:
            logger.warning("RuntimeProfiler: the run ended at step %s, before its window began at step %d:"
                           " no trace", state.step, self.start_step - self.warmup)

    def _start(self, state) -> None:
        self._device = torch.device(getattr(state, "device", "cpu"))
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self.memory:
                torch.cuda.memory._record_memory_history(max_entries=200_000)
        # A resumed run that begins inside the window records what is left of it.
        warmup = max(self.start_step - state.step, 0)
        active = self.last_step - max(state.step, self.start_step) + 1
        schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1)
        first = state.step
        self._profile = torch.profiler.profile(
            activities=activities, schedule=lambda step: schedule(max(step - first, 0)),
            record_shapes=self.record_shapes, profile_memory=self.memory, with_stack=self.with_stack)
        self._profile.step_num = first  # ProfilerStep#<n> in the trace is then the loop's step n
        self._profile.start()

    def _finish(self, state) -> None:
        # Forgotten first, so that an exception below does not lead here again from after_train.
        profile, self._profile, self._is_done = self._profile, None, True
        profile.stop()
        if self._first_active is None:
            logger.warning("RuntimeProfiler: the run ended at step %s, in the warm-up of its window (steps %d"
                           " to %d): no trace", state.step, self.start_step, self.last_step)
            return
        run = re.sub(r"[^\w.-]+", "-", str(getattr(state, "run", None) or "run"))
        folder = Path(getattr(state, "run_dir", None) or ".", "profiler")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{run}-rank{getattr(state, 'rank', 0)}-step{self._first_active}.json.gz"
        # Packed here: torch packs line by line, which takes ten times as long, and all ranks wait meanwhile.
        plain = path.with_suffix("")
        try:
            profile.export_chrome_trace(str(plain))
            text = plain.read_bytes()
        finally:
            plain.unlink(missing_ok=True)
        with _no_collection():
            trace = json.loads(text)
            if self.memory:
                self._add_memory(trace, path)
                text = json.dumps(trace).encode()
            table = _profile_table(trace["traceEvents"])
        path.write_bytes(gzip.compress(text, compresslevel=3))
        logger.info("profile of step %d to %d: %s\n%s", self._first_active, state.step, path, table)

    def _add_memory(self, trace: dict, path: Path) -> None:
        """Give the trace a counter track of allocated memory; on CUDA write the allocator's snapshot too."""
        # The profiler's own memory events are instants that Perfetto does not draw as a curve.
        counters = []
        for event in trace["traceEvents"]:
            args = event.get("args", {})
            if event.get("name") == "[memory]" and "Total Allocated" in args:
                device = "CPU" if args.get("Device Type") == 0 else f"device {args.get('Device Id')}"
                counters.append({"ph": "C", "name": f"allocated on {device} (MB)", "pid": event["pid"],
                                 "ts": event["ts"], "args": {"MB": args["Total Allocated"] / 2**20}})
        trace["traceEvents"] += counters
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(path).replace(".json.gz", ".memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage collection waits: it would go through the growing lists of a trace again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _profile_table(events: list[dict], num_rows: int = 12) -> str:
    """Operators by their own CPU time and, where a device took part, kernels by theirs.

    Read from the trace: key_averages() takes ten times as long as this, and all ranks wait meanwhile.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    operators = [event for event in spans if event.get("cat") in ("cpu_op", "user_annotation")]
    kernels = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    lines = []
    for title, own in (("operators, own CPU time", _own_times_us(operators)),
                       ("kernels, device time", _own_times_us(kernels))):
        rows = {name: row for name, row in own.items() if not name.startswith("ProfilerStep#")}
        total = sum(time_us for time_us, _ in rows.values())
        if total:
            lines.append(f"  {'ms':>10}  {'share':>6}  {'calls':>7}  {title}")
        for name, (time_us, count) in sorted(rows.items(), key=lambda item: -item[1][0])[:num_rows]:
            share = 100 * time_us / (total or 1)
            lines.append(f"  {time_us / 1000:>10.3f}  {share:>5.1f}%  {count:>7}  {name[:80]}")
    return "\n".join(lines) or "  nothing was recorded"


def _own_times_us(spans: list[dict]) -> dict[str, tuple[float, int]]:
    """Name -> (microseconds without those of the spans inside, number of spans), over all threads."""
    own: dict[str, list] = {}
    open_spans: dict[tuple, list] = {}  # thread -> (end, row) of the spans around
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        around = open_spans.setdefault((span["pid"], span["tid"]), [])
        # Spans that ended before this one began are not around it.
        while around and around[-1][0] <= span["ts"]:
            around.pop()
        if around:
            around[-1][1][0] -= span["dur"]
        row = own.setdefault(span["name"], [0.0, 0])
        row[0] += span["dur"]
        row[1] += 1
        around.append((span["ts"] + span["dur"], row))
    return {name: (time_us, count) for name, (time_us, count) in own.items()}
