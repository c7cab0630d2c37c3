"""What a model costs that could grow and does not, against the plain model.

    python benchmarks/wrapping.py
    python benchmarks/wrapping.py --steps 2000 --rounds 9 --device cuda --json FILE

A step (`idle_overhead_*`, a share of the plain one): the same model twice, once as it is and once
in `esper.wrap` with the optimiser that it makes. Their steps alternate, so that both meet the same
machine; a third copy, plain as well, tells how much of a difference is noise. Tenth percentiles of
single steps: what a step takes when nothing else wants the machine. The tick once per epoch is no
part of a step.

A whole run (`grow_never_vs_plain_*`, a ratio): `esper.grow(controller="never")` from the survey of
the model to its last score, against a training loop by hand with the same epochs, batches,
optimiser and validation after every epoch. Runs of both alternate; the quickest of each counts. The
models are those of the steps, the smallest with more rows in a batch so that a step takes at least
a millisecond. On a CPU all times are those of the processor, which others on the machine take less
part in than in those of the clock.
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
PLACEMENTS = 7  # copies of a model that are measured
LIMIT = 0.02  # share of a step's time
RUN_LIMIT = 1.1  # times a plain run
BATCHES, EPOCHS = 100, 5  # of a run; a fifth as many batches for validation
GROWN_ROWS = {"mlp": 1024}  # in a batch of a run; others as for a step


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
    """Microseconds of a step: plain, wrapped, and how far two plain ones differ.

    Where its tensors lie moves a step by a percent or two: hence medians over several copies.
    """
    found = [_measure_copies(name, steps // PLACEMENTS + 1, device) for _ in range(PLACEMENTS)]
    plain, wrapped, again = (statistics.median(each) for each in zip(*found, strict=True))
    overheads = [2 * wrapped / (plain + again) - 1.0 for plain, wrapped, again in found]
    noise = [2 * abs(plain - again) / (plain + again) for plain, _, again in found]
    return {
        "model": name,
        "plain": (plain + again) / 2,
        "wrapped": wrapped,
        "overhead": statistics.median(overheads),
        "noise": statistics.median(noise),
    }


def _measure_copies(name: str, steps: int, device: torch.device) -> tuple[float, float, float]:
    """Of three copies of a model, the second in a host."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model(x)  # sizes of lazy layers
    model, x = model.to(device), x.to(device)
    y = torch.randint(CLASSES, (len(x),), device=device)
    plain, inner, again = (copy.deepcopy(model) for _ in range(3))
    host = esper.wrap(inner, x)
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
    first, middle, last = (statistics.quantiles(each, n=10)[0] for each in times)
    return first, middle, last


def measure_run(name: str, rounds: int, device: torch.device) -> dict[str, float | str]:
    """Seconds of a whole run, by hand and by `grow`, which never plants."""
    torch.manual_seed(0)
    model, x = MODELS[name]()
    model(x)
    rows = GROWN_ROWS.get(name, len(x))
    parts = []
    for batches in (BATCHES, BATCHES // 5):
        inputs = x.repeat(-(-rows * batches // len(x)), *(1,) * (x.dim() - 1))[: rows * batches]
        parts.append((inputs.to(device), torch.randint(CLASSES, (len(inputs),), device=device)))
    train, val = parts
    times: dict[str, list[float]] = {"plain": [], "grow": []}
    for number in range(rounds):
        for kind in sorted(times, reverse=bool(number % 2)):
            net = copy.deepcopy(model).to(device)
            start = _now(device)
            if kind == "plain":
                train_by_hand(net, train, val, rows)
            else:
                esper.grow(net, train, val, loss="cross_entropy", budget="+50%", epochs=EPOCHS,
                           controller="never", batch_size=rows, quiet=True)  # fmt: skip
            times[kind].append(_now(device) - start)
    plain, grown = min(times["plain"]), min(times["grow"])
    step = plain / (EPOCHS * BATCHES)
    return {"model": name, "plain": plain, "grow": grown, "ratio": grown / plain, "step": step}


def train_by_hand(
    net: nn.Module, train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor], rows: int
) -> list[tuple[float, float, float]]:
    """What one writes without Esper: an epoch, then loss and accuracy on validation data."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    history = []
    for _ in range(EPOCHS):
        net.train()
        losses = []
        for batch in torch.randperm(len(train[0])).split(rows):
            optimizer.zero_grad()
            loss = cross_entropy(net(train[0][batch]), train[1][batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        net.eval()
        sums, right = [], []
        with torch.no_grad():
            for x, y in zip(val[0].split(rows), val[1].split(rows), strict=True):
                outputs = net(x)
                sums.append(cross_entropy(outputs, y, reduction="sum"))
                right.append((outputs.argmax(1) == y).sum())
        means = [float(torch.stack(each).sum()) / len(val[0]) for each in (sums, right)]
        history.append((float(torch.stack(losses).mean()), means[0], 100.0 * means[1]))
    return history


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    start = _now(x.device)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return _now(x.device) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--steps", type=int, default=1400, help="of each model; 0: leave it out")
    parser.add_argument("--rounds", type=int, default=6, help="runs of each kind; 0: none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    steps = [measure(name, options.steps, device) for name in options.models if options.steps]
    table = Table("model", "plain, µs", "wrapped, µs", "overhead", "noise", f"≤ {LIMIT:.0%}")
    for row in steps:
        table.add_row(
            str(row["model"]),
            f"{row['plain']:.0f}",
            f"{row['wrapped']:.0f}",
            f"{row['overhead']:+.2%}",
            f"{row['noise']:.2%}",
            "yes" if float(row["overhead"]) <= LIMIT else "no",
        )
    runs = [measure_run(name, options.rounds, device) for name in options.models if options.rounds]
    whole = Table("model", "a step, ms", "plain, s", "grow, s", "ratio", f"≤ {RUN_LIMIT}")
    for row in runs:
        whole.add_row(
            str(row["model"]),
            f"{1e3 * float(row['step']):.2f}",
            f"{row['plain']:.2f}",
            f"{row['grow']:.2f}",
            f"{row['ratio']:.3f}",
            "yes" if float(row["ratio"]) <= RUN_LIMIT else "no",
        )
    for shown in (table, whole):
        if shown.rows:
            Console().print(shown)
    figures = {f"idle_overhead_{row['model']}": float(row["overhead"]) for row in steps}
    figures |= {f"grow_never_vs_plain_{row['model']}": float(row["ratio"]) for row in runs}
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
