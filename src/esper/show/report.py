"""Reports: what a run came to, as pictures and one page that needs nothing else."""

from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from esper.archive import write_whole
from esper.leyline.errors import EsperError, install_hint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from esper.show.page import Page

FOLDER, PAGE = "report", "index.html"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write what a training came to, as far as it is, and return the page.

    `run` is a run's directory, which is only read (also while it is trained); `out` is where to
    write, by default `report` in it. Pictures of an older report there are replaced.
    """
    from esper.show.run_facts import read_facts

    require_matplotlib()
    facts = read_facts(Path(run))
    return facts.write(facts.path / FOLDER if out is None else Path(out))


class Pictured:
    """Facts that have a page, whose head a notebook shows."""

    page_of: ClassVar[str]  # the module beside this one that makes it

    def page(self) -> "Page":
        """All that is said of them, with pictures that are not drawn yet."""
        require_matplotlib()
        made: Page = import_module(f"esper.show.{self.page_of}").page(self)
        return made

    def plot(self, *, dark: bool = False) -> "Figure":
        """The page's first picture, as a figure of matplotlib."""
        picture = self.page().sections[0].pictures[0]
        from esper.show.theme import DARK, LIGHT, styled

        return styled(picture.draw, DARK if dark else LIGHT)

    def write(self, folder: Path) -> Path:
        """Write the page and its pictures, as far as it is, into this folder; return the page."""
        page = self.page().drawn()
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("timeline-*.png"):  # of episodes that are not the chosen ones now
            old.unlink()
        for picture in (picture for section in page.sections for picture in section.pictures):
            (folder / f"{picture.name}.png").write_bytes(picture.light)
        write_whole(folder / PAGE, str(page))
        return folder / PAGE

    def _repr_html_(self) -> str:
        try:
            return self.page().inline()
        except EsperError:  # there is no matplotlib
            return f"<pre>{escape(str(self))}</pre>"


def require_matplotlib() -> None:
    """Raise an error if matplotlib is not installed; call this before long work.

    Raises:
        EsperError: Says how to install it.
    """
    if find_spec("matplotlib") is None:
        raise EsperError(
            "Reports need matplotlib, which is not installed", fix=install_hint("report")
        )
