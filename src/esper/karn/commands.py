"""The commands of `esper`: plain dataclasses whose fields are options.

What a command does is imported when it is run, so that asking for help does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, dataclass_transform

import tyro

from esper.api.grow_settings import AUTO, OPTIMIZER, GrowSettings
from esper.leyline.constants import DEFAULT_RENT
from esper.simic.training.config import PRESETS, read_config

RUNS = Path("runs")

option = tyro.conf.arg
Run = Annotated[Path, tyro.conf.Positional, option(metavar="RUN")]
Name = Annotated[str, option(metavar="NAME")]
Names = Annotated[tuple[str, ...], option(metavar="NAME [NAME ...]")]
Model = Annotated[
    str,
    tyro.conf.Positional,
    option(metavar="FILE.py:NAME", help="your model, for example my_model.py:Net"),
]
MovedModel = Annotated[str | None, option(metavar="FILE.py:NAME")]
Data = Annotated[str, option(metavar="DATA")]
Flat = Annotated[bool, option(help="make a vector of every input")]
Seed = Annotated[int, option(help="every random number follows from it")]
Device = Annotated[str, option(help="cpu or cuda")]
OwnDevice = Annotated[str, option(help="cpu, cuda, or auto: cuda where there is one")]
NewRun = Annotated[Path | None, option(help="directory of the run; by default a new one in runs/")]
Watched = Annotated[bool, option(help="show it in the browser meanwhile; says where")]
Quiet = Annotated[bool, option(help="say nothing but errors and how it ended")]
Figures = Annotated[Path | None, option(help="write the final figures as one flat object")]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Command:
    """A dataclass whose fields are options. `does` names a function of a module beside this one,
    which is imported when the command is run, and is given the command."""

    does: ClassVar[str]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def run(self) -> None:
        module, _, function = self.work().partition(".")
        getattr(import_module(f"esper.karn.{module}"), function)(self)

    def work(self) -> str:
        return self.does


class OfRun(Command):
    """What commands about a run have in common."""

    does_of_growth: ClassVar[str] = ""  # of a run of esper grow, where that is another
    path: Run
    """the directory of the run"""

    def work(self) -> str:
        from esper.api import GrowthFolder
        from esper.simic.training import RunError, RunFolder

        kinds = (GrowthFolder(self.path), RunFolder(self.path))
        if self.path.is_dir() and any(self.path.iterdir()) and any(each.is_fresh for each in kinds):
            given = "a run that ended before its first checkpoint"
            fix = "start it again there, with the command that it was started with"
            raise RunError(f"{self.path} holds nothing yet", given=given, fix=fix)
        grown = self.does_of_growth and kinds[0].holds_run
        return self.does_of_growth if grown else self.does


class OfSuite(Command):
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
            "greenhouse": "worlds that are drawn, hosts of many shapes, on one large GPU",
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


class Train(Command):
    """Train a controller: demo learns in minutes on two cores, garden is the main suite, gpu the
    same on one large GPU. Every setting of the preset can be changed here or in a file."""

    does = "train_commands.start_run"
    # Without a docstring, the parser would show the comment behind the field.
    config: Annotated[_presets(), option(name="")]  # type: ignore[valid-type]
    """choose the preset that sets the defaults"""
    out: NewRun = None
    file: Path | None = None
    """settings in TOML, in place of the preset's; options given here count more"""
    watch: Watched = False
    quiet: Quiet = False
    json: Figures = None


def train_command(words: Sequence[str]) -> Any:
    """`Train`, with the defaults of the file of settings that the words name."""
    if words[:1] != ["train"] or settings_file(words) is None:
        return Train

    class FromFile(Train):
        __doc__ = Train.__doc__
        config: Annotated[_presets(words), option(name="")]  # type: ignore[valid-type]
        """choose the preset that sets the defaults"""

    return Annotated[FromFile, tyro.conf.subcommand("train")]


class Demo(Command):
    """The main job in minutes: audit a network that lacks something and grow it; then train a
    controller on the small garden, compare it with others on test data, and write the report."""

    does = "demo.run_demo"
    out: NewRun = None
    rounds: int = PRESETS["demo"].rounds
    """rounds to train; fewer learn less"""
    seed: Seed = 0
    seeds: int = 2
    """cases of every context in the comparison at the end"""
    watch: Watched = False
    json: Figures = None


class Resume(OfRun):
    """Go on with a run of esper train or esper grow that was stopped or killed, or of esper train
    that was given more rounds.

    Code that the run's folder names runs if it is named here, or if a run was started with it and
    it has not changed since, or after a typed yes."""

    does = "train_commands.resume_run"
    does_of_growth = "grow_commands.resume_growing"
    watch: Watched = False
    quiet: Quiet = False
    json: Path | None = None
    """of esper train: write the final figures as one flat object"""
    model: MovedModel = None
    """of esper grow: where the model's code is now, if it was moved"""
    data: Annotated[str | None, option(metavar="DATA")] = None
    """of esper grow: where the data is now, if it was moved"""


# --- growing a network of your own ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoomOptions:
    """What growing may cost."""

    params: Annotated[str, option(metavar="+15%|5000|none")] = "+15%"
    """parameters that may be added, as a share of the model or a number; never exceeded"""


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(RoomOptions):
    """What growing may cost."""

    epochs: int = GrowSettings.epochs
    """epochs to train"""


class OfOwn(Command):
    """What commands have in common that train a network of your own."""

    model: Model
    data: Data
    """digits, mnist1d, stdlib; a file of arrays, .npz or .safetensors (inputs, targets); or
    FILE.py:FUNCTION that returns (train, val)"""
    loss: Literal["auto", "cross_entropy", "mse", "l1"] = "auto"
    """auto: cross-entropy for whole-numbered targets, mean squares for others"""
    optimizer: Name = OPTIMIZER
    """the name of an optimiser in torch.optim"""
    lr: float = GrowSettings.lr
    """its learning rate"""
    weight_decay: float | None = GrowSettings.weight_decay
    """its weight decay; by default the optimiser's own"""
    batch_size: int = GrowSettings.batch_size
    """samples of a step"""
    samples: int | None = None
    """train on the first so many samples only"""
    flat: Flat = False
    seed: Seed = GrowSettings.seed
    device: OwnDevice = "cpu"
    precision: Literal["full", "bf16"] = "full"
    """bf16: train and score under autocast"""
    quiet: Quiet = False


class Grow(OfOwn):
    """Train a network of your own and let it grow where that pays.

    FILE.py:NAME is your model: a class or a function without arguments, or the model itself.
    Afterwards: esper export RUN --format pt2|onnx|python."""

    does = "grow_commands.start_growing"
    budget: BudgetOptions = field(default_factory=BudgetOptions)
    slots: Annotated[tuple[str, ...], option(metavar="auto|PATH ...")] = (AUTO,)
    """where it may grow: paths of submodules, or auto; see esper inspect"""
    controller: Name = GrowSettings.controller
    """who decides: heuristic, another rule, tamiyo, or the directory of a trained run"""
    out: NewRun = None
    watch: Watched = False
    sinks: Names = ()
    """trackers that get the curves too: tensorboard, wandb, mlflow; each needs its extra"""


class AuditModel(OfOwn):
    """Say what a network of your own lacks and where: all that could be planted learns beside it
    for some epochs and shows what it is worth. Nothing is planted."""

    does = "grow_commands.audit_model"
    budget: RoomOptions = field(default_factory=RoomOptions)
    epochs: int = 3
    """epochs of the audition, after one of the model alone"""
    seconds: float | None = None
    """hear no more than there is time for"""
    out: Path | None = None
    """folder for a page, the map and the audit as JSON"""
    json: Path | None = None
    """write the audit as JSON"""


class Inspect(Command):
    """Say where a network of your own could grow: every place, what can be planted there, what
    it would cost, and why other places are refused."""

    does = "grow_commands.show_places"
    model: Model
    data: Data
    """what it is trained on, as for esper grow; one batch is looked at"""
    budget: RoomOptions = field(default_factory=RoomOptions)
    flat: Flat = False


class Export(OfRun):
    """Write the network of a finished run so that it runs without Esper, and check that it gives
    the same outputs. Its model's code is run as by esper resume.

    pt2: a torch.export archive; onnx: for any runtime; python: one readable file that needs torch
    alone."""

    does = "grow_commands.export_run"
    format: Annotated[str, option(metavar="pt2|onnx|python")] = "python"
    """what to write"""
    out: Path | None = None
    """where to; by default in the run's directory"""
    model: MovedModel = None
    """where the model's code is now, if it was moved"""
    fixed_batch: bool = False
    """keep the sample's batch size, for networks that cannot take another"""


# --- runs, and what came of them ------------------------------------------------------------------


class Runs(Command):
    """List the runs in a folder: how far each is, and how good."""

    does = "run_listing.list_runs"
    folder: Annotated[Path, tyro.conf.Positional] = RUNS
    """where to look"""


class Show(OfRun):
    """Show what a run has come to: evaluations, the last update, anomalies; or what grew."""

    does = "run_listing.show_run"
    does_of_growth = "grow_commands.show_growth"


class Events(OfRun):
    """Ask a run's telemetry anything, read-only, also while it is written; or export it."""

    does = "run_listing.ask_run"
    sql: str | None = None
    """a query, for example: select kind, count(*) from events group by kind"""
    export: Path | None = None
    """write every event as a line of JSON"""


class WriteReport(OfRun):
    """Write pictures of a run and one self-contained page, of training or of esper grow."""

    does = "run_listing.report_run"
    out: Path | None = None
    """where to; by default RUN/report"""


class Watch(Command):
    """Show runs in the browser while they train, and after: those of a folder, as they appear.

    Serves this machine alone, to whoever has the printed address; from another one, use a tunnel:
    ssh -L 8642:127.0.0.1:8642 HOST."""

    does = "watch_commands.watch_runs"
    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, option(metavar="FOLDER [FOLDER ...]")
    ] = (RUNS,)
    """folders of runs, or runs"""
    port: int | None = None
    """where to listen; by default 8642, or a free one if that is taken"""
    open: bool = False
    """open the page in the browser of this machine"""


# --- the garden: its contexts, its atlas, and controllers side by side ----------------------------


class Tasks(OfSuite):
    """List the contexts of a suite, with the score of never growing and the best known gain."""

    does = "garden_commands.show_tasks"


class MeasureAtlas(OfSuite):
    """Measure what every single seed gains in every context of a suite, or show what is known.

    An arm is a slot, a blueprint, a blend and an epoch; all arms are played on several seeds."""

    does = "garden_commands.run_atlas"
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
    device: Device = "cpu"
    json: Figures = None


class Evaluate(OfSuite):
    """Play controllers on the same cases and compare them on test data.

    Interrupt it at any time: with the same --out it goes on where it was."""

    does = "garden_commands.run_evaluation"
    controllers: Names = ("never", "random", "heuristic")
    """never, random, heuristic, periodic, plateau, gap, race, audition, tamiyo, specialist,
    best_constant, oracle, fixed:slot=early,blueprint=conv,..., or the directory of a run"""
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
    device: Device = "cpu"
    json: Figures = None
    quiet: bool = False
    """no progress"""


def every_command(words: Sequence[str]) -> Any:
    """All commands, as one type for the parser."""
    audit = Annotated[AuditModel, tyro.conf.subcommand("audit")]
    atlas = Annotated[MeasureAtlas, tyro.conf.subcommand("atlas")]
    report = Annotated[WriteReport, tyro.conf.subcommand("report")]
    training = Demo | train_command(words) | Resume | Evaluate | report
    growing = Grow | audit | Inspect | Export
    looking = Runs | Show | Watch | Events | Tasks | atlas
    return training | growing | looking
