"""Commands that grow a network of your own."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from esper.api.grow_settings import AUTO, OPTIMIZER, GrowSettings

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:NAME")]
Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Data = Annotated[str, tyro.conf.arg(metavar="DATA")]
Text = Annotated[str, tyro.conf.arg(metavar="NAME")]
Amount = Annotated[str, tyro.conf.arg(metavar="+15%|5000|none")]

FORMATS = ("module", "pt2", "onnx", "python")


@dataclass(frozen=True, kw_only=True)
class RoomOptions:
    """What growing may cost."""

    params: Amount = "+15%"
    """parameters that may be added, as a share of the model or a number; never exceeded"""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(RoomOptions):
    """What growing may cost."""

    epochs: int = GrowSettings.epochs
    """epochs to train"""


@dataclass(frozen=True, kw_only=True)
class Grow:
    """Train a network of your own and let it grow where that pays.

    FILE.py:NAME is your model: a class or a function without arguments, or the model itself.
    Afterwards: esper export RUN --format module|pt2|onnx|python."""

    model: Model
    """your model, for example my_model.py:Net"""
    data: Data
    """digits, mnist1d, stdlib, mnist, fashion_mnist, cifar10; a file of arrays, .npz or
    .safetensors (inputs, targets); or FILE.py:FUNCTION that returns (train, val)"""
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    slots: Annotated[tuple[str, ...], tyro.conf.arg(metavar="auto|PATH ...")] = (AUTO,)
    """where it may grow: paths of submodules, or auto; see esper inspect"""
    controller: Text = GrowSettings.controller
    """who decides: heuristic, another rule, tamiyo, or the directory of a trained run"""
    loss: Literal["auto", "cross_entropy", "mse", "l1"] = "auto"
    """auto: cross-entropy for whole-numbered targets, mean squares for others"""
    optimizer: Text = OPTIMIZER
    """the name of an optimiser in torch.optim"""
    lr: float = GrowSettings.lr
    """its learning rate"""
    batch_size: int = GrowSettings.batch_size
    """samples of a step"""
    samples: int | None = None
    """train on the first so many samples only"""
    flat: bool = False
    """make a vector of every input"""
    seed: int = GrowSettings.seed
    """every random number follows from it"""
    device: str = "cpu"
    """cpu or cuda"""
    out: Path | None = None
    """directory of the run; by default a new one in runs/"""
    quiet: bool = False
    """say nothing but errors and how it ended"""

    def run(self) -> None:
        from esper.karn.growing import start_growing

        start_growing(self)


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say where a network of your own could grow: every place, what can be planted there, what
    it would cost, and why other places are refused."""

    model: Model
    """your model, for example my_model.py:Net"""
    data: Data
    """what it is trained on, as for esper grow; one batch is looked at"""
    budget: RoomOptions = field(default_factory=RoomOptions)
    flat: bool = False
    """make a vector of every input"""

    def run(self) -> None:
        from esper.karn.growing import show_places

        show_places(self)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the network of a finished run so that it runs without Esper, and check that it gives
    the same outputs.

    module: what was grown, to be added to your own class; pt2: a torch.export archive; onnx: for
    any runtime; python: one readable file that needs torch alone."""

    path: Run
    """the directory of a run of esper grow"""
    format: Annotated[str, tyro.conf.arg(metavar="module|pt2|onnx|python")] = "python"
    """what to write"""
    out: Path | None = None
    """where to; by default in the run's directory"""
    model: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """where the model's code is now, if it was moved"""
    fixed_batch: bool = False
    """keep the sample's batch size, for networks that cannot take another"""

    def run(self) -> None:
        from esper.karn.exporting import export_run

        export_run(self)
