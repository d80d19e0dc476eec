"""The self-distillation recipe: what it learns, what its hooks show, and how a collapse looks in them."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, torchrun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(ROOT / "recipes"))
from dino import (NearestNeighbours, SelfDistillation, TeacherUpdate, Views, byte_counts,  # noqa: E402
                  sinkhorn)


def train(folder, *overrides, timeout_s=240):
    """Train the recipe with two ranks; returns key -> {step: value}."""
    done = torchrun(2, ROOT / "train.py", ROOT / "recipes/dino.yaml", f"exp_dir={folder}", "run=r",
                    "num_workers=0", *overrides, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    events = EventAccumulator(str(folder / "dino" / "r"), size_guidance={"scalars": 0})
    events.Reload()
    log = (folder / "dino" / "r" / "train.log").read_text()
    return {key: {event.step: event.value for event in events.Scalars(key)}
            for key in events.Tags()["scalars"]}, log


@pytest.mark.long
def test_features_become_better_than_histograms_and_chance(tmp_path):
    found, log = train(tmp_path, timeout_s=600)
    accuracy, by_bytes, by_chance = (found[f"val/knn_accuracy{name}"][400] for name in ("", "_bytes",
                                                                                        "_chance"))
    untrained = found["val/knn_accuracy"][0]
    assert f"nearest neighbours before training: knn_accuracy {untrained:.3f} " in log
    # Seen: 0.47 against 0.32, 0.09 and, untrained, 0.37.
    assert accuracy > by_bytes + 0.08 and accuracy > untrained + 0.04 and accuracy > 3 * by_chance
    last = {key: values[400] for key, values in found.items() if 400 in values}
    assert 1 < last["entropy/mean"] <= math.log(128)
    assert last["prototypes/teacher.head/perplexity"] > 20


def test_a_collapse_shows(tmp_path):
    found, _ = train(tmp_path, "model.balance=none", "schedule={kind: constant}", "max_steps=80",
                     "eval_every=80",
                     "val_data.max_samples=64", "hooks.NearestNeighbours.snippets_per_package=20",
                     "hooks.TeacherUpdate.momentum=0.9")
    assert found["entropy/mean"][80] < 0.3 * found["entropy/mean"][10]
    perplexity = found["prototypes/teacher.head/perplexity"]
    assert perplexity[80] < 2 < perplexity[10]
    assert found["train_batch/loss"][80] < 0.5 < found["train_batch/loss"][1]  # as if all was well
    assert found["entropy/temperature"][80] == pytest.approx(0.04 + 0.02 * 0.8)
    assert {key.rsplit("/", 1)[0] for key in found if key.startswith(("feature_std", "prototypes"))} == {
        f"{kind}/{who}.{part}" for who in ("student", "teacher")
        for kind, part in (("feature_std", "backbone"), ("prototypes", "head"))}
    assert {key for key in found if "knn" in key} == set(NearestNeighbours.emits)
    assert set(found["val/knn_accuracy"]) == {0, 80}  # the untrained features to compare with, and the end


def test_views_of_a_snippet():
    views = Views(split="val", max_samples=4)
    assert len(views) == 4
    item = views[3]
    assert {name: tuple(view.shape) for name, view in item.items()} == {"whole": (2, 384), "masked": (2, 384),
                                                                       "small": (2, 256)}
    hidden = item["masked"] == 256
    assert 0 < hidden.float().mean() < 1 and torch.equal(item["masked"][~hidden], item["whole"][~hidden])
    assert all(torch.equal(item[name], views[3][name]) for name in item)  # the same at every evaluation
    text = bytes(views.snippets[3].tolist())
    assert all(bytes(view.tolist()) in text for view in (*item["whole"], *item["small"]))
    with pytest.raises(ValueError, match="split is 'valid'; wanted 'train' or 'val'"):
        Views(split="valid")


def test_no_file_is_in_both_splits(tmp_path):
    for number in range(40):
        (tmp_path / f"file{number}.py").write_text(f"{number:04}" * 1024)
    seen = [{bytes(snippet[:4].tolist()) for snippet in Views(str(tmp_path), split).snippets}
            for split in ("train", "val")]
    assert seen[0] and seen[1] and not seen[0] & seen[1] and len(seen[0] | seen[1]) == 40
    with pytest.raises(ValueError, match="none of the .* files has 100000 bytes"):
        Views(str(tmp_path), snippet_bytes=100_000)


def test_sinkhorn_shares_out_evenly():
    shares = sinkhorn(torch.tensor([[5.0, 0.0], [4.0, 0.0], [3.0, 0.0], [2.0, 0.0]]), num_rounds=50)
    assert shares.sum(1) == pytest.approx([1.0] * 4) and shares.sum(0) == pytest.approx([2.0, 2.0], rel=1e-4)


def test_the_teacher_follows_the_student():
    model = SelfDistillation(width=8, num_prototypes=4, balance="centring")
    hook = TeacherUpdate(temperature=(0.1, 0.2), warmup_steps=4, momentum=0.9, center_momentum=0.5,
                         log_frequency=2)
    state = SimpleNamespace(model=model, step=2, max_steps=None)
    hook.before_step(state)
    assert model.teacher_temperature == pytest.approx(0.15)
    before = model.teacher["head"].prototypes.clone()
    with torch.no_grad():
        model.student["head"].prototypes += 1.0
    model.batch_center.fill_(3.0)
    found = hook.after_step(state)
    assert torch.allclose(model.teacher["head"].prototypes, before + 0.1)
    assert torch.allclose(model.center, torch.full((4,), 1.5)) and set(found) == set(TeacherUpdate.emits)
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())


def test_neighbours_by_hand():
    judge = NearestNeighbours.__new__(NearestNeighbours)
    judge.num_neighbours = 2
    known = torch.tensor([[1.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-1.0, -0.1]])
    labels = torch.tensor([0, 0, 1, 1])
    asked, truth = torch.tensor([[2.0, 0.0], [-3.0, 0.0], [-1.0, 0.0]]), torch.tensor([0, 1, 0])
    assert judge.accuracy(known, asked, labels, truth) == pytest.approx(2 / 3)


def test_bytes_are_counted():
    bank = torch.randint(256, (5, 512))
    by_hand = torch.stack([torch.bincount(row, minlength=256) for row in bank])
    assert torch.equal(byte_counts(bank), by_hand.float())


def test_a_resumed_run_does_not_measure_its_first_point_again(monkeypatch):
    judge = NearestNeighbours.__new__(NearestNeighbours)
    monkeypatch.setattr(judge, "measure", lambda state, title: {"val/knn_accuracy": 0.5})
    assert judge.before_train(SimpleNamespace(step=0)) == {"val/knn_accuracy": 0.5}
    assert judge.before_train(SimpleNamespace(step=40)) is None
    assert judge.after_evaluate(SimpleNamespace(step=40)) == {"val/knn_accuracy": 0.5}
