"""What somebody who reads a verdict for the first time must not be misled by: all through the command line,
as it comes. Simulated runs, cut where the fault was, and moved to the present where they still go on."""

import json
import os
import subprocess
import sys
import time

import pytest
from test_verdict_stops import CLOSED, STEP, Broken
from trace_parts import Trace, rank_of, summarize, tool

from simulate import simulate

S = 1_000_000
INTERRUPT = "KeyboardInterrupt: "


class Seen(Broken):
    """A broken run as `summarize` shows it."""

    def look(self, after_s=1000.0):
        """Read so long after the newest record."""
        newest = max(line["ts"] for lines in self.lines.values() for line in lines)
        shift = round((time.time() - after_s) * 1e6) - newest
        for rank, lines in self.lines.items():
            self.paths[rank].write_text("".join(
                json.dumps(dict(line, ts=line["ts"] + shift)) + "\n" for line in lines))
        self.summary = summarize(self.folder)
        found = self.summary["findings"][0]
        return found["kind"], found["ranks"], found["phase"], found["steps"]["first"]

    def text(self):
        return " ".join(tool("summarize", self.folder).stdout.split())

    def hang(self, rank, phase, for_s):
        self.cut(rank, phase).cut_others(rank)
        for other in self.lines:
            self.beat(other, round(for_s * S))
        return self

    def unwind(self, rank, phase, error, how="exception", **args):
        """An exception in a phase, on its way out through all spans around it."""
        kind, _, message = error.partition(": ")
        self.add(rank, "E", phase, 2 * S, dur=2 * S, err=error)
        self.add(rank, "E", "epoch", 100, dur=9 * S, err=error)
        return self.add(rank, "i", "process_end", 500,
                        args={"how": how, "type": kind, "message": message, **args})


@pytest.fixture
def broken(tmp_path):
    seen = Seen(tmp_path)
    for lines in seen.lines.values():  # a span around everything
        lines.insert(1, {"ph": "B", "ts": lines[0]["ts"], "name": "epoch"})
    return seen


def confidence(seen):
    return seen.summary["findings"][0]["confidence"]


def test_a_hang_is_a_stall_long_before_the_time_out(broken):
    assert broken.hang(1, "fwd", 20).look(after_s=2) == ("stall", [1], "fwd", STEP)
    assert confidence(broken) == "medium" and broken.summary["state"] == "running"
    assert rank_of(broken.summary, 1)["state"] == "stalled"
    assert [f["kind"] for f in broken.summary["findings"]] == ["stall"]


def test_the_collective_that_hangs_is_nobodys_fault(broken):
    broken.cut_others(None)
    for rank in range(4):
        broken.beat(rank, 20 * S)
    assert broken.look(after_s=2) == ("stall", [0, 1, 2, 3], "bwd", STEP)
    assert confidence(broken) == "low"


@pytest.mark.parametrize("what", ["soon", "usual", "evaluate", "new"])
def test_what_may_take_long_is_no_stall(broken, what):
    if what == "soon":
        broken.cut(2, "load").cut_others(2)
        for rank in range(4):
            broken.beat(rank, 3 * S, every_us=S)
    elif what == "usual":  # a load took half as long before
        for other, records in broken.lines.items():
            name = "load" if other == 2 else "bwd"
            since = next(i for i, r in enumerate(records) if r.get("step") == 5 and r["ph"] == "E"
                         and r["name"] == name)
            records[since]["dur"] += 15 * S
            for record in records[since:]:
                record["ts"] += 15 * S
        broken.hang(2, "load", 20)
    else:
        name = "evaluate" if what == "evaluate" else "resample"
        broken.cut(2, "load", "E").add(2, "B", name).cut_others(2)
        for rank in range(4):
            broken.beat(rank, 20 * S)
    assert broken.look(after_s=1)[0] not in ("stall", "crash", "killed")


def test_a_stall_that_ctrl_c_ended(broken):
    """The hung rank was interrupted where it hung; the others lost it, or were ended."""
    broken.hang(1, "fwd", 20)
    broken.unwind(1, "fwd", INTERRUPT, frames=["train.py:9:wait"])
    broken.unwind(0, "bwd", CLOSED).unwind(2, "bwd", INTERRUPT).signal_stack(3)
    assert broken.look() == ("stall", [1], "fwd", STEP)
    assert "Ctrl-C (KeyboardInterrupt)" in broken.evidence() and "train.py:9:wait" in broken.evidence()
    assert "mend that error" not in broken.text()
    assert [rank_of(broken.summary, r)["last_phase"] for r in range(4)] == ["bwd", "fwd", "bwd", "bwd"]
    assert [rank_of(broken.summary, r)["state"] for r in range(4)] == [
        "failed", "stalled", "terminated", "terminated"]


def test_a_stall_that_sigterm_ended(broken):
    broken.hang(1, "fwd", 20)
    for rank in range(4):
        broken.signal_stack(rank)
    assert broken.look() == ("stall", [1], "fwd", STEP)
    assert "ended by SIGTERM" in broken.evidence()


def test_a_stall_after_the_time_out_survives_its_interruption(broken):
    broken.hang(1, "fwd", 130)
    for rank in range(4):
        broken.unwind(rank, "fwd" if rank == 1 else "bwd", INTERRUPT)
    assert broken.look() == ("stall", [1], "fwd", STEP) and confidence(broken) == "high"


def test_ctrl_c_is_no_crash(broken):
    for rank in range(4):
        broken.cut(rank, "fwd").add(rank, "E", "fwd", dur=1000, err=INTERRUPT)
        broken.add(rank, "i", "process_end", args={"how": "exception", "type": "KeyboardInterrupt"})
    assert broken.look()[:2] == ("terminated", [0, 1, 2, 3])
    assert "4 of 4 ranks got Ctrl-C" in broken.evidence() and "SIGTERM" not in broken.text()


def test_others_that_wait_for_a_crashed_rank_are_no_stall(broken):
    broken.cut(2, "fwd").cut_others(2).unwind(2, "fwd", "ValueError: sample 17")
    for rank in (0, 1, 3):
        broken.beat(rank, 20 * S).signal_stack(rank)
    assert broken.look() == ("crash", [2], "fwd", STEP)
    assert rank_of(broken.summary, 2)["last_phase"] == "fwd"


def test_others_that_wait_for_a_killed_rank_are_no_stall(broken):
    broken.cut(2, "fwd").cut_others(2)
    for rank in (0, 1, 3):
        broken.beat(rank, 20 * S).signal_stack(rank)
    assert broken.look() == ("killed", [2], "fwd", STEP)
    assert rank_of(broken.summary, 2)["last_phase"] == "fwd"


@pytest.mark.parametrize("after_s, words", [
    (2, "look again in 2"), (12, "though its heartbeats come every 5 s")])
def test_killed_a_moment_ago(tmp_path, after_s, words):
    broken = Seen(tmp_path, world=2).cut(1, "fwd").cut_others(1).fail(0, "bwd", CLOSED, after_us=25_000)
    assert broken.look(after_s) == ("killed", [1], "fwd", STEP)
    text = broken.text()
    assert words in text and "look again in" in text


def test_killed_on_this_machine_is_known_at_once(tmp_path):
    """Its process is gone: there is no need to wait for missing heartbeats."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    broken = Seen(tmp_path, world=2, hosts=[os.uname().nodename] * 2)
    with open("/proc/sys/kernel/random/boot_id") as file:
        for lines in broken.lines.values():
            lines[0].update(boot_id=file.read().strip() or lines[0]["boot_id"], pid=done.pid)
            file.seek(0)
    broken.cut(1, "fwd").cut_others(1).fail(0, "bwd", CLOSED, after_us=25_000)
    assert broken.look(after_s=2) == ("killed", [1], "fwd", STEP) and confidence(broken) == "high"
    assert rank_of(broken.summary, 1)["state"] == "killed"


@pytest.mark.parametrize("every", [2, 4])
def test_a_loader_that_is_late_in_turn_is_a_straggler(tmp_path, every):
    simulate(tmp_path, extra=lambda rank, step, phase: 40_000 * (
        rank == 1 and phase == "load" and step % every == 0))
    found = summarize(tmp_path)["findings"]
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]["period"]) for f in found] == [
        ("straggler", [1], "load", every)]
    assert f"every {every} steps" in found[0]["evidence"][0] and "span" not in found[0]["advice"]


def test_steps_that_are_not_there(tmp_path):
    Trace().end(Trace().steps(1, 4)).write(tmp_path / "empty")
    trace = Trace()
    trace.end(trace.steps(1, 4)).write(tmp_path / "run")
    backwards = tool("summarize", tmp_path / "run", "--steps", "200:100")
    assert backwards.returncode == 2 and "did you mean 100:200" in backwards.stderr
    for command in (["summarize"], ["export", "-o", tmp_path / "x.json"]):
        done = tool(*command, tmp_path / "run", "--steps", "100:200")
        assert done.returncode == 1 and "there are 1 to 4" in done.stderr and not done.stdout
        done = tool(*command, tmp_path / "empty", "--steps", "1:")
        assert done.returncode == 1 and "there are none" in done.stderr
    assert not (tmp_path / "x.json").exists()


def test_an_export_without_profiler_traces(tmp_path):
    Trace().span("a", 0, 10).end(20).write(tmp_path)
    done = tool("export", tmp_path, "--profiler")
    assert done.returncode == 0 and "events" in done.stdout
    assert "note: no torch.profiler traces" in done.stderr


@pytest.mark.parametrize("command", ["summarize", "export"])
def test_an_unknown_option_shows_its_commands_usage(tmp_path, command):
    done = tool(command, tmp_path, "--rank", "1", "--stpes", "3")
    assert done.returncode == 2 and f"{command} [-h]" in done.stderr and "--stpes" in done.stderr


def test_the_error_of_a_loader_worker_is_its_last_line(broken):
    text = ("OSError: Caught OSError in DataLoader worker process 0.\n"
            "Original Traceback (most recent call last):\n"
            '  File "/x/worker.py", line 7, in fetch\nOSError: [Errno 5] Input/output error\n')
    broken.cut(2, "load").cut_others(2).unwind(2, "load", text)
    assert broken.look() == ("crash", [2], "load", STEP)
    assert "load, step 40: OSError: [Errno 5] Input/output error (OSError: Caught" in broken.evidence()
    assert "?" not in broken.text()


def test_waiting_by_chance_is_nobodys_fault_but_not_nothing(tmp_path):
    simulate(tmp_path, world=16, noise_us=2000)
    found = summarize(tmp_path)["findings"][0]
    assert found["kind"] == "healthy" and found["advice"].startswith("no rank is to blame")


def test_small_findings_are_not_told_beside_a_fault(tmp_path):
    slow = Seen(tmp_path, extra=lambda rank, step, phase: 5000 * (rank == 3 and phase == "fwd"))
    slow.cut(2, "load", step=45).cut_others(2).fail(2, "load", "ValueError: sample 17 is empty")
    assert slow.look()[0] == "crash" and len(slow.summary["findings"]) == 1
