"""A hook that brings trouble to the metric writer at certain steps."""

import os
import signal
import time
from pathlib import Path

import psutil


def until(condition, timeout_s=100):
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for did not come about")
        time.sleep(0.05)


def services():
    """wandb's service processes of this rank."""
    return [child for child in psutil.Process().children() if child.name() == "wandb-core"]


class Trouble:
    """On rank 0, after the step: signal_at: send wandb's service a signal, once it writes. fault_at: make the file
    `fault`, mended_at: remove it again. wait_at: go on when the file `awaited` is there, or `said` in train.log.
    kill_at: this process kills itself, the first time only."""

    def __init__(self, signal_at: int = 0, number: int = signal.SIGKILL, fault_at: int = 0, mended_at: int = 0,
                 fault: str = "", wait_at: int = 0, awaited: str = "", said: str = "", kill_at: int = 0):
        vars(self).update({key: value for key, value in locals().items() if key != "self"})

    def after_step(self, state):
        if state.rank != 0:
            return
        if state.step == self.signal_at:
            until(lambda: services() and list((state.run_dir / "wandb").glob("*run-*/run-*.wandb")))
            for service in services():
                os.kill(service.pid, self.number)
            for _ in range(20_000):  # more than a pipe holds: a console that the service copies would block here
                print("." * 100)
        if state.step == self.fault_at:
            Path(self.fault).touch()
        if state.step == self.wait_at:
            log = state.run_dir / "train.log"
            until(lambda: Path(self.awaited).is_file() or self.said and self.said in log.read_text())
        if state.step == self.mended_at:
            Path(self.fault).unlink()
        killed = state.run_dir / "killed"
        if state.step == self.kill_at and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
