"""What the verdict says about runs that ended badly or stand still: from simulated traces, cut where the
fault was."""

import json
import sys

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

import trace_tools  # noqa: E402
from simulate import simulate  # noqa: E402

STEP = 40
CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:2345"


class Broken:
    """A simulated run of which each rank's trace ends where it is told to."""

    def __init__(self, folder, world=4, **more):
        simulate(folder, world=world, num_steps=60, **more)
        self.folder, self.lines, self.paths = folder, {}, {}
        for path in sorted((folder / "structured_logs").glob("*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            self.lines[lines[0]["rank"]], self.paths[lines[0]["rank"]] = lines, path

    def cut(self, rank, phase, ph="B", step=STEP):
        """The rank's last record is the begin of a phase (or its end, ph="E"; the ready in it,
        ph="ready")."""
        lines = self.lines[rank]
        at = next(i for i, r in enumerate(lines) if r.get("step") == step and r.get("name") == phase
                  and r["ph"] == ("B" if ph == "ready" else ph))
        at += next(i for i, r in enumerate(lines[at:]) if r.get("name") == "ready") if ph == "ready" else 0
        del lines[at + 1:]
        return self

    def cut_others(self, rank):
        """All others wait for that rank in the meeting."""
        for other in self.lines:
            if other != rank:
                self.cut(other, "bwd", "ready")
        return self

    def add(self, rank, ph, name, after_us=1000, **fields):
        last = self.lines[rank][-1]
        self.lines[rank].append({"ph": ph, "ts": last["ts"] + after_us, "name": name,
                                 "step": last.get("step", STEP), **fields})
        return self

    def fail(self, rank, phase, error, after_us=1000):
        kind, _, message = error.partition(": ")
        self.add(rank, "E", phase, after_us, dur=after_us, err=error)
        return self.add(rank, "i", "process_end", 500,
                        args={"how": "exception", "type": kind, "message": message})

    def beat(self, rank, until_us, every_us=5_000_000):
        """Heartbeats for so long after the last record."""
        start = self.lines[rank][-1]["ts"]
        for us in range(every_us, until_us + 1, every_us):
            self.lines[rank].append({"ph": "i", "ts": start + us, "name": "heartbeat",
                                     "args": {"rss_mb": 100, "idle_s": us / 1e6, "lost": 0}})
        return self

    def signal_stack(self, rank):
        """What faulthandler writes in C when SIGTERM ends a process."""
        return self.stacks(rank, 'Current thread 0x00007f00 (most recent call first):\n'
                                 '  File "/x/loop.py", line 7 in train\n')

    def stacks(self, rank, text):
        self.paths[rank].with_name(self.paths[rank].name.replace(".jsonl", ".stacks.txt")).write_text(text)
        return self

    def verdict(self, after_s=100_000.0):
        for rank, lines in self.lines.items():
            self.paths[rank].write_text("".join(json.dumps(line) + "\n" for line in lines))
        newest = max(line["ts"] for lines in self.lines.values() for line in lines)
        self.summary = trace_tools.summarize(trace_tools.Run([str(self.folder)]).read(), now=newest / 1e6
                                             + after_s)
        found = self.summary["findings"][0]
        return found["kind"], found["ranks"], found["phase"], found["steps"]["first"]

    def evidence(self):
        return "\n".join(self.summary["findings"][0]["evidence"])


def test_killed_among_victims_that_tell_it_first(tmp_path):
    broken = Broken(tmp_path).cut(1, "fwd").cut_others(1)
    for rank in (0, 2):
        broken.fail(rank, "bwd", CLOSED, after_us=25_000)
    broken.signal_stack(3)
    assert broken.verdict() == ("killed", [1], "fwd", STEP)
    assert "victims: rank 0,2 (RuntimeError" in broken.evidence(
        ) and "rank 3, ended by SIGTERM" in broken.evidence()


def test_killed_while_waiting_like_all_others(tmp_path):
    broken = Broken(tmp_path).cut_others(None)
    for rank in (0, 1, 3):
        broken.fail(rank, "bwd", CLOSED)
    assert broken.verdict() == ("killed", [2], "bwd", STEP)


def test_an_exception_is_the_crash_though_victims_came_first(tmp_path):
    broken = Broken(tmp_path).cut(2, "fwd").cut_others(2)
    broken.fail(2, "fwd", "ValueError: sample 17 is empty", after_us=900_000)
    for rank in (0, 1, 3):
        broken.fail(rank, "bwd", CLOSED, after_us=20_000)
    assert broken.verdict() == ("crash", [2], "fwd", STEP)
    assert "sample 17 is empty" in broken.evidence() and "victims: rank 0-1,3" in broken.evidence()


def test_all_fail_alike(tmp_path):
    broken = Broken(tmp_path)
    for rank in range(4):
        broken.cut(rank, "opt").fail(rank, "opt", "FloatingPointError: loss is nan")
    assert broken.verdict() == ("crash", [0, 1, 2, 3], "opt", STEP)


def test_a_crash_in_c(tmp_path):
    broken = Broken(tmp_path).cut(1, "fwd").cut_others(1)
    broken.stacks(1, 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f00 (most recent call '
                     'first):\n  File "/x.py", line 7 in f\n')
    for rank in (0, 2, 3):
        broken.fail(rank, "bwd", CLOSED)
    assert broken.verdict() == ("crash", [1], "fwd", STEP)


def test_an_abort_in_c_while_ranks_meet(tmp_path):
    """Tensors of different sizes: gloo ends one process in C, and all others lose it."""
    broken = Broken(tmp_path).cut_others(None)
    broken.stacks(2, 'Fatal Python error: Aborted\n\nThread 0x00007f00 (most recent call first):\n'
                     '  File "/x/torch/distributed/c10d.py", line 7 in all_reduce\n')
    for rank in (0, 1, 3):
        broken.fail(rank, "bwd", CLOSED)
    assert broken.verdict() == ("crash", [2], "bwd", STEP)
    assert "Aborted" in broken.evidence() and "victims: rank 0-1,3" in broken.evidence()
    assert "sizes" in broken.summary["findings"][0]["advice"]
    assert {r["rank"]: r["state"] for r in broken.summary["ranks"]}[2] == "failed"


def test_left_early(tmp_path):
    broken = Broken(tmp_path).cut(3, "opt", "E").add(3, "i", "process_end", args={"how": "ok"})
    for rank in range(3):
        broken.cut(rank, "bwd", "ready", step=STEP + 1).fail(rank, "bwd", CLOSED)
    assert broken.verdict() == ("left_early", [3], "opt", STEP)


@pytest.mark.parametrize("after_s", [1, 1000])
def test_left_early_while_the_others_still_wait(tmp_path, after_s):
    """Told as soon as a wait is absurd, and also when the others were killed in it."""
    broken = Broken(tmp_path).cut(3, "opt", "E").add(3, "i", "process_end", args={"how": "ok"})
    for rank in range(3):
        broken.cut(rank, "bwd", "ready", step=STEP + 1).beat(rank, 40_000_000)
    assert broken.verdict(after_s) == ("left_early", [3], "opt", STEP)
    assert "rank 0-2 wait in bwd" in broken.evidence()


def test_terminated_from_outside(tmp_path):
    broken = Broken(tmp_path)
    for rank in range(4):
        broken.cut(rank, "fwd").signal_stack(rank)
    assert broken.verdict()[:2] == ("terminated", [0, 1, 2, 3])


def test_everything_ended_at_once(tmp_path):
    broken = Broken(tmp_path)
    for rank in range(4):
        broken.cut(rank, ["load", "fwd", "bwd", "opt"][rank])
    assert broken.verdict()[:2] == ("ended_abruptly", [0, 1, 2, 3])


def test_a_lost_host(tmp_path):
    broken = Broken(tmp_path, hosts=["a", "a", "b", "b"])
    for rank in (2, 3):
        broken.cut(rank, "fwd")
    for rank in (0, 1):
        broken.cut(rank, "bwd", "ready").fail(rank, "bwd", CLOSED, after_us=5_000_000)
    assert broken.verdict()[:2] == ("killed", [2, 3])


@pytest.mark.parametrize("after_s", [0.5, 100_000.0])
def test_stalled_in_own_work(tmp_path, after_s):
    """While it stands, and when somebody has ended it."""
    broken = Broken(tmp_path).cut(2, "load").cut_others(2)
    for rank in range(4):
        broken.beat(rank, 130_000_000)
    assert broken.verdict(after_s) == ("stall", [2], "load", STEP)
    assert "rank 0-1,3 wait in bwd" in broken.evidence() and "heartbeats go on" in broken.evidence()
    assert broken.summary["findings"][0]["cost_s"] == pytest.approx(130, abs=2)
    assert [r["state"] for r in broken.summary["ranks"]] == (
        ["waiting", "waiting", "stalled", "waiting"] if after_s < 1
        else ["silent", "silent", "stalled", "silent"])


def test_stalled_before_it_is_ready(tmp_path):
    broken = Broken(tmp_path).cut(1, "bwd").cut_others(1)
    for rank in range(4):
        broken.beat(rank, 130_000_000)
    assert broken.verdict() == ("stall", [1], "bwd", STEP)


@pytest.mark.parametrize("alive_s, told", [(28, "stall"), (0, "killed")])
def test_who_lives_at_the_others_time_out_stalled(tmp_path, alive_s, told):
    """The group's time-out is shorter than the stall time-out, and one step took long; the rank is then killed."""
    broken = Broken(tmp_path, extra=lambda rank, step, name: 20e6 * (step == 5 and name == "load"))
    broken.cut(1, "load").cut_others(1)
    broken.beat(1, alive_s * 1_000_000)
    for rank in (0, 2, 3):
        broken.fail(rank, "bwd", "RuntimeError: Timed out waiting 30000ms for recv operation to complete",
                    after_us=30_000_000)
    assert broken.verdict() == (told, [1], "load", STEP)


def test_a_time_out_in_own_work_is_a_crash(tmp_path):
    broken = Broken(tmp_path).cut(1, "load").cut_others(1).cut(3, "fwd").beat(3, 30_000_000)
    broken.fail(1, "load", "RuntimeError: DataLoader timed out after 30 seconds", after_us=30_000_000)
    for rank in (0, 2):
        broken.fail(rank, "bwd", CLOSED, after_us=30_000_000)
    assert broken.verdict() == ("crash", [1], "load", STEP)


def test_frozen(tmp_path):
    """All wait in the same meeting; the heartbeats of one have stopped."""
    broken = Broken(tmp_path).cut_others(None).beat(3, 5_000_000)
    for rank in (0, 1, 2):
        broken.beat(rank, 130_000_000)
    assert broken.verdict() == ("stall", [3], "bwd", STEP)
    assert "heartbeats stopped" in broken.evidence()


def test_the_collective_itself(tmp_path):
    broken = Broken(tmp_path).cut_others(None)
    for rank in range(4):
        broken.beat(rank, 130_000_000)
    assert broken.verdict() == ("stall", [0, 1, 2, 3], "bwd", STEP)
    assert "no rank is to blame" in broken.evidence()
    assert "flight recorder" in broken.summary["findings"][0]["advice"]


def test_not_yet_a_stall(tmp_path):
    broken = Broken(tmp_path).cut(2, "load").cut_others(2)
    for rank in range(4):
        broken.beat(rank, 3_000_000, every_us=1_000_000)
    assert broken.verdict(after_s=1.0)[0] == "healthy"
    assert broken.summary["state"] == "running"


def test_a_rank_that_never_came(tmp_path):
    broken = Broken(tmp_path)
    broken.paths.pop(1).unlink()
    broken.lines.pop(1)
    for rank in (0, 2, 3):
        del broken.lines[rank][1:]
        broken.add(rank, "B", "join", sync=True, step=-1)
        broken.beat(rank, 130_000_000)
    assert broken.verdict(1.0)[:2] == ("stall", [1])


def test_a_skipped_meeting(tmp_path):
    """Rank 2 goes on to the next meeting while the others are in the one that it skipped."""
    broken = Broken(tmp_path)
    for rank in range(4):
        broken.cut(rank, "opt")
        for step in (STEP - 2, STEP - 1, STEP):  # a second meeting in each of these steps
            if not (rank == 2 and step == STEP):
                at = next(i for i, r in enumerate(broken.lines[rank]) if r.get("step") == step
                          and r["ph"] == "B" and r["name"] == "opt")
                ts = broken.lines[rank][at]["ts"]
                meeting = [{"ph": "B", "ts": ts, "name": "share", "step": step, "sync": True}]
                meeting += [{"ph": "E", "ts": ts + 5, "name": "share", "step": step,
                             "dur": 5}] if step < STEP else []
                broken.lines[rank][at:at] = meeting
                if step == STEP:
                    del broken.lines[rank][at + 1:]
    broken.lines[2].append({"ph": "B", "ts": broken.lines[2][-1]["ts"] + 9000, "name": "bwd", "step": STEP
                            + 1, "sync": True})
    broken.add(2, "i", "ready", step=STEP + 1)
    for rank in range(4):
        broken.beat(rank, 130_000_000)
    assert broken.verdict() == ("desync", [2], "share", STEP)


@pytest.mark.parametrize("world, after_s", [(2, 1), (4, 1), (8, 1), (4, 1000)])
def test_a_skipped_meeting_that_is_not_in_every_step(tmp_path, world, after_s):
    broken = Broken(tmp_path, world=world, agree_every=10)
    for rank in range(world):
        if rank == 1:
            broken.cut(rank, "bwd", "ready", step=STEP + 1)
            lines = broken.lines[rank]
            lines[:] = [r for r in lines if (r.get("name"), r.get("step")) != ("agree", STEP)]
        else:
            broken.cut(rank, "agree")
        broken.beat(rank, 60_000_000)
    assert broken.verdict(after_s) == ("desync", [1], "agree", STEP)
    assert f"rank 1 came to bwd of step {STEP + 1} when" in broken.evidence()


def test_the_same_meeting_of_another_step(tmp_path):
    """Of two ranks one has left out the meeting of a step, and stands in that of the next one."""
    broken = Broken(tmp_path, world=2, agree_every=10)
    step = STEP + 1
    broken.cut(0, "bwd", "ready", step).cut(1, "bwd", "ready", step + 1)
    broken.lines[1] = [r for r in broken.lines[1] if (r.get("name"), r.get("step")) != ("bwd", step)]
    for rank in range(2):
        broken.beat(rank, 130_000_000)
    assert broken.verdict(1.0) == ("desync", [1], "bwd", step)


def test_a_finished_run_is_no_stop_however_old(tmp_path):
    assert Broken(tmp_path).verdict()[0] == "healthy"


def test_ended_in_good_order_at_a_signal(tmp_path):
    broken = Broken(tmp_path)
    for rank in range(4):
        end = broken.lines[rank].pop()
        broken.lines[rank] += [dict(end, name="signal", args={"signal": "SIGTERM"}), end]
    assert broken.verdict()[:2] == ("terminated", [0, 1, 2, 3])
    assert "SIGTERM" in broken.evidence()


def test_a_lost_file_of_a_finished_run_is_no_lost_rank(tmp_path):
    broken = Broken(tmp_path)
    broken.paths.pop(3).unlink()
    broken.lines.pop(3)
    assert broken.verdict()[0] == "healthy"
    assert any("no trace of rank 3" in warning for warning in broken.summary["warnings"])


def test_a_clock_that_is_ahead_changes_nothing(tmp_path):
    """Rank 0's wall clock is a minute ahead: its beats and its error look younger than they are."""
    broken = Broken(tmp_path, boot_ids={0: "x"}, hosts=["a", "b", "b", "b"],
                    shifts={0: 60_000_000}).cut(0, "fwd").cut_others(0)
    broken.beat(0, 5_000_000)
    for rank in (1, 2, 3):
        broken.beat(rank, 130_000_000)
    assert broken.verdict() == ("stall", [0], "fwd", STEP)
    assert "heartbeats stopped 2 m 05 s before" in broken.evidence()
