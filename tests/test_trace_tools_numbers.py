"""What summarize computes and prints: percentiles, self time, states and open spans, and text that fits the
screen."""

import os
import pty
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from trace_parts import T0, Trace, phase, rank_of, summarize, tool

import trace_tools


def exact_quantile(values, q):
    ordered, at = sorted(values), q * (len(values) - 1)
    low = ordered[int(at)]
    return low + (ordered[min(int(at) + 1, len(values) - 1)] - low) * (at - int(at))


@pytest.mark.parametrize("draw", [
    lambda r: r.randrange(1, 50), lambda r: int(r.lognormvariate(9, 2)), lambda r: r.choice([0, 10, 10**6]),
    lambda r: int(r.uniform(1, 6e10)), lambda r: int(10 ** r.uniform(0, 10))])
def test_percentiles_are_exact_to_one_per_cent(tmp_path, draw):
    source, trace, at, durations = random.Random(7), Trace(), 0, []
    for step in range(1, 1200):
        durations.append(draw(source))
        trace.span("work", at, at + durations[-1], step)
        at += durations[-1] + 3
    trace.end(at).write(tmp_path)
    found = phase(summarize(tmp_path), "work")
    assert found["count"] == len(durations) and found["max_us"] == max(durations)
    assert durations[found["max_step"] - 1] == max(durations)
    for key, q in (("median_us", 0.5), ("p95_us", 0.95)):
        assert found[key] == pytest.approx(exact_quantile(durations, q), rel=0.01, abs=0.1)


def test_few_values_are_interpolated(tmp_path):
    Trace().span("a", 0, 1000).span("a", 2000, 4000).span("b", 5000, 5700).end(9000).write(tmp_path)
    found = summarize(tmp_path)
    assert phase(found, "a")["median_us"] == pytest.approx(1500, rel=0.001)
    assert phase(found, "b")["median_us"] == phase(found, "b")["p95_us"] == pytest.approx(700, rel=0.001)


def random_spans(source, trace, tid, crossing):
    """Random spans of one thread: [(name, begin, end)]; begins and ends at distinct times."""
    at, stack, spans = 10 + (tid or 0), [], []
    where = {} if tid is None else {"tid": tid}
    for _ in range(300):
        at += source.randrange(5, 400)
        if stack and (len(stack) > 5 or source.random() < 0.5):
            index = source.randrange(len(stack)) if crossing else -1
            name, begin = stack.pop(index)
            trace.add(ph="E", ts=T0 + at, name=name, dur=at - begin, **where)
            spans.append((name, begin, at))
        else:
            name = source.choice("abcdefgh")
            if any(name == other for other, _ in stack):
                continue
            stack.append((name, at))
            trace.add(ph="B", ts=T0 + at, name=name, **where)
    while stack:
        at += source.randrange(5, 400)
        name, begin = stack.pop()
        trace.add(ph="E", ts=T0 + at, name=name, dur=at - begin, **where)
        spans.append((name, begin, at))
    return spans


@pytest.mark.parametrize("crossing", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_self_time_is_the_time_as_the_innermost_span(tmp_path, seed, crossing):
    """Against the definition: at each moment of a thread the span that began last of those open has the
    time."""
    source, trace, expected = random.Random(seed), Trace(), {}
    for tid in (None, 71):
        spans = random_spans(source, trace, tid, crossing)
        moments = sorted({t for _, begin, end in spans for t in (begin, end)})
        for begin, end in zip(moments, moments[1:]):
            inside = [(b, name) for name, b, e in spans if b <= begin and e >= end]
            if inside:
                name = max(inside)[1]
                expected[name] = expected.get(name, 0) + end - begin
    trace.lines[1:] = sorted(trace.lines[1:], key=lambda line: int(line.split('"ts":')[1].split(",")[0]))
    trace.end(10**6).write(tmp_path)
    found = summarize(tmp_path)
    assert {p["name"]: p["self_us"] for p in found["phases"]} == expected
    assert found["open_spans"] == [] and found["unreadable"] == []


def test_what_happens_inside_an_evaluation_is_no_part_of_a_step(tmp_path):
    trace = Trace()
    at = trace.steps(1, 20)
    trace.b("evaluate", at, 20)
    for batch in range(10):
        trace.span("forward", at + batch * 10**6, at + batch * 10**6 + 900_000, 20)
    trace.e("evaluate", at + 10**7, 20)
    trace.end(trace.steps(21, 40, at=at + 10**7)).write(tmp_path)
    found = summarize(tmp_path)
    assert phase(found, "forward")["count"] == 50 and phase(found, "evaluate")["self_us"] == 10**6
    assert rank_of(found, 0)["step_own_us"] == pytest.approx(2000 + 3010 + 8000 + 510, rel=0.01)


def test_shares_add_up_to_the_run(tmp_path):
    trace = Trace().b("epoch", 0)
    at = trace.steps(1, 100, at=50)
    trace.e("epoch", at + 10).end(at + 20).write(tmp_path)
    assert sum(p["share_percent"] for p in summarize(tmp_path)["phases"]) == pytest.approx(100, abs=0.1)


def test_the_longest_is_where_it_was(tmp_path):
    for rank in range(3):
        trace = Trace(rank, world_size=3)
        trace.end(trace.steps(6, 10, at=trace.steps(1, 5, data=2000), data=9000 if rank == 1 else 2000))
        trace.write(tmp_path)
    data = phase(summarize(tmp_path), "data")
    assert (data["max_us"], data["max_rank"], data["max_step"]) == (9000, 1, 6)


def test_only_some_steps_ranks_and_one_phase(tmp_path):
    for rank in range(3):
        trace = Trace(rank, world_size=3)
        at = trace.steps(1, 30)
        trace.span("late", at, at + 5, 30, tid=9).end(at + 100).write(tmp_path)
    found = summarize(tmp_path, "--steps", "11:20")
    assert phase(found, "data")["count"] == 30 and phase(found, "step")["self_us"] == 3 * 10 * 20
    assert not any(p["name"] == "late" for p in found["phases"])
    assert phase(summarize(tmp_path, "--steps", "30"), "late")["self_us"] == 15
    found = summarize(tmp_path, "--ranks", "0,2", "--steps", ":5")
    assert [r["rank"] for r in found["ranks"]] == [0, 2] and phase(found, "data")["count"] == 10
    assert found["warnings"] == []
    assert [p["name"] for p in summarize(tmp_path, "--phase", "data")["phases"]] == ["data"]
    refused = tool("summarize", tmp_path, "--phase", "dta")
    assert refused.returncode == 1 and "did you mean data?" in refused.stderr


# ---- States and open spans


LOOP = """if 1:
    import os, signal, sys, threading, time
    sys.path.insert(0, sys.argv[1])
    import tracing
    what, rank = sys.argv[3], int(os.environ["RANK"])
    tracing.init_structured_logger("train", sys.argv[2], heartbeat_s=0.2, stall_timeout_s=1)
    def inside():
        print("inside", flush=True)
        time.sleep(600)
    with tracing.log_trace_span("epoch"):
        for step in range(1, 6):
            tracing.set_step(step)
            with tracing.log_trace_span("step"):
                with tracing.log_trace_span("data"):
                    if step == 5 and what == "raise":
                        raise ValueError("bad batch: \\x1b[31m\\n7")
                    if step == 5 and what in ("stay", "kill"):
                        inside()
                with tracing.log_trace_span("backward", sync=True) as span:
                    span.ready()
                    if step == 5 and what == "wait":
                        inside()
    tracing.close_structured_logger()
"""


def start(folder, rank, what, world=2):
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
           "GROUP_RANK": "0",
           "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "job"}
    return subprocess.Popen([sys.executable, "-c", LOOP, str(ROOT), str(folder), what], env=env,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def until_inside(process):
    assert process.stdout.readline() == "inside\n"


def later(folder, seconds=120):
    """The summary as it would be after the processes have been silent for so long."""
    run = trace_tools.Run([str(folder)]).read()
    return trace_tools.summarize(run, now=time.time() + seconds)


def stop(*processes):
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_that_is_going_on(tmp_path):
    stayer, waiter = start(tmp_path, 0, "stay"), start(tmp_path, 1, "wait")
    try:
        until_inside(stayer), until_inside(waiter)
        found = summarize(tmp_path)
        assert found["state"] == "running" and rank_of(found, 1)["state"] == "waiting"
        assert rank_of(found, 0)["state"] in ("running", "stalled") and rank_of(found,
            0)["last_phase"] == "data"
        innermost = {s["rank"]: s for s in reversed(found["open_spans"])}
        assert innermost[0]["name"] == "data" and innermost[0]["parents"] == ["epoch", "step"]
        assert innermost[1]["ready"] is True and innermost[0]["age_s"] >= 0
        # After the stall time-out the tracer has written where it is.
        deadline = time.monotonic() + 60
        while not (rank_of(found, 0)["state"] == "stalled" and any(s["stack"] for s in found["open_spans"])):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
            found = summarize(tmp_path)
        stack = next(s for s in found["open_spans"] if s["rank"] == 0)["stack"]
        assert any(frame.endswith(":inside") for frame in stack)
        assert "rank 0: data, step 5" in tool("summarize", tmp_path).stdout
    finally:
        stop(stayer, waiter)


def test_killed_terminated_failed_and_ended(tmp_path):
    for what, number, state in (("kill", signal.SIGKILL, "killed"), ("kill", signal.SIGTERM, "terminated"),
                                ("raise", None, "failed"), ("ok", None, "ended")):
        folder = tmp_path / state
        other, process = start(folder, 0, "ok"), start(folder, 1, what)
        try:
            if number is not None:
                until_inside(process)
                process.send_signal(number)
            other.wait(60), process.wait(60)
        finally:
            stop(other, process)
        found = later(folder)
        assert (rank_of(found, 1)["state"], rank_of(found, 0)["state"], found["state"]) == (state, "ended",
            "ended")
        assert rank_of(found, 1)["last_step"] == 5
        if state == "terminated":
            assert any(frame.endswith(":inside") for frame in found["open_spans"][0]["stack"])
        if state == "failed":
            (error,) = found["errors"]
            assert (error["rank"], error["name"], error["step"]) == (1, "data", 5)
            assert error["err"].startswith("ValueError: bad batch") and error["frames"]
        text = tool("summarize", folder).stdout
        assert "\033" not in text and ("bad batch" in text) == (state == "failed")


# ---- Text


def many_ranks(folder, num_ranks, **odd):
    for rank in range(num_ranks):
        trace = Trace(rank, world_size=num_ranks, host=f"node-{rank // 8:03d}", local_rank=rank % 8)
        at = trace.steps(1, 4, **odd.get(f"rank{rank}", {}))
        if rank == 700:
            trace.b("forward", at, 4).write(folder)
            continue
        trace.end(at).write(folder)


def test_a_thousand_ranks_fit_on_a_screen(tmp_path):
    many_ranks(tmp_path, 1024, rank33={"data": 40_000})
    done = tool("summarize", tmp_path)
    lines = done.stdout.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 100
    assert any(re.match(r"\s+33 ", line) and "node-004" in line for line in lines)
    assert any("0-32,34-699,701-1023" in line for line in lines)
    assert any(re.match(r"\s+700\s+(killed|silent)", line) for line in lines)
    assert "rank 700: forward, step 4" in done.stdout


def test_long_and_strange_names_fit_too(tmp_path):
    trace = Trace(host="a-very-long-host-name.with.a.domain.example.org")
    for number in range(60):
        trace.span(f"{'x' * 80}\x1b[2J{number}", number * 100, number * 100 + 50, 10**7)
    trace.span("völlig ünüblich 🚀", 10**5, 2 * 10**5).end(10**6).write(tmp_path)
    done = tool("summarize", tmp_path, "--top", "5", env={**os.environ, "PYTHONUTF8": "1"})
    assert max(map(len, done.stdout.splitlines())) <= 100 and "\x1b" not in done.stdout
    assert "and 56 more (--top N)" in done.stdout
    done = tool("summarize", tmp_path,
                env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert done.returncode == 0 and "v\\xf6llig" in done.stdout


def test_colour_only_on_a_terminal(tmp_path):
    trace = Trace(world_size=2)
    trace.end(trace.steps(1, 3)).write(tmp_path)
    assert "\033[" not in tool("summarize", tmp_path, env={**os.environ, "TERM": "xterm"}).stdout
    for extra, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        master, slave = pty.openpty()
        environment = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **extra}
        subprocess.run([sys.executable, str(ROOT / "trace_tools.py"), "summarize", str(tmp_path)],
                       env=environment,
                       stdout=slave, timeout=60, check=True)
        os.close(slave)
        text = b""
        try:
            while True:
                text += os.read(master, 65536)
        except OSError:  # Linux says EIO at the end
            pass
        os.close(master)
        assert (b"\033[1m" in text) == coloured and b"missing" in text


def test_progress_is_told_when_it_takes_long(tmp_path, capfd, monkeypatch):
    for rank in range(4):
        Trace(rank, world_size=4).span("data", 0, 10, 1).end(20).write(tmp_path)
    now = iter(range(0, 10**6, 5))
    monkeypatch.setattr(trace_tools.time, "monotonic", lambda: float(next(now)))
    assert trace_tools.main(["summarize", str(tmp_path), "--json"]) == 0
    out, err = capfd.readouterr()
    assert "reading process 1 of 4" in err and "reading" not in out
    monkeypatch.undo()
    assert trace_tools.main(["summarize", str(tmp_path), "--json"]) == 0
    assert "reading" not in capfd.readouterr().err


def test_durations_are_read_at_a_glance():
    known = {0: "0 us", 850: "850 us", 12_345: "12.3 ms", 999_600: "1.00 s", 4_561_000: "4.56 s",
             123e6: "2 m 03 s",
             3720e6: "1 h 02 m", 99_949: "99.9 ms", 99_951_000: "1 m 40 s", None: "-"}
    assert {us: trace_tools.format_us(us) for us in known} == known
