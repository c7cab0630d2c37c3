"""What a run has found, trained from the first step: its architecture with fresh weights.

Growing finds an architecture within one training. Trained afresh it may do better, or not; that
costs one training more for every rate that is tried.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from esper.api.grow_settings import GrowError
from esper.api.ticking import NotFiniteError
from esper.kasmina.isolation import randomness_kept
from esper.leyline.settings import POSITIVE, require
from esper.leyline.streams import derive_seed
from esper.show.terminal import aligned

if TYPE_CHECKING:
    from esper.api.grown_runs import GrownRun

Train = Callable[[nn.Module, float], "GrownRun"]  # a plain module, at this rate


@dataclass(frozen=True)
class Retrained:
    """The network that was trained afresh, beside the one that grew."""

    grown: "GrownRun"
    runs: dict[float, "GrownRun"]  # by rate
    diverged: tuple[float, ...] = ()  # rates that came to nothing

    @property
    def rate(self) -> float:
        """The one that did best on validation data."""
        return max(self.runs, key=lambda rate: self.runs[rate].after["score"])

    @property
    def best(self) -> "GrownRun":
        return self.runs[self.rate]

    def export(self) -> nn.Module:
        """The network trained afresh, as a plain module."""
        return self.best.export()

    def __str__(self) -> str:
        runs = {"grown": self.grown} | {f"afresh, lr {r:g}": run for r, run in self.runs.items()}
        rows = [
            (name, ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in run.after.items()))
            for name, run in runs.items()
        ]
        spent = sum(
            sum(map(sum, (each.values() for each in r.seconds))) for r in self.runs.values()
        )
        rows += [(f"afresh, lr {rate:g}", "diverged") for rate in self.diverged]
        return "\n".join([*aligned(rows), f"Training afresh took {spent:.1f} s more."])


def retrain(run: "GrownRun", train: Train | None, rates: Sequence[float] | None) -> Retrained:
    """Train the architecture of a finished run from the first step, at each of these rates."""
    if not run.finished or train is None:
        given = "a run that is not finished" if not run.finished else "a run without its data"
        raise GrowError(
            "Only a run that was finished in this process can be trained afresh",
            given=given,
            fix="go on with esper.resume(path, model, train, val), or train run.fresh() yourself",
        )
    chosen = tuple([] if rates is None else rates) or (run.settings.lr,)
    for rate in chosen:
        require("A learning rate", rate, POSITIVE, error=GrowError)
    found: dict[float, GrownRun] = {}
    for rate in chosen:
        try:
            found[rate] = train(fresh(run), rate)
        except NotFiniteError:
            if rate == chosen[-1] and not found:
                raise
    return Retrained(run, found, tuple(rate for rate in chosen if rate not in found))


def fresh(run: "GrownRun", model: nn.Module | None = None) -> nn.Module:
    """The architecture that was found, as a plain module with new weights.

    The host's come from `model`, a newborn one, or are drawn by its layers themselves. Layers in a
    seed start as torch starts them, also the last one, which a planted seed has at zero; norms and
    scalar gates start at one.
    """
    plain, layers = run.export(), set[str]()
    with randomness_kept(plain, stream=derive_seed(run.settings.seed, "fresh")):
        if model is not None:
            missing, unknown = plain.load_state_dict(model.state_dict(), strict=False)
            if unknown:
                raise GrowError(
                    "The model is another than the one that grew",
                    given=f"it has {', '.join(unknown[:3])}",
                    fix="build it as it was built for the run",
                )
            layers = {name.rpartition(".")[0] for name in missing}
        of_host = dict(run.host.model.named_modules())
        for path, module in plain.named_modules():
            holds = isinstance(module, _NormBase) or any(True for _ in module.parameters(False))
            if holds and (model is None or path in layers):
                _start(path, module, seed=path not in of_host)
    return plain


@torch.no_grad()
def _start(path: str, layer: nn.Module, *, seed: bool) -> None:
    """Draw a layer's weights anew; those of a seed may be a plain graph that cannot itself."""
    reset = getattr(layer, "reset_parameters", getattr(layer, "_reset_parameters", None))
    if callable(reset):
        reset()
        return
    own = dict(layer.named_parameters(recurse=False))
    if not seed or "weight" not in own:
        raise GrowError(
            "A layer cannot draw its weights anew",
            given=f"{path or 'the model itself'}: {type(layer).__name__} with {', '.join(own)}",
            fix="pass a newborn model: run.fresh(Net())",
        )
    for name, parameter in own.items():
        if own["weight"].dim() >= 2:
            bound = 1.0 / math.sqrt(own["weight"][0].numel())
            nn.init.uniform_(parameter, -bound, bound)
        else:
            nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)
