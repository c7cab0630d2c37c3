"""How pictures look: two themes, and what every picture needs. The colours are `show.palette`'s."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from matplotlib import colors, style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from esper.leyline.errors import EsperError

T = TypeVar("T")
Look = dict[str, Any]  # of a mark or a text, in matplotlib's words

DPI = 144
ENTRIES = 9  # of a legend, that fit beside a small panel
WIDTH = 10.5  # inches, of every picture
STYLE = str(Path(__file__).parent / "templates" / "report.mplstyle")


@dataclass(frozen=True)
class Theme:
    """Colours of paper and ink."""

    name: str
    paper: str
    ink: str
    faint: str  # what is said beside
    grid: str

    def settings(self) -> dict[str, Any]:
        """Its colours, for matplotlib."""
        surfaces = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
        lines = ("axes.edgecolor", "xtick.color", "ytick.color")
        words = ["text.color", "axes.titlecolor"]
        words += [f"{part}.labelcolor" for part in ("axes", "legend", "xtick", "ytick")]
        colours = dict.fromkeys(surfaces, self.paper) | dict.fromkeys(lines, self.faint)
        return colours | dict.fromkeys(words, self.ink) | {"grid.color": self.grid}


LIGHT = Theme("light", paper="#ffffff", ink="#1f2430", faint="#6b7280", grid="#e6e8ec")
DARK = Theme("dark", paper="#171a21", ink="#e6e9ef", faint="#98a1b0", grid="#2c323d")


class AbsentError(EsperError):
    """There is nothing to draw; the sentence says what is missing and why."""


def readable_on(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = colors.to_rgb(colour)
    return "#101318" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


class ShownFigure(Figure):
    """A figure that a notebook shows, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        return _png(self)


def new_figure(height: float) -> Figure:
    figure = ShownFigure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def styled(draw: Callable[[Theme], T], theme: Theme) -> T:
    """What is drawn in the colours of a theme."""
    # Not even what a person has set for their own pictures changes these.
    with style.context([STYLE, theme.settings()], after_reset=True):
        return draw(theme)


def render(draw: Callable[[Theme], Figure], theme: Theme) -> bytes:
    """A picture as PNG; equal pictures are equal files."""
    return styled(lambda theme: _png(draw(theme)), theme)


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, metadata={"Software": None})
    return stream.getvalue()


def over_rounds(axes: Axes, first: int, last: int, *, label: bool = True) -> None:
    """An axis of rounds: whole numbers, also where there is only one."""
    room = max(0.5, 0.01 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if label:
        axes.set_xlabel("round")


def legend_beside(axes: Axes, **more: Any) -> None:
    """To the right of the axes, where no data is, each entry once; many in two columns."""
    handles, labels = axes.get_legend_handles_labels()
    more.setdefault("handles", [*dict(zip(labels, handles, strict=True)).values()])
    more.setdefault("ncols", 1 if len(more["handles"]) <= ENTRIES else 2)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, handlelength=1.4, **more
    )
