"""Train a PyTorch model from a YAML recipe, under torchrun or alone.

    python train.py recipes/gpt.yaml                                   # one process
    python train.py recipes/gpt.yaml optimizer.lr=3e-4 --dry-run       # print the resolved recipe and stop
    torchrun --nproc_per_node 2 train.py recipes/gpt.yaml run=first    # NCCL with GPUs, gloo without
    torchrun --nproc_per_node 2 train.py recipes/gpt.yaml resume=exp/gpt/first max_steps=400
    tail exp/gpt/first/train.log

Everything that a run leaves is in exp/<group>/<run>: train.log, config.yaml, launch/, checkpoints/, metrics
for TensorBoard or W&B and, with structured_logging.enabled=True, the traces that trace_tools.py reads.

Not here: tensor, pipeline and expert parallelism, sharded checkpoints (rank 0 writes one file, so the model
must fit into a host's memory), downloads, sweeps.

Contents, in the order of a run:

    Recipe           defaults, base recipes and key=value become typed settings
    Components       the user's classes and their keywords, checked before anything is built
    World            rank, device, process group, seeds
    Run directory    a new one, or where to go on; the launch files
    Logs             train.log and the console
    Metrics          from the device to TensorBoard or W&B, without waiting for either
    Building         data, optimizer, schedule, parallel model, hooks
    Checkpoints      files that are whole, and what is in them
    Stopping         signals, failures of other ranks, the agreement on the last step
    Tracing          what of backward is a rank's own work, and what is waiting
    Training         the loop: data, to device, forward, backward, hooks, clip, optimizer, log, evaluate, save
    The story        main
"""

from __future__ import annotations

import ast
import atexit
import collections
import contextlib
import difflib
import faulthandler
import glob
import hashlib
import importlib
import importlib.metadata
import inspect
import io
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import platform
import queue
import random
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import zipfile
import zlib
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import (Annotated, Any, Callable, Iterable, Iterator, Literal, Mapping, NamedTuple, NoReturn,
                    Optional, Union, get_args, get_origin, get_type_hints)

import yaml

logger = logging.getLogger("rankscope")


# ---- Recipe: defaults < base recipe < recipe < command line ------------------------------------------------

USAGE = "usage: train.py RECIPE.yaml [key=value ...] [--dry-run] [--help]"


class Limit(NamedTuple):
    """What a setting's value must be besides its type: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


# Types with a limit. They are what --help and messages show, and what load_recipe checks.
Count = Annotated[int, Limit(">= 1", lambda n: n >= 1)]
Whole = Annotated[int, Limit(">= 0", lambda n: n >= 0)]
Positive = Annotated[float, Limit("> 0", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Limit(">= 0", lambda x: 0 <= x < math.inf)]
Ratio = Annotated[float, Limit("from 0 to 1", lambda x: 0 <= x <= 1)]
FolderName = Annotated[str, Limit("without /", lambda name: "/" not in name and name not in ("", ".", ".."))]
Component = Annotated[dict, Limit("{target: file.py:Name, keyword: value}", lambda item: "target" in item)]


class RecipeError(ValueError):
    """A mistake of the user's in a recipe or on the command line; its text is the whole message."""


@dataclass
class ScheduleSettings:
    """How the learning rate moves over the steps of the run."""

    kind: Literal["cosine", "linear", "step", "constant"] = "cosine"  # after the warm-up
    warmup_steps: Whole = 0  # optimizer steps from 0 to the full rate; 0 is off
    min_lr_ratio: Ratio = 0.1  # cosine, linear: the last rate over the full one
    step_size: Count = 1000  # step: optimizer steps between two drops
    gamma: Positive = 0.1  # step: factor of a drop


@dataclass
class TracingSettings:
    """structured_logging: the per-process traces that trace_tools.py reads (see tracing.py)."""

    enabled: bool = False  # write traces
    trace_hooks: bool = False  # a span for every hook's call
    trace_workers: bool | None = None  # spans in data-loader workers; null: up to 64 ranks
    batch_stats_every: Whole = 1  # steps between batch-size scalars; 0 is off
    max_file_size_mb: Positive = 128.0  # MB of a file before it is rotated
    backup_count: Whole = 3  # rotated files kept
    heartbeat_s: NotNegative = 5.0  # seconds between signs of life; 0 is off
    stall_timeout_s: NotNegative = 120.0  # seconds of silence before stacks are written; 0 is off


@dataclass
class BestSettings:
    """Which checkpoint is kept as the best."""

    metric: str = "val/loss"  # a key that an evaluation writes
    mode: Literal["min", "max"] = "min"  # whether less or more of it is better


@dataclass
class Recipe:
    """All settings of a run; every one can be set as key=value on the command line."""

    model: Component  # a torch.nn.Module
    train_data: Component  # a map-style or iterable Dataset, or a DataLoader
    val_data: Component | None = None  # null: no evaluation
    optimizer: Component = field(default_factory=lambda: {"target": "torch.optim.AdamW"})  # gets params
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    group: FolderName | None = None  # null: the recipe's name
    run: FolderName | None = None  # null: the time of the start
    exp_dir: str = "exp"  # where run directories are made: <exp_dir>/<group>/<run>
    epochs: Count = 1  # passes over train_data
    max_steps: Count | None = None  # optimizer steps; null: no limit
    batch_size: Count = 16  # samples per rank and micro-batch
    accumulate: Count = 1  # micro-batches per optimizer step
    num_workers: Whole = 2  # data-loader processes per rank; 0: load in the training process
    clip_norm: Positive | None = None  # largest gradient norm; null: no clipping
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of forward and backward; weights stay fp32
    parallel: Literal["ddp", "fsdp", "none"] = "ddp"  # none: ranks exchange no gradients
    fsdp_blocks: list[str] = field(default_factory=list)  # class names that fully_shard wraps one by one
    compile: bool = False  # torch.compile the model
    tf32: bool = True  # TF32 matrix products on CUDA
    seed: Whole = 0  # of all random numbers; every rank derives its own
    stop_on_nan: bool = False  # end the run when the loss is not finite
    log_every: Count = 10  # steps between log lines
    eval_every: Count | None = None  # steps between evaluations; null: after each epoch
    save_every: Count | None = None  # steps between checkpoints; null: after each epoch
    keep_last: Count = 2  # checkpoints kept, besides the best
    best: BestSettings | None = None  # null: no best checkpoint
    resume: str | None = None  # a run directory or checkpoint to go on with
    weights: str | None = None  # a checkpoint to take the weights from
    weights_strict: bool = True  # refuse weights that lack a tensor or have one too many
    pg_timeout_s: Positive = 600.0  # seconds before a collective is given up
    stop_check_every: Count = 10  # steps between agreements on stopping
    use_wandb: bool = False  # Weights & Biases instead of TensorBoard
    wandb_project: str = "rankscope"  # where W&B shows the run
    wandb_name: str | None = None  # null: the run's name
    structured_logging: TracingSettings = field(default_factory=TracingSettings)
    find_unused_parameters: bool = False  # ddp: some parameters get no gradient in some steps
    static_graph: bool = False  # ddp: the same parameters get gradients in every step
    hooks: dict = field(default_factory=lambda: {"IterationTimer": {}, "InformationWriter": {}})  # by name


# How a recipe is read: YAML into Written texts (read_yaml), layer over layer (merge), then the command line
# (apply_override), all of it to the types above (coerce), and the classes that it names (Components).


class Written(str):
    """A scalar as somebody wrote it, and where: what `off` or `010` is, its setting's type decides."""

    def __new__(cls, text: str, file: Path | None = None, line: int = 0, plain: bool = True):
        self = super().__new__(cls, text)
        self.file, self.line, self.plain = file, line, plain  # no file: command line; plain: without quotes
        return self


# What scalars without quotes are where no type decides: YAML 1.1 makes 8 of 010, 750 of 12:30, bools of
# off and on, dates, and text of 1e-4 and None; here the first are text, 1e-4 is a float and None is none.
NULLS = ("null", "Null", "NULL", "None", "~")
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
INT = re.compile(r"[-+]?(0|[1-9][0-9]*|[1-9][0-9]{0,2}(_[0-9]{3})+)|0x[0-9a-fA-F]+|0o[0-7]+")
FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan")


def is_plain(value, texts) -> bool:
    """Whether value is one of the texts, written without quotes."""
    return isinstance(value, Written) and value.plain and value in texts


def resolve(value):
    """Written as none, bool, int, float or text where no type decides; also inside lists and mappings."""
    if isinstance(value, dict):
        return {resolve(key): resolve(item) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve(item) for item in value]
    if not isinstance(value, Written) or not value.plain:
        return str(value) if isinstance(value, str) else value
    text = str(value)
    if text in NULLS or not text:
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if INT.fullmatch(text):
        return int(text, 0)
    return float(text.replace(".inf", "inf").replace(".nan", "nan")) if FLOAT.fullmatch(text) else text


def mistake(key: str, problem: str, got=None, wanted: str = "", near: str = "", known=()) -> RecipeError:
    """The one message: key and problem, what was got and where, what was wanted, the nearest known name.

    known: the names that may have been meant, or name -> what to suggest for it.
    """
    lines = [f"{key}: {problem}"]
    if got is not None:
        text = str(got) if isinstance(got, Written) and got.plain else repr(resolve(got))
        first = next(iter(got), None) if isinstance(got, (dict, list)) else got
        where = f" ({first.file}, line {first.line})" if getattr(first, "file", None) else (
            " (command line)" if isinstance(first, Written) else "")
        lines.append(f"  got: {text[:200] or 'nothing'}{'...' if len(text) > 200 else ''}{where}")
    if wanted or known:
        lines.append(f"  wanted: {wanted or 'one of ' + ', '.join(known)}")
    name = nearest(near, known)
    if name is not None:
        lines.append(f"  did you mean {known[name] if isinstance(known, dict) else name}?")
    return RecipeError("\n".join(lines))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, whatever its case."""
    matches = difflib.get_close_matches(name.lower(), [each.lower() for each in known], 1)
    return next((each for each in known if each.lower() in matches), None)


def join(key: str, name) -> str:
    """The dotted key of a setting in the section key."""
    return f"{key}.{name}" if key else str(name)


class RecipeLoader(yaml.SafeLoader):
    """Marks scalars without quotes as such, where YAML 1.1 would guess their type."""

    def resolve(self, kind, value, implicit):
        return "plain" if kind is yaml.ScalarNode and implicit[0] else super().resolve(kind, value, implicit)


def read_yaml(text: str, file: Path | None, key: str = ""):
    """Text as dicts, lists and Written; None if there is nothing in it. Raises RecipeError with the line."""
    source = key or str(file)
    try:
        node = yaml.compose(text, Loader=RecipeLoader)
        return node and from_node(node, file, key)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line
        tab = "\t" in "".join(text.splitlines()[line:line + 1])
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise mistake(source, f"not YAML: {problem} (line {line + 1})",
                      wanted="spaces instead of tabs" if tab else "") from None
    except yaml.YAMLError as error:
        raise mistake(source, f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise mistake(source, "not a recipe: nested too deeply, or an alias that contains itself") from None


def from_node(node, file: Path | None, key: str):
    """A YAML node as dict, list or Written; `<<: *anchor` merges; a key written twice is a mistake."""
    line = node.start_mark.line + 1
    if node.tag not in ("plain", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))):
        raise mistake(key or str(file), f"the tag {node.tag} in line {line} is not supported")
    if isinstance(node, yaml.ScalarNode):
        return Written(node.value, file, line, plain=node.tag == "plain")
    if isinstance(node, yaml.SequenceNode):
        return [from_node(item, file, join(key, index)) for index, item in enumerate(node.value)]
    own = {}
    for name_node, value_node in node.value:
        name = from_node(name_node, file, key)
        if not isinstance(name, Written):
            raise mistake(key or str(file), "a key must be text", got=name)
        if name in own:
            first = next(other for other in own if other == name)
            lines = f"lines {first.line} and {name.line}"
            raise mistake(join(key, name), f"written twice in {file or 'the command line'}: {lines}")
        own[name] = from_node(value_node, file, join(key, name))
    # The merge key: what a mapping says itself goes first, then the earlier of several.
    inherited = own.pop("<<", {})
    for mapping in inherited if isinstance(inherited, list) else [inherited]:
        if not isinstance(mapping, dict):
            raise mistake(join(key, "<<"), "not a mapping", got=mapping)
        own = {**mapping, **own}
    return own


def read_layers(path: Path, above: tuple = ()) -> list[dict]:
    """The settings of a recipe file, after those of the recipes that it is based on."""
    if os.path.realpath(path) in above:
        raise mistake("base", f"{path} is based on itself")
    try:
        settings = read_yaml(path.read_bytes().decode("utf-8-sig"), path)  # without a byte-order mark
    except UnicodeDecodeError:
        raise mistake(str(path), "not a recipe: not UTF-8 text") from None
    except OSError as error:
        others = sorted(file.name for file in path.parent.glob("*.y*ml") if file.is_file())
        what = f"the base of {above[-1]}" if above else "the recipe"
        raise mistake(str(path), f"cannot read {what}: {error.strerror}", wanted="the path of a YAML file",
                      near=path.name, known=others) from None
    if not isinstance(settings, dict):
        problem = "the recipe is empty" if settings is None else "not a recipe"
        raise mistake(str(path), problem, got=settings, wanted="a mapping with at least model and train_data")
    base = settings.pop("base", None)
    if resolve(base) is None:
        return [settings]
    if not isinstance(base, str):
        raise mistake("base", "not a legal value", got=base, wanted="the path of a recipe")
    return [*read_layers(path.parent / os.path.expanduser(base), (*above, os.path.realpath(path))), settings]


def merge(low, high, key: str = ""):
    """High over low: mappings merge, all else replaces; so does a component or a hook of another kind."""
    if key == "hooks":
        high = {name: None for name in low} if is_plain(high, NULLS) else hooks_by_name(high)
    if isinstance(low, dict) and is_plain(high, ("",)):
        return low  # a section in which every line is commented out
    if not isinstance(low, dict) or not isinstance(high, dict):
        return high
    # The keywords of one class are not those of another.
    kinds = ("target", "type") if key.startswith("hooks.") else ("target",)
    before, after = ([item.get(kind) for kind in kinds] for item in (low, high))
    if before != after and any(before) and any(after):
        return high
    merged = dict(low)
    for name, value in high.items():
        if key == "hooks" and (value is None or is_plain(value, NULLS)):
            if name not in merged:
                raise mistake(join(key, name), "no such hook to drop", got=value, near=name, known=list(low))
            del merged[name]
            continue
        if key == "hooks" and is_plain(value, ("",)):
            value = {}  # "GradientNormLogger:" with nothing after it switches that hook on
        merged[name] = merge(low.get(name), value, join(key, name))
    return merged


def hooks_by_name(hooks):
    """Hooks written as a list, as the mapping by name that they stand for; a second of a kind gets #2."""
    if not isinstance(hooks, list):
        return hooks
    named: dict = {}
    for index, hook in enumerate(hooks):
        kind = hook.get("type", hook.get("target")) if isinstance(hook, dict) else hook
        if not isinstance(resolve(kind), str):
            raise mistake(f"hooks.{index}", "a hook of no kind", hook, "{type: Name, setting: value, ...}")
        kind = re.split(r"[.:]", kind)[-1]
        taken = sum(name.partition("#")[0] == kind for name in named)
        named[f"{kind}#{taken + 1}" if taken else kind] = hook if isinstance(hook, dict) else {"type": hook}
    return named


def apply_override(settings: dict, argument: str) -> dict:
    """The settings with one key=value of the command line applied."""
    key, equals, text = argument.partition("=")
    text, path = text.strip(), key.split(".")
    if not equals:
        raise mistake(argument, "not a setting", wanted="key=value")
    if not all(path) or key.split() != [key]:
        raise mistake(argument, "not a key", wanted="key=value or section.key=value, no space before the =")
    if not text:
        raise mistake(key, "nothing after the =", wanted=f"{key}=null for none, {key}='\"\"' for empty text")
    # Text is taken whole, with its # and : in it, unless quoted; so is what YAML reads as an unquoted scalar.
    value = Written(text) if is_text(path) and text[0] not in "\"'" else read_yaml(text, None, key)
    value = Written(text) if value is None or isinstance(value, Written) and value.plain else value
    return put(settings, path, value, key)


def is_text(path: list[str]) -> bool:
    """Whether the path leads to a setting whose type is text."""
    kind: Any = Recipe
    for name in path:
        section = section_of(kind)
        kind = get_type_hints(section).get(name) if section else None
    return kind in (str, Optional[str])


def section_of(kind):
    """The dataclass of a setting that is a section, also of one that may be null; None for a value."""
    return next((option for option in (kind, *get_args(kind)) if is_dataclass(option)), None)


def put(node, path: list[str], value, key: str, above: str = ""):
    """A copy of node with value at path: through mappings by name, through lists by index."""
    if not path:
        return merge(node, value, above)
    name, *rest = path
    if isinstance(node, list):
        if not name.isdecimal() or int(name) >= len(node):
            raise mistake(key, f"no element {name} in a list of {len(node)}", got=node)
        node = list(node)
        node[int(name)] = put(node[int(name)], rest, value, key, join(above, name))
        return node
    node = {} if resolve(node) is None else node
    if not isinstance(node, dict):
        raise mistake(key, f"{above} is a value, not a section", got=node)
    # A target that is given alone changes the target alone.
    if not rest and name not in ("target", "type"):
        return merge(node, {name: value}, above)
    return {**node, name: put(node.get(name), rest, value, key, join(above, name))}


def fit(value, kind):
    """The value as the kind of thing that a setting or an annotation asks for; ValueError when it is none."""
    origin, args, found = get_origin(kind), get_args(kind), resolve(value)
    if origin in (Union, UnionType):
        members = [member for member in args if member is not type(None)]
        if found is None and len(members) < len(args):
            return None
        return fit(value, members[0]) if len(members) == 1 else found
    if origin is Annotated:
        fitted = fit(value, args[0])
        if all(limit.holds(fitted) for limit in args[1:] if isinstance(limit, Limit)):
            return fitted
    elif origin is Literal:
        for choice in args:
            if choice == found and type(choice) is type(found) or choice == value:
                return choice
    elif origin is list:
        if isinstance(value, list):
            return [fit(item, args[0]) for item in value]
    elif kind is str:
        if isinstance(value, str) and found is not None:
            return str(value)
    elif kind is bool:
        if isinstance(found, bool) or str(found).lower() in SWITCHES:
            return SWITCHES[str(found).lower()]
    elif kind is int:  # which 3.0 is as well, and True is not
        if type(found) in (int, float) and found == found // 1:
            return int(found)
    elif kind is float:
        if type(found) in (int, float):
            return float(found)
    elif kind is not dict or isinstance(value, dict):
        return value  # a type that only the class itself can check
    raise ValueError(f"{value!r} is no {kind!r}")


def describe(kind) -> str:
    """A type in words, for messages and --help."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(describe(member) for member in args)
    if origin is Annotated:
        return f"{describe(args[0])} {args[1].words}".removeprefix("a mapping ")
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin is list:
        return f"a list of {describe(args[0])}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "True or False", dict: "a mapping",
             type(None): "null", Any: "any value"}
    return "a section" if is_dataclass(kind) else names.get(kind) or inspect.formatannotation(kind)


def coerce(value, kind, key: str):
    """The value as its setting's type, a section setting by setting. Raises RecipeError."""
    section = section_of(kind)
    if section is None or (resolve(value) is None and section is not kind):
        try:
            return fit(value, kind)
        except (ValueError, OverflowError):
            choices = [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []
            raise mistake(key, "not a legal value", value, describe(kind), str(value), choices) from None
    kinds = get_type_hints(section, include_extras=True)
    if not isinstance(value, dict):
        raise mistake(key, "a section, not a value", value, f"{key}.<setting> with one of {', '.join(kinds)}")
    # What is not known here may be known one section down: lr is optimizer.lr.
    known = {sub: join(name, sub) for name, item in value.items() if isinstance(item, dict) for sub in item}
    known.update({name: join(key, name) for name in kinds})
    for name, item in value.items():
        if name not in kinds:
            raise mistake(join(key, name), "no such setting", item, f"one of {', '.join(kinds)}", name, known)
    for item in fields(section):
        if item.name not in value and item.default is MISSING and item.default_factory is MISSING:
            raise mistake(join(key, item.name), "required", wanted=describe(kinds[item.name]))
    return section(**{str(name): coerce(item, kinds[name], join(key, name)) for name, item in value.items()})


def load_recipe(argv: list[str]) -> Recipe:
    """The recipe that a command line asks for, every name, type, file and signature in it checked.

    --help and --dry-run print and raise SystemExit(0). Raises RecipeError for a mistake of the user's.
    """
    path, overrides = read_command_line(argv)
    settings = asdict(Recipe({}, {}))
    del settings["model"], settings["train_data"]
    for layer in read_layers(path):
        settings = merge(settings, layer)
    for argument in overrides:
        settings = apply_override(settings, argument)
    for name in ("resume", "weights"):
        settings[name] = beside(settings[name])
    recipe = coerce(settings, Recipe, "")
    recipe.group = recipe.group or path.stem
    # Files and modules first, then hooks, then the user's own classes: the imports take longer and longer.
    components = {name: getattr(recipe, name) for name in COMPONENTS if getattr(recipe, name) is not None}
    for name, component in components.items():
        find_target(component["target"], f"{name}.target")
    recipe.hooks = {str(name): check_hook(str(name), hook) for name, hook in recipe.hooks.items()}
    for name, component in components.items():
        setattr(recipe, name, check_component(name, component, ("params",) if name == "optimizer" else ()))
    if "--dry-run" in argv:
        leave_with(dump_yaml(recipe_to_dict(recipe)), without_effect(recipe))
    return recipe


def read_command_line(argv: list[str]) -> tuple[Path, list[str]]:
    """The recipe's path and the key=value arguments."""
    if "-h" in argv or "--help" in argv:
        leave_with(help_text())
    for argument in argv:
        if argument != argument.encode(errors="replace").decode():
            raise mistake(repr(argument), "not UTF-8 text")
    for option in argv:
        if option.startswith("-") and option != "--dry-run":
            raise mistake(option, "no such option", near=option, known=["--dry-run", "--help"],
                          wanted=f"{option.lstrip('-')}, without dashes" if "=" in option else "")
    words = [argument for argument in argv if not argument.startswith("-")]
    # A run directory may have a = in its name, so what is there as a file is a recipe.
    paths = [word for word in words if "=" not in word or os.path.isfile(word)]
    if not paths:
        raise RecipeError(f"which recipe?\n{USAGE}")
    if len(paths) > 1:
        raise mistake(paths[1], "not a setting", wanted="key=value")
    return Path(paths[0]), [word for word in words if word not in paths]


def leave_with(text: str, warnings: Iterable[str] = ()) -> NoReturn:
    """Print the text, and the warnings to stderr, once however many ranks there are, and leave."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("".join(f"train.py: {line}\n" for line in warnings))
        print(text, end="")
    sys.exit(0)


def help_text() -> str:
    """The head of this file, and every setting with its default, type and comment from the source."""
    lines = [(__doc__ or "").strip(), "", USAGE, "", "Settings: default; legal values; meaning", ""]
    for section, name in ((Recipe, ""), (ScheduleSettings, "schedule"), (BestSettings, "best"),
                          (TracingSettings, "structured_logging")):
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(section), re.MULTILINE))
        for item in fields(section):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            if not is_dataclass(default):  # else its settings have lines of their own
                text = "required" if default is MISSING else json.dumps(default)
                kind = describe(get_type_hints(section, include_extras=True)[item.name])
                lines.append(f"  {join(name, item.name):<37} {text}; {kind}; {comments.get(item.name, '')}")
    return "\n".join(lines) + "\n"


def without_effect(recipe: Recipe) -> list[str]:
    """A line for every setting that somebody changed and that does nothing beside the others."""
    defaults, kind, parallel = Recipe({}, {}), recipe.schedule.kind, recipe.parallel
    tracing = [f"structured_logging.{name}" for name in vars(recipe.structured_logging) if name != "enabled"]
    rules = [
        (kind != "step", f"schedule.kind is {kind}", ["schedule.step_size", "schedule.gamma"]),
        (kind in ("step", "constant"), f"schedule.kind is {kind}", ["schedule.min_lr_ratio"]),
        (parallel != "fsdp", f"parallel is {parallel}", ["fsdp_blocks"]),
        (parallel != "ddp", f"parallel is {parallel}", ["find_unused_parameters", "static_graph"]),
        (recipe.val_data is None, "there is no val_data", ["best", "eval_every"]),
        (recipe.weights is None, "there are no weights", ["weights_strict"]),
        (recipe.resume is not None, "resume is set", ["weights"]),
        (not recipe.use_wandb, "use_wandb is False", ["wandb_project", "wandb_name"]),
        (not recipe.structured_logging.enabled, "structured_logging.enabled is False", tracing),
    ]
    return [f"{key} has no effect: {why}" for idle, why, keys in rules if idle for key in keys
            if attrgetter(key)(recipe) != attrgetter(key)(defaults)]


def local_mistake(error: RecipeError) -> NoReturn:
    """Say the message once a node, and leave with 2.

    torchrun ends the other ranks of a node as soon as one has left: they wait for that, so that none ends
    local rank 0 before it has spoken. A rank still there after 20 s is alone with its mistake, and says it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(2))
        time.sleep(20)
    sys.stderr.write(f"train.py: {error}\n")
    sys.stderr.flush()
    os._exit(2)  # past Python's own exit, in which gloo's threads have been seen to abort


class RecipeDumper(yaml.SafeDumper):
    """Writes YAML that read_yaml and resolve read as it was."""

    def ignore_aliases(self, data):
        return True

    def represent_text(self, text: str):
        same = isinstance(resolve(Written(text)), str) and text != "<<"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if same else "'")


RecipeDumper.add_representer(str, RecipeDumper.represent_text)


def dump_yaml(settings: dict) -> str:
    """Settings as YAML text that train.py reads back the same."""
    return yaml.dump(settings, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=110)


def recipe_to_dict(recipe: Recipe) -> dict:
    """The recipe as plain dicts and lists, in the order of the settings; dropped default hooks are None."""
    dropped = {name: None for name in Recipe({}, {}).hooks if name not in recipe.hooks}
    return {**asdict(recipe), "hooks": {**dropped, **recipe.hooks}}


# ---- Components: a class of the user's and its keyword arguments -------------------------------------------

COMPONENTS = ("model", "train_data", "val_data", "optimizer")
PATH_KEYWORD = re.compile(r".*(path|file|dir|folder|root)s?")  # keywords whose text may name a file or folder
TARGET = "file.py:Name, from the folder of the file that says so, or module.Name"


def folder_of(value) -> Path:
    """The folder that a relative path is relative to: the recipe's that it is written in, or where we are."""
    return value.file.parent if getattr(value, "file", None) else Path.cwd()


def beside(value):
    """A path, or each of a list, made absolute if something is there in folder_of it; else as written."""
    if isinstance(value, list):
        return [beside(item) for item in value]
    if not isinstance(value, Written) or not isinstance(resolve(value), str):
        return value
    path = os.path.abspath(folder_of(value) / os.path.expanduser(value))
    found = os.path.exists(path) or any(True for _ in glob.iglob(path, recursive=True))
    return Written(path, value.file, value.line, plain=False) if found else value


def find_target(target, key: str) -> str:
    """A target as /absolute/file.py:Name or module.Name. Raises RecipeError for no such file or module."""
    if not isinstance(resolve(target), str):
        raise mistake(key, "not a target", got=target, wanted=TARGET)
    file, colon, name = target.rpartition(":")
    module, *names = target.split(".")
    path = os.path.abspath(folder_of(target) / os.path.expanduser(file))
    if colon and name and file.endswith(".py") and os.path.isfile(path):
        return f"{path}:{name}"
    if not colon and module and names and all(names) and (module in sys.modules or find_spec(module)):
        return str(target)
    problem = f"no such file: {path}" if colon and not os.path.exists(path) else "no such target"
    name = name if colon else names[-1] if names and names[-1] != "py" else ""
    known = {found.stem: f"{found.name}:{name or 'Name'}" for found in sorted(folder_of(target).glob("*.py"))}
    raise mistake(key, problem, target, TARGET, near=Path(file).stem if colon else module, known=known)


def locate(target: str, key: str = "target"):
    """The class or function that a target names; its module is imported once. Raises RecipeError."""
    file, colon, name = target.rpartition(":")
    module, *names = [file, *name.split(".")] if colon else target.split(".")
    try:
        found = import_file(Path(file)) if colon else importlib.import_module(module)
        # Attributes as far as they go, submodules where a package has not imported them.
        for name in names:
            owner = getattr(found, "__name__", "")
            if not hasattr(found, name) and hasattr(found, "__path__") and find_spec(f"{owner}.{name}"):
                importlib.import_module(f"{owner}.{name}")
            if not hasattr(found, name):
                raise mistake(key, f"{owner} has no {name}", target, TARGET, name, dir(found))
            found = getattr(found, name)
    except RecipeError:
        raise
    except (Exception, SystemExit) as error:
        text = f"does not import: {type(error).__name__}: {error}"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename[0] != "<"]
        if not isinstance(error, SyntaxError):  # which says itself where it is
            text += f" ({frames[-1].filename}, line {frames[-1].lineno})"
        raise mistake(key, text, target) from error
    if not callable(found):
        raise mistake(key, f"{name} is a {type(found).__name__}, not a class or function", target, TARGET)
    return found


def import_file(path: Path):
    """A .py file as a module: under its own name if that is free, so that data-loader workers find it too."""
    if str(path.parent) not in sys.path:
        sys.path.insert(1, str(path.parent))  # as for a script: it can import the files beside it
    spec = find_spec(path.stem) if path.stem.isidentifier() else None
    if spec and spec.origin and os.path.exists(spec.origin) and path.samefile(spec.origin):
        return importlib.import_module(path.stem)
    # Another module has the name: the file gets one that no other file has.
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def check_component(key: str, component: dict, extra: tuple = ()) -> dict:
    """The component with an absolute target and typed keywords; extra: keywords that the loop passes."""
    target = find_target(component["target"], f"{key}.target")
    keywords = {name: value for name, value in component.items() if name != "target"}
    return {"target": target, **check_call(key, locate(target, f"{key}.target"), keywords, extra)}


def check_call(key: str, function, keywords: dict, extra: tuple = ()) -> dict:
    """The keywords as the function's signature wants them. Raises RecipeError when it cannot be called so."""
    title = getattr(function, "__name__", str(function))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature: it checks its keywords itself
        signature = inspect.signature(lambda **_: None)
    given = signature.parameters.values()
    known = {item.name: item for item in given if item.name not in extra
             and item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)}
    kinds = {name: annotation(item, function) for name, item in known.items()}
    # bind says whether something is wrong; below, what.
    try:
        signature.bind(**dict.fromkeys(extra), **keywords)
    except TypeError as error:
        takes_any = any(item.kind is item.VAR_KEYWORD for item in given)
        for name, value in keywords.items():
            if name not in known and not takes_any:
                problem = f"{title} has no such keyword"
                raise mistake(join(key, name), problem, value, near=name, known=list(known)) from None
        for name, item in known.items():
            if item.default is item.empty and name not in keywords:
                raise mistake(join(key, name), f"{title} requires it", wanted=describe(kinds[name])) from None
        raise mistake(key, f"{title}: {error}", got=keywords) from None
    return {str(name): check_value(join(key, name), value, kinds.get(name, Any))
            for name, value in keywords.items()}


def annotation(parameter: inspect.Parameter, function):
    """The type that a parameter asks for; Any when it does not say, or says what is not there at run time."""
    kind = Any if parameter.annotation is parameter.empty else parameter.annotation
    if isinstance(kind, str):
        try:
            kind = eval(kind, dict(vars(sys.modules[function.__module__])))
        except Exception:
            return Any
    return Optional[kind] if parameter.default is None else kind  # `size: int = None` takes None


def check_value(key: str, value, kind=Any):
    """A keyword's value: a component of its own, or a path, or what the annotation says."""
    if is_component(value):
        return check_component(key, value)
    fitted = coerce(beside(value) if PATH_KEYWORD.fullmatch(key) else value, kind, key)
    if isinstance(value, dict):
        return {resolve(name): check_value(join(key, name), item) for name, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return [check_value(join(key, index), item) for index, item in enumerate(value)]
    return resolve(fitted)


def is_component(value) -> bool:
    """Whether a keyword's value is a component of its own: a mapping whose target looks like one."""
    target = resolve(value.get("target")) if isinstance(value, dict) else None
    return isinstance(target, str) and re.search(r"\w[.:]\w", target) is not None


def check_hook(name: str, settings) -> dict:
    """A hook's settings with its type or target, as the constructor of its class wants them."""
    key = join("hooks", name)
    if not isinstance(settings, dict):
        raise mistake(key, "not a legal value", settings, "{setting: value, ...}, or null to drop the hook")
    if "target" in settings and "type" in settings:
        raise mistake(key, "has a type and a target", settings, "one of them")
    import hooks  # here, since it brings torch with it: the checks before do without

    if "target" in settings:
        checked = check_component(key, settings)
        hook = locate(checked["target"])
        if inspect.isclass(hook) and not any(hasattr(hook, event) for event in hooks.EVENTS):
            methods = [name for name in vars(hook) if difflib.get_close_matches(name, hooks.EVENTS, 1)]
            raise mistake(f"{key}.target", "not a hook", settings["target"],
                          f"a class with a method {' or '.join(hooks.EVENTS)}", "".join(methods[:1]),
                          hooks.EVENTS)
        return checked
    types = {kind: found for kind, found in vars(hooks).items() if not kind.startswith("_")
             and inspect.isclass(found) and any(hasattr(found, event) for event in hooks.EVENTS)}
    kind = str(settings.get("type", name.partition("#")[0]))
    if kind not in types:
        raise mistake(join(key, "type") if "type" in settings else key, "no such hook", settings.get("type"),
                      near=kind, known=sorted(types))
    keywords = {setting: value for setting, value in settings.items() if setting != "type"}
    return {"type": kind, **check_call(key, types[kind], keywords)}


def build(component: dict, **extra):
    """What a component describes: its target called with its keywords and extra."""
    keywords = {name: build_value(value) for name, value in component.items() if name != "target"}
    return locate(component["target"])(**extra, **keywords)


def build_value(value):
    """A keyword's value with the components in it built."""
    if isinstance(value, list):
        return [build_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    return build(value) if is_component(value) else {name: build_value(item) for name, item in value.items()}


def recipe_files(recipe: Recipe) -> dict[Path, str]:
    """The files of the targets and what they import from their folders -> their places in a launch folder."""
    targets: list[str] = []
    map_targets(recipe_to_dict(recipe), targets.append)
    places, folders = {}, {}
    for target in targets:
        path = Path(target.rpartition(":")[0])
        name = path.parent.name or "root"
        while folders.setdefault(name, path.parent) != path.parent:
            name += "_"  # another folder of the same name
        for file in with_imports(path, path.parent, set()):
            places[file] = f"{name}/{file.relative_to(path.parent)}"
    return places


def map_targets(value, change: Callable[[str], Any]):
    """Settings with change(target) for every target that is a file's."""
    if isinstance(value, list):
        return [map_targets(item, change) for item in value]
    if not isinstance(value, dict):
        return value
    is_file = is_component(value) and ".py:" in value["target"]
    return {name: change(item) if is_file and name == "target" else map_targets(item, change)
            for name, item in value.items()}


def with_imports(path: Path, folder: Path, found: set[Path]) -> set[Path]:
    """A Python file, the files and packages in folder that it imports, and what those import."""
    found.add(path)
    imported = set()
    with contextlib.suppress(SyntaxError, ValueError):  # a file that is imported only if it must be
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    for name in imported:
        for file in [folder / f"{name}.py", *(folder / name).rglob("*.py")]:
            if file.is_file() and file not in found:
                with_imports(file, folder, found)
    return found


def saved_recipe(recipe: Recipe, launch_dir: Path) -> dict:
    """The settings for <run directory>/config.yaml; copies the target files to where these settings say.

    launch_dir is <run directory>/launch/attempt_<n>. The run's name is left out: the next run is another one.
    """
    places = recipe_files(recipe)
    for file, place in places.items():
        (launch_dir / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, launch_dir / place)

    def copied(target: str) -> str:
        file, _, name = target.rpartition(":")
        return f"{(launch_dir / places[Path(file)]).relative_to(launch_dir.parents[1])}:{name}"

    return {**map_targets(recipe_to_dict(recipe), copied), "run": None}


# Torch takes seconds to import, on many nodes with one disk minutes. What the recipe part can answer alone it
# answers before: --help, a misspelt key, a file that is not there.
if __name__ == "__main__":
    try:
        RECIPE = load_recipe(sys.argv[1:])
    except RecipeError as mistaken:
        local_mistake(mistaken)

import numpy
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
                              Sampler, SequentialSampler, get_worker_info)

import hooks
from tracing import (close_structured_logger, init_structured_logger, log_trace_instant, log_trace_scalar,
                     log_trace_span, set_step, trace_worker_init)


# ---- World: this process among all others ------------------------------------------------------------------


@dataclass
class World:
    """Where this process stands among all others, and the device that it computes on."""

    rank: int = 0  # of all processes
    local_rank: int = 0  # on this host
    world_size: int = 1
    local_world_size: int = 1  # processes on this host
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: str = field(default_factory=socket.gethostname)
    store: dist.Store | None = None  # how ranks talk before there is a process group
    notices: dist.Store | None = None  # the same by a connection of its own, for the stopper's thread
    hosts: dist.ProcessGroup | None = None  # gloo, on the hosts' processors: what needs no device

    def share(self, key: str, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on every rank; only the store is needed, no process group.

        A RecipeError of rank 0's is raised on every rank.
        """
        if self.store is None:
            return make()
        if self.rank == 0:
            try:
                made = make()
            except RecipeError as error:
                made = error
            self.store.set(key, pickle.dumps(made))
        made = pickle.loads(self.store.get(key))
        if isinstance(made, RecipeError):
            raise made
        return made

    def agree(self, value: int, op: Any, name: str) -> int:
        """The smallest (dist.ReduceOp.MIN) or largest (MAX) value of all ranks, on every rank."""
        if self.world_size == 1:
            return value
        number = torch.tensor(value)
        with log_trace_span(name, sync=True):
            dist.all_reduce(number, op, group=self.hosts)
        return int(number)

    def gather(self, value: Any, name: str) -> list:
        """Every rank's value on every rank; ranks wait for each other in a span of that name."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        with log_trace_span(name, sync=True):
            dist.all_gather_object(values, value, group=self.hosts)
        return values


def find_world() -> World:
    """This process's place by torchrun's variables; alone without them. No CUDA call, no communication.

    Raises RecipeError for more local processes than GPUs.
    """
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE",
             "local_world_size": "LOCAL_WORLD_SIZE"}
    world = World(**{name: int(os.environ[key]) for name, key in names.items() if key in os.environ})
    num_gpus = torch.cuda.device_count()  # counted by NVML, without initialising CUDA
    if num_gpus and world.local_world_size > num_gpus:
        raise RecipeError(f"{world.local_world_size} processes on {world.host}, which has {num_gpus} GPUs:"
                          f" start at most one process per GPU (torchrun --nproc_per_node {num_gpus}), or"
                          f" hide the GPUs to train on the CPU (CUDA_VISIBLE_DEVICES= torchrun ...)")
    if num_gpus:
        world.device = torch.device("cuda", world.local_rank)
    return world


def connect(world: World, timeout_s: float) -> None:
    """Reach torchrun's store, so that ranks can agree on the run directory before anything that may hang."""
    if "RANK" in os.environ:
        # What an earlier start of the same torchrun said may still be there.
        prefix = f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        world.store, world.notices = (
            dist.PrefixStore(prefix, next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))[0])
            for _ in range(2))


def join_process_group(world: World, recipe: Recipe) -> None:
    """NCCL on CUDA, gloo on the CPU; besides, a gloo group for what the hosts agree on."""
    on_cuda = world.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(world.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.tf32
    if world.store is None:
        return
    timeout = timedelta(seconds=recipe.pg_timeout_s)
    dist.init_process_group("nccl" if on_cuda else "gloo", store=world.store, rank=world.rank,
                            world_size=world.world_size, timeout=timeout,
                            device_id=world.device if on_cuda else None)
    world.hosts = dist.new_group(backend="gloo", timeout=timeout)


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers: neighbours give unrelated seeds, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def is_alive(pid: int) -> bool:
    """Also False for a process that has ended and that torchrun has not looked at yet."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


# ---- Run directory -----------------------------------------------------------------------------------------


@dataclass
class Start:
    """What rank 0 decides for all ranks: where this start of a run writes, and what it goes on from."""

    run_dir: Path
    attempt: int  # which start of the run this is, from 0
    wandb_id: str  # a resumed run goes on in the same W&B run
    checkpoint: Path | None  # what it goes on from; None: from the beginning
    asked_for: bool  # by resume=, and not by a restart
    warnings: list[str]  # from before there was a train.log

    @property
    def launch_dir(self) -> Path:
        return self.run_dir / "launch" / f"attempt_{self.attempt}"


def choose_start(recipe: Recipe) -> Start:
    """A restart by torchrun goes on in its run directory, resume= where it says, anything else in a new one.

    Rank 0 alone, before there is a process group. Raises RecipeError for what cannot be gone on from.
    """
    warnings: list[str] = []
    run_dir, checkpoint = run_before_restart(recipe), None
    if run_dir is not None:
        checkpoint = latest_checkpoint(run_dir / "checkpoints", warnings.append)
    if checkpoint is None and recipe.resume:
        checkpoint = find_checkpoint(recipe.resume, "resume", warnings.append)
        if problem := damage(checkpoint):
            raise RecipeError(f"resume={checkpoint} is damaged ({problem}). The name of its run directory in"
                              f" place of the file's takes the newest checkpoint that is whole")
    if checkpoint is None and recipe.weights:
        find_checkpoint(recipe.weights, "weights", warnings.append)  # a path that is not there stops at once
    if run_dir is None:
        home = home_of(checkpoint)
        is_other = recipe.run and home != (Path(recipe.exp_dir) / recipe.group / recipe.run).absolute()
        run_dir = new_run_dir(recipe) if home is None or is_other else home
    saved = load_checkpoint(checkpoint, "resume") if checkpoint else {}
    earlier = sorted((run_dir / "launch").glob("attempt_*/start.json"), key=lambda path: path.stat().st_mtime)
    known_id = json.loads(earlier[-1].read_text())["wandb_id"] if earlier else secrets.token_hex(4)
    start = Start(run_dir, saved.get("attempt", -1) + 1, saved.get("wandb_id", known_id), checkpoint,
                  torchrun_identity()["restart"] == 0, warnings)
    while start.launch_dir.exists():
        start.attempt += 1
    start.launch_dir.mkdir(parents=True)
    facts = {**torchrun_identity(), "attempt": start.attempt, "wandb_id": start.wandb_id,
             "checkpoint": checkpoint}
    text = json.dumps(facts, default=str).encode()
    write_durably(start.launch_dir / "start.json", lambda file: file.write(text))
    return start


def home_of(checkpoint: Path | None) -> Path | None:
    """The run directory in which a checkpoint lies; None for one that was copied elsewhere."""
    is_in_place = checkpoint is not None and checkpoint.parent.name == "checkpoints"
    return checkpoint.parents[1] if is_in_place and (checkpoint.parents[1] / "launch").is_dir() else None


def torchrun_identity() -> dict[str, Any]:
    """What tells this torchrun from all others: its run id where it has one of its own, else its process."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {"run_id": run_id, "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
            "host": socket.gethostname(), "agent_pid": os.getppid()}


def run_before_restart(recipe: Recipe) -> Path | None:
    """The run directory that this torchrun wrote into before its restart; None at a first start."""
    me = torchrun_identity()
    if me["restart"] == 0:
        return None
    folders = [Path(recipe.exp_dir) / recipe.group]
    if recipe.resume:  # a run directory, its checkpoints, or one of them
        folders += [Path(recipe.resume).parent, *Path(recipe.resume).parents[1:3]]
    found = {path for folder in folders for path in folder.glob("*/launch/attempt_*/start.json")}
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        told = json.loads(path.read_text())
        # Rank 0 may come back under another node's torchrun. No two jobs have an id at the same time.
        is_here = told["host"] == me["host"]
        is_own = is_here and told["agent_pid"] == me["agent_pid"]
        is_other_node = me["run_id"] != "none" and not (is_here and not is_alive(told["agent_pid"]))
        if told["run_id"] == me["run_id"] and (is_own or is_other_node):
            return path.parents[2].absolute()
    return None


def new_run_dir(recipe: Recipe) -> Path:
    """Make the directory of a fresh run. Raises RecipeError for a name that was used before."""
    parent = Path(recipe.exp_dir) / recipe.group
    if recipe.run:
        run_dir = parent / recipe.run
        if run_dir.exists() and any(run_dir.iterdir()):
            raise RecipeError(f"run={recipe.run}: {run_dir} was used before; a fresh start never writes into"
                              f" it. Give another run=, or go on with it: resume={run_dir}")
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir.absolute()
    start = time.strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        run_dir = parent / (start if attempt == 1 else f"{start}-{attempt}")
        try:
            run_dir.mkdir(parents=True)  # atomic: of two jobs of the same second one takes the next name
            return run_dir.absolute()
        except FileExistsError:
            continue


def write_launch_files(recipe: Recipe, start: Start, hosts: list[str]) -> None:
    """What tells how this start came about: launch/attempt_<n>/."""
    here, launch_dir = Path(__file__).resolve().parent, start.launch_dir
    facts = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "folder": os.getcwd(),
        "hosts": hosts,
        "torchrun": {**torchrun_identity(), "nodes": int(os.environ.get("GROUP_WORLD_SIZE", 1)),
                     "processes": int(os.environ.get("WORLD_SIZE", 1))},
        "git_commit": git(here, "rev-parse", "HEAD"),
        "versions": versions(),
    }
    (launch_dir / "launch.json").write_text(json.dumps(facts, indent=2) + "\n")
    if diff := git(here, "diff", "HEAD"):
        (launch_dir / "git.diff").write_text(diff + "\n")
    for script in ("train.py", "hooks.py", "tracing.py", "trace_tools.py"):
        if (here / script).exists():
            shutil.copy(here / script, launch_dir)


def git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints, None where there is no git, no repository or no answer in 10 s."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip()


def versions() -> dict[str, str | None]:
    """Python's, CUDA's and the packages' versions, for launch files and traces."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda, "platform": platform.platform()}
    for package in ("torch", "numpy", "PyYAML", "tensorboard", "wandb", "psutil", "nvidia-ml-py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# ---- Logs: train.log and the console -----------------------------------------------------------------------


LOG_TIME = "%Y-%m-%d %H:%M:%S"


class LogFile(logging.FileHandler):
    """A file that several processes append to, whole records at a time; a full disk never ends training."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True
            problem = f"{self.baseFilename} cannot be written ({sys.exc_info()[1]})"
            print(f"{problem}; training goes on", file=sys.stderr)


class RankLogFile(LogFile):
    """train.rank<N>.log: made at the first warning of a rank other than 0, and then named in train.log."""

    def _open(self):
        own = Path(self.baseFilename)
        add_to_train_log(own.parent, "WARNING", f"another rank wrote a warning: see {own.name}")
        return super()._open()


def add_to_train_log(run_dir: Path, level: str, text: str) -> None:
    """A line in rank 0's train.log from another rank."""
    with contextlib.suppress(OSError), open(run_dir / "train.log", "a") as log:
        log.write(f"{time.strftime(LOG_TIME)} {level:<7} {text}\n")


class Console(logging.StreamHandler):
    """Rank 0's console: every record, or, on a terminal, the progress lines as one live line."""

    live = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_progress = getattr(record, "progress", False) and self.stream.isatty()
            if is_progress:
                width = shutil.get_terminal_size().columns
                self.stream.write(f"\r\x1b[2K{self.format(record)[: width - 1]}")
            else:
                self.stream.write(("\n" if self.live else "") + self.format(record) + "\n")
            self.live = is_progress
            self.stream.flush()
        except OSError:  # the reader of a pipe has gone away; train.log has it all
            pass


def start_logging(world: World, run_dir: Path) -> None:
    """Rank 0: console and train.log. Other ranks: a file of their own from the first warning on."""
    run_dir.mkdir(parents=True, exist_ok=True)  # on other nodes, when they do not share a file system
    text = "%(asctime)s %(levelname)-7s %(message)s"
    if world.rank == 0:
        handlers = [LogFile(run_dir / "train.log", encoding="utf-8"), Console(sys.stdout)]
    else:
        text = text.replace("%(message)s", f"rank {world.rank} on {world.host}: %(message)s")
        handlers = [RankLogFile(run_dir / f"train.rank{world.rank}.log", delay=True, encoding="utf-8")]
        handlers[0].setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, handlers=handlers, format=text, datefmt=LOG_TIME, force=True)
    logging.captureWarnings(True)


def log_failure(world: World, run_dir: Path, text: str, error: BaseException | None) -> None:
    """The last words of a run that failed: whole in this rank's log, one line in train.log from any rank."""
    logger.error(text, exc_info=None if isinstance(error, RecipeError) else error)
    if world.rank != 0:
        add_to_train_log(run_dir, "ERROR", text)


# ---- Metrics -----------------------------------------------------------------------------------------------


class MetricLog:
    """Numbers on their way from the device to the writer, without a device synchronisation on ordinary steps.

    A step's values are copied to pinned memory and written when the copy's event says that they have arrived,
    in order. It also keeps the sums for the epoch means train/*, and warns once about each value that is not
    finite.
    """

    def __init__(self, writer: MetricWriter | None, attempt: int) -> None:
        self.writer, self.attempt = writer, attempt
        self.waiting: collections.deque = collections.deque()  # (step, epoch, keys, tensor, event, numbers)
        self.epoch_sums: dict[str, list[float]] = {}  # key: sum, count
        self.not_finite: set[str] = set()
        self.bad_loss: tuple[int, float] | None = None  # step and value of the first loss that was no number

    def add(self, step: int, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Numbers and one-element tensors of one step."""
        tensors = {key: value for key, value in metrics.items() if isinstance(value, Tensor)}
        numbers = {key: float(value) for key, value in metrics.items() if key not in tensors}
        packed, event = None, None
        if tensors:
            packed = torch.stack([value.detach().reshape(()).double() for value in tensors.values()])
            if packed.is_cuda:
                pinned = torch.empty(len(tensors), dtype=torch.float64, pin_memory=True)
                packed = pinned.copy_(packed, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
        self.waiting.append((step, epoch, list(tensors), packed, event, numbers))
        self.write_arrived()

    def write_arrived(self, wait: bool = False) -> None:
        """Write what has arrived, oldest first; wait=True waits for all: a device synchronisation."""
        while self.waiting:
            step, epoch, keys, packed, event, numbers = self.waiting[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self.waiting.popleft()
            values = dict(zip(keys, packed.tolist()) if keys else (), **numbers)
            self._write(step, epoch, values)

    def _write(self, step: int, epoch: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            if key.startswith("train_batch/"):
                sums = self.epoch_sums.setdefault(key, [0.0, 0])
                sums[0] += value
                sums[1] += 1
            if not math.isfinite(value) and key not in self.not_finite:
                self.not_finite.add(key)
                if key == "train_batch/loss":
                    self.bad_loss = step, value
                logger.warning("%s is %s at step %d (said once for each metric)", key, value, step)
        if self.writer is not None:
            self.writer.write(step, {**values, "epoch": epoch, "attempt": self.attempt})

    def close(self, failed: bool) -> None:
        """Write what is still on its way, then close the writer."""
        try:
            self.write_arrived(wait=True)
        except RuntimeError as error:  # the device itself has failed
            logger.warning("the last metrics are lost: %s", error)
        if self.writer is not None:
            self.writer.close(failed)

    def end_epoch(self, step: int, epoch: int) -> dict[str, float]:
        """Write and return train/*: the means over the epoch of what was logged as train_batch/*."""
        self.write_arrived(wait=True)
        means = {"train/" + key.removeprefix("train_batch/"): total / count
                 for key, (total, count) in self.epoch_sums.items()}
        if means:
            self._write(step, epoch, means)
        return means


class MetricPlace(threading.Thread):
    """A place that metrics go to, by a thread of its own: whatever happens there, the training goes on."""

    def __init__(self, label: str, open_place: Callable, writes: list[tuple]) -> None:
        """open_place() returns write(step, values) and close(failed). writes: the first (step, values)."""
        super().__init__(name="metric writer", daemon=True)
        self.label, self.open_place = label, open_place
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()  # (step, values), then has the run failed
        self.recent: collections.deque = collections.deque(maxlen=MetricWriter.num_recent)
        self.busy_since = time.monotonic()  # infinity while there is nothing to do
        self.error: BaseException | None = None
        self.is_closed = False
        for item in writes:
            self.waiting.put(item)
        self.start()

    def run(self) -> None:
        try:
            write, close = self.open_place()
            while not self.is_closed:
                self.busy_since = math.inf
                item = self.waiting.get()
                self.busy_since = time.monotonic()
                if isinstance(item, bool):
                    close(item)
                    self.is_closed = True
                else:
                    self.recent.append(item)
                    write(*item)
        except BaseException as error:  # wandb raises what it likes; none of it may end the training
            self.error = error

    def problem(self, patience_s: float) -> str:
        """Why nothing more is to be expected of it, or ""."""
        if self.error is not None:
            return f"failed ({type(self.error).__name__}: {self.error})"
        busy_s = time.monotonic() - self.busy_since
        return f"has not answered for {busy_s:.0f} s" if busy_s > patience_s else ""

    def leave(self) -> list[tuple]:
        """Stop, if it still can; returns what it has not written, after what it lately wrote and may lose."""
        self.is_closed = True
        left = list(self.recent)
        with contextlib.suppress(queue.Empty):
            while True:
                left.append(self.waiting.get_nowait())
        return [item for item in left if not isinstance(item, bool)]


class MetricWriter:
    """Writes metrics to the first of several places; when it does not start, fails or hangs, to the next.

    places are (label, a function that returns write(step, values) and close(failed)). No call waits, but for
    close and, 2 s at most, when a place is given up.
    """

    patience_s = 240.0  # with one call of a place, W&B's start included
    close_timeout_s, next_timeout_s = 15.0, 10.0  # for the place that is written to; for each after it
    max_waiting = 100_000  # writes
    num_recent = 2_000  # writes that the next place gets again: they may have died in the buffers before it
    gave_up = False  # on some place, whose threads may never end

    def __init__(self, *places: tuple[str, Callable]) -> None:
        self.places = list(places)  # that are left
        self.place: MetricPlace | None = None
        self.num_dropped = 0
        self._next_place([])

    def write(self, step: int, values: dict[str, float]) -> None:
        if self.place is None:
            return
        patience_s = self.patience_s if self.places else math.inf  # the last one may come back
        problem = self.place.problem(patience_s)
        is_full = self.place.waiting.qsize() >= self.max_waiting
        if problem or is_full and self.places:
            self._give_up(problem or "does not keep up")
        elif is_full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                text = "%s does not keep up: metrics are lost. The training goes on"
                logger.warning(text, self.place.label)
            return
        if self.place is not None:
            self.place.waiting.put((step, values))

    def close(self, failed: bool) -> None:
        """Write what is left and close the place, in bounded time."""
        timeout_s = self.close_timeout_s
        while self.place is not None:
            self.place.waiting.put(failed)
            self.place.join(timeout_s)
            if self.place.is_closed:
                return
            self._give_up(self.place.problem(math.inf) or f"did not finish within {timeout_s:.0f} s")
            timeout_s = self.next_timeout_s

    def _give_up(self, problem: str) -> None:
        MetricWriter.gave_up = True
        then = "no metrics are written"
        if self.places:
            then = f"what it has not taken goes to {self.places[0][0]}"
        logger.warning("%s %s; %s. The training goes on", self.place.label, problem, then)
        left = self.place.leave()
        end_wandb_service()
        self._next_place(left)

    def _next_place(self, writes: list[tuple]) -> None:
        self.place = MetricPlace(*self.places.pop(0), writes) if self.places else None


def end_wandb_service() -> None:
    """Told to end, W&B's service writes what it holds back; it would not when this process just ended."""
    with contextlib.suppress(psutil.Error):
        services = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
        processes = services + [below for service in services for below in service.children(recursive=True)]
        for service in services:
            service.terminate()
        for process in psutil.wait_procs(processes, timeout=2)[1]:
            process.kill()


def leave_hung_writer() -> None:
    """The very end: Python, and wandb at exit, would wait for what hangs; the process ends without them."""
    if MetricWriter.gave_up:
        error = sys.exc_info()[1]
        code = error.code if isinstance(error, SystemExit) else error
        if error is not None and not isinstance(error, SystemExit):
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


class EventFile:
    """TensorBoard's file of this start. Each record goes to the system at once: a killed process loses none.

    What the disk does not take waits in memory and is tried again with the next record, from the same place
    in the file: readers never meet half a record with another one behind it.
    """

    max_waiting = 100_000  # records

    def __init__(self, run_dir: Path, purge_step: int | None) -> None:
        """Readers drop what earlier starts wrote from purge_step on."""
        self.path = run_dir / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.descriptor, self.size = -1, 0  # -1: to be opened; bytes of the whole records in it
        self.waiting: collections.deque = collections.deque()
        self.num_lost, self.has_failed = 0, False
        self.last_step = purge_step and purge_step - 1
        self._add(file_version="brain.Event:2")
        if purge_step is not None:
            self._add(step=purge_step, session_log={"status": "START"})

    def write(self, step: int, values: dict[str, float]) -> None:
        """One event for all values."""
        if step == self.last_step:  # an evaluation, say: what goes with every write is there already
            values = {key: value for key, value in values.items() if key not in ("epoch", "attempt")}
        self.last_step = step
        numbers = [{"tag": key, "simple_value": value} for key, value in values.items()]
        self._add(step=step, summary={"value": numbers})

    def close(self, failed: bool) -> None:
        """One more try; some file systems say only here that they have not kept what they took."""
        try:
            self._write_waiting()
            self._close_descriptor()
        except OSError as error:
            num_lost = self.num_lost + len(self.waiting)
            raise OSError(f"{error.strerror}: {num_lost} records are lost") from error

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **fields).SerializeToString())
        if len(self.waiting) < self.max_waiting:
            self.waiting.append(record.getvalue())
        else:
            self.num_lost += 1
        try:
            self._write_waiting()
        except OSError as error:
            if not self.has_failed:  # said once, however often the disk comes and goes
                self.has_failed = True
                logger.warning("TensorBoard's file %s cannot be written (%s). The training goes on; metrics"
                               " wait in memory until the disk takes them", self.path, error.strerror)

    def _write_waiting(self) -> None:
        try:
            while self.waiting:
                if self.descriptor < 0:
                    self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                os.lseek(self.descriptor, self.size, os.SEEK_SET)
                rest = memoryview(self.waiting[0])
                while rest:
                    rest = rest[os.write(self.descriptor, rest) :]
                self.size += len(self.waiting.popleft())
        except OSError:
            with contextlib.suppress(OSError):
                self._close_descriptor()  # one of a network file system may never work again
            raise

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)


def open_tensorboard(run_dir: Path, purge_step: int | None) -> tuple[Callable, Callable]:
    """TensorBoard as a place of MetricWriter."""
    file = EventFile(run_dir, purge_step)
    return file.write, file.close


def open_wandb(recipe: Recipe, start: Start, config: dict) -> tuple[Callable, Callable]:
    """A W&B run that never prompts: without a key it is offline."""
    import wandb

    # A copy of the console would be written by whoever prints: training would stop where wandb's service
    # does.
    settings = wandb.Settings(console="off", disable_code=True, disable_git=True, init_timeout=120)
    if "x_transaction_log_flush_interval" in type(settings).model_fields:
        settings.x_transaction_log_flush_interval = 1.0  # seconds of metrics lost with a killed service
    init = partial(wandb.init, project=recipe.wandb_project, group=recipe.group,
                   name=recipe.wandb_name or start.run_dir.name, id=start.wandb_id, resume="allow",
                   dir=str(start.run_dir), config=config, settings=settings)
    mode, problem = os.environ.get("WANDB_MODE") or None, ""
    try:
        if mode is None and not wandb.login(prompt=False):
            problem = "no API key: run wandb login"
        run = init(mode="offline" if problem else mode)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        run = init(mode="offline")
    if problem:
        logger.warning("W&B is not to be had (%s), so this run is recorded offline. Send it later with:"
                       " wandb sync %s", problem, Path(run.dir).parent)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def close(failed: bool) -> None:
        run.finish(int(failed))
        wandb.teardown()  # else wandb waits for its service when Python ends, for as long as that takes

    return (lambda step, values: run.log({**values, "step": step})), close


def as_plain(value: Any) -> Any:
    """JSON's types as they are, containers item by item, anything else (dates, paths, NaN) as text."""
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    is_json = value is None or isinstance(value, (int, str))
    return value if is_json or isinstance(value, float) and math.isfinite(value) else str(value)


# ---- Building: model, data, optimizer, schedule ------------------------------------------------------------


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can begin in mid-epoch: `start` samples of this rank are passed over."""

    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


class ShareSampler(Sampler):
    """This rank's share of a data set in order, each sample on exactly one rank: none is counted twice."""

    def __init__(self, num_samples: int, world: World) -> None:
        self.share = range(world.rank, num_samples, world.world_size)

    def __iter__(self):
        return iter(self.share)

    def __len__(self) -> int:
        return len(self.share)


class SeededData(Dataset):
    """The user's map-style data set; random numbers in its workers depend on (seed, epoch, batch) alone.

    So an augmentation draws the same numbers whatever the number of workers, and after a resume.
    """

    def __init__(self, data: Dataset, seed: int) -> None:
        self.data, self.seed, self.epoch = data, seed, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list) -> list:
        if get_worker_info() is not None:
            seed_everything(mixed_seed(self.seed, self.epoch, *indices[:1]))
        many = getattr(self.data, "__getitems__", None)
        return many(indices) if many else [self.data[index] for index in indices]


def build_loader(recipe: Recipe, component: dict, world: World, training: bool) -> DataLoader:
    """The component itself when it is a DataLoader, else one around the data set that it is."""
    data = build(component)
    if isinstance(data, DataLoader):
        if world.world_size > 1 and isinstance(data.sampler, (RandomSampler, SequentialSampler)) and training:
            logger.warning("train_data is a DataLoader with a %s: every rank reads the same samples. Give it"
                           " a DistributedSampler, or let train_data be the data set",
                           type(data.sampler).__name__)
        data.worker_init_fn = trace_worker_init(partial(start_worker, data.worker_init_fn))
        return data
    options = {"num_workers": recipe.num_workers, "pin_memory": world.device.type == "cuda",
               "generator": torch.Generator(),
               "worker_init_fn": trace_worker_init(partial(start_worker, None))}
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=recipe.batch_size, **options)
    if training:
        sampler = ResumableSampler(data, world.world_size, world.rank, shuffle=True, seed=recipe.seed)
    else:
        sampler = ShareSampler(len(data), world)
    # A last uneven batch would weigh more than others in training; evaluation counts it by its samples.
    drop_last = training and len(sampler) >= recipe.batch_size
    return DataLoader(SeededData(data, recipe.seed), recipe.batch_size, sampler=sampler, drop_last=drop_last,
                      **options)


def begin_epoch(loader: DataLoader, epoch: int, seed: int, skip_batches: int = 0) -> Iterator:
    """Batches of an epoch from the skip_batches-th on, in an order that depends on seed and epoch alone."""
    parts = [loader.dataset, getattr(loader.dataset, "data", None), loader.sampler, loader.batch_sampler,
             getattr(loader.batch_sampler, "sampler", None)]
    for part in {id(part): part for part in parts if hasattr(part, "set_epoch")}.values():  # each once
        part.set_epoch(epoch)
    if isinstance(loader.dataset, SeededData):
        loader.dataset.epoch = epoch
    if loader.generator is not None:
        loader.generator.manual_seed(mixed_seed(seed, epoch))
    if isinstance(loader.sampler, ResumableSampler):
        loader.sampler.start = skip_batches * loader.batch_size
        return iter(loader)
    # Nothing can be skipped unseen in an iterable data set or in a loader of the user's: fetch and drop,
    # before the random numbers are put back to where they were.
    batches = iter(loader)
    for _ in range(skip_batches):
        next(batches, None)
    return batches


def build_optimizer(component: dict, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over two groups: weight decay for matrices, none for norms, biases and other vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "weight_decay" not in inspect.signature(locate(component["target"])).parameters:
        return build(component, params=trained)
    groups = [{"params": [parameter for parameter in trained if parameter.ndim >= 2]},
              {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0}]
    return build(component, params=[group for group in groups if group["params"]])


def lr_factor(schedule: ScheduleSettings, step: int, total_steps: int | None) -> float:
    """The rate at a step (from 1) over the full one; the last step of cosine and linear has min_lr_ratio."""
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "step":
        return schedule.gamma ** ((step - schedule.warmup_steps - 1) // schedule.step_size)
    progress = (step - schedule.warmup_steps - 1) / max(total_steps - schedule.warmup_steps - 1, 1)
    progress = min(progress, 1.0)
    left = 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * left


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # dtype of a mixed precision; fp32 has none


def parallelise(model: nn.Module, recipe: Recipe, world: World) -> nn.Module:
    """What the loop calls: the model itself, or its DDP wrapper. FSDP changes the model in place."""
    if world.store is None or recipe.parallel == "none":
        return model
    if recipe.parallel == "fsdp":
        half = HALF.get(recipe.precision)
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh(world.device.type, (world.world_size,))
        for module in reversed(list(model.modules())):  # children before parents
            if type(module).__name__ in recipe.fsdp_blocks:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None,
                                   find_unused_parameters=recipe.find_unused_parameters,
                                   static_graph=recipe.static_graph)


def build_hooks(recipe: Recipe, span: Callable) -> hooks.HookDispatcher:
    """The recipe's hooks. Raises RecipeError for a value that a hook refuses or a misspelt method."""
    defaults = {"log_frequency": recipe.log_every, "span": span}  # for what the recipe leaves at None
    named = {}
    for name, settings in recipe.hooks.items():
        component = dict(settings)
        if "type" in component:
            component["target"] = f"hooks.{component.pop('type')}"
        parameters = inspect.signature(locate(component["target"])).parameters
        filled = {key: value for key, value in defaults.items() if key in parameters
                  and parameters[key].default is None and component.get(key) is None}
        try:
            kept = {key: value for key, value in component.items() if key not in filled}
            named[name] = build(kept, **filled)
        except ValueError as error:
            raise RecipeError(f"hooks.{name}: {error}") from error
    try:
        return hooks.HookDispatcher(named, span=span if recipe.structured_logging.trace_hooks else None)
    except ValueError as error:
        raise RecipeError(f"hooks: {error}") from error


# ---- Checkpoints -------------------------------------------------------------------------------------------
#
# checkpoints/step_<n>.pt holds tensors and plain Python. It is written under a temporary name, flushed to the
# disk, read once, and only then renamed, so that whatever happens the one before stays whole. `latest` and
# `best` are text files with the name of a checkpoint: they survive copying and file systems without links.

POINTERS = ("latest", "best")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written: path and cause."""


def checkpoint_step(path: Path) -> int:
    """The n of step_<n>.pt."""
    return int(path.stem.split("_")[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """step_<n>.pt files, newest step first; temporary files and whatever else lies there are passed over."""
    found = [path for path in folder.glob("step_*.pt") if path.stem[len("step_"):].isdigit()]
    return sorted(found, key=checkpoint_step, reverse=True)


def read_pointer(path: Path) -> Path | None:
    """The checkpoint that `latest` or `best` names, None when there is no such file or it names none."""
    with contextlib.suppress(OSError, ValueError):  # also text that is no name
        target = path.with_name(path.read_text().strip())
        return target if target != path and target.is_file() else None
    return None


def damage(path: Path) -> str:
    """What is wrong with a checkpoint file, "" when it is whole: every byte is read, checksums compared."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return f"the checksum of {broken} is another" if broken else ""


def latest_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint of a run: the one that `latest` names, else the next before it.

    say is told of each damaged one. Raises RecipeError when all are.
    """
    checkpoints, newest = list_checkpoints(folder), read_pointer(folder / "latest")
    if newest in checkpoints:
        # Newer ones are of a pass that was given up, or named a moment before the end: the last resort.
        index = checkpoints.index(newest)
        checkpoints = checkpoints[index:] + checkpoints[:index][::-1]
    for path in checkpoints:
        problem = damage(path)
        if not problem:
            return path
        say(f"{path} is damaged ({problem}): trying the checkpoint before it")
    if checkpoints:
        names = ", ".join(path.name for path in checkpoints)
        raise RecipeError(f"all checkpoints in {folder} are damaged: {names}")
    return None


def find_checkpoint(place: str, key: str, say: Callable[[str], None]) -> Path:
    """The checkpoint that resume= or weights= means: a file, `latest` or `best`, a run or its checkpoints.

    Raises RecipeError when there is none.
    """
    path = Path(place)
    if path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = latest_checkpoint(folder, say)
        if found is None:
            raise RecipeError(f"{key}={place}: no checkpoint there; looked for {folder / 'step_<n>.pt'}")
        return found.absolute()
    target = read_pointer(path) if path.name in POINTERS else path
    if target is None or not target.is_file():
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, names)
        hint = f"; did you mean {near}?" if near else ""
        raise RecipeError(f"{key}={place}: no such file or folder{hint}")
    return target.absolute()


def load_checkpoint(path: Path | str, key: str) -> dict:
    """What a file holds, on the CPU, mapped rather than read: copy what outlives the call."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        text = str(error) or type(error).__name__
        raise RecipeError(f"{key}: {path} cannot be loaded: {text.splitlines()[0]}") from error


def write_durably(path: Path, write: Callable[[Any], None],
                  check: Callable[[Path], Any] = lambda path: None) -> None:
    """Make or replace a file; its name never stands for less than the whole of it, even after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()  # half a checkpoint must not keep a full disk full
        raise


def write_checkpoint(folder: Path, saved: dict, keep_last: int) -> Path:
    """Write step_<n>.pt and the pointers, remove what is not kept. Rank 0 alone. Raises CheckpointError."""
    path = folder / f"step_{saved['step']}.pt"
    try:
        folder.mkdir(exist_ok=True)
        for stray in folder.glob("*.tmp"):  # of a start that was killed while it saved
            stray.unlink()
        write_durably(path, partial(torch.save, saved), partial(load_checkpoint, key="just written"))
        point_at(folder, saved)
        best = read_pointer(folder / "best")
        older = [each for each in list_checkpoints(folder) if checkpoint_step(each) < saved["step"]]
        for each in list_checkpoints(folder):
            if each not in (path, best, *older[: keep_last - 1]):
                each.unlink(missing_ok=True)
    except (OSError, RuntimeError, RecipeError) as error:
        before = None
        with contextlib.suppress(RecipeError):  # the others are all damaged
            before = latest_checkpoint(folder, logger.warning)
        left = f"; {before.name} is whole" if before else ""
        cause = str(first_cause(error)).splitlines()[0]
        raise CheckpointError(f"{path} cannot be written: {cause}{left}") from error
    return path


def point_at(folder: Path, saved: dict) -> None:
    """Let `latest` and `best` say what is true at this checkpoint, also after a return to an earlier one."""
    steps = {"latest": saved["step"], "best": (saved["best"] or {}).get("step")}
    for name, step in steps.items():
        if (folder / f"step_{step}.pt").is_file():
            write_durably(folder / name, lambda file, step=step: file.write(f"step_{step}.pt\n".encode()))
        else:
            (folder / name).unlink(missing_ok=True)


def first_cause(error: BaseException) -> BaseException:
    """The system's error behind an exception, if there is one: torch.save hides it behind its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


# What a checkpoint holds.


def rng_states(device: torch.device) -> dict:
    """The states of this rank's generators, as plain Python and tensors."""
    kind, keys, *rest = numpy.random.get_state()
    states = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest],
              "torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(states: dict, device: torch.device) -> None:
    """The counterpart of rng_states."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = states["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


@contextlib.contextmanager
def own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers inside depend on the seed alone, and those outside are as if nothing had been inside."""
    states = rng_states(device)
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_states(states, device)


def whole(value: Any) -> Any:
    """A tensor on the CPU, all of it if ranks have shards (then a collective); anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """optimizer.state_dict() with the parameters' names in place of their numbers, and nothing sharded."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    state = optimizer.state_dict()
    return {"state": {order[number]: {key: whole(value) for key, value in entries.items()}
                      for number, entries in state["state"].items()},
            "param_groups": [{**group, "params": [order[number] for number in group["params"]]}
                             for group in state["param_groups"]]}


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """The counterpart of optimizer_state, exact to the bit. Raises RecipeError for other parameters."""
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if [group["params"] for group in saved["param_groups"]] != groups:
        raise RecipeError("the checkpoint's optimizer has other parameters or groups than this model's: to"
                          " begin with its weights and a fresh optimizer, give weights= in place of resume=")
    numbers = {name: number for number, name in enumerate(itertools.chain.from_iterable(groups))}
    state = {numbers[name]: {key: placed_like(value, parameters[name]) for key, value in entries.items()}
             for name, entries in saved["state"].items()}
    optimizer.load_state_dict({
        "state": state, "param_groups": [{**group, "params": [numbers[name] for name in group["params"]]}
                                         for group in saved["param_groups"]]})
    # load_state_dict casts to the parameter's dtype; an optimizer may keep more bits than a bf16 parameter.
    for name, number in numbers.items():
        for key, value in state.get(number, {}).items():
            loaded = optimizer.state[parameters[name]].get(key)
            if isinstance(value, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameters[name]][key] = value.to(loaded.device)


def placed_like(value: Any, parameter: Tensor) -> Any:
    """A copy of a whole value of the optimizer's, sharded where the parameter is."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor) or value.ndim == 0:
        return value.clone()
    mesh = parameter.device_mesh
    placements = parameter.placements if value.shape == parameter.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(value.to(parameter.device), mesh, placements)


def load_weights(model: nn.Module, weights: Mapping[str, Any], source: str, strict: bool) -> None:
    """Copy tensors by name into the bare model; what does not fit is a RecipeError or else a warning."""
    own = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in own.items() if isinstance(value, Tensor)}
    weights = {re.sub(r"(^|\.)(module|_orig_mod)\.", r"\1", name) if name not in own else name: value
               for name, value in weights.items()}
    reshaped = [f"{name} (in the file {tuple(weights[name].shape)}, in the model {shape})"
                for name, shape in shapes.items() if name in weights and tuple(weights[name].shape) != shape]
    fits = {name: value for name, value in weights.items()
            if name in own and (name not in shapes or tuple(value.shape) == shapes[name])}
    problems = {"missing": [name for name in own if name not in weights],
                "unexpected": [name for name in weights if name not in own], "of another shape": reshaped}
    found = "; ".join(f"{what}: {', '.join(names[:10])}" + f" and {len(names) - 10} more" * (len(names) > 10)
                      for what, names in problems.items() if names)
    if found and strict:
        raise RecipeError(f"{source} does not fit {type(model).__name__}. {found}. To load what fits, give"
                          f" weights={source} weights_strict=False")
    if found:
        logger.warning("%s: %d of %d tensors loaded. %s", source, len(fits), len(own), found)
    model.load_state_dict(fits, strict=False)


def weights_in(saved: Any, source: str) -> Mapping[str, Any]:
    """The state dict in a checkpoint of ours, in one of the usual wrappings, or bare; else RecipeError."""
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
            return saved[key]
    if not isinstance(saved, Mapping) or not any(isinstance(value, Tensor) for value in saved.values()):
        raise RecipeError(f"weights={source}: no state dict in it; wanted a checkpoint of train.py or a dict"
                          f" of tensors")
    return saved


# What a change of these between a checkpoint and its resume means for going on as if never stopped.
CHANGES = {
    "world size": "the rest of the epoch is shared out anew, at most one batch is seen twice, random numbers"
                  " differ",
    "batch_size": "at most one batch of this epoch is seen twice",
    "accumulate": "epochs have another number of steps",
    "train_data": "the position in the data is kept as a number of samples",
    "num_workers": "random numbers drawn in the data set may differ",
    "seed": "the order of the samples is another from here on",
    "model": "the weights are the checkpoint's",
    "optimizer": "its settings are the new ones",
    **dict.fromkeys(("precision", "parallel", "compile", "tf32"), "rounding differs"),
    **dict.fromkeys(("schedule", "epochs", "max_steps"),
                    "the learning rate is the new schedule's at this step"),
    "clip_norm": "",
}


def changed_settings(saved: dict, settings: dict, world_size: int) -> dict[str, str]:
    """setting -> "old -> new", for settings that matter to the result; a moved file is no change."""

    def comparable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: comparable(item) for key, item in value.items()}
        if isinstance(value, list):
            return [comparable(item) for item in value]
        return Path(value).name if isinstance(value, str) else value

    then = {**saved["recipe"], "world size": saved["world_size"]}
    now = {**settings, "world size": world_size}
    return {key: f"{then.get(key)} -> {now[key]}" for key in CHANGES
            if comparable(then.get(key)) != comparable(now[key])}


# ---- Stopping ----------------------------------------------------------------------------------------------


class NotFiniteLoss(ArithmeticError):
    """stop_on_nan: the loss of some rank is no number any more."""


class Stopper(threading.Thread):
    """How a run ends before its time: by a signal, by torchrun's end, or because another rank has failed.

    A signal is a wish. The rank that has one says so in torchrun's store, so that the others know wherever
    they are; after each step `check` lets all ranks agree on the last one. The agreement is an all-reduce
    that is read one step after it was begun: no rank waits on ordinary steps. After it all ranks save and
    leave together.

    Python runs signal handlers in the main thread alone, and not while that sits in a collective; so this
    thread reads the signals' numbers from a pipe. It ends the process when another rank has failed, whose
    answer the main thread would wait for until the collective's time-out, or when no step ends before
    torchrun's patience does.
    """

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
    look_every_s = 5.0  # at what the other ranks say
    victim_s = 3.0  # for the main thread to fail by itself when another rank has
    stuck_s = 20.0  # from a signal to the end of a step; torchrun kills after 30 s
    closing_s = 20.0  # for the main thread to close everything after a failure

    def __init__(self, recipe: Recipe, world: World, run_dir: Path) -> None:
        """Signals are caught from here on. In the main thread, before the tracer, which passes SIGTERM on."""
        super().__init__(name="stopper", daemon=True)
        self.recipe, self.world, self.run_dir = recipe, world, run_dir
        self.parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self.peers: dict[int, int] = {}  # rank -> process id, of this torchrun's ranks
        self.reason = ""  # why to stop, from whichever rank
        self.failure = self.own_failure = ""  # of another rank, of this one
        self.signalled_at = self.interrupted_at = self.failed_at = self.closing_at = 0.0  # 0: not
        self.is_saving, self.is_over = False, False
        self.step, self.marked_at, self.checked_at = 0, 0.0, (0, time.monotonic())
        self.next_check, self.asked = 0, None  # the agreement that is under way: (work, numbers)
        self.writer: MetricWriter | None = None  # closed in an end without the main thread
        self.to_say: dict[str, str] = {}  # for the other ranks
        self.something_to_say = threading.Event()
        self.pipe, pipe_end = os.pipe()
        os.set_blocking(pipe_end, False)
        signal.set_wakeup_fd(pipe_end, warn_on_full_buffer=False)
        for number in self.signals:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or the shell's &
                signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=ignore_stop_signals)
        self.start()
        if world.notices is not None:
            # In a thread of its own, since a store whose host is gone may never answer.
            threading.Thread(target=self.talk, name="stopper's talk", daemon=True).start()

    # -- for the main thread

    def check(self, step: int, loss_is_bad: bool) -> tuple[bool, bool]:
        """After each step, on all ranks: was it the last one, and is some rank's loss no number?"""
        now = time.monotonic()
        self.step, self.marked_at = step, now
        if self.world.world_size == 1:
            return bool(self.reason), loss_is_bad
        if self.asked is not None:
            stop, bad, step_us = self.answer()
            if stop or bad:
                return bool(stop), bool(bad)
            self.next_check = step + max(0, min(self.recipe.stop_check_every, int(5e6 / max(step_us, 1))) - 1)
        if step >= self.next_check:
            step_then, then = self.checked_at
            step_us = int((now - then) / max(step - step_then, 1) * 1e6)
            self.checked_at = step, now
            numbers = torch.tensor([bool(self.reason), loss_is_bad, step_us])
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.world.hosts, async_op=True)
            self.asked = work, numbers
        return False, False

    def answer(self) -> list[int]:
        """The largest number of all ranks for each question asked a step ago."""
        (work, numbers), self.asked = self.asked, None
        with log_trace_span("stop_agreement", sync=True):
            work.wait()
        return numbers.tolist()

    def mark(self) -> None:
        """The main thread is getting on, in something longer than a step."""
        self.marked_at = time.monotonic()

    def closing(self, failure: str) -> None:
        """The main thread has left the loop, maybe by a failure: the other ranks should know at once."""
        self.closing_at = time.monotonic()
        if failure:
            self.look_for_peers()
            self.own_failure = failure
            self.tell("failed", failure)
        elif self.asked is not None:
            self.answer()  # a collective may not outlive its group

    def close(self) -> None:
        """The process group is left: signals do again what they do by themselves."""
        self.is_over = True
        signal.set_wakeup_fd(-1)
        for number in self.signals:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)

    # -- the thread

    def run(self) -> None:
        while not self.is_over:
            patience_s = 0.2 if self.signalled_at or self.failed_at else 1.0
            ready, _, _ = select.select([self.pipe], [], [], patience_s)
            for number in os.read(self.pipe, 64) if ready else b"":
                if number in self.signals:  # others have handlers of their own
                    self.on_signal(signal.Signals(number))
            if self.parent is not None and os.getppid() != self.parent:
                self.wish("torchrun is gone")
            if self.signalled_at and not self.closing_at and time.monotonic() - self.signalled_at > 0.5:
                self.look_for_peers()  # a little later than what they may have said themselves is heard
            self.end_when_due(time.monotonic())

    def on_signal(self, number: signal.Signals) -> None:
        log_trace_instant("signal", {"signal": number.name})
        now = time.monotonic()
        # Of a second Ctrl-C torchrun makes a SIGTERM. A SIGINT soon after the first may be the same Ctrl-C:
        # the terminal sends it to all processes of its session, and torchrun sends it on.
        is_same = number == signal.SIGINT and self.parent is not None and now - self.interrupted_at < 1
        if self.interrupted_at and number in (signal.SIGINT, signal.SIGTERM) and not is_same:
            self.end_now("ended at once by a second Ctrl-C", 130)
        if number == signal.SIGINT:
            self.interrupted_at = self.interrupted_at or now
        self.signalled_at = self.signalled_at or now
        self.wish(f"signal {number.name}")

    def wish(self, reason: str) -> None:
        """Want to stop, and let the other ranks know."""
        if not self.reason:
            self.reason = f"{reason} (rank {self.world.rank} on {self.world.host})"
            self.tell("stop", self.reason)

    def tell(self, key: str, text: str) -> None:
        """Say something to all ranks; the first to say it is the one who is heard."""
        self.to_say[key] = text
        self.something_to_say.set()

    def talk(self) -> None:
        """Say what there is to say, and hear what the other ranks have said."""
        store = self.world.notices
        with contextlib.suppress(RuntimeError):  # the store ends with torchrun
            while not self.is_over:
                while self.to_say:
                    key, text = self.to_say.popitem()
                    store.compare_set(key, "", text)
                if not self.reason and store.check(["stop"]):
                    self.reason = store.get("stop").decode()
                if not self.failed_at and not self.own_failure and store.check(["failed"]):
                    self.failure, self.failed_at = store.get("failed").decode(), time.monotonic()
                self.something_to_say.wait(0.2 if self.signalled_at or self.failed_at else self.look_every_s)
                self.something_to_say.clear()

    def look_for_peers(self) -> None:
        """A rank that was killed cannot say that it has failed: the others of its torchrun say it."""
        for rank, pid in self.peers.items():
            if not self.failed_at and not is_alive(pid):
                self.failed_at = time.monotonic()
                self.failure = f"rank {rank} (process {pid} on {self.world.host}) is gone"
                self.tell("failed", self.failure)

    def end_when_due(self, now: float) -> None:
        """End the process when its main thread cannot be expected to."""
        failure = self.failure or self.own_failure
        if self.closing_at:
            if failure and now - self.closing_at > self.closing_s:
                self.end_now(f"ended while closing, {self.closing_s:.0f} s after: {failure}", 1)
        elif self.failed_at and now - self.failed_at > self.victim_s:
            self.end_now(f"ended because another rank failed: {failure}", 1)
        elif self.signalled_at and self.parent is not None and not self.is_saving and (
                now - max(self.signalled_at, self.marked_at) > self.stuck_s):
            self.end_now(f"ended without a checkpoint: no step ended within {self.stuck_s:.0f} s of"
                         f" {self.reason}", 143)

    def end_now(self, why: str, code: int) -> NoReturn:
        """Without the main thread: last metrics, last line of train.log, trace, no child left behind."""
        guard = threading.Timer(5.0, os._exit, [code])  # the file system may be what hangs
        guard.daemon = True
        guard.start()
        where = f"rank {self.world.rank} on {self.world.host}, step {self.step}"
        log_failure(self.world, self.run_dir, f"{why} ({where})", None)
        close_structured_logger("signal", why=why)
        end_children()
        if self.writer is not None:
            self.writer.close(failed=True)
        os._exit(code)


def ignore_stop_signals(worker: int | None = None) -> None:
    """In a child: what a terminal or SLURM sends to all processes is for the main process, which saves.

    A forked child that is no data-loader worker keeps the effect of SIGTERM, by which its owner ends it.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if worker is None else signal.SIG_IGN)


def start_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """A data-loader worker's first act; then the one that the user gave the DataLoader."""
    ignore_stop_signals(worker)
    if then is not None:
        then(worker)


def end_children() -> None:
    """Data-loader workers that are still there, and whatever else was made with multiprocessing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would take their end for a failure
    for child in multiprocessing.active_children():
        child.kill()


# ---- Tracing: what a rank's own work is, and what it waits for ---------------------------------------------


class ReadyMark:
    """Marks, inside a backward span, the moment when this rank's own gradients are done (see tracing.py).

    A hook on the loss queues a callback in the autograd engine; the engine runs it after the last gradient
    and before DDP's own wait for the other ranks. FSDP makes the same call, but it has no public name: in a
    torch without it a hook on all parameters serves, which costs more. On CUDA the callback only tells when
    the work was queued: there two events on the current stream bracket the wait, and their times are read
    steps later, when they have passed.
    """

    def __init__(self, model: nn.Module, make_event: Callable[[], Any] | None = None) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.make_event = make_event  # e.g. partial(torch.cuda.Event, enable_timing=True); None on the CPU
        engine = getattr(torch.autograd.Variable, "_execution_engine", None)
        self.queue_callback = getattr(engine, "queue_callback", None)
        self.fallback: Any = None  # the handle of the hook on all parameters
        self.last_end: Any = None  # event at the end of the backward before
        self.pending: collections.deque = collections.deque()  # (step, events: begin, ready, end)

    def watch(self, loss: Tensor, span: Any) -> list:
        """Before loss.backward(): see to it that span.ready() is called in time."""
        events: list = [self.last_end]

        def own_gradients_are_done() -> None:
            span.ready()
            if self.make_event is not None:
                events.append(self._record())

        if self.queue_callback is not None:
            loss.register_hook(lambda gradient: self.queue_callback(own_gradients_are_done))
        else:
            self.fallback = register_multi_grad_hook(self.parameters, lambda _: own_gradients_are_done())
        return events

    def backward_returned(self, events: list, step: int) -> None:
        """After loss.backward(): on CUDA, the end event; and what earlier events have become readable."""
        if self.fallback is not None:
            self.fallback.remove()
        if self.make_event is None:
            return
        self.last_end = self._record()
        if len(events) == 2 and events[0] is not None:
            self.pending.append((step, events[0], events[1], self.last_end))
        while self.pending and self.pending[0][3].query():
            step_then, begin, ready, end = self.pending.popleft()
            own_us, wait_us = begin.elapsed_time(ready) * 1000, ready.elapsed_time(end) * 1000
            times = {"device_own_us": round(own_us), "device_wait_us": round(wait_us)}
            log_trace_scalar(times, step=step_then)

    def _record(self) -> Any:
        event = self.make_event()
        event.record()
        return event


def trace_buffer_broadcast(wrapped: DistributedDataParallel) -> None:
    """DDP sends rank 0's buffers at the start of forward: a span of its own, since ranks may wait there."""
    if not any(True for _ in wrapped.module.buffers()):
        return
    spans = []

    def begin(*_: Any) -> None:
        spans.append(log_trace_span("sync_buffers", sync="soft"))
        spans[-1].__enter__()

    def end(*_: Any) -> None:
        if spans:
            spans.pop().__exit__(None, None, None)

    wrapped.register_forward_pre_hook(begin)
    wrapped.module.register_forward_pre_hook(end)


# ---- Training ----------------------------------------------------------------------------------------------


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors, and whatever has a .to, inside dicts, lists and tuples; anything else stays as it is."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def count_samples(batch: Any) -> int:
    """The first dimension of the first tensor of a batch, else the length of its first list."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        counts = [count_samples(part) for part in batch if isinstance(part, (Tensor, Mapping, list, tuple))]
        return counts[0] if counts else len(batch)
    return len(batch) if hasattr(batch, "__len__") else 1


def how_to_call(forward: Callable, batch: Any) -> Callable[[Any, Any], Any]:
    """A mapping of forward's arguments is passed by name, a tuple or list one by one, else as it is."""
    signature = inspect.signature(forward)
    with contextlib.suppress(TypeError):
        if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
            signature.bind(**batch)
            return lambda model, batch: model(**batch)
        if isinstance(batch, (tuple, list)):
            signature.bind(*batch)
            return lambda model, batch: model(*batch)
    try:
        signature.bind(batch)
    except TypeError:
        got = f"a {type(batch).__name__}"
        if isinstance(batch, Mapping):
            got = f"the keys {', '.join(map(str, batch))}"
        elif isinstance(batch, (tuple, list)):
            got = f"{len(batch)} parts"
        raise ValueError(f"the batch does not fit the model: the data set gives {got}, forward takes"
                         f" {signature}; name a dict's keys like forward's arguments, or let forward take one"
                         f" argument") from None
    return lambda model, batch: model(batch)


def as_outputs(returned: Any) -> dict[str, Any]:
    """A dict with `loss` of what forward returned: a dict, a bare tensor or an object with .loss.

    Raises ValueError without a loss of one number.
    """
    outputs = returned
    if isinstance(returned, Tensor):
        outputs = {"loss": returned}
    elif not isinstance(returned, Mapping) and hasattr(returned, "loss"):
        others = {key: value for key, value in vars(returned).items() if not key.startswith("_")}
        outputs = {"loss": returned.loss, **others}
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get("loss"), Tensor):
        is_dict = isinstance(outputs, Mapping)
        got = f"a dict with the keys {', '.join(outputs)}" if is_dict else type(returned).__name__
        raise ValueError(f"the model's forward returned {got}; wanted a dict with a tensor `loss`, a tensor,"
                         f" or an object with .loss")
    if outputs["loss"].numel() != 1:
        raise ValueError(f"the model's loss has the shape {tuple(outputs['loss'].shape)}; wanted one number:"
                         f" take its mean in forward")
    return dict(outputs)


def scalars(outputs: Mapping[str, Any], vectors: set[str]) -> dict[str, Any]:
    """The one-element entries, detached; num_tokens is a count, not a metric.

    vectors: keys seen with more elements, which stay no metrics in a batch of a single sample.
    """
    found = {}
    for key, value in outputs.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            vectors.add(key)
        elif isinstance(value, (Tensor, int, float)) and key != "num_tokens" and key not in vectors:
            found[key] = value.detach().reshape(()) if isinstance(value, Tensor) else value
    return found


def as_text(metrics: Mapping[str, float]) -> str:
    """Names and values for a line of train.log."""
    return " ".join(f"{key} {value:.4f}" for key, value in metrics.items())


class Trainer:
    """The parts of a run and the loop over them."""

    def __init__(self, recipe: Recipe, world: World, start: Start, stopper: Stopper) -> None:
        self.recipe, self.world, self.start, self.stopper = recipe, world, start, stopper
        self.stopped = ""  # why the run ends before its time: all ranks have agreed to
        self.run_dir, self.tracing = start.run_dir, recipe.structured_logging
        self.settings = as_plain(recipe_to_dict(recipe))  # for checkpoints and W&B
        self.batches_done = 0  # micro-batches of this epoch that are in the weights
        # Steps of the last evaluation, the last checkpoint, and the checkpoint that this start goes on from.
        self.evaluated_at = self.saved_at = self.resumed_at = -1
        self.best: dict | None = None  # value and step of the best evaluation so far
        self.best_is_new = False  # and it has no checkpoint yet
        self.rng: dict | None = None  # generators' states to go on with, in the middle of an epoch
        self.call_model: Callable | None = None  # known when the first batch is there
        self.vectors: set[str] = set()  # keys of outputs that are no metrics
        self.hooks: hooks.HookDispatcher | None = None
        self.metrics: MetricLog | None = None
        self.state = SimpleNamespace(  # what hooks see
            model=None, optimizer=None, step=0, max_steps=None, epoch=0, batch=None, outputs=None, metrics={},
            lr=None, data_s=0.0, step_s=0.0, paused_s=0.0, num_samples=0, num_tokens=None,
            clip_norm=recipe.clip_norm, grad_scale=None, step_skipped=False, run_dir=start.run_dir,
            run=start.run_dir.name, rank=world.rank, local_rank=world.local_rank, world_size=world.world_size,
            device=world.device, error=None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """On every way out: the hooks' last event, metrics, writer, the last line of train.log, traces."""
        state, world = self.state, self.world
        state.error = error
        where = f"rank {world.rank} on {world.host}, step {state.step}"
        self.stopper.closing(f"{type(error).__name__}: {error} ({where})" if error is not None else "")
        try:
            if self.hooks is not None:
                self.report_hooks("after_train")
        except Exception as hook_error:
            logger.error("%s", hook_error, exc_info=hook_error)
            if error is None:
                error = hook_error
                raise
        finally:
            if self.metrics is not None:
                self.metrics.close(failed=error is not None)
            end_children()
            if self.stopped and error is None:
                logger.info("stopped after step %d: %s. Go on with: resume=%s", state.step, self.stopped,
                            self.run_dir)
            elif error is None:
                # An epoch that the last step of the run cut short counts as well.
                logger.info("done: %d steps, %d epochs", state.step, state.epoch + bool(self.batches_done))
            else:
                first = f", after this: {self.stopper.failure}" if self.stopper.failure else ""
                text = f"failed: {type(error).__name__}: {error} ({where}{first})"
                log_failure(world, self.run_dir, text, error)
            close_structured_logger("ok" if error is None else "exception")

    def build(self) -> None:
        """Model, data, optimizer, hooks, writer: nothing slow comes before a likely mistake."""
        recipe, world, state = self.recipe, self.world, self.state
        dispatcher = build_hooks(recipe, span=log_trace_span)
        self.meet()

        # Model and data, and where in them to begin.
        seed_everything(recipe.seed)  # the same weights on every rank
        self.model = state.model = build(recipe.model).to(world.device)
        saved = self.load_initial_weights()
        self.train_loader = build_loader(recipe, recipe.train_data, world, training=True)
        self.val_loader = None
        if recipe.val_data:
            self.val_loader = build_loader(recipe, recipe.val_data, world, training=False)
        self.batches_per_epoch = self.count_batches()
        if saved:
            self.restore_position(saved)
        state.max_steps = self.count_total_steps()
        if saved and self.start.asked_for and self.finished():
            more = "max_steps" if state.step >= (recipe.max_steps or sys.maxsize) else "epochs"
            raise RecipeError(f"resume={recipe.resume}: this run is finished, at step {state.step}, with"
                              f" max_steps {recipe.max_steps} and epochs {recipe.epochs}. To go on give it"
                              f" more {more}=")
        if world.rank == 0:
            if state.max_steps and state.max_steps < (recipe.max_steps or 0):
                logger.warning("max_steps=%d is not reached: epochs=%d ends the run at step %d. Give it more"
                               " epochs=", recipe.max_steps, recipe.epochs, state.max_steps)
            # Only now: a start that is refused leaves the recipe of the run as it was.
            config = dump_yaml(saved_recipe(recipe, self.start.launch_dir))
            (self.run_dir / "config.yaml").write_text(config)

        # The model that the loop calls, and what changes its weights.
        self.wrapped = parallelise(self.model, recipe, world)
        self.is_ddp = isinstance(self.wrapped, DistributedDataParallel)
        self.is_fsdp = isinstance(self.wrapped, FSDPModule)
        # FSDP gathers weights inside forward and backward: the host cannot tell what of them is waiting.
        self.opaque = {"sync": True, "args": {"opaque": "fsdp"}} if self.is_fsdp else {}
        try:
            self.optimizer = state.optimizer = build_optimizer(recipe.optimizer, self.model)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"optimizer: {recipe.optimizer['target']} refuses its keywords: {error}\n"
                              f"  got: {recipe.optimizer}") from error
        for group in self.optimizer.param_groups:
            group["full_lr"] = group["lr"]
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=recipe.precision == "fp16")
        if saved:
            self.restore_optimizer(saved)
        if recipe.compile:
            self.model.compile()
        if self.is_ddp and self.tracing.enabled and not recipe.compile:
            trace_buffer_broadcast(self.wrapped)

        # What watches: marks in the trace, metrics, hooks.
        on_cuda = world.device.type == "cuda"
        make_event = partial(torch.cuda.Event, enable_timing=True) if on_cuda else None
        self.ready_mark = ReadyMark(self.model, make_event)
        self.metrics = MetricLog(self.open_writer(), self.start.attempt)
        self.metrics.epoch_sums.update(saved["epoch_sums"] if saved else {})
        self.stopper.writer = self.metrics.writer
        self.hooks = dispatcher
        seed_everything(mixed_seed(recipe.seed, world.rank))  # from here on each rank draws its own numbers
        logger.info("%s: %d parameters, %s steps, %d x %s%s, run directory %s", type(self.model).__name__,
                    sum(parameter.numel() for parameter in self.model.parameters()), state.max_steps or "?",
                    world.world_size, world.device.type, f" with {recipe.parallel}" if world.store else "",
                    self.run_dir)

    def meet(self) -> None:
        """Join the process group; know the processes of this torchrun; rank 0 writes launch files."""
        recipe, world = self.recipe, self.world
        with log_trace_span("process_group", sync=True):
            join_process_group(world, recipe)
        places = world.gather((world.host, os.getppid(), os.getpid()), "launch_files")
        here = places[world.rank][:2]
        self.stopper.peers = {rank: pid for rank, (*place, pid) in enumerate(places) if tuple(place) == here}
        if world.rank == 0:
            write_launch_files(recipe, self.start, [host for host, _, _ in places])

    def open_writer(self) -> MetricWriter | None:
        """The one writer of the job, on global rank 0."""
        if self.world.rank != 0:
            return None
        purge_step = None
        if self.start.attempt > 0:  # step 0 has what is written before step 1
            purge_step = self.state.step and self.state.step + 1
        tensorboard = f"TensorBoard in {self.run_dir}", partial(open_tensorboard, self.run_dir, purge_step)
        if not self.recipe.use_wandb:
            return MetricWriter(tensorboard)
        wandb_dir = self.run_dir / "wandb"
        return MetricWriter((f"W&B (what it has taken is in {wandb_dir}: wandb sync)",
                             partial(open_wandb, self.recipe, self.start, self.settings)), tensorboard)

    def count_batches(self) -> int | None:
        """Micro-batches of an epoch that all ranks have; None when the data does not say how long it is."""
        try:
            num_batches = len(self.train_loader)
        except TypeError:
            num_batches = -1
        counts = self.world.gather(num_batches, "count_batches")
        if 0 in counts:
            raise RecipeError(f"train_data is empty on rank {counts.index(0)} (batches a rank: {counts})")
        return None if min(counts) < 0 else min(counts)

    def count_total_steps(self) -> int | None:
        """Optimizer steps of the run; None when it goes on until data without a length end."""
        recipe = self.recipe
        if self.batches_per_epoch is not None:
            # From here, not from the beginning: before a resume an epoch may have been longer or shorter.
            steps_per_epoch = math.ceil(self.batches_per_epoch / recipe.accumulate)
            steps_of_this_epoch = math.ceil(self.batches_done / recipe.accumulate)
            ahead = (recipe.epochs - self.state.epoch) * steps_per_epoch - steps_of_this_epoch
            return min(self.state.step + max(ahead, 0), recipe.max_steps or sys.maxsize)
        if recipe.max_steps is None and recipe.schedule.kind in ("cosine", "linear"):
            raise RecipeError(f"schedule.kind={recipe.schedule.kind} must know where it ends, and train_data"
                              f" has no length: set max_steps, give the data set a __len__, or take"
                              f" schedule.kind=constant")
        return recipe.max_steps

    # -- the loop

    def train(self) -> None:
        """All epochs, up to the last step of the run."""
        self.report_hooks("before_train")
        while not self.finished() and not self.stopped:
            with log_trace_span("epoch", args={"epoch": self.state.epoch}):
                self.train_epoch()
        if not self.stopped:
            self.evaluate()
        if self.saved_at != self.state.step or self.best_is_new:
            self.save()

    def finished(self) -> bool:
        """Whether the last step of the run is done."""
        state = self.state
        return state.step >= (state.max_steps or sys.maxsize) or state.epoch >= self.recipe.epochs

    def train_epoch(self) -> None:
        """One pass over the data, or what is left of it after a resume."""
        recipe, world, state = self.recipe, self.world, self.state
        self.model.train()
        # Each rank draws its own numbers, which depend on seed and epoch; in the middle of one they go on.
        seed_everything(mixed_seed(recipe.seed, state.epoch, world.rank))
        self.report_hooks("before_epoch")
        batches = begin_epoch(self.train_loader, state.epoch, recipe.seed, self.batches_done)
        if self.rng is not None:
            set_rng_states(self.rng, world.device)
            self.rng = None
        self.evaluate_if_due()  # again after a stop in an evaluation
        epoch_is_over = self.batches_done == self.batches_per_epoch
        while not (self.stopped or epoch_is_over or self.finished()):
            set_step(state.step + 1)
            with log_trace_span("step"):
                if not self.train_step(batches):
                    epoch_is_over = True
                    break
            epoch_is_over = self.batches_done == self.batches_per_epoch
            # Evaluate, agree on stopping, save; an epoch's last step is saved below, with the epoch's means.
            self.evaluate_if_due()
            if self.stopped or self.is_last_step():
                return
            if not epoch_is_over:
                self.save_if_due()
        if recipe.eval_every is None:
            self.evaluate()
        if self.stopped:
            return
        means = self.metrics.end_epoch(state.step, state.epoch)
        logger.info("epoch %d | %s", state.epoch, as_text(means))
        self.report_hooks("after_epoch")
        if epoch_is_over:  # and not only the run
            state.epoch, self.batches_done = state.epoch + 1, 0
            self.metrics.epoch_sums.clear()
            self.save_if_due()

    def train_step(self, batches: Iterator) -> bool:
        """One optimizer step; False when the data has ended instead."""
        recipe, world, state = self.recipe, self.world, self.state
        start = time.perf_counter()

        # Data: all micro-batches of the step, so that it is known which one is the last.
        with log_trace_span("data"):
            left = self.batches_per_epoch - self.batches_done if self.batches_per_epoch else recipe.accumulate
            window = list(itertools.islice(batches, min(recipe.accumulate, left)))
        if not self.all_ranks_have(window):
            return False
        state.step += 1
        state.data_s = time.perf_counter() - start
        state.num_samples, state.num_tokens = sum(map(count_samples, window)), None
        state.lr = self.set_lr(state.step)

        totals: dict[str, Any] = {}
        found: dict[str, Any] = {}  # what hooks return
        for index, batch in enumerate(window):
            # To device.
            with log_trace_span("to_device"):
                state.batch = to_device(batch, world.device)
            found.update(self.call_hooks("before_step"))

            is_last = index == len(window) - 1
            meets = is_last and self.is_ddp and self.tracing.enabled
            # The first forward of a compiled model is compilation.
            forward = "compile" if recipe.compile and self.call_model is None else "forward"
            # DDP decides in forward whether this backward will reduce the gradients.
            with self.gradient_sync(is_last):
                # Forward. Under DDP it begins with the broadcast of buffers: a span of its own.
                with log_trace_span(forward, **self.opaque), self.autocast():
                    state.outputs = self.forward(state.batch)
                # Backward. The last micro-batch's meets the other ranks; the others keep their gradients.
                with log_trace_span("backward", **self.opaque or {"sync": meets}) as span:
                    loss = self.scaler.scale(state.outputs["loss"] / len(window))
                    events = self.ready_mark.watch(loss, span) if meets else []
                    loss.backward()
                    self.ready_mark.backward_returned(events, state.step)

            for key, value in scalars(state.outputs, self.vectors).items():
                totals[key] = totals[key] + value if key in totals else value
            if "num_tokens" in state.outputs:
                state.num_tokens = (state.num_tokens or 0) + int(state.outputs["num_tokens"])
        if len(window) > 1:
            totals = {key: total / len(window) for key, total in totals.items()}
        state.metrics = totals

        # Hooks: they see the gradients reduced and unscaled, not yet clipped.
        state.grad_scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
        self.scaler.unscale_(self.optimizer)
        found.update(self.call_hooks("after_backward"))

        # Clip, then the optimizer's step.
        with log_trace_span("optimizer"):
            if recipe.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
            self.optimizer_step()
        state.step_s = time.perf_counter() - start
        found.update(self.call_hooks("after_step"))
        self.optimizer.zero_grad(set_to_none=True)
        self.batches_done += len(window)

        # Log: everything of this step in one record, written when it has left the device.
        with log_trace_span("log"):
            batch_metrics = {f"train_batch/{key}": value for key, value in state.metrics.items()}
            self.metrics.add(state.step, state.epoch, {**batch_metrics, "params/lr": state.lr, **found})
            if self.tracing.batch_stats_every and state.step % self.tracing.batch_stats_every == 0:
                sizes = {"batch_samples": state.num_samples, "batch_tokens": state.num_tokens}
                log_trace_scalar({name: size for name, size in sizes.items() if size is not None})
            if state.step % recipe.log_every == 0:
                self.metrics.write_arrived(wait=True)  # a device synchronisation, every log_every steps
        return True

    def is_last_step(self) -> bool:
        """Whether ranks have agreed to stop here. Raises NotFiniteLoss on all of them for stop_on_nan."""
        bad_loss = self.metrics.bad_loss if self.recipe.stop_on_nan else None
        stop, bad = self.stopper.check(self.state.step, bad_loss is not None)
        if stop and not bad:
            self.stopped = next(filter(None, self.world.gather(self.stopper.reason, "stop_reasons")))
        if bad:
            self.raise_bad_loss(self.world.gather(bad_loss, "stop_reasons"))
        return bool(self.stopped)

    def raise_bad_loss(self, losses: list[tuple[int, float] | None]) -> None:
        """losses: each rank's first loss that was no number, or None."""
        bad = sorted((*loss, rank) for rank, loss in enumerate(losses) if loss)
        if bad:
            step, value, rank = bad[0]
            raise NotFiniteLoss(f"stop_on_nan: the loss is {value} at step {step} on rank {rank}; all ranks"
                                f" stopped after step {self.state.step}")

    # -- the parts of a step

    def all_ranks_have(self, window: list) -> bool:
        """Whether there is data for another step; cuts the window to what every rank has."""
        if self.batches_per_epoch is not None:
            if not window:
                raise RuntimeError(f"train_data ended after {self.batches_done} batches on rank"
                                   f" {self.world.rank}; its length promised {self.batches_per_epoch}")
            return True
        # Data without a length: ranks must agree, or the one with more would wait for ever in backward.
        del window[self.world.agree(len(window), dist.ReduceOp.MIN, "data_agreement") :]
        return bool(window)

    def set_lr(self, step: int) -> float:
        """Set the learning rate of every parameter group; returns the first one's."""
        factor = lr_factor(self.recipe.schedule, step, self.state.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def autocast(self) -> contextlib.AbstractContextManager:
        """Mixed precision; under FSDP the sharded modules cast by themselves."""
        half = HALF.get(self.recipe.precision)
        is_on = half is not None and not self.is_fsdp
        return torch.autocast(self.world.device.type, half) if is_on else contextlib.nullcontext()

    def forward(self, batch: Any) -> dict[str, Any]:
        """The model's outputs, with `loss`."""
        if self.call_model is None:
            self.call_model = how_to_call(self.model.forward, batch)
        return as_outputs(self.call_model(self.wrapped if self.model.training else self.model, batch))

    def gradient_sync(self, is_on: bool) -> contextlib.AbstractContextManager:
        """Reduce gradients over the ranks in this backward, or keep them for the last micro-batch's."""
        if self.is_fsdp:
            self.model.set_requires_gradient_sync(is_on)
        elif self.is_ddp and not is_on:
            return self.wrapped.no_sync()
        return contextlib.nullcontext()

    def optimizer_step(self) -> None:
        """With fp16 the scaler leaves out a step whose gradients overflowed: its scale is smaller then."""
        scale_before = self.scaler.get_scale()  # 1.0 without a copy unless fp16, which synchronises anyway
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state.step_skipped = self.scaler.get_scale() < scale_before

    def call_hooks(self, event: str) -> dict[str, Any]:
        """One event of all hooks in a span; what they return stays on the device."""
        if not self.hooks.has(event):
            return {}
        with log_trace_span("hooks"):
            return self.hooks.collect(event, self.state)

    def report_hooks(self, event: str) -> None:
        """An event that is not part of a step: what hooks return is written at once."""
        found = self.call_hooks(event)
        if event.startswith("before") and self.state.step == self.resumed_at:
            return  # the start before has written it
        if found:
            self.metrics.add(self.state.step, self.state.epoch, found)

    # -- evaluation

    def evaluate(self) -> None:
        """val/*: means over the whole validation set, each sample once, whatever the number of ranks."""
        if self.val_loader is None or self.evaluated_at == self.state.step:
            return
        state, start = self.state, time.perf_counter()
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        # Random numbers of its own: training goes on as if there had been no evaluation.
        seed = mixed_seed(self.recipe.seed, state.step, self.world.rank)
        with log_trace_span("evaluate"), torch.no_grad(), own_random_numbers(seed, self.world.device):
            sums = self.evaluation_sums()
            shares, reasons = zip(*self.world.gather((sums, self.stopper.reason), "evaluation_sums"))
        for module, was_training in modes.items():
            module.training = was_training
        self.stopped = next(filter(None, reasons), "")
        if self.stopped:  # broken off on some rank: it is made anew after a resume
            return
        state.metrics = {}
        for key in dict.fromkeys(itertools.chain.from_iterable(shares)):
            parts = [share[key] for share in shares if key in share]
            total, weight = (sum(numbers) for numbers in zip(*parts))
            state.metrics[f"val/{key}"] = total / weight
        self.evaluated_at = state.step
        logger.info("evaluation at step %d | %s", state.step, as_text(state.metrics))
        found = self.call_hooks("after_evaluate")
        self.metrics.add(state.step, state.epoch, {**state.metrics, **found})
        self.look_for_best()
        state.paused_s += time.perf_counter() - start

    def evaluate_if_due(self) -> None:
        """Every eval_every steps; without that, train_epoch does it."""
        every = self.recipe.eval_every
        if every and self.state.step and self.state.step % every == 0:
            self.evaluate()

    def evaluation_sums(self) -> dict[str, tuple[float, int]]:
        """This rank's metrics: key -> (sum over samples, number of samples)."""
        sums: dict[str, tuple] = {}
        for batch, weight in self.evaluation_batches():
            batch = to_device(batch, self.world.device)
            with self.autocast():
                outputs = self.forward(batch)
            for key, value in scalars(outputs, self.vectors).items() if weight else ():
                # Summed in double precision on the device.
                value = value.double() if isinstance(value, Tensor) else value
                total, weights = sums.get(key, (0.0, 0))
                sums[key] = (total + value * weight, weights + weight)
        # A device synchronisation, the only one of an evaluation.
        return {key: (float(total), weight) for key, (total, weight) in sums.items()}

    def evaluation_batches(self) -> Iterator[tuple[Any, int]]:
        """Batches, and how many samples each counts.

        Under FSDP every forward gathers weights, so all ranks must run the same number of them: a rank whose
        share has ended repeats its last batch, which then counts nothing.
        """
        loader, last_batch = self.val_loader, None
        for batch in itertools.chain(begin_epoch(loader, 0, self.recipe.seed), itertools.repeat(None)):
            self.stopper.mark()
            # 2: stop, 1: go on, 0: there is no more.
            wish = 2 if self.stopper.reason else int(batch is not None)
            if self.is_fsdp:
                wish = self.world.agree(wish, dist.ReduceOp.MAX, "evaluation_agreement")
            if wish != 1:
                return
            if batch is None and last_batch is None:
                last_batch = loader.collate_fn([loader.dataset.data[0]])
            last_batch = last_batch if batch is None else batch
            yield last_batch, 0 if batch is None else count_samples(batch)

    # -- checkpoints

    def look_for_best(self) -> None:
        """Remember an evaluation better than all before; NaN never is. All ranks have the same numbers."""
        if self.recipe.best is None:
            return
        metric, mode, found = self.recipe.best.metric, self.recipe.best.mode, self.state.metrics
        if metric not in found:
            if self.world.rank == 0:
                near = nearest(metric, found)
                hint = f", did you mean {near}?" if near else ""
                logger.warning("best.metric=%s: no such metric%s; an evaluation writes %s. No best checkpoint"
                               " is kept", metric, hint, ", ".join(found))
            return
        value, sign = found[metric], 1 if mode == "min" else -1
        if math.isfinite(value) and (self.best is None or sign * value < sign * self.best["value"]):
            self.best, self.best_is_new = {"metric": metric, "value": value, "step": self.state.step}, True

    def save_if_due(self) -> None:
        """Every save_every steps or, without that, after each epoch; and when an evaluation was the best."""
        every = self.recipe.save_every
        is_due = self.state.step % every == 0 if every else self.batches_done == 0
        if is_due or self.best_is_new:
            self.save()

    def save(self) -> None:
        """A checkpoint of now: all ranks give their part, rank 0 writes. Raises CheckpointError on all."""
        recipe, world, state, start = self.recipe, self.world, self.state, time.perf_counter()
        problem, error = "", None
        self.stopper.is_saving = True
        with log_trace_span("checkpoint"):
            self.metrics.write_arrived(wait=True)
            if recipe.stop_on_nan:  # weights that are no numbers would take the place of good ones
                self.raise_bad_loss(world.gather(self.metrics.bad_loss, "checkpoint_losses"))
            saved = {
                "step": state.step, "epoch": state.epoch, "batches_done": self.batches_done,
                "evaluated_at": self.evaluated_at, "best": self.best, "epoch_sums": self.metrics.epoch_sums,
                "attempt": self.start.attempt, "wandb_id": self.start.wandb_id,
                "world_size": world.world_size, "recipe": self.settings,
                "model": {name: whole(value) for name, value in self.model.state_dict().items()},
                "optimizer": optimizer_state(self.model, self.optimizer), "scaler": self.scaler.state_dict(),
                "rng": world.gather(rng_states(world.device), "checkpoint_parts"),
            }
            if world.rank == 0:
                try:
                    path = write_checkpoint(self.run_dir / "checkpoints", saved, recipe.keep_last)
                    logger.info("checkpoint %s", path)
                except CheckpointError as failed:
                    problem, error = str(failed), failed
            problem = world.gather(problem, "checkpoint_written")[0]
        if problem:
            raise error or CheckpointError(problem)
        self.saved_at, self.best_is_new, self.stopper.is_saving = state.step, False, False
        self.stopper.mark()
        state.paused_s += time.perf_counter() - start

    def load_initial_weights(self) -> dict | None:
        """The weights to begin with, before the model is wrapped; returns the checkpoint of a resume."""
        if self.start.checkpoint:
            saved = load_checkpoint(self.start.checkpoint, "resume")
            load_weights(self.model, saved["model"], str(self.start.checkpoint), strict=True)
            return saved
        if self.recipe.weights:
            path = find_checkpoint(self.recipe.weights, "weights", logger.warning)
            load_weights(self.model, weights_in(load_checkpoint(path, "weights"), path), str(path),
                         self.recipe.weights_strict)
        return None

    def restore_position(self, saved: dict) -> None:
        """Where the checkpoint was in the run; says what is not as it was then."""
        recipe, world, state = self.recipe, self.world, self.state
        state.step, state.epoch = saved["step"], saved["epoch"]
        num_samples = saved["batches_done"] * saved["recipe"]["batch_size"] * saved["world_size"]
        self.batches_done = num_samples // (recipe.batch_size * world.world_size)
        self.evaluated_at = saved["evaluated_at"]
        self.saved_at = self.resumed_at = saved["step"]
        if saved["recipe"]["best"] == self.settings["best"]:
            self.best = saved["best"]
        if self.batches_done and world.rank < saved["world_size"]:
            self.rng = saved["rng"][world.rank]
        logger.info("going on from %s: step %d, epoch %d", self.start.checkpoint, state.step, state.epoch)
        changes = changed_settings(saved, self.settings, world.world_size) if world.rank == 0 else {}
        for name, change in changes.items():
            logger.warning("%s has changed since the checkpoint: %s%s", name, change,
                           f" ({CHANGES[name]})" if CHANGES[name] else "")
        if world.rank == 0 and home_of(self.start.checkpoint) == self.run_dir:
            point_at(self.run_dir / "checkpoints", saved)

    def restore_optimizer(self, saved: dict) -> None:
        """Optimizer and loss scale; settings that were changed since the checkpoint are the new ones."""
        then, now = saved["recipe"]["optimizer"], self.settings["optimizer"]
        if then["target"] != now["target"]:
            if self.world.rank == 0:
                text = "%s begins with an empty state: the checkpoint's is of %s"
                logger.warning(text, now["target"], then["target"])
            return
        fresh = [dict(group) for group in self.optimizer.param_groups]
        load_optimizer_state(self.model, self.optimizer, saved["optimizer"])
        changed = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)}
        changed |= {"full_lr"} if "lr" in changed else set()
        for group, new in zip(self.optimizer.param_groups, fresh):
            group.update({key: new[key] for key in changed if key in group})
        if self.scaler.is_enabled() and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])


# ---- The story ---------------------------------------------------------------------------------------------


def start_run(recipe: Recipe) -> tuple[World, Start, Stopper]:
    """What must be there before anything can hang: the place among ranks, run directory, log, tracer."""
    world = find_world()
    connect(world, recipe.pg_timeout_s)
    start = world.share("start", lambda: choose_start(recipe))
    run_dir = start.run_dir
    start_logging(world, run_dir)
    for text in [*without_effect(recipe), *start.warnings] if world.rank == 0 else ():
        logger.warning("%s", text)
    stopper = Stopper(recipe, world, run_dir)
    settings = {key: value for key, value in vars(recipe.structured_logging).items()
                if key not in ("enabled", "trace_hooks", "batch_stats_every")}
    if recipe.structured_logging.enabled:
        # @record has told C to write a crash's stacks to the console: the trace takes them, with rank and step.
        faulthandler.disable()
    init_structured_logger("training", str(run_dir / "structured_logs"), world.rank,
                           enable=recipe.structured_logging.enabled, attempt=start.attempt, run=run_dir.name,
                           **settings)
    return world, start, stopper


def leave(world: World, stopper: Stopper) -> None:
    """Leave the process group together, and end the process.

    Left to itself the interpreter aborts in one of some ten to forty clean ends of DDP on gloo ("terminate
    called without an active exception", torch 2.13): its C++ objects are destroyed while their threads still
    run. So Python's own exit functions are called here, and nothing after them.
    """
    if world.store is not None:
        dist.barrier(group=world.hosts)
        dist.destroy_process_group()
    stopper.close()
    if world.store is not None:
        leave_hung_writer()  # wandb's exit function would wait for it
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@record
def main() -> None:
    """A recipe becomes a run; a mistake in it one message."""
    try:
        world, start, stopper = start_run(RECIPE)
        with Trainer(RECIPE, world, start, stopper) as trainer:
            with log_trace_span("startup"):
                trainer.build()
            trainer.train()
        leave(world, stopper)
    except RecipeError as mistaken:
        local_mistake(mistaken)


if __name__ == "__main__":
    try:
        main()
    finally:
        leave_hung_writer()
