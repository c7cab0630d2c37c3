"""The places of a model as a drawing: its modules in a column, beside them what grew in the slots.

Drawn as SVG in the colours of the page, so that it is sharp and follows its theme.
"""

from typing import Any

from esper.show.growth_facts import Part, Report, SeedLife
from esper.show.page import NOTHING, Markup, fill
from esper.show.palette import GREY, STAGE_COLOURS

# In the drawing's own units, which are those of the page where there is room.
BOX, PITCH = 44, 60  # height of a box, and from one to the next
LEFT, WIDE, INDENT = 8, 310, 16  # of a module's box
LETTERS, SEED_LETTERS = 40, 46  # that fit in a box
BAR = 304  # the longest in a seed's box
NARROW = 26  # height of the line that opens a module


def drawing(facts: Report) -> Markup:
    """The whole model from top to bottom; nothing where its parts are not known."""
    lives: dict[str, list[SeedLife]] = {}
    for life in facts.seeds:
        lives.setdefault(life.slot, []).append(life)
    most = max((part.params for part in facts.parts if not part.opened), default=0) or 1
    pieces, height = [], LEFT
    for place, part in enumerate(facts.parts):
        x = LEFT + INDENT * part.depth
        if part.opened:
            pieces.append(fill("opened", x=x, y=height + NARROW / 2 + 4, text=part.label))
            height += NARROW
            continue
        wide, middle = WIDE - INDENT * part.depth, height + BOX / 2
        size = "no parameters" if not part.params else f"{part.params:,} parameters"
        names = {"name": shortened(part.path or "(whole model)", LETTERS), "kind": part.kind}
        bar = (wide - 24) * part.params // most
        pieces.append(fill("module", x=x, y=height, wide=wide, size=size, bar=bar, **names))
        rows = max(1, len(part.slots))
        for row, slot in enumerate(part.slots):
            look = _seed(slot, lives.get(slot, []))
            bar = BAR * min(look["params"], most) // most
            bend = f"M{x + wide} {middle} H{LEFT + WIDE + 26} V{middle + row * PITCH} h24"
            pieces.append(fill("seed", y=height + row * PITCH, path=bend, bar=bar, **look))
        if place + 1 < len(facts.parts):
            pieces.append(fill("way", x=LEFT + WIDE / 2, y=height + BOX, end=height + rows * PITCH))
        height += rows * PITCH
    words = "; ".join(_said(part, lives) for part in facts.parts if not part.opened)
    whole = Markup("".join(pieces))
    return fill("drawing", height=height, words=words, pieces=whole) if pieces else NOTHING


def _seed(slot: str, lives: list[SeedLife]) -> dict[str, Any]:
    """What is in a slot's box."""
    there = next((life for life in lives if life.there), None)
    if there is not None:
        colour = STAGE_COLOURS[there.stage]
        name = f"{there.blueprint} · {there.params:,} parameters"
        look = {"colour": colour, "kind": "full", "params": there.params}
        return {"name": name, "more": there.course, **look}
    tried = ", ".join(dict.fromkeys(life.blueprint for life in lives))
    more = f"tried: {tried}" if tried else "nothing was planted"
    more = shortened(more, SEED_LETTERS)
    look = {"colour": GREY, "kind": "empty", "params": 0}
    return {"name": f"slot {slot}, empty", "more": more, **look}


def _said(part: Part, lives: dict[str, list[SeedLife]]) -> str:
    boxes = [_seed(slot, lives.get(slot, [])) for slot in part.slots]
    return "; ".join([part.label, *(f"a slot with {box['name']}, {box['more']}" for box in boxes)])


def shortened(text: str, letters: int) -> str:
    """At most so many letters, the last ones of a path being the telling ones."""
    return text if len(text) <= letters else f"…{text[1 - letters :]}"
