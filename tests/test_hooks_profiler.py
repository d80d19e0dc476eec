"""ParameterCounter and RuntimeProfiler: tables in the log, and traces that Perfetto can open."""

import gzip
import json
import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from hooks import HookDispatcher, HookError, ParameterCounter, RuntimeProfiler  # noqa: E402


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, logger="rankscope.hooks")
    return lambda: [record.getMessage() for record in caplog.records]


# ---- ParameterCounter --------------------------------------------------------------------------------------


def count(model, **settings):
    hooks = HookDispatcher({"p": ParameterCounter(**settings)})
    return hooks.call("before_train", SimpleNamespace(model=model))


def test_the_table(log):
    model = nn.Sequential(nn.Linear(100, 10), nn.Linear(10, 10), nn.Linear(10, 3, bias=False).half(),
                          nn.ReLU())
    model[1].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    assert count(model, min_params=50) == {"params/total": 1150, "params/trainable": 1000,
                                           "params/frozen": 150,
                                           "params/size_mb": (1120 * 4 + 30 * 2) / 2**20}
    sizes = "0.00 MB (float32 0.00 MB, float16 0.00 MB)"
    assert log() == [f"""parameters: 1,150 total, 1,000 trainable, 150 frozen, {sizes}
  module      parameters   share   trains  class
  0                1,010   87.8%   partly  Linear
  1                  110    9.6%       no  Linear
  not shown: 1 modules with fewer than 50
  frozen modules: '1', '2'"""]
    count(nn.ReLU(), show_details=False)
    assert log()[1:] == ["parameters: 0 total, 0 trainable, 0 frozen, 0.00 MB (no bytes)"]


def test_tied_parameters_count_once_and_wrappers_have_no_names(log):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert count(torch.compile(model, backend="eager"))["params/total"] == 20
    assert "_orig_mod" not in log()[0] and "  0       " in log()[0]


def test_lazy_parameters_are_counted_after_the_first_step(log):
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(4))
    hooks = HookDispatcher({"p": ParameterCounter()})
    state = SimpleNamespace(model=model, step=1)
    assert hooks.call("before_train", state)["params/total"] == 9
    assert "not counted yet, lazy until the first forward: '1'" in log()[0]
    model(torch.zeros(1, 2))
    assert hooks.call("after_step", state)["params/total"] == 9 + 16
    assert hooks.call("after_step", state) == {}


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_count_with_their_values_and_their_bytes(log):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 5)), {nn.Linear})
    found = count(packed)
    assert (found["params/total"], found["params/frozen"]) == (35, 35)
    assert found["params/size_mb"] == (30 * 1 + 5 * 4) / 2**20

    four_bit = nn.Module()
    four_bit.weight = nn.Parameter(torch.zeros(15, dtype=torch.uint8), requires_grad=False)
    four_bit.weight.quant_state = SimpleNamespace(shape=torch.Size([6, 5]))  # as bitsandbytes has it
    assert count(four_bit) == {"params/total": 30, "params/trainable": 0, "params/frozen": 30,
                               "params/size_mb": 15 / 2**20}

    class Int8(torch.Tensor):  # a subclass that keeps values and scales inside, as torchao's do
        @staticmethod
        def __new__(cls, values, scales):
            return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

        def __init__(self, values, scales):
            self.values_, self.scales = values, scales

        def __tensor_flatten__(self):
            return ["values_", "scales"], None

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return cls(args[0].values_, args[0].scales)
            raise NotImplementedError(function)

    subclass = nn.Module()
    subclass.weight = nn.Parameter(Int8(torch.zeros(8, 4, dtype=torch.int8), torch.zeros(8)),
                                   requires_grad=False)
    assert count(subclass) == {"params/total": 32, "params/trainable": 0, "params/frozen": 32,
                               "params/size_mb": (32 + 32) / 2**20}
    assert "int8 0.00 MB, float32 0.00 MB" in log()[-1]


def test_a_sharded_model_counts_with_its_whole_size(tmp_path, log):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Linear(3, 5)
        fully_shard(model)
        assert count(model) == {"params/total": 20, "params/trainable": 20, "params/frozen": 0,
                                "params/size_mb": 80 / 2**20}
    finally:
        dist.destroy_process_group()


# ---- RuntimeProfiler ---------------------------------------------------------------------------------------


def profile(folder, last_step, first_step=1, error=None, rank=0, max_steps=None, world_size=2, **settings):
    """Steps with a forward, a backward and an optimizer; the traces written, by name."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hooks = HookDispatcher({"r": RuntimeProfiler(**settings)})
    state = SimpleNamespace(model=model, step=first_step - 1, run_dir=folder, run="my run", rank=rank,
                            error=error,
                            world_size=world_size, device="cpu", max_steps=max_steps)
    hooks.call("before_train", state)
    for state.step in range(first_step, last_step + 1):
        for _ in range(2):  # two micro-batches
            hooks.call("before_step", state)
            model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        hooks.call("after_step", state)
        optimizer.zero_grad()
    hooks.call("after_train", state)
    return {path.name: json.loads(gzip.open(path).read())
            for path in sorted(folder.glob("profiler/*.json.gz"))}


def calls(trace, name):
    return sum(event.get("name") == name and event.get("ph") == "X" for event in trace["traceEvents"])


def profiled_steps(trace):
    """The steps as the picture names them."""
    names = {event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")}
    return sorted(int(name.partition("#")[2]) for name in names)


def test_a_trace_of_the_window_and_a_table(tmp_path, log):
    traces = profile(tmp_path, 9, start_step=4, warmup=2, active=3)
    assert list(traces) == ["my-run-rank0-step4.json.gz"]
    trace = traces["my-run-rank0-step4.json.gz"]
    assert calls(trace, "aten::addmm") == 6  # two micro-batches in each of three steps
    assert profiled_steps(trace) == [4, 5, 6]
    assert any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
    assert not any(event.get("ph") == "C" for event in trace["traceEvents"])
    lines = log()[0].splitlines()
    assert lines[0] == f"profile of step 4 to 6: {tmp_path}/profiler/my-run-rank0-step4.json.gz"
    assert lines[1].split() == ["ms", "share", "calls", "operators,", "own", "CPU", "time"]
    assert any(line.split()[2:] == ["6", "aten::addmm"] for line in lines[2:])
    assert len(log()) == 1


def test_only_the_ranks_that_were_asked_for(tmp_path, log):
    settings = {"start_step": 2, "warmup": 0, "active": 1}
    assert profile(tmp_path, 4, rank=1, **settings) == {}
    assert list(profile(tmp_path, 4, rank=1, ranks=[1], **settings)) == ["my-run-rank1-step2.json.gz"]
    assert list(profile(tmp_path / "all", 4, ranks="all", **settings)) == ["my-run-rank0-step2.json.gz"]
    with pytest.raises(HookError, match=r"ranks: \[7\] are not in this run of 2 ranks"):
        profile(tmp_path, 4, ranks=[0, 7], **settings)


def test_memory_is_a_counter_track_in_the_trace(tmp_path, log):
    (trace,) = profile(tmp_path, 3, start_step=2, warmup=1, active=1, memory=True, record_shapes=False,
                       with_stack=True).values()
    counters = [event for event in trace["traceEvents"] if event.get("ph") == "C"]
    assert counters and all(event["name"] == "allocated on CPU (MB)" for event in counters)
    assert max(event["args"]["MB"] for event in counters) >= 64 * 64 * 4 / 2**20
    assert not any("Input Dims" in event.get("args", {}) for event in trace["traceEvents"])
    assert any(".py(" in str(event.get("name")) for event in trace["traceEvents"])  # Python frames


def test_an_exception_in_the_window_keeps_what_there_is(tmp_path, log):
    (trace,) = profile(tmp_path, 4, error=RuntimeError("CUDA out of memory"), start_step=3, warmup=1,
                       active=50).values()
    assert calls(trace, "aten::addmm") == 4
    assert log()[0].startswith("profile of step 3 to 4: ")


@pytest.mark.parametrize("last_step, message", [
    (2, "RuntimeProfiler: the run ended at step 2, before its window began at step 3: no trace"),
    (4, "RuntimeProfiler: the run ended at step 4, in the warm-up of its window (steps 5 to 7): no trace")])
def test_a_run_too_short_for_its_window_says_so(tmp_path, log, last_step, message):
    assert profile(tmp_path, last_step, start_step=5, warmup=2, active=3) == {}
    assert log() == [message]
    assert profile(tmp_path, last_step, max_steps=last_step, start_step=5, warmup=2, active=3) == {}
    assert log()[1] == (f"RuntimeProfiler: the run has {last_step} steps, the window is steps 5 to 7:"
                        f" start_step or active is too large")


def test_a_resumed_run_records_the_rest_of_its_window_or_none(tmp_path, log):
    (rest,) = profile(tmp_path / "a", 9, first_step=6, start_step=5, warmup=2, active=3).items()
    assert rest[0] == "my-run-rank0-step6.json.gz" and calls(rest[1], "aten::addmm") == 4
    assert profiled_steps(rest[1]) == [6, 7]
    # A run that goes on behind the window has nothing to record, and nothing to complain of.
    assert profile(tmp_path / "b", 60, first_step=51, start_step=5, warmup=2, active=3) == {}
    assert len(log()) == 1


def test_after_the_window_the_profiler_is_gone(tmp_path, log):
    profile(tmp_path, 9, start_step=2, warmup=1, active=1)
    assert not torch.autograd._profiler_enabled()
    with torch.profiler.profile() as another:  # two at once are refused by torch
        torch.ones(3) + 1
    assert any(event.key == "aten::add" for event in another.key_averages())


@pytest.mark.parametrize("settings, message", [
    ({"active": 0}, "RuntimeProfiler: active is 0; wanted a whole number of steps, 1 to 100"),
    ({"active": 1000}, "RuntimeProfiler: active is 1000; wanted a whole number of steps, 1 to 100"),
    ({"warmup": -1}, "RuntimeProfiler: warmup is -1; wanted a whole number of steps, 0 to 1,000"),
    ({"start_step": 2.5}, "RuntimeProfiler: start_step is 2.5; wanted a whole number of steps, 1 to"
                          " 1,000,000,000"),
    ({"ranks": [-1]}, "RuntimeProfiler: ranks is [-1]; wanted a list as [0, 3], or all"),
    ({"ranks": 0}, "RuntimeProfiler: ranks is 0; wanted a list as [0, 3], or all")])
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError) as caught:
        RuntimeProfiler(**settings)
    assert str(caught.value) == message
    with pytest.raises(ValueError, match="ParameterCounter: min_params is -1; wanted a whole number >= 0"):
        ParameterCounter(min_params=-1)
