"""All diagnostic hooks at once in real runs of both recipes, and their mistakes on the command line."""

import json
import sys

import pytest
from conftest import ROOT, run, torchrun
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Each hook with a period of its own, so that collectives of different hooks meet in many orders.
ALL_SEVEN = ["hooks.ParameterCounter={}", "hooks.GradientNormLogger.log_frequency=2",
             "hooks.ResourceUtilizationLogger={log_frequency: 3, per_process: true}",
             "hooks.FeatureStdMonitor.log_frequency=4", "hooks.PrototypeUsageLogger.log_frequency=5",
             "hooks.LogitEntropyLogger.log_frequency=7",
             "hooks.RuntimeProfiler={start_step: 6, ranks: [0, 1]}"]
GPT = ["hooks.FeatureStdMonitor.modules=['blocks.*']", "hooks.PrototypeUsageLogger.modules=[head]"]


def train(folder, recipe, *overrides, timeout_s=180):
    return torchrun(2, ROOT / "train.py", ROOT / f"recipes/{recipe}.yaml", f"exp_dir={folder}", "run=r",
                    "num_workers=0", "log_every=5", *overrides, timeout_s=timeout_s)


@pytest.mark.parametrize("recipe, more", [
    ("gpt", [*GPT, "train_data.max_samples=400", "val_data.max_samples=16", "batch_size=4"]),
    ("dino", ["val_data.max_samples=64", "batch_size=8", "hooks.NearestNeighbours=null"])])
def test_all_seven_on_two_ranks_end_clean(tmp_path, recipe, more):
    done = train(tmp_path, recipe, *ALL_SEVEN, *more, "max_steps=21", "pg_timeout_s=15",
                 "structured_logging.enabled=true", "structured_logging.trace_hooks=true")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / recipe / "r"
    log = (folder / "train.log").read_text()
    assert "done: 21 steps" in log and "parameters: " in log and "profile of step 6" in log
    assert " WARNING " not in log
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    steps = {key: [event.step for event in events.Scalars(key)] for key in events.Tags()["scalars"]}
    assert steps["grad_norm/total"] == list(range(2, 22, 2))
    assert steps["system/rank1/rss_mb"] == list(range(3, 22, 3))
    name = "blocks.3" if recipe == "gpt" else "teacher.backbone"
    assert steps[f"feature_std/{name}/effective_rank"] == list(range(4, 22, 4))
    name = "head" if recipe == "gpt" else "teacher.head"
    assert steps[f"prototypes/{name}/perplexity"] == list(range(5, 22, 5))
    assert steps["entropy/mean"] == list(range(7, 22, 7))
    assert sorted(path.name for path in folder.glob("profiler/*")) == [
        f"r-rank{n}-step6.json.gz" for n in (0, 1)]

    # A span for every hook's every event, and inside them the meetings of the ranks.
    for trace in folder.glob("structured_logs/*rank0000[01]*.jsonl"):
        records = [json.loads(line) for line in trace.read_text().splitlines()]
        begun = [record["name"] for record in records if record["ph"] == "B"]
        assert begun.count("GradientNormLogger.after_backward") == 21
        assert begun.count("FeatureStdMonitor.after_step") == 21
        assert begun.count("FeatureStdMonitor.exchange") == 5
        assert begun.count("PrototypeUsageLogger.exchange") == 4
        assert {"ParameterCounter.before_train", "RuntimeProfiler.after_train"} <= set(begun)
        assert all(record["sync"] for record in records
                   if record["ph"] == "B" and record["name"].endswith("exchange"))


@pytest.mark.parametrize("override, message", [
    ("hooks.FeatureStdMonitor.modules=[student.bakbone]", "no module of the model matches 'student.bakbone'"),
    ("hooks.RuntimeProfiler.active=0",
     "RuntimeProfiler: active is 0; wanted a whole number of steps, 1 to 100")])
def test_a_wrong_setting_stops_the_run_at_the_start(tmp_path, override, message):
    done = run([sys.executable, ROOT / "train.py", ROOT / "recipes/dino.yaml", f"exp_dir={tmp_path}",
                "num_workers=0", override, "hooks.NearestNeighbours=null", "max_steps=3"])
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "step 3/3" not in done.stdout
