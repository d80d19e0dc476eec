"""Train a PyTorch model from a YAML recipe, under torchrun or alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field


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


# ---- Run directory ------------------------------------------------------------------------------------------------


# ---- Metrics ------------------------------------------------------------------------------------------------------


# ---- Building: model, data, optimizer, schedule -------------------------------------------------------------------


# ---- Checkpoints --------------------------------------------------------------------------------------------------


# ---- Stopping -----------------------------------------------------------------------------------------------------


# ---- Training -----------------------------------------------------------------------------------------------------


# ---- The story ----------------------------------------------------------------------------------------------------


if __name__ == "__main__":
    sys.exit()
