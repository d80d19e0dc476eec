"""What train.py says about every mistake in a recipe or on its command line: the whole message, and exit code 2."""

import sys

import pytest
from conftest import ROOT, run

TRAIN = ROOT / "train.py"
TARGET = "file.py:Name, from the folder of the file that says so, or module.Name"
EVENTS = ("before_train or before_epoch or before_step or after_backward or after_step or after_evaluate or after_epoch"
          " or after_train")

PARTS = '''
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
'''
RECIPE = '''model: {target: "parts.py:Model"}
train_data: {target: "parts.py:Data"}
optimizer: {target: "parts.py:optimizer", lr: 1e-3}
hooks: null
'''


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


COMMAND_LINES = {
    # How settings are written.
    "epochs=": "epochs: nothing after the =\n  wanted: epochs=null for none, epochs='\"\"' for empty text",
    "=v": "=v: not a key\n  wanted: key=value or section.key=value, no space before the =",
    "a..b=v": "a..b=v: not a key\n  wanted: key=value or section.key=value, no space before the =",
    "seed =1": "seed =1: not a key\n  wanted: key=value or section.key=value, no space before the =",
    "epochs": "epochs: not a setting\n  wanted: key=value",
    "--epochs=3": "--epochs=3: no such option\n  wanted: epochs=3, without dashes",
    "--dryrun": "--dryrun: no such option\n  wanted: one of --dry-run, --help\n  did you mean --dry-run?",
    # Keys.
    "schedule.kindd=step": "schedule.kindd: no such setting\n  got: step (command line)\n"
                           "  wanted: one of kind, warmup_steps, min_lr_ratio, step_size, gamma\n"
                           "  did you mean schedule.kind?",
    "best.modus=max": "best.modus: no such setting\n  got: max (command line)\n  wanted: one of metric, mode\n"
                      "  did you mean best.mode?",
    "wandb_name=\udcff": "'wandb_name=\\udcff': not UTF-8 text",
    "epochs.x=1": "epochs.x: epochs is a value, not a section\n  got: 1",
    "optimizer.lr.x=1": "optimizer.lr.x: optimizer.lr is a value, not a section\n  got: 1e-3 (recipe.yaml, line 3)",
    "schedule=cosine": "schedule: a section, not a value\n  got: cosine (command line)\n"
                       "  wanted: schedule.<setting> with one of kind, warmup_steps, min_lr_ratio, step_size, gamma",
    "best=val/loss": "best: a section, not a value\n  got: val/loss (command line)\n"
                     "  wanted: best.<setting> with one of metric, mode",
    "structured_logging=null": "structured_logging: a section, not a value\n  got: null (command line)\n"
                               "  wanted: structured_logging.<setting> with one of enabled, trace_hooks, trace_workers,"
                               " batch_stats_every, max_file_size_mb, backup_count, heartbeat_s, stall_timeout_s",
    "fsdp_blocks.0=A": "fsdp_blocks.0: no element 0 in a list of 0\n  got: []",
    "fsdp_blocks.x=A": "fsdp_blocks.x: no element x in a list of 0\n  got: []",
    # Types and legal values.
    "max_steps=3.5": "max_steps: not a legal value\n  got: 3.5 (command line)\n  wanted: a whole number >= 1 or null",
    "max_steps=True": "max_steps: not a legal value\n  got: True (command line)\n  wanted: a whole number >= 1 or null",
    "max_steps='3'": "max_steps: not a legal value\n  got: '3' (command line)\n  wanted: a whole number >= 1 or null",
    "max_steps=.inf": "max_steps: not a legal value\n  got: .inf (command line)\n  wanted: a whole number >= 1 or null",
    "epochs=0": "epochs: not a legal value\n  got: 0 (command line)\n  wanted: a whole number >= 1",
    "epochs=null": "epochs: not a legal value\n  got: null (command line)\n  wanted: a whole number >= 1",
    "epochs=010": "epochs: not a legal value\n  got: 010 (command line)\n  wanted: a whole number >= 1",
    "epochs=[1, 2]": "epochs: not a legal value\n  got: [1, 2] (command line)\n  wanted: a whole number >= 1",
    "seed=-1": "seed: not a legal value\n  got: -1 (command line)\n  wanted: a whole number >= 0",
    "clip_norm=0": "clip_norm: not a legal value\n  got: 0 (command line)\n  wanted: a number > 0 or null",
    "clip_norm=.nan": "clip_norm: not a legal value\n  got: .nan (command line)\n  wanted: a number > 0 or null",
    "clip_norm=1,5": "clip_norm: not a legal value\n  got: 1,5 (command line)\n  wanted: a number > 0 or null",
    "pg_timeout_s=1e999": "pg_timeout_s: not a legal value\n  got: 1e999 (command line)\n  wanted: a number > 0",
    "schedule.min_lr_ratio=2": "schedule.min_lr_ratio: not a legal value\n  got: 2 (command line)\n"
                               "  wanted: a number from 0 to 1",
    "compile=1": "compile: not a legal value\n  got: 1 (command line)\n  wanted: True or False",
    "precision=bfp16": "precision: not a legal value\n  got: bfp16 (command line)\n  wanted: fp32 or bf16 or fp16\n"
                       "  did you mean fp16?",
    "parallel=DDP": "parallel: not a legal value\n  got: DDP (command line)\n  wanted: ddp or fsdp or none\n"
                    "  did you mean ddp?",
    "schedule.kind=cosin": "schedule.kind: not a legal value\n  got: cosin (command line)\n"
                           "  wanted: cosine or linear or step or constant\n  did you mean cosine?",
    "best.mode=maxi": "best.mode: not a legal value\n  got: maxi (command line)\n  wanted: min or max\n  did you mean max?",
    "exp_dir=null": "exp_dir: not a legal value\n  got: null (command line)\n  wanted: text",
    "group=a/b": "group: not a legal value\n  got: a/b (command line)\n  wanted: text without / or null",
    "run=..": "run: not a legal value\n  got: .. (command line)\n  wanted: text without / or null",
    "fsdp_blocks=Block": "fsdp_blocks: not a legal value\n  got: Block (command line)\n  wanted: a list of text",
    # YAML on the command line.
    "model.name=[1": "model.name: not YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'"
                     " (line 1)",
    "model.name=*x": "model.name: not YAML: found undefined alias 'x' (line 1)",
    "model={target: a.b, target: c.d}": "model.target: written twice in the command line: lines 1 and 1",
    "model.name=!!int 3": "model.name: the tag tag:yaml.org,2002:int in line 1 is not supported",
    # Components.
    "model=null": "model: not a legal value\n  got: null (command line)\n"
                  "  wanted: {target: file.py:Name, keyword: value}",
    "val_data=parts.py:Data": "val_data: not a legal value\n  got: parts.py:Data (command line)\n"
                              "  wanted: {target: file.py:Name, keyword: value} or null",
    "val_data.path=x": "val_data: not a legal value\n  got: {'path': 'x'}\n"
                       "  wanted: {target: file.py:Name, keyword: value} or null",
    "model.target=5": f"model.target: not a target\n  got: 5 (command line)\n  wanted: {TARGET}",
    "model.target=part.py:Model": f"model.target: no such file: FOLDER/part.py\n  got: part.py:Model (command line)\n"
                                  f"  wanted: {TARGET}\n  did you mean parts.py:Model?",
    "model.target=parts.Model": f"model.target: no such target\n  got: parts.Model (command line)\n"
                                f"  wanted: {TARGET}\n  did you mean parts.py:Model?",
    "model.target=parts:Model": f"model.target: no such file: FOLDER/parts\n  got: parts:Model (command line)\n"
                                f"  wanted: {TARGET}\n  did you mean parts.py:Model?",
    "model.target=parts.py": f"model.target: no such target\n  got: parts.py (command line)\n"
                             f"  wanted: {TARGET}\n  did you mean parts.py:Name?",
    "model.target='parts.py:'": f"model.target: no such target\n  got: 'parts.py:' (command line)\n"
                                f"  wanted: {TARGET}\n  did you mean parts.py:Name?",
    "model.target=recipe.yaml:Model": f"model.target: no such target\n  got: recipe.yaml:Model (command line)\n"
                                      f"  wanted: {TARGET}",
    "model.target=.Model": f"model.target: no such target\n  got: .Model (command line)\n  wanted: {TARGET}",
    "model.target=Model": f"model.target: no such target\n  got: Model (command line)\n  wanted: {TARGET}",
    "model.target=no-module.Model": f"model.target: no such target\n  got: no-module.Model (command line)\n"
                                    f"  wanted: {TARGET}",
    "model.target=parts.py:Modell": f"model.target: parts has no Modell\n  got: 'FOLDER/parts.py:Modell'\n"
                                    f"  wanted: {TARGET}\n  did you mean Model?",
    "model.target=parts.py:LIMIT": f"model.target: LIMIT is a int, not a class or function\n"
                                   f"  got: 'FOLDER/parts.py:LIMIT'\n  wanted: {TARGET}",
    "model.target=json.decoder.JSONDecode": f"model.target: json.decoder has no JSONDecode\n"
                                            f"  got: 'json.decoder.JSONDecode'\n  wanted: {TARGET}\n"
                                            f"  did you mean JSONDecoder?",
    "model.target=broken.py:f": "model.target: does not import: SyntaxError: invalid syntax (broken.py, line 2)\n"
                                "  got: 'FOLDER/broken.py:f'",
    "model.target=raises.py:f": "model.target: does not import: AttributeError: module 'parts' has no attribute"
                                " 'nothing' (FOLDER/raises.py, line 4)\n  got: 'FOLDER/raises.py:f'",
    "model.target=leaves.py:f": "model.target: does not import: SystemExit: 3 (FOLDER/leaves.py, line 2)\n"
                                "  got: 'FOLDER/leaves.py:f'",
    "model.num_layer=3": "model.num_layer: Model has no such keyword\n  got: 3 (command line)\n"
                         "  wanted: one of num_layers, name, scale\n  did you mean num_layers?",
    "model.num_layers=many": "model.num_layers: not a legal value\n  got: many (command line)\n  wanted: a whole number",
    "model.scale=big": "model.scale: not a legal value\n  got: big (command line)\n  wanted: a number or null",
    "model.target=parts.py:Shape": "model.dim: Shape requires it\n  wanted: a whole number",
    "model={target: parts.py:Shape, dim: 3}": "model.kind: Shape requires it\n  wanted: any value",
    "model.target=parts.py:Needs": "model: Needs: missing a required argument: 'dim'\n  got: {}",
    "optimizer.params=3": "optimizer.params: optimizer has no such keyword\n  got: 3 (command line)\n"
                          "  wanted: one of lr",
    "train_data.path={target: parts.py:Data, paht: 1}": "train_data.path.paht: Data has no such keyword\n"
                                                        "  got: 1 (command line)\n  wanted: one of path\n"
                                                        "  did you mean path?",
    # Hooks.
    "hooks.GarbageColector.log_frequency=3": "hooks.GarbageColector: no such hook\n  wanted: one of HOOKS\n"
                                             "  did you mean GarbageCollector?",
    "hooks.gc.type=Garbage": "hooks.gc.type: no such hook\n  got: Garbage (command line)\n  wanted: one of HOOKS\n"
                             "  did you mean GarbageCollector?",
    "hooks.IterationTimer.log_freq=3": "hooks.IterationTimer.log_freq: IterationTimer has no such keyword\n"
                                       "  got: 3 (command line)\n  wanted: one of log_frequency\n"
                                       "  did you mean log_frequency?",
    "hooks.IterationTimer.log_frequency=x": "hooks.IterationTimer.log_frequency: not a legal value\n"
                                            "  got: x (command line)\n  wanted: a whole number or null",
    "hooks.mine.target=parts.py:Data": f"hooks.mine.target: not a hook\n  got: parts.py:Data (command line)\n"
                                       f"  wanted: a class with a method {EVENTS}",
    "hooks.mine={target: parts.py:Data, type: X}": "hooks.mine: has a type and a target\n"
                                                   "  got: {'target': 'parts.py:Data', 'type': 'X'} (command line)\n"
                                                   "  wanted: one of them",
    "hooks.IterationTimer=5": "hooks.IterationTimer: not a legal value\n  got: 5 (command line)\n"
                              "  wanted: {setting: value, ...}, or null to drop the hook",
    "hooks=[5]": "hooks.0: a hook of no kind\n  got: 5 (command line)\n  wanted: {type: Name, setting: value, ...}",
    "hooks=5": "hooks: not a legal value\n  got: 5 (command line)\n  wanted: a mapping",
    "hooks.IterationTimer=null": "hooks.IterationTimer: no such hook to drop\n  got: null (command line)",
}


IMPORT_TORCH = ("hooks.gc.type=Garbage", "hooks.mine.target=parts.py:Data", "hooks.IterationTimer.log_frequency=x")


@pytest.mark.parametrize("argument", [
    pytest.param(argument, marks=pytest.mark.long if argument in IMPORT_TORCH else ()) for argument in COMMAND_LINES])
def test_command_line(folder, argument):
    message = said(folder, ["recipe.yaml", argument])
    wanted = COMMAND_LINES[argument].replace("FOLDER", str(folder))
    if "HOOKS" in wanted:
        listed = message.partition("wanted: one of ")[2].partition("\n")[0]
        assert {"GarbageCollector", "InformationWriter", "IterationTimer"} <= set(listed.split(", "))
        assert not [name for name in listed.split(", ") if not name[0].isupper()] and "Dispatcher" not in listed
        wanted = wanted.replace("HOOKS", listed)
    assert message == f"train.py: {wanted}\n"


def test_unknown_settings_name_the_nearest_even_a_section_down(folder):
    keys = run([sys.executable, TRAIN, "--help"], cwd=folder).stdout.partition("Settings:")[2].splitlines()[2:]
    known = {line.split()[0].partition(".")[0] for line in keys}
    for argument, near in (("bacth_size=8", "batch_size"), ("EPOCHS=3", "epochs"), ("lr=1e-3", "optimizer.lr"),
                           ("warmup_steps=3", "schedule.warmup_steps"), ("trace_hook=1", "structured_logging.trace_hooks")):
        first, got, wanted, nearest = said(folder, ["recipe.yaml", argument]).splitlines()
        key, _, value = argument.partition("=")
        assert (first, got) == (f"train.py: {key}: no such setting", f"  got: {value} (command line)")
        assert set(wanted.removeprefix("  wanted: one of ").split(", ")) == known
        assert nearest == f"  did you mean {near}?"


RECIPES = {
    "": "x.yaml: the recipe is empty\n  wanted: a mapping with at least model and train_data",
    "# model: gpt\n": "x.yaml: the recipe is empty\n  wanted: a mapping with at least model and train_data",
    "- model\n": "x.yaml: not a recipe\n  got: ['model'] (x.yaml, line 1)\n"
                 "  wanted: a mapping with at least model and train_data",
    "gpt\n": "x.yaml: not a recipe\n  got: gpt (x.yaml, line 1)\n  wanted: a mapping with at least model and train_data",
    "model:\n\ttarget: x\n": "x.yaml: not YAML: while scanning for the next token, found character '\\t' that cannot start"
                             " any token (line 2)\n  wanted: spaces instead of tabs",
    "a: b: c\n": "x.yaml: not YAML: mapping values are not allowed here (line 1)",
    "a: 1\n---\nb: 2\n": "x.yaml: not YAML: expected a single document in the stream, but found another document (line 2)",
    "a: \x01\n": "x.yaml: not YAML: unacceptable character #x0001: special characters are not allowed in \"<unicode"
                 " string>\", position 3",
    "a: &a [*a]\n": "x.yaml: not a recipe: nested too deeply, or an alias that contains itself",
    "? [a]\n: 1\n": "x.yaml: a key must be text\n  got: ['a'] (x.yaml, line 1)",
    "a: !!python/name:os.system\n": "a: the tag tag:yaml.org,2002:python/name:os.system in line 1 is not supported",
    "schedule:\n  <<: 5\n": "schedule.<<: not a mapping\n  got: 5 (x.yaml, line 2)",
    "seed: 1\nepochs: 2\n'seed': 3\n": "seed: written twice in x.yaml: lines 1 and 3",
    "schedule:\n  kind: step\n\n  kind: step\n": "schedule.kind: written twice in x.yaml: lines 2 and 4",
    "base: x.yaml\n": "base: x.yaml is based on itself",
    "base: [recipe.yaml]\n": "base: not a legal value\n  got: ['recipe.yaml'] (x.yaml, line 1)\n"
                             "  wanted: the path of a recipe",
    "base: recpe.yaml\n": "recpe.yaml: cannot read the base of FOLDER/x.yaml: No such file or directory\n"
                          "  wanted: the path of a YAML file\n  did you mean recipe.yaml?",
    "base: recipe.yaml\nbatch_siez: 8\n": None,
    "base: recipe.yaml\nepochs: one\n": "epochs: not a legal value\n  got: one (x.yaml, line 2)\n"
                                        "  wanted: a whole number >= 1",
    "base: recipe.yaml\nschedule: step\n": "schedule: a section, not a value\n  got: step (x.yaml, line 2)\n"
                                           "  wanted: schedule.<setting> with one of kind, warmup_steps, min_lr_ratio,"
                                           " step_size, gamma",
    "base: recipe.yaml\nhooks: {GarbageColector: null}\n": "hooks.GarbageColector: no such hook to drop\n"
                                                           "  got: null (x.yaml, line 2)",
    "model: {target: 'parts.py:Model'}\n": "train_data: required\n  wanted: {target: file.py:Name, keyword: value}",
    "base: recipe.yaml\nmodel:\n  target: gone.py:Model\n": f"model.target: no such file: FOLDER/gone.py\n"
                                                           f"  got: gone.py:Model (x.yaml, line 3)\n  wanted: {TARGET}",
}


@pytest.mark.parametrize("text", RECIPES)
def test_recipe_file(folder, text):
    (folder / "x.yaml").write_text(text)
    message = said(folder, ["x.yaml"])
    if RECIPES[text] is None:
        assert message.startswith("train.py: batch_siez: no such setting\n  got: 8 (x.yaml, line 2)\n  wanted: one of model,")
        assert message.endswith("\n  did you mean batch_size?\n")
    else:
        assert message == f"train.py: {RECIPES[text]}\n".replace("FOLDER", str(folder))


@pytest.mark.parametrize("arguments, wanted", [
    (["recipes.yaml"], "recipes.yaml: cannot read the recipe: No such file or directory\n  wanted: the path of a YAML"
                       " file\n  did you mean recipe.yaml?"),
    (["folder.yaml"], "folder.yaml: cannot read the recipe: Is a directory\n  wanted: the path of a YAML file"),
    (["latin.yaml"], "latin.yaml: not a recipe: not UTF-8 text"),
    (["recipe.yaml", "latin.yaml"], "latin.yaml: not a setting\n  wanted: key=value"),
    (["recipe.yaml", "seed=1", "seed=x", "seed=2", "--dryrun"], "--dryrun: no such option\n  wanted: one of --dry-run,"
                                                              " --help\n  did you mean --dry-run?"),
])
def test_command_lines_of_several_words(folder, arguments, wanted):
    assert said(folder, arguments) == f"train.py: {wanted}\n"
