"""What a wrapped model costs while nothing grows: time of a training step against the plain model.

    python benchmarks/wrapping.py
    python benchmarks/wrapping.py --steps 2000 --device cuda --json FILE

The same model twice, once as it is and once in `esper.wrap` with the optimiser that it makes. Their
steps alternate, so that both meet the same machine; a third copy, plain as well, tells how much of
a difference is noise. Tenth percentiles of single steps: what a step takes when nothing else wants
the machine. The tick once per epoch is no part of a step.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _report import write_json
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import esper

CLASSES = 10
LIMIT = 0.02  # share of a step's time


def mlp() -> tuple[nn.Module, Tensor]:
    """As for MNIST-1D."""
    layers = (nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(100, CLASSES)), torch.randn(64, 40)


def cnn() -> tuple[nn.Module, Tensor]:
    """As for Fashion-MNIST."""
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(CLASSES)), torch.randn(32, 1, 28, 28)


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.head(h[:, -1])
        return logits


def gpt() -> tuple[nn.Module, Tensor]:
    return Gpt(), torch.randint(CLASSES, (8, 32))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


def measure(name: str, steps: int, device: torch.device) -> dict[str, float | str]:
    """Microseconds of a step: plain, wrapped, and how far two plain ones differ."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model(x)  # sizes of lazy layers
    model, x = model.to(device), x.to(device)
    y = torch.randint(CLASSES, (len(x),), device=device)
    host = esper.wrap(copy.deepcopy(model), x)
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    runs: list[tuple[nn.Module, torch.optim.Optimizer]] = [
        (plain, torch.optim.AdamW(plain.parameters())),
        (host, host.optimizer(torch.optim.AdamW, lr=1e-3)),
        (again, torch.optim.AdamW(again.parameters())),
    ]
    times: list[list[float]] = [[], [], []]
    warm_up = steps // 10 + 1
    for step in range(steps + warm_up):
        for place in range(3):
            which = (place + step) % 3
            seconds = _timed_step(*runs[which], x, y)
            if step >= warm_up:
                times[which].append(1e6 * seconds)
        if step % 100 == 99:
            host.tick("never", train_loss=1.0, val_score=50.0)
    plain_time, wrapped_time, again_time = (statistics.quantiles(each, n=10)[0] for each in times)
    base = (plain_time + again_time) / 2
    return {
        "model": name,
        "plain": base,
        "wrapped": wrapped_time,
        "overhead": wrapped_time / base - 1.0,
        "noise": abs(plain_time - again_time) / base,
    }


def _timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, options.steps, torch.device(options.device)) for name in options.models]
    table = Table("model", "plain, µs", "wrapped, µs", "overhead", "noise", f"≤ {LIMIT:.0%}")
    for row in rows:
        table.add_row(
            str(row["model"]),
            f"{row['plain']:.0f}",
            f"{row['wrapped']:.0f}",
            f"{row['overhead']:+.2%}",
            f"{row['noise']:.2%}",
            "yes" if float(row["overhead"]) <= LIMIT else "no",
        )
    Console().print(table)
    write_json(options.json, {f"{row['model']}_overhead": float(row["overhead"]) for row in rows})


if __name__ == "__main__":
    main()
