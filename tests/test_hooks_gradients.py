"""GradientNormLogger against norms by hand and, under DDP and FSDP, against one process with the whole batch.

Run as a script under torchrun this file is the ranks' side.
"""

import json
import logging
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
from hooks import GradientNormLogger, HookDispatcher, HookError  # noqa: E402


def norms(model, step=10, hook=None, **state):
    """What the hook says about the gradients that the model has now."""
    hook = hook or GradientNormLogger()
    return HookDispatcher({"g": hook}).call("after_backward",
                                            SimpleNamespace(model=model, step=step, **state))


def with_gradients(**gradients):
    """A module with a parameter for each keyword, whose gradient is the value."""
    model = nn.Module()
    for name, grad in gradients.items():
        grad = torch.tensor(grad) if not isinstance(grad, torch.Tensor) else grad
        parameter = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
        parameter.grad = grad
        model.register_parameter(name, parameter)
    return model


def test_norms_by_hand():
    model = nn.Sequential(with_gradients(w=[3.0, 0.0], b=[4.0]), with_gradients(w=[[12.0]]))
    found = norms(model, clip_norm=6.5)
    assert found == pytest.approx({"grad_norm/total": 13.0, "grad_norm/nonfinite_params": 0,
                                   "grad_norm/clip_coef": 0.5, "grad_norm/layers/0": 5.0,
                                   "grad_norm/layers/1": 12.0}, abs=1e-6)
    assert norms(model, clip_norm=100.0)["grad_norm/clip_coef"] == 1.0
    assert norms(model, step=11) == {}


@pytest.mark.parametrize("norm_type, total, first",
                         [(1, 19.0, 7.0), (3, (27 + 64 + 1728) ** (1 / 3), 91 ** (1 / 3)),
                                                     ("inf", 12.0, 4.0), (math.inf, 12.0, 4.0)])
def test_other_norms_while_clipping_uses_the_2_norm(norm_type, total, first):
    model = nn.Sequential(with_gradients(w=[3.0, 0.0], b=[-4.0]), with_gradients(w=[[-12.0]]))
    found = norms(model, hook=GradientNormLogger(norm_type=norm_type, prefix="n"), clip_norm=6.5)
    assert found["n/total"] == pytest.approx(total)
    assert found["n/layers/0"] == pytest.approx(first)
    assert found["n/clip_coef"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_frozen_missing_empty_sparse_half_and_tied_gradients(norm_type):
    tied = nn.Parameter(torch.zeros(2))
    tied.grad = torch.tensor([6.0, 0.0])
    model = nn.Sequential(with_gradients(w=[100.0]),
                          with_gradients(w=[2.0], missing=[0.0], empty=torch.zeros(0)),
                          with_gradients(h=torch.full((4,), 3.0, dtype=torch.bfloat16)), nn.Module(),
                          nn.Module())
    model[0].w.requires_grad_(False)
    model[1].missing.grad = None
    model[3].tied, model[4].tied = tied, tied
    # The same row twice: the gradient is the sum, 5 + 4, so the norm is 9 and not that of the two entries.
    model[4].table = nn.Parameter(torch.zeros(3, 1))
    model[4].table.grad = torch.sparse_coo_tensor([[1, 1]], [[5.0], [4.0]], (3, 1))
    found = norms(model, hook=GradientNormLogger(norm_type=norm_type))
    parts = {"1": 2.0, "2": 6.0 if norm_type == 2 else 3.0, "3": 6.0, "4": 9.0}
    total = math.sqrt(sum(part**2 for part in parts.values())) if norm_type == 2 else max(parts.values())
    assert found == pytest.approx({"grad_norm/total": total, "grad_norm/nonfinite_params": 0,
                                   **{f"grad_norm/layers/{name}": part for name, part in parts.items()}})


def test_half_precision_does_not_overflow():
    model = with_gradients(w=torch.full((10_000,), 300.0, dtype=torch.float16))
    assert norms(model)["grad_norm/total"] == pytest.approx(30_000.0)


def test_a_layer_thawed_or_exchanged_later_counts_from_then_on():
    model = nn.Sequential(with_gradients(w=[3.0]), with_gradients(w=[4.0]))
    model[1].w.requires_grad_(False)
    hook = GradientNormLogger()
    assert norms(model, hook=hook)["grad_norm/total"] == 3.0
    model[1].w.requires_grad_(True)
    assert norms(model, hook=hook)["grad_norm/total"] == 5.0
    model[1] = with_gradients(w=[0.0])  # a new module with another parameter
    model[0].w = nn.Parameter(torch.zeros(1))
    model[0].w.grad = torch.tensor([7.0])
    assert norms(model, hook=hook)["grad_norm/total"] == 7.0


def test_nothing_to_train_and_no_gradients_are_zero():
    model = nn.Linear(2, 2)
    assert norms(model)["grad_norm/total"] == 0.0
    assert norms(model.requires_grad_(False)) == {"grad_norm/total": 0.0, "grad_norm/nonfinite_params": 0.0}


def test_nonfinite_gradients_are_counted_and_an_overflow_under_a_scaler_is_said(caplog):
    model = with_gradients(good=[1.0], bad=[math.inf], worse=[math.nan])
    found = norms(model)
    assert math.isnan(found["grad_norm/total"]) and found["grad_norm/nonfinite_params"] == 2
    assert not caplog.records
    assert norms(model, grad_scale=65536.0) == {"grad_norm/nonfinite_params": 2.0}
    assert [record.getMessage() for record in caplog.records] == [
        "step 10: gradients overflowed at loss scale 65536 in 2 parameters (first: (root).bad); GradScaler"
        " skips this step"]


def test_a_real_gradscaler_gives_the_norms_of_the_unscaled_gradients():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    model(x).square().mean().backward()
    expected = norms(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(x).square().mean()).backward()
    scaler.unscale_(optimizer)
    assert norms(model, grad_scale=scaler.get_scale()) == pytest.approx(expected)


def test_at_most_200_layers_with_one_warning(caplog):
    model = nn.Sequential(*[with_gradients(w=[1.0]) for _ in range(225)])
    hook = GradientNormLogger()
    for _ in range(2):
        found = norms(model, hook=hook)
    assert sum(key.startswith("grad_norm/layers/") for key in found) == 200
    assert found["grad_norm/total"] == 15.0
    assert [record.getMessage() for record in caplog.records] == [
        "GradientNormLogger: 225 modules own parameters; norms of the first 200 are logged, the total is"
        " over all"]
    assert set(norms(model, hook=GradientNormLogger(log_per_layer=False))) == {"grad_norm/total",
                                                                               "grad_norm/nonfinite_params"}


@pytest.mark.parametrize("settings, message", [
    ({"norm_type": 0}, "GradientNormLogger: norm_type is 0; wanted a number > 0, or inf"),
    ({"norm_type": "two"}, "GradientNormLogger: norm_type is 'two'; wanted a number > 0, or inf"),
    ({"log_frequency": 0}, "GradientNormLogger: log_frequency is 0; wanted a whole number of steps, 1 or"
                           " more (to switch the hook off, leave it out)")])
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError) as caught:
        GradientNormLogger(**settings)
    assert str(caught.value) == message


def test_wrappers_are_not_in_the_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner[0] = checkpoint_wrapper(inner[0])
    inner[1] = torch.compile(inner[1], backend="eager")
    model = nn.Module()
    model.module = inner  # a user's own module of this name keeps it
    inner(torch.randn(3, 2)).sum().backward()
    found = norms(model)
    assert [key for key in found if "layers" in key] == ["grad_norm/layers/module.0",
                                                         "grad_norm/layers/module.1"]
    assert found["grad_norm/total"] > 0


# ---- Ranks: the same numbers as one process with the whole batch -------------------------------------------


class Net(nn.Module):
    """Odd sizes (shards of different length), tied weights, a frozen and a never used layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.single = nn.Parameter(torch.ones(1))  # with two ranks one of them has an empty shard
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.tied(torch.tanh(self.second(torch.relu(self.first(x)))))
        return (self.frozen(hidden) * self.single).square().mean()


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True)

    def forward(self, tokens):
        return self.table(tokens).square().mean()


def on_rank(out_dir):
    """Each way of training, with the state that train.py gives; writes {way: norms} for the test."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    torch.manual_seed(0)
    batch, tokens = torch.randn(8, 5), torch.randint(6, (8, 4))
    mine = batch.chunk(2)[rank]

    def make(kind=Net):
        torch.manual_seed(1)
        return kind()

    for norm_type in (2.0, math.inf):
        def measure(model, norm_type=norm_type):
            return norms(model, hook=GradientNormLogger(norm_type=norm_type), clip_norm=0.01)

        alone = make()
        alone(batch).backward()
        found[f"alone {norm_type}"] = measure(alone)
        wrapped = DDP(make(), find_unused_parameters=True)
        wrapped(mine).backward()
        found[f"ddp {norm_type}"] = measure(wrapped.module)
        wrapped = DDP(make(), find_unused_parameters=True)
        for index, part in enumerate(mine.chunk(2)):
            with wrapped.no_sync() if index == 0 else torch.enable_grad():
                (wrapped(part) / 2).backward()
        found[f"ddp accumulated {norm_type}"] = measure(wrapped.module)
        found[f"ddp itself {norm_type}"] = measure(wrapped)
        sharded = make()
        fully_shard(sharded.first)
        fully_shard(sharded)
        for index, part in enumerate(mine.chunk(2)):
            sharded.set_requires_gradient_sync(index == 1)
            (sharded(part) / 2).backward()
        found[f"fsdp accumulated {norm_type}"] = measure(sharded)
        found[f"after fsdp {norm_type}"] = measure(sharded)

    torch.manual_seed(1)
    half = DDP(make().to(torch.bfloat16), find_unused_parameters=True)
    half(mine.to(torch.bfloat16)).backward()
    whole = make().to(torch.bfloat16)
    whole(batch.to(torch.bfloat16)).backward()
    found["alone bf16"], found["ddp bf16"] = norms(whole), norms(half.module)
    alone, wrapped = make(Bag), DDP(make(Bag))
    alone(tokens).backward()
    wrapped(tokens.chunk(2)[rank]).backward()
    found["alone sparse"], found["ddp sparse"] = norms(alone), norms(wrapped.module)
    Path(out_dir, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_the_same_under_ddp_and_fsdp_as_in_one_process(tmp_path):
    from conftest import torchrun
    done = torchrun(2, __file__, tmp_path)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0] == ranks[1]
    found = ranks[0]
    for norm_type in ("2.0", "inf"):
        alone = found[f"alone {norm_type}"]
        assert alone["grad_norm/total"] > 0.01
        assert set(alone) >= {f"grad_norm/layers/{name}" for name in ("(root)", "first", "second", "unused")}
        assert "grad_norm/layers/tied" not in alone and "grad_norm/layers/frozen" not in alone
        for way in ("ddp", "ddp accumulated", "ddp itself", "fsdp accumulated", "after fsdp"):
            assert found[f"{way} {norm_type}"] == pytest.approx(alone, rel=1e-5), way
    assert found["ddp bf16"] == pytest.approx(found["alone bf16"], rel=0.05)
    assert found["ddp sparse"] == pytest.approx(found["alone sparse"], rel=1e-5)


if __name__ == "__main__":
    logging.basicConfig()
    on_rank(sys.argv[1])
