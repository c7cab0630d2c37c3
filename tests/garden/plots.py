"""Small gardens on the dense host, with everything a context can have, and walks through them.

Shapes: `N` rows, `F` features, `H` heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from esper.garden import Case, Context, Draw, Garden, Lesion, Source, Transition
from esper.garden.episodes import EPOCHS_ALONE
from esper.tamiyo.controllers import Controller, RandomLegal
from esper.tolaria.population_config import PopulationConfig

HORIZON = EPOCHS_ALONE + 6
BATCHES = 2  # an epoch
DOUBLE = PopulationConfig(dtype=torch.float64)

_GLYPHS = Source(family="mnist1d", samples=500)
PLAIN = Context(name="plain", family="mnist1d", source=_GLYPHS, host="mlp", scale=5.0)
NOISY = replace(PLAIN, name="noisy", source=replace(_GLYPHS, label_noise=0.6, samples=300))
LESION = replace(PLAIN, name="lesion", lesion=Lesion(kind="narrow", stage=1), scale=9.0)
DRIFT = replace(PLAIN, name="drift", drift=Source(family="xor", samples=400), drift_window=(4, 6))
CONTEXTS = (PLAIN, NOISY, LESION, DRIFT)


@dataclass(frozen=True)
class Listed:
    """Row i plays the i-th case, again and again."""

    cases: tuple[Case, ...]

    @property
    def contexts(self) -> tuple[Context, ...]:
        return tuple({case.context.key: case.context for case in self.cases}.values())

    def __call__(self, row: int, episode: int) -> Case:
        return self.cases[row]


def make_garden(envs: int, **settings: object) -> Garden:
    if "controls" not in settings:
        settings = {"config": DOUBLE, "horizon": HORIZON} | settings
    draw = settings.pop("draw", Draw(contexts=CONTEXTS, seeds=4))
    return Garden(draw, envs, **settings)  # type: ignore[arg-type]


def some_cases(count: int) -> tuple[Case, ...]:
    """Different ones, contexts in turn."""
    return tuple(Case(CONTEXTS[i % len(CONTEXTS)], i // len(CONTEXTS)) for i in range(count))


def walk(
    garden: Garden,
    steps: int = HORIZON,
    controller: Controller | None = None,
    look: Callable[[Garden], None] = lambda garden: None,
) -> list[Transition]:
    """Some steps from where the garden is; `look` is called before each decision."""
    controller = controller or RandomLegal()
    starts = torch.ones(garden.num_envs, dtype=torch.bool)
    made = []
    for _ in range(steps):
        look(garden)
        made.append(garden.step(controller.act(garden.signals(), garden.legal(), starts)))
        starts = torch.zeros_like(starts)
    return made
