"""What train.py says about mistakes in a recipe or on the command line: the whole message, and exit code 2."""

import sys

import pytest
from conftest import ROOT, run

TRAIN = ROOT / "train.py"
TARGET = "file.py:Name, from the folder of the file that says so, or module.Name"
EVENTS = ("before_train or before_epoch or before_step or after_backward or after_step or after_evaluate or"
          " after_epoch or after_train")

PARTS = """
class Model:
    def __init__(self, num_layers: int = 2, name: str = "m", scale: "float | None" = None): pass

class Needs:
    def __init__(self, dim: int, heads=1, /, other="x"): pass

class Shape:
    def __init__(self, dim: "int", kind: "Unknown"): pass

class Data:
    def __init__(self, path=None): pass

def optimizer(params, lr: float = 1e-3): pass

LIMIT = 5
"""
RECIPE = """model: {target: "parts.py:Model"}
train_data: {target: "parts.py:Data"}
optimizer: {target: "parts.py:optimizer", lr: 1e-3}
hooks: null
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "parts.py").write_text(PARTS)
    (folder / "broken.py").write_text("x = 1\ndef f(:\n")
    (folder / "raises.py").write_text("import parts\n\n\nparts.nothing\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "latin.yaml").write_bytes(b"group: \xe9\n")
    (folder / "folder.yaml").mkdir()
    return folder


def said(folder, arguments):
    done = run([sys.executable, TRAIN, *arguments, "--dry-run"], cwd=folder)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    return done.stderr


# "$ argument", and below it the message. FOLDER, TARGET, EVENTS and HOOKS stand for what is long or moves.
COMMAND_LINES = r"""
$ epochs=
epochs: nothing after the =
  wanted: epochs=null for none, epochs='""' for empty text

$ =v
=v: not a key
  wanted: key=value or section.key=value, no space before the =

$ a..b=v
a..b=v: not a key
  wanted: key=value or section.key=value, no space before the =

$ seed =1
seed =1: not a key
  wanted: key=value or section.key=value, no space before the =

$ epochs
epochs: not a setting
  wanted: key=value

$ --epochs=3
--epochs=3: no such option
  wanted: epochs=3, without dashes

$ --dryrun
--dryrun: no such option
  wanted: one of --dry-run, --help
  did you mean --dry-run?

$ schedule.kindd=step
schedule.kindd: no such setting
  got: step (command line)
  wanted: one of kind, warmup_steps, min_lr_ratio, step_size, gamma
  did you mean schedule.kind?

$ best.modus=max
best.modus: no such setting
  got: max (command line)
  wanted: one of metric, mode
  did you mean best.mode?

$ epochs.x=1
epochs.x: epochs is a value, not a section
  got: 1

$ optimizer.lr.x=1
optimizer.lr.x: optimizer.lr is a value, not a section
  got: 1e-3 (recipe.yaml, line 3)

$ schedule=cosine
schedule: a section, not a value
  got: cosine (command line)
  wanted: schedule.<setting> with one of kind, warmup_steps, min_lr_ratio, step_size, gamma

$ best=val/loss
best: a section, not a value
  got: val/loss (command line)
  wanted: best.<setting> with one of metric, mode

$ structured_logging=null
structured_logging: a section, not a value
  got: null (command line)
  wanted: structured_logging.<setting> with one of enabled, trace_hooks, trace_workers, batch_stats_every, max_file_size_mb, backup_count, heartbeat_s, stall_timeout_s

$ fsdp_blocks.0=A
fsdp_blocks.0: no element 0 in a list of 0
  got: []

$ fsdp_blocks.x=A
fsdp_blocks.x: no element x in a list of 0
  got: []

$ max_steps=3.5
max_steps: not a legal value
  got: 3.5 (command line)
  wanted: a whole number >= 1 or null

$ max_steps=True
max_steps: not a legal value
  got: True (command line)
  wanted: a whole number >= 1 or null

$ max_steps='3'
max_steps: not a legal value
  got: '3' (command line)
  wanted: a whole number >= 1 or null

$ max_steps=.inf
max_steps: not a legal value
  got: .inf (command line)
  wanted: a whole number >= 1 or null

$ epochs=0
epochs: not a legal value
  got: 0 (command line)
  wanted: a whole number >= 1

$ epochs=null
epochs: not a legal value
  got: null (command line)
  wanted: a whole number >= 1

$ epochs=010
epochs: not a legal value
  got: 010 (command line)
  wanted: a whole number >= 1

$ epochs=[1, 2]
epochs: not a legal value
  got: [1, 2] (command line)
  wanted: a whole number >= 1

$ seed=-1
seed: not a legal value
  got: -1 (command line)
  wanted: a whole number >= 0

$ clip_norm=0
clip_norm: not a legal value
  got: 0 (command line)
  wanted: a number > 0 or null

$ clip_norm=.nan
clip_norm: not a legal value
  got: .nan (command line)
  wanted: a number > 0 or null

$ clip_norm=1,5
clip_norm: not a legal value
  got: 1,5 (command line)
  wanted: a number > 0 or null

$ pg_timeout_s=1e999
pg_timeout_s: not a legal value
  got: 1e999 (command line)
  wanted: a number > 0

$ schedule.min_lr_ratio=2
schedule.min_lr_ratio: not a legal value
  got: 2 (command line)
  wanted: a number from 0 to 1

$ compile=1
compile: not a legal value
  got: 1 (command line)
  wanted: True or False

$ precision=bfp16
precision: not a legal value
  got: bfp16 (command line)
  wanted: fp32 or bf16 or fp16
  did you mean fp16?

$ parallel=DDP
parallel: not a legal value
  got: DDP (command line)
  wanted: ddp or fsdp or none
  did you mean ddp?

$ schedule.kind=cosin
schedule.kind: not a legal value
  got: cosin (command line)
  wanted: cosine or linear or step or constant
  did you mean cosine?

$ best.mode=maxi
best.mode: not a legal value
  got: maxi (command line)
  wanted: min or max
  did you mean max?

$ exp_dir=null
exp_dir: not a legal value
  got: null (command line)
  wanted: text

$ group=a/b
group: not a legal value
  got: a/b (command line)
  wanted: text without / or null

$ run=..
run: not a legal value
  got: .. (command line)
  wanted: text without / or null

$ fsdp_blocks=Block
fsdp_blocks: not a legal value
  got: Block (command line)
  wanted: a list of text

$ model.name=[1
model.name: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>' (line 1)

$ model.name=*x
model.name: not YAML: found undefined alias 'x' (line 1)

$ model={target: a.b, target: c.d}
model.target: written twice in the command line: lines 1 and 1

$ model.name=!!int 3
model.name: the tag tag:yaml.org,2002:int in line 1 is not supported

$ model=null
model: not a legal value
  got: null (command line)
  wanted: {target: file.py:Name, keyword: value}

$ val_data=parts.py:Data
val_data: not a legal value
  got: parts.py:Data (command line)
  wanted: {target: file.py:Name, keyword: value} or null

$ val_data.path=x
val_data: not a legal value
  got: {'path': 'x'}
  wanted: {target: file.py:Name, keyword: value} or null

$ model.target=5
model.target: not a target
  got: 5 (command line)
  wanted: TARGET

$ model.target=part.py:Model
model.target: no such file: FOLDER/part.py
  got: part.py:Model (command line)
  wanted: TARGET
  did you mean parts.py:Model?

$ model.target=parts.Model
model.target: no such target
  got: parts.Model (command line)
  wanted: TARGET
  did you mean parts.py:Model?

$ model.target=parts:Model
model.target: no such file: FOLDER/parts
  got: parts:Model (command line)
  wanted: TARGET
  did you mean parts.py:Model?

$ model.target=parts.py
model.target: no such target
  got: parts.py (command line)
  wanted: TARGET
  did you mean parts.py:Name?

$ model.target='parts.py:'
model.target: no such target
  got: 'parts.py:' (command line)
  wanted: TARGET
  did you mean parts.py:Name?

$ model.target=recipe.yaml:Model
model.target: no such target
  got: recipe.yaml:Model (command line)
  wanted: TARGET

$ model.target=.Model
model.target: no such target
  got: .Model (command line)
  wanted: TARGET

$ model.target=Model
model.target: no such target
  got: Model (command line)
  wanted: TARGET

$ model.target=no-module.Model
model.target: no such target
  got: no-module.Model (command line)
  wanted: TARGET

$ model.target=parts.py:Modell
model.target: parts has no Modell
  got: 'FOLDER/parts.py:Modell'
  wanted: TARGET
  did you mean Model?

$ model.target=parts.py:LIMIT
model.target: LIMIT is a int, not a class or function
  got: 'FOLDER/parts.py:LIMIT'
  wanted: TARGET

$ model.target=json.decoder.JSONDecode
model.target: json.decoder has no JSONDecode
  got: 'json.decoder.JSONDecode'
  wanted: TARGET
  did you mean JSONDecoder?

$ model.target=broken.py:f
model.target: does not import: SyntaxError: invalid syntax (broken.py, line 2)
  got: 'FOLDER/broken.py:f'

$ model.target=raises.py:f
model.target: does not import: AttributeError: module 'parts' has no attribute 'nothing' (FOLDER/raises.py, line 4)
  got: 'FOLDER/raises.py:f'

$ model.target=leaves.py:f
model.target: does not import: SystemExit: 3 (FOLDER/leaves.py, line 2)
  got: 'FOLDER/leaves.py:f'

$ model.num_layer=3
model.num_layer: Model has no such keyword
  got: 3 (command line)
  wanted: one of num_layers, name, scale
  did you mean num_layers?

$ model.num_layers=many
model.num_layers: not a legal value
  got: many (command line)
  wanted: a whole number

$ model.scale=big
model.scale: not a legal value
  got: big (command line)
  wanted: a number or null

$ model.target=parts.py:Shape
model.dim: Shape requires it
  wanted: a whole number

$ model={target: parts.py:Shape, dim: 3}
model.kind: Shape requires it
  wanted: any value

$ model.target=parts.py:Needs
model: Needs: missing a required argument: 'dim'
  got: {}

$ optimizer.params=3
optimizer.params: optimizer has no such keyword
  got: 3 (command line)
  wanted: one of lr

$ train_data.path={target: parts.py:Data, paht: 1}
train_data.path.paht: Data has no such keyword
  got: 1 (command line)
  wanted: one of path
  did you mean path?

$ hooks.GarbageColector.log_frequency=3
hooks.GarbageColector: no such hook
  wanted: one of HOOKS
  did you mean GarbageCollector?

$ hooks.gc.type=Garbage
hooks.gc.type: no such hook
  got: Garbage (command line)
  wanted: one of HOOKS
  did you mean GarbageCollector?

$ hooks.IterationTimer.log_freq=3
hooks.IterationTimer.log_freq: IterationTimer has no such keyword
  got: 3 (command line)
  wanted: one of log_frequency
  did you mean log_frequency?

$ hooks.IterationTimer.log_frequency=x
hooks.IterationTimer.log_frequency: not a legal value
  got: x (command line)
  wanted: a whole number or null

$ hooks.mine.target=parts.py:Data
hooks.mine.target: not a hook
  got: parts.py:Data (command line)
  wanted: a class with a method EVENTS

$ hooks.mine={target: parts.py:Data, type: X}
hooks.mine: has a type and a target
  got: {'target': 'parts.py:Data', 'type': 'X'} (command line)
  wanted: one of them

$ hooks.IterationTimer=5
hooks.IterationTimer: not a legal value
  got: 5 (command line)
  wanted: {setting: value, ...}, or null to drop the hook

$ hooks=[5]
hooks.0: a hook of no kind
  got: 5 (command line)
  wanted: {type: Name, setting: value, ...}

$ hooks=5
hooks: not a legal value
  got: 5 (command line)
  wanted: a mapping

$ hooks.IterationTimer=null
hooks.IterationTimer: no such hook to drop
  got: null (command line)
"""
CASES = dict(case.strip("\n").split("\n", 1) for case in COMMAND_LINES.split("$ ")[1:])

IMPORT_TORCH = (
    "hooks.gc.type=Garbage",
    "hooks.mine.target=parts.py:Data",
    "hooks.IterationTimer.log_frequency=x",
)


@pytest.mark.parametrize("argument", [argument for argument in CASES if argument not in IMPORT_TORCH])
def test_command_line(folder, argument):
    message = said(folder, ["recipe.yaml", argument])
    wanted = (
        CASES[argument].replace("FOLDER", str(folder)).replace("TARGET", TARGET).replace("EVENTS", EVENTS)
    )
    if "HOOKS" in wanted:
        listed = message.partition("wanted: one of ")[2].partition("\n")[0]
        names = listed.split(", ")
        assert {"GarbageCollector", "InformationWriter", "IterationTimer"} <= set(names)
        assert all(name[0].isupper() for name in names) and "HookDispatcher" not in names
        wanted = wanted.replace("HOOKS", listed)
    assert message == f"train.py: {wanted}\n"


@pytest.mark.long
@pytest.mark.parametrize("argument", IMPORT_TORCH)
def test_command_line_for_which_hooks_are_imported(folder, argument):
    test_command_line(folder, argument)


def test_unknown_settings_name_the_nearest_even_a_section_down(folder):
    keys = (
        run([sys.executable, TRAIN, "--help"], cwd=folder).stdout.partition("Settings:")[2].splitlines()[2:]
    )
    known = {line.split()[0].partition(".")[0] for line in keys}
    for argument, near in (
        ("bacth_size=8", "batch_size"),
        ("EPOCHS=3", "epochs"),
        ("lr=1e-3", "optimizer.lr"),
        ("warmup_steps=3", "schedule.warmup_steps"),
        ("trace_hook=1", "structured_logging.trace_hooks"),
    ):
        first, got, wanted, nearest = said(folder, ["recipe.yaml", argument]).splitlines()
        key, _, value = argument.partition("=")
        assert (first, got) == (f"train.py: {key}: no such setting", f"  got: {value} (command line)")
        assert set(wanted.removeprefix("  wanted: one of ").split(", ")) == known
        assert nearest == f"  did you mean {near}?"


# The recipe, and the lines of the message.
RECIPES = [
    ("",
     "x.yaml: the recipe is empty",
     "  wanted: a mapping with at least model and train_data"),
    ("# model: gpt\n",
     "x.yaml: the recipe is empty",
     "  wanted: a mapping with at least model and train_data"),
    ("- model\n",
     "x.yaml: not a recipe",
     "  got: ['model'] (x.yaml, line 1)",
     "  wanted: a mapping with at least model and train_data"),
    ("gpt\n",
     "x.yaml: not a recipe",
     "  got: gpt (x.yaml, line 1)",
     "  wanted: a mapping with at least model and train_data"),
    ("model:\n\ttarget: x\n",
     "x.yaml: not YAML: while scanning for the next token, found character '\\t' that cannot start any token"
     " (line 2)",
     "  wanted: spaces instead of tabs"),
    ("a: b: c\n",
     "x.yaml: not YAML: mapping values are not allowed here (line 1)"),
    ("a: 1\n---\nb: 2\n",
     "x.yaml: not YAML: expected a single document in the stream, but found another document (line 2)"),
    ("a: \x01\n",
     'x.yaml: not YAML: unacceptable character #x0001: special characters are not allowed in'
     ' "<unicode string>", position 3'),
    ("a: &a [*a]\n",
     "x.yaml: not a recipe: nested too deeply, or an alias that contains itself"),
    ("? [a]\n: 1\n",
     "x.yaml: a key must be text",
     "  got: ['a'] (x.yaml, line 1)"),
    ("a: !!python/name:os.system\n",
     "a: the tag tag:yaml.org,2002:python/name:os.system in line 1 is not supported"),
    ("schedule:\n  <<: 5\n",
     "schedule.<<: not a mapping",
     "  got: 5 (x.yaml, line 2)"),
    ("seed: 1\nepochs: 2\n'seed': 3\n",
     "seed: written twice in x.yaml: lines 1 and 3"),
    ("schedule:\n  kind: step\n\n  kind: step\n",
     "schedule.kind: written twice in x.yaml: lines 2 and 4"),
    ("base: x.yaml\n",
     "base: x.yaml is based on itself"),
    ("base: [recipe.yaml]\n",
     "base: not a legal value",
     "  got: ['recipe.yaml'] (x.yaml, line 1)",
     "  wanted: the path of a recipe"),
    ("base: recpe.yaml\n",
     "recpe.yaml: cannot read the base of FOLDER/x.yaml: No such file or directory",
     "  wanted: the path of a YAML file",
     "  did you mean recipe.yaml?"),
    ("base: recipe.yaml\nepochs: one\n",
     "epochs: not a legal value",
     "  got: one (x.yaml, line 2)",
     "  wanted: a whole number >= 1"),
    ("base: recipe.yaml\nschedule: step\n",
     "schedule: a section, not a value",
     "  got: step (x.yaml, line 2)",
     "  wanted: schedule.<setting> with one of kind, warmup_steps, min_lr_ratio, step_size, gamma"),
    ("base: recipe.yaml\nhooks: {GarbageColector: null}\n",
     "hooks.GarbageColector: no such hook to drop",
     "  got: null (x.yaml, line 2)"),
    ("model: {target: 'parts.py:Model'}\n",
     "train_data: required",
     "  wanted: {target: file.py:Name, keyword: value}"),
    ("base: recipe.yaml\nmodel:\n  target: gone.py:Model\n",
     "model.target: no such file: FOLDER/gone.py",
     "  got: gone.py:Model (x.yaml, line 3)",
     "  wanted: TARGET"),
]


@pytest.mark.parametrize("text, wanted", [(text, wanted) for text, *wanted in RECIPES])
def test_recipe_file(folder, text, wanted):
    (folder / "x.yaml").write_text(text)
    wanted = "\n".join(["train.py: " + wanted[0], *wanted[1:], ""])
    assert said(folder, ["x.yaml"]) == wanted.replace("FOLDER", str(folder)).replace("TARGET", TARGET)


def test_an_unknown_setting_in_a_file_is_said_with_its_line(folder):
    (folder / "x.yaml").write_text("base: recipe.yaml\nbatch_siez: 8\n")
    message = said(folder, ["x.yaml"])
    assert message.startswith("train.py: batch_siez: no such setting\n  got: 8 (x.yaml, line 2)\n  wanted: one of ")
    assert message.endswith("\n  did you mean batch_size?\n")


@pytest.mark.parametrize("arguments, wanted", [
    (["recipes.yaml"], "recipes.yaml: cannot read the recipe: No such file or directory\n"
                       "  wanted: the path of a YAML file\n  did you mean recipe.yaml?"),
    (["folder.yaml"], "folder.yaml: cannot read the recipe: Is a directory\n"
                      "  wanted: the path of a YAML file"),
    (["latin.yaml"], "latin.yaml: not a recipe: not UTF-8 text"),
    (["recipe.yaml", "latin.yaml"], "latin.yaml: not a setting\n  wanted: key=value"),
    (["recipe.yaml", "wandb_name=\udcff"], "'wandb_name=\\udcff': not UTF-8 text"),
])
def test_command_lines_of_several_words(folder, arguments, wanted):
    assert said(folder, arguments) == f"train.py: {wanted}\n"
