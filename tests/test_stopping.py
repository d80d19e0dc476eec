"""How a run ends before its time: signals, a parent that is gone, failures, and nothing left behind."""

import os
import signal

import pytest
from stopping_jobs import Job, checkpoint, journal, until

LONG = ["epochs=1000", "hooks.Journal.step_sleep_s=0.02"]  # far longer than any test


def stopped(job, status):
    """The job saved, said so in its last line, left in time, and can go on."""
    assert job.end(60) == status, job.text()[-6000:]
    last = job.log().splitlines()[-1]
    assert "stopped after step" in last and "Go on with: resume=" in last, job.text()[-6000:]
    step = checkpoint(job.run_dir)["step"]
    assert f"stopped after step {step}: " in last
    return last


def send_all_processes_term(job):
    """SLURM at a time limit: SIGTERM to each process of the step, workers included."""
    for pid in sorted(job.processes()):
        os.kill(pid, signal.SIGTERM)


CASES = {  # how to stop, torchrun's exit status, what the last line names
    "torchrun gets SIGTERM": (lambda job: job.process.send_signal(signal.SIGTERM), 1, "signal SIGTERM"),
    "Ctrl-C": (lambda job: os.killpg(job.process.pid, signal.SIGINT), 1, "signal SIGINT"),
    "SIGUSR2": (lambda job: job.process.send_signal(signal.SIGUSR2), 1, "signal SIGUSR2"),
    "one rank gets SIGTERM": (lambda job: os.kill(job.ranks()[1], signal.SIGTERM), 0,
                              "signal SIGTERM (rank 1"),
    "every process gets SIGTERM": (send_all_processes_term, 1, "signal SIGTERM"),
    "torchrun is killed": (lambda job: job.process.kill(), -9, "torchrun is gone"),
}
SELDOM = ("torchrun gets SIGTERM", "Ctrl-C", "SIGUSR2")  # each is much like "every process gets SIGTERM"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in SELDOM else case for case in CASES])
def test_all_ranks_save_and_leave_together(tmp_path, case):
    stop, status, reason = CASES[case]
    job = Job(tmp_path, *LONG, "num_workers=1", "structured_logging.enabled=True",
              options=["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"])
    job.wait_for("step 10/")
    stop(job)
    assert reason in stopped(job, status)
    last = [max(journal(job.run_dir, rank)) for rank in range(2)]
    assert last == [checkpoint(job.run_dir)["step"]] * 2
    files = (job.run_dir / "structured_logs").glob("training.rank*.jsonl")
    traces = "".join(path.read_text() for path in files)
    assert reason == "torchrun is gone" or '"signal"' in traces
    assert not list((job.run_dir / "checkpoints").glob("*.tmp"))


def test_a_stop_in_evaluation_breaks_it_off_and_a_resume_makes_it_anew(tmp_path):
    settings = ["eval_every=3", "max_steps=8", "keep_last=9"]
    job = Job(tmp_path, *settings, "model.eval_sleep_s=8", run="torn")
    own = job.run_dir / "journal.rank1.txt"
    until(lambda: own.exists() and 3 in journal(job.run_dir, 1), 120, job.text)
    os.kill(job.ranks()[1], signal.SIGTERM)
    assert "stopped after step 3: signal SIGTERM (rank 1" in stopped(job, 0)
    assert "evaluation at step 3" not in job.log()
    again = Job(tmp_path, *settings, f"resume={job.run_dir}", run="torn")
    assert again.end() == 0 and again.log().count("evaluation at step 3") == 1, again.text()
    assert again.log().index("evaluation at step 3") < again.log().index("checkpoints/step_5.pt")


def test_one_process_without_torchrun_and_a_signal_in_the_first_step(tmp_path):
    job = Job(tmp_path, *LONG, "hooks.Journal.step_sleep_s=2", nproc=0)
    job.wait_for("DropoutNet: ")
    job.process.send_signal(signal.SIGINT)
    assert "stopped after step 1: signal SIGINT" in stopped(job, 0)


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    job = Job(tmp_path, "hooks.Journal.harm=hang", "hooks.Journal.at=3", "stop_check_every=1000")
    job.wait_for("hanging")
    job.process.send_signal(signal.SIGINT)
    # Either of torchrun's words.
    until(lambda: "signal SIGINT" in job.text() or "closing signal" in job.text(), 60, job.text)
    job.process.send_signal(signal.SIGINT)
    assert job.end(25) == 1
    assert "ended at once by a second Ctrl-C" in job.log()  # the other rank may see its neighbour go first


@pytest.mark.long
def test_a_rank_that_gets_no_further_ends_before_torchrun_loses_patience(tmp_path):
    """One sleeps for ever in a hook, the other sits in a collective: 20 s, where torchrun kills after 30."""
    job = Job(tmp_path, "hooks.Journal.harm=hang", "hooks.Journal.at=3", "num_workers=1")
    job.wait_for("hanging")
    job.process.send_signal(signal.SIGTERM)
    assert job.end(60) == 1
    why = "ended without a checkpoint: no step ended within 20 s of signal SIGTERM"
    assert job.log().count(why) == 2, job.log()
    assert "forcefully exiting" not in job.text()  # torchrun's words when it kills


def test_a_failure_on_one_rank_ends_all_with_its_traceback(tmp_path):
    """Rank 0 sits in C code where no exception reaches it."""
    job = Job(tmp_path, "hooks.Journal.harm=raise", "hooks.Journal.at=8", "hooks.Journal.on_rank=1",
              "hooks.Journal.others_sit=True", "num_workers=1")
    assert job.end(90) == 1
    assert "ArithmeticError: told to fail" in job.text() and "Root Cause" in job.text()
    own = (job.run_dir / "train.rank1.log").read_text()
    failed = "HookError: hook 'Journal' failed in after_step at step 8: ArithmeticError: told to fail (rank 1"
    assert f"failed: {failed}" in own and "Traceback" in own
    log = job.log()
    assert f"failed: {failed}" in log and "ended because another rank failed: HookError" in log
    assert "forcefully exiting" not in job.text()


@pytest.mark.long
def test_the_rank_that_was_killed_is_named(tmp_path):
    job = Job(tmp_path, "hooks.Journal.harm=kill", "hooks.Journal.at=8", "hooks.Journal.on_rank=1",
              "hooks.Journal.others_sit=True")
    assert job.end(90) == 1
    assert "ended because another rank failed: rank 1 (process " in job.log(), job.text()


def test_stop_on_nan_stops_all_ranks_at_one_step_and_keeps_the_weights_before(tmp_path):
    job = Job(tmp_path, "hooks.Journal.harm=nan", "hooks.Journal.at=8", "hooks.Journal.on_rank=1",
              "stop_on_nan=True",
              "stop_check_every=4")
    assert job.end(90) == 1
    reason = "NotFiniteLoss: stop_on_nan: the loss is nan at step 8 on rank 1; all ranks stopped after step "
    logs = job.log(), (job.run_dir / "train.rank1.log").read_text()
    steps = {text.split(reason)[1].split()[0] for text in logs}
    assert len(steps) == 1
    assert checkpoint(job.run_dir)["step"] == 5
    assert [max(journal(job.run_dir, rank)) for rank in range(2)] == [int(*steps)] * 2


@pytest.mark.long
def test_clean_ends_are_clean_every_time(tmp_path):
    """torch 2.13 on gloo aborts at the interpreter's exit in some clean runs, unless left with care."""
    for number in range(15):
        job = Job(tmp_path, "max_steps=2", "val_data=null", run=f"run{number}")
        assert job.end() == 0, job.text()[-4000:]
