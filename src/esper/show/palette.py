"""One colour for each thing everywhere: in reports, in the terminal, in drawings of the docs.

Safe for colour-blind eyes: the palette of Okabe and Ito. Imports no matplotlib.
"""

from collections.abc import Mapping

from esper.leyline import LifecycleOp, SeedStage

ORANGE, SKY, GREEN = "#E69F00", "#56B4E9", "#009E73"
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
    LifecycleOp.GERMINATE.name: STAGE_COLOURS[SeedStage.GERMINATED.name],
    LifecycleOp.ADVANCE.name: STAGE_COLOURS[SeedStage.BLENDING.name],
    LifecycleOp.FOSSILIZE.name: STAGE_COLOURS[SeedStage.FOSSILIZED.name],
    LifecycleOp.PRUNE.name: STAGE_COLOURS[SeedStage.PRUNED.name],
}
OP_MARKERS: Mapping[str, str] = {
    LifecycleOp.GERMINATE.name: "^",
    LifecycleOp.ADVANCE.name: ">",
    LifecycleOp.FOSSILIZE.name: "D",
    LifecycleOp.PRUNE.name: "X",
}
LEARNED_COLOUR = BLUE
BASELINE_COLOURS = (PURPLE, ORANGE, GREEN, SKY)
CONTEXT_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")

# Paul Tol's muted palette, for things that have no order and are many.
MANY = (
    "#88CCEE", "#CC6677", "#DDCC77", "#117733", "#AA4499", "#44AA99", "#999933", "#882255",
    "#6699CC", "#DDDDDD",
)  # fmt: skip


def tint(colour: str, strength: float, paper: str = "#ffffff") -> str:
    """A colour that shows through the paper: strength 0 is paper, 1 the colour."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(paper[1:]), strict=True)
    mixed = (round(under + strength * (over - under)) for over, under in pairs)
    return "#" + bytes(mixed).hex()
