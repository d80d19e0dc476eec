"""The README's code runs as it is written there."""

import re
import sys

import pytest
from conftest import ROOT, run

README = (ROOT / "README.md").read_text()


def block(section, language):
    """The first code block of a section."""
    text = re.split(rf"^## {re.escape(section)}$", README, flags=re.M)[1]
    return re.search(rf"```{language}\n(.*?)```", text, flags=re.S).group(1)


def test_hooks_in_somebody_elses_loop(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text("import torch\nmodel = torch.nn.Linear(3, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
                      "batches = [torch.ones(4, 3)] * 3\n" + block("Hooks in your own loop", "python")
                      + "\nprint(numbers)\n")
    done = run([sys.executable, script], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert re.search(r"'grad_norm/total': \d", done.stdout)


def test_the_sections_files_exist():
    for name in re.findall(r"`((?:recipes/|tests/)?\w+\.(?:py|yaml))`", README):
        assert (ROOT / name).exists() or name in ("recipe.yaml", "config.yaml"), name


@pytest.mark.long
def test_the_first_command_trains_to_a_falling_loss(tmp_path):
    """What it trains, in the environment that the tests run in; .ci/run makes the fresh environment."""
    command = block("Two commands", "bash").split("&&")[-1].strip()
    arguments = command.split()[1:]
    assert command.split()[0] == ".venv/bin/torchrun"
    done = run([sys.executable, "-m", "torch.distributed.run", *arguments, f"exp_dir={tmp_path}"], timeout_s=600)
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("gpt/*/train.log")
    losses = [float(loss) for loss in re.findall(r"\| loss ([\d.]+)", log.read_text())]
    assert losses[-1] < 0.75 * losses[0] and "a sample of the model" in log.read_text()
    summary = run([sys.executable, "trace_tools.py", "summarize", log.parent])
    assert summary.returncode == 0 and "forward" in summary.stdout
