"""Own time, not waits: whatever makes one rank slow, train.py's traces give it the largest own time."""

import json
import statistics
import sys

import pytest
import yaml
from conftest import ROOT, run, torchrun
from delay_parts import DELAY_S, PLACES, STEPS

PARTS = f"{ROOT}/tests/delay_parts.py"


def own_times(folder, slow_rank, model=(), **settings):
    """Train with the plan of delay_parts; returns {place: [own microseconds a step of rank 0, of rank 1]}."""
    recipe = {"model": {"target": f"{PARTS}:Layers", **dict(model)},
              "train_data": {"target": f"{PARTS}:Points"},
              "optimizer": {"target": f"{PARTS}:SGD", "lr": 0.0},
              "hooks": {"Plan": {"target": f"{PARTS}:Plan"}},
              "num_workers": 0, "batch_size": 4, "max_steps": len(PLACES) * STEPS,
              "exp_dir": str(folder / "exp"),
              "group": "g", "run": "r", "structured_logging": {"enabled": True}, **settings}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = torchrun(2, ROOT / "train.py", folder / "recipe.yaml", env={"SLOW_RANK": str(slow_rank)})
    assert done.returncode == 0, done.stderr
    found = {}
    for index, place in enumerate(PLACES):
        # The first and the last step may have a part of another place.
        steps = f"{index * STEPS + 2}:{(index + 1) * STEPS - 1}"
        tool = [sys.executable, ROOT / "trace_tools.py", "summarize", folder / "exp/g/r", "--json"]
        summary = run([*tool, "--steps", steps])
        assert summary.returncode == 0, summary.stderr
        ranks = json.loads(summary.stdout)["ranks"]
        found[place] = [rank["own_us"] for rank in sorted(ranks, key=lambda rank: rank["rank"])]
    return found


@pytest.mark.parametrize("slow_rank, model, settings", [
    (1, {}, {}),
    (0, {}, {}),
    (1, {"norm": True}, {}),
    (0, {"norm": True}, {}),
    (0, {}, {"accumulate": 2, "epochs": 2}),
    (1, {"unused": True}, {"find_unused_parameters": True}),
    (0, {}, {"static_graph": True}),
], ids=["plain", "plain, rank 0", "BatchNorm", "BatchNorm, rank 0", "accumulation", "unused parameters",
        "static graph"])
def test_the_slow_rank_has_the_largest_own_time(tmp_path, slow_rank, model, settings):
    found = own_times(tmp_path, slow_rank, model, **settings)
    for place in PLACES[1:]:
        more_us = found[place][slow_rank] - found[place][1 - slow_rank]
        assert more_us > 0.5 * DELAY_S * 1e6, (place, found)


EVENTS = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import train
from tracing import close_structured_logger, init_structured_logger, log_trace_span, set_step

class Event:
    '''Stands in for torch.cuda.Event without a device; it has passed when four later ones were recorded.'''
    recorded = 0
    def record(self): self.at, self.number = time.perf_counter(), Event.recorded; Event.recorded += 1
    def query(self): return Event.recorded - self.number > 4
    def elapsed_time(self, later): return (later.at - self.at) * 1e3

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        if dist.get_rank() == 1: time.sleep(0.02)
        return gradient

dist.init_process_group("gloo")
init_structured_logger("training", {out!r})
model = DistributedDataParallel(torch.nn.Linear(4, 1))
mark = train.ReadyMark(model, Event)
if {fallback}:
    mark.queue_callback = None
for step in range(1, 21):
    set_step(step)
    with log_trace_span("backward", sync=True) as span:
        loss = Slow.apply(model(torch.ones(2, 4))).square().mean()
        events = mark.watch(loss, span)
        loss.backward()
        mark.backward_returned(events, step)
close_structured_logger()
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("fallback", [False, True])
def test_device_times_are_read_later_and_belong_to_their_step(tmp_path, fallback):
    """Also in a torch whose engine takes no callbacks."""
    script = tmp_path / "loop.py"
    script.write_text(EVENTS.format(root=str(ROOT), out=str(tmp_path / "logs"), fallback=fallback))
    done = torchrun(2, script)
    assert done.returncode == 0, done.stderr
    scalars = {}
    for file in (tmp_path / "logs").glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        rank, step_now = records[0]["rank"], 0
        for record in records:
            step_now = record["step"] if record["ph"] == "B" else step_now
            if record["ph"] == "C":
                scalars.setdefault(rank, {})[record["step"]] = record["args"]
                assert record["step"] < step_now  # written steps later, under its own step
    # The first has no begin, the last are not over.
    assert list(scalars[0]) == list(scalars[1]) == list(range(2, 19))
    own_us, wait_us = ([statistics.median(args[f"device_{what}_us"] for args in scalars[rank].values())
                        for rank in (0, 1)]
                       for what in ("own", "wait"))
    assert own_us[1] - own_us[0] > 10_000 and wait_us[0] - wait_us[1] > 10_000, scalars
