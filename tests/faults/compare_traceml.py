#!/usr/bin/env python3
"""The fault suite as TraceML sees it: the same training script, one job a fault, its own final summary.

    pip install traceml-ai
    python tests/faults/compare_traceml.py                # 45 minutes on two cores
    python tests/faults/compare_traceml.py --only stops   # or slow, stalls, or single faults

TraceML's verdict counts as right when its kind and rank fit, and its part of a step holds the phase: input
for data, compute or the phase itself for forward, backward and optimizer, residual for the rest. Of a job
that ended badly or stands still (it gets Ctrl-C after two minutes) any word for that with the right rank
counts.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import scenarios  # noqa: E402
from run import kill_trees  # noqa: E402

NUM_STEPS = 130
PART_OF = {"data": ("input",), "to_device": ("h2d", "input", "residual"), "forward": ("compute", "forward"),
           "backward": ("compute", "backward"), "optimizer": ("compute", "optimizer")}


def run_one(nproc, faults, folder, overrides=()):
    """TraceML's primary diagnosis of a job with these faults; None when it wrote none."""
    env = dict(os.environ, OMP_NUM_THREADS="1", FAULTS=json.dumps(faults))
    command = ["traceml", "run", HERE / "traceml_job.py", "--nproc-per-node", nproc, "--logs-dir", folder,
               "--run-name", "run",
               "--args", HERE / "recipe.yaml", f"exp_dir={folder}/exp", f"max_steps={NUM_STEPS}",
               *overrides]
    with open(folder / "output.txt", "w") as log:
        job = subprocess.Popen([str(c) for c in command], env=env, stdout=log, stderr=log, cwd=HERE,
                               start_new_session=True)
        try:
            job.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(30)
        kill_trees([job])
    path = folder / "run" / "final_summary.json"
    return json.loads(path.read_text())["primary_diagnosis"] if path.exists() else None


def is_right(case, told):
    if told is None:
        return False
    if isinstance(case, scenarios.Stop):
        text = f"{told['kind']} {told['status']} {told['summary']}"
        ranks = {int(number) for number in re.findall(r"\br(?:ank)?\s*(\d+)\b", text, re.I)}
        return bool(re.search(r"stall|hang|hung|stuck|crash|fail|kill|dead|died|exit", text, re.I)) and (
            ranks == set(case.ranks))
    straggler = "STRAGGLER" in told["kind"]
    if case.kind == "healthy":
        return not straggler and told["severity"] not in ("crit", "warn")
    worst = ((told.get("evidence") or {}).get("worst") or {}).get("rank")
    part = (told.get("evidence") or {}).get("phase", "")
    if case.kind in ("straggler", "burst", "spike"):
        return straggler and case.ranks == [worst] and part in PART_OF.get(case.phase, ("residual",))
    return not straggler and case.kind == "bound" and part in PART_OF.get(case.phase, ("residual",))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    # What needs torchrun's options or somebody outside of the job is left out.
    families = {"slow": scenarios.TWO, "stops": scenarios.STOPS, "stalls": scenarios.STALLS}
    cases = [case for family, members in families.items() for case in members
             if not arguments.only or family in arguments.only or case.name in arguments.only]
    cases = [case for case in cases if isinstance(case, scenarios.Slow)
             or not case.after and not case.options and case.name != "memory_cgroup"]
    right = 0
    for case in cases:
        is_slow = isinstance(case, scenarios.Slow)
        faults = [dict(f, steps=[11 + s for s in f["steps"]]) if "steps" in f and is_slow else f
                  for f in case.faults]
        with tempfile.TemporaryDirectory() as folder:
            told = run_one(2 if is_slow else case.nproc, faults, Path(folder), () if is_slow else case.more)
        fits = is_right(case, told)
        right += fits
        print(f"{'ok   ' if fits else 'WRONG'} {case.name:30} {told['status'] if told else 'no summary':24} "
              f"{told['summary'] if told else ''}", flush=True)
    print(f"{right} of {len(cases)} right")


if __name__ == "__main__":
    main()
