"""Runs studies from the command line: progress, what came of it, and where it is."""

import os
from pathlib import Path
from typing import Protocol

from esper.garden.dealing import Ranks
from esper.leyline.errors import EsperError
from esper.show.terminal import progress, write_flat
from esper.simic.training.run_processes import init_distributed, require_device
from studies.commands import GrowthStudy, LearningStudy, StudyReport
from studies.folders import Tell
from studies.growth_pays import run_c1
from studies.report import growth, learning
from studies.report.figures import Figures, growth_figures, learning_figures
from studies.report.verdicts import Verdict, growth_verdicts, learning_verdicts
from studies.report.writing import FIGURES, PAGE, write_evidence


class Runner(Protocol):
    """A study that can be interrupted; says whether it is finished."""

    def __call__(
        self,
        folder: Path,
        size: str,
        device: str,
        *,
        tell: Tell,
        seconds: float | None,
        ranks: Ranks,
    ) -> bool: ...


def run_growth_study(options: GrowthStudy) -> None:
    if _run(run_c1, options):
        study = growth.GrowthStudy.read(options.out)
        _tell(options.out, options.json, growth_figures(study), growth_verdicts(study))


def run_learning_study(options: LearningStudy) -> None:
    from studies.learning_pays import run_c2

    if _run(run_c2, options):
        study = learning.LearningStudy.read(options.out)
        _tell(options.out, options.json, learning_figures(study), learning_verdicts(study))


def _run(runner: Runner, options: GrowthStudy | LearningStudy) -> bool:
    """Is it finished, and is it this process that tells of it?"""
    require_device(options.device, "--device")
    if options.seconds is not None and not options.seconds > 0:
        raise EsperError(
            "A study needs time", given=f"--seconds {options.seconds:g}", valid="more than 0"
        )
    with (
        init_distributed(options.device) as ranks,
        progress(quiet=options.quiet or ranks.rank > 0) as report,
    ):
        finished = runner(
            options.out,
            options.size,
            options.device,
            tell=report,
            seconds=options.seconds,
            ranks=ranks,
        )
    if ranks.rank > 0:
        return False
    if not finished:
        print(f"Not finished. The same command goes on from what is in {options.out}.")
    return finished


def _tell(folder: Path, file: Path | None, figures: Figures, verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        print(f"{verdict.state}: {verdict.claim}.\n    {verdict.evidence}.")
    print(f"\nRaw results are in {folder}.")
    print(f"python -m studies report {folder} writes page and pictures.")
    write_flat(file, figures)


def report_studies(options: StudyReport) -> None:
    if int(os.environ.get("RANK", "0")):
        return  # there is nothing to share
    figures = write_evidence(options.folders, options.out)
    write_flat(options.json, figures)
    print(f"Evidence: {options.out / PAGE}, figures in {options.out / FIGURES}")
