"""`python -m studies`: find out whether growth pays, and whether learning to grow does.

Options are plain dataclasses; work is imported only when it is asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

Size = Annotated[str, tyro.conf.arg(metavar="NAME")]


@dataclass(frozen=True, kw_only=True)
class GrowthStudy:
    """Does growth pay? A grown network against the small host, against its final architecture
    from scratch with a tuned learning rate, both also at equal FLOPs, and random growth."""

    size: Size = "quick"
    """quick: minutes; cpu: within an hour on two cores; gpu: within 25 minutes on a large one"""
    out: Path = Path("study-c1")
    """folder of the study; one that was interrupted goes on where it was"""
    device: str = "cpu"
    """cpu or cuda"""
    seconds: float | None = None
    """stop at the next safe point after so many; the same command goes on"""
    json: Path | None = None
    """write the figures as one flat object"""
    quiet: bool = False
    """no progress"""

    def run(self) -> None:
        from studies.report.running import run_growth_study

        run_growth_study(self)


@dataclass(frozen=True, kw_only=True)
class LearningStudy:
    """Does learning to grow pay? Several trainings of Tamiyo against tuned rules, the best
    constant schedule and an oracle, in contexts it was trained in and in others."""

    size: Size = "quick"
    """quick: minutes; cpu: within an hour on two cores; gpu: within 25 minutes on a large one"""
    out: Path = Path("study-c2")
    """folder of the study; one that was interrupted goes on where it was"""
    device: str = "cpu"
    """cpu or cuda"""
    seconds: float | None = None
    """stop at the next safe point after so many; the same command goes on"""
    json: Path | None = None
    """write the figures as one flat object"""
    quiet: bool = False
    """no progress"""

    def run(self) -> None:
        from studies.report.running import run_learning_study

        run_learning_study(self)


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """Write page, pictures and figures from the raw results of one study or both."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """folders of studies"""
    out: Path = Path("evidence")
    """where to write evidence.md, evidence.json and the pictures"""
    json: Path | None = None
    """write the figures as one flat object, there too"""

    def run(self) -> None:
        from studies.report.running import report_studies

        report_studies(self)


Asked = (
    Annotated[GrowthStudy, tyro.conf.subcommand("c1")]
    | Annotated[LearningStudy, tyro.conf.subcommand("c2")]
    | Annotated[StudyReport, tyro.conf.subcommand("report")]
)
