"""Commands that train controllers and look at what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from esper.simic.training.config import PRESETS, TrainConfig, read_config

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]

RUNS = Path("runs")


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
        from esper.karn.training import start_run

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
        from esper.karn.demo import run_demo

        run_demo(self)


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Go on with a run of esper train or esper grow that was stopped or killed, or of esper train
    that was given more rounds."""

    path: Run
    """the directory of the run"""
    quiet: bool = False
    """say nothing but errors and how it ended"""
    json: Path | None = None
    """of esper train: write the final figures as one flat object"""
    model: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """of esper grow: where the model's code is now, if it was moved"""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """of esper grow: where the data is now, if it was moved"""

    def run(self) -> None:
        from esper.karn.growing import is_growth, resume_growing
        from esper.karn.training import resume_run

        if is_growth(self.path):
            resume_growing(self.path, model=self.model, data=self.data, quiet=self.quiet)
            return

        resume_run(self.path, quiet=self.quiet, json=self.json)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """List the runs in a folder: how far each is, and how good."""

    folder: Annotated[Path, tyro.conf.Positional] = RUNS
    """where to look"""

    def run(self) -> None:
        from esper.karn.runs import list_runs

        list_runs(self.folder)


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show what a run has come to: evaluations, the last update, anomalies; or what grew."""

    path: Run
    """the directory of the run"""

    def run(self) -> None:
        from esper.karn.growing import is_growth, show_growth
        from esper.karn.runs import show_run

        if is_growth(self.path):
            show_growth(self.path)
            return
        show_run(self.path)


@dataclass(frozen=True, kw_only=True)
class Events:
    """Ask a run's telemetry anything, read-only, also while it is written; or export it."""

    path: Run
    """the directory of the run"""
    sql: str | None = None
    """a query, for example: select kind, count(*) from events group by kind"""
    export: Path | None = None
    """write every event as a line of JSON"""

    def run(self) -> None:
        from esper.karn.runs import ask_run

        ask_run(self.path, self.sql, self.export)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write pictures of a run and one self-contained page; of esper grow, the report in words."""

    path: Run
    """the directory of the run"""
    out: Path | None = None
    """where to; by default RUN/report"""

    def run(self) -> None:
        from esper.karn.growing import is_growth, show_growth
        from esper.karn.report import write_report
        from esper.simic.training import RunFolder

        if is_growth(self.path):
            show_growth(self.path)
            return
        RunFolder.open(self.path)
        print(f"Report: {write_report(self.path, self.out)}")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what is installed, which devices and data there are, and check that training works."""

    def run(self) -> None:
        from esper.karn.doctor import examine

        examine()
