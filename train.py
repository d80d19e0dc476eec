"""Train a PyTorch model from a YAML recipe, under torchrun or alone."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib.metadata
import inspect
import itertools
import json
import logging
import math
import os
import platform
import queue
import random
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator, Mapping

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler,
                              SequentialSampler, get_worker_info)

import hooks
from tracing import (close_structured_logger, init_structured_logger, log_trace_scalar, log_trace_span, set_step)

logger = logging.getLogger("rankscope")


# ---- Recipe: defaults < base recipe < recipe < command line ------------------------------------------------------


class RecipeError(ValueError):
    """A mistake of the user's in a recipe or on the command line; its text is the whole message."""


@dataclass
class ScheduleSettings:
    """How the learning rate moves over the steps of the run."""

    kind: str = "cosine"  # cosine, linear, step or constant
    warmup_steps: int = 0  # optimizer steps from 0 to the full rate; 0 is off
    min_lr_ratio: float = 0.1  # cosine, linear: the last rate over the full one
    step_size: int = 1000  # step: optimizer steps between two drops
    gamma: float = 0.1  # step: factor of a drop


@dataclass
class TracingSettings:
    """structured_logging: the per-process traces that trace_tools.py reads (see tracing.py)."""

    enabled: bool = False
    trace_hooks: bool = False  # a span for every hook's call
    trace_workers: bool | None = None  # spans in data-loader workers; None is up to 64 ranks
    batch_stats_every: int = 1  # steps between batch-size scalars; 0 is off
    max_file_size_mb: float = 128.0  # MB of a file before it is rotated
    backup_count: int = 3  # rotated files kept
    heartbeat_s: float = 5.0  # seconds between signs of life; 0 is off
    stall_timeout_s: float = 120.0  # seconds of silence before stacks are written; 0 is off


@dataclass
class BestSettings:
    """Which checkpoint is kept as the best."""

    metric: str = "val/loss"  # a key that an evaluation writes
    mode: str = "min"  # min or max


@dataclass
class Recipe:
    """All settings of a run; every one can be set as key=value on the command line."""

    model: dict  # component
    train_data: dict  # component: a map-style or iterable Dataset, or a DataLoader
    val_data: dict | None = None  # component; None: no evaluation
    optimizer: dict = field(default_factory=lambda: {"target": "torch.optim.AdamW"})  # component
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    group: str | None = None  # None: the recipe's name
    run: str | None = None  # None: the time of the start
    exp_dir: str = "exp"  # where run directories are made: <exp_dir>/<group>/<run>
    epochs: int = 1  # passes over train_data
    max_steps: int | None = None  # optimizer steps; None: no limit
    batch_size: int = 16  # samples per rank and micro-batch
    accumulate: int = 1  # micro-batches per optimizer step
    num_workers: int = 2  # data-loader processes per rank; 0: load in the training process
    clip_norm: float | None = None  # largest gradient norm; None: no clipping
    precision: str = "fp32"  # fp32, bf16 or fp16
    parallel: str = "ddp"  # ddp, fsdp or none
    find_unused_parameters: bool = False  # ddp: some parameters get no gradient in some steps
    static_graph: bool = False  # ddp: the same parameters get gradients in every step
    fsdp_blocks: list[str] = field(default_factory=list)  # class names that fully_shard wraps one by one
    compile: bool = False  # torch.compile the model
    tf32: bool = True  # TF32 matrix products on CUDA
    seed: int = 0
    stop_on_nan: bool = False  # end the run when the loss is not finite
    log_every: int = 10  # steps between log lines
    eval_every: int | None = None  # steps between evaluations; None: after each epoch
    save_every: int | None = None  # steps between checkpoints; None: after each epoch
    keep_last: int = 2  # checkpoints kept, besides the best
    best: BestSettings | None = None  # None: no best checkpoint
    resume: str | None = None  # a run directory or checkpoint to go on with
    weights: str | None = None  # a checkpoint to take the weights from
    weights_strict: bool = True  # refuse weights that lack a tensor or have one too many
    pg_timeout_s: float = 600.0  # seconds before a collective is given up
    stop_check_every: int = 10  # steps between agreements on stopping
    use_wandb: bool = False  # Weights & Biases instead of TensorBoard
    wandb_project: str = "rankscope"
    wandb_name: str | None = None  # None: the run's name
    structured_logging: TracingSettings = field(default_factory=TracingSettings)
    hooks: dict = field(default_factory=lambda: {"IterationTimer": {}, "InformationWriter": {}})


# ---- Components: a class of the user's and its keyword arguments --------------------------------------------------


# ---- World: this process among all others ------------------------------------------------------------------------


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
    hosts: dist.ProcessGroup | None = None  # gloo, on the hosts' processors: what needs no device

    def share(self, key: str, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank; only the store is needed, no process group.

        A RecipeError of rank 0's is raised on every rank.
        """
        if self.store is None:
            return make()
        if self.rank == 0:
            try:
                self.store.set(key, "=" + make())
            except RecipeError as error:
                self.store.set(key, f"!{error}")
        answer = self.store.get(key).decode()
        if answer.startswith("!"):
            raise RecipeError(answer[1:])
        return answer[1:]

    def agree(self, value: int, op: Any, name: str) -> int:
        """The smallest (dist.ReduceOp.MIN) or largest (MAX) value of all ranks, on every rank; the device is not used."""
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
    """This process's place from torchrun's variables; without them it is alone. No CUDA call, no communication."""
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world_size": "WORLD_SIZE",
             "local_world_size": "LOCAL_WORLD_SIZE"}
    world = World(**{name: int(os.environ[key]) for name, key in names.items() if key in os.environ})
    num_gpus = torch.cuda.device_count()  # counted by NVML, without initialising CUDA
    if num_gpus and world.local_world_size > num_gpus:
        raise RecipeError(f"{world.local_world_size} processes on {world.host}, which has {num_gpus} GPUs: start at most"
                          f" one process per GPU (torchrun --nproc_per_node {num_gpus}), or hide the GPUs to train on"
                          f" the CPU (CUDA_VISIBLE_DEVICES= torchrun ...)")
    if num_gpus:
        world.device = torch.device("cuda", world.local_rank)
    return world


def connect(world: World, timeout_s: float) -> None:
    """Reach torchrun's store, so that ranks can agree on the run directory before anything that may hang."""
    if "RANK" in os.environ:
        world.store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))


def join_process_group(world: World, recipe: Recipe) -> None:
    """NCCL on CUDA, gloo on the CPU; besides, a gloo group for what the hosts agree on."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = recipe.tf32
    if world.store is None:
        return
    timeout = timedelta(seconds=recipe.pg_timeout_s)
    on_cuda = world.device.type == "cuda"
    dist.init_process_group("nccl" if on_cuda else "gloo", store=world.store, rank=world.rank, timeout=timeout,
                            world_size=world.world_size, device_id=world.device if on_cuda else None)
    world.hosts = dist.new_group(backend="gloo", timeout=timeout)


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers: neighbours give unrelated seeds, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


# ---- Run directory ------------------------------------------------------------------------------------------------


def choose_run_dir(recipe: Recipe) -> tuple[str, int]:
    """Make the directory of a fresh run, and say which start of the run this is. Rank 0 alone."""
    parent = Path(recipe.exp_dir) / recipe.group
    if recipe.run:
        run_dir = parent / recipe.run
        if run_dir.exists() and any(run_dir.iterdir()):
            raise RecipeError(f"run={recipe.run}: {run_dir} was used before; a fresh start never writes into it. Give"
                              f" another run=, or go on with it: resume={run_dir}")
        run_dir.mkdir(parents=True, exist_ok=True)
        return str(run_dir.absolute()), 0
    start = time.strftime("%Y%m%d-%H%M%S")
    for attempt in itertools.count(1):
        run_dir = parent / (start if attempt == 1 else f"{start}-{attempt}")
        try:
            run_dir.mkdir(parents=True)  # atomic: of two jobs that start in the same second one takes the next name
            return str(run_dir.absolute()), 0
        except FileExistsError:
            continue


def write_launch_files(recipe: Recipe, run_dir: Path, attempt: int, hosts: list[str]) -> None:
    """What is needed to tell how this start came about and to run it again: launch/attempt_<n>/ and config.yaml."""
    launch_dir = run_dir / "launch" / f"attempt_{attempt}"
    launch_dir.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve().parent
    environ = os.environ
    facts = {
        "command": shlex.join([sys.executable, *sys.argv]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "folder": os.getcwd(),
        "hosts": hosts,
        "torchrun": {"run_id": environ.get("TORCHELASTIC_RUN_ID"), "agent_pid": os.getppid(),
                     "restart": int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
                     "nodes": int(environ.get("GROUP_WORLD_SIZE", 1)), "processes": int(environ.get("WORLD_SIZE", 1))},
        "git_commit": git(here, "rev-parse", "HEAD"),
        "versions": versions(),
    }
    (launch_dir / "launch.json").write_text(json.dumps(facts, indent=2) + "\n")
    diff = git(here, "diff", "HEAD")
    if diff:
        (launch_dir / "git.diff").write_text(diff + "\n")
    for script in ("train.py", "hooks.py", "tracing.py", "trace_tools.py"):
        if (here / script).exists():
            shutil.copy(here / script, launch_dir)
    (run_dir / "config.yaml").write_text(dump_yaml(saved_recipe(recipe, launch_dir)))


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


# ---- train.log and the console ------------------------------------------------------------------------------------


class LogFile(logging.FileHandler):
    """A log file that several processes may append to, whole records at a time; a full disk never ends training."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True
            print(f"{self.baseFilename} cannot be written ({sys.exc_info()[1]}); training goes on", file=sys.stderr)


class RankLogFile(LogFile):
    """train.rank<N>.log: made at the first warning of a rank other than 0, and then named in train.log."""

    def _open(self):
        own = Path(self.baseFilename)
        with contextlib.suppress(OSError), open(own.parent / "train.log", "a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING another rank wrote a warning: see {own.name}\n")
        return super()._open()


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
    logging.basicConfig(level=logging.INFO, handlers=handlers, format=text, datefmt="%Y-%m-%d %H:%M:%S", force=True)
    logging.captureWarnings(True)


def log_failure(world: World, run_dir: Path, text: str, error: BaseException) -> None:
    """The last words of a run that failed: whole in this rank's log, one line in train.log whichever rank it was."""
    logger.error(text, exc_info=None if isinstance(error, RecipeError) else error)
    if world.rank != 0:
        with contextlib.suppress(OSError), open(run_dir / "train.log", "a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} ERROR   {text}\n")


# ---- Metrics ------------------------------------------------------------------------------------------------------


class MetricLog:
    """Numbers on their way from the device to the writer, without a device synchronisation on ordinary steps.

    A step's values are copied to pinned memory and written when the copy's event says that they have arrived, in
    order. It also keeps the sums for the epoch means train/*, and warns once about each value that is not finite.
    """

    def __init__(self, writer: MetricWriter | None, attempt: int) -> None:
        self.writer, self.attempt = writer, attempt
        self.waiting: collections.deque = collections.deque()  # (step, epoch, keys, host tensor, event, numbers)
        self.epoch_sums: dict[str, list[float]] = {}  # key: sum, count
        self.not_finite: set[str] = set()

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
        means = {f"train/{key.split('/', 1)[1]}": total / count for key, (total, count) in self.epoch_sums.items()}
        self.epoch_sums.clear()
        if means:
            self._write(step, epoch, means)
        return means


class MetricWriter(threading.Thread):
    """Writes metrics in a thread of its own, so that a slow disk or server never slows or ends the training.

    open_backend returns the two functions of a backend: write(step, values) and close(failed).
    """

    queue_size = 100_000  # writes; when a backend is that far behind, the rest is dropped, with a warning
    close_timeout_s = 20.0

    def __init__(self, open_backend: Callable, where: str) -> None:
        super().__init__(name="metric writer", daemon=True)
        self.open_backend, self.where = open_backend, where
        self.queue: queue.Queue = queue.Queue(self.queue_size)
        self.warned = False
        self.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        try:
            self.queue.put_nowait((step, values))
        except queue.Full:
            self._warn("is too slow", "metrics are dropped")

    def close(self, failed: bool) -> None:
        """Write what is left and close the backend, in bounded time."""
        with contextlib.suppress(queue.Full):
            self.queue.put(failed, timeout=1)
        self.join(self.close_timeout_s)
        if self.is_alive():
            self._warn("did not finish in time", "the process ends without it")

    def run(self) -> None:
        try:
            write, close = self.open_backend()
        except BaseException as error:  # wandb raises what it likes; none of it may end the training
            self._warn(f"did not start: {type(error).__name__}: {error}", "no metrics are written")
            write, close = (lambda step, values: None), (lambda failed: None)
        while True:
            item = self.queue.get()
            try:
                if isinstance(item, bool):
                    return close(item)
                write(*item)
            except BaseException as error:
                self._warn(f"failed: {type(error).__name__}: {error}", "training goes on")
                if isinstance(item, bool):
                    return None

    def _warn(self, what: str, consequence: str) -> None:
        if not self.warned:
            self.warned = True
            logger.warning("%s %s; %s", self.where, what, consequence)


def open_tensorboard(run_dir: Path, first_step: int) -> tuple[Callable, Callable]:
    """One event file for this start; what an earlier start wrote from first_step on is purged."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(str(run_dir), purge_step=first_step if first_step > 1 else None)

    def write(step: int, values: dict[str, float]) -> None:
        # One event for all values of a step: add_scalar would write an event for each.
        summary = Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in values.items()])
        board.file_writer.add_summary(summary, step)

    return write, lambda failed: board.close()


def open_wandb(recipe: Recipe, run_dir: Path, config: dict, run_id: str) -> tuple[Callable, Callable]:
    """A W&B run that never prompts: without a key it is offline."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None and not wandb.api.api_key:
        mode = "offline"
        logger.warning("W&B has no API key, so this run is recorded offline. Log in with: wandb login. Send it later"
                       " with: wandb sync %s", run_dir / "wandb" / f"offline-run-*-{run_id}")
    run = wandb.init(project=recipe.wandb_project, group=recipe.group, name=recipe.wandb_name or run_dir.name,
                     id=run_id, resume="allow", dir=str(run_dir), config=as_plain(config), mode=mode,
                     settings=wandb.Settings(disable_code=True, disable_git=True, init_timeout=120))
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return (lambda step, values: run.log({**values, "step": step})), (lambda failed: run.finish(int(failed)))


def as_plain(value: Any) -> Any:
    """JSON's types as they are, containers item by item, anything else (dates, paths, NaN) as text."""
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


# ---- Building: model, data, optimizer, schedule -------------------------------------------------------------------


class ResumableSampler(DistributedSampler):
    """DistributedSampler that can begin in the middle of an epoch: `start` samples of this rank are passed over."""

    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


class ShareSampler(Sampler):
    """This rank's share of a data set in order, each sample on exactly one rank: no sample is counted twice."""

    def __init__(self, num_samples: int, world: World) -> None:
        self.share = range(world.rank, num_samples, world.world_size)

    def __iter__(self):
        return iter(self.share)

    def __len__(self) -> int:
        return len(self.share)


class SeededData(Dataset):
    """The user's map-style data set, with worker processes whose random numbers depend on (seed, epoch, batch) alone.

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
            logger.warning("train_data is a DataLoader with a %s: every rank reads the same samples. Give it a"
                           " DistributedSampler, or let train_data be the data set", type(data.sampler).__name__)
        return data
    options = {"num_workers": recipe.num_workers, "pin_memory": world.device.type == "cuda",
               "generator": torch.Generator()}
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=recipe.batch_size, **options)
    if training:
        sampler = ResumableSampler(data, world.world_size, world.rank, shuffle=True, seed=recipe.seed)
    else:
        sampler = ShareSampler(len(data), world)
    # A last uneven batch would weigh more than the others in training; in evaluation it counts by its samples.
    drop_last = training and len(sampler) >= recipe.batch_size
    return DataLoader(SeededData(data, recipe.seed), recipe.batch_size, sampler=sampler, drop_last=drop_last, **options)


def begin_epoch(loader: DataLoader, epoch: int, seed: int, skip_batches: int = 0) -> Iterator:
    """Batches of an epoch from the skip_batches-th on, in an order that depends on seed and epoch alone."""
    for part in {id(part): part for part in (loader.dataset, getattr(loader.dataset, "data", None), loader.sampler,
                                             loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
                 }.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    if isinstance(loader.dataset, SeededData):
        loader.dataset.epoch = epoch
    if loader.generator is not None:
        loader.generator.manual_seed(mixed_seed(seed, epoch))
    if isinstance(loader.sampler, ResumableSampler):
        loader.sampler.start = skip_batches * loader.batch_size
        return iter(loader)
    # Nothing can be skipped unseen in an iterable data set or in a loader of the user's: fetch and drop.
    return itertools.islice(iter(loader), skip_batches, None)


def build_optimizer(component: dict, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over two groups: weight decay for matrices, none for norms, biases and other vectors."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "weight_decay" not in inspect.signature(locate(component["target"])).parameters:
        return build(component, params=trained)
    groups = [{"params": [parameter for parameter in trained if parameter.ndim >= 2]},
              {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0}]
    return build(component, params=[group for group in groups if group["params"]])


def lr_factor(schedule: ScheduleSettings, step: int, total_steps: int | None) -> float:
    """The learning rate at a step (from 1) over the full one; the last step of cosine and linear has min_lr_ratio."""
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


def build_hooks(settings: dict[str, dict], **defaults: Any) -> dict[str, Any]:
    """The recipe's hooks by name; defaults fill constructor arguments that the recipe leaves at None."""
    named = {}
    for name, component in settings.items():
        target = component.get("target") or getattr(hooks, component.get("type", name))
        keywords = {key: value for key, value in component.items() if key not in ("type", "target")}
        parameters = inspect.signature(locate(target) if isinstance(target, str) else target).parameters
        for key, value in defaults.items():
            if key in parameters and parameters[key].default is None and keywords.get(key) is None:
                keywords[key] = value
        named[name] = (locate(target) if isinstance(target, str) else target)(**keywords)
    return named


# ---- Checkpoints --------------------------------------------------------------------------------------------------


# ---- Stopping -----------------------------------------------------------------------------------------------------


# ---- Tracing: what a rank's own work is, and what it waits for ----------------------------------------------------


class ReadyMark:
    """Marks, inside a backward span, the moment when this rank's own gradients are done (see tracing.py).

    A hook on the loss queues a callback in the autograd engine; the engine runs it after the last gradient and
    before DDP's own wait for the other ranks. On CUDA the callback only tells when the work was queued: there two
    events on the current stream bracket the wait, and their times are read steps later, when they have passed.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self.make_event = make_event  # e.g. partial(torch.cuda.Event, enable_timing=True); None on the CPU
        self.last_end: Any = None  # event at the end of the backward before
        self.pending: collections.deque = collections.deque()  # (step, events: begin, ready, end)

    def watch(self, loss: Tensor, span: Any) -> list:
        """Before loss.backward(): see to it that span.ready() is called in time."""
        events: list = [self.last_end]

        def own_gradients_are_done() -> None:
            span.ready()
            if self.make_event is not None:
                events.append(self._record())

        def at_the_beginning_of_backward(grad: Tensor) -> None:
            Variable._execution_engine.queue_callback(own_gradients_are_done)

        loss.register_hook(at_the_beginning_of_backward)
        return events

    def backward_returned(self, events: list, step: int) -> None:
        """After loss.backward(): on CUDA, the end event; and what earlier events have become readable."""
        if self.make_event is None:
            return
        self.last_end = self._record()
        if len(events) == 2 and events[0] is not None:
            self.pending.append((step, events[0], events[1], self.last_end))
        while self.pending and self.pending[0][3].query():
            step_then, begin, ready, end = self.pending.popleft()
            own_us, wait_us = begin.elapsed_time(ready) * 1000, ready.elapsed_time(end) * 1000
            log_trace_scalar({"device_own_us": round(own_us), "device_wait_us": round(wait_us)}, step=step_then)

    def _record(self) -> Any:
        event = self.make_event()
        event.record()
        return event


def trace_buffer_broadcast(wrapped: nn.Module) -> None:
    """DDP sends rank 0's buffers at the start of forward: a span of its own, since ranks may wait there."""
    if not isinstance(wrapped, DistributedDataParallel) or not any(True for _ in wrapped.module.buffers()):
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


# ---- Training -----------------------------------------------------------------------------------------------------


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
    """A mapping whose keys are forward's arguments is passed by name, a tuple or list one by one, else as it is."""
    signature = inspect.signature(forward)
    with contextlib.suppress(TypeError):
        if isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
            signature.bind(**batch)
            return lambda model, batch: model(**batch)
        if isinstance(batch, (tuple, list)):
            signature.bind(*batch)
            return lambda model, batch: model(*batch)
    return lambda model, batch: model(batch)


def as_outputs(returned: Any) -> dict[str, Any]:
    """What a model's forward returned as a dict with `loss`: a dict, a bare tensor or an object with .loss."""
    outputs = returned
    if isinstance(returned, Tensor):
        outputs = {"loss": returned}
    elif not isinstance(returned, Mapping) and hasattr(returned, "loss"):
        outputs = {"loss": returned.loss, **{k: v for k, v in vars(returned).items() if not k.startswith("_")}}
    if not isinstance(outputs, Mapping) or not isinstance(outputs.get("loss"), Tensor):
        got = f"a dict with the keys {', '.join(outputs)}" if isinstance(outputs, Mapping) else type(returned).__name__
        raise ValueError(f"the model's forward returned {got}; wanted a dict with a tensor `loss`, a tensor, or an"
                         f" object with .loss")
    if outputs["loss"].numel() != 1:
        raise ValueError(f"the model's loss has the shape {tuple(outputs['loss'].shape)}; wanted one number: take its"
                         f" mean in forward")
    return dict(outputs)


def scalars(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """The one-element entries, detached; num_tokens is a count, not a metric."""
    return {key: value.detach().reshape(()) if isinstance(value, Tensor) else value
            for key, value in outputs.items() if key != "num_tokens"
            and (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float)))}


class Trainer:
    """The parts of a run and the loop over them."""

    def __init__(self, recipe: Recipe, world: World, run_dir: Path, attempt: int) -> None:
        self.recipe, self.world, self.run_dir, self.attempt = recipe, world, run_dir, attempt
        self.tracing = recipe.structured_logging
        self.batches_done = 0  # micro-batches of this epoch that are in the weights
        self.evaluated_at = -1  # step of the last evaluation
        self.call_model: Callable | None = None  # known when the first batch is there
        self.hooks: hooks.HookDispatcher | None = None
        self.metrics: MetricLog | None = None
        self.state = SimpleNamespace(  # what hooks see
            model=None, optimizer=None, step=0, max_steps=None, epoch=0, batch=None, outputs=None, metrics={}, lr=None,
            data_s=0.0, step_s=0.0, paused_s=0.0, num_samples=0, num_tokens=None, clip_norm=recipe.clip_norm,
            grad_scale=None, step_skipped=False, run_dir=run_dir, run=run_dir.name, rank=world.rank,
            local_rank=world.local_rank, world_size=world.world_size, device=world.device, error=None)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """On every way out: the hooks' last event, the metrics, the writer, the last line of train.log, the traces."""
        state, world = self.state, self.world
        state.error = error
        try:
            if self.hooks is not None:
                found = self.call_hooks("after_train")
                self.metrics.add(state.step, state.epoch, found)
        except Exception as hook_error:
            logger.error("%s", hook_error, exc_info=hook_error)
            if error is None:
                error = hook_error
                raise
        finally:
            if self.metrics is not None:
                self.metrics.close(failed=error is not None)
            where = f"rank {world.rank} on {world.host}, step {state.step}"
            if error is None:
                logger.info("done: %d steps, %d epochs", state.step, state.epoch)
            else:
                log_failure(world, self.run_dir, f"failed: {type(error).__name__}: {error} ({where})", error)
            close_structured_logger()

    def build(self) -> None:
        """Model, data, optimizer, hooks and writer, in an order in which nothing slow comes before a likely mistake."""
        recipe, world, state = self.recipe, self.world, self.state
        with log_trace_span("process_group", sync=True):
            join_process_group(world, recipe)
        seed_everything(recipe.seed)  # the same weights on every rank
        self.model = state.model = build(recipe.model).to(world.device)
        self.train_loader = build_loader(recipe, recipe.train_data, world, training=True)
        self.val_loader = build_loader(recipe, recipe.val_data, world, training=False) if recipe.val_data else None
        self.steps_per_epoch = self.count_steps()
        self.total_steps = state.max_steps = self.count_total_steps()
        self.wrapped = parallelise(self.model, recipe, world)
        self.is_ddp = isinstance(self.wrapped, DistributedDataParallel)
        self.is_fsdp = isinstance(self.wrapped, FSDPModule)
        # FSDP gathers weights inside forward and backward: what of them is waiting cannot be told from the host.
        self.opaque = {"sync": True, "args": {"opaque": "fsdp"}} if self.is_fsdp else {}
        self.optimizer = state.optimizer = build_optimizer(recipe.optimizer, self.model)
        for group in self.optimizer.param_groups:
            group["full_lr"] = group["lr"]
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=recipe.precision == "fp16")
        if recipe.compile:
            self.model.compile()
        if self.is_ddp and self.tracing.enabled and not recipe.compile:
            trace_buffer_broadcast(self.wrapped)
        on_cuda = world.device.type == "cuda"
        self.ready_mark = ReadyMark(partial(torch.cuda.Event, enable_timing=True) if on_cuda else None)
        named = build_hooks(recipe.hooks, log_frequency=recipe.log_every, span=log_trace_span)
        self.hooks = hooks.HookDispatcher(named, span=log_trace_span if self.tracing.trace_hooks else None)
        self.events = {event for hook in named.values() for event in hooks.EVENTS if hasattr(hook, event)}
        self.metrics = MetricLog(self.open_writer(), self.attempt)
        seed_everything(mixed_seed(recipe.seed, world.rank))  # from here on each rank draws its own numbers
        logger.info("%s: %d parameters, %s steps, %d x %s%s, run directory %s", type(self.model).__name__,
                    sum(parameter.numel() for parameter in self.model.parameters()), self.total_steps or "?",
                    world.world_size, world.device.type, f" with {recipe.parallel}" if world.store else "", self.run_dir)

    def open_writer(self) -> MetricWriter | None:
        """The one writer of the job, on global rank 0."""
        if self.world.rank != 0:
            return None
        if not self.recipe.use_wandb:
            return MetricWriter(partial(open_tensorboard, self.run_dir, 1), f"TensorBoard in {self.run_dir}")
        return MetricWriter(partial(open_wandb, self.recipe, self.run_dir, recipe_to_dict(self.recipe), self.wandb_id),
                            f"W&B, whose files are in {self.run_dir / 'wandb'},")

    def count_steps(self) -> int | None:
        """Optimizer steps of an epoch, the same on all ranks; None when the data does not say how long it is."""
        try:
            num_batches = len(self.train_loader)
        except TypeError:
            num_batches = -1
        counts = self.world.gather(num_batches, "count_batches")
        if 0 in counts:
            raise RecipeError(f"train_data is empty on rank {counts.index(0)} (batches a rank: {counts})")
        return None if min(counts) < 0 else math.ceil(min(counts) / self.recipe.accumulate)

    def count_total_steps(self) -> int | None:
        """Optimizer steps of the run; None when it goes on until data without a length end."""
        recipe = self.recipe
        if self.steps_per_epoch is not None:
            return min(recipe.epochs * self.steps_per_epoch, recipe.max_steps or sys.maxsize)
        if recipe.max_steps is None and recipe.schedule.kind in ("cosine", "linear"):
            raise RecipeError(f"schedule.kind={recipe.schedule.kind} must know where it ends, and train_data has no"
                              f" length: set max_steps, give the data set a __len__, or take schedule.kind=constant")
        return recipe.max_steps

    # -- the loop

    def train(self) -> None:
        """All epochs, up to the last step of the run."""
        self.call_hooks("before_train")
        while not self.finished():
            with log_trace_span("epoch", args={"epoch": self.state.epoch}):
                self.train_epoch()
        if self.val_loader is not None and self.evaluated_at != self.state.step:
            self.evaluate()

    def finished(self) -> bool:
        return self.state.step >= (self.total_steps or sys.maxsize) or self.state.epoch >= self.recipe.epochs

    def train_epoch(self) -> None:
        """One pass over the data, or what is left of it after a resume."""
        recipe, state = self.recipe, self.state
        self.model.train()
        self.call_hooks("before_epoch")
        batches = begin_epoch(self.train_loader, state.epoch, recipe.seed, self.batches_done)
        while state.step < (self.total_steps or sys.maxsize):
            if self.steps_per_epoch is not None and self.batches_done >= self.steps_per_epoch * recipe.accumulate:
                break
            with log_trace_span("step"):
                if not self.train_step(batches):
                    break
            if recipe.eval_every and state.step % recipe.eval_every == 0:
                self.evaluate()
        if recipe.eval_every is None:
            self.evaluate()
        means = self.metrics.end_epoch(state.step, state.epoch)
        logger.info("epoch %d done | %s", state.epoch, " ".join(f"{key} {value:.4f}" for key, value in means.items()))
        self.call_hooks("after_epoch")
        state.epoch, self.batches_done = state.epoch + 1, 0

    def train_step(self, batches: Iterator) -> bool:
        """One optimizer step; False when the data has ended instead."""
        recipe, world, state = self.recipe, self.world, self.state
        start = time.perf_counter()
        set_step(state.step + 1)

        # Data: all micro-batches of the step, so that it is known which one is the last.
        with log_trace_span("data"):
            window = list(itertools.islice(batches, recipe.accumulate))
        if not self.all_ranks_have(window):
            return False
        state.step += 1
        state.data_s = time.perf_counter() - start
        state.num_samples, state.num_tokens = sum(map(count_samples, window)), None
        state.lr = self.set_lr(state.step)

        totals: dict[str, Any] = {}
        for index, batch in enumerate(window):
            is_last = index == len(window) - 1
            # To device.
            with log_trace_span("to_device"):
                state.batch = to_device(batch, world.device)
            self.call_hooks("before_step")
            # Forward. Under DDP it begins with the broadcast of buffers: a span of its own.
            with log_trace_span(self.forward_name(), **self.opaque), self.autocast():
                state.outputs = self.forward(state.batch)
            # Backward. The last micro-batch's meets the other ranks; the others keep their gradients.
            meets = is_last and self.is_ddp and self.tracing.enabled
            with self.gradient_sync(is_last), log_trace_span("backward", **self.opaque or {"sync": meets}) as span:
                loss = self.scaler.scale(state.outputs["loss"] / len(window))
                events = self.ready_mark.watch(loss, span) if meets else []
                loss.backward()
                self.ready_mark.backward_returned(events, state.step)
            for key, value in scalars(state.outputs).items():
                totals[key] = totals[key] + value if key in totals else value
            if "num_tokens" in state.outputs:
                state.num_tokens = (state.num_tokens or 0) + int(state.outputs["num_tokens"])
        state.metrics = {key: value / len(window) if len(window) > 1 else value for key, value in totals.items()}

        # Hooks see the gradients reduced and unscaled, not yet clipped.
        self.scaler.unscale_(self.optimizer)
        found = self.call_hooks("after_backward")
        # Clip and step.
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
                log_trace_scalar({"batch_samples": state.num_samples,
                                  **({"batch_tokens": state.num_tokens} if state.num_tokens is not None else {})})
            if state.step % recipe.log_every == 0:
                self.metrics.write_arrived(wait=True)  # a device synchronisation, every log_every steps
        return True

    # -- the parts of a step

    def all_ranks_have(self, window: list) -> bool:
        """Whether there is data for another step; cuts the window to what every rank has."""
        if self.steps_per_epoch is not None:
            if not window:
                raise RuntimeError(f"train_data ended after {self.batches_done} batches on rank {self.world.rank}; its"
                                   f" length promised {self.steps_per_epoch * self.recipe.accumulate}")
            return True
        # Data without a length: ranks must agree, or the one with more would wait for ever in backward.
        del window[self.world.agree(len(window), dist.ReduceOp.MIN, "data_agreement") :]
        return bool(window)

    def set_lr(self, step: int) -> float:
        """Set the learning rate of every parameter group; returns the first one's."""
        factor = lr_factor(self.recipe.schedule, step, self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def autocast(self) -> contextlib.AbstractContextManager:
        """Mixed precision; under FSDP the sharded modules cast by themselves."""
        half = HALF.get(self.recipe.precision)
        is_on = half is not None and not self.is_fsdp
        return torch.autocast(self.world.device.type, half) if is_on else contextlib.nullcontext()

    def forward_name(self) -> str:
        """The first forward of a compiled model is compilation."""
        return "compile" if self.recipe.compile and self.call_model is None else "forward"

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
        """With fp16 the scaler leaves out a step whose gradients overflowed, and says so by a smaller scale."""
        scale_before = self.scaler.get_scale()  # 1.0 without a copy unless fp16, which synchronises anyway
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state.step_skipped = self.scaler.get_scale() < scale_before

    def call_hooks(self, event: str) -> dict[str, Any]:
        """One event of all hooks in a span; what they return stays on the device."""
        if event not in self.events:
            return {}
        with log_trace_span("hooks"):
            return self.hooks.collect(event, self.state)

    # -- evaluation

    def evaluate(self) -> None:
        """val/*: means over the whole validation set, each sample once, whatever the number of ranks."""
        if self.val_loader is None:
            return
        state, start = self.state, time.perf_counter()
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with log_trace_span("evaluate"), torch.no_grad():
            sums = self.evaluation_sums()
            shares = self.world.gather({key: (float(total), weight) for key, (total, weight) in sums.items()},
                                       "evaluation_sums")
        for module, was_training in modes.items():
            module.training = was_training
        state.metrics = {}
        for key in dict.fromkeys(itertools.chain.from_iterable(shares)):
            total, weight = (sum(numbers) for numbers in zip(*(share[key] for share in shares if key in share)))
            state.metrics[f"val/{key}"] = total / weight
        self.evaluated_at = state.step
        logger.info("evaluation at step %d | %s", state.step,
                    " ".join(f"{key} {value:.4f}" for key, value in state.metrics.items()))
        found = self.call_hooks("after_evaluate")
        self.metrics.add(state.step, state.epoch, {**state.metrics, **found})
        state.paused_s += time.perf_counter() - start

    def evaluation_sums(self) -> dict[str, tuple]:
        """This rank's metrics: key -> (sum over samples, number of samples)."""
        sums: dict[str, tuple] = {}
        for batch, weight in self.evaluation_batches():
            batch = to_device(batch, self.world.device)
            with self.autocast():
                outputs = self.forward(batch)
            for key, value in scalars(outputs).items() if weight else ():
                # Summed in double precision on the device; one copy a metric at the end.
                value = value.double() if isinstance(value, Tensor) else value
                total, weights = sums.get(key, (0.0, 0))
                sums[key] = (total + value * weight, weights + weight)
        return sums

    def evaluation_batches(self) -> Iterator[tuple[Any, int]]:
        """Batches, and how many samples each counts.

        Under FSDP every forward gathers weights, so all ranks must run the same number of them: a rank whose share
        has ended repeats its last batch, which then counts nothing.
        """
        loader, last_batch = self.val_loader, None
        for batch in itertools.chain(begin_epoch(loader, 0, self.recipe.seed), itertools.repeat(None)):
            has_batch = batch is not None
            if self.is_fsdp and not self.world.agree(int(has_batch), dist.ReduceOp.MAX, "evaluation_agreement"):
                return
            if not self.is_fsdp and not has_batch:
                return
            if not has_batch and last_batch is None:
                last_batch = loader.collate_fn([loader.dataset.data[0]])
            last_batch = batch if has_batch else last_batch
            yield last_batch, count_samples(batch) if has_batch else 0


# ---- The story ----------------------------------------------------------------------------------------------------


def start_run(recipe: Recipe) -> tuple[World, Path, int]:
    """Everything that must be there before anything can hang: the place among ranks, run directory, log and tracer."""
    world = find_world()
    connect(world, recipe.pg_timeout_s)
    run_dir, attempt = json.loads(world.share("run", lambda: json.dumps(choose_run_dir(recipe))))
    run_dir = Path(run_dir)
    start_logging(world, run_dir)
    settings = {key: value for key, value in vars(recipe.structured_logging).items()
                if key not in ("enabled", "trace_hooks", "batch_stats_every")}
    init_structured_logger("training", str(run_dir / "structured_logs"), world.rank,
                           enable=recipe.structured_logging.enabled, attempt=attempt, run=run_dir.name, **settings)
    return world, run_dir, attempt


def leave(world: World) -> None:
    """Leave the process group together."""
    if world.store is None:
        return
    dist.barrier(group=world.hosts)
    time.sleep(0.2)
    dist.destroy_process_group()


@record
def main() -> None:
    """A recipe becomes a run."""
    recipe = load_recipe(sys.argv[1:])
    world, run_dir, attempt = start_run(recipe)
    with Trainer(recipe, world, run_dir, attempt) as trainer:
        trainer.build()
        trainer.train()
    leave(world)


if __name__ == "__main__":
    main()
