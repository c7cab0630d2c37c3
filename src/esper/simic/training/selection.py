"""Judging a controller while it learns: on fixed cases, by validation data, over all processes.

Test data is not touched: it is for reports of finished controllers.

Shapes: `C` contexts, `E` cases of each, `T` epochs of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.garden.cases import SELECTION_SEED, Case
from esper.garden.contexts import Context
from esper.garden.playing import Controls, Job, Playground
from esper.garden.reward_settings import RewardConfig
from esper.garden.statistics import Estimate, mean_interval
from esper.nissa import Evaluated
from esper.simic.agent.processes import Processes
from esper.tamiyo.controllers import Controller


@dataclass(frozen=True)
class Judgement:
    """How a controller did."""

    controller: str
    contexts: tuple[str, ...]
    scores: Tensor  # [C, E] net gain over the paired control / scale, on validation data

    @property
    def mean(self) -> Estimate:
        return mean_interval(self.scores)

    def event(self, round_: int) -> Evaluated:
        """Every context, and the figure over all of them."""
        overall = self.mean
        episodes = self.scores.shape[1]
        each = self.scores.mean(1).tolist()
        spread = [(score, score) for score in each]
        if episodes > 1:
            spread = [tuple(mean_interval(row[None])[1:]) for row in self.scores]  # type: ignore[misc]
        return Evaluated(
            round=round_,
            controller=self.controller,
            context=["all", *self.contexts],
            score=[overall.value, *each],
            low=[overall.low, *(low for low, _ in spread)],
            high=[overall.high, *(high for _, high in spread)],
            episodes=[self.scores.numel(), *[episodes] * len(each)],
        )


class Judge:
    """Plays controllers on the same cases, each process its share of them."""

    def __init__(
        self,
        contexts: Sequence[Context],
        *,
        seeds: int,
        rows: int,
        controls: Controls,
        reward: RewardConfig,
        processes: Processes,
        device: torch.device | str,
    ) -> None:
        self.contexts, self.seeds, self.controls = tuple(contexts), seeds, controls
        self.rent, self.processes = reward.rent, processes
        # Context by context, so that a process's share is not all of one context.
        self.cases = [
            Case(context, SELECTION_SEED + number)
            for context in contexts
            for number in range(seeds)
        ]
        self.own = list(range(processes.rank, len(self.cases), processes.size))
        self._ground = Playground(
            rows, horizon=controls.horizon, device=device, config=controls.config, test=False
        )

    def judge(self, controller: Controller) -> Judgement:
        """The controller's scores, the same in every process."""
        scores = torch.zeros(len(self.cases), dtype=torch.float64)
        cases = [self.cases[number] for number in self.own]
        if cases:
            played = self._ground.play_all([Job(controller, case) for case in cases])
            scores[torch.tensor(self.own)] = self.controls.scores(cases, played, self.rent)
        self.processes.sum_(scores)
        names = tuple(context.name for context in self.contexts)
        return Judgement(controller.name, names, scores.view(len(names), self.seeds))
