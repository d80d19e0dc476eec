"""Real jobs that tests signal, kill and resume, and what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from conftest import ROOT

RECIPE = ROOT / "tests" / "stopping.yaml"


class Job:
    """train.py with the tests' recipe under torchrun (nproc=0: without), in a session of its own.

    `run_dir` is the directory that it writes into; everything that it and its children print is in `text()`.
    """

    def __init__(self, folder, *settings, nproc=2, run="run", options=(), env=None, recipe=RECIPE,
                 standalone=True):
        self.folder, self.run_dir, self.out = Path(folder), Path(folder) / "exp" / recipe.stem / run, None
        command = [sys.executable, ROOT / "train.py"]
        if nproc:
            command = [sys.executable, "-m", "torch.distributed.run", *["--standalone"][:standalone],
                       f"--nproc_per_node={nproc}", *options, ROOT / "train.py"]
        run_name = () if any("resume=" in setting for setting in settings) else (f"run={run}",)
        command += [recipe, f"exp_dir={folder}/exp", *run_name]
        self.mark = f"JOB={uuid.uuid4()}"  # in the environment of every process that the job starts
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TORCHELASTIC_"))}
        clean.update({"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}, **(env or {}))
        name, value = self.mark.split("=")
        self.out = open(self.folder / f"out.{value}.txt", "w+")
        command = [*map(str, command), *settings]
        self.process = subprocess.Popen(command, stdout=self.out, stderr=subprocess.STDOUT,
                                        env={**clean, name: value}, cwd=ROOT, start_new_session=True)

    def text(self):
        return Path(self.out.name).read_text(errors="replace")

    def log(self):
        path = self.run_dir / "train.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes(self):
        """pid -> command line of what is alive of this job."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = b" ".join(words).decode().strip()
            except OSError:
                continue
        return {pid: line for pid, line in found.items() if line}  # without zombies

    def ranks(self):
        """pid of each rank, in order."""
        found = {}
        for pid in self.processes():
            try:
                environ = (Path("/proc") / str(pid) / "environ").read_bytes()
                variables = dict(item.split(b"=", 1) for item in environ.split(b"\0") if b"=" in item)
                parent = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if b"RANK" in variables and parent == self.process.pid:
                found[int(variables[b"RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def wait_for(self, text, timeout_s=120, where=None):
        """Until a text is in train.log (or in the file `where`)."""
        where = where or self.run_dir / "train.log"
        until(lambda: where.exists() and text in where.read_text(errors="replace"), timeout_s,
              lambda: f"no {text!r}\n{self.text()[-4000:]}", self.process)

    def end(self, timeout_s=120):
        """Wait for the end; returns the exit status. Nothing of the job may be left behind."""
        try:
            status = self.process.wait(timeout_s)
            until(lambda: not self.processes(), 30, lambda: f"left behind: {self.processes()}")
            return status
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {timeout_s} s\n{self.text()[-6000:]}\n{self.processes()}")
        finally:
            self.kill()

    def kill(self):
        for pid in [self.process.pid, *self.processes()]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def until(condition, timeout_s, describe=lambda: "", process=None, every_s=0.05):
    """Poll for a condition, with a bound; a process that ended will not bring it about any more."""
    end = time.monotonic() + timeout_s
    while not condition():
        if process is not None and process.poll() is not None and not condition():
            pytest.fail(f"the job ended first, with {process.returncode}: {describe()}")
        if time.monotonic() > end:
            pytest.fail(f"not within {timeout_s} s: {describe()}")
        time.sleep(every_s)


def journal(run_dir, rank=0):
    """step -> what the last pass over it saw: step, epoch, learning rate, loss, samples, a random number."""
    lines = (Path(run_dir) / f"journal.rank{rank}.txt").read_text().splitlines()
    return {line[0]: line for line in map(json.loads, lines)}


def checkpoint(run_dir, name="latest"):
    folder = Path(run_dir) / "checkpoints"
    return torch.load(folder / (folder / name).read_text().strip(), weights_only=True)


def assert_same(ours, theirs, where=""):
    """Equal to the bit, however nested."""
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), where
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert ours == theirs, where


def assert_same_run(one, other, num_ranks):
    """Two run directories hold the same training: every step of every rank, and the last checkpoint."""
    for rank in range(num_ranks):
        assert journal(one, rank) == journal(other, rank)
    apart = ("attempt", "wandb_id", "recipe")
    kept = ({key: value for key, value in checkpoint(run).items() if key not in apart}
            for run in (one, other))
    assert_same(*kept)
