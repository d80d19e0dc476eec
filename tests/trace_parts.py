"""Hand-made traces for the tests of trace_tools.py: what tracing.py and torchtitan's logger write, line by
line."""

import json
import subprocess
import sys

from conftest import ROOT

T0 = 1_795_958_674_000_000  # microseconds since 1970


class Trace:
    """One process's trace. Times are microseconds since T0; every record is a line as tracing.py writes
    it."""

    def __init__(self, rank=0, world_size=1, pid=None, source="train", run="r1", attempt=0, ts=0, **more):
        self.rank, self.pid, self.source, self.begun = rank, pid or 4000 + rank, source, ts
        header = {"ph": "M", "v": 1, "ts": T0 + ts, "mono_us": 5_000_000 + ts, "boot_id": "b0", "rank": rank,
                  "local_rank": rank, "world_size": world_size, "node": 0, "host": "node-0", "pid": self.pid,
                  "source": source, "worker": None, "parent": None, "run": run, "attempt": attempt,
                  "heartbeat_s": 5,
                  "stall_timeout_s": 120, "versions": {"python": "3.11.7"}, "part": 0}
        header.update(more)
        self.lines = [dump(header)]
        self.begins = {}

    def add(self, **record):
        self.lines.append(dump(record))
        return self

    def b(self, name, at, step=None, **more):
        self.begins.setdefault(name, []).append(at)
        return self.add(ph="B", ts=T0 + at, name=name, **with_step(step), **more)

    def e(self, name, at, step=None, **more):
        return self.add(ph="E", ts=T0 + at, name=name, **with_step(step), dur=at - self.begins[name].pop(),
                        **more)

    def span(self, name, begin, end, step=None, **more):
        where = {key: more[key] for key in ("tid", "task") if key in more}
        return self.b(name, begin, step, **more).e(name, end, step, **where)

    def i(self, name, at, step=None, **more):
        return self.add(ph="i", ts=T0 + at, name=name, **with_step(step), **more)

    def c(self, at, step=None, **scalars):
        return self.add(ph="C", ts=T0 + at, **with_step(step), args=scalars)

    def end(self, at, how="ok", **args):
        return self.i("process_end", at, args={"how": how, **args})

    def steps(self, first, last, at=0, data=2000, own=8000, wait=2000):
        """Steps of data, forward, backward with its waiting, and optimizer; returns the time after them."""
        for step in range(first, last + 1):
            self.b("step", at, step).span("data", at, at + data, step)
            at += data
            self.span("forward", at + 10, at + 3010, step)
            at += 3010
            self.b("backward", at, step, sync=True).i("ready", at + own, step, args={"span": "backward"})
            self.e("backward", at + own + wait, step)
            at += own + wait
            self.span("optimizer", at, at + 500, step)
            at += 500
            self.c(at, step, samples=16, loss=2.5)
            at += 10
            self.e("step", at, step)
        return at

    def name(self):
        return f"{self.source}.rank{self.rank:05d}.20261129-132434-{self.begun:06d}.{self.pid}.jsonl"

    def text(self):
        return "\n".join(self.lines) + "\n"

    def write(self, folder, name=None, text=None):
        path = folder / (name or self.name())
        path.parent.mkdir(parents=True, exist_ok=True)
        data = self.text() if text is None else text
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path


def dump(record):
    return json.dumps(record, separators=(",", ":"))


def with_step(step):
    return {} if step is None else {"step": step}


def torchtitan_line(rank, seq, at, name, kind="event", step=1, **more):
    """A line of torchtitan 0.3's structured log."""
    ts = T0 + at
    return json.dumps({
        "delta_ms": 0.1, "tid": 900 + rank, "rank": rank, "global_rank": rank, "local_rank": rank,
        "source": "training",
        "host_name": "node-a", "pid": 900 + rank, "step": step, "relative_step": step, "time": ts // 10**6,
        "time_ms": ts // 1000, "time_us": ts, "log_type": kind, "log_type_name": name, "event_name": None,
        "caller": "loop.py:9:<module>", "log_file": "loop.py", "log_function": "<module>",
        "log_level": "INFO",
        "logger_name": "torchtitan.structured_logger", "seq_id": seq, "message": name, **more})


def torchtitan_name(rank):
    return f"training.global_rank_{rank}.20261129-132434-SX1PK{rank}.jsonl"


def tool(*args, python=sys.executable, timeout_s=120, **options):
    """Run trace_tools.py; never does a Traceback reach the user."""
    done = subprocess.run([python, str(ROOT / "trace_tools.py"), *map(str, args)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=timeout_s, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def summarize(*args):
    """The numbers of `summarize --json`."""
    done = tool("summarize", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout, parse_constant=refuse_constant)


def export(run, *args):
    """The events that `export` writes, after strict parsing."""
    target = run / "exported.json"
    done = tool("export", run, "-o", target, *args)
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text(), parse_constant=refuse_constant)


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def phase(summary, name):
    return next(p for p in summary["phases"] if p["name"] == name)


def rank_of(summary, rank):
    return next(r for r in summary["ranks"] if r["rank"] == rank)
