"""Whole episodes under a controller, and what came of them.

Shapes: `N` rows, `T` epochs of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.garden.cases import Case
from esper.garden.episodes import Episodes
from esper.leyline.constants import SCORED_EPOCHS
from esper.leyline.legality import Actions
from esper.leyline.stages import SeedStage
from esper.tamiyo.controllers import Controller, Privileged


@dataclass(frozen=True)
class Played:
    """What came of one episode a row, [N] each unless said."""

    test: Tensor  # percent: the committed network on test data, mean of the last epochs
    validation: Tensor  # percent: the same on validation data
    curve: Tensor  # [N, T] percent: the committed network on validation data
    exposure: Tensor  # share of the host's parameters added × share of the episode
    added: Tensor  # parameters in fossilized seeds at the end
    seeds: Tensor  # fossilized seeds at the end
    flops: Tensor  # of training, see tolaria/flops.py
    interventions: Tensor
    rolled_back: Tensor  # bool

    def rows(self, chosen: slice) -> "Played":
        return Played(*(getattr(self, field.name)[chosen] for field in fields(self)))


def play(episodes: Episodes, controller: Controller, cases: Sequence[Case]) -> Played:
    """One episode of every case; rows that are left over repeat the first case."""
    count, rows = len(cases), len(episodes)
    padded = [*cases, *[cases[0]] * (rows - count)]
    episodes.begin(torch.arange(rows), padded)
    if isinstance(controller, Privileged):
        controller.reset([case.context.name for case in padded])
    starts = torch.ones(rows, dtype=torch.bool)
    for _ in range(episodes.horizon):
        actions = controller.act(episodes.signals(), episodes.legal(), starts)
        episodes.advance(idle_where(~episodes.running, actions))
        starts = torch.zeros_like(starts)
    return _results(episodes).rows(slice(count))


def idle_where(idle: Tensor, actions: Actions) -> Actions:
    """The same decisions, but rows that are in no episode wait."""
    values = torch.where(idle[:, None], torch.zeros_like(actions.values), actions.values)
    return Actions(actions.space, values).canonical()


def _results(episodes: Episodes) -> Played:
    ledger, life = episodes.ledger, episodes.population.lifecycle
    kept = life.at(SeedStage.FOSSILIZED)
    return Played(
        test=ledger.test[:, -SCORED_EPOCHS:].mean(1),
        validation=ledger.committed[:, -SCORED_EPOCHS:].mean(1),
        curve=ledger.committed.clone(),
        exposure=ledger.exposure[:, -1].clone(),
        added=(life.params * kept).sum(1),
        seeds=kept.sum(1),
        flops=ledger.flops.clone(),
        interventions=life.interventions.clone(),
        rolled_back=ledger.rolled_back.clone(),
    )
