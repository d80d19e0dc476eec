"""The spans that train.py writes: their names, their nesting, their steps, in each rank's own file."""

import json
from collections import defaultdict

import pytest
from test_train import train


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Records of rank 0's and rank 1's main processes, of 2 epochs of 4 steps with everything on."""
    done, run_dir = train(
        tmp_path_factory.mktemp("traces"), 2, "structured_logging.enabled=True", "structured_logging.trace_hooks=True",
        "structured_logging.batch_stats_every=2", "epochs=2", "accumulate=2", "save_every=4", "num_workers=1",
        model={"target": "loop_parts.py:Regression", "norm": True},
        val_data={"target": "loop_parts.py:Points", "num_samples": 8},
        hooks={"InformationWriter": {}, "GarbageCollector": {"log_frequency": 4},
               "StepNoter": {"target": "loop_parts.py:StepNoter"}})
    assert done.returncode == 0, done.stderr
    found = {}
    for file in (run_dir / "structured_logs").glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        if records[0]["worker"] is None:
            found[records[0]["rank"]] = records
    return found


def parents(records):
    """name -> the set of the names around it; None: outermost."""
    around, stack = defaultdict(set), []
    for record in records:
        if record["ph"] == "B" and "tid" not in record:
            around[record["name"]].add(stack[-1] if stack else None)
            stack.append(record["name"])
        elif record["ph"] == "E" and "tid" not in record:
            assert stack.pop() == record["name"]
    return around


def test_names_and_nesting(traces):
    for records in traces.values():
        around = parents(records)
        assert around["step"] == {"epoch"} and around["epoch"] == {None} and around["startup"] == {None}
        for name in ("data", "to_device", "forward", "backward", "optimizer", "log"):
            assert around[name] == {"step"}, name
        assert around["sync_buffers"] == {"forward"}
        assert around["evaluate"] == {"epoch"} and around["evaluation_sums"] == {"evaluate"}
        assert around["gc"] == {"GarbageCollector.after_step"}
        assert around["StepNoter.after_backward"] == around["InformationWriter.after_step"] == {"hooks"}
        assert "step" in around["hooks"] and around["checkpoint"] <= {"epoch", None} and around["checkpoint"]


def test_every_span_of_a_step_carries_its_number(traces):
    for records in traces.values():
        counts = defaultdict(lambda: defaultdict(int))
        for record in records:
            if record["ph"] == "B":
                counts[record["name"]][record.get("step")] += 1
        assert dict(counts["step"]) == dict.fromkeys(range(1, 9), 1)
        assert dict(counts["forward"]) == dict(counts["backward"]) == dict.fromkeys(range(1, 9), 2)  # micro-batches
        assert dict(counts["evaluate"]) == {4: 1, 8: 1}


def test_only_the_backward_that_reduces_is_a_meeting(traces):
    for records in traces.values():
        backwards = [record.get("sync", False) for record in records
                     if record["ph"] == "B" and record["name"] == "backward"]
        assert backwards == [False, True] * 8
        ready = [record["step"] for record in records if record["ph"] == "i" and record["name"] == "ready"
                 and record["args"]["span"] == "backward"]
        assert ready == list(range(1, 9))
        assert {record["sync"] for record in records if record.get("name") == "sync_buffers" and record["ph"] == "B"
                } == {"soft"}


def test_batch_sizes_and_the_end(traces):
    for records in traces.values():
        sizes = {record["step"]: record["args"] for record in records if record["ph"] == "C"}
        assert sizes == {step: {"batch_samples": 8, "batch_tokens": 14} for step in (2, 4, 6, 8)}
        (end,) = [record for record in records if record.get("name") == "process_end"]
        assert end["args"]["how"] == "ok"
