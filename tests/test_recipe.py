"""Recipes through the command line: layers, types, components, hooks, --help, --dry-run, the saved one."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, run, torchrun

TRAIN = ROOT / "train.py"

# Nothing here needs torch, so that a dry run takes a tenth of a second.
PARTS = """
class Anything:
    def __init__(self, **keywords): pass

class Model:
    def __init__(self, num_layers: int = 2, name: str = "m", scale: "float | None" = None, width: int = None,
                 fast: bool = False, sizes: "list[int]" = (), kind: "Unknown" = None): pass

class Data:
    def __init__(self, path: "str | None" = None, files=(), root_dir="", split="train", transform=None): pass

def optimizer(params, lr: float = 1e-3): pass
"""
RECIPE = """
model: {target: "parts.py:Anything"}
train_data: {target: "parts.py:Data"}
optimizer: {target: "parts.py:optimizer"}
hooks: null
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def dry_run(folder, *arguments, recipe="recipe.yaml"):
    """The resolved recipe as a dict, and what was said besides."""
    done = run([sys.executable, TRAIN, recipe, *arguments, "--dry-run"], cwd=folder)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout), done.stderr


def keywords(recipe, name="model"):
    return {key: value for key, value in recipe[name].items() if key != "target"}


# ---- What a value is -----------------------------------------------------------------------------

UNTYPED = {
    "1e-4": 1e-4,
    "2e5": 2e5,
    "1E3": 1000.0,
    "1.5e+3": 1500.0,
    ".5": 0.5,
    "5.": 5.0,
    "-3": -3,
    "+3": 3,
    "0": 0,
    "3.0": 3.0,
    "0x1F": 31,
    "0o17": 15,
    "50_000": 50000,
    "-.inf": -math.inf,
    ".inf": math.inf,
    "null": None,
    "None": None,
    "~": None,
    "none": "none",
    "true": True,
    "False": False,
    "yes": "yes",
    "no": "no",
    "on": "on",
    "off": "off",
    "y": "y",
    "n": "n",
    "010": "010",
    "08": "08",
    "12:30": "12:30",
    "1:30:00": "1:30:00",
    "2024-01-01": "2024-01-01",
    "1_2": "1_2",
    "1.0.0": "1.0.0",
    "e5": "e5",
    "=": "=",
    "'1'": "1",
    '"null"': "null",
    "a b": "a b",
    "''": "",
}


def test_untyped_values_have_no_yaml_traps_in_file_list_and_command_line(folder):
    lines = [f"  k{index}: {text}" for index, text in enumerate(UNTYPED)]
    write(
        folder / "recipe.yaml",
        RECIPE.replace(
            'model: {target: "parts.py:Anything"}',
            "\n".join(
                [
                    "model:",
                    '  target: "parts.py:Anything"',
                    *lines,
                    "  values:",
                    *(f"  - {text}" for text in UNTYPED),
                ]
            ),
        ),
    )
    on_command_line = [f"model.c{index}={text}" for index, text in enumerate(UNTYPED)]
    found = keywords(dry_run(folder, *on_command_line, f"model.flow=[{', '.join(UNTYPED)}]")[0])
    wanted = list(UNTYPED.values())
    for got in (
        [found[f"k{index}"] for index in range(len(wanted))],
        found["values"],
        [found[f"c{index}"] for index in range(len(wanted))],
        found["flow"],
    ):
        assert [(type(value), value) for value in got] == [(type(value), value) for value in wanted]


@pytest.mark.parametrize("on_command_line", [False, True])
def test_typed_settings_take_what_their_type_says(folder, on_command_line):
    given = {
        "run": ("010", "010"),
        "wandb_name": ("off", "off"),
        "wandb_project": ("12:30", "12:30"),
        "exp_dir": ("1e4", "1e4"),
        "max_steps": ("3.0", 3),
        "epochs": ("1e1", 10),
        "batch_size": ("1_000", 1000),
        "clip_norm": ("1", 1.0),
        "pg_timeout_s": ("6e1", 60.0),
        "compile": ("yes", True),
        "tf32": ("off", False),
        "use_wandb": ("True", True),
        "eval_every": ("None", None),
        "parallel": ("none", "none"),
        "fsdp_blocks": ("[010, Block, off]", ["010", "Block", "off"]),
    }
    if on_command_line:
        found, _ = dry_run(folder, *(f"{key}={text}" for key, (text, _) in given.items()))
    else:
        write(
            folder / "recipe.yaml", RECIPE + "".join(f"{key}: {text}\n" for key, (text, _) in given.items())
        )
        found, _ = dry_run(folder)
    for key, (_, wanted) in given.items():
        assert (key, type(found[key]), found[key]) == (key, type(wanted), wanted)


def test_keywords_with_annotations_take_what_these_say(folder):
    found, _ = dry_run(
        folder,
        "model.target=parts.py:Model",
        "model.name=010",
        "model.num_layers=4.0",
        "model.width=null",
        "model.scale=1",
        "model.fast=on",
        "model.sizes=[1.0, 2]",
        "model.kind=off",
    )
    assert keywords(found) == {
        "name": "010",
        "num_layers": 4,
        "width": None,
        "scale": 1.0,
        "fast": True,
        "sizes": [1, 2],
        "kind": "off",
    }
    assert type(found["model"]["scale"]) is float and type(found["model"]["num_layers"]) is int


def test_text_on_the_command_line_is_taken_whole(folder):
    found, _ = dry_run(
        folder,
        "wandb_name=a=b c",
        "run=#5: the [last] one",
        "wandb_project='quoted: 1'",
        "exp_dir=*x",
        "model.a=x=y",
        "model.b=two words",
        "model.c=cost #5",
        "model.d=#5",
        "model.e='#5'",
        "use_wandb=True",
    )
    assert [found[key] for key in ("wandb_name", "run", "wandb_project", "exp_dir")] == [
        "a=b c",
        "#5: the [last] one",
        "quoted: 1",
        "*x",
    ]
    assert keywords(found) == {"a": "x=y", "b": "two words", "c": "cost #5", "d": "#5", "e": "#5"}


# ---- Layers and overrides ------------------------------------------------------------------------


def test_defaults_base_recipe_and_command_line_lie_over_each_other(folder):
    write(
        folder / "lower" / "grand.yaml",
        "epochs: 2\nbatch_size: 2\nseed: 2\nkeep_last: 2\nmodel: {a: 1, list: [1, 2]}\n",
    )
    write(
        folder / "lower" / "base.yaml",
        "base: grand.yaml\nbatch_size: 3\nseed: 3\nkeep_last: 3\nmodel: {b: 2}\n"
        "schedule: {warmup_steps: 5}\n",
    )
    write(
        folder / "recipe.yaml",
        "base: lower/base.yaml\n"
        + RECIPE.replace("}", ", c: 3, list: [3]}", 1)
        + "seed: 4\nkeep_last: 4\nschedule:\n  kind: linear\n",
    )
    found, _ = dry_run(folder, "keep_last=5", "model.d.e.f=6", "schedule.kind=step", "schedule.kind=constant")
    assert [found[key] for key in ("accumulate", "epochs", "batch_size", "seed", "keep_last")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert found["schedule"]["kind"] == "constant" and found["schedule"]["warmup_steps"] == 5
    assert keywords(found) == {"a": 1, "b": 2, "c": 3, "list": [3], "d": {"e": {"f": 6}}}


def test_lists_are_replaced_or_changed_by_index(folder):
    found, _ = dry_run(
        folder,
        "model.betas=[0.9, 0.95]",
        "model.betas.0=0.8",
        "model.blocks=[{dim: 1}, {dim: 2}]",
        "model.blocks.1.dim=3",
        "model.blocks.0.heads=4",
        "fsdp_blocks=[A, B]",
        "fsdp_blocks.1=C",
    )
    assert keywords(found) == {"betas": [0.8, 0.95], "blocks": [{"dim": 1, "heads": 4}, {"dim": 3}]}
    assert found["fsdp_blocks"] == ["A", "C"]


def test_another_target_replaces_the_whole_component_unless_it_is_given_alone(folder):
    write(
        folder / "recipe.yaml", RECIPE.replace('"parts.py:optimizer"', '"parts.py:Anything", params: 0, b: 1')
    )
    found, _ = dry_run(folder, "optimizer={target: parts.py:optimizer, lr: 1e-2}")
    assert keywords(found, "optimizer") == {"lr": 0.01}
    write(folder / "recipe.yaml", RECIPE.replace('"parts.py:optimizer"', '"parts.py:Anything", lr: 0.5'))
    found, _ = dry_run(folder, "optimizer.target=parts.py:optimizer")
    assert keywords(found, "optimizer") == {"lr": 0.5}


def test_sections_that_are_empty_or_null(folder):
    write(
        folder / "recipe.yaml",
        RECIPE + "structured_logging:\n  # enabled: True\nschedule:\nval_data:\nbest: null\n",
    )
    found, _ = dry_run(folder, "best.mode=max", "val_data.target=parts.py:Data")
    assert found["structured_logging"]["heartbeat_s"] == 5.0 and found["schedule"]["kind"] == "cosine"
    assert found["best"] == {"metric": "val/loss", "mode": "max"} and keywords(found, "val_data") == {}


def test_anchors_byte_order_mark_and_windows_line_ends(folder):
    text = "\ufeff" + RECIPE.replace("null", "null\nval_data: {<<: *data, split: val}").replace(
        "train_data: {", "train_data: &data {split: train, path: null, "
    )
    (folder / "recipe.yaml").write_bytes(text.replace("\n", "\r\n").encode())
    found, _ = dry_run(folder)
    assert keywords(found, "val_data") == {"split": "val", "path": None}


def test_a_dry_run_prints_a_recipe_that_resolves_to_itself(folder):
    texts = [
        "off",
        "1e-4",
        "None",
        "null",
        "010",
        "12:30",
        "<<",
        "",
        " ",
        "- a",
        "a: b",
        "#",
        "x #y",
        "@a",
        "*a",
        "!t",
        "two\nlines",
        "tab\t",
        "quote'",
        'quote"',
        "\u00fc\u2028",
        "yes",
        "~",
        "1_000",
        ".5",
        "=",
        "&a",
        "%a",
        "`",
        "?",
    ]
    write(
        folder / "recipe.yaml",
        RECIPE.replace(
            '"parts.py:Anything"',
            '"parts.py:Anything", texts: '
            + yaml.safe_dump(texts, default_style='"', default_flow_style=True, width=10**6).strip()
            + ", numbers: {0: 1e-5, 1: .inf, 2: 3.0}",
        ),
    )
    first = run([sys.executable, TRAIN, "recipe.yaml", "--dry-run"], cwd=folder)
    assert first.returncode == 0, first.stderr
    assert yaml.safe_load(first.stdout)["model"]["texts"] == texts
    assert yaml.safe_load(first.stdout)["model"]["numbers"] == {0: 1e-5, 1: math.inf, 2: 3.0}
    write(folder / "elsewhere" / "again.yaml", first.stdout)
    again = run([sys.executable, TRAIN, "elsewhere/again.yaml", "--dry-run"], cwd=folder)
    assert (again.stdout, again.returncode) == (first.stdout, 0), again.stderr


def test_the_group_is_the_recipes_name_and_a_path_with_an_equals_sign_is_a_recipe(folder):
    write(folder / "lr=0.1" / "my gpt.yaml", RECIPE.replace("parts.py", "../parts.py"))
    assert dry_run(folder, "seed=3", recipe="lr=0.1/my gpt.yaml")[0]["group"] == "my gpt"


# ---- Components ----------------------------------------------------------------------------------


def test_files_and_data_paths_are_seen_from_the_file_that_names_them(folder):
    write(folder / "data" / "a.txt", "a")
    write(folder / "far" / "far.py", "from parts_beside import Data\n")
    write(folder / "far" / "parts_beside.py", PARTS)
    write(folder / "far" / "data" / "b.txt", "b")
    write(
        folder / "far" / "base.yaml",
        "train_data: {target: 'far.py:Data', path: data/b.txt, files: ['data/*.txt', none], "
        "root_dir: nothing/there, split: data}\nweights: data/b.txt\n",
    )
    write(
        folder / "recipe.yaml",
        "base: far/base.yaml\nval_data: {target: 'parts.py:Data', path: data}\n"
        + RECIPE.replace('train_data: {target: "parts.py:Data"}', ""),
    )
    other = write(folder / "cwd" / "c.txt", "c").parent
    found, _ = dry_run(
        other, "val_data.root_dir=c.txt", "val_data.files=~no-such-user/x", recipe="../recipe.yaml"
    )
    far = folder / "far"
    assert found["train_data"] == {
        "target": f"{far}/far.py:Data",
        "path": f"{far}/data/b.txt",
        "split": "data",
        "files": [f"{far}/data/*.txt", "none"],
        "root_dir": "nothing/there",
    }
    assert found["val_data"] == {
        "target": f"{folder}/parts.py:Data",
        "path": f"{folder}/data",
        "root_dir": f"{other}/c.txt",
        "files": "~no-such-user/x",
    }
    assert found["weights"] == f"{far}/data/b.txt"


def test_targets_may_be_functions_dataclasses_methods_builtins_and_modules_of_the_same_name(folder):
    write(
        folder / "more.py",
        "from dataclasses import dataclass\nimport functools\n@dataclass\nclass Point:\n    x: int\n"
        "    y: float = 0\n    @classmethod\n    def origin(cls, scale: int): pass\n"
        "partial = functools.partial(Point, x=1)\n",
    )
    write(folder / "json.py", PARTS)
    write(folder / "hooks.py", PARTS)
    for directory in ("one", "two"):
        write(folder / directory / "same.py", f"def {directory}(a: int): pass\n")
    found, _ = dry_run(
        folder,
        "model.p={target: more.py:Point, x: 1.0, y: 2}",
        "model.q={target: more.py:Point.origin, scale: 1e1}",
        "model.r={target: more.py:partial, y: 1}",
        "model.s={target: json.decoder.JSONDecoder, strict: off}",
        "model.t={target: json.py:optimizer, params: 1}",
        "model.u={target: hooks.py:Data}",
        "model.v=[{target: one/same.py:one, a: 1}, {target: two/same.py:two, a: 2.0}]",
        "model.w={target: builtins.dict, a: 1}",
        "model.x={target: 0.5}",
        "model.target=parts.py:Anything",
    )
    assert found["model"]["p"] == {"target": f"{folder}/more.py:Point", "x": 1, "y": 2.0}
    assert found["model"]["q"]["scale"] == 10 and found["model"]["r"]["y"] == 1.0
    assert found["model"]["s"] == {"target": "json.decoder.JSONDecoder", "strict": "off"}
    assert found["model"]["x"] == {"target": 0.5}
    assert found["model"]["v"][1] == {"target": f"{folder}/two/same.py:two", "a": 2}


# ---- Hooks ---------------------------------------------------------------------------------------

MY_HOOK = (
    "class MyHook:\n    def __init__(self, size: int = 1): pass\n    def after_step(self, state): pass\n"
)


def test_hooks_as_a_mapping_and_as_a_list(folder):
    write(folder / "my.py", MY_HOOK)
    without_hooks = RECIPE.replace("hooks: null\n", "")
    write(
        folder / "base.yaml",
        without_hooks + "hooks:\n  GarbageCollector: {log_frequency: 10}\n  slow:\n"
        "    type: GarbageCollector\n    log_frequency: 1e3\n",
    )
    write(
        folder / "mapping.yaml",
        "base: base.yaml\nhooks:\n  InformationWriter: null\n  IterationTimer:\n"
        "  mine: {target: 'my.py:MyHook', size: 2.0}\n",
    )
    found, _ = dry_run(
        folder,
        "hooks.GarbageCollector.log_frequency=20",
        "hooks.slow=null",
        "hooks.GarbageCollector#2.log_frequency=30",
        "hooks.late={type: GarbageCollector}",
        recipe="mapping.yaml",
    )
    assert list(found["hooks"].items()) == [
        ("InformationWriter", None),
        ("IterationTimer", {"type": "IterationTimer"}),
        ("GarbageCollector", {"type": "GarbageCollector", "log_frequency": 20}),
        ("mine", {"target": f"{folder}/my.py:MyHook", "size": 2}),
        ("GarbageCollector#2", {"type": "GarbageCollector", "log_frequency": 30}),
        ("late", {"type": "GarbageCollector"}),
    ]
    write(
        folder / "list.yaml",
        without_hooks + "hooks:\n- IterationTimer\n- type: GarbageCollector\n- type: GarbageCollector\n"
        "  log_frequency: 3\n- {target: 'my.py:MyHook'}\n- {target: 'my.py:MyHook', size: 3}\n",
    )
    found, _ = dry_run(folder, "hooks.GarbageCollector#2.log_frequency=4", recipe="list.yaml")
    assert found["hooks"] == {
        "IterationTimer": {"type": "IterationTimer"},
        "InformationWriter": {"type": "InformationWriter"},
        "GarbageCollector": {"type": "GarbageCollector"},
        "GarbageCollector#2": {"type": "GarbageCollector", "log_frequency": 4},
        "MyHook": {"target": f"{folder}/my.py:MyHook"},
        "MyHook#2": {"target": f"{folder}/my.py:MyHook", "size": 3},
    }


# ---- --help, --dry-run, settings without effect --------------------------------------------------


def test_help_lists_every_setting_without_importing_torch(folder):
    done = run([sys.executable, "-X", "importtime", TRAIN, "--help"], cwd=folder)
    assert done.returncode == 0
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "yaml" in imported and not {
        name for name in imported if name.partition(".")[0] in ("torch", "numpy", "wandb")
    }
    assert "usage: train.py RECIPE.yaml [key=value ...] [--dry-run] [--help]" in done.stdout
    # The settings are those that a dry run has, and a comment in the source is a comment in the help.
    found, _ = dry_run(folder, "best.mode=min")
    names = [f"{name}.{sub}" for name in ("schedule", "best", "structured_logging") for sub in found[name]]
    names += [name for name in found if name not in ("schedule", "structured_logging")]
    listed = {
        line.split()[0]: line for line in done.stdout.partition("Settings:")[2].splitlines()[1:] if line
    }
    assert sorted(listed) == sorted(names)
    assert (
        listed["max_steps"].split(None, 1)[1]
        == "null; a whole number >= 1 or null; optimizer steps; null: no limit"
    )
    assert listed["model"].split(None, 1)[1].startswith("required; {target: file.py:Name, keyword: value}; ")
    source = TRAIN.read_text()
    for line in listed.values():
        assert line.rpartition("; ")[2] in source


def test_without_arguments_the_usage_and_2(folder):
    for arguments in ([], ["seed=1"], ["--dry-run"]):
        done = run([sys.executable, TRAIN, *arguments], cwd=folder)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "train.py: which recipe?\n" "usage: train.py RECIPE.yaml [key=value ...] [--dry-run] [--help]\n"
        )


def test_settings_without_effect_are_named(folder):
    write(folder / "w.pt", "")
    _, said = dry_run(
        folder,
        "schedule.step_size=5",
        "schedule.gamma=0.5",
        "fsdp_blocks=[A]",
        "best.mode=max",
        "eval_every=3",
        "weights_strict=False",
        "wandb_project=x",
        "wandb_name=y",
        "structured_logging.heartbeat_s=1",
        "structured_logging.trace_hooks=True",
    )
    assert said.splitlines() == [
        "train.py: schedule.step_size has no effect: schedule.kind is cosine",
        "train.py: schedule.gamma has no effect: schedule.kind is cosine",
        "train.py: fsdp_blocks has no effect: parallel is ddp",
        "train.py: best has no effect: there is no val_data",
        "train.py: eval_every has no effect: there is no val_data",
        "train.py: weights_strict has no effect: there are no weights",
        "train.py: wandb_project has no effect: use_wandb is False",
        "train.py: wandb_name has no effect: use_wandb is False",
        "train.py: structured_logging.trace_hooks has no effect: structured_logging.enabled is False",
        "train.py: structured_logging.heartbeat_s has no effect: structured_logging.enabled is False",
    ]
    _, said = dry_run(
        folder,
        "schedule.kind=step",
        "schedule.step_size=5",
        "schedule.min_lr_ratio=0",
        "parallel=fsdp",
        "fsdp_blocks=[A]",
        "static_graph=True",
        "use_wandb=True",
        "wandb_name=y",
        "weights=w.pt",
        "resume=w.pt",
        "structured_logging={enabled: True, heartbeat_s: 1}",
    )
    assert said.splitlines() == [
        "train.py: schedule.min_lr_ratio has no effect: schedule.kind is step",
        "train.py: static_graph has no effect: parallel is fsdp",
        "train.py: weights has no effect: resume is set",
    ]


# ---- One message, whoever is started -------------------------------------------------------------

MISTAKE = "train.py: batchsize: no such setting\n  got: 3 (command line)\n  wanted: one of model, train_data,"


def one_message(folder):
    done = torchrun(8, TRAIN, "recipe.yaml", "batchsize=3", cwd=folder)
    assert done.returncode == 1
    assert done.stderr.count("no such setting") == 1 and MISTAKE in done.stderr, done.stderr
    assert done.stderr.count("  did you mean batch_size?\n") == 1
    assert 'Traceback (most recent call last):\n  File "' + str(TRAIN) not in done.stderr
    assert "exitcode  : 2" in done.stderr, done.stderr


def test_eight_processes_say_one_message(folder):
    one_message(folder)


@pytest.mark.long
def test_eight_processes_say_one_message_twenty_times(folder):
    for _ in range(20):
        one_message(folder)


def test_only_global_rank_0_prints_what_was_asked_for(folder):
    for arguments in (["recipe.yaml", "--dry-run", "best.mode=max"], ["--help"]):
        for rank, says in (("0", True), ("1", False), ("8", False)):
            done = run(
                [sys.executable, TRAIN, *arguments], cwd=folder, env={"RANK": rank, "LOCAL_RANK": rank[:1]}
            )
            assert (done.returncode, bool(done.stdout)) == (0, says), done.stderr
            assert ("has no effect" in done.stderr) == (says and "--help" not in arguments)


def catches_sigterm(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return int(mask.split()[1], 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_another_rank_waits_silently_to_be_ended_and_leaves_with_2(folder):
    process = subprocess.Popen(
        [sys.executable, TRAIN, "recipe.yaml", "epochs=0"],
        cwd=folder,
        stderr=subprocess.PIPE,
        env={**os.environ, "RANK": "9", "LOCAL_RANK": "1"},
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and not catches_sigterm(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    assert (process.communicate(timeout=120)[1], process.returncode) == (b"", 2)


@pytest.mark.long
def test_a_rank_that_is_alone_with_its_mistake_says_it(folder):
    done = run(
        [sys.executable, TRAIN, "recipe.yaml", "epochs=0"], cwd=folder, env={"RANK": "9", "LOCAL_RANK": "1"}
    )
    assert (done.returncode, done.stderr) == (
        2,
        "train.py: epochs: not a legal value\n  got: 0 (command line)\n" "  wanted: a whole number >= 1\n",
    )


# ---- The saved recipe ----------------------------------------------------------------------------

TORCH_PARTS = """
import torch
from sizes import WIDTH
from layers.block import Block

class Data(torch.utils.data.Dataset):
    def __init__(self, path): self.size = int(open(path).read())
    def __len__(self): return self.size
    def __getitem__(self, index): return {"x": torch.ones(WIDTH)}

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)
    def forward(self, x):
        import late
        return {"loss": late.square(self.block.linear(x)).mean()}
"""


def test_the_saved_recipe_runs_again_from_its_copies(tmp_path):
    source = tmp_path / "source"
    write(source / "model.py", TORCH_PARTS)
    write(source / "sizes.py", "WIDTH = 3\n")
    write(source / "late.py", "def square(x): return x ** 2\n")
    write(source / "unrelated.py", "raise SystemExit\n")
    write(source / "layers" / "__init__.py", "")
    write(
        source / "layers" / "block.py",
        "import torch\nclass Block(torch.nn.Module):\n    def __init__(self, width):\n"
        "        super().__init__()\n        self.linear = torch.nn.Linear(width, 1)\n",
    )
    write(tmp_path / "other" / "source" / "my.py", MY_HOOK)
    write(tmp_path / "size.txt", "8")
    write(
        source / "tiny.yaml",
        "model: {target: 'model.py:Model'}\ntrain_data: {target: 'model.py:Data', path: ../size.txt}\n"
        "hooks: {mine: {target: ../other/source/my.py:MyHook}}\n"
        "num_workers: 0\nbatch_size: 4\nmax_steps: 2\n",
    )
    done = run([sys.executable, TRAIN, "source/tiny.yaml", "run=first"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (tmp_path / "exp" / "tiny").iterdir()
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["run"] is None and saved["group"] == "tiny"
    copies = [
        str(path.relative_to(run_dir))
        for path in run_dir.rglob("*.py")
        if path.parent.parent.name != "launch"
    ]
    launch = saved["model"]["target"].rpartition("/source/")[0]
    assert sorted(copies) == sorted(
        f"{launch}/{name}"
        for name in (
            "source/model.py",
            "source/sizes.py",
            "source/late.py",
            "source/layers/__init__.py",
            "source/layers/block.py",
            "source_/my.py",
        )
    )
    # It needs neither the sources nor its place.
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "other")
    moved = shutil.move(run_dir, tmp_path / "moved")
    done = run([sys.executable, TRAIN, f"{moved}/config.yaml"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "exp" / "tiny").iterdir())) == 1
