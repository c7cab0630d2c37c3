"""What a controller can do (ops), how a seed is brought in (blends), and who caused a change."""

from enum import IntEnum

from esper.leyline.errors import require_known


class LifecycleOp(IntEnum):
    WAIT = 0
    GERMINATE = 1  # plant a seed; it starts TRAINING at once (immediate blend: HOLDING)
    ADVANCE = 2  # start blending
    FOSSILIZE = 3  # make permanent
    PRUNE = 4  # take out, through a ramp to alpha 0 if it was blended


class Blend(IntEnum):
    @classmethod
    def named(cls, blend: "Blend | str") -> "Blend":
        """A blend, or one by its name in lower case."""
        if isinstance(blend, Blend):
            return blend
        require_known("blend", blend, [each.name.lower() for each in cls])
        return cls[blend.upper()]

    IMMEDIATE = 0  # alpha 1 from birth; the blueprint's zero point keeps the function
    RAMP = 1  # alpha follows a smooth step over the tempo
    GATE = 2  # as RAMP, times a learned gate that looks at each position


class Cause(IntEnum):
    """What moved a slot from one stage to the next; ops use their own values (>= 0)."""

    TIME = -1
    GOVERNOR = -2


def cause_name(cause: int) -> str:
    return Cause(cause).name if cause < 0 else LifecycleOp(cause).name
