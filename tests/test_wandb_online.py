"""W&B online: the real package against a small server on loopback, which keeps what it is sent."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
import yaml
from conftest import ROOT
from stopping_jobs import Job, until
from test_train import TRAIN, train, write_recipe
from test_wandb import history
from wandb_server import WandbServer

TROUBLE = f"{ROOT}/tests/writer_parts.py:Trouble"


@pytest.fixture(scope="module")
def server():
    with WandbServer() as server:
        yield server
        assert server.unknown == []


def run_id(run_dir):
    """The W&B id of a run, from the folder that wandb has made for it."""
    (found,) = {path.name.rsplit("-", 1)[1] for path in (run_dir / "wandb").glob("*run-*-*")}
    return found


@pytest.fixture(scope="module")
def resumed(server, tmp_path_factory):
    """Two ranks; rank 0 kills itself after step 6, once the server has step 5; torchrun starts both anew."""
    folder = tmp_path_factory.mktemp("resumed")
    job = wandb_job(folder, server, {"wait_at": 6, "kill_at": 6}, save_every=2, epochs=2)
    def has_step_5():
        return any(row.get("step") == 5 for run in list(server.runs) for row in server.rows(run))

    until_sent(job, folder, has_step_5)
    assert job.end(150) == 0, job.text()  # and nothing is left behind
    return job.run_dir, run_id(job.run_dir)


def wandb_job(folder, server, trouble, **settings):
    hooks = {"Trouble": {"target": TROUBLE, "awaited": f"{folder}/sent", **trouble}}
    recipe = write_recipe(folder, hooks=hooks, use_wandb=True, **settings)
    env = {**server.env, "WANDB_MODE": "online"}
    return Job(folder, recipe=recipe, options=["--max_restarts=1"], env=env)


def until_sent(job, folder, condition):
    """Let the job go on when the server has what it should have."""
    try:
        until(condition, 150, job.text, job.process)
        (folder / "sent").touch()
    except BaseException:
        job.kill()
        raise


def test_a_run_that_was_killed_and_resumed_is_one_run_with_both_passes(server, resumed):
    run_dir, run = resumed
    rows = [row for row in server.rows(run) if "train_batch/loss" in row]
    seen = [(row["attempt"], row["step"]) for row in rows]
    assert len(set(seen)) == len(seen)
    first, second = ([step for attempt, step in seen if attempt == number] for number in (0, 1))
    assert first[:5] == [1, 2, 3, 4, 5] and second[-1] == 16
    assert second == list(range(second[0], 17)) and second[0] <= 7  # from the checkpoint on, or nearly
    steps = [row["_step"] for row in server.rows(run)]
    assert steps == sorted(set(steps))  # W&B's own count goes on: it would drop the row else
    assert server.runs[run]["exit_code"] == 0
    assert list(server.runs) == [run]
    assert not list(run_dir.glob("events*"))


def test_its_config_is_the_resolved_recipe(server, resumed):
    run_dir, run = resumed
    config, recipe = server.config(run), yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["epochs"] == 2 and config["save_every"] == 2 and config["schedule"]["kind"] == "constant"
    assert set(config) == set(recipe)
    assert server.runs[run]["group"] == "recipe" and server.runs[run]["name"] == "run"


def test_nothing_is_uploaded_but_metrics_and_the_facts_of_the_run(server, resumed):
    run = server.runs[resumed[1]]
    assert set(run["files"]) <= {"wandb-metadata.json", "requirements.txt", "wandb-summary.json",
                                 "config.yaml"}
    assert set(run["lines"]) <= {"wandb-history.jsonl", "wandb-events.jsonl",
                                 "wandb-summary.json"}  # no console


@pytest.mark.long
def test_a_failed_run_is_marked_failed(server, tmp_path):
    done, run_dir = train(tmp_path, 2, "use_wandb=True", env=server.env,
                          model={"target": "loop_parts.py:Regression", "fail_at": 3})
    assert done.returncode == 1
    run = run_id(run_dir)
    assert [row["step"] for row in server.rows(run)] == [1, 2] and server.runs[run]["exit_code"] == 1


@pytest.mark.long
@pytest.mark.parametrize("has_key", [True, False])
def test_without_a_key_that_is_accepted_it_is_offline_and_a_terminal_is_never_asked(tmp_path, has_key):
    recipe = write_recipe(tmp_path, max_steps=2, hooks={}, use_wandb=True)
    with WandbServer(status=401) as refusing:
        env = {**os.environ, **refusing.env, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path),
               "NETRC": str(tmp_path / "netrc")}
        left_out = () if has_key else ("WANDB_API_KEY",)
        kept = {key: value for key, value in env.items() if value is not None and key not in left_out}
        main, child = pty.openpty()
        command = [sys.executable, TRAIN, recipe, f"exp_dir={tmp_path}/exp", "group=g", "run=r"]
        process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, start_new_session=True,
                                   env=kept)
        os.close(child)
        try:
            shown = read_until_closed(main, 150)
            assert process.wait(30) == 0, shown
        finally:
            process.kill()
    log = (tmp_path / "exp/g/r/train.log").read_text()
    assert log.count("W&B is not to be had") == 1 and log.count("wandb sync") == 1, shown
    assert len(history(tmp_path / "exp/g/r")[0]) == 3, shown
    assert not re.search("(choice|paste|API key).*[:?] *$", shown, re.IGNORECASE | re.MULTILINE), shown


def read_until_closed(terminal, timeout_s):
    """Everything shown on a terminal until the last process on it has closed it."""
    shown, deadline = b"", time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 65536)
        except OSError:
            break
    return shown.decode(errors="replace")


@pytest.mark.long
def test_a_server_that_is_slow_to_start_gets_every_row_when_training_lasts_longer(tmp_path):
    with WandbServer(answer_after_s=1.5) as slow:
        job = wandb_job(tmp_path, slow, {"wait_at": 3})
        until_sent(job, tmp_path, lambda: slow.runs)
        assert job.end(150) == 0, job.text()
        rows = slow.rows(run_id(job.run_dir))
        assert [row["step"] for row in rows if "train_batch/loss" in row] == list(range(1, 9))
    assert not list(job.run_dir.glob("events*"))
