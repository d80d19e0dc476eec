"""What train.py's loop costs a step: against a bare DDP loop, with tracing on against off, with heartbeats against none.

    torchrun --nproc_per_node 2 tests/benchmarks/loop_overhead.py [pairs=60] [steps=20] [width=512]

One process group, one model. Each comparison alternates blocks of `steps` steps, A B B A, so that a machine whose
speed drifts hurts both alike; printed are the medians of the pairs' differences with a bootstrap 95 per cent interval.
"""

import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import train
from tracing import close_structured_logger, init_structured_logger, log_trace_span, set_step

BATCH_SIZE = 16


class Points(Dataset):
    """Ready samples, so that loading costs little and alike on both sides."""

    def __init__(self, num_features: int = 512):
        self.x = torch.randn(4096, num_features, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x) * 1000

    def __getitem__(self, index):
        return {"x": self.x[index % len(self.x)]}


class Mlp(nn.Module):
    def __init__(self, num_features: int = 512, num_layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(num_features, num_features) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": x.square().mean()}


def bare_loop(width: int):
    """A hand-written DDP loop: data, forward, backward, step, and a loss printed every 10 steps to nowhere."""
    model = DistributedDataParallel(Mlp(width))
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2]},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # as train.py's
    optimizer = torch.optim.AdamW(groups, lr=1e-4)
    data = Points(width)
    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data), drop_last=True)
    batches = iter(loader)

    def step(number: int) -> None:
        batch = next(batches)
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % 10 == 0:
            print(loss.item(), file=nowhere)

    nowhere = open(os.devnull, "w")
    return step


def rankscope_loop(width: int, folder: Path):
    """The loop of train.py with the default hooks, TensorBoard and train.log."""
    here = str(Path(__file__).resolve())
    recipe = train.Recipe(
        model={"target": f"{here}:Mlp", "num_features": width}, train_data={"target": f"{here}:Points", "num_features": width},
        optimizer={"target": "torch.optim.AdamW", "lr": 1e-4}, schedule=train.ScheduleSettings(kind="constant"),
        batch_size=BATCH_SIZE, num_workers=0, group="benchmark", exp_dir=str(folder),
        hooks={"IterationTimer": {"type": "IterationTimer"}, "InformationWriter": {"type": "InformationWriter"}})
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        started = train.start_run(recipe)
        trainer = train.Trainer(recipe, *started)
        trainer.build()
    trainer.call_hooks("before_train")
    trainer.call_hooks("before_epoch")
    trainer.model.train()
    batches = train.begin_epoch(trainer.train_loader, 0, 0)

    def step(number: int) -> None:
        set_step(trainer.state.step + 1)
        with log_trace_span("step"):
            trainer.train_step(batches)

    return trainer, step


def compare(name: str, steps: int, pairs: int, a, b) -> dict:
    """Blocks of a() and b(), A B B A ...; a and b are (prepare, step). Returns ms a step of both, and their difference."""
    numbers = itertools.count(1)

    def block(side) -> float:
        prepare, step = side
        prepare()
        step(next(numbers))  # not counted: what the switch itself costs
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step(next(numbers))
        return (time.perf_counter() - start) / steps * 1e3

    block(a), block(b)  # warm-up
    times = []
    for pair in range(pairs):
        if pair % 2:
            b_ms, a_ms = block(b), block(a)
        else:
            a_ms, b_ms = block(a), block(b)
        times.append((a_ms, b_ms))
    differences = [b_ms - a_ms for a_ms, b_ms in times]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(differences, k=pairs)) for _ in range(2000))
    return {"name": name, "a_ms": statistics.median(a_ms for a_ms, _ in times),
            "difference_ms": statistics.median(differences), "low_ms": medians[50], "high_ms": medians[1949]}


def main() -> None:
    options = {"pairs": 60, "steps": 20, "width": 512, **{k: int(v) for k, v in (a.split("=") for a in sys.argv[1:])}}
    pairs, steps, width = options["pairs"], options["steps"], options["width"]
    folder = Path(tempfile.mkdtemp(prefix="loop_overhead-")) if os.environ.get("RANK", "0") == "0" else Path("/nonexistent")
    trainer, ours = rankscope_loop(width, folder)
    bare = bare_loop(width)
    traces = str(trainer.run_dir / "traces")

    def tracing(enable: bool, **settings) -> None:
        close_structured_logger()
        init_structured_logger("training", traces, enable=enable, **settings)
        trainer.tracing.enabled = enable

    def nothing() -> None:
        pass

    tracing(False)
    rows = [compare("train.py against a bare DDP loop", steps, pairs, (nothing, bare), (nothing, ours)),
            compare("tracing on against off", steps, pairs,
                    (lambda: tracing(False), ours), (lambda: tracing(True), ours)),
            compare("heartbeat every second against none", steps, pairs,
                    (lambda: tracing(True, heartbeat_s=0, stall_timeout_s=0), ours),
                    (lambda: tracing(True, heartbeat_s=1), ours))]
    tracing(False)
    if trainer.world.rank == 0:
        print(f"{'':<40}{'A, ms':>8}{'B - A, ms':>11}{'95 % interval':>20}{'B - A, %':>10}")
        for row in rows:
            interval = f"{row['low_ms']:+.3f} .. {row['high_ms']:+.3f}"
            print(f"{row['name']:<40}{row['a_ms']:8.2f}{row['difference_ms']:+11.3f}{interval:>20}"
                  f"{100 * row['difference_ms'] / row['a_ms']:+10.2f}")
    trainer.__exit__(None, None, None)
    train.leave(trainer.world, trainer.stopper)


if __name__ == "__main__":
    main()
