"""A run that was stopped and goes on is, to the bit, the run that never was; every way to say resume=."""

import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from stopping_jobs import RECIPE, Job, assert_same_run, checkpoint, journal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(ROOT))
import train  # noqa: E402


def finish(folder, *settings, expect=0, **options):
    job = Job(folder, *settings, **options)
    status = job.end()
    assert status == expect, job.text()[-6000:]
    return job


def curves(run_dir):
    """TensorBoard: key -> [steps], as its reader shows them."""
    board = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
    return {key: [event.step for event in board.Scalars(key)] for key in board.Tags()["scalars"]}


# ---- Bit for bit


def test_a_restart_by_torchrun_goes_on_as_if_nothing_had_happened(tmp_path):
    """Two ranks, workers; one is killed in the middle of the second epoch, between two checkpoints."""
    settings = ["num_workers=2", "eval_every=4"]
    whole = finish(tmp_path, *settings, run="whole")
    torn = finish(tmp_path, *settings, "hooks.Journal.harm=kill", "hooks.Journal.at=13",
                  "hooks.Journal.on_rank=1",
                  run="torn", options=["--max_restarts=1"])
    assert_same_run(whole.run_dir, torn.run_dir, num_ranks=2)
    log = torn.log()
    assert "checkpoints/step_10.pt: step 10, epoch 1" in log
    assert log.count("step 10/24") == 1  # all text is kept
    assert [path.name for path in sorted(torn.run_dir.glob("launch/*"))] == ["attempt_0", "attempt_1"]
    for key, steps in curves(torn.run_dir).items():
        assert len(steps) == len(set(steps)), f"{key} has a step twice: {steps}"
    assert curves(torn.run_dir) == curves(whole.run_dir)


def test_killed_in_the_first_epoch_with_accumulation_and_one_process(tmp_path):
    settings = ["accumulate=4", "train_data.num_samples=76", "save_every=2"]
    # 19 micro-batches an epoch: windows of 4, 4, 4, 4, 3.
    whole = finish(tmp_path, *settings, nproc=0, run="whole")
    torn = finish(tmp_path, *settings, "hooks.Journal.harm=kill", "hooks.Journal.at=3", nproc=0, run="torn",
                  expect=-9)
    finish(tmp_path, *settings, f"resume={torn.run_dir}", nproc=0)
    assert_same_run(whole.run_dir, torn.run_dir, num_ranks=1)
    assert len(journal(whole.run_dir)) == 15


@pytest.mark.long
def test_a_loader_of_the_users_own_goes_on_in_its_order(tmp_path):
    settings = [f"train_data={{target: {RECIPE.parent}/stopping_parts.py:shuffling_loader}}", "save_every=7",
                "max_steps=30"]
    whole = finish(tmp_path, *settings, nproc=0, run="whole")
    torn = finish(tmp_path, *settings, "hooks.Journal.harm=kill", "hooks.Journal.at=24", nproc=0, run="torn",
                  expect=-9)
    finish(tmp_path, *settings, f"resume={torn.run_dir}", nproc=0)
    assert_same_run(whole.run_dir, torn.run_dir, num_ranks=1)


def test_a_run_with_a_best_checkpoint_resumed_from_an_earlier_one(tmp_path):
    """Back to step 10 of a finished run: what was newer is replaced, and the end is the same."""
    settings = ["best.metric=val/loss", "eval_every=4", "keep_last=3"]
    whole = finish(tmp_path, *settings, nproc=0, run="whole")
    again = Path(shutil.copytree(whole.run_dir, tmp_path / "exp" / "stopping" / "again"))
    steps = {path.stem for path in (again / "checkpoints").glob("step_*.pt")}
    assert {"step_40", "step_45", "step_48"} <= steps
    best = checkpoint(whole.run_dir, "best")
    assert best["step"] == best["best"]["step"]
    finish(tmp_path, *settings, f"resume={again}/checkpoints/step_40.pt", nproc=0)
    assert_same_run(whole.run_dir, again, num_ranks=1)
    assert {path.stem for path in (again / "checkpoints").glob("step_*.pt")} == steps
    pointers = [run_dir / "checkpoints" / "best" for run_dir in (again, whole.run_dir)]
    assert pointers[0].read_text() == pointers[1].read_text()


def test_fsdp_goes_on_and_its_checkpoint_has_whole_tensors(tmp_path):
    settings = ["parallel=fsdp", "fsdp_blocks=[Linear]", "model.width=6", "epochs=2"]
    whole = finish(tmp_path, *settings, run="whole")
    torn = finish(tmp_path, *settings, "hooks.Journal.harm=kill", "hooks.Journal.at=7", run="torn",
                  options=["--max_restarts=1"])
    assert_same_run(whole.run_dir, torn.run_dir, num_ranks=2)
    saved = checkpoint(torn.run_dir)
    assert saved["model"]["first.weight"].shape == (6, 4)
    assert saved["optimizer"]["state"]["first.weight"]["exp_avg"].shape == (6, 4)


@pytest.mark.long
def test_a_restart_of_two_nodes(tmp_path):
    """Two torchruns on loopback, one rank each; the second node's is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=two",
               "--max_restarts=2"]
    harm = ["hooks.Journal.harm=kill", "hooks.Journal.at=13", "hooks.Journal.on_rank=1"]
    nodes = [Job(tmp_path, *harm, nproc=1, run="torn", options=options, standalone=False) for _ in range(2)]
    assert [node.end(240) for node in nodes] == [0, 0], nodes[0].text() + nodes[1].text()
    whole = finish(tmp_path, run="whole")
    assert_same_run(whole.run_dir, nodes[0].run_dir, num_ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("nproc", [1, 2])
def test_every_kind_of_run_goes_on_at_many_steps(tmp_path, nproc, accumulate, workers):
    """Killed three times at steps of all kinds: after the first, in mid-epoch, at an epoch's end."""
    settings = [f"accumulate={accumulate}", f"num_workers={workers}", "save_every=1",
                "train_data.num_samples=80"]
    whole = finish(tmp_path, *settings, run="whole", nproc=nproc)
    end = checkpoint(whole.run_dir)["step"]
    torn = finish(tmp_path, *settings, "hooks.Journal.harm=kill", "hooks.Journal.at=2", run="torn",
                  nproc=nproc,
                  expect=1)
    for step in (3, end // 3 + 1, end // 2 + 2):
        finish(tmp_path, *settings, f"resume={torn.run_dir}", "hooks.Journal.harm=kill",
               f"hooks.Journal.at={step}",
               nproc=nproc, expect=1)
    finish(tmp_path, *settings, f"resume={torn.run_dir}", nproc=nproc)
    assert_same_run(whole.run_dir, torn.run_dir, num_ranks=nproc)


# ---- What to resume from


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One process, 8 steps, checkpoints at 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    return finish(folder, "max_steps=8", "save_every=2", "keep_last=4", nproc=0, run="finished").run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "exp" / "stopping" / "finished"))


def test_a_damaged_latest_falls_back_to_the_one_before(run_dir, tmp_path):
    folder = run_dir / "checkpoints"
    (folder / "step_9.pt.tmp").write_bytes((folder / "step_8.pt").read_bytes())
    with open(folder / "step_8.pt", "r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    whole = bytearray((folder / "step_6.pt").read_bytes())
    whole[len(whole) // 2] ^= 1
    (folder / "step_6.pt").write_bytes(whole)
    job = finish(tmp_path, "max_steps=8", f"resume={run_dir}", nproc=0)
    assert "step_8.pt is damaged" in job.text()
    assert "step_6.pt is damaged" in (run_dir / "train.log").read_text()
    assert "step_4.pt: step 4" in job.text() and not list(folder.glob("*.tmp"))


def test_a_checkpoint_copied_elsewhere_begins_a_new_directory(run_dir, tmp_path):
    copied = shutil.copy(run_dir / "checkpoints" / "step_6.pt", tmp_path / "copied.pt")
    shutil.rmtree(run_dir)
    finish(tmp_path, "max_steps=8", f"resume={copied}", "group=other", "run=elsewhere", nproc=0)
    elsewhere = tmp_path / "exp" / "other" / "elsewhere"
    assert sorted(journal(elsewhere)) == [7, 8]
    saved, before = checkpoint(elsewhere), torch.load(copied, weights_only=True)
    assert saved["attempt"] == 1 and saved["wandb_id"] == before["wandb_id"]


PLACES = {
    "not there": (dict(resume="{run}x"), ["no such file or folder", "did you mean finished?"]),
    "without checkpoints": (dict(resume="{run}/launch"), ["no checkpoint there"]),
    "damaged": (dict(resume="{run}/checkpoints/step_4.pt"), ["is damaged", "its run directory"]),
    "weights not there": (dict(weights="{run}/checkpoints/step_5.pt"),
                          ["no such file", "did you mean step_"]),
}


@pytest.mark.parametrize("case", PLACES)
def test_a_place_without_a_checkpoint_stops_at_once(run_dir, tmp_path, case):
    (run_dir / "checkpoints" / "step_4.pt").write_bytes(b"PK")
    settings, texts = PLACES[case]
    settings = {key: value.format(run=run_dir) for key, value in settings.items()}
    with pytest.raises(train.RecipeError) as mistake:
        train.choose_start(train.Recipe({}, {}, group="g", exp_dir=str(tmp_path / "exp"), **settings))
    assert all(text in str(mistake.value) for text in texts)
    assert not (tmp_path / "exp" / "g").exists()


MISTAKES = {
    "finished": ("resume={run}", ["finished, at step 8", "max_steps="]),
    "another model": ("resume={run} model.width=5",
                      ["does not fit DropoutNet", "of another shape: first.weight"]),
    "no state dict": ("weights={run}/config.yaml", ["config.yaml", "cannot be loaded"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_what_does_not_fit_is_one_message(run_dir, tmp_path, case):
    settings, texts = MISTAKES[case]
    settings = settings.format(run=run_dir).split()
    job = finish(tmp_path, "max_steps=8", *settings, nproc=0, run="other", expect=2)
    assert all(text in job.text() for text in texts) and "Traceback" not in job.text(), job.text()


def test_another_world_size_and_other_settings_go_on_with_warnings(run_dir, tmp_path):
    job = finish(tmp_path, "max_steps=20", f"resume={run_dir}/checkpoints/latest", "optimizer.lr=0.5",
                 "seed=1",
                 nproc=2)
    log = (run_dir / "train.log").read_text()
    for text in ("world size has changed since the checkpoint: 1 -> 2 (the rest", "seed has changed",
                 "max_steps has changed since the checkpoint: 8 -> 20", "optimizer has changed"):
        assert text in log, job.text()
    seen = [journal(run_dir, rank) for rank in range(2)]
    assert max(seen[0]) == max(seen[1]) == 20 and seen[0][9][1] == 0 and seen[0][9][2] > 0.1
    # 8 steps of 4 samples on one rank are 4 steps on two: 12 of the 20 are left, the epoch ends in 4.
    assert [seen[0][step][1] for step in (12, 13)] == [0, 1]


def test_weights_alone(run_dir, tmp_path):
    saved = checkpoint(run_dir)["model"]
    odd = {f"module.{name}": value for name, value in saved.items() if name != "last.bias"}
    odd["module.first.weight"], odd["extra"] = torch.ones(2, 2), torch.ones(1)
    torch.save({"state_dict": odd}, tmp_path / "odd.pt")
    settings = ["max_steps=1", f"weights={tmp_path}/odd.pt", "optimizer.lr=0"]
    strict = finish(tmp_path, *settings, nproc=0, run="strict", expect=2).text()
    loose = finish(tmp_path, *settings, "weights_strict=False", nproc=0, run="loose")
    for text in ("missing: last.bias", "unexpected: extra",
                 "of another shape: first.weight (in the file (2, 2), in the"
                 " model (8, 4))"):
        assert text in strict and text in loose.log()
    assert torch.equal(checkpoint(loose.run_dir)["model"]["last.weight"], saved["last.weight"])
    assert min(journal(loose.run_dir)) == 1
