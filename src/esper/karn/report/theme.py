"""How pictures look: two themes, one colour for each thing everywhere, safe for colour-blind eyes.

Colours of stages are those of the terminal, in the palette of Okabe and Ito.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import colors, style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from esper.leyline.errors import EsperError
from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import SeedStage

DPI = 144
ENTRIES = 9  # of a legend, that fit beside a small panel
WIDTH = 10.5  # inches, of every picture

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#9AA0A6"

STAGE_COLOURS: Mapping[str, str] = {
    SeedStage.DORMANT.name: GREY,
    SeedStage.GERMINATED.name: ORANGE,
    SeedStage.TRAINING.name: ORANGE,
    SeedStage.BLENDING.name: SKY,
    SeedStage.HOLDING.name: BLUE,
    SeedStage.FOSSILIZED.name: GREEN,
    SeedStage.PRUNED.name: VERMILION,
    SeedStage.EMBARGOED.name: PURPLE,
    SeedStage.RESETTING.name: PURPLE,
}
OP_COLOURS: Mapping[str, str] = {  # of the stage that an op leads to
    LifecycleOp.WAIT.name: GREY,
    LifecycleOp.GERMINATE.name: ORANGE,
    LifecycleOp.ADVANCE.name: SKY,
    LifecycleOp.FOSSILIZE.name: GREEN,
    LifecycleOp.PRUNE.name: VERMILION,
}
OP_MARKERS: Mapping[str, str] = {
    LifecycleOp.GERMINATE.name: "^",
    LifecycleOp.ADVANCE.name: ">",
    LifecycleOp.FOSSILIZE.name: "D",
    LifecycleOp.PRUNE.name: "X",
}
HEAD_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW)
VALUE_COLOUR = VERMILION
LEARNED_COLOUR = BLUE
BASELINE_COLOURS = (PURPLE, ORANGE, GREEN, SKY)
FAMILY_COLOURS = (
    BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GREY, YELLOW, "#882255", "#999933",
)  # fmt: skip
FAMILY_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")

# Paul Tol's muted palette, for things that have no order and are many.
MANY = (
    "#88CCEE", "#CC6677", "#DDCC77", "#117733", "#AA4499", "#44AA99", "#999933", "#882255",
    "#6699CC", "#DDDDDD",
)  # fmt: skip


@dataclass(frozen=True)
class Theme:
    """Colours of paper and ink."""

    name: str
    paper: str
    ink: str
    faint: str  # what is said beside
    grid: str

    def settings(self) -> dict[str, Any]:
        """For matplotlib."""
        return {
            "figure.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "savefig.facecolor": self.paper,
            "text.color": self.ink,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "axes.edgecolor": self.faint,
            "xtick.color": self.faint,
            "ytick.color": self.faint,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "grid.color": self.grid,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": 10.5,
            "axes.titleweight": "bold",
            "axes.titlepad": 8,
            "axes.labelsize": 9.5,
            "font.family": "DejaVu Sans",
            "font.size": 9.5,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "legend.labelcolor": self.ink,
            "lines.linewidth": 1.8,
            "lines.solid_capstyle": "round",
        }

    def mixed(self, colour: str, strength: float) -> tuple[float, float, float]:
        """A colour that shows through the paper: 0 is paper, 1 the colour."""
        over, under = colors.to_rgb(colour), colors.to_rgb(self.paper)
        red, green, blue = (u + strength * (o - u) for o, u in zip(over, under, strict=True))
        return red, green, blue

    def shades(self, colour: str) -> colors.LinearSegmentedColormap:
        """From paper to the colour."""
        return colors.LinearSegmentedColormap.from_list(colour, [self.paper, colour])


LIGHT = Theme("light", paper="#ffffff", ink="#1f2430", faint="#6b7280", grid="#e6e8ec")
DARK = Theme("dark", paper="#171a21", ink="#e6e9ef", faint="#98a1b0", grid="#2c323d")


class AbsentError(EsperError):
    """There is nothing to draw; the sentence says what is missing and why."""


def readable_on(colour: str | tuple[float, float, float]) -> str:
    """Black or white, whichever is easier to read on a colour."""
    red, green, blue = colors.to_rgb(colour)
    return "#101318" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"


def new_figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render(draw: Callable[[Theme], Figure], theme: Theme) -> bytes:
    """A picture as PNG; equal pictures are equal files."""
    # Not even what a person has set for their own pictures changes these.
    with style.context(theme.settings(), after_reset=True):
        figure = draw(theme)
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
    """To the right of the axes, where no data is; many entries in two columns."""
    entries = more.get("handles") or axes.get_legend_handles_labels()[0]
    more.setdefault("ncols", 1 if len(entries) <= ENTRIES else 2)
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, handlelength=1.4, **more
    )


def apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places as near as possible to the wanted ones, in their order, at least `gap` apart."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    groups: list[tuple[list[int], float]] = []  # members and their centre
    for place in order:
        members, centre = [place], wanted[place]
        while groups:
            before, middle = groups[-1]
            if centre - middle >= gap * (len(members) + len(before)) / 2:
                break
            groups.pop()
            size = len(members) + len(before)
            centre = (centre * len(members) + middle * len(before)) / size
            members = before + members
        groups.append((members, centre))
    found = [0.0] * len(wanted)
    for members, centre in groups:
        for rank, place in enumerate(members):
            found[place] = centre + gap * (rank - (len(members) - 1) / 2)
    return found
