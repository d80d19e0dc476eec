"""What the verdict says about slow steps, on simulated worlds: who, where, since when, what it costs; and
silence else."""

import gc
import json
import random
import sys

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "faults")]

import trace_tools  # noqa: E402
from simulate import PHASES, simulate, simulate_pipeline  # noqa: E402


def summary(folder, **world):
    simulate(folder, **world)
    return trace_tools.summarize(trace_tools.Run([str(folder)]).read())


def findings(folder, **world):
    return summary(folder, **world)["findings"]


def slow(ranks, phase, us, first=1, last=1 << 30, every=1):
    """An extra: these ranks take us longer in a phase."""
    ranks = {ranks} if isinstance(ranks, int) else set(ranks)
    return lambda rank, step, name: us * (
        rank in ranks and name == phase and first <= step <= last and (step - first) % every == 0)


@pytest.mark.parametrize("noise", ["white", "lognormal", "slow"])
@pytest.mark.parametrize("world", [1, 2, 4, 16])
def test_noise_is_healthy(tmp_path, world, noise):
    found = findings(tmp_path, world=world, noise=noise, seed=world)
    assert [f["kind"] for f in found] == ["healthy"]


@pytest.mark.parametrize("noise_us, seed", [(600, 0), (600, 1), (600, 3), (1200, 1), (1200, 4)])
def test_slow_noise_makes_others_early_for_as_long(tmp_path, noise_us, seed):
    found = findings(tmp_path, world=16, noise="slow", noise_us=noise_us, seed=seed)
    assert "straggler" not in {f["kind"] for f in found}


@pytest.mark.parametrize("slow_us", [12_000, 30_000])
def test_a_straggler_in_slow_noise(tmp_path, slow_us):
    found = findings(tmp_path, world=16, noise="slow", extra=slow(5, "fwd", slow_us))
    assert (found[0]["kind"], found[0]["ranks"], found[0]["phase"]) == ("straggler", [5], "fwd")


def test_a_rank_with_less_to_do_hides_no_straggler(tmp_path):
    found = findings(tmp_path, world=8, extra=slow(5, "fwd", 8000),
                     scale=lambda rank: 0.8 if rank == 0 else 1.0)
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [5], "fwd")]


@pytest.mark.parametrize("world", [2, 3, 8, 64])
@pytest.mark.parametrize("phase", list(PHASES))
def test_a_straggler_is_named_with_its_phase(tmp_path, world, phase):
    rank = (len(phase) + 7 * world) % world
    broken = summary(tmp_path / "slow", world=world, num_steps=60, extra=slow(rank, phase, 8000))
    found = broken["findings"]
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [rank], phase)]
    saved_s = broken["wall_s"] - summary(tmp_path / "clean", world=world, num_steps=60)["wall_s"]
    assert found[0]["saving_s"] / 57 == pytest.approx(saved_s / 60, rel=0.1, abs=0.001)


def with_micro_batches(folder, times):
    """So many of the simulated steps become one: all meet so many times a step in spans of one name."""
    for path in (folder / "structured_logs").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line.get("step"):
                line["step"] = (line["step"] + times - 1) // times
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return trace_tools.summarize(trace_tools.Run([str(folder)]).read())


@pytest.mark.parametrize("times", [2, 4, 20])
def test_meetings_of_one_name_several_times_a_step(tmp_path, times):
    simulate(tmp_path / "clean", num_steps=60 * times)
    clean = with_micro_batches(tmp_path / "clean", times)
    assert [f["kind"] for f in clean["findings"]] == ["healthy"]
    simulate(tmp_path / "each", num_steps=60 * times, extra=slow(2, "load", 4000))
    broken = with_micro_batches(tmp_path / "each", times)
    found = broken["findings"]
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [2], "load")]
    saved_s = (broken["wall_s"] - clean["wall_s"]) * 57 / 60  # without the warm-up
    assert found[0]["saving_s"] == pytest.approx(saved_s, rel=0.1)
    simulate(tmp_path / "one", num_steps=60 * times, extra=slow(1, "fwd", 10_000 * times, every=times))
    found = with_micro_batches(tmp_path / "one", times)["findings"]
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [1], "fwd")]


def test_now_and_then_in_each_of_several_meetings_a_step(tmp_path):
    """A part of it at each meeting: only over the step does it stand out."""
    simulate(tmp_path, num_steps=8 * 80, extra=lambda rank, step, name: 12_000 * (
        rank == 1 and name == "fwd" and (step - 1) // 8 % 11 == 5))
    found = with_micro_batches(tmp_path, 8)["findings"]
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]["period"]) for f in found] == [
        ("burst", [1], "fwd", 11)]


@pytest.mark.parametrize("first, last", [(15, 24), (25, 36), (9, 18)])
def test_a_part_of_a_short_run(tmp_path, first, last):
    found = findings(tmp_path, world=8, num_steps=36, extra=slow(3, "fwd", 7000, first=first, last=last))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]) for f in found] == [
        ("straggler", [3], "fwd", {"first": first, "last": last, "period": None})]


def test_twice_in_a_short_run(tmp_path):
    found = findings(tmp_path, world=8, num_steps=40, extra=slow(3, "fwd", 60_000, first=12, every=20))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]["first"], f["steps"]["last"]) for f in found] == [
        ("burst", [3], "fwd", 12, 32)]


def test_names_do_not_matter(tmp_path):
    found = findings(tmp_path, phases={"zig": 3000, "zag": 9000, "zog": 20_000}, meet="zog",
                     extra=slow(2, "zig", 6000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [2], "zig")]


def test_a_span_that_is_all_of_the_loops_own_has_its_name(tmp_path):
    """Also where only the slow times make it all of it: else a load is 150 us, and the fetch in it 50."""
    simulate(tmp_path, phases={"load": 150, "fwd": 9000, "bwd": 18_000}, noise="none", extra=slow(1, "load", 8000))
    for path in (tmp_path / "structured_logs").glob("*.jsonl"):
        told = []
        for line in map(json.loads, path.read_text().splitlines()):
            is_load = line.get("name") == "load"
            if is_load and line["ph"] == "E":
                told.append({**line, "name": "fetch", "ts": line["ts"] - 20, "dur": line["dur"] - 100})
            told.append(line)
            if is_load and line["ph"] == "B":
                told.append({**line, "name": "fetch", "ts": line["ts"] + 80})
        path.write_text("".join(json.dumps(line) + "\n" for line in told))
    found = trace_tools.summarize(trace_tools.Run([str(tmp_path)]).read())["findings"]
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [1], "load")]


def test_from_a_step_on(tmp_path):
    found = findings(tmp_path, world=8, extra=slow(3, "fwd", 8000, first=60))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]) for f in found] == [
        ("straggler", [3], "fwd", {"first": 60, "last": 100, "period": None})]


def test_every_seventh_step(tmp_path):
    found = findings(tmp_path, world=8, extra=slow(3, "fwd", 30_000, first=10, every=7))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]) for f in found] == [
        ("burst", [3], "fwd", {"first": 10, "last": 94, "period": 7})]


@pytest.mark.parametrize("every, agree_every", [(5, 10), (10, 10), (7, 10), (10, 5)])
def test_now_and_then_before_a_meeting_of_some_steps(tmp_path, every, agree_every):
    """What a rank does every few steps makes it late now at one kind of meeting, now at another."""
    found = findings(tmp_path, num_steps=150, agree_every=agree_every,
                     extra=slow(2, "opt", 60_000, first=10, every=every))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]["period"]) for f in found] == [
        ("burst", [2], "opt", every)]
    assert found[0]["steps"]["first"] % every == 10 % every


def test_one_slow_rank_is_one_finding_though_a_rare_meeting_takes_some_of_the_waiting(tmp_path):
    found = findings(tmp_path, num_steps=150, agree_every=10, extra=slow(2, "opt", 20_000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [2], "opt")]


def test_steady_and_now_and_then_on_one_rank(tmp_path):
    """Both are told, and together they save what a run without both would."""
    steady, bursts = slow(1, "fwd", 8000), slow(1, "load", 80_000, every=8)
    broken = summary(tmp_path / "slow", num_steps=150,
                     extra=lambda *at: steady(*at) + bursts(*at))
    found = {(f["kind"], f["phase"]): f["saving_s"] for f in broken["findings"]}
    assert list(found) == [("burst", "load"), ("straggler", "fwd")]
    saved_s = broken["wall_s"] - summary(tmp_path / "clean", num_steps=150)["wall_s"]
    assert sum(found.values()) == pytest.approx(saved_s * 147 / 150, rel=0.1)


def test_a_few_late_steps_in_a_row_are_not_now_and_then(tmp_path):
    """Another job on the machine for a moment: seven of the last nine steps."""
    late = {52, 53, 55, 56, 57, 59, 60}
    found = findings(tmp_path, world=2, num_steps=60,
                     extra=lambda rank, step, phase: 19_000 * (rank == 0 and phase == "fwd" and step in late))
    assert "burst" not in {f["kind"] for f in found}


def test_once(tmp_path):
    found = findings(tmp_path, world=8, extra=slow(3, "opt", 2_000_000, first=50, last=50))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("spike", [3], "opt")]
    assert abs(found[0]["steps"]["first"] - 50) <= 1


def test_two_stragglers_alike_are_one_finding(tmp_path):
    found = findings(tmp_path, world=8, extra=slow([1, 5], "load", 15_000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [1, 5], "load")]
    assert found[0]["saving_s"] == pytest.approx(97 * 0.015, rel=0.1)


def test_a_hidden_straggler_saves_nothing_alone(tmp_path):
    found = findings(tmp_path, world=8, extra=lambda rank, step, phase: 20_000
                     * (rank == 2 and phase == "fwd")
                     + 8000 * (rank == 5 and phase == "load"))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [2], "fwd"),
                                                                    ("straggler", [5], "load")]
    assert found[0]["saving_s"] == pytest.approx(97 * 0.012, rel=0.1)
    assert found[1]["saving_s"] < 0.01
    assert any("hidden behind rank 2" in line for line in found[1]["evidence"])


def test_most_ranks_are_slow(tmp_path):
    found = findings(tmp_path, world=8, extra=slow([1, 2, 3, 4, 5], "load", 15_000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [1, 2, 3, 4, 5], "load")]


def test_a_slow_host(tmp_path):
    hosts = [f"node-{rank // 4}" for rank in range(16)]
    found = findings(tmp_path, world=16, hosts=hosts, scale=lambda rank: 1.3 if rank // 4 == 2 else 1.0)
    assert [(f["kind"], f["ranks"], f["hosts"]) for f in found] == [("slow_host", [8, 9, 10, 11], ["node-2"])]


def test_all_slower_by_little(tmp_path):
    found = findings(tmp_path, noise="none", extra=slow(range(4), "fwd", 4500, first=60))
    assert [(f["kind"], f["phase"], f["steps"]["first"]) for f in found] == [("slowdown", "fwd", 60)]


def test_all_slower_from_a_step_on(tmp_path):
    found = findings(tmp_path, world=8, extra=slow(range(8), "fwd", 9000, first=60))
    assert [(f["kind"], f["phase"], f["steps"]["first"]) for f in found] == [("slowdown", "fwd", 60)]


@pytest.mark.parametrize("first, last", [(40, 69), (60, 130), (20, 110)])
def test_all_slower_for_a_part_of_the_run(tmp_path, first, last):
    found = findings(tmp_path, num_steps=150, extra=slow(range(4), "fwd", 12_000, first, last))
    assert [(f["kind"], f["phase"], f["steps"]["first"], f["steps"]["last"]) for f in found] == [
        ("slowdown", "fwd", first, last)]


@pytest.mark.parametrize("world", [3, 8, 32])
def test_a_part_of_the_run_needs_a_twentieth_of_a_step(tmp_path, world):
    for number, (first, last) in enumerate([(60, 200), (1, 120), (70, 180)]):
        found = findings(tmp_path / str(number), world=world, num_steps=200,
                         extra=slow(2, "fwd", 2600, first, last))
        assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [2], "fwd")]
        assert abs(found[0]["steps"]["first"] - max(first, 4)) <= 1


def test_bursts_of_a_whole_host_are_one_finding(tmp_path):
    found = findings(tmp_path, world=8, num_steps=150, hosts=["a"] * 4 + ["b"] * 4,
                     extra=slow([4, 5, 6, 7], "load", 80_000, first=7, every=12))
    assert [(f["kind"], f["ranks"], f["hosts"], f["phase"], f["steps"]["period"]) for f in found] == [
        ("burst", [4, 5, 6, 7], ["b"], "load", 12)]


def test_waiting_that_is_not_marked_is_no_culprit(tmp_path):
    """Rank 5 is slow in fwd; its neighbours wait for it in a span that nobody marked."""
    def extra(rank, step, phase):
        return 15_000 if (rank, phase) == (5, "fwd") or rank in (4, 6, 7) and phase == "tp_all_reduce" else 0
    found = findings(tmp_path, world=8, extra=extra,
                     phases={"load": 2000, "fwd": 11_000, "tp_all_reduce": 500, "bwd": 17_000, "opt": 1000})
    assert (found[0]["kind"], found[0]["ranks"], found[0]["phase"]) == ("straggler", [5], "fwd")
    assert all(f["confidence"] == "low" and "sync=True" in f["advice"] for f in found[1:])


def test_all_wait_for_data(tmp_path):
    found = findings(tmp_path, world=8, phases=dict(PHASES, load=20_000))
    assert [(f["kind"], f["phase"]) for f in found] == [("bound", "load")]


def test_communication(tmp_path):
    found = findings(tmp_path, world=8, transfer_us=40_000)
    assert [(f["kind"], f["phase"]) for f in found] == [("bound", "bwd")]
    assert "communication" in found[0]["evidence"][0]


def test_another_rank_each_step(tmp_path):
    turns = [random.Random(step).randrange(8) for step in range(101)]
    found = findings(tmp_path, world=8, extra=lambda rank, step, phase: 15_000
                     * (rank == turns[step] and phase == "load"))
    assert [(f["kind"], f["phase"]) for f in found] == [("imbalance", "load")]


@pytest.mark.parametrize("ranks", [[2], range(4)])
def test_a_slow_first_step_is_warm_up(tmp_path, ranks):
    found = findings(tmp_path, extra=slow(ranks, "fwd", 800_000, last=1))
    assert [f["kind"] for f in found] == ["healthy"]


@pytest.mark.parametrize("name", ["checkpoint", "save_model", "run_validation", "Trainer.evaluate",
                                  "torch_compile", "gc"])
def test_what_one_rank_is_meant_to_do_is_set_apart(tmp_path, name):
    found = findings(tmp_path / "set_apart", phases=dict(PHASES, **{name: 10}),
                     extra=slow(0, name, 150_000, first=10, every=20))
    assert [f["kind"] for f in found] == ["healthy"]
    found = findings(tmp_path / "unknown", phases=dict(PHASES, other=10),
                     extra=slow(0, "other", 150_000, first=10, every=20))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]["period"])
            for f in found] == [("burst", [0], "other", 20)]


def test_bigger_batches_are_told(tmp_path):
    found = findings(tmp_path, world=8, scale=lambda rank: 1.5 if rank == 3 else 1.0, sizes=lambda rank: 24
                     if rank == 3 else 16)
    assert [(f["kind"], f["ranks"]) for f in found] == [("straggler", [3])]
    assert "batch_samples is 24 there, 16 on the others" in found[0]["evidence"]


def test_few_steps(tmp_path):
    assert [f["kind"] for f in findings(tmp_path / "clean", num_steps=12)] == ["insufficient"]
    found = findings(tmp_path / "plain", num_steps=12, extra=slow(1, "load", 15_000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [1], "load")]


def test_own_work_that_cannot_be_told_from_waiting(tmp_path):
    found = findings(tmp_path / "clean", mark="sync")
    assert [(f["kind"], f["phase"]) for f in found] == [("opaque", "bwd")]
    assert "ready()" in found[0]["advice"]
    found = findings(tmp_path / "slow", mark="sync", extra=slow(1, "load", 8000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [1], "load"),
                                                                    ("opaque", [0, 1, 2, 3], "bwd")]


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("phase", ["load", "fwd", "opt"])
@pytest.mark.parametrize("mark", ["titan", "none"])
def test_traces_without_marks(tmp_path, mark, phase, world):
    """Where the waiting is comes from the numbers: it is shorter just where the rank's other phases are
    longer."""
    found = findings(tmp_path, world=world, mark=mark, extra=slow(1, phase, 8000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found][0] == ("straggler", [1], phase)


@pytest.mark.parametrize("mark", ["none", "titan"])
@pytest.mark.parametrize("seed", range(4))
def test_half_of_the_ranks_without_marks(tmp_path, seed, mark):
    found = findings(tmp_path, mark=mark, seed=seed, extra=slow([0, 1], "fwd", 15_000))
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found][:1] == [("straggler", [0, 1], "fwd")]


@pytest.mark.parametrize("mark", ["titan", "none"])
def test_a_slow_backward_without_marks_is_opaque(tmp_path, mark):
    assert [f["kind"] for f in findings(tmp_path, mark=mark, extra=slow(1, "bwd", 8000))] == ["opaque"]


@pytest.mark.parametrize("where", ["device", "load"])
def test_a_device_that_works_behind_the_host(tmp_path, where):
    """The host's spans are short and its meetings early: the device's own events tell who is late, the host's
    spans why."""
    def device(rank, step):
        own_us = 40_000 + 9000 * (rank == 2)
        return own_us + random.Random(rank * 1000 + step).randrange(300), 52_000 - own_us

    extra = slow(2, "load", 9000) if where == "load" else None
    found = findings(tmp_path, phases={"load": 500, "fwd": 300, "bwd": 400, "opt": 100}, noise_us=20,
                     device=device, extra=extra)
    assert [(f["kind"], f["ranks"], f["phase"]) for f in found] == [("straggler", [2], where)]


@pytest.mark.parametrize("replicas", [1, 4])
def test_stages_of_a_pipeline_differ_by_design(tmp_path, replicas):
    def found(name, extra=None):
        folder = simulate_pipeline(tmp_path / name, replicas=replicas, extra=extra)
        return trace_tools.summarize(trace_tools.Run([str(folder)]).read())["findings"]

    assert [f["kind"] for f in found("clean")] == ["healthy"]
    slower = found("slower", slow(2, "forward", 8000, first=40))
    assert [(f["kind"], f["ranks"], f["phase"], f["steps"]["first"])
            for f in slower] == [("straggler", [2], "forward", 40)]


def test_slower_in_what_cannot_be_told_is_opaque(tmp_path):
    found = findings(tmp_path, num_steps=150, mark="none", extra=slow(1, "bwd", 15_000, first=60))
    assert [(f["kind"], f["phase"], f["steps"]["first"]) for f in found] == [("opaque", "bwd", 60)]
    assert "since step 60" in found[0]["evidence"][0]


def test_under_fsdp_it_says_that_it_cannot_tell(tmp_path):
    simulate(tmp_path, mark="sync")
    for path in (tmp_path / "structured_logs").glob("*.jsonl"):
        path.write_text(path.read_text().replace('"sync":true', '"sync":true,"args":{"opaque":"fsdp"}'))
    found = trace_tools.summarize(trace_tools.Run([str(tmp_path)]).read())["findings"]
    assert [(f["kind"], f["phase"]) for f in found] == [("opaque", "bwd")]
    assert "FSDP" in found[0]["advice"]


def test_damaged_traces_still_tell(tmp_path):
    """A lost file, a torn end, garbage in the middle, and an older run in the same folder."""
    simulate(tmp_path, world=8, extra=slow(1, "load", 8000))
    paths = sorted((tmp_path / "structured_logs").glob("*.jsonl"))
    paths[5].unlink()
    paths[4].write_bytes(paths[4].read_bytes()[:-30])
    lines = paths[3].read_bytes().split(b"\n")
    lines[200:204] = [b"\x00\xff garbage", lines[201][:20] + lines[202]]
    paths[3].write_bytes(b"\n".join(lines))
    old = paths[0].read_text().replace('"run":"sim"', '"run":"older"')
    paths[0].with_name("training.rank00000.20250101T000000.77.jsonl").write_text(
        "\n".join(line.replace('"ts":17', '"ts":16') for line in old.splitlines()) + "\n")
    result = trace_tools.summarize(trace_tools.Run([str(tmp_path)]).read())
    kinds = [(f["kind"], f["ranks"], f["phase"]) for f in result["findings"]]
    assert ("straggler", [1], "load") in kinds
    assert not any(f["kind"] == "straggler" and f["ranks"] != [1] for f in result["findings"])


def test_ranks_are_numbered_anew_after_a_restart(tmp_path):
    """The slow machine's process is rank 3 at first, then rank 0: each attempt is judged by its own headers."""
    simulate(tmp_path, hosts=["a", "a", "b", "b"], extra=slow(3, "fwd", 8000))
    simulate(tmp_path / "again", hosts=["b", "b", "a", "a"], extra=slow(0, "fwd", 8000))
    for path in (tmp_path / "again" / "structured_logs").glob("*.jsonl"):
        text = path.read_text().replace('"attempt":0', '"attempt":1').replace('"ts":1700', '"ts":1701')
        (tmp_path / "structured_logs" / path.name.replace("20260101", "20260102")).write_text(text)
        path.unlink()
    for attempt, rank in ((None, 0), (0, 3), (1, 0)):
        found = trace_tools.summarize(trace_tools.Run([str(tmp_path)], attempt=attempt).read())["findings"]
        assert [(f["kind"], f["ranks"], f["hosts"], f["phase"]) for f in found] == [
            ("straggler", [rank], ["b"], "fwd")]


def test_one_process_alone(tmp_path):
    assert [f["kind"] for f in findings(tmp_path / "clean", world=1)] == ["healthy"]
    found = findings(tmp_path / "slower", world=1, extra=slow(0, "fwd", 12_000, first=50))
    assert [(f["kind"], f["phase"], f["steps"]["first"]) for f in found] == [("slowdown", "fwd", 50)]
    found = findings(tmp_path / "bound", world=1, phases=dict(PHASES, load=20_000))
    assert [(f["kind"], f["phase"]) for f in found] == [("bound", "load")]


def test_clocks_of_hosts(tmp_path):
    """The same boot_id is exact; else the ends of meetings tell."""
    hosts = ["node-a", "node-a", "node-b", "node-c"]
    simulate(tmp_path, hosts=hosts, boot_ids={0: "x", 1: "x", 2: "x", 3: "y"},
             shifts={2: 1_700_000, 3: -2_500_000},
             extra=slow(3, "load", 8000))
    aligned = trace_tools.summarize(trace_tools.Run([str(tmp_path)]).read())
    clocks = {c["host"]: c for c in aligned["clocks"]}
    assert clocks["node-a"]["offset_us"] == 0
    assert clocks["node-b"]["offset_us"] == 1_700_000 and clocks["node-b"]["residual_us"] == 0
    assert clocks["node-c"]["offset_us"] == pytest.approx(-2_500_000, abs=100)
    assert aligned["findings"][0]["ranks"] == [3]


def test_text_says_the_verdict_first(tmp_path, capsys):
    simulate(tmp_path, extra=slow(1, "load", 8000))
    assert trace_tools.main(["summarize", str(tmp_path)]) == 0 and gc.isenabled()
    text = capsys.readouterr().out
    assert text.index("verdict: straggler, rank 1 on node-a, load, steps 4 to 100") < text.index("\nranks")
    assert "fixing it saves" in text
