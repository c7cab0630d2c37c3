"""Reports: what a run came to, as pictures and one page that needs nothing else."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from esper.archive import write_whole
from esper.leyline.errors import EsperError
from esper.show.growth_facts import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esper.show.page import Section

FOLDER, PAGE = "report", "index.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write what a training came to, as far as it is, and return the page.

    `run` is a run's directory, which is only read (also while it is trained); `out` is where to
    write, by default `report` in it. Pictures of an older report there are replaced.
    """
    require_matplotlib()
    from esper.show.run_facts import read_facts
    from esper.show.sections import contents
    from esper.show.training_page import page

    facts = read_facts(Path(run))
    folder = facts.path / FOLDER if out is None else Path(out)
    return _written(folder, contents(facts), partial(page, facts))


def write_growth_report(facts: Report, folder: Path) -> Path:
    """Write what a run of `grow` came to, as far as it is, into this folder; return the page."""
    require_matplotlib()
    from esper.show.growth_page import contents, page

    return _written(folder, contents(facts), partial(page, facts))


def growth_figure(facts: Report, *, dark: bool = False) -> "Figure":
    """How a network grew, as one figure."""
    require_matplotlib()
    from esper.show.growth_charts import growth
    from esper.show.theme import DARK, LIGHT, styled

    return styled(partial(growth, facts), DARK if dark else LIGHT)


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EsperError(
            "Reports need matplotlib, which is not installed", fix="pip install 'esper-ml[report]'"
        ) from error


def _written(
    folder: Path, found: "Sequence[Section]", page: "Callable[[Sequence[Section]], str]"
) -> Path:
    from esper.show.page import drawn

    sections = [drawn(section) for section in found]
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("timeline-*.png"):  # of episodes that are not the chosen ones now
        old.unlink()
    for picture in (picture for section in sections for picture in section.pictures):
        (folder / f"{picture.name}.png").write_bytes(picture.light)
    write_whole(folder / PAGE, page(sections))
    return folder / PAGE
