"""Writes the evidence of studies: the page, its pictures, and the flat figures."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from esper.leyline.errors import DataError, DuplicateNameError, EsperError, install_hint
from studies.folders import read_description
from studies.report.figures import Figures, growth_figures, learning_figures
from studies.report.growth import GrowthStudy
from studies.report.learning import LearningStudy
from studies.report.pages import evidence_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esper.show.theme import Theme

PAGE, FIGURES = "evidence.md", "evidence.json"


def write_evidence(folders: Sequence[Path], out: Path) -> Figures:
    """Write what these studies came to into `out`; returns the flat figures."""
    growth, learning = read_studies(folders)
    figures: Figures = {}
    figures |= {} if growth is None else growth_figures(growth)
    figures |= {} if learning is None else learning_figures(learning)
    drawn = draw(growth, learning)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, png in drawn.items():
            (out / f"{name}.png").write_bytes(png)
        page = evidence_page(growth, learning, list(drawn))
        (out / PAGE).write_text(page, encoding="utf-8")
        text = json.dumps(figures, indent=1, sort_keys=True)
        (out / FIGURES).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"The evidence cannot be written to {out}", given=error.strerror, fix="name --out"
        ) from error
    return figures


def read_studies(folders: Sequence[Path]) -> tuple[GrowthStudy | None, LearningStudy | None]:
    """The two studies among the folders, each once at most."""
    growth: GrowthStudy | None = None
    learning: LearningStudy | None = None
    if not folders:
        raise EsperError("There is no study to report", fix="name the folder of one or two")
    for folder in folders:
        is_learning = "groups" in read_description(folder)
        if (learning if is_learning else growth) is not None:
            raise DuplicateNameError(
                "Two of these folders hold the same kind of study",
                given=", ".join(map(str, folders)),
                valid="one of `python -m studies c1` and one of `python -m studies c2`",
            )
        if is_learning:
            learning = LearningStudy.read(folder)
        else:
            growth = GrowthStudy.read(folder)
    return growth, learning


def draw(growth: GrowthStudy | None, learning: LearningStudy | None) -> dict[str, bytes]:
    """Pictures by name; those that there is nothing for are left out."""
    try:
        from esper.show.theme import LIGHT, AbsentError, render
        from studies.report import pictures
    except ImportError as error:
        raise EsperError(
            "Reports need matplotlib, which is not installed", fix=install_hint("report")
        ) from error

    wanted: dict[str, Callable[[Theme], Figure]] = {}
    if growth is not None:
        wanted["evidence-growth"] = lambda theme: pictures.growth(growth, theme)
    if learning is not None:
        wanted["evidence-profiles"] = lambda theme: pictures.profiles(learning, theme)
        wanted["evidence-curves"] = lambda theme: pictures.learning_curves(learning, theme)
        wanted["evidence-leads"] = lambda theme: pictures.leads(learning, theme)
    found: dict[str, bytes] = {}
    for name, make in wanted.items():
        try:
            found[name] = render(make, LIGHT)
        except AbsentError:
            continue
    return found
