"""What the hooks cost, measured side by side in one run on a model with 1,000 parameter tensors.

    python tests/benchmarks/hooks.py [num_steps]

Medians of interleaved repetitions; only ratios mean something on a shared machine. Microseconds are CPU time of the
training thread, milliseconds of whole steps wall-clock time. Syncs are calls of item, tolist, cpu and float on tensors
(on a GPU each waits for the device), collectives are calls of torch.distributed.
"""

import gc
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from hooks import (FeatureStdMonitor, GradientNormLogger, HookDispatcher, LogitEntropyLogger,  # noqa: E402
                   ParameterCounter, PrototypeUsageLogger, ResourceUtilizationLogger, RuntimeProfiler)

WIDTH, NUM_LAYERS, NUM_PROTOTYPES, BATCH = 64, 498, 256, 512


class Distilling(nn.Module):
    """A backbone of 498 small layers and a head of two: 1,000 parameter tensors."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)]
        head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, NUM_PROTOTYPES))
        self.student = nn.ModuleDict({"backbone": nn.Sequential(*layers), "head": head})

    def forward(self, x):
        logits = self.student["head"](self.student["backbone"](x))
        return {"loss": logits.square().mean(), "logits": logits}


class Loop:
    """A hand-written loop with hooks; each step's seconds are kept."""

    def __init__(self, hooks, folder):
        torch.manual_seed(0)
        self.model = Distilling()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.hooks = HookDispatcher(hooks)
        self.state = SimpleNamespace(model=self.model, optimizer=self.optimizer, step=0, device="cpu", max_steps=10**6,
                                     run_dir=folder, rank=0, world_size=1, local_rank=0, clip_norm=1.0)
        self.batch = torch.randn(BATCH, WIDTH)
        self.seconds = []
        self.hooks.call("before_train", self.state)

    def step(self):
        start = time.perf_counter()
        state, hooks = self.state, self.hooks
        state.step += 1
        hooks.call("before_step", state)
        state.outputs = self.model(self.batch)
        state.outputs["loss"].backward()
        hooks.call("after_backward", state)
        self.optimizer.step()
        hooks.call("after_step", state)
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - start)


def paired_us(ways, repetitions):
    """Median microseconds of each way, called in turns."""
    found = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            found[name].append((time.thread_time() - start) * 1e6)
    return {name: statistics.median(times) for name, times in found.items()}


class Counted:
    """Counts device syncs and collectives while it is on."""

    def __enter__(self):
        self.syncs = self.collectives = 0
        self.originals = []
        for owner, names, kind in ((torch.Tensor, ("item", "tolist", "cpu", "__float__", "__bool__"), "syncs"),
                                   (dist, ("all_reduce", "all_gather", "broadcast", "barrier"), "collectives")):
            for name in names:
                original = getattr(owner, name)
                self.originals.append((owner, name, original))
                setattr(owner, name, self._counting(original, kind))
        return self

    def _counting(self, original, kind):
        def counted(*arguments, **keywords):
            setattr(self, kind, getattr(self, kind) + 1)
            return original(*arguments, **keywords)
        return counted

    def __exit__(self, *error):
        for owner, name, original in self.originals:
            setattr(owner, name, original)


def compare_norms():
    """Per-layer gradient norms: the loop that is common, against the hook."""
    model = Distilling()
    model(torch.randn(8, WIDTH))["loss"].backward()
    hooks = HookDispatcher({"g": GradientNormLogger(log_frequency=1)})
    state = SimpleNamespace(model=model, step=1)

    def common():
        norms = {name: torch.norm(parameter.grad).item() for name, parameter in model.named_parameters()}
        norms["total"] = sum(norm**2 for norm in norms.values()) ** 0.5

    ways = {"loop": common, "hook": lambda: hooks.call("after_backward", state)}
    counts = {}
    for name, way in ways.items():
        with Counted() as counted:
            way()
        counts[name] = counted.syncs
    found = paired_us(ways, 40)
    print(f"per-layer norms of 1,000 tensors: loop {found['loop']:,.0f} us and {counts['loop']} syncs, hook"
          f" {found['hook']:,.0f} us and {counts['hook']}: {found['loop'] / found['hook']:.1f} times cheaper on this CPU")


HOOKS = {
    "ParameterCounter": (ParameterCounter, {}), "GradientNormLogger": (GradientNormLogger, {"log_frequency": 10}),
    "ResourceUtilizationLogger": (ResourceUtilizationLogger, {"log_frequency": 10}),
    "FeatureStdMonitor": (FeatureStdMonitor, {"log_frequency": 10}),
    "PrototypeUsageLogger": (PrototypeUsageLogger, {"log_frequency": 10}),
    "LogitEntropyLogger": (LogitEntropyLogger, {"log_frequency": 10}),
    "RuntimeProfiler": (RuntimeProfiler, {"start_step": 10**6, "active": 1}),
}


def compare_hooks(folder):
    """Each hook on log steps and on the others: microseconds of the event's calls, syncs and collectives."""
    print(f"\n{'hook':<26} {'log step us':>12} {'syncs':>6} {'other step us':>14} {'syncs':>6} {'collectives':>12}")
    for name, (kind, settings) in {"(no hook)": (None, {}), **HOOKS}.items():
        loop = Loop({name: kind(**settings)} if kind else {}, folder)
        loop.step()
        cost, counts = {True: [], False: []}, {True: 0, False: 0}
        own, collectives = [0.0], 0
        call = loop.hooks.call

        def timed(event, state):
            start = time.thread_time()
            found = call(event, state)
            own[0] += time.thread_time() - start
            return found

        for step in range(2, 62):
            loop.hooks.call, own[0] = timed, 0.0
            is_log_step = step % 10 == 0
            with Counted() as counted:
                loop.step()
            cost[is_log_step].append(own[0] * 1e6)
            counts[is_log_step] = max(counts[is_log_step], counted.syncs)
            collectives += counted.collectives
        loop.hooks.call = call
        loop.hooks.call("after_train", loop.state)
        print(f"{name:<26} {statistics.median(cost[True]):>12,.0f} {counts[True]:>6}"
              f" {statistics.median(cost[False]):>14,.1f} {counts[False]:>6} {collectives:>12}")


def compare_all(folder, num_steps):
    """The whole loop with all seven at their defaults against none, step by step in turns."""
    defaults = {name: kind() for name, (kind, _) in HOOKS.items()}
    loops = {"none": Loop({}, folder), "all seven": Loop(defaults, folder)}
    for loop in loops.values():
        loop.step()
    gc.collect()
    # The profiler records all of the process: its steps are made in one go, without the other loop's.
    for index, steps in enumerate([1] * 4 + [15] + [1] * (num_steps - 19)):
        # Who comes first changes, so that neither always has the warmer caches.
        for loop in list(loops.values())[:: 1 if index % 2 else -1]:
            for _ in range(steps):
                loop.step()
    loops["all seven"].hooks.call("after_train", loops["all seven"].state)
    total = {name: sum(loop.seconds[1:]) for name, loop in loops.items()}
    window = slice(5, 20)  # the profiler's steps: once in a run, whatever its length
    without = {name: sum(loop.seconds[1:]) - sum(loop.seconds[window]) for name, loop in loops.items()}
    median_ms = statistics.median(loops["none"].seconds) * 1e3
    after = {name: statistics.median(loop.seconds[20:]) for name, loop in loops.items()}
    print(f"\nall seven at defaults, {num_steps} steps of {median_ms:.1f} ms:"
          f" {100 * (total['all seven'] / total['none'] - 1):+.1f} % in all,"
          f" {100 * (without['all seven'] / without['none'] - 1):+.1f} % without the profiler's window,"
          f" {100 * (after['all seven'] / after['none'] - 1):+.1f} % of the median step after it")


def main():
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as folder:
        compare_norms()
        compare_hooks(Path(folder))
        compare_all(Path(folder), num_steps)


if __name__ == "__main__":
    main()
