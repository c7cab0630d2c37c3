"""Reports: what a run came to, as pictures and one page that needs nothing else."""

from pathlib import Path
from typing import TYPE_CHECKING

from esper.archive import write_whole
from esper.leyline.errors import EsperError
from esper.show.growth_facts import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esper.show.page import Page

FOLDER, PAGE = "report", "index.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write what a training came to, as far as it is, and return the page.

    `run` is a run's directory, which is only read (also while it is trained); `out` is where to
    write, by default `report` in it. Pictures of an older report there are replaced.
    """
    require_matplotlib()
    from esper.show.run_facts import read_facts
    from esper.show.training_page import page

    facts = read_facts(Path(run))
    return _written(page(facts), facts.path / FOLDER if out is None else Path(out))


def write_growth_report(facts: Report, folder: Path) -> Path:
    """Write what a run of `grow` came to, as far as it is, into this folder; return the page."""
    require_matplotlib()
    from esper.show.growth_page import page

    return _written(page(facts), folder)


def growth_figure(facts: Report, *, dark: bool = False) -> "Figure":
    """How a network grew, as one figure."""
    require_matplotlib()
    from esper.show.growth_charts import growth
    from esper.show.theme import figure_of

    return figure_of(growth, facts, dark=dark)


def require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise EsperError(
            "Reports need matplotlib, which is not installed", fix="pip install 'esper-ml[report]'"
        ) from error


def _written(page: "Page", folder: Path) -> Path:
    page = page.drawn()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("timeline-*.png"):  # of episodes that are not the chosen ones now
        old.unlink()
    for picture in (picture for section in page.sections for picture in section.pictures):
        (folder / f"{picture.name}.png").write_bytes(picture.light)
    write_whole(folder / PAGE, str(page))
    return folder / PAGE
