"""train.py as a user meets it: real torchrun jobs, judged by train.log, event files and exit codes."""

import json
import math
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import torch
import yaml
from conftest import ROOT, run, torchrun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TESTS = ROOT / "tests"
TRAIN = ROOT / "train.py"


def write_recipe(folder, **settings):
    """A recipe of the test parts; settings replace the default ones."""
    recipe = {"model": {"target": "loop_parts.py:Regression"},
              "train_data": {"target": "loop_parts.py:Points"},
              "num_workers": 0, "batch_size": 4, "log_every": 2, "schedule": {"kind": "constant"}, **settings}
    for component in [*recipe.values(), *recipe.get("hooks", {}).values()]:
        if isinstance(component, dict) and str(component.get("target", "")).startswith("loop_parts.py"):
            component["target"] = f"{TESTS}/{component['target']}"
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def train(folder, nproc, *overrides, timeout_s=150, env=None, script=TRAIN, **settings):
    """Train; returns the finished process and the run directory."""
    recipe = write_recipe(folder, **settings)
    arguments = [recipe, f"exp_dir={folder}/exp", "group=g", *overrides]
    if not any(argument.startswith("run=") for argument in overrides):
        arguments.append("run=r")
    if nproc:
        done = torchrun(nproc, script, *arguments, timeout_s=timeout_s, env=env)
    else:
        done = run([sys.executable, script, *arguments], timeout_s=timeout_s, env=env)
    return done, folder / "exp/g/r"


def scalars(run_dir):
    """All scalars of the event files: {tag: {step: value}}."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Two ranks, two epochs of 8 steps, accumulation, clipping, evaluation, a hook of the user's."""
    folder = tmp_path_factory.mktemp("two_ranks")
    done, run_dir = train(
        folder, 2, val_data={"target": "loop_parts.py:Points", "num_samples": 13}, epochs=2, accumulate=2,
        batch_size=2,
        optimizer={"target": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1}, clip_norm=1.0,
        schedule={"kind": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1},
        hooks={"IterationTimer": {}, "InformationWriter": {},
               "StepNoter": {"target": "loop_parts.py:StepNoter"}})
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done


def test_train_log_has_a_line_a_log_step_and_says_how_it_ended(two_ranks):
    run_dir, done = two_ranks
    log = (run_dir / "train.log").read_text()
    lines = [line for line in log.splitlines() if " step " in line and "| epoch" in line]
    assert [re.search(r"step (\d+)/16", line).group(1) for line in lines] == [str(n) for n in range(2, 17, 2)]
    for part in ("loss ", "largest ", "lr ", "data ", "batch ", "samples/s", "tokens/s", "remaining "):
        assert part in lines[-1]
    assert log.count("done: 16 steps, 2 epochs") == 1 and "done: 16 steps" in log.splitlines()[-1]
    assert "groups [[(1, 4)], [(1,)]] decays [0.1, 0.0]" in log  # no decay for biases
    assert set(log.splitlines()) == set(done.stdout.splitlines())  # the console shows the same
    assert not list(run_dir.glob("train.rank*.log"))


def test_every_metric_is_there_at_its_steps(two_ranks):
    metrics = scalars(two_ranks[0])
    every_step = list(range(1, 17))
    for tag in ("train_batch/loss", "train_batch/largest", "params/lr", "noted/step", "noted/samples",
                "epoch", "attempt"):
        assert list(metrics[tag]) == every_step, tag
    for tag in ("train/loss", "train/largest", "val/loss", "val/largest"):
        assert list(metrics[tag]) == [8, 16], tag
    for name in ("samples_per_s", "tokens_per_s", "steps_per_s", "data_s", "batch_s"):
        tag = f"speed/{name}"
        assert list(metrics[tag]) == every_step[1::2], tag
    assert not [tag for tag in metrics if "num_tokens" in tag or "errors" in tag]
    assert [metrics["epoch"][step] for step in (1, 7, 9, 16)] == [0, 0, 1, 1]
    assert metrics["noted/samples"][3] == 4  # of this rank: 2 micro-batches of 2
    first = [metrics["train_batch/loss"][step] for step in range(1, 9)]
    assert metrics["train/loss"][8] == pytest.approx(sum(first) / 8, rel=1e-6)
    assert metrics["train_batch/loss"][16] < metrics["train_batch/loss"][1] / 3


def test_learning_rate_follows_the_schedule(two_ranks):
    lr = scalars(two_ranks[0])["params/lr"]
    for step in range(1, 5):
        assert lr[step] == pytest.approx(0.1 * step / 4)
    for step in range(5, 17):
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 5) / 11))
        assert lr[step] == pytest.approx(0.1 * (0.1 + 0.9 * cosine), rel=1e-5)


def test_the_run_can_be_told_and_run_again_from_its_directory(two_ranks):
    run_dir = two_ranks[0]
    facts = json.loads((run_dir / "launch/attempt_0/launch.json").read_text())
    assert "train.py" in facts["command"] and torch.__version__.startswith(facts["versions"]["torch"])
    assert len(facts["hosts"]) == 2 and facts["torchrun"]["processes"] == 2
    assert "environ" not in facts
    for script in ("train.py", "hooks.py", "tracing.py"):
        assert (run_dir / "launch/attempt_0" / script).read_text() == (ROOT / script).read_text()
    done = run([sys.executable, TRAIN, run_dir / "config.yaml", "max_steps=1", "run=again"])
    assert done.returncode == 0, done.stderr
    assert "done: 1 steps" in (run_dir.parent / "again/train.log").read_text()


def test_a_used_run_directory_is_never_written_into(two_ranks):
    run_dir = two_ranks[0]
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    done = torchrun(2, TRAIN, run_dir / "config.yaml", "run=r")
    assert done.returncode == 1  # torchrun's
    assert done.stderr.count("was used before") == 1 and f"resume={run_dir}" in done.stderr
    assert f"{TRAIN}\", line" not in done.stderr  # the only traceback is torchrun's own
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("nproc, batch_size, accumulate", [(0, 8, 1), (2, 2, 2)])
def test_the_same_global_batch_trains_alike(tmp_path, two_ranks, nproc, batch_size, accumulate):
    """One process with 8 samples a step follows two ranks with 2 x 2: order, reduction and clipping agree."""
    done, run_dir = train(
        tmp_path, nproc, val_data={"target": "loop_parts.py:Points", "num_samples": 13}, epochs=2,
        accumulate=accumulate,
        batch_size=batch_size, clip_norm=1.0,
        optimizer={"target": "torch.optim.AdamW", "lr": 0.1, "weight_decay": 0.1},
        schedule={"kind": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1})
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = scalars(run_dir), scalars(two_ranks[0])
    for step in (8, 16):
        assert mine["val/loss"][step] == pytest.approx(theirs["val/loss"][step], rel=1e-4)


@pytest.mark.parametrize("nproc", [0, 2, 3])
def test_evaluation_is_an_exact_mean(tmp_path, nproc):
    """11 samples in batches of 4: uneven batches, uneven shares."""
    done, run_dir = train(tmp_path, nproc, "max_steps=1", "epochs=1", "eval_every=1",
                          model={"target": "loop_parts.py:MeanOfX"},
                          val_data={"target": "loop_parts.py:Points", "num_samples": 11, "seed": 5},
                          optimizer={"target": "torch.optim.SGD", "lr": 0.0})
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(TESTS))
    from loop_parts import Points

    assert scalars(run_dir)["val/loss"] == {1: pytest.approx(Points(11, seed=5).x.mean().item(), rel=1e-6)}


@pytest.mark.parametrize("precision, parallel",
                         [("bf16", "ddp"), ("fp16", "ddp"), ("fp32", "fsdp"), ("bf16", "fsdp")])
def test_precisions_and_parallelism_learn(tmp_path, precision, parallel):
    fsdp = {"fsdp_blocks": ["Linear"]} if parallel == "fsdp" else {}
    done, run_dir = train(tmp_path, 2, precision=precision, parallel=parallel, epochs=2, clip_norm=1.0,
                          **fsdp,
                          val_data={"target": "loop_parts.py:Points", "num_samples": 5},
                          optimizer={"target": "torch.optim.AdamW", "lr": 0.1})
    assert done.returncode == 0, done.stderr
    metrics = scalars(run_dir)
    assert metrics["val/loss"][16] < metrics["train_batch/loss"][1] / 3


@pytest.mark.parametrize("returns", ["tensor", "object"])
def test_other_forms_of_output(tmp_path, returns):
    done, run_dir = train(tmp_path, 0, "max_steps=2",
                          model={"target": "loop_parts.py:Regression", "returns": returns})
    assert done.returncode == 0, done.stderr
    assert list(scalars(run_dir)["train_batch/loss"]) == [1, 2]


@pytest.mark.parametrize("returns, message", [
    ("nothing", "the model's forward returned a dict with the keys cost; wanted a dict with a tensor `loss`"),
    ("vector", r"the model's loss has the shape (4, 1); wanted one number")])
def test_a_model_without_a_loss_is_told_so(tmp_path, returns, message):
    done, run_dir = train(tmp_path, 0, model={"target": "loop_parts.py:Regression", "returns": returns})
    assert done.returncode == 1
    assert message in (run_dir / "train.log").read_text()


def test_values_that_are_not_finite_are_named_once(tmp_path):
    model = {"target": "loop_parts.py:Regression", "nan_at": 2}
    done, run_dir = train(tmp_path, 0, "max_steps=4", model=model)
    assert done.returncode == 0, done.stderr
    log = (run_dir / "train.log").read_text()
    assert log.count("train_batch/loss is nan at step 2") == 1 and log.count("train_batch/loss is nan") == 1
    assert math.isnan(scalars(run_dir)["train_batch/loss"][4])


# ---- failures


def test_a_failing_rank_is_named_everywhere(tmp_path):
    model = {"target": "loop_parts.py:Regression", "on_rank": 1, "fail_at": 3}
    done, run_dir = train(tmp_path, 2, model=model)
    assert done.returncode == 1
    assert "ArithmeticError: the model was told to fail" in done.stderr  # torchrun's summary
    log, own = (run_dir / "train.log").read_text(), (run_dir / "train.rank1.log").read_text()
    words = r"ERROR +failed: ArithmeticError: the model was told to fail \(rank 1 on \S+, step 3\)"
    assert re.search(words, log)
    assert "see train.rank1.log" in log
    assert "Traceback" in own and "loop_parts.py" in own and "step 3" in own
    assert list(scalars(run_dir)["train_batch/loss"]) == [1, 2]  # nothing that was logged is lost


def test_a_failing_hook_ends_the_run_by_name(tmp_path):
    done, run_dir = train(tmp_path, 2, hooks={"Mine": {"target": "loop_parts.py:StepNoter", "fail_at": 2}})
    assert done.returncode == 1
    words = "hook 'Mine' failed in after_backward at step 2: ValueError: the hook was told to fail"
    assert words in done.stderr


def test_warnings_of_other_ranks_get_a_file_that_train_log_names(tmp_path):
    model = {"target": "loop_parts.py:Regression", "on_rank": 1, "warn_at": 2}
    done, run_dir = train(tmp_path, 2, "max_steps=3", model=model)
    assert done.returncode == 0, done.stderr
    assert "see train.rank1.log" in (run_dir / "train.log").read_text()
    own = (run_dir / "train.rank1.log").read_text()
    assert "the model was told to warn" in own and "rank 1 on " in own


def test_more_processes_than_gpus_is_one_message(tmp_path):
    """The count of GPUs is the lowest layer that can be replaced where torch has no CUDA."""
    fake = tmp_path / "fake.py"
    fake.write_text("import runpy, sys, torch\ntorch.cuda.device_count = lambda: 1\n"
                    f"sys.argv[0] = {str(TRAIN)!r}\n"
                    f"sys.path.insert(0, {str(ROOT)!r})\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    done, run_dir = train(tmp_path, 2, script=fake)
    assert done.returncode == 1
    assert done.stderr.count("2 processes on") == 1 and "which has 1 GPUs" in done.stderr
    assert "--nproc_per_node 1" in done.stderr and f"{TRAIN}\", line" not in done.stderr
    assert not run_dir.exists()


# ---- data


def test_data_without_a_length_ends_on_all_ranks_together(tmp_path):
    stream = {"target": "loop_parts.py:Stream", "num_samples": 24, "extra": 7}
    done, run_dir = train(tmp_path, 2, train_data=stream, epochs=2)
    assert done.returncode == 0, done.stderr
    assert "done: 12 steps, 2 epochs" in (run_dir / "train.log").read_text()


def test_a_length_that_is_too_long_is_told(tmp_path):
    stream = {"target": "loop_parts.py:Stream", "has_length": True, "num_samples": 12}
    done, run_dir = train(tmp_path, 0, train_data=stream,
                          epochs=2)
    assert done.returncode == 0, done.stderr
    assert "done: 6 steps, 2 epochs" in (run_dir / "train.log").read_text()


def test_schedules_that_must_know_their_end_say_so(tmp_path):
    done, run_dir = train(tmp_path, 0, train_data={"target": "loop_parts.py:Stream"},
                          schedule={"kind": "cosine"})
    assert done.returncode == 2
    assert "schedule.kind=cosine must know where it ends" in done.stderr and "Traceback" not in done.stderr


def test_a_loader_of_the_users_own(tmp_path):
    done, run_dir = train(tmp_path, 2, train_data={"target": "loop_parts.py:make_loader"})
    assert done.returncode == 0, done.stderr
    log = (run_dir / "train.log").read_text()
    assert "done: 4 steps, 1 epochs" in log and "every rank reads the same samples" in log


def test_set_epoch_is_called_and_workers_load(tmp_path):
    done, run_dir = train(tmp_path, 0, epochs=3, num_workers=2,
                          train_data={"target": "loop_parts.py:EpochNoter", "num_samples": 8})
    assert done.returncode == 0, done.stderr
    assert re.findall(r"set_epoch\((\d)\)", (run_dir / "train.log").read_text()) == ["0", "1", "2"]


# ---- the console, and more than one node


def test_a_terminal_shows_progress_as_one_live_line(tmp_path):
    recipe = write_recipe(tmp_path, max_steps=6)
    main, child = pty.openpty()
    command = [sys.executable, TRAIN, recipe, f"exp_dir={tmp_path}/exp"]
    process = subprocess.Popen(command, stdout=child, stderr=child,
                               stdin=subprocess.DEVNULL, start_new_session=True)
    os.close(child)
    shown, deadline = b"", time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if select.select([main], [], [], 1)[0]:
                shown += os.read(main, 65536)
        except OSError:  # the other end is closed: the process has ended
            break
    assert process.wait(30) == 0, shown
    text = shown.decode()
    assert text.count("\r\x1b[2K") == 3 and "step 6/6" in text
    assert text.rstrip().splitlines()[-1].endswith("done: 6 steps, 1 epochs")


def test_two_nodes(tmp_path):
    """Two agents on loopback, one process each: one run directory, one writer, both train together."""
    recipe = write_recipe(tmp_path, epochs=1)
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1",
               "--rdzv-backend=c10d", "--rdzv-id=two", "--local-addr=127.0.0.1",
               f"--rdzv-endpoint=127.0.0.1:{port}", str(TRAIN), str(recipe),
               f"exp_dir={tmp_path}/exp", "group=g", "run=r"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True) for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.poll() is None and os.killpg(agent.pid, 9)
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    run_dir = tmp_path / "exp/g/r"
    assert "done: 8 steps" in (run_dir / "train.log").read_text()
    assert len(list(run_dir.glob("events*"))) == 1
    assert list(scalars(run_dir)["train_batch/loss"]) == list(range(1, 9))
    assert json.loads((run_dir / "launch/attempt_0/launch.json").read_text())["torchrun"]["nodes"] == 2
