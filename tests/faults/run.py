#!/usr/bin/env python3
"""Run the fault suite and print its table: what was broken, what the verdict said, how long that took.

    python tests/faults/run.py                     # everything once, about ten minutes on two cores
    python tests/faults/run.py --only four stops   # some jobs
    python tests/faults/run.py --seeds 5           # how often it is right, on other ranks and steps each time
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import scenarios  # noqa: E402
import trace_tools  # noqa: E402

STALL_TIMEOUT_S = 10
GAP = 25  # steps without a fault between two


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def descendants(pids):
    """Workers have sessions of their own under torchrun's agent: all are found by their parents."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
        except OSError:
            continue
        parents.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(pid))
    found, queue = [], list(pids)
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


def kill_trees(processes):
    """End these processes and all that they started."""
    pids = [process.pid for process in processes]
    for pid in [*descendants(pids), *pids]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait()


class Job:
    """One torchrun job, of two agents with host names of their own if wanted; leaving it kills whatever is
    left."""

    def __init__(self, folder, nproc, overrides=(), faults=(), options=(), hosts=(), script=None):
        self.folder = Path(folder)
        self.run_dir = self.folder / "exp" / "recipe" / "run"
        script = script or [ROOT / "train.py", HERE / "recipe.yaml", "run=run",
                            f"exp_dir={self.folder / 'exp'}",
                            f"structured_logging.stall_timeout_s={STALL_TIMEOUT_S}", *overrides]
        env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TORCHELASTIC_"))}
        env.update(OMP_NUM_THREADS="1", FAULTS=json.dumps(faults))
        self.log = open(self.folder / "output.txt", "w")
        self.agents = []
        port = free_port()
        for host in hosts or [None]:
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={nproc}",
                       "--monitor-interval=0.1"]
            command += [f"--nnodes={len(hosts)}", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}",
                        "--local-addr=localhost"] if host else ["--standalone"]
            command += [*options, *script]
            if host:
                command = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *command]
            self.agents.append(subprocess.Popen([str(c) for c in command], stdout=self.log,
                                                stderr=subprocess.STDOUT, env=env,
                                                start_new_session=True, cwd=HERE))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kill_trees(self.agents)
        self.log.close()

    def descendants(self):
        return descendants(agent.pid for agent in self.agents)

    def wait(self, timeout_s):
        end = time.monotonic() + timeout_s
        try:
            for agent in self.agents:
                agent.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end after {timeout_s} s: see {self.folder}/output.txt") from None

    def summary(self, steps=None):
        try:
            run = trace_tools.Run([str(self.run_dir)], steps=steps).read()
        except trace_tools.Refusal:
            return None
        return trace_tools.summarize(run)

    def wait_for(self, condition, timeout_s):
        """Poll the traces until condition(summary) holds; returns the summary, or the last one at the
        time-out."""
        end = time.monotonic() + timeout_s
        while True:
            summary = self.summary()
            if summary and condition(summary) or time.monotonic() > end:
                return summary
            time.sleep(0.5)

    def pids(self):
        """Of the ranks, in order."""
        return [r["pid"] for r in self.summary()["ranks"]]


def slow_faults(cases):
    """The cases' faults, each moved to steps of its own: [(case, first, last)], and the list of faults for
    the job."""
    placed, faults, first = [], [], GAP + 1
    for case in cases:
        last = first + scenarios.SEGMENT - 1
        placed.append((case, first, last))
        for fault in case.faults:
            begin, end = fault.get("steps", scenarios.steps())
            faults.append({**fault, "steps": [first + begin, first + end]})
        first = last + GAP + 1  # steps between two faults belong to none
    return placed, faults, first


def run_slow(name, folder, seed=0):
    """[(case, problem or None, details)] of one job of slow steps."""
    settings = scenarios.SLOW_JOBS[name]
    placed, faults, end = slow_faults([scenarios.moved(case, seed, settings.world())
                                       for case in settings.cases])
    script = None
    if settings.loop:
        run_dir = Path(folder) / "exp" / "recipe" / "run"
        run_dir.mkdir(parents=True)
        script = [HERE / "loop.py", settings.loop, run_dir, end]
    with Job(folder, settings.nproc, [*settings.overrides, f"max_steps={end}"], faults, hosts=settings.hosts,
             script=script) as job:
        job.wait(600)
        begins = step_begins(job.run_dir)
        if max(begins, default=0) < end:
            raise RuntimeError(f"job {name} failed: {(job.folder / 'output.txt').read_text()[-3000:]}")
        results = []
        for case, first, last in placed:
            summary = job.summary(trace_tools.StepRange(first, last))
            step_us = mean_step_us(begins, first + 4, last)
            # Against the steps just before and after, which had no fault: the machine was as busy then.
            clean_us = [mean_step_us(begins, first - GAP + 3, first),
                        mean_step_us(begins, last + 3, last + GAP)]
            results.append((f"{name}/{case.name}", *judge_slow(case, first, summary, step_us, clean_us)))
    return results


def mean_step_us(begins, first, last):
    return (begins[last] - begins[first]) / (last - first)


def step_begins(run_dir):
    """{step: when rank 0 began it, in microseconds}, read without the tool that is being tested."""
    begins = {}
    for path in (run_dir / "structured_logs").glob("training.rank00000.*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["ph"] == "B" and "step" in record:
                begins.setdefault(record["step"], record["ts"])
    for path in (run_dir / "structured_logs").glob("training.global_rank_0.*.jsonl"):  # torchtitan's
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["log_type_name"].endswith("_start") and record["step"] is not None:
                begins.setdefault(record["step"], record["time_us"])
    return begins


def judge_slow(case, first, summary, step_us, clean_us):
    """(problem or None, what it said) of one case, whose steps took step_us; before and after, without a
    fault, clean_us."""
    verdict = summary["findings"][0]
    got = describe(verdict)
    details = {"got": got, "step_ms": step_us / 1000}
    problem = wrong(case.kind, case.ranks, case.phase, verdict)
    if not problem and case.hosts and verdict["hosts"] != case.hosts:
        problem = f"wanted {case.hosts}, got {verdict['hosts']}"
    if not problem and case.first is not None and abs(verdict["steps"]["first"] - first - case.first) > 1:
        problem = f"step {verdict['steps']['first'] - first}, wanted {case.first}"
    if not problem and case.period and verdict["steps"]["period"] != case.period:
        problem = f"period {verdict['steps']['period']}, wanted {case.period}"
    for ranks, phase in case.also:
        if not problem and not any(f["ranks"] == ranks and f["phase"] == phase for f in summary["findings"]):
            problem = f"rank {ranks} in {phase} is missing"
    others = [f for f in summary["findings"][1:]
              if f["kind"] in ("straggler", "burst", "spike", "slow_host", "slowdown")
              and (f["ranks"], f["phase"]) not in case.also]
    # Where the machine alone makes as much of a difference as the fault, nothing can be told.
    spread_ms, effect_ms = abs(clean_us[0] - clean_us[1]) / 1000, (step_us - sum(clean_us) / 2) / 1000
    least_ms = abs(effect_ms) if case.faults else 0.15 * step_us / 1000
    details.update(spread_ms=spread_ms, decidable=spread_ms < least_ms)
    details["others"] = [describe(f) for f in others]
    details["findings"] = summary["findings"]
    is_steady = case.kind == "straggler" and case.faults and not case.also and case.first is None
    if is_steady and verdict["kind"] == "straggler":
        details["saving_ms"] = (verdict["saving_percent"] / 100 * step_us / 1000, effect_ms)
    return problem, details


def wrong(kind, ranks, phase, verdict):
    kinds = (kind,) if isinstance(kind, str) else kind
    if verdict["kind"] not in kinds or (ranks is not None and sorted(ranks) != verdict["ranks"]) or (
            phase is not None and verdict["phase"] != phase):
        return f"wanted {'/'.join(kinds)} {'' if ranks is None else ranks} {phase or ''}"
    return None


def describe(finding):
    return f"{finding['kind']} {finding['ranks']} {finding['phase'] or ''}".strip()


def run_stop(case, folder):
    """(problem or None, details) of a job that ends or stands still."""
    is_stall = case.name in {stall.name for stall in scenarios.STALLS}
    with Job(folder, case.nproc, ["max_steps=60", *case.more], case.faults, case.options) as job:
        if case.after:
            job.wait_for(lambda s: (s["steps"]["last"] or 0) >= 10, 120)
            globals()[case.after](job)
        if is_stall:
            stands = ("stall", "desync", "crash", "killed")
            summary = job.wait_for(lambda s: s["findings"][0]["kind"] in stands, 180)
        else:
            job.wait(180)
            summary = job.wait_for(lambda s: s["state"] == "ended", 30)
        if summary is None:
            return "no traces", {"got": (job.folder / "output.txt").read_text()[-500:]}
        verdict = summary["findings"][0]
        problem = wrong(case.kind, case.ranks, case.phase, verdict)
        if not problem and case.step is not None and abs((verdict["steps"]["first"] or 0) - case.step) > 1:
            problem = f"step {verdict['steps']['first']}, wanted {case.step}"
        idle_s = verdict["cost_s"]
        if problem is None and idle_s > 2 * STALL_TIMEOUT_S:
            problem = f"verdict after {idle_s:.0f} s"
        return problem, {"got": describe(verdict), "idle_s": idle_s, "findings": summary["findings"],
                         "states": [r["state"] for r in summary["ranks"]], "others": []}


@contextlib.contextmanager
def memory_cgroup(limit_mb=300):
    """A memory cgroup of so much in the environment, for "memory" faults; gives False where there can be
    none."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    group = parent / f"faults-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_mb * 1_000_000))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield False
        return
    os.environ["MEMORY_CGROUP"] = str(group)
    try:
        yield True
    finally:
        del os.environ["MEMORY_CGROUP"]
        end = time.monotonic() + 10
        while group.exists() and time.monotonic() < end:
            with contextlib.suppress(OSError):  # its last member is still on its way out
                group.rmdir()
            time.sleep(0.05)


def kill_all(job):
    for pid in [*(agent.pid for agent in job.agents), *job.descendants()]:
        os.kill(pid, signal.SIGKILL)


def terminate(job):
    os.kill(job.agents[0].pid, signal.SIGTERM)


def worker_of(job, rank):
    parent = job.pids()[rank]
    for pid in job.descendants():
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
            return pid
    raise LookupError("no data-loader worker")


def kill_worker(job):
    os.kill(worker_of(job, 1), signal.SIGKILL)


def stop_worker(job):
    os.kill(worker_of(job, 1), signal.SIGSTOP)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", help="jobs of slow steps, stops, stalls, or single stops")
    parser.add_argument("--seeds", type=int, default=1, help="how often each")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--keep", help="folder for the traces")
    parser.add_argument("-v", action="store_true", help="all findings")
    arguments = parser.parse_args()
    jobs = [name for name in scenarios.SLOW_JOBS if not arguments.only or name in arguments.only]
    stops = [case for family, cases in (("stops", scenarios.STOPS), ("stalls", scenarios.STALLS))
             for case in cases
             if not arguments.only or family in arguments.only or case.name in arguments.only]
    root = Path(arguments.keep or tempfile.mkdtemp(prefix="faults-"))
    rows = []
    with memory_cgroup() as has_cgroup:
        for seed in range(arguments.seeds) if arguments.seed is None else [arguments.seed]:
            for name in jobs:
                if name == "torchtitan" and importlib.util.find_spec("torchtitan") is None:
                    print("-     torchtitan is not installed (pip install --no-deps torchtitan==0.3.0)")
                    continue
                folder = root / f"{name}-{seed}"
                folder.mkdir(parents=True)
                rows += show(run_slow(name, folder, seed), arguments.v)
            for case in stops:
                if case.name == "memory_cgroup" and not has_cgroup:
                    print(f"-     {case.name}: memory cgroups cannot be made here")
                    continue
                folder = root / f"{case.name}-{seed}"
                folder.mkdir(parents=True)
                case = scenarios.moved(case, seed, case.nproc)
                rows += show([(case.name, *run_stop(case, folder))], arguments.v)
    print(score(rows))
    if not arguments.keep:
        shutil.rmtree(root)


def score(rows):
    """What the rows come to: right answers, those without a fault, savings inside the bar."""
    told = [details for _, _, details in rows]
    # A saving can be held against steps that are alike before and after the fault.
    savings = [(abs(d["saving_ms"][0] - d["saving_ms"][1]), max(1.0, 0.1 * abs(d["saving_ms"][1])))
               for d in told if "saving_ms" in d and d["spread_ms"] <= 1.0]
    inside = sum(error <= bar for error, bar in savings)
    idle_s = [d["idle_s"] for d in told if d.get("idle_s")]
    return (f"{sum(problem is None for _, problem, _ in rows)} of {len(rows)} right; "
            f"{sum(not d.get('decidable', True) for d in told)} not decidable here; {inside} of {len(savings)} "
            "savings within 10 % or 1 ms a step"
            + (f"; stalls told after at most {max(idle_s):.1f} s" if idle_s else ""))


def show(rows, verbose):
    for name, problem, details in rows:
        saving = "saves {:.1f} ms a step, really {:.1f}".format(
            *details["saving_ms"]) if "saving_ms" in details else ""
        idle = f"after {details['idle_s']:.1f} s" if details.get("idle_s") else ""
        print(f"{'ok   ' if not problem else 'WRONG'} {name:34} {details['got']:40} {saving}{idle} "
              f"{problem or ''} "
              f"{'also ' + '; '.join(details['others']) if details.get('others') else ''} "
              f"{details.get('states', '')}", flush=True)
        if verbose and (problem or details.get("others")):
            print(json.dumps(details["findings"][:4], indent=1))
    return rows


if __name__ == "__main__":
    main()
