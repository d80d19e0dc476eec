"""What checkpoints hold, what stays whole when a write fails or is killed, and histories across starts."""

import io
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, run
from stopping_jobs import RECIPE, Job, assert_same, assert_same_run, checkpoint, until
from test_wandb import read_wandb

sys.path.insert(0, str(ROOT))
import train  # noqa: E402


def saved(step, best=None):
    return {"step": step, "best": best, "model": {"weight": torch.full((4,), float(step))}}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- Files


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    best = None
    for step in (1, 2, 3, 4, 5):
        best = {"value": 0.1, "step": 2} if step == 2 else best
        train.write_checkpoint(tmp_path, saved(step, best), keep_last=2)
    assert names(tmp_path) == ["best", "latest", "step_2.pt", "step_4.pt", "step_5.pt"]
    assert (tmp_path / "best").read_text() == "step_2.pt\n"
    assert (tmp_path / "latest").read_text() == "step_5.pt\n"
    # Back to step 4, where the best was another: what was newer is replaced.
    train.write_checkpoint(tmp_path, saved(4, {"value": 0.3, "step": 4}), keep_last=1)
    assert names(tmp_path) == ["best", "latest", "step_4.pt"]


def test_only_tensors_and_plain_python_get_into_a_checkpoint(tmp_path):
    train.write_checkpoint(tmp_path, saved(1), keep_last=2)
    with pytest.raises(train.CheckpointError, match=r"step_2.pt cannot be written: .*step_1.pt is whole"):
        train.write_checkpoint(tmp_path, {**saved(2), "odd": Path("x")}, keep_last=2)
    assert names(tmp_path) == ["latest", "step_1.pt"]


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, 0.99])
def test_a_cut_file_is_passed_over_wherever_it_was_cut(tmp_path, cut):
    for step in (1, 2):
        train.write_checkpoint(tmp_path, saved(step), keep_last=2)
    size = (tmp_path / "step_2.pt").stat().st_size
    os.truncate(tmp_path / "step_2.pt", int(cut * size) if isinstance(cut, float) else cut)
    said = []
    assert train.latest_checkpoint(tmp_path, said.append).name == "step_1.pt"
    assert "step_2.pt is damaged" in said[0]


@pytest.mark.parametrize("pointer", [None, "", "step_7.pt", "latest", "\0", "step_1.pt"])
def test_the_pointer_may_be_odd_or_missing(tmp_path, pointer):
    for step in (1, 2):
        train.write_checkpoint(tmp_path, saved(step), keep_last=2)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer)
    expected = "step_1.pt" if pointer == "step_1.pt" else "step_2.pt"
    assert train.latest_checkpoint(tmp_path, pytest.fail).name == expected


def two_layers(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"used": torch.nn.Linear(3, 3), "unused": torch.nn.Linear(3, 3)}).to(dtype)


def optimize(optimizer, model, number):
    """One step in which one layer has no gradient."""
    for parameter in model["used"].parameters():
        parameter.grad = torch.full_like(parameter, math.sin(number))
    optimizer.step()


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.RMSprop])
def test_an_optimizer_goes_on_to_the_bit(make):
    """Also with parameters that never had a gradient."""
    model, twin = two_layers(), two_layers()
    first, second = make(model.parameters(), lr=0.1), make(twin.parameters(), lr=0.5)
    optimize(first, model, 1)
    twin.load_state_dict(model.state_dict())
    train.load_optimizer_state(twin, second, through_a_file(train.optimizer_state(model, first)))
    for _ in range(2):
        optimize(first, model, 2)
        optimize(second, twin, 2)
        assert_same(list(model.parameters()), list(twin.parameters()))


def test_a_state_keeps_its_precision_beside_half_precision_parameters():
    model, twin = two_layers(torch.bfloat16), two_layers(torch.bfloat16)
    first, second = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    optimize(first, model, 1)
    for entries in first.state.values():
        entries["exp_avg"] = entries["exp_avg"].float() + 1e-6
    state = train.optimizer_state(model, first)
    train.load_optimizer_state(twin, second, through_a_file(state))
    assert state["state"]["used.weight"]["exp_avg"].dtype == torch.float32
    assert_same(train.optimizer_state(twin, second), state)


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- When writing fails


def in_own_mounts(commands):
    is_able = shutil.which("unshare") is not None and os.geteuid() == 0
    if not is_able or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs root, to mount a small tmpfs in a mount namespace of its own")
    return run(["unshare", "-m", "sh", "-ec", commands], timeout_s=240)


def test_a_full_disk_is_said_on_every_rank_and_the_checkpoint_before_stays_whole(tmp_path):
    (tmp_path / "disk").mkdir()
    job = in_own_mounts(
        f"mount -t tmpfs -o size=6m tmpfs {tmp_path}/disk\n"
        f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2 {ROOT}/train.py {RECIPE}"
        f" exp_dir={tmp_path}/disk/exp run=full model.size=500000 && exit 7\n"
        f"cp -r {tmp_path}/disk/exp {tmp_path}/exp")
    run_dir = tmp_path / "exp" / "stopping" / "full"
    text = "checkpoints/step_15.pt cannot be written: [Errno 28] No space left on device; step_10.pt is whole"
    assert job.returncode == 0 and text in (run_dir / "train.log").read_text(), job.stderr
    assert text in (run_dir / "train.rank1.log").read_text()
    assert names(run_dir / "checkpoints") == ["latest", "step_10.pt", "step_5.pt"]
    assert checkpoint(run_dir)["step"] == 10


def test_a_folder_that_became_read_only_is_said(tmp_path):
    folder = tmp_path / "exp" / "stopping" / "locked" / "checkpoints"
    folder.mkdir(parents=True)
    state = tmp_path / "state.pt"
    torch.save(saved(2), state)
    job = in_own_mounts(
        f"cd {ROOT}\n{sys.executable} - <<'END'\n"
        f"import subprocess, torch, train\nfrom pathlib import Path\nfolder = Path('{folder}')\n"
        f"state = torch.load('{state}', weights_only=True)\n"
        "train.write_checkpoint(folder, {**state, 'step': 1}, 2)\n"
        f"subprocess.run(['mount', '--bind', '-o', 'ro', folder, folder], check=True)\n"
        "try:\n    train.write_checkpoint(folder, state, 2)\n"
        "except train.CheckpointError as error:\n    print(error)\nEND")
    assert "step_2.pt cannot be written: [Errno 30] Read-only file system" in job.stdout, job.stderr
    assert "step_1.pt is whole" in job.stdout


# ---- When writing is killed


@pytest.mark.long
@pytest.mark.parametrize("moment", ["in a save", "in a step"])
def test_twenty_kills_at_random_moments_change_nothing(tmp_path, moment):
    """torchrun restarts both ranks after each kill; the end is the unbroken run's, no latest ever damaged."""
    settings = ["save_every=2", "epochs=16", "model.size=1000000", "num_workers=0", "log_every=100"]
    whole = Job(tmp_path, *settings, run="whole")
    assert whole.end(300) == 0, whole.text()
    torn = Job(tmp_path, *settings, "hooks.Journal.step_sleep_s=0.02", run="torn",
               options=["--max_restarts=20"])
    folder, chance = torn.run_dir / "checkpoints", random.Random(0)
    for number in range(20):
        seen = torn.run_dir / "launch" / f"attempt_{number}" / "start.json"
        until(lambda: seen.exists() and len(torn.ranks()) == 2, 120, torn.text, torn.process)
        start = json.loads(seen.read_text())["checkpoint"]
        begin = int(Path(start).stem.split("_")[1]) if start else 0
        at_least = begin + chance.choice([1, 3])
        pids = torn.ranks()
        until(lambda: max(journal_or_none(torn.run_dir), default=0) > at_least, 120, torn.text, torn.process)
        if moment == "in a save":
            until(lambda: list(folder.glob("*.tmp")), 60, torn.text, torn.process, every_s=0.0005)
        time.sleep(chance.random() * 0.03)
        os.kill(pids[0 if moment == "in a save" else chance.randrange(2)], 9)
    assert torn.end(300) == 0, torn.text()[-4000:]
    assert "is damaged" not in torn.log()
    assert_same_run(whole.run_dir, torn.run_dir, num_ranks=2)
    assert not list(folder.glob("*.tmp"))


def journal_or_none(run_dir):
    """The steps of the newest pass, while it is being written."""
    try:
        lines = (run_dir / "journal.rank0.txt").read_text().splitlines()
        return [int(lines[-1][1:].split(",")[0])] if lines else []
    except (OSError, ValueError, IndexError):
        return []


# ---- Histories


def test_wandb_has_both_passes_in_one_run(tmp_path):
    """Failed at 18, resumed from 10, run to 25."""
    settings = ["use_wandb=True", "save_every=10", "max_steps=25"]
    first = Job(tmp_path, *settings, "hooks.Journal.harm=raise", "hooks.Journal.at=18", nproc=0)
    assert first.end() == 1
    second = Job(tmp_path, *settings, f"resume={first.run_dir}", nproc=0)
    assert second.end() == 0, second.text()
    folders = sorted((first.run_dir / "wandb").glob("offline-run-*"))
    ids = {folder.name.rsplit("-", 1)[1] for folder in folders}
    assert len(ids) == 1 and ids == {checkpoint(first.run_dir)["wandb_id"]}
    files = sorted((first.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    rows = [row for file in files for row in wandb_rows(file)]
    steps = [(int(row["attempt"]), int(row["step"])) for row in rows if "train_batch/loss" in row]
    assert [step for attempt, step in steps if attempt == 1] == list(range(11, 26))
    assert [step for attempt, step in steps if attempt == 0] == list(range(1, 18))


def wandb_rows(file):
    """The history in a .wandb file."""
    for record in read_wandb(file):
        if record.WhichOneof("record_type") == "history":
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json)
                   for item in record.history.item}
