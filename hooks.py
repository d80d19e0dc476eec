"""Hooks: what watches a training loop, and the dispatcher that calls them. Needs torch; works when copied alone.

In somebody else's loop, five lines:

    from types import SimpleNamespace
    from hooks import HookDispatcher, GradientNormLogger
    hooks = HookDispatcher({"GradientNormLogger": GradientNormLogger(log_frequency=10)})
    state = SimpleNamespace(model=model, optimizer=optimizer, step=step, clip_norm=1.0)
    numbers = hooks.call("after_backward", state)      # {"grad_norm/total": 0.71, ...}, {} on most steps

An own hook is any object with some of these methods. Each takes the loop's state and returns None or a flat dict
of key -> number; 0-dim tensors are welcome and go to the host in one copy for the whole event:

    before_train                 once
      before_epoch
        before_step              each micro-batch: on the device, before forward
        after_backward           gradients final: reduced, unscaled, not yet clipped
        after_step               after optimizer.step, before zero_grad
      after_evaluate             state.metrics has val/*
      after_epoch
    after_train                  always; when state.error is set, without collectives

state is any object with the attributes that a hook reads: model (unwrapped), optimizer, step (from 1), max_steps,
epoch (from 0), batch, outputs, metrics, lr, data_s, num_samples, num_tokens, clip_norm, grad_scale, step_skipped,
run_dir, run, rank, local_rank, world_size, device, error, and paused_s: seconds of evaluation and saving so far.

It never changes the model, the gradients or the loop, prints nothing and writes no metrics: the loop does.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import inspect
import logging
import numbers
import os
import time
from typing import Any, Callable, Mapping

import torch

logger = logging.getLogger("rankscope.hooks")

EVENTS = ("before_train", "before_epoch", "before_step", "after_backward", "after_step", "after_evaluate",
          "after_epoch", "after_train")


# -------------------- the dispatcher


class HookError(RuntimeError):
    """A hook failed; the message names the hook, the event and the step, the cause is the hook's own exception."""


class HookDispatcher:
    """Call hooks in order at each event and gather what they return.

    hooks: name -> hook object. span: callable name -> context manager; each call runs in a span "Name.event".
    Raises ValueError for an object that is no hook, or for a method whose name is nearly an event's.
    """

    def __init__(self, hooks: Mapping[str, Any], span: Callable | None = None):
        self._span = span
        self._owners: dict[str, str] = {}  # metric key -> the hook that returned it, to notice two with the same
        self._calls: dict[str, list] = {event: [] for event in EVENTS}
        for name, hook in hooks.items():
            _check_methods(name, hook)
            for event in EVENTS:
                if hasattr(hook, event):
                    self._calls[event].append((name, getattr(hook, event)))

    def call(self, event: str, state: Any) -> dict[str, float]:
        """Call every hook that has this event; returns its numbers as floats, after at most one device sync."""
        return to_floats(self.collect(event, state))

    def collect(self, event: str, state: Any) -> dict[str, Any]:
        """Like call, but leaves 0-dim tensors where they are: no device sync, for loops that copy later."""
        if event not in self._calls:
            raise ValueError(f"no event {event!r}{_nearest(event, EVENTS)}; the events are {', '.join(EVENTS)}")
        found: dict[str, Any] = {}
        failed = None
        for name, method in self._calls[event]:
            try:
                with self._span(f"{name}.{event}") if self._span else contextlib.nullcontext():
                    returned = method(state)
                self._merge(found, name, event, returned)
            except Exception as error:
                step = getattr(state, "step", None)
                text = f"hook {name!r} failed in {event} at step {step}: {type(error).__name__}: {error}"
                if event != "after_train":
                    raise HookError(text) from error
                # The end is everybody's chance to clean up: the others still get theirs, then the first is raised.
                failed = failed or (HookError(text), error)
        if failed:
            raise failed[0] from failed[1]
        return found

    def _merge(self, found: dict, name: str, event: str, returned: Any) -> None:
        """Add what one hook returned, checked: a flat dict of key -> number or one-element tensor."""
        if returned is None:
            return
        if not isinstance(returned, Mapping):
            raise TypeError(f"it returned {type(returned).__name__}; wanted None or a dict of key -> number")
        for key, value in returned.items():
            is_tensor = isinstance(value, torch.Tensor)
            if not isinstance(key, str) or not (value.numel() == 1 if is_tensor else isinstance(value, numbers.Real)):
                got = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
                raise TypeError(f"it returned {got} for {key!r}; wanted text -> a number or a one-element tensor")
            owner = self._owners.setdefault(key, name)
            if owner != name:
                self._owners[key] = name
                logger.warning("hooks %r and %r both write %r (%s): the later one wins; give one of them"
                               " a prefix or other modules", owner, name, key, event)
            found[key] = value


def _check_methods(name: str, hook: Any) -> None:
    """Refuse what is no hook: a class, an object without events, a method that is nearly one, a wrong signature."""
    if isinstance(hook, type):
        raise ValueError(f"hook {name!r} is the class {hook.__name__}; wanted an object: {hook.__name__}(...)")
    methods = [m for m in dir(hook) if not m.startswith("_") and callable(inspect.getattr_static(hook, m))]
    for method in methods:
        near = method.startswith(("before_", "after_")) or difflib.get_close_matches(method, EVENTS, 1, 0.8)
        if method not in EVENTS and near:
            raise ValueError(f"hook {name!r} ({type(hook).__name__}) has a method {method!r}, which is no event"
                             f"{_nearest(method, EVENTS)}; the events are {', '.join(EVENTS)}."
                             f" If it is none of them, begin its name with an underscore")
    mine = [event for event in EVENTS if hasattr(hook, event)]
    if not mine:
        raise ValueError(f"hook {name!r} ({type(hook).__name__}) has none of the events {', '.join(EVENTS)}")
    for event in mine:
        try:
            inspect.signature(getattr(hook, event)).bind(None)
        except TypeError:
            raise ValueError(f"hook {name!r} ({type(hook).__name__}): {event} must take one argument,"
                             f" the state") from None


def to_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Numbers and one-element tensors -> floats, with one copy to the host (one a device, where there are several)."""
    result = {key: value for key, value in values.items()}  # keeps the order
    by_device: dict[torch.device, dict[torch.dtype, list]] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            value = value.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value  # a DTensor: a collective
            by_device.setdefault(value.device, {}).setdefault(value.dtype, []).append((key, value.reshape(())))
        else:
            result[key] = float(value)
    for device, by_dtype in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        stacked = [torch.stack([value for _, value in group]).to(wide) for group in by_dtype.values()]
        keys = [key for group in by_dtype.values() for key, _ in group]
        result.update(zip(keys, torch.cat(stacked).tolist()))  # the event's device sync
    return result


def _nearest(name: str, known: Any) -> str:
    """', did you mean ...?' with the nearest known name, or nothing."""
    match = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def _check_period(hook: Any, log_frequency: int | None, default: int = 10) -> int:
    """log_frequency as a whole number of steps; None (nobody filled it in) is the default."""
    if log_frequency is None:
        return default
    if isinstance(log_frequency, bool) or not isinstance(log_frequency, int) or log_frequency < 1:
        raise ValueError(f"{type(hook).__name__}: log_frequency is {log_frequency!r}; wanted a whole number of steps,"
                         f" 1 or more (to switch the hook off, leave it out)")
    return log_frequency


# -------------------- time, log lines, gc


class StepClock:
    """Wall-clock seconds of optimizer steps, without evaluation and saving.

    It reads the host's clock only, never the device's: kernels run later than the calls that start them, so one step's
    time says little on a GPU, while the mean over the steps between two log lines is right.
    """

    def __init__(self):
        self._last = None  # clock reading at the end of the last step
        self._reset_window()
        self.total_s, self.total_data_s, self.total_steps = 0.0, 0.0, 0

    def _reset_window(self):
        self.window_s, self.window_data_s, self.window_steps = 0.0, 0.0, 0
        self.window_samples, self.window_tokens = 0, 0

    def pause_ended(self, state: Any) -> None:
        """Call when training goes on after something that is no step, for loops that do not count paused_s."""
        if self._last is None or getattr(state, "paused_s", None) is None:
            self._last = self._now(state)

    def step_ended(self, state: Any) -> None:
        """Call in after_step, at every step."""
        now = self._now(state)
        if self._last is not None:
            self.window_s += now - self._last
            self.window_data_s += getattr(state, "data_s", None) or 0.0
            self.window_steps += 1
            self.window_samples += getattr(state, "num_samples", None) or 0
            self.window_tokens += getattr(state, "num_tokens", None) or 0
        self._last = now

    def read(self) -> dict[str, float]:
        """Means over the steps since the last read, and `mean_` ones since the start; {} when there was no step."""
        if not self.window_steps:
            return {}
        self.total_s += self.window_s
        self.total_data_s += self.window_data_s
        self.total_steps += self.window_steps
        seconds = max(self.window_s, 1e-9)  # two readings of a coarse clock can be equal
        found = {
            "batch_s": self.window_s / self.window_steps, "mean_batch_s": self.total_s / self.total_steps,
            "data_s": self.window_data_s / self.window_steps, "mean_data_s": self.total_data_s / self.total_steps,
            "steps_per_s": self.window_steps / seconds, "samples_per_s": self.window_samples / seconds,
            "tokens_per_s": self.window_tokens / seconds,
        }
        self._reset_window()
        return found

    @staticmethod
    def _now(state: Any) -> float:
        # Time that the loop spent in evaluation and saving stops this clock.
        return time.perf_counter() - (getattr(state, "paused_s", None) or 0.0)


def _log_step(state: Any, log_frequency: int) -> bool:
    """Every log_frequency-th step, and the planned last one, so that a short run has numbers too."""
    return state.step % log_frequency == 0 or state.step == getattr(state, "max_steps", None)


class IterationTimer:
    """Speed of the whole job: samples, tokens and steps per second, and the seconds that a step and its data take.

    Figures are means over the steps since the last log step; evaluation and saving are not in them. Samples and
    tokens are this rank's times the world size (ranks take batches of one size), so no rank waits for another here.

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

    def __init__(self, log_frequency: int | None = None):
        self.log_frequency = _check_period(self, log_frequency)
        self._clock = StepClock()

    def before_epoch(self, state):
        self._clock.pause_ended(state)

    def after_evaluate(self, state):
        self._clock.pause_ended(state)

    def after_step(self, state):
        self._clock.step_ended(state)
        speed = self._clock.read() if _log_step(state, self.log_frequency) else None
        if not speed:
            return None
        world_size = getattr(state, "world_size", 1)
        found = {f"speed/{name}": speed[name] for name in ("steps_per_s", "batch_s", "data_s")}
        for name in ("samples_per_s", "tokens_per_s"):
            if speed[name]:
                found[f"speed/{name}"] = speed[name] * world_size
        device = torch.device(getattr(state, "device", "cpu"))
        if device.type == "cuda":
            found["speed/peak_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        return found


class InformationWriter:
    """One line a log step in the log: step, epoch, loss and scalars, lr, data and batch time, throughput, time left.

        step 120/2000 | epoch 0 | loss 2.3456 | lr 3.00e-04 | data 0.001 (0.002) s | batch 0.105 (0.110) s
        | 152 samples/s | remaining 0:03:27

    Data and batch time: mean since the last line, and in brackets since the start. What remains is reckoned from
    the wall clock since the first step, so evaluation and saving are in it. Only rank 0 writes, through logging.

    emits: nothing. costs: on rank 0 one device sync a log step; no collective.
    """

    emits: dict[str, str] = {}

    def __init__(self, log_frequency: int | None = None):
        self.log_frequency = _check_period(self, log_frequency)
        self._clock = StepClock()
        self._began = None  # (perf_counter, step) at the end of the first step

    def before_epoch(self, state):
        self._clock.pause_ended(state)

    def after_evaluate(self, state):
        self._clock.pause_ended(state)

    def after_step(self, state):
        self._clock.step_ended(state)
        now = time.perf_counter()
        self._began = self._began or (now, state.step)
        if getattr(state, "rank", 0) != 0 or not _log_step(state, self.log_frequency):
            return
        max_steps = getattr(state, "max_steps", None)
        epoch, lr, metrics = (getattr(state, name, None) for name in ("epoch", "lr", "metrics"))
        parts = [f"step {state.step}/{max_steps}" if max_steps else f"step {state.step}"]
        if epoch is not None:
            parts.append(f"epoch {epoch}")
        if metrics:
            parts.append(" ".join(f"{key} {value:.4f}" for key, value in to_floats(metrics).items()))  # device sync
        if lr is not None:
            parts.append(f"lr {lr:.2e}")
        parts += self._speed_parts(state)
        if getattr(state, "step_skipped", False):
            parts.append("step skipped: gradients overflowed")
        steps_seen = state.step - self._began[1]
        if max_steps and steps_seen > 0:
            remaining_s = (now - self._began[0]) / steps_seen * max(max_steps - state.step, 0)
            parts.append(f"remaining {_clock_text(remaining_s)}")
        logger.info(" | ".join(parts))

    def _speed_parts(self, state) -> list[str]:
        speed = self._clock.read()
        if not speed:
            return []
        parts = [f"{name} {speed[f'{name}_s']:.3f} ({speed[f'mean_{name}_s']:.3f}) s" for name in ("data", "batch")]
        world_size = getattr(state, "world_size", 1)
        rates = {name: speed[f"{name}_per_s"] * world_size for name in ("samples", "tokens")}
        text = " ".join(f"{rate:,.{0 if rate >= 100 else 2}f} {name}/s" for name, rate in rates.items() if rate)
        return [*parts, text] if text else parts


def _clock_text(seconds: float) -> str:
    """3725.2 -> '1:02:05'; days are counted in hours."""
    whole = int(round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class GarbageCollector:
    """Collect Python's garbage every log_frequency steps, on all ranks at the same step, and never in between.

    Automatic collections come at another moment on each rank, and each time all ranks wait for that one. What
    exists when training begins is frozen out of the collections, which makes them short; after_train puts
    everything back. Forked data-loader workers collect as usual.

    emits: nothing. costs: no device sync, no collective; a collection (some ms) every log_frequency steps.
    """

    emits: dict[str, str] = {}

    def __init__(self, log_frequency: int = 50, span: Callable | None = None):
        self.log_frequency = _check_period(self, log_frequency, default=50)
        self._span = span or (lambda name: contextlib.nullcontext())
        self._active = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._enable_in_child)

    def before_train(self, state):
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


BUILTIN_HOOKS = {hook.__name__: hook for hook in (IterationTimer, InformationWriter, GarbageCollector)}
