"""Weights & Biases through the real package, offline: what is in the .wandb file is what would be synced."""

import json
import struct
import sys
from datetime import date

import pytest
from conftest import ROOT
from test_train import train
from wandb.proto.wandb_internal_pb2 import Record


def read_wandb(path):
    """The records of a .wandb file: a 7-byte header, then the LevelDB log format (no CRC is checked).

    A chunk is crc (4), length (2), type (1 full, 2 first, 3 middle, 4 last) and data; a block's rest is
    zeros.
    """
    data, position, parts, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            position += left
            continue
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            records.append(Record.FromString(parts))
            parts = b""
    return records


def history(run_dir):
    """(rows of the history, config, exit code, records) of the one run in a run directory."""
    (file,) = (run_dir / "wandb").glob("offline-run-*/run-*.wandb")
    records = read_wandb(file)
    rows, config, exit_code = [], {}, None
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json)
                         for item in record.history.item})
        elif kind == "run":
            config.update({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif kind == "exit":
            exit_code = record.exit.exit_code
    return rows, config, exit_code, records


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wandb")
    done, run_dir = train(folder, 2, "use_wandb=True", "wandb_name=somebody's name",
                          val_data={"target": "loop_parts.py:Points", "num_samples": 5}, epochs=2,
                          eval_every=3,
                          env={"WANDB_MODE": "offline"})
    assert done.returncode == 0, done.stderr
    return run_dir


def test_every_step_epoch_and_evaluation_is_in_one_run(two_ranks):
    rows, config, exit_code, records = history(two_ranks)
    batch_rows = [row for row in rows if "train_batch/loss" in row]
    assert [row["step"] for row in batch_rows] == list(range(1, 17))
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6, 9, 12, 15, 16]
    assert [row["step"] for row in rows if "train/loss" in row] == [8, 16]
    assert all({"params/lr", "epoch", "attempt", "train_batch/largest"} <= set(row) for row in batch_rows)
    assert [row["epoch"] for row in batch_rows] == [0] * 8 + [1] * 8
    assert exit_code == 0
    metrics = {(r.metric.name or r.metric.glob_name): r.metric.step_metric for r in records
               if r.WhichOneof("record_type") == "metric"}
    assert metrics["*"] == "step" and "step" in metrics
    assert not list(two_ranks.glob("events*"))  # one writer, not two


def test_the_resolved_recipe_is_the_config(two_ranks):
    rows, config, exit_code, records = history(two_ranks)
    assert config["epochs"] == 2 and config["schedule"]["kind"] == "constant"
    assert config["model"]["target"].endswith("loop_parts.py:Regression")
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    (run,) = {(run.project, run.run_group, run.display_name) for run in runs}
    assert run == ("rankscope", "g", "somebody's name")


def test_nothing_of_the_run_is_uploaded_but_metrics(two_ranks):
    records = history(two_ranks)[3]
    files = [item.path for r in records if r.WhichOneof("record_type") == "files" for item in r.files.files]
    assert not [file for file in files if file.endswith((".pt", ".py", ".diff", "launch.json"))]


def test_without_a_key_it_is_offline_with_one_warning_and_never_prompts(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    done, run_dir = train(tmp_path, 2, "use_wandb=True", "max_steps=2", hooks={},
                          env={"HOME": str(home), "WANDB_MODE": None, "NETRC": str(home / "netrc")})
    assert done.returncode == 0, done.stderr
    log = (run_dir / "train.log").read_text()
    assert log.count("wandb login") == 1 and log.count("wandb sync") == 1
    assert len(history(run_dir)[0]) == 3  # two steps and the epoch's means


def test_a_failed_run_is_marked_failed(tmp_path):
    model = {"target": "loop_parts.py:Regression", "fail_at": 3}
    done, run_dir = train(tmp_path, 2, "use_wandb=True", model=model)
    assert done.returncode == 1
    rows, config, exit_code, records = history(run_dir)
    assert [row["step"] for row in rows] == [1, 2] and exit_code == 1


def test_odd_config_values_are_text(tmp_path):
    sys.path.insert(0, str(ROOT))
    import train as train_script

    odd = {"day": date(2026, 1, 2), "path": ROOT, "nan": float("nan"),
           3: [float("inf"), None, True, (1, "x")]}
    assert train_script.as_plain(odd) == {"day": "2026-01-02", "path": str(ROOT), "nan": "nan",
                                          "3": ["inf", None, True, [1, "x"]]}
