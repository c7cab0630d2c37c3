"""A model, data and the command line, as somebody has them who grows a network of their own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.programs import esper_here

MODEL = """
import time
import torch
from torch import nn

number = 3

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.head = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        time.sleep(0.002)
        return self.head(self.drop(self.body(x)))

class Wide(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()

class Other(Slow):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 5)

class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, missing)

class Late(Slow):
    def forward(self, x):
        if self.training and x.shape[0] < 64:
            raise RuntimeError("too small")
        return super().forward(x)

class Scaled(Slow):
    def forward(self, x, scale):
        return super().forward(x) * scale

def regressor():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

def numbers():
    return [1, 2, 3]

def compiled():
    model = Slow()
    model.compile()
    return model
"""

DATA = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def loaders():
    torch.manual_seed(0)
    x = torch.randn(60, 6)
    pairs = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(pairs, 20), DataLoader(pairs, 20)

def named():
    train, val = loaders()
    collate = lambda rows: (torch.stack([row[0] for row in rows]), {"sum": 1})
    return DataLoader(train.dataset, 20, collate_fn=collate), val

def scaled():
    train, val = loaders()
    def collate(rows):
        inputs = torch.stack([row[0] for row in rows])
        return (inputs, 0.5), (inputs[:, 0] > 0).long()
    return tuple(DataLoader(each.dataset, 20, collate_fn=collate) for each in (train, val))

def one():
    return loaders()[0]

def needy(path):
    return loaders()
"""


def table() -> dict[str, np.ndarray]:
    """Points in six dimensions, of four kinds."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(120, 6)).astype(np.float32)
    targets = (inputs[:, 0] * inputs[:, 1] > 0) * 2 + (inputs[:, 2] > 0)
    return {"inputs": inputs, "targets": targets.astype(np.int64)}


def refused(words: Sequence[str | Path]) -> str:
    """What is said on wrong words: one line."""
    told = esper_here(*words)
    assert told.returncode == 2, told
    (line,) = told.stderr.strip().splitlines()
    assert line.startswith("esper: ")
    assert line.endswith((".", "?"))
    return line
