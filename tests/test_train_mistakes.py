"""Mistakes that only show when the parts of a run meet: one message each, and nothing of an earlier run is lost."""

import pytest
from conftest import ROOT
from test_train import train

TRACE = f'{ROOT}/train.py", line'  # a traceback of train.py's own


@pytest.mark.parametrize("overrides, message", [
    (["optimizer.lr=fast"], "train.py: optimizer: torch.optim.AdamW refuses its keywords: "),
    (["optimizer={target: torch.optim.AdamW, betas: 0.9}"], "train.py: optimizer: torch.optim.AdamW refuses"),
])
def test_optimizer_values(tmp_path, overrides, message):
    done, run_dir = train(tmp_path, 2, *overrides)
    assert done.returncode == 1 and done.stderr.count(message) == 1 and TRACE not in done.stderr


def test_a_batch_that_does_not_fit_the_model(tmp_path):
    done, run_dir = train(tmp_path, 0, model={"target": "loop_parts.py:Regression"},
                          train_data={"target": "loop_parts.py:OddlyNamed"})
    assert done.returncode == 1
    assert ("the batch does not fit the model: the data set gives the keys input, label, forward takes (x, y)"
            in (run_dir / "train.log").read_text())


def test_a_hook_without_an_event_is_told_the_nearest(tmp_path):
    done, run_dir = train(tmp_path, 0, hooks={"Mine": {"target": "loop_parts.py:NoHook"}})
    assert done.returncode == 2 and "not a hook" in done.stderr and "did you mean after_step?" in done.stderr


def test_max_steps_out_of_reach_is_said(tmp_path):
    done, run_dir = train(tmp_path, 0, "max_steps=300")
    assert done.returncode == 0, done.stderr
    text = "max_steps=300 is not reached: epochs=1 ends the run at step 16"
    assert (run_dir / "train.log").read_text().count(text) == 1


def test_a_refused_resume_says_what_it_needs_and_changes_nothing(tmp_path):
    done, run_dir = train(tmp_path, 2, epochs=1)
    assert done.returncode == 0, done.stderr
    before = (run_dir / "config.yaml").read_text()
    for overrides, needs in ((["max_steps=400"], "epochs="), (["max_steps=8", "epochs=3"], "max_steps=")):
        done, _ = train(tmp_path, 2, f"resume={run_dir}", "run=r", *overrides)
        assert done.returncode == 1 and "exitcode  : 2" in done.stderr, done.stderr
        assert done.stderr.count("this run is finished, at step 8") == 1
        assert f"To go on give it more {needs}" in done.stderr and TRACE not in done.stderr
        assert (run_dir / "config.yaml").read_text() == before
