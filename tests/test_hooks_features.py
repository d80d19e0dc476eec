"""FeatureStdMonitor, PrototypeUsageLogger and LogitEntropyLogger in closed form, alone and over ranks.

Run as a script under torchrun this file is the ranks' side.
"""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from hooks import (FeatureStdMonitor, HookDispatcher, HookError, LogitEntropyLogger,  # noqa: E402
                   PrototypeUsageLogger)


class Same(nn.Module):
    """Returns what it is given, in the way of `wrap`."""

    def __init__(self, wrap=lambda x: x):
        super().__init__()
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x)


def network(**parts):
    """A model whose sub-modules student.backbone, student.head ... pass their input on."""
    model = nn.Module()
    for who in ("student", "teacher"):
        model.add_module(who, nn.ModuleDict({"backbone": Same(), "head": Same()}))
    return model


def watch(hook, model, *batches, name="student.backbone", step=10):
    """One step with a forward of the named module for each batch; returns the hook's numbers."""
    hooks = HookDispatcher({"h": hook})
    state = SimpleNamespace(model=model, step=step, device="cpu")
    hooks.call("before_train", state)
    hooks.call("before_step", state)
    for batch in batches:
        model.get_submodule(name)(batch)
    found = {**hooks.call("after_backward", state), **hooks.call("after_step", state)}
    hooks.call("after_train", state)
    assert not any(module._forward_hooks for module in model.modules())
    return found


def only(found, prefix):
    return {key[len(prefix):]: value for key, value in found.items() if key.startswith(prefix)}


STUDENT = "feature_std/student.backbone/"


def test_standard_deviations_by_hand():
    # Channel 0: -1, 1 (std 1); channel 1: 8, 14 (std 3). All four values: mean 5.5, variance 35.25.
    found = only(watch(FeatureStdMonitor(), network(), torch.tensor([[-1.0, 8.0], [1.0, 14.0]])), STUDENT)
    assert found == pytest.approx({"global": math.sqrt(35.25), "channel_mean": 2.0, "channel_min": 1.0,
                                   "channel_max": 3.0, "effective_rank": 1.0})


def test_all_forwards_of_a_step_count_as_one_set_of_tokens():
    torch.manual_seed(0)
    x = torch.randn(3, 7, 5) * torch.tensor([1.0, 2.0, 3.0, 0.5, 0.0]) + 4
    rows = x.reshape(-1, 5).double()
    parts = [x[:1], x[1:2, :3], x[1:2, 3:], x[2:, :0], x[2:]]
    found = only(watch(FeatureStdMonitor(track_channels=True), network(), *parts), STUDENT)
    shares = torch.linalg.eigvalsh(torch.cov(rows.T)).clamp(min=0)
    shares /= shares.sum()
    std = rows.std(0, correction=0)
    assert found == pytest.approx({
        "global": rows.std(correction=0).item(), "channel_mean": std.mean().item(), "channel_min": 0.0,
        "channel_max": std.max().item(), "effective_rank": torch.special.entr(shares).sum().exp().item(),
        **{f"channels/{i}": value for i, value in enumerate(std.tolist())}}, abs=1e-9)
    light = only(watch(FeatureStdMonitor(effective_rank=False), network(), *parts), STUDENT)
    assert light == pytest.approx({key: found[key] for key in ("global", "channel_mean", "channel_min",
                                                               "channel_max")})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("constant", [1000.0, 0.1, -3e-5])
def test_a_constant_feature_has_exactly_no_spread(dtype, constant):
    found = only(watch(FeatureStdMonitor(), network(), *torch.full((2, 999, 3), constant, dtype=dtype)),
                 STUDENT)
    assert found == dict.fromkeys(("global", "channel_mean", "channel_min", "channel_max", "effective_rank"),
                                  0.0)


def test_small_spread_on_a_large_mean_is_not_lost():
    x = torch.tensor([[1000.0], [1001.0]]).repeat(5000, 1).half()  # half precision has steps of 0.5 here
    found = only(watch(FeatureStdMonitor(), network(), x), STUDENT)
    assert found["channel_mean"] == pytest.approx(0.5, rel=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_effective_rank_counts_the_directions(rank):
    axes = torch.eye(8)[:rank]
    found = watch(FeatureStdMonitor(), network(), torch.cat([axes, -axes]) + 5)
    assert found[f"{STUDENT}effective_rank"] == pytest.approx(rank)


def test_features_that_are_not_finite_do_not_stop_the_run():
    found = only(watch(FeatureStdMonitor(), network(), torch.tensor([[1.0, math.nan], [2.0, 3.0]])), STUDENT)
    assert math.isnan(found["effective_rank"]) and math.isnan(found["global"])


@pytest.mark.parametrize("wrap", [
    lambda x: (x, "text"), lambda x: [None, {"inner": x}], lambda x: {"mask": x > 0, "feat": x},
    lambda x: {"other": x * 9, "feat": x}, lambda x: SimpleNamespace(feat=x, coord=x * 9)])
def test_outputs_of_many_shapes(wrap):
    model = network()
    model.student["backbone"].wrap = wrap
    found = watch(FeatureStdMonitor(), model, torch.tensor([[-1.0], [1.0]]))
    assert found[f"{STUDENT}global"] == 1.0


def test_an_output_without_features_is_named():
    model = network()
    model.student["backbone"].wrap = lambda x: "text"
    message = "module 'student.backbone': its output holds no feature tensor; wanted"
    with pytest.raises(ValueError, match=message):
        watch(FeatureStdMonitor(), model, torch.ones(2))


def test_channels_first():
    x = torch.tensor([1.0, -1.0]).view(1, 1, 2) * torch.tensor([1.0, 5.0]).view(1, 2, 1)  # (B, C, T)
    found = watch(FeatureStdMonitor(channel_dim=1), network(), x)
    assert (found[f"{STUDENT}channel_min"], found[f"{STUDENT}channel_max"]) == (1.0, 5.0)


def test_modules_by_pattern_on_clean_names(caplog):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    model = network()
    model.blocks = nn.ModuleList([checkpoint_wrapper(Same()), Same()])
    compiled = torch.compile(model, backend="eager")

    def keys(modules):
        hooks = HookDispatcher({"h": FeatureStdMonitor(modules=modules)})
        state = SimpleNamespace(model=compiled, step=10, device="cpu")
        hooks.call("before_train", state)
        hooks.call("before_step", state)
        for name in ("blocks.0", "blocks.1", "student.backbone", "teacher.head"):
            model.get_submodule(name)(torch.ones(2, 2))
        return {key.split("/")[1] for key in hooks.call("after_step", state)}

    assert keys("blocks.*") == {"blocks.0", "blocks.1"}
    assert keys(["**.backbone"]) == {"student.backbone"}
    assert keys(["teacher.hea?", "blocks.1"]) == {"teacher.head", "blocks.1"}
    with pytest.raises(HookError) as caught:
        keys(["student.bakbone", "blocks.*"])
    assert ("modules: no module of the model matches 'student.bakbone'; nearest of 10 names:"
            " 'student.backbone'" in str(caught.value))
    with pytest.raises(ValueError, match="FeatureStdMonitor: modules is 3; wanted names or patterns"):
        FeatureStdMonitor(modules=3)
    assert not caplog.records or all("gave no output" in record.getMessage() for record in caplog.records)


def test_a_model_without_students_is_said_once_and_watched_not_at_all(caplog):
    assert watch(FeatureStdMonitor(), nn.Sequential(Same()), torch.ones(2, 2), name="0") == {}
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "FeatureStdMonitor watches nothing: no module matches its defaults '**student.backbone',"
        " '**student_backbone', '**teacher.backbone', '**teacher_backbone'"]


def test_other_steps_and_evaluation_are_not_watched():
    model, hook = network(), FeatureStdMonitor(log_frequency=10)
    assert watch(hook, model, torch.randn(2, 2), step=9) == {}
    hooks = HookDispatcher({"h": hook})
    state = SimpleNamespace(model=model, step=10, device="cpu")
    for event in ("before_train", "before_step"):
        hooks.call(event, state)
    model.student["backbone"](torch.tensor([[-1.0], [1.0]]))
    hooks.call("after_backward", state)
    model.student["backbone"](torch.tensor([[9.0], [-100.0]]))  # between two steps: evaluation
    assert hooks.call("after_step", state)[f"{STUDENT}global"] == 1.0


def test_checkpointed_forwards_count_once_and_compiled_ones_count():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = nn.ModuleDict({"backbone": nn.Linear(4, 3), "head": nn.Linear(3, 6)})
            self.is_checkpointed = False

        def forward(self, x):
            run = nn.Sequential(self.student["backbone"], self.student["head"])
            if self.is_checkpointed:
                return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum()
            return self.student["head"](self.student["backbone"](x)).sum()

    torch.manual_seed(0)
    model, x = Net(), torch.randn(20, 4)
    found = {}
    for way in ("plain", "checkpointed", "compiled"):
        model.is_checkpointed = way == "checkpointed"
        hooks = HookDispatcher({"f": FeatureStdMonitor(2), "p": PrototypeUsageLogger(2)})
        state = SimpleNamespace(model=model, device="cpu")
        hooks.call("before_train", state)
        if way == "compiled":
            model.compile(backend="eager")
        for state.step in (1, 2, 3, 4):
            hooks.call("before_step", state)
            model(x).backward()
            found[way, state.step] = {**hooks.call("after_backward", state),
                                      **hooks.call("after_step", state)}
        hooks.call("after_train", state)
    for way in ("plain", "checkpointed", "compiled"):
        assert found[way, 1] == found[way, 3] == {}
        assert found[way, 2] == found[way, 4] == pytest.approx(found["plain", 2])
    assert found["plain", 2]["prototypes/student.head/tokens_per_used"] >= 20 / 6


# ---- Prototypes --------------------------------------------------------------------------------------------


def test_prototype_usage_by_hand():
    # 8 tokens: prototype 2 four times, prototypes 0 and 1 twice each, prototype 3 never.
    x = torch.eye(4)[[2, 2, 2, 2, 0, 0, 1, 1]]
    found = only(watch(PrototypeUsageLogger(), network(), x[:5].view(1, 5, 4), x[5:], name="student.head"),
                 "prototypes/student.head/")
    entropy = 1.5 * math.log(2)  # 1/2 log 2 + 2 * 1/4 log 4
    assert found == pytest.approx({"used": 3, "unused_percent": 25.0, "tokens_per_used": 8 / 3,
                                   "entropy": entropy,
                                   "perplexity": math.exp(entropy)}, rel=1e-12)


def test_prototype_usage_at_its_ends():
    def use(x):
        return only(watch(PrototypeUsageLogger(), network(), x, name="student.head"),
                    "prototypes/student.head/")
    collapsed = use(torch.tensor([[0.0, 1.0, 0.5, -math.inf]]).repeat(9, 1).half())
    assert collapsed == {"used": 1, "unused_percent": 75.0, "tokens_per_used": 9.0, "entropy": 0.0,
                         "perplexity": 1.0}
    even = use(torch.eye(4))
    assert even == pytest.approx({"used": 4, "unused_percent": 0.0, "tokens_per_used": 1.0,
                                  "entropy": math.log(4),
                                  "perplexity": 4.0})
    with_nan = use(torch.tensor([[0.0, math.nan], [0.0, 1.0], [0.0, 2.0]]))
    assert (with_nan["used"], with_nan["tokens_per_used"]) == (1, 2.0)
    nothing = use(torch.zeros(0, 4))
    assert nothing["used"] == 0 and nothing["unused_percent"] == 100.0 and math.isnan(nothing["perplexity"])


# ---- Entropy -----------------------------------------------------------------------------------------------


def entropy(logits, model=None, step=1, **settings):
    hooks = HookDispatcher({"h": LogitEntropyLogger(**settings)})
    state = SimpleNamespace(model=model, step=step, outputs={"loss": torch.tensor(1.0), "logits": logits})
    hooks.call("before_train", state)
    return hooks.call("after_step", state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_entropy_by_hand(dtype):
    log3 = math.log(3.0)
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0]], [[-math.inf, 2.0, 2.0, -math.inf]],
                           [[9.0, -math.inf, -900.0, -9e4]]])
    found = entropy(logits.to(dtype).clamp(min=-6e4).where(logits > -1e4, -math.inf))
    expected = (math.log(4) + math.log(2) + 0.0) / 3
    assert found == pytest.approx({"entropy/mean": expected, "entropy/normalized": expected / math.log(4),
                                   "entropy/temperature": 1.0}, rel=1e-6)
    skewed = entropy(torch.tensor([[0.0, log3]], dtype=torch.float64))  # 1/4, 3/4
    assert skewed["entropy/mean"] == pytest.approx(math.log(4) - 0.75 * log3, rel=1e-6)


def test_entropy_stays_between_0_and_log_k():
    uniform = entropy(torch.full((3, 50_257), 1.7))
    assert uniform["entropy/mean"] <= math.log(50_257)
    assert uniform["entropy/normalized"] == pytest.approx(1.0, rel=1e-5)
    assert entropy(torch.zeros(2, 1)) == {"entropy/mean": 0.0, "entropy/normalized": 0.0,
                                          "entropy/temperature": 1.0}
    assert entropy(torch.zeros(0, 5)) == {}


def test_temperature_is_a_number_or_an_attribute_of_the_model():
    model = SimpleNamespace(loss=SimpleNamespace(temperature=torch.tensor([0.5]), name="x"))
    logits = torch.tensor([[0.0, math.log(3.0)]])
    sharper = entropy(logits, model, temperature="loss.temperature")
    assert sharper == pytest.approx(entropy(2 * logits) | {"entropy/temperature": 0.5})
    for path, message in (("loss.temprature",
                           r"SimpleNamespace has no 'temprature'; did you mean 'temperature'\?"),
                          ("loss.name", "'loss.name' of SimpleNamespace is str; wanted a number")):
        with pytest.raises(HookError, match=message):
            entropy(logits, model, temperature=path)
    for wrong in (0, -1.0, True, None, ""):
        with pytest.raises(ValueError, match="LogitEntropyLogger: temperature is"):
            LogitEntropyLogger(temperature=wrong)


def test_missing_logits_are_said_once(caplog):
    hooks = HookDispatcher({"h": LogitEntropyLogger(logits_key="teacher_logit")})
    state = SimpleNamespace(step=1, outputs={"loss": torch.tensor(1.0), "teacher_logits": torch.zeros(2, 2)})
    assert hooks.call("after_step", state) == hooks.call("after_step", state) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "LogitEntropyLogger logs nothing: the model's outputs have no tensor (..., K) 'teacher_logit'; did"
        " you mean 'teacher_logits'?; they have 'teacher_logits'"]


# ---- Ranks: the figures of all tokens together -------------------------------------------------------------


def batches_of(rank):
    """Uneven: rank 0 has most tokens, rank 1 an empty batch in one module, in another no forward at all."""
    torch.manual_seed(5)
    x = (torch.randn(24, 4) @ torch.randn(4, 4) + 1000).to(torch.float32)
    return {"student.backbone": [x[:20], x[20:24]][rank], "teacher.backbone": [x[:7], x[:0]][rank],
            "student.head": [x[:20], x[20:]][rank], "teacher.head": [x[:3], None][rank], "both": x}


def on_rank(out_dir):
    dist.init_process_group("gloo")
    rank, calls = dist.get_rank(), []
    spans = []

    class Span:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def ready(self):
            spans.append("ready")

    def span(name, sync=False):
        spans.append((name, sync))
        return Span()

    model, batches = network(), batches_of(rank)
    hooks = HookDispatcher({"f": FeatureStdMonitor(5, span=span), "p": PrototypeUsageLogger(10, span=span)})
    state = SimpleNamespace(model=model, device="cpu")
    found = {}
    counted = ("all_reduce", "all_gather", "broadcast", "barrier")
    for name in counted:
        original = getattr(dist, name)
        setattr(dist, name, lambda *a, _n=name, _f=original, **k: (calls.append(_n), _f(*a, **k))[1])
    hooks.call("before_train", state)
    for state.step in range(1, 11):
        hooks.call("before_step", state)
        for name in ("student.backbone", "teacher.backbone", "student.head", "teacher.head"):
            if batches[name] is not None:
                model.get_submodule(name)(batches[name])
        found[state.step] = {**hooks.call("after_backward", state), **hooks.call("after_step", state)}
        if state.step in (4, 9):
            found[f"collectives at {state.step}"] = len(calls)
    hooks.call("after_train", state)
    found["spans"] = spans
    Path(out_dir, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_figures_are_those_of_all_ranks_tokens_together(tmp_path):
    from conftest import torchrun
    done = torchrun(2, __file__, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["10"] == ranks[1]["10"]
    x = batches_of(0)
    found = ranks[0]["10"]
    for name, rows in (("student.backbone", x["both"]), ("teacher.backbone", x["teacher.backbone"])):
        alone = watch(FeatureStdMonitor(modules=[name]), network(), rows, name=name)
        assert only(found, f"feature_std/{name}/") == pytest.approx(only(alone, f"feature_std/{name}/"),
                                                                    rel=1e-9)
    for name, rows in (("student.head", x["both"]), ("teacher.head", x["teacher.head"])):
        alone = watch(PrototypeUsageLogger(modules=[name]), network(), rows, name=name)
        assert only(found, f"prototypes/{name}/") == pytest.approx(only(alone, f"prototypes/{name}/"),
                                                                   rel=1e-9)
    # Collectives on log steps only: 3 at step 5 for the features.
    assert (ranks[0]["collectives at 4"], ranks[0]["collectives at 9"]) == (0, 3)
    assert ranks[1]["spans"] == [["FeatureStdMonitor.exchange", True], "ready"] * 2 + [
        ["PrototypeUsageLogger.exchange", True], "ready"]


if __name__ == "__main__":
    on_rank(sys.argv[1])
