"""Does the reward rank controllers as the true objective does? Scripted ones, good and bad.

Returns are discounted sums of a garden's rewards. The true score of an episode is what it is
evaluated by: its net gain on test data, in units of the context's scale.

Shapes: `P` controllers, `C` contexts, `E` episodes of each, `N` = C x E rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.garden import Case, Context, Garden, Transition
from esper.garden.episodes import EPOCHS_ALONE
from esper.garden.reward_settings import MODES, RewardConfig
from esper.garden.rewards import rewards
from esper.leyline import Actions, Blend, Legality, LifecycleOp
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, DEFAULT_RENT, SCORED_EPOCHS
from esper.leyline.signals import Signals
from esper.tamiyo.controllers import (
    Arm,
    Controller,
    FixedSchedule,
    NeverGrow,
    Oracle,
    Privileged,
    Proposal,
    RandomLegal,
)
from esper.tamiyo.controllers.proposals import at_best_slot
from esper.tolaria.population_config import PopulationConfig
from tests.garden.plots import Listed
from tests.tamiyo.scripted import (
    Renamed,
    Scripted,
    destructive,
    late,
    spammy,
    unfinished,
    wasteful,
    wrong_slot,
)

Array = NDArray[np.float64]
FIRST_SEED = 2_000_000  # neither trained, measured nor evaluated on
GOOD = Arm(slot="early", blueprint="convpool", blend="immediate", epoch=EPOCHS_ALONE)
EXPLOITS = ("spammy", "toggling", "unfinished")  # none may return more than never growing
WAITING = ("noise", "fixed", "drift_xor")  # families in which it is best


def toggling(arm: Arm) -> Controller:
    """Switches a seed on and, as soon as it is, off again: alpha goes up and down all day."""

    def wishes(signals: Signals, legality: Legality) -> list[Proposal]:
        slot, blueprint = arm.place(signals.catalogue)
        always = signals.lifecycle.epoch >= 0
        return [
            at_best_slot(legality, LifecycleOp.PRUNE, signals.lifecycle.alpha >= 1.0),
            at_best_slot(legality, LifecycleOp.ADVANCE),
            Proposal(always, LifecycleOp.GERMINATE, slot, blueprint, int(Blend.RAMP)),
        ]

    return Scripted("toggling", wishes)


def scripts(contexts: Sequence[Context]) -> list[Controller]:
    """From the best that is known, through idle, to destructive, on the dense host."""
    table = {each.name: None if each.family in WAITING else GOOD for each in contexts}
    return [
        Oracle(table),
        Renamed("good", FixedSchedule(GOOD)),
        Renamed("good_later", FixedSchedule(replace(GOOD, epoch=10))),
        late(GOOD),
        wrong_slot(GOOD, "late"),
        NeverGrow(),
        RandomLegal(),
        wasteful(),
        destructive(GOOD),
        spammy(GOOD),
        toggling(GOOD),
        unfinished(GOOD),
    ]


@dataclass(frozen=True)
class Aligned:
    """What every controller got and what it was worth, [P, C, E] each."""

    names: tuple[str, ...]
    returns: dict[str, Array]  # by mode of reward
    test: Array  # net gain / scale on test data
    validation: Array  # the same on the data that rewards are made of
    charged: Array  # what interventions took from the dense returns
    punished: Array  # what rollbacks took from every return


def align(
    contexts: Sequence[Context],
    controllers: Sequence[Controller],
    episodes: int,
    *,
    horizon: int = DEFAULT_EPISODE_LENGTH,
) -> Aligned:
    """Every controller on the same cases, all of them side by side in one garden."""
    cases = tuple(
        Case(context, FIRST_SEED + number) for context in contexts for number in range(episodes)
    )
    everyone = cases * len(controllers)
    # The oracle's atlas was measured in this form; the other one rounds otherwise.
    config = PopulationConfig(backend="fused")
    garden = Garden(Listed(everyone), len(everyone), horizon=horizon, test=True, config=config)
    garden.reset()
    together = Together(controllers, [case.context.name for case in cases])
    starts = torch.ones(garden.num_envs, dtype=torch.bool)
    steps = []
    for _ in range(horizon):
        steps.append(garden.step(together.act(garden.signals(), garden.legal(), starts)))
        starts = torch.zeros_like(starts)

    def stacked(values: Tensor) -> Array:
        return values.double().numpy().reshape(len(controllers), len(contexts), episodes)

    control = garden.controls.validation(everyone)[:, -SCORED_EPOCHS:].mean(1)
    return Aligned(
        names=tuple(controller.name for controller in controllers),
        returns={mode: stacked(_return(steps, mode)) for mode in MODES},
        test=stacked(_net(garden, steps, "test", garden.controls.test(everyone))),
        validation=stacked(_net(garden, steps, "committed", control)),
        charged=stacked(-_return(steps, "simplified", "interventions")),
        punished=stacked(-_return(steps, "sparse", "rollback")),
    )


class Together:
    """Controllers that each decide for a block of rows of their own."""

    name = "together"

    def __init__(self, controllers: Sequence[Controller], contexts: Sequence[str]) -> None:
        self.controllers, self.rows = controllers, len(contexts)
        for controller in controllers:
            if isinstance(controller, Privileged):
                controller.reset(contexts)

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        decided = []
        for place, controller in enumerate(self.controllers):
            rows = torch.arange(place * self.rows, (place + 1) * self.rows)
            masks = {name: mask[rows] for name, mask in legality.masks.items()}
            open_ = Legality(legality.space, self.rows, masks)
            decided.append(controller.act(signals.rows(rows), open_, starts[rows]).values)
        return Actions(legality.space, torch.cat(decided))


def _return(steps: Sequence[Transition], mode: str, term: str | None = None) -> Tensor:
    """[N] discounted, of the reward or one of its terms; transitions have the garden's mode."""
    config = RewardConfig(mode=mode)
    total = torch.zeros(len(steps[0].rewards), dtype=torch.float64)
    for number, step in enumerate(steps):
        terms = rewards(step.before, step.after, step.scale, config)
        if mode == RewardConfig().mode:
            assert torch.equal(terms.total.float(), step.rewards)
        total = total + config.gamma**number * (terms.total if term is None else terms[term])
    return total


def _net(garden: Garden, steps: Sequence[Transition], field: str, control: Tensor) -> Tensor:
    """[N]: points over the control less rent, in units of the scale."""
    last = torch.stack([getattr(step.epoch, field) for step in steps[-SCORED_EPOCHS:]])
    whole = garden.catalogue.host_params
    exposure = torch.stack([step.epoch.added for step in steps]).double().sum(0)
    rent = DEFAULT_RENT * exposure / whole / len(steps)
    return (last.mean(0) - control - rent) / steps[0].scale
