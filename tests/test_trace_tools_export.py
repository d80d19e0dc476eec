"""What export writes: strict JSON whose slices nest, each process and track with its name, and nothing half
written."""

import gzip
import json
import os
import random
import subprocess
import sys

import pytest
from conftest import ROOT
from trace_parts import T0, Trace, export, refuse_constant, tool

import trace_tools


def slices(trace, name=None):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and name in (None, e["name"])]


def named(trace, kind):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"
            and e["name"] == kind}


def in_order(trace):
    """The names of the processes as a viewer that obeys process_sort_index stacks them."""
    names = {pid: name for (pid, _), name in named(trace, "process_name").items()}
    places = {e["pid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "process_sort_index"}
    return [name for _, name in sorted((places[pid], name) for pid, name in names.items())]


def ns(event, key):
    return round(event[key] * 1000)


def assert_nested(trace):
    """On each track, two slices are apart or one is inside the other, and no two begin at once: all that is
    drawn."""
    tracks = {}
    for event in slices(trace):
        tracks.setdefault((event["pid"], event["tid"]),
                          []).append((ns(event, "ts"), ns(event, "ts") + ns(event, "dur")))
    for track in tracks.values():
        stack = []
        for begin, end in sorted(track, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1][1] <= begin:
                stack.pop()
            assert end > begin and (not stack or (begin > stack[-1][0] and end <= stack[-1][1]))
            stack.append((begin, end))


def test_tracks_and_their_names(tmp_path):
    for rank in (0, 2, 10):
        trace = Trace(rank, world_size=11, pid=17, host=f"node-{rank}")
        trace.add(ph="D", tid=99, at="prefetcher")
        at = trace.steps(1, 2)
        trace.span("fetch", 5, 50, 1, tid=99).end(at).write(tmp_path)
    worker = Trace(2, world_size=11, pid=18, host="node-2", worker=1, ts=10)
    worker.span("fetch", 100, 200).end(300).write(tmp_path)
    trace = export(tmp_path)
    names = list(named(trace, "process_name").values())
    # Perfetto before v53 sorts them as text.
    assert names == sorted(names) == in_order(trace) == ["rank 00 (node-0, pid 17)", "rank 02 (node-2, pid 17)",
                                      "rank 02 worker 1 (node-2, pid 18)", "rank 10 (node-10, pid 17)"]
    assert len({e["pid"] for e in trace["traceEvents"]}) == 4
    first = slices(trace)[0]["pid"]
    assert [name for (pid, _), name in named(trace, "thread_name").items() if pid == first] == ["step",
        "main", "prefetcher"]
    assert [e["name"] for e in slices(trace) if e["pid"] == first and e["tid"] == 1] == ["step 1", "step 2"]
    assert_nested(trace)


def test_times_are_relative_and_keep_nanoseconds(tmp_path):
    Trace().span("a", 0, 1).span("b", 10**12, 10**12 + 7).end(2 * 10**12).write(tmp_path)
    trace = export(tmp_path)
    assert trace["otherData"]["origin_us"] == T0 and "2026" in trace["otherData"]["origin"]
    (late,) = slices(trace, "b")
    assert (late["ts"], late["dur"]) == (10**12, 7)
    # After eleven days a nanosecond is still told: a child that begins with its parent.
    Trace().b("p", 10**12).span("c", 10**12, 10**12 + 5).e("p", 10**12 + 5).end(2 * 10**12).write(tmp_path)
    trace = export(tmp_path)
    assert ns(slices(trace, "c")[0], "ts") - ns(slices(trace, "p")[0], "ts") == 1


def test_own_work_and_waiting_are_drawn_in_sync_spans(tmp_path):
    trace = Trace().b("backward", 100, 1, sync=True).span("inner", 100, 300, 1).i("ready", 700,
        1).e("backward", 1000, 1)
    trace.b("barrier", 1000, 1, sync=True).e("barrier", 1200, 1).end(1300).write(tmp_path)
    trace = export(tmp_path)
    (own,), (waiting,), (backward,) = slices(trace, "own work"), slices(trace, "waiting"), slices(trace,
        "backward")
    assert ns(own, "ts") + ns(own, "dur") == ns(waiting, "ts") == 700_000
    assert waiting["dur"] == 300 and backward["dur"] == 900
    assert_nested(trace)


def test_abutting_crossing_equal_and_empty_spans(tmp_path):
    trace = Trace()
    trace.b("p", 0).b("c", 0).b("g", 0).e("g", 0).e("c", 0).span("d", 0, 50).span("e", 50, 100).span("f", 100,
        100)
    trace.span("g", 100, 100).e("p", 100).span("q", 100, 100).span("q", 100, 101)
    trace.b("x", 200).b("y", 210).span("in", 215, 220).e("x", 230).span("after", 235, 240).e("y", 250)
    trace.b("x", 300).b("y", 310).b("z", 320).e("x", 330).e("y", 340).e("z", 350)
    trace.end(400).write(tmp_path)
    trace = export(tmp_path)
    assert_nested(trace)
    assert sorted(e["name"] for e in slices(trace)) == sorted("p c g d e f g q q x y in after x y z".split())
    assert all(abs(e["dur"] - {"p": 100, "x": 30, "z": 30}[e["name"]]) < 0.01 for e in slices(trace)
               if e["name"] in "pxz")
    assert "crossing spans" in named(trace, "thread_name").values()


@pytest.mark.parametrize("seed", range(6))
def test_random_spans_of_threads_and_tasks_nest(tmp_path, seed):
    source, trace, at, stacks, expected = random.Random(seed), Trace(), 0, {}, []
    for number in range(1500):
        at += source.choice([0, 0, 1, 1, 7, 200])
        where = source.choice([{}, {"tid": 5}, {"task": "Task-1"}, {"task": "Task-2"},
                               {"task": f"Task-{at % 9}"}])
        stack = stacks.setdefault(str(where), [])
        if stack and (source.random() < 0.5 or len(stack) > 4):
            name, begin = stack.pop(source.randrange(len(stack)) if source.random() < 0.2 else -1)
            trace.add(ph="E", ts=T0 + at, name=name, dur=at - begin, **where)
            expected.append((name, at - begin))
        else:
            stack.append((f"s{number}", at))
            trace.add(ph="B", ts=T0 + at, name=stack[-1][0], **where)
    left = sum(map(len, stacks.values()))
    trace.i("heartbeat", at + 10).write(tmp_path)
    trace = export(tmp_path)
    assert_nested(trace)
    durations = {e["name"]: e["dur"] for e in slices(trace)}
    assert max(abs(durations[name] - us) for name, us in expected) < 0.5
    assert sum(name.endswith(" (unfinished)")
               for name in durations) == left and len(durations) == len(expected) + left


def test_tasks_share_as_few_tracks_as_they_overlap(tmp_path):
    trace = Trace()
    for round_ in range(20):
        for task in range(3):
            trace.b("generate", round_ * 1000 + task, task=f"Task-{round_ * 3 + task}")
        for task in range(3):
            trace.e("generate", round_ * 1000 + 500 + task, task=f"Task-{round_ * 3 + task}")
    trace.end(10**5).write(tmp_path)
    trace = export(tmp_path)
    assert list(named(trace, "thread_name").values()).count("asyncio tasks") == 3
    assert {e["args"]["task"] for e in slices(trace)} == {f"Task-{n}" for n in range(60)}
    assert_nested(trace)


def test_unfinished_lost_and_failed_spans_are_marked(tmp_path):
    trace = Trace().b("epoch", 0).b("step", 10, 3).b("forward", 20, 3).e("forward", 40, 3,
        err="ValueError: x")
    trace.b("optimizer", 50, 3).i("heartbeat", 10**6, args={"rss_mb": 1}).write(tmp_path)
    trace = export(tmp_path)
    names = {e["name"]: e for e in slices(trace)}
    assert names["forward (error)"]["args"]["error"] == "ValueError: x"
    assert {"epoch (unfinished)", "step (unfinished)", "optimizer (unfinished)"} < set(names)
    optimizer = names["optimizer (unfinished)"]
    assert optimizer["ts"] + optimizer["dur"] == 10**6 and "unfinished" in optimizer["args"]
    assert not any(e["name"] == "heartbeat" for e in trace["traceEvents"])
    assert_nested(trace)


def test_spans_that_are_open_where_a_rotated_file_begins(tmp_path):
    old, new = Trace(), Trace(part=2, continues="before", ts=1000)
    old.b("epoch", 0).b("gone", 10).b("step", 20, 1).b("data", 30, 1).i("heartbeat", 40)
    new.name = old.name
    new.lines += [line for line in old.lines if '"name":"epoch"' in line or '"name":"step"' in line]
    new.begins = {name: list(ats) for name, ats in old.begins.items()}
    new.span("forward", 1100, 1200, 1).e("step", 1300, 1).e("epoch", 1400).end(1500).write(tmp_path)
    whole = {"epoch": 1400, "step": 1280, "forward": 100, "step 1": 1500 - 20}
    trace = export(tmp_path)
    assert {e["name"]: e["dur"] for e in slices(trace)} == whole
    # With the part before the one before: what ended in between is drawn as far as it is known.
    old.write(tmp_path, old.name() + ".2")
    trace = export(tmp_path)
    assert_nested(trace)
    assert {e["name"] for e in slices(trace)} == {*whole, "gone (end lost)", "data (end lost)"}


def test_scalars_instants_and_numbers_that_json_does_not_know(tmp_path):
    trace = Trace().span("a", 0, 10, 1, args={"x": "NaN"})
    trace.lines.append('{"ph":"C","ts":%d,"step":1,"args":{"loss":NaN,"lr":0.5,"big":1e999,"who":"me"}}' % (T0 + 5))
    trace.lines.append('{"ph":"B","ts":%d,"name":"b","args":{"norm":-Infinity}}' % (T0 + 6))
    trace.i("saved", 8, 1, args={"file": "x.pt"}).write(tmp_path)
    trace = export(tmp_path)
    assert {e["name"]: list(e["args"].values()) for e in trace["traceEvents"]
            if e["ph"] == "C"} == {"lr": [0.5]}
    (instant,) = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["args"]["args"]) == ("saved", 8, {"file": "x.pt"})
    assert slices(trace, "b (unfinished)")[0]["args"]["norm"] == "-inf"


def test_less_of_it(tmp_path):
    for rank in range(3):
        trace = Trace(rank, world_size=3)
        trace.end(trace.steps(1, 10)).write(tmp_path)
    trace = export(tmp_path, "--steps", "3:4", "--ranks", "1", "--min-us", "1000")
    assert [e["args"]["name"] for e in trace["traceEvents"]
            if e["name"] == "process_name"] == ["rank 1 (node-0, pid 4001)"]
    assert {e["args"]["step"] for e in slices(trace) if "step" in e.get("args", {})} == {3, 4}
    assert not slices(trace, "optimizer") and len(slices(trace, "data")) == 2
    assert {e["name"] for e in slices(trace)} >= {"step 3", "step 4"}


def test_where_the_file_goes(tmp_path):
    trace = Trace()
    path = trace.span("a", 0, 10).end(20).write(tmp_path / "run" / "structured_logs")
    target = tmp_path / "run" / "analysis" / "structured_trace.json"
    for run in (tmp_path / "run", tmp_path / "run" / "structured_logs"):
        done = tool("export", run)
        assert done.returncode == 0 and str(target) in done.stdout and "ui.perfetto.dev" in done.stdout
        assert json.loads(target.read_text(), parse_constant=refuse_constant)
        target.unlink()
    assert tool("export", run, "--gzip").returncode == 0
    assert json.loads(gzip.decompress((target.parent / "structured_trace.json.gz").read_bytes()))
    done = tool("export", path)
    assert done.returncode == 2 and "-o FILE" in done.stderr
    # What is exported there is not read as a trace.
    assert tool("summarize", tmp_path / "run").returncode == 0


def test_nothing_half_written_stays(tmp_path):
    trace = Trace()
    trace.end(trace.steps(1, 2000)).write(tmp_path)
    target = tmp_path / "out" / "trace.json"
    target.parent.mkdir()
    target.write_text("the one before")
    # The file system's limit for a file is reached in the middle.
    done = subprocess.run(["bash", "-c",
                           f'ulimit -f 100; trap "" XFSZ; exec "{sys.executable}" "{ROOT / "trace_tools.py"}" '
                           f'export "{tmp_path}" -o "{target}"'], stderr=subprocess.PIPE, text=True,
                           timeout=60)
    assert done.returncode == 1 and "File too large" in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(target.parent) == ["trace.json"] and target.read_text() == "the one before"


def test_more_than_the_viewer_takes_is_said(tmp_path, capsys, monkeypatch):
    Trace().span("a", 0, 10).end(20).write(tmp_path)
    monkeypatch.setattr(trace_tools.os.path, "getsize", lambda path: 2 * 10**9)
    assert trace_tools.main(["export", str(tmp_path), "-o", str(tmp_path / "x.json")]) == 0
    err = capsys.readouterr().err
    assert "more than 1 GB" in err and "--steps A:B" in err and "--ranks" in err and "--min-us" in err


def profile(folder, rank, pid, at_us, name=None):
    """As torch.profiler writes it: microseconds since a base of its own."""
    base_ns = T0 * 1000 - 10**15
    events = [{"ph": "M", "name": "process_name", "ts": 0, "pid": pid, "tid": 0, "args": {"name": "python"}},
              {"ph": "M", "name": "process_labels", "ts": 0, "pid": pid, "tid": 0, "args": {"labels": "CPU"}},
              {"ph": "M", "name": "thread_name", "ts": 0, "pid": pid, "tid": pid,
               "args": {"name": "thread (python)"}},
              {"ph": "M", "name": "process_labels", "ts": 0, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
              {"ph": "X", "name": "aten::mm", "pid": pid, "tid": pid, "ts": 10**12 + at_us + 0.125,
               "dur": 5.5},
              {"ph": "s", "id": 1, "name": "ac2g", "cat": "ac2g", "pid": pid, "tid": pid,
               "ts": 10**12 + at_us + 1},
              {"ph": "f", "id": 1, "name": "ac2g", "cat": "ac2g", "pid": 0, "tid": 7,
               "ts": 10**12 + at_us + 2, "bp": "e"},
              {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 10**12 + at_us + 2, "dur": 3},
              {"ph": "i", "name": "Iteration Start", "pid": "Traces", "tid": "T", "ts": 0, "s": "g"}]
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / (name or f"run-rank{rank}-step3.json.gz"), "wt") as file:
        json.dump({"schemaVersion": 1, "baseTimeNanoseconds": base_ns, "traceEvents": events}, file)


def test_profiler_traces_on_the_same_clock(tmp_path):
    for rank in range(2):
        trace = Trace(rank, world_size=2)
        trace.end(trace.steps(1, 4)).write(tmp_path / "structured_logs")
        profile(tmp_path / "profiler", rank, 4000 + rank, 100 + rank)
    refused = tool("export", tmp_path / "structured_logs", "-o", tmp_path / "x.json")
    assert refused.returncode == 0
    trace = export(tmp_path, "--profiler")
    kernels = slices(trace, "gemm")
    assert [e["ts"] for e in slices(trace, "aten::mm")] == [100.125, 101.125]
    assert [e["pid"] for e in slices(trace, "aten::mm")] == [4000, 4001]  # below the rank's own tracks
    assert len({e["pid"] for e in kernels}) == 2  # each rank its own GPU
    assert [name.split(" (")[0] for name in in_order(trace)] == ["rank 0", "rank 0 GPU 0", "rank 1", "rank 1 GPU 0"]
    assert len({e["id"] for e in trace["traceEvents"] if e["ph"] in "sf"}) == 2
    (tmp_path / "profiler" / "broken.json").write_text("{")
    done = tool("export", tmp_path, "--profiler", "-o", tmp_path / "x.json")
    assert done.returncode == 0 and "broken.json: 1 x no torch.profiler trace" in done.stderr


def test_profiler_traces_that_are_not_there(tmp_path):
    Trace().span("a", 0, 10).end(20).write(tmp_path)
    done = tool("export", tmp_path, "--profiler")
    assert done.returncode == 0 and "RuntimeProfiler" in done.stderr
