"""The commands of `esper`: plain dataclasses whose fields are options.

What a command does is imported when it is run, so that asking for help does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from esper import __version__
from esper.api.grow_settings import AUTO, OPTIMIZER, GrowSettings
from esper.leyline.constants import DEFAULT_RENT
from esper.simic.training.config import PRESETS, TrainConfig, read_config

RUNS = Path("runs")
FORMATS = ("module", "pt2", "onnx", "python")

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Name = Annotated[str, tyro.conf.arg(metavar="NAME")]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py:NAME")]
MovedModel = Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")]
Data = Annotated[str, tyro.conf.arg(metavar="DATA")]
Amount = Annotated[str, tyro.conf.arg(metavar="+15%|5000|none")]


@dataclass(frozen=True, kw_only=True)
class OfRun:
    """What commands about a run have in common."""

    path: Run
    """the directory of the run"""


@dataclass(frozen=True, kw_only=True)
class OfSuite:
    """What commands of the garden have in common."""

    suite: Name = "garden"
    """garden, garden_mlp, or the path of a suite in TOML"""


# --- training a controller ------------------------------------------------------------------------


def _presets(words: Sequence[str] = ()) -> Any:
    """A subcommand for each preset; the one among the words with the settings of their file."""
    file = settings_file(words)
    known = {
        name: read_config(file, preset) if file is not None and name in words else preset
        for name, preset in PRESETS.items()
    }
    return tyro.extras.subcommand_type_from_defaults(
        known,
        descriptions={
            "demo": "the small dense host, a few hundred episodes, two processes",
            "garden": "the 1-D convolutional host on the cores of a workstation",
            "gpu": "the same on one large GPU, a quarter of a million episodes",
        },
        prefix_names=False,
    )


def settings_file(words: Sequence[str]) -> Path | None:
    """The file of settings among the words of a command line: it is the options' default."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--file":
            following = words[place + 1 : place + 2]
            return Path(value) if equals else Path(following[0]) if following else None
    return None


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a controller: demo learns in minutes on two cores, garden is the main suite, gpu the
    same on one large GPU. Every setting of the preset can be changed here or in a file."""

    config: Annotated[_presets(), tyro.conf.arg(name="")]  # type: ignore[valid-type]
    out: Path | None = None
    """directory of the run; by default a new one in runs/"""
    file: Path | None = None
    """settings in TOML, in place of the preset's; options given here count more"""
    quiet: bool = False
    """say nothing but errors and how it ended"""
    json: Path | None = None
    """write the final figures as one flat object"""

    def run(self) -> None:
        from esper.karn.train_commands import start_run

        assert isinstance(self.config, TrainConfig)
        start_run(self.config, self.out, quiet=self.quiet, json=self.json)


def train_command(words: Sequence[str]) -> Any:
    """`Train`, with the defaults of the file of settings that the words name."""
    if words[:1] != ["train"] or settings_file(words) is None:
        return Train
    field = ("config", Annotated[_presets(words), tyro.conf.arg(name="")])
    made = make_dataclass("Train", [field], bases=(Train,), frozen=True, kw_only=True)
    made.__doc__ = Train.__doc__
    return made


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The main job in minutes: train a controller on the small garden, compare it with others on
    test data, and write the report."""

    out: Path | None = None
    """directory of the run; by default a new one in runs/"""
    rounds: int = PRESETS["demo"].rounds
    """rounds to train; fewer learn less"""
    seed: int = 0
    """every random number follows from it"""
    seeds: int = 2
    """cases of every context in the comparison at the end"""
    json: Path | None = None
    """write the final figures as one flat object"""

    def run(self) -> None:
        from esper.karn.train_commands import run_demo

        run_demo(self)


@dataclass(frozen=True, kw_only=True)
class Resume(OfRun):
    """Go on with a run of esper train or esper grow that was stopped or killed, or of esper train
    that was given more rounds."""

    quiet: bool = False
    """say nothing but errors and how it ended"""
    json: Path | None = None
    """of esper train: write the final figures as one flat object"""
    model: MovedModel = None
    """of esper grow: where the model's code is now, if it was moved"""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """of esper grow: where the data is now, if it was moved"""

    def run(self) -> None:
        from esper.karn.grow_commands import is_growth, resume_growing
        from esper.karn.train_commands import resume_run

        if is_growth(self.path):
            resume_growing(self.path, model=self.model, data=self.data, quiet=self.quiet)
            return

        resume_run(self.path, quiet=self.quiet, json=self.json)


# --- growing a network of your own ----------------------------------------------------------------


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
    controller: Name = GrowSettings.controller
    """who decides: heuristic, another rule, tamiyo, or the directory of a trained run"""
    loss: Literal["auto", "cross_entropy", "mse", "l1"] = "auto"
    """auto: cross-entropy for whole-numbered targets, mean squares for others"""
    optimizer: Name = OPTIMIZER
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
        from esper.karn.grow_commands import start_growing

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
        from esper.karn.grow_commands import show_places

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
    model: MovedModel = None
    """where the model's code is now, if it was moved"""
    fixed_batch: bool = False
    """keep the sample's batch size, for networks that cannot take another"""

    def run(self) -> None:
        from esper.karn.grow_commands import export_run

        export_run(self)


# --- runs, and what came of them ------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Runs:
    """List the runs in a folder: how far each is, and how good."""

    folder: Annotated[Path, tyro.conf.Positional] = RUNS
    """where to look"""

    def run(self) -> None:
        from esper.karn.run_listing import list_runs

        list_runs(self.folder)


@dataclass(frozen=True, kw_only=True)
class Show(OfRun):
    """Show what a run has come to: evaluations, the last update, anomalies; or what grew."""

    def run(self) -> None:
        from esper.karn.grow_commands import is_growth, show_growth
        from esper.karn.run_listing import show_run

        if is_growth(self.path):
            show_growth(self.path)
            return
        show_run(self.path)


@dataclass(frozen=True, kw_only=True)
class Events(OfRun):
    """Ask a run's telemetry anything, read-only, also while it is written; or export it."""

    sql: str | None = None
    """a query, for example: select kind, count(*) from events group by kind"""
    export: Path | None = None
    """write every event as a line of JSON"""

    def run(self) -> None:
        from esper.karn.run_listing import ask_run

        ask_run(self.path, self.sql, self.export)


@dataclass(frozen=True, kw_only=True)
class WriteReport(OfRun):
    """Write pictures of a run and one self-contained page; of esper grow, the report in words."""

    out: Path | None = None
    """where to; by default RUN/report"""

    def run(self) -> None:
        from esper.karn.grow_commands import is_growth, show_growth
        from esper.karn.report import write_report
        from esper.simic.training import RunFolder

        if is_growth(self.path):
            show_growth(self.path)
            return
        RunFolder.open(self.path)
        print(f"Report: {write_report(self.path, self.out)}")


# --- the garden: its contexts, its atlas, and controllers side by side ----------------------------


@dataclass(frozen=True, kw_only=True)
class Tasks(OfSuite):
    """List the contexts of a suite, with the score of never growing and the best known gain."""

    def run(self) -> None:
        from esper.karn.garden_commands import show_tasks

        show_tasks(self.suite)


@dataclass(frozen=True, kw_only=True)
class MeasureAtlas(OfSuite):
    """Measure what every single seed gains in every context of a suite, or show what is known.

    An arm is a slot, a blueprint, a blend and an epoch; all arms are played on several seeds."""

    show: bool = False
    """print the stored atlas; measure nothing"""
    out: Path | None = None
    """directory for the atlas; by default atlas-SUITE in the current one"""
    seeds: int = 8
    """cases of every context"""
    epochs: tuple[int, ...] = (4, 9, 15)
    """when to plant"""
    schedules: bool = False
    """also search schedules of several seeds: the oracle's, and the best constant one"""
    rows: int = 64
    """hosts that train together; a GPU is best filled with thousands"""
    device: str = "cpu"
    """cpu or cuda"""
    json: Path | None = None
    """write the summary as one flat object"""

    def run(self) -> None:
        from esper.karn.garden_commands import run_atlas

        run_atlas(self)


@dataclass(frozen=True, kw_only=True)
class Evaluate(OfSuite):
    """Play controllers on the same cases and compare them on test data.

    Interrupt it at any time: with the same --out it goes on where it was."""

    controllers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME [NAME ...]")] = (
        "never",
        "random",
        "heuristic",
    )
    """never, random, heuristic, periodic, plateau, gap, race, best_constant, oracle,
    fixed:slot=early,blueprint=conv,..., or the directory of a run"""
    suite: Name = "garden_mlp"
    group: Name = "training"
    """training, or a group of held-out contexts: task, host, lesion"""
    seeds: int = 4
    """cases of every context"""
    rent: float = DEFAULT_RENT
    """points for 100 % of the host's parameters over a whole episode"""
    out: Path | None = None
    """file for every episode's result, one line of JSON each"""
    rows: int = 64
    """hosts that train together"""
    device: str = "cpu"
    """cpu or cuda"""
    json: Path | None = None
    """write the table as one flat object"""
    quiet: bool = False
    """no progress"""

    def run(self) -> None:
        from esper.karn.garden_commands import run_evaluation

        run_evaluation(self)


# --- what there is --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Life:
    """Watch a seed's whole life: planted, trained in isolation, blended, made permanent; a second
    one is pruned again. Trains a small network on MNIST-1D, which is generated on the spot."""

    epochs: int = 20
    """epochs to train; the story needs at least 16"""
    seed: int = 0
    """every random number follows from it"""
    samples: int = 4000
    """training samples to generate"""

    def run(self) -> None:
        from esper.karn.life import tell_life

        tell_life(epochs=self.epochs, seed=self.seed, samples=self.samples)


@dataclass(frozen=True, kw_only=True)
class Blueprints:
    """List what can be planted in a host, and what each seed costs in each slot."""

    host: Annotated[str, tyro.conf.arg(metavar="NAME")] = "conv1d"
    """conv1d, conv2d, mlp or gpt"""

    def run(self) -> None:
        from esper.karn.garden_commands import show_blueprints

        show_blueprints(self.host)


@dataclass(frozen=True, kw_only=True)
class Version:
    """Print the version."""

    def run(self) -> None:
        print(f"esper {__version__}")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, which devices and data there are, and check that training works."""

    def run(self) -> None:
        from esper.karn.doctor import examine

        examine()


def every_command(words: Sequence[str]) -> Any:
    """All commands, as one type for the parser."""
    atlas = Annotated[MeasureAtlas, tyro.conf.subcommand("atlas")]
    report = Annotated[WriteReport, tyro.conf.subcommand("report")]
    training = Demo | train_command(words) | Resume | Evaluate | report
    growing = Grow | Inspect | Export
    looking = Runs | Show | Events | Tasks | atlas | Blueprints
    return training | growing | looking | Life | Doctor | Version
