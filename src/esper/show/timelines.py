"""Growth, epoch by epoch: what every slot held, and what became of the accuracy.

A step is a decision and then an epoch: epoch `t` is drawn from t - ½ to t + ½, what is decided
before it at its left edge.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from esper.leyline.constants import SCORED_EPOCHS
from esper.leyline.stages import OCCUPIED_STAGES, SeedStage
from esper.nissa import Cell
from esper.show.palette import BLUE, GREEN, OP_MARKERS, STAGE_COLOURS, VERMILION, tint
from esper.show.run_facts import Story, signed
from esper.show.theme import Look, Theme, legend_beside, new_figure, readable_on

ROW = 0.6  # inches, of a slot
CURVES = 2.3  # inches
FEW_SLOTS = 4  # are shown even if they stay empty
THICK, THIN = 0.62, 0.16  # of a row
FAINTEST = 0.35  # strength of a colour at alpha 0
LETTER = 0.185  # epochs of 25, about: the width of a letter

_OCCUPIED = {stage.name for stage in OCCUPIED_STAGES}
_RESTING = {SeedStage.EMBARGOED.name, SeedStage.RESETTING.name}
_SHOWN = ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED")
_TYPICAL = {SeedStage.TRAINING.name: FAINTEST, SeedStage.EMBARGOED.name: 0.8}  # strength


def timeline(story: Story, theme: Theme) -> Figure:
    """Accuracy above, slots below, on the same axis of epochs."""
    slots = shown_slots(story)
    figure = new_figure(CURVES + ROW * len(slots) + 1.2)
    above, below = figure.subplots(
        2, 1, sharex=True, height_ratios=[CURVES, ROW * max(len(slots), 1) + 0.2]
    )
    _curves(above, story, theme)
    draw_slots(below, story, slots, theme)
    above.set_title(title(story))
    above.tick_params(labelbottom=False)
    return figure


def shown_slots(story: Story) -> tuple[str, ...]:
    """All of a few; of many those that were used, or the first ones where none was."""
    if len(story.slots) <= FEW_SLOTS:
        return story.slots
    used = {cell.slot for cell in story.cells if cell.stage != SeedStage.DORMANT.name}
    return tuple(slot for slot in story.slots if slot in used) or story.slots[:FEW_SLOTS]


def title(story: Story) -> str:
    row = story.episode
    return (
        f"{story.kind.capitalize()}: {row['context']} · "
        f"net gain {signed(row['net_gain'], 1)} points · "
        f"{row['added'] or 0:,} parameters added"
    )


def _curves(axes: Axes, story: Story, theme: Theme) -> None:
    epochs = np.arange(1, story.steps + 1)
    scored = story.steps - SCORED_EPOCHS + 0.5, story.steps + 0.5
    marker = "." if story.steps < 3 else ""
    dotted: Look = {"color": theme.ink, "ls": (0, (1, 1.6))}
    if story.failure is None:
        axes.axvspan(*scored, color=theme.grid, alpha=0.7, lw=0, label="epochs that are scored")
    if np.isfinite(story.accuracy).any():
        axes.plot(epochs, story.accuracy, color=BLUE, marker=marker, label="network as it is")
    if np.isfinite(story.committed).any():
        dashed: Look = {"color": GREEN, "ls": (0, (4, 1.6))}
        axes.plot(epochs, story.committed, marker=marker, label="what is permanent", **dashed)
    if story.control is not None:
        shown = story.control[: story.steps]
        axes.plot(epochs[: len(shown)], shown, lw=1.3, label="never grown", **dotted)
    elif (control := story.episode["control"]) is not None:
        axes.hlines(control, *scored, label="never grown (end only)", **dotted)
    axes.set_ylabel("validation accuracy, %")
    if not axes.get_lines():
        axes.text(0.5, 0.5, "accuracy was not recorded", transform=axes.transAxes, ha="center")
    legend_beside(axes)


def draw_slots(axes: Axes, story: Story, slots: Sequence[str], theme: Theme) -> None:
    rows = {slot: len(slots) - 1 - place for place, slot in enumerate(slots)}
    for slot, height in rows.items():
        cells = [cell for cell in story.cells if cell.slot == slot]
        axes.axhline(height, color=theme.grid, lw=1.2, zorder=0)
        for cell in cells:  # the colour says the stage, its strength alpha
            if cell.stage in _OCCUPIED:
                thick, strong = THICK, strength(cell)
            elif cell.stage in _RESTING:
                thick, strong = THIN, _TYPICAL[SeedStage.EMBARGOED.name]
            else:
                continue
            look: Look = {"fc": tint(STAGE_COLOURS[cell.stage], strong, theme.paper), "ec": "none"}
            corner = (cell.step + 0.5, height - thick / 2)
            axes.add_patch(Rectangle(corner, 1.0, thick, zorder=2, **look))
        _names(axes, cells, height, story, theme)
    mark: Look = {"color": theme.ink, "mec": theme.paper, "mew": 0.6, "clip_on": False, "zorder": 6}
    for step, op, slot in story.marks:
        if op in OP_MARKERS and slot in rows:
            below = rows[slot] - THICK / 2 - 0.1
            axes.plot(step + 0.5, below, marker=OP_MARKERS[op], ms=6, **mark)
    if story.failure is not None:
        step, _ = story.failure
        axes.axvline(step + 1, color=VERMILION, lw=1.5, ls=(0, (3, 2)))
        left: Look = {"color": theme.ink, "ha": "right", "va": "center"}
        axes.text(step + 0.85, len(rows) - 0.55, "rolled back", **left)
    axes.set_ylim(-0.7, len(rows) - 0.4)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylabel("slot")
    axes.set_xlim(0.5, max(story.steps, 1) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14))
    hidden = len(story.slots) - len(slots)
    axes.set_xlabel("epoch" + f" ({hidden} slots that stayed empty are not shown)" * bool(hidden))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(axes, story, theme)


def strength(cell: Cell) -> float:
    """Of a cell's colour, from its alpha; full where alpha is not known."""
    alpha = 1.0 if cell.alpha is None else min(max(cell.alpha, 0.0), 1.0)
    return FAINTEST + (1.0 - FAINTEST) * alpha


def lives(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The seeds of one slot, in order: each from its planting to its removal or the end."""
    stretches = groupby(cells, lambda cell: cell.stage in _OCCUPIED)
    return [list(found) for occupied, found in stretches if occupied]


def _names(axes: Axes, cells: Sequence[Cell], height: float, story: Story, theme: Theme) -> None:
    """In the longest stage where there is room, else anywhere in the bar, else above it."""
    for life in lives(cells):
        name = life[0].blueprint or "?"
        wide = LETTER * story.steps / 25 * len(name) + 0.3
        stretch = max((list(found) for _, found in groupby(life, lambda c: c.stage)), key=len)
        if len(stretch) < wide:
            stretch = life
        middle = (stretch[0].step + stretch[-1].step + 1) / 2 + 0.5
        above = height + THICK / 2 + 0.02
        look: Look = {"y": above, "color": theme.ink, "fontsize": 7.5, "va": "bottom"}
        if len(stretch) >= wide:
            centre = stretch[len(stretch) // 2]
            bar = tint(STAGE_COLOURS[centre.stage], strength(centre), theme.paper)
            colour = readable_on(bar)
            look = {"y": height, "color": colour, "fontsize": 8.5, "va": "center_baseline"}
        axes.text(middle, s=name, ha="center", zorder=4, **look)


def _legend(axes: Axes, story: Story, theme: Theme) -> None:
    """Only of what there is to see."""
    stages = {cell.stage for cell in story.cells}
    ops = {op for _, op, _ in story.marks}
    entries: list[Patch | Line2D] = [
        Patch(
            fc=tint(STAGE_COLOURS[name], _TYPICAL.get(name, 1.0), theme.paper),
            label=name.lower() + (", alpha 0" if name == SeedStage.TRAINING.name else ""),
        )
        for name in _SHOWN
        if name in stages
    ]
    entries += [
        Line2D([], [], ls="none", marker=marker, color=theme.ink, label=op.lower())
        for op, marker in OP_MARKERS.items()
        if op in ops
    ]
    if entries:
        legend_beside(axes, handles=entries, labelspacing=0.2, fontsize=8.5)
    else:
        paper: Look = {"facecolor": theme.paper, "edgecolor": "none"}
        look: Look = {"ha": "center", "va": "center", "color": theme.faint, "bbox": paper}
        axes.text(0.5, 0.5, "nothing was planted", transform=axes.transAxes, **look)
