"""What the fault suite trains, and where its faults happen: every part of a step can sleep, fail, hang or be
killed.

The layers sleep instead of computing, so that the ranks of one machine do not fight for its cores. Faults are
a JSON list in the environment's FAULTS, each {"place": where, "what": how, ...}:
    place   startup, data, to_device, forward, backward_first, backward_middle, backward_last, optimizer, gap,
hook, log,
            evaluate, exit
    what    sleep (ms), raise (text), signal (number), exit (code), hang, hold (the GIL), memory (more and
            more of it, in the memory cgroup that the environment's MEMORY_CGROUP names); nan
    ranks   which (all); steps: [first, last], every: K steps, turn: another rank each step
"""

import ctypes
import json
import logging
import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
FAULTS = json.loads(os.environ.get("FAULTS", "[]"))
FORWARD_S, BACKWARD_S, DATA_S, LAYERS = 0.001, 0.002, 0.002, 8
now = {"step": 1, "done": set()}  # the step that is being made, and the faults that it has had


def begin_step(step):
    now["step"], now["done"] = step, set()


def faults_at(place):
    """The faults that are to happen here and now, each once a step."""
    for number, fault in enumerate(FAULTS):
        first, last = fault.get("steps", [1, 1 << 30])
        due = (fault["place"] == place and first <= now["step"] <= last
               and (now["step"] - first) % fault.get("every", 1) == 0
               and RANK in fault.get("ranks", range(WORLD)) and ATTEMPT in fault.get("attempts", [0])
               and (not fault.get("turn") or now["step"] * 7 // 3 % WORLD == RANK))
        if due and (number, place) not in now["done"]:
            now["done"].add((number, place))
            yield fault


def happen(place):
    for fault in faults_at(place):
        what = fault["what"]
        if what == "sleep":
            time.sleep(fault["ms"] / 1000)
        elif what == "raise":
            raise RuntimeError(fault["text"])
        elif what == "signal":
            os.kill(os.getpid(), fault["number"])
        elif what == "exit":
            os._exit(fault["code"])
        elif what == "leave":
            leave_in_order()
        elif what == "hang":
            time.sleep(3600)
        elif what == "hold":
            ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the interpreter's lock
        elif what == "memory":
            fill_memory()


def fill_memory():
    """Until the kernel ends this process."""
    with open(os.path.join(os.environ["MEMORY_CGROUP"], "cgroup.procs"), "w") as members:
        members.write(str(os.getpid()))
    kept = []
    for _ in range(200):
        kept.append(bytearray(20_000_000))
        time.sleep(0.1)


def leave_in_order():
    """What a loop does whose data has ended: close everything and go."""
    from tracing import close_structured_logger

    close_structured_logger("ok")
    os._exit(0)


class Numbers(Dataset):
    """Batches are what costs: the samples are nothing."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return index


class Batch:
    """A batch that knows how to move; moving can be slow."""

    def __init__(self, indices):
        self.x = torch.ones(len(indices), 16)

    def __len__(self):
        return len(self.x)

    def to(self, device):
        happen("to_device")
        return {"x": self.x.to(device)}


def collate(indices):
    time.sleep(DATA_S)
    happen("data")
    return Batch(indices)


def make_loader(batch_size=4, num_workers=0, more_on_rank=None, more=1, num_samples=1 << 16):
    """A DataLoader of the suite's own; one rank may have bigger batches."""
    data = Numbers(num_samples)
    batch_size *= more if RANK == more_on_rank else 1
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, WORLD, RANK),
                      num_workers=num_workers,
                      collate_fn=collate)


class Sleep(torch.autograd.Function):
    """The identity that takes its time, forward and backward, more for more samples when the model says
    so."""

    @staticmethod
    def forward(ctx, x, place, factor):
        ctx.place, ctx.factor = place, factor
        time.sleep(FORWARD_S * factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD_S * ctx.factor)
        if ctx.place:
            happen(f"backward_{ctx.place}")
        return gradient, None, None


class Sleeper(nn.Module):
    """LAYERS layers that sleep; norm: with buffers; by_samples: bigger batches take longer."""

    def __init__(self, norm=False, by_samples=0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.by_samples = by_samples
        self.places = {0: "first", LAYERS // 2: "middle", LAYERS - 1: "last"}

    def forward(self, x):
        factor = len(x) / self.by_samples if self.by_samples else 1
        for index, layer in enumerate(self.layers):
            x = Sleep.apply(layer(x), self.places.get(index), factor)
            if index == LAYERS // 2:
                happen("forward" if self.training else "evaluate")
        loss = self.norm(x).square().mean()
        if any(fault["what"] == "nan" for fault in faults_at("loss")):
            loss = loss * float("nan")
        return {"loss": loss}


class SlowSGD(torch.optim.SGD):
    """SGD whose step can be slow; zero_grad is called between the spans of the loop."""

    def step(self, closure=None):
        happen("optimizer")
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        happen("gap")
        begin_step(now["step"] + 1)


class SlowHandler(logging.Handler):
    """A log that takes its time, as on a full network disk."""

    def emit(self, record):
        if getattr(record, "progress", False) or "step" in record.getMessage():
            happen("log")


class Fault:
    """The slow or failing hook itself; it also installs the slow log."""

    def before_train(self, state):
        logging.getLogger("rankscope").addHandler(SlowHandler())
        begin_step(state.step + 1)

    def after_step(self, state):
        happen("hook")

    def after_train(self, state):
        if state.error is None:
            happen("exit")


class Meeting:
    """A hook with a collective of its own: each rank tells a number to all, in a span in which ranks wait.

    skip: at a step of a rank's, none; swap: there in the other order; shape: there another one. slow_ms: of
    the network.
    """

    def __init__(self, span=None, skip=None, swap=None, shape=None, slow_ms=0):
        self.span, self.skip, self.swap, self.shape, self.slow_ms = span, skip or {}, swap or {}, shape or {
            }, slow_ms

    def after_step(self, state):
        names = ["share_loss", "share_norm"]
        if self.swap and state.rank == self.swap["rank"] and state.step >= self.swap["step"]:
            names.reverse()
        if self.skip and state.rank == self.skip["rank"] and state.step == self.skip["step"]:
            names = names[1:]
        size = 4096 if self.shape and state.rank == self.shape["rank"] and state.step == self.shape[
            "step"] else 1
        for name in names:
            with self.span(name, sync=True):
                dist.all_reduce(torch.ones(size))
                time.sleep(self.slow_ms / 1000)


if "startup" in {fault["place"] for fault in FAULTS}:
    happen("startup")
