"""Metric writers that do not start, fail, hang or meet a bad disk: training goes on, none are lost."""

import errno
import logging
import signal
import socket
import sys
import threading

import pytest
from conftest import ROOT, run
from stopping_jobs import Job, until
from test_tracing_files import faulty  # noqa: F401 (a fixture)
from test_train import TRAIN, scalars, train, write_recipe
from test_wandb import history
from wandb_server import KEY, WandbServer

sys.path.insert(0, str(ROOT))
from train import MetricWriter  # noqa: E402

TROUBLE = f"{ROOT}/tests/writer_parts.py:Trouble"


# ---- The writer itself


class Place:
    """Keeps what is written to it; fail_at and hang_at: at that write, or "open" or "close"."""

    def __init__(self, fail_at=None, hang_at=None):
        self.fail_at, self.hang_at, self.release = fail_at, hang_at, threading.Event()
        self.rows, self.closed = [], None

    def open(self):
        self.meet("open")
        return self.write, self.close

    def meet(self, at):
        if at == self.fail_at:
            raise SystemExit("told to fail")  # not even an Exception
        if at == self.hang_at:
            self.release.wait(60)

    def write(self, step, values):
        self.meet(step)
        self.rows.append((step, values["x"]))

    def close(self, failed):
        self.meet("close")
        self.closed = failed


def write_all(caplog, *places, steps=range(1, 6), **settings):
    """Writes to places through a MetricWriter with other settings; returns its warnings."""
    kind = type("QuickWriter", (MetricWriter,), {"close_timeout_s": 1.0, **settings})
    with caplog.at_level(logging.WARNING):
        writer = kind(*((f"place {index}", place.open) for index, place in enumerate(places)))
        for step in steps:
            writer.write(step, {"x": 10.0 * step})
        writer.close(failed=True)
    for place in places:
        place.release.set()
    return [record.getMessage() for record in caplog.records]


ROWS = [(step, 10.0 * step) for step in range(1, 6)]


def test_a_place_that_works_is_the_only_one(caplog):
    first, second = Place(), Place()
    assert write_all(caplog, first, second) == []
    assert first.rows == ROWS and first.closed is True and second.rows == [] and second.closed is None


@pytest.mark.parametrize("at", ["open", 1, 3, 5, "close"])
@pytest.mark.parametrize("how", ["fail_at", "hang_at"])
def test_the_next_place_gets_every_row(caplog, how, at):
    second = Place()
    said = write_all(caplog, Place(**{how: at}), second)
    assert second.rows == ROWS and second.closed is True
    assert len(said) == 1
    why = "failed (SystemExit: told to fail)" if how == "fail_at" else "did not finish within 1 s"
    assert said[0] == f"place 0 {why}; what it has not taken goes to place 1. The training goes on"


def test_a_place_that_hangs_in_mid_run_is_left_then(caplog):
    first, second = Place(hang_at=2), Place()
    kind = type("QuickWriter", (MetricWriter,), {"patience_s": 0.2})
    writer = kind(("first", first.open), ("second", second.open))
    step = 0

    def second_has_rows():
        nonlocal step
        step += 1
        writer.write(step, {"x": 10.0 * step})
        return second.rows

    until(second_has_rows, 60)
    first.release.set()
    writer.close(failed=False)
    assert [row[0] for row in second.rows] == list(range(1, step + 1)) and second.closed is False
    assert len(first.rows) <= 2  # it has not gone on behind the other's back
    assert len(caplog.records) == 1 and "first has not answered for " in caplog.text


def test_when_no_place_works_it_is_said_and_nothing_raises(caplog):
    said = write_all(caplog, Place(fail_at="open"), Place(fail_at=2))
    assert len(said) == 2 and said[1].startswith("place 1 failed") and "no metrics are written" in said[1]


def test_a_last_place_that_does_not_keep_up_loses_what_does_not_fit_and_says_so_once(caplog):
    slow = Place(hang_at=1)
    said = write_all(caplog, slow, steps=range(1, 50), max_waiting=10)
    assert len(said) == 2 and "does not keep up: metrics are lost" in said[0]


# ---- TensorBoard on a bad disk


@pytest.mark.parametrize("faults", [{"FAULT_WRITE": errno.ENOSPC, "FAULT_TORN": 30}, {"FAULT_SHORT": 2}])
def test_event_files_are_whole_when_the_disk_has_space_again(tmp_path, faulty, faults):  # noqa: F811
    is_short = "FAULT_SHORT" in faults
    flag = tmp_path / "fault"
    trouble = {"target": TROUBLE, "fault": str(flag), "fault_at": 2, "wait_at": 6, "mended_at": 6,
               "said": "INFO" if is_short else "cannot be written"}
    done, run_dir = train(tmp_path, 0, hooks={"Trouble": trouble}, epochs=1, env={
        "LD_PRELOAD": faulty, "FAULT_PATH": "tfevents", "FAULT_WHILE": str(flag),
        **{key: str(value) for key, value in faults.items()}})
    assert done.returncode == 0, done.stderr
    assert list(scalars(run_dir)["train_batch/loss"]) == list(range(1, 17))
    log = (run_dir / "train.log").read_text()
    assert log.count("WARNING") == (0 if is_short else 1)
    said = f"TensorBoard's file {next(run_dir.glob('events*'))} cannot be written (No space left"
    assert is_short or said in log


@pytest.mark.long
@pytest.mark.parametrize("faults", [{"FAULT_WRITE": errno.EIO}, {"FAULT_OPEN": errno.EROFS}])
def test_a_disk_that_stays_bad_costs_the_metrics_and_nothing_else(tmp_path, faulty, faults):  # noqa: F811
    done, run_dir = train(tmp_path, 2, epochs=1, env={
        "LD_PRELOAD": faulty, "FAULT_PATH": "tfevents", **{key: str(value) for key, value in faults.items()}})
    assert done.returncode == 0, done.stderr
    log = (run_dir / "train.log").read_text()
    assert log.count("cannot be written") == log.count("records are lost") == 1
    assert log.count("WARNING") == 2
    assert "done: 8 steps" in log


# ---- W&B's service, with two ranks


def job_in_trouble(folder, trouble, env=None, **settings):
    trouble = {"target": TROUBLE, **trouble}
    recipe = write_recipe(folder, hooks={"Trouble": trouble}, use_wandb=True, **settings)
    return Job(folder, recipe=recipe, env=env)


def test_a_service_that_is_killed_in_mid_run(tmp_path):
    job = job_in_trouble(tmp_path, {"signal_at": 4})
    assert job.end() == 0, job.text()  # and no process is left behind
    log = job.log()
    assert log.count("WARNING") == 1, log
    assert f"W&B (what it has taken is in {job.run_dir}/wandb: wandb sync) failed (" in log
    assert f"what it has not taken goes to TensorBoard in {job.run_dir}. The training goes on" in log
    assert list(scalars(job.run_dir)["train_batch/loss"]) == list(range(1, 9))
    assert "Traceback" not in job.text()


@pytest.mark.long
@pytest.mark.parametrize("fails", [False, True])
def test_a_service_that_hangs_to_the_end(tmp_path, fails):
    model = {"target": "loop_parts.py:Regression", "fail_at": 7 if fails else 0}
    job = job_in_trouble(tmp_path, {"signal_at": 4, "number": int(signal.SIGSTOP)}, model=model)
    assert job.end() == int(fails), job.text()
    log = job.log()
    assert log.count("did not finish within 15 s; what it has not taken goes to TensorBoard") == 1
    assert list(scalars(job.run_dir)["train_batch/loss"]) == list(range(1, 7 if fails else 9))
    assert not fails or "failed: ArithmeticError: the model was told to fail (rank 0" in log


NO_SERVICE = """
import subprocess
real = subprocess.Popen.__init__
def refuse(self, args, *others, **named):
    if "wandb-core" in str(args):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    real(self, args, *others, **named)
subprocess.Popen.__init__ = refuse
"""


@pytest.mark.long
def test_a_service_that_cannot_be_started(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_SERVICE)
    job = job_in_trouble(tmp_path, {}, env={"PYTHONPATH": str(tmp_path)})
    assert job.end() == 0, job.text()
    assert "WARNING W&B (what it has taken" in job.log() and "Resource temporarily unavailable" in job.log()
    assert list(scalars(job.run_dir)["train_batch/loss"]) == list(range(1, 9))


@pytest.mark.long
def test_a_server_that_never_answers_does_not_hold_up_the_end(tmp_path):
    with WandbServer(answer_after_s=600) as dead:
        job = job_in_trouble(tmp_path, {}, env={**dead.env, "WANDB_MODE": "online"})
        assert job.end() == 0, job.text()
    assert "goes to TensorBoard" in job.log()
    assert list(scalars(job.run_dir)["train_batch/loss"]) == list(range(1, 9))


@pytest.mark.long
def test_a_server_that_is_not_there_means_offline_even_with_a_closed_stdin(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    recipe = write_recipe(tmp_path, use_wandb=True, hooks={"Trouble": {
        "target": TROUBLE, "wait_at": 8, "awaited": "none", "said": "W&B is not to be had"}})
    without_stdin = ["sh", "-c", 'exec "$@" <&-', "sh"]
    command = [*without_stdin, sys.executable, TRAIN, recipe, f"exp_dir={tmp_path}/exp", "group=g", "run=r"]
    done = run(command, timeout_s=300,
               env={"WANDB_MODE": None, "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert len([row for row in history(tmp_path / "exp/g/r")[0] if "train_batch/loss" in row]) == 16
