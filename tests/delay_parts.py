"""A model, a data set, an optimizer and a hook that wait where a plan says: for tests of who is found slow.

The plan moves every STEPS steps to the next place; the slow rank is RANK of the environment's SLOW_RANK.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import Dataset

PLACES = ("nowhere", "data", "forward", "backward_first", "backward_middle", "backward_last", "optimizer", "hook")
STEPS = 10  # in each place
DELAY_S = 0.03
IS_SLOW = os.environ.get("RANK", "0") == os.environ.get("SLOW_RANK", "1")
now = {"place": PLACES[0]}


def wait(place: str) -> None:
    if IS_SLOW and now["place"] == place:
        time.sleep(DELAY_S)


class Waiting(torch.autograd.Function):
    """The identity, which may wait in forward and in backward."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if layer == "middle":
            wait("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        wait(f"backward_{ctx.layer}")
        return gradient, None


class Layers(nn.Module):
    """Three linear layers; norm: with BatchNorm; unused: with a parameter that never gets a gradient."""

    def __init__(self, norm: bool = False, unused: bool = False):
        super().__init__()
        self.layers = nn.ModuleDict({layer: nn.Linear(8, 8) for layer in ("first", "middle", "last")})
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.unused = nn.Linear(8, 8) if unused else None

    def forward(self, x):
        for name, layer in self.layers.items():
            x = Waiting.apply(layer(x), name)
        return {"loss": self.norm(x).square().mean()}


class Points(Dataset):
    def __len__(self):
        return 2 * 4 * len(PLACES) * STEPS

    def __getitem__(self, index):
        return {"x": torch.full((8,), float(index))}

    def __getitems__(self, indices):
        wait("data")
        return [self[index] for index in indices]


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        wait("optimizer")
        return super().step(closure)


class Plan:
    """Moves the plan on when a step has ended: what comes next belongs to the next step."""

    def after_step(self, state):
        wait("hook")
        now["place"] = PLACES[min(state.step // STEPS, len(PLACES) - 1)]
