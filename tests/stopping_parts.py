"""Models, data and hooks for the tests of checkpoints, resume and stopping; they draw random numbers."""

import datetime
import json
import logging
import os
import random
import signal
import time
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", 0))


class NoisyPoints(Dataset):
    """Points with noise of Python's, NumPy's and torch's generators; `index` tells the samples' order."""

    def __init__(self, num_samples: int = 64, sleep_s: float = 0.0):
        self.x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(5))
        self.sleep_s = sleep_s

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        noise = 0.1 * (torch.randn(4) + random.random() + float(numpy.random.rand()))
        return {"x": self.x[index] + noise, "index": torch.tensor(index)}


def shuffling_loader():
    """A DataLoader of the user's own; its order comes from torch's global generator."""
    return DataLoader(NoisyPoints(), batch_size=4, shuffle=True)


class DropoutNet(nn.Module):
    """BatchNorm and dropout; size: values of a parameter that only makes the checkpoint larger."""

    def __init__(self, size: int = 0, width: int = 8, eval_sleep_s: float = 0.0):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3)
        self.last = nn.Linear(width, 1)
        self.register_buffer("ballast", torch.rand(size))
        self.eval_sleep_s = eval_sleep_s

    def forward(self, x, index=None):
        if not self.training:
            time.sleep(self.eval_sleep_s)
        y = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return {"loss": (y - x.sum(1, keepdim=True)).square().mean(), "index": index}


class Journal:
    """Writes what each rank's step saw, draws random numbers, and does harm when told to.

    at: step of the harm on rank `on_rank`, before any restart; harm: "kill", "raise", "hang" or "nan".
    others_sit: at that step the other ranks wait in C code for what never comes.
    step_sleep_s: makes a step longer.
    """

    def __init__(self, harm: str = "", at: int = 0, on_rank: int = 0, others_sit: bool = False,
                 step_sleep_s: float = 0.0):
        is_first = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) == 0
        self.harm = harm if RANK == on_rank else "sit" if others_sit else ""
        self.at, self.step_sleep_s = at if is_first else 0, step_sleep_s

    def before_epoch(self, state):
        random.random(), torch.rand(1)

    def before_step(self, state):
        if state.step == self.at and self.harm == "nan":
            state.batch["x"].fill_(float("nan"))

    def after_step(self, state):
        time.sleep(self.step_sleep_s)
        draw = torch.rand(()).item() + random.random() + float(numpy.random.rand())
        outputs = state.outputs["loss"].item(), state.outputs["index"].tolist()
        line = [state.step, state.epoch, state.lr, *outputs, draw]
        with open(Path(state.run_dir) / f"journal.rank{RANK}.txt", "a") as file:
            file.write(json.dumps(line) + "\n")
        if state.step == self.at and self.harm:
            self.do_harm()
        return {"journal/draw": draw}

    def do_harm(self):
        if self.harm == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.harm == "raise":
            raise ArithmeticError("told to fail")
        if self.harm == "hang":
            logging.getLogger("test").warning("hanging")
            time.sleep(600)
        if self.harm == "sit":
            torch.distributed.HashStore().wait(["never"], datetime.timedelta(seconds=600))
