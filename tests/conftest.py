"""What several test files share: running commands with a bound, and real torchrun jobs on loopback."""

import glob
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(command, timeout_s=120, env=None, cwd=ROOT):
    """Run a command in a session of its own; at the time-out its whole process group is killed and the test fails.

    env: variables to set, or with None to unset. Returns subprocess.CompletedProcess with text stdout and stderr.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TORCHELASTIC_"))}
    clean.update({"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}, **(env or {}))
    clean = {key: value for key, value in clean.items() if value is not None}
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               errors="replace", env=clean, cwd=cwd, start_new_session=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"no end after {timeout_s} s: {' '.join(map(str, command))}\n{out[-4000:]}\n{err[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(nproc, script, *args, timeout_s=180, env=None, cwd=ROOT, options=()):
    """Run script with nproc processes under a real torchrun on this machine (a free port, no other job's)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *options]
    return run([*command, script, *args], timeout_s=timeout_s, env=env, cwd=cwd)


def interpreter(minor):
    """Path of a python3.<minor> that runs: on the PATH, or kept by pyenv; None when there is none."""
    found = [shutil.which(f"python3.{minor}")]
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        found += sorted(glob.glob(f"{root}/versions/3.{minor}.*/bin/python"))
    works = (path for path in found if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0)
    return next(works, None)
