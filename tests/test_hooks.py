"""The hook contract and its dispatcher; timing, log-line and garbage hooks; every built-in hook alone."""

import gc
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import hooks as hooks_file  # noqa: E402
from hooks import (EVENTS, GarbageCollector, HookDispatcher, HookError, InformationWriter,  # noqa: E402
                   IterationTimer)

BUILT_IN = {name: kind for name, kind in vars(hooks_file).items()
            if isinstance(kind, type) and not name.startswith("_")
            and any(hasattr(kind, event) for event in EVENTS)}


class Recorder:
    """Notes its calls and returns what it was made with."""

    def __init__(self, name, calls, returns=None):
        self.name, self.calls, self.returns = name, calls, returns

    def after_step(self, state):
        self.calls.append((self.name, state.step))
        return self.returns

    def after_train(self, state):
        self.calls.append((self.name, "end"))


# ---- The dispatcher ----------------------------------------------------------------------------------------


def test_hooks_run_in_order_and_their_numbers_are_floats():
    calls = []
    returned = {"a": torch.tensor(1.5), "b": 2, "c": torch.tensor([True]),
                "d": torch.tensor(7, dtype=torch.int64),
                "e": torch.tensor(0.25, dtype=torch.bfloat16), "f": 2**40 + 1}
    hooks = HookDispatcher({"one": Recorder("one", calls, returned), "two": Recorder("two", calls),
                            "three": Recorder("three", calls, {"g": torch.tensor(1.0, requires_grad=True)})})
    found = hooks.call("after_step", SimpleNamespace(step=3))
    assert calls == [("one", 3), ("two", 3), ("three", 3)]
    assert found == {"a": 1.5, "b": 2.0, "c": 1.0, "d": 7.0, "e": 0.25, "f": 2.0**40 + 1, "g": 1.0}
    assert list(found) == list("abcdefg") and all(type(value) is float for value in found.values())
    assert hooks.call("before_train", SimpleNamespace(step=3)) == {}


def test_an_events_tensors_are_copied_at_once_and_collect_copies_nothing(monkeypatch):
    calls = {"tolist": 0, "item": 0, "cpu": 0, "__float__": 0}
    for name in calls:
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original):
            calls[_name] += 1
            return _original(self, *args)
        monkeypatch.setattr(torch.Tensor, name, counted)
    numbers = {name: {f"{name}{i}": torch.tensor(float(i)) for i in range(50)} for name in "ab"}
    hooks = HookDispatcher({name: Recorder(name, [], numbers[name]) for name in "ab"})
    state = SimpleNamespace(step=1)
    assert isinstance(hooks.collect("after_step", state)["a7"], torch.Tensor)
    assert calls == {"tolist": 0, "item": 0, "cpu": 0, "__float__": 0}
    assert hooks.call("after_step", state)["b49"] == 49.0
    assert calls == {"tolist": 1, "item": 0, "cpu": 0, "__float__": 0}


def hook_with(**methods):
    return type("MyHook", (), {name: staticmethod(method) for name, method in methods.items()})()


EVENT_LIST = ", ".join(EVENTS)


@pytest.mark.parametrize("hook, message", [
    (hook_with(after_stp=lambda state: None),
     "hook 'my' (MyHook) has a method 'after_stp', which is no event; did you"
     f" mean 'after_step'?; there are {EVENT_LIST}. If it is none of them, begin its name with _"),
    (hook_with(after_step=lambda state: None, before_training=lambda state: None),
     "hook 'my' (MyHook) has a method 'before_training', which is no event; did you mean 'before_train'?;"
     f" there are {EVENT_LIST}. If it is none of them, begin its name with _"),
    (hook_with(run=lambda state: None), f"hook 'my' (MyHook) has none of the events {EVENT_LIST}"),
    (Recorder, "hook 'my' is a class; wanted an object: Recorder(...)"),
    (hook_with(after_step=lambda: None), "hook 'my' (MyHook): after_step must take one argument, the state")])
def test_what_is_no_hook_is_said_at_the_start(hook, message):
    with pytest.raises(ValueError) as caught:
        HookDispatcher({"my": hook})
    assert str(caught.value) == message


def test_settings_and_private_methods_are_not_taken_for_misspelt_events():
    hook = hook_with(after_step=lambda state: {"x": 1}, _after_stp=lambda state: None, helper=lambda: None)
    hook.after_steps = 10
    assert HookDispatcher({"my": hook}).call("after_step", SimpleNamespace(step=1)) == {"x": 1.0}
    with pytest.raises(ValueError, match="no event 'after_stp'; did you mean 'after_step'"):
        HookDispatcher({}).call("after_stp", SimpleNamespace())


def test_a_hook_that_raises_is_named():
    def fail(state):
        raise KeyError("loss")
    with pytest.raises(HookError) as caught:
        HookDispatcher({"mine": hook_with(after_step=fail)}).call("after_step", SimpleNamespace(step=12))
    assert str(caught.value) == "hook 'mine' failed in after_step at step 12: KeyError: 'loss'"
    assert isinstance(caught.value.__cause__, KeyError) and isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("returned, text", [
    (3.0, "it returned float; wanted None or a dict of key -> number"),
    ({"a": "high"}, "it returned 'high' for 'a'; wanted text -> number or one-element tensor"),
    ({"a": torch.ones(2, 3)}, "it returned a tensor of shape (2, 3) for 'a'; wanted text -> number or"
                              " one-element tensor"),
    ({1: 2.0}, "it returned 2.0 for 1; wanted text -> number or one-element tensor")])
def test_what_no_hook_may_return(returned, text):
    with pytest.raises(HookError) as caught:
        HookDispatcher({"h": Recorder("h", [], returned)}).call("after_step", SimpleNamespace(step=1))
    assert str(caught.value) == f"hook 'h' failed in after_step at step 1: TypeError: {text}"


def test_at_the_end_every_hook_gets_its_call_even_if_one_fails():
    calls = []

    def fail(state):
        raise OSError("disk full")
    hooks = HookDispatcher({"a": hook_with(after_train=fail), "b": Recorder("b", calls)})
    with pytest.raises(HookError, match="hook 'a' failed in after_train at step 5: OSError: disk full"):
        hooks.call("after_train", SimpleNamespace(step=5))
    assert calls == [("b", "end")]


def test_two_hooks_with_one_key_are_said_once(caplog):
    hooks = HookDispatcher({name: Recorder(name, [], {"x/y": value}) for name, value in (("a", 1), ("b", 2))})
    for _ in range(3):
        assert hooks.call("after_step", SimpleNamespace(step=1)) == {"x/y": 2.0}
    assert [record.getMessage() for record in caplog.records] == [
        "hooks 'a' and 'b' both write 'x/y' (in after_step): the later one wins; give one of them a prefix"
        " or other modules"]


def test_each_call_is_a_span_of_its_own():
    spans = []

    class Span:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            spans.append(f"> {self.name}")

        def __exit__(self, *error):
            spans.append(f"< {self.name}")
    HookDispatcher({"a": Recorder("a", spans), "b": Recorder("b", [])}, span=Span).call("after_step",
                                                                                     SimpleNamespace(step=1))
    assert spans == ["> a.after_step", ("a", 1), "< a.after_step", "> b.after_step", "< b.after_step"]


# ---- IterationTimer and InformationWriter ------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    return now


def drive(hooks, clock, steps, pauses={}, counts_pauses=True, **state):
    """Steps of 0.5 s, 0.1 of them for data; after some of them evaluation takes `pauses` seconds."""
    state = SimpleNamespace(**{"step": 0, "epoch": 0, "world_size": 2, "rank": 0, "num_samples": 8,
                               "num_tokens": None, "data_s": 0.1, "metrics": {"loss": torch.tensor(1.25)},
                               "lr": 3e-4, "max_steps": steps,
                               "device": "cpu", **state})
    if counts_pauses:
        state.paused_s = 0.0
    found = {}
    hooks.call("before_train", state)
    hooks.call("before_epoch", state)
    for state.step in range(1, steps + 1):
        hooks.call("before_step", state)
        clock.s += 0.5
        found[state.step] = hooks.call("after_step", state)
        if state.step in pauses:
            clock.s += pauses[state.step]
            if counts_pauses:
                state.paused_s += pauses[state.step]
            hooks.call("after_evaluate", state)
    hooks.call("after_train", state)
    return found


@pytest.mark.parametrize("counts_pauses", [True, False])
def test_speed_of_the_whole_world_without_evaluation(clock, counts_pauses):
    found = drive(HookDispatcher({"t": IterationTimer(4)}), clock, 10, {2: 30.0, 4: 99.0}, counts_pauses,
                  num_tokens=100)
    assert [step for step, numbers in found.items() if numbers] == [4, 8, 10]  # every fourth, and the last
    for step in (4, 8, 10):
        assert found[step] == pytest.approx({
            "speed/samples_per_s": 32.0, "speed/tokens_per_s": 400.0, "speed/steps_per_s": 2.0,
            "speed/batch_s": 0.5,
            "speed/data_s": 0.1})


def test_speed_without_token_counts_has_none(clock):
    assert "speed/tokens_per_s" not in drive(HookDispatcher({"t": IterationTimer()}), clock, 10)[10]


def test_the_log_line(clock, caplog):
    caplog.set_level(logging.INFO)
    drive(HookDispatcher({"w": InformationWriter(400)}), clock, 5400, {2: 30.0}, num_tokens=5000)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 14  # 13 and the last step
    # The 30 s of evaluation are in what remains: (399 * 0.5 + 30) / 399 * 5000 s.
    assert lines[0] == ("step 400/5400 | epoch 0 | loss 1.2500 | lr 3.00e-04 | data 0.100 (0.100) s | batch"
                        " 0.500 (0.500) s | 32.00 samples/s 20,000 tokens/s | remaining 0:47:56")
    assert lines[-1].startswith("step 5400/5400 | ") and lines[-1].endswith("remaining 0:00:00")


def test_the_log_line_has_what_the_loop_has(clock, caplog):
    caplog.set_level(logging.INFO)
    hooks = HookDispatcher({"w": InformationWriter(2)})
    hooks.call("after_step", SimpleNamespace(step=2))
    drive(HookDispatcher({"w": InformationWriter(2)}), clock, 2, rank=1)
    hooks = HookDispatcher({"w": InformationWriter(2)})
    drive(hooks, clock, 2, step_skipped=True, num_samples=None, lr=None, max_steps=None,
          metrics={"loss": torch.tensor(math.nan), "acc": 0.5})
    assert [record.getMessage() for record in caplog.records] == [
        "step 2", "step 2 | epoch 0 | loss nan acc 0.5000 | data 0.100 (0.100) s | batch 0.500 (0.500) s"
        " | step skipped: gradients overflowed"]


def test_timing_does_not_touch_the_device_between_log_steps(clock, monkeypatch):
    touched = []
    for name in ("item", "tolist", "cpu", "__float__"):
        original = getattr(torch.Tensor, name)

        def noted(self, *args, _name=name, _original=original):
            touched.append(_name)
            return _original(self, *args)
        monkeypatch.setattr(torch.Tensor, name, noted)
    hooks = HookDispatcher({"t": IterationTimer(10), "w": InformationWriter(10), "g": GarbageCollector()})
    drive(hooks, clock, 9, max_steps=20)
    assert touched == []
    drive(hooks, clock, 10)
    assert touched == ["tolist"]  # the loss, for the line


# ---- GarbageCollector --------------------------------------------------------------------------------------


def test_garbage_is_collected_at_its_steps_only_and_as_usual_again_at_the_end():
    spans = []

    class Span:
        def __init__(self, name):
            spans.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *error):
            pass

    def collections():
        return sum(generation["collections"] for generation in gc.get_stats())

    hooks = HookDispatcher({"g": GarbageCollector(log_frequency=3, span=Span)})
    state = SimpleNamespace(step=0)
    hooks.call("before_train", state)
    try:
        assert not gc.isenabled()
        counts = [collections()]
        for state.step in range(1, 7):
            garbage = [[] for _ in range(5000)]  # automatic collection would come several times
            garbage.append(garbage)
            hooks.call("after_step", state)
            counts.append(collections())
        assert [b - a for a, b in zip(counts, counts[1:])] == [0, 0, 1, 0, 0, 1]
        # A forked data-loader worker collects as usual.
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
    finally:
        hooks.call("after_train", state)
    assert gc.isenabled() and spans == ["gc", "gc"] and gc.get_freeze_count() == 0


# ---- Every built-in hook -----------------------------------------------------------------------------------


class Distilling(nn.Module):
    """Small, with everything that a built-in hook looks for."""

    def __init__(self):
        super().__init__()
        self.student = nn.ModuleDict({"backbone": nn.Linear(3, 4), "head": nn.Linear(4, 5)})
        self.teacher = nn.ModuleDict({"backbone": nn.Linear(3, 4),
                                      "head": nn.Linear(4, 5)}).requires_grad_(False)

    def forward(self, x):
        logits = self.student["head"](self.student["backbone"](x))
        target = self.teacher["head"](self.teacher["backbone"](x))
        return {"loss": (logits - target).square().mean(), "logits": logits}


def train(hooks, steps, folder, **more):
    """A loop of somebody else's: a SimpleNamespace as state, no train.py, no process group."""
    torch.manual_seed(0)
    model = Distilling()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = SimpleNamespace(model=model, optimizer=optimizer, step=0, max_steps=steps, device="cpu",
                            run_dir=folder,
                            clip_norm=1.0, num_samples=6, num_tokens=6, **more)
    found = hooks.call("before_train", state)
    for state.step in range(1, steps + 1):
        hooks.call("before_step", state)
        state.outputs = model(torch.randn(6, 3))
        state.outputs["loss"].backward()
        found.update(hooks.call("after_backward", state))
        optimizer.step()
        found.update(hooks.call("after_step", state))
        optimizer.zero_grad()
    found.update(hooks.call("after_train", state))
    return found, model


SETTINGS = {"FeatureStdMonitor": {"track_channels": True}, "ResourceUtilizationLogger": {"per_process": True},
            "RuntimeProfiler": {"start_step": 2, "warmup": 1, "active": 1}}
# Keys that this machine may not have; test_resources.py has them.
NEEDS_GPU = ("gpu", "torch_", "peak_memory")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_hook_alone_emits_what_it_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind = BUILT_IN[name]
    found, model = train(HookDispatcher({name: kind(**SETTINGS.get(name, {}))}), 10, tmp_path)
    patterns = {key: re.compile(re.sub(r"<[^>]+>", r"[^/]+", key) + "$") for key in kind.emits}
    for key in found:
        assert any(pattern.match(key) for pattern in patterns.values()), f"{key} is not in {name}.emits"
    unseen = {key for key, pattern in patterns.items() if not any(map(pattern.match, found))}
    assert not {key for key in unseen if not any(part in key for part in NEEDS_GPU)
                and not key.endswith("_max")}
    assert not any(module._forward_hooks for module in model.modules())
    docstring = kind.__doc__
    assert "emits:" in docstring and "costs:" in docstring
    for value in found.values():
        assert type(value) is float


def test_all_of_them_together_do_not_disturb_each_other_or_the_weights(tmp_path):
    together = HookDispatcher({name: kind(**SETTINGS.get(name, {})) for name, kind in BUILT_IN.items()})
    found, with_hooks = train(together, 10, tmp_path)
    nothing, without = train(HookDispatcher({}), 10, tmp_path)
    assert nothing == {} and len(found) > 30
    for a, b in zip(with_hooks.parameters(), without.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("wrong", [0, -1, 2.5, "often", True])
def test_a_wrong_log_frequency_is_refused(name, wrong):
    try:
        BUILT_IN[name](log_frequency=wrong)
    except TypeError:
        assert name in ("ParameterCounter", "RuntimeProfiler")  # they have no period
    except ValueError as error:
        assert str(error) == (f"{name}: log_frequency is {wrong!r}; wanted a whole number of steps, 1 or"
                              f" more (to switch the hook off, leave it out)")
    else:
        pytest.fail("it was accepted")


def test_the_file_works_copied_alone_under_any_name(tmp_path):
    shutil.copy(ROOT / "hooks.py", tmp_path / "watching.py")
    code = """
from types import SimpleNamespace
import torch
from watching import HookDispatcher, GradientNormLogger
model = torch.nn.Linear(2, 1)
hooks = HookDispatcher({"GradientNormLogger": GradientNormLogger(log_frequency=2)})
for step in (1, 2):
    model(torch.ones(1, 2)).sum().backward()
    state = SimpleNamespace(model=model, step=step, clip_norm=1.0)
    print(sorted(hooks.call("after_backward", state)))
"""
    done = subprocess.run([sys.executable, "-I", "-c",
                           f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "['grad_norm/clip_coef', 'grad_norm/layers/(root)',"
                                        " 'grad_norm/nonfinite_params', 'grad_norm/total']"]
