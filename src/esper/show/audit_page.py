"""The page of an audit and its picture: a map of places and blueprints."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from esper.show.audit_facts import COLUMNS, WORTH, Audit, Verdict
from esper.show.page import Page, fill, sections_of, table
from esper.show.palette import GREEN, VERMILION
from esper.show.theme import Look, Theme, new_figure, readable_on

ROW = 0.32  # inches
HATCHES = {"does not fit there": "///", "over the budget": "...", "not heard": "xx"}


def heat_map(facts: Audit, theme: Theme) -> Figure:
    """Gains by colour, from harm to help; a frame marks what is missing for certain."""
    heard = {(each.slot, each.blueprint): each for each in facts.candidates}
    cells = [[heard.get((place, kind)) for kind in facts.blueprints] for place in facts.places]
    gains = np.array([[np.nan if each is None else each.gain for each in row] for row in cells])
    drawn = new_figure(ROW * len(facts.places) + 1.9)
    axes = drawn.add_subplot()
    most = max(float(np.nanmax(np.abs(gains))), 1e-9)
    norm = SymLogNorm(min(WORTH * facts.guess, most), vmin=-most, vmax=most)
    colours = LinearSegmentedColormap.from_list("gain", [VERMILION, theme.paper, GREEN])
    image = axes.imshow(gains, cmap=colours, norm=norm, aspect="auto")
    empty: Look = {"fc": "none", "ec": theme.faint, "lw": 0.0, "alpha": 0.6}
    framed: Look = {"fill": False, "ec": theme.ink, "lw": 2.0, "zorder": 3}
    marks = {"": Patch(label=str(Verdict.MISSING), **framed)}
    for (row, column), cost in np.ndenumerate(np.array(facts.costs)):
        each, corner = cells[row][column], (column - 0.5, row - 0.5)
        if each is None:
            why = list(HATCHES)[0 if cost < 0 else 2 if facts.affords(int(cost)) else 1]
            marks[why] = Patch(label=why, hatch=HATCHES[why], **empty)
            axes.add_patch(Rectangle(corner, 1, 1, hatch=HATCHES[why], **empty))
            continue
        ink, told = readable_on(to_hex(colours(norm(each.gain)))), f"{each.gain:+.{facts.digits}f}"
        axes.text(column, row, told, color=ink, ha="center", va="center")
        if each.verdict is Verdict.MISSING:
            axes.add_patch(Rectangle(corner, 1, 1, **framed))
    axes.set_xticks(range(len(facts.blueprints)), facts.blueprints, rotation=30, ha="right")
    axes.set_yticks(range(len(facts.places)), facts.places)
    axes.grid(visible=False)
    axes.set_title(f"{facts.model}: by how much a seed lowers the validation loss")
    drawn.colorbar(image, ax=axes, pad=0.01)
    drawn.legend(handles=list(marks.values()), loc="outside lower center", ncols=len(marks))
    return drawn


def page(facts: Audit) -> Page:
    """The whole page, its pictures not drawn yet."""
    more = {"candidates": table(COLUMNS, (each.cells(facts.digits) for each in facts.candidates))}
    return Page(
        name=f"audit of {facts.model}",
        headline=f"{facts.headline}.",
        tiles=fill("audit_tiles", facts=facts),
        sections=[*sections_of("audit.toml", facts, {"heat-map": heat_map}, more).values()],
        cautions=[f"{facts.cost}."],
        settings={"audit": facts.settings},
    )
