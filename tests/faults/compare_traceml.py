#!/usr/bin/env python3
"""The fault suite's slow steps as TraceML sees them: the same training script, one job a fault, its own final
summary.

    pip install traceml-ai
    python tests/faults/compare_traceml.py                # the two-rank faults: about twenty minutes on two
cores
    python tests/faults/compare_traceml.py --only data_rank1 nothing

TraceML's verdict counts as right when its kind and rank fit, and its part of a step holds the phase: input
for data, compute or the phase itself for forward, backward and optimizer, residual for the rest. It is no
tool for stalls and crashes: those are shown.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import scenarios  # noqa: E402

NUM_STEPS = 130
PART_OF = {"data": ("input",), "to_device": ("h2d", "input", "residual"), "forward": ("compute", "forward"),
           "backward": ("compute", "backward"), "optimizer": ("compute", "optimizer")}


def run_one(nproc, faults, folder):
    """TraceML's primary diagnosis of a job with these faults; None when it wrote none."""
    env = dict(os.environ, OMP_NUM_THREADS="1", FAULTS=json.dumps(faults))
    command = ["traceml", "run", HERE / "traceml_job.py", "--nproc-per-node", nproc, "--logs-dir", folder,
               "--run-name", "run",
               "--args", HERE / "recipe.yaml", f"exp_dir={folder}/exp", f"max_steps={NUM_STEPS}"]
    with open(folder / "output.txt", "w") as log:
        job = subprocess.Popen([str(c) for c in command], env=env, stdout=log, stderr=log, cwd=HERE,
                               start_new_session=True)
        try:
            job.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGINT)
            try:
                job.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
    path = folder / "run" / "final_summary.json"
    return json.loads(path.read_text())["primary_diagnosis"] if path.exists() else None


def is_right(case, told):
    if told is None:
        return False
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
    cases = [case for case in scenarios.TWO if not arguments.only or case.name in arguments.only]
    cases += [case for case in scenarios.STOPS + scenarios.STALLS if arguments.only
              and case.name in arguments.only]
    right = 0
    for case in cases:
        faults = [dict(f, steps=[11 + s for s in f["steps"]]) if "steps" in f
                  and isinstance(case, scenarios.Slow) else f
                  for f in case.faults]
        with tempfile.TemporaryDirectory() as folder:
            told = run_one(2, faults, Path(folder))
        fits = is_right(case, told) if isinstance(case, scenarios.Slow) else False
        right += fits
        print(f"{'ok   ' if fits else 'WRONG'} {case.name:30} {told['status'] if told else 'no summary':24} "
              f"{told['summary'] if told else ''}", flush=True)
    print(f"{right} of {len(cases)} right")


if __name__ == "__main__":
    main()
