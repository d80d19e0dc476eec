"""Models, data sets and hooks for the tests of train.py, as a user would have them in a file of his own."""

import logging
import os
import types
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


class Points(Dataset):
    """num_samples points of num_features normal numbers and a target each, the same in every process."""

    def __init__(self, num_samples: int = 64, num_features: int = 4, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, num_features, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Stream(IterableDataset):
    """Points without random access: this rank's share; ranks get as many more as `extra_for_rank` says."""

    def __init__(self, num_samples: int = 24, has_length: bool = False, extra: int = 0):
        self.rank = int(os.environ.get("RANK", 0))
        self.num_samples = num_samples + extra * self.rank
        if has_length:
            self.__class__ = SizedStream

    def __iter__(self):
        points = Points(self.num_samples, seed=self.rank)
        return (points[index] for index in range(self.num_samples))


class SizedStream(Stream):
    def __len__(self):
        return self.num_samples


class EpochNoter(Points):
    """Logs the epoch that it is told."""

    def set_epoch(self, epoch: int):
        logging.getLogger("test").info("set_epoch(%d)", epoch)


def make_loader(num_samples: int = 16):
    """A DataLoader of the user's own, whose batches are tuples."""
    points = Points(num_samples)
    return DataLoader([(points.x[i], points.y[i]) for i in range(num_samples)], batch_size=4)


class Regression(nn.Module):
    """Linear regression; fail_at, nan_at and warn_at name the training forward (from 1) on rank `on_rank`.

    returns: what forward gives back: "dict", "tensor", "object", "nothing" or "vector".
    """

    def __init__(self, num_features: int = 4, returns: str = "dict", on_rank: int = 0, fail_at: int = 0,
                 nan_at: int = 0,
                 warn_at: int = 0, norm: bool = False):
        super().__init__()
        self.layer = nn.Linear(num_features, 1)
        self.norm = nn.BatchNorm1d(num_features) if norm else nn.Identity()
        self.returns, self.num_forwards = returns, 0
        self.fail_at, self.nan_at, self.warn_at = (
            at if int(os.environ.get("RANK", 0)) == on_rank else 0 for at in (fail_at, nan_at, warn_at))

    def forward(self, x, y):
        self.num_forwards += self.training
        if self.training and self.num_forwards == self.fail_at:
            raise ArithmeticError("the model was told to fail")
        if self.training and self.num_forwards == self.warn_at:
            warnings.warn("the model was told to warn")
        error = (self.layer(self.norm(x)) - y).square()
        loss = error.mean() * (float("nan") if self.training and self.num_forwards == self.nan_at else 1)
        if self.returns == "tensor":
            return loss
        if self.returns == "object":
            return types.SimpleNamespace(loss=loss, prediction=error)
        if self.returns == "nothing":
            return {"cost": loss}
        if self.returns == "vector":
            return {"loss": error}
        return {"loss": loss, "largest": error.max(), "errors": error, "num_tokens": 7}


class MeanOfX(nn.Module):
    """Its loss is the mean of x: what an exact evaluation returns is known."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return {"loss": batch["x"].mean() * self.scale}


class StepNoter:
    """A hook that logs what it sees of every step, and fails when told to."""

    def __init__(self, fail_at: int = 0):
        self.fail_at = fail_at

    def after_backward(self, state):
        if state.step == self.fail_at:
            raise ValueError("the hook was told to fail")
        groups = [[tuple(p.shape) for p in group["params"]] for group in state.optimizer.param_groups]
        decays = [group["weight_decay"] for group in state.optimizer.param_groups]
        if state.step == 1:
            logging.getLogger("test").info("groups %s decays %s", groups, decays)

    def after_step(self, state):
        return {"noted/step": state.step, "noted/samples": torch.tensor(float(state.num_samples))}


class OddlyNamed(Points):
    """Its keys are no arguments of the model's."""

    def __getitem__(self, index):
        return {"input": self.x[index], "label": self.y[index]}


class NoHook:
    """Its only method is nearly an event."""

    def after_stp(self, state):
        pass
