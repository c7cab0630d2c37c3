"""The garden's contexts as plots: what is collected there teaches a controller for any host what
the garden's own one knows by heart.

Contexts with what no training in the greenhouse has, a held-out lesion or a change to another
family, are left out here too: groups of worlds are judged by these.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from esper.garden.cases import SELECTION_SEED, Case
from esper.garden.contexts import Context
from esper.garden.greenhouse import HELD_OUT_LESION, Greenhouse, Plot
from esper.garden.suites import find_suite
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT
from esper.tolaria.population_config import PopulationConfig

GARDEN = "garden"
GARDEN_SEED = 1_000  # and following ones, in place of a greenhouse's: by these gains are told apart
ROOM = 10_000  # cases of every context for each of these


@lru_cache
def open_contexts() -> tuple[Context, ...]:
    """Those of the garden that have nothing which is held out."""
    return tuple(context for context in find_suite(GARDEN).training if not _held_out(context))


def _held_out(context: Context) -> bool:
    lesion, drift = context.lesion, context.drift
    changes = drift is not None and drift.family != context.source.family
    return changes or (lesion is not None and lesion.kind == HELD_OUT_LESION)


@dataclass(frozen=True, kw_only=True)
class GardenPlot(Plot):
    """Some of these contexts, each with a seed that no evaluation has."""

    seeds: tuple[int, ...]

    @property
    def cases(self) -> list[Case]:
        return [Case(*each) for each in zip(self.contexts, self.seeds, strict=True)]

    def population(self, **others: Any) -> PopulationConfig:
        return PopulationConfig(**others)


class GardenHouse:
    """Deals the contexts to plots, in turn; no case comes twice, nor with another seed."""

    def __init__(self, seed: int = GARDEN_SEED) -> None:
        self.seed, self.first = seed, (seed - GARDEN_SEED) * ROOM

    def plot(self, number: int, contexts: int) -> GardenPlot:
        known = open_contexts()
        if contexts > len(known):
            raise SystemExit(f"A plot of the garden has at most {len(known)} cases, not {contexts}")
        dealt = range(number * contexts, (number + 1) * contexts)
        seeds = tuple(self.first + each // len(known) for each in dealt)
        most = min(self.first + ROOM, SELECTION_SEED)
        assert max(seeds, default=0) < most, "no case is both trained and evaluated on"
        return GardenPlot(
            name=f"{GARDEN}-{self.seed}-{number}",
            contexts=tuple(known[each % len(known)] for each in dealt),
            blueprints=known[0].catalogue().names,
            rate=PopulationConfig().rate,
            horizon=DEFAULT_EPISODE_LENGTH,
            rent=DEFAULT_RENT,
            budget=0.0,  # that of the garden, which is the population's own
            seeds=seeds,
        )


def house_of(seed: int, longest: int) -> Greenhouse | GardenHouse:
    """Whose plots gains with this seed are of."""
    return GardenHouse(seed) if seed >= GARDEN_SEED else Greenhouse(seed, longest=longest)
