"""The stages of a seed's life and the one table of legal transitions."""

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from esper.leyline.errors import IllegalTransitionError


class SeedStage(IntEnum):
    DORMANT = 0  # the slot is empty
    GERMINATED = 1  # planted; passes to TRAINING by itself
    TRAINING = 2  # learns in gradient isolation, alpha 0
    BLENDING = 3  # alpha on its way to 1
    HOLDING = 4  # alpha 1, on probation
    FOSSILIZED = 5  # permanent
    PRUNED = 6  # condemned; alpha on its way to 0
    EMBARGOED = 7  # removed; the slot rests
    RESETTING = 8  # last epoch before the slot is free again


_S = SeedStage

TRANSITIONS: Mapping[SeedStage, frozenset[SeedStage]] = MappingProxyType(
    {
        _S.DORMANT: frozenset({_S.GERMINATED}),
        _S.GERMINATED: frozenset({_S.TRAINING, _S.PRUNED}),
        _S.TRAINING: frozenset({_S.BLENDING, _S.PRUNED}),
        _S.BLENDING: frozenset({_S.HOLDING, _S.PRUNED}),
        _S.HOLDING: frozenset({_S.FOSSILIZED, _S.PRUNED}),
        _S.FOSSILIZED: frozenset(),
        _S.PRUNED: frozenset({_S.EMBARGOED}),
        _S.EMBARGOED: frozenset({_S.RESETTING}),
        _S.RESETTING: frozenset({_S.DORMANT}),
    }
)
assert set(TRANSITIONS) == set(SeedStage), "every stage needs a row in TRANSITIONS"

LIVING_STAGES = frozenset({_S.GERMINATED, _S.TRAINING, _S.BLENDING, _S.HOLDING})
"""Stages of a seed that can still be pruned. A fossilized seed is not living: it is the host."""

OCCUPIED_STAGES = LIVING_STAGES | {_S.FOSSILIZED, _S.PRUNED}
"""Stages in which a seed's parameters exist, and pay rent."""


def check_transition(before: SeedStage, after: SeedStage, where: str = "slot") -> None:
    """Raise unless the table allows `before` -> `after`."""
    if after not in TRANSITIONS[before]:
        allowed = ", ".join(sorted(stage.name for stage in TRANSITIONS[before])) or "nothing"
        raise IllegalTransitionError(
            f"Illegal transition of {where}",
            given=f"{before.name} -> {after.name}",
            valid=f"{before.name} -> {allowed}",
            fix="ask legal() which actions are open before applying one",
        )
