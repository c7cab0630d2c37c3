"""Trains and grows a dense network with `gromo`; run by gromo_peer.py in an environment of its own.

The recipe is the library's documented one: train, gather statistics over the training set, compute
the best new neurons of one hidden layer, choose how strongly to add them by a line search on
training data, add them, go on; hidden layers take turns. Growth happens as early and as often as
the schedule below says, with equal shares of the parameters that may be added.
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gromo.containers.growing_mlp import GrowingMLP
from torch import Tensor, nn

GROW_AFTER = (4, 7, 10, 13)  # epochs
FACTORS = (0.0, 0.1, 0.5, 1.0)  # of the line search
SCORED_EPOCHS = 3
ACTIVATIONS = {"relu": nn.ReLU, "selu": nn.SELU}

Split = tuple[Tensor, Tensor]


def accuracy(model: nn.Module, split: Split) -> float:
    model.eval()
    with torch.no_grad():
        return 100.0 * float((model(split[0]).argmax(-1) == split[1]).double().mean())


def neurons(model: GrowingMLP, layer: int, allowed: float) -> int:
    """How many neurons before `layer` cost at most so many parameters."""
    before, after = model.layers[layer - 1], model.layers[layer]
    return int(allowed // (before.in_features + 1 + after.out_features))


def grow(model: GrowingMLP, layer: int, count: int, split: Split) -> None:
    """Add up to `count` neurons to the hidden layer that feeds `layer`."""
    model.set_growing_layers(index=layer - 1)
    model.init_computation()
    model.eval()
    for inputs, labels in zip(split[0].split(500), split[1].split(500), strict=True):
        model.zero_grad()
        # The library averages by itself.
        nn.functional.cross_entropy(model(inputs), labels, reduction="sum").backward()
        model.update_computation()
    model.compute_optimal_updates(maximum_added_neurons=count)
    model.reset_computation()
    model.dummy_select_update()
    losses = {}
    with torch.no_grad():
        for factor in FACTORS:
            model.set_scaling_factor(factor)
            outputs = model.extended_forward(split[0])
            losses[factor] = float(nn.functional.cross_entropy(outputs, split[1]))
    model.set_scaling_factor(min(losses, key=lambda factor: losses[factor]))
    model.apply_change()


def one_run(task: dict[str, Any], splits: dict[str, Split], how: dict[str, Any]) -> dict[str, Any]:
    """Train one network from a seed; percent on validation and test data, last epochs."""
    torch.manual_seed(how["seed"])
    order = torch.Generator().manual_seed(how["seed"])
    model = GrowingMLP(
        in_features=splits["train"][0].shape[1],
        out_features=10,
        hidden_size=task["hidden"],
        number_hidden_layers=task["layers"],
        activation=ACTIVATIONS[how["activation"]](),
        device=torch.device("cpu"),
    )
    inputs, labels = splits["train"]
    optimiser = torch.optim.Adam(model.parameters(), lr=how["rate"])
    waiting = torch.zeros(0, dtype=torch.int64)
    validation, test = [], []
    for epoch in range(task["epochs"]):
        if epoch in GROW_AFTER:
            left = task["budget"] - model.number_of_parameters()
            turn = GROW_AFTER.index(epoch)
            layer = turn % task["layers"] + 1
            count = neurons(model, layer, left / (len(GROW_AFTER) - turn))
            if count:
                grow(model, layer, count, splits["train"])
                optimiser = torch.optim.Adam(model.parameters(), lr=how["rate"])
        model.train()
        for _ in range(task["batches"]):
            if len(waiting) < task["batch"]:
                waiting = torch.randperm(len(inputs), generator=order)
            chosen, waiting = waiting[: task["batch"]], waiting[task["batch"] :]
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimiser.step()
        if epoch >= task["epochs"] - SCORED_EPOCHS:
            validation.append(accuracy(model, splits["validation"]))
            test.append(accuracy(model, splits["test"]))
    return {
        **how,
        "validation": sum(validation) / len(validation),
        "test": sum(test) / len(test),
        "parameters": model.number_of_parameters(),
    }


def main() -> None:
    torch.set_num_threads(1)
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    stored = np.load(task["data"], allow_pickle=False)
    splits = {
        name: (
            torch.from_numpy(stored[f"{name}_inputs"]).float(),
            torch.from_numpy(stored[f"{name}_labels"]),
        )
        for name in ("train", "validation", "test")
    }
    runs = []
    for activation in ACTIVATIONS:
        tried: dict[float, list[float]] = {}
        for rate in task["rates"]:
            for seed in task["tuning"]:
                how = {"activation": activation, "rate": rate, "seed": seed, "phase": "tuning"}
                runs.append(one_run(task, splits, how))
                tried.setdefault(rate, []).append(runs[-1]["validation"])
        best = max(tried, key=lambda rate: sum(tried[rate]))
        for seed in task["test"]:
            how = {"activation": activation, "rate": best, "seed": seed, "phase": "test"}
            runs.append(one_run(task, splits, how))
        scores = [run["test"] for run in runs[-len(task["test"]) :]]
        print(f"{activation}: rate {best:g}, test {sum(scores) / len(scores):.2f} %", flush=True)
    version = importlib.metadata.version("gromo")
    kept = {name: task[name] for name in ("context", "epochs", "budget", "rates")}
    record = {"library": "gromo", "version": version, **kept, "runs": runs}
    Path(sys.argv[2]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
