"""Judging a controller while it learns: on fixed cases, by validation data, over all processes.

Test data is not touched: it is for reports of finished controllers.

Shapes: `C` contexts, `E` cases of each, `M` seeds of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.garden import Context, Controls, Greenhouse, Job, Playground
from esper.garden.attribution import leave_one_out, shapley
from esper.garden.cases import SELECTION_SEED, Case
from esper.garden.dealing import Costs, in_turns
from esper.garden.greenhouse import LISTED, VALIDATION
from esper.garden.rewards import net_of_rent
from esper.garden.statistics import Estimate, mean_interval
from esper.nissa import Attributed, Evaluated
from esper.simic.agent.processes import Processes
from esper.tamiyo.controllers import Controller
from esper.tolaria.population import Population


def attribution(population: Population, row: int, job: Job, score: float) -> Attributed:
    """What the seeds of one episode of a controller are worth."""
    assert not isinstance(job.player, tuple), "a schedule has no name"
    (slots,) = (population.lifecycle.alpha[row] > 0).nonzero(as_tuple=True)
    return Attributed(
        round=0,  # whoever tells it knows
        controller=job.player.name,
        context=job.case.context.name,
        seed=job.case.seed,
        score=score,
        slot=slots,
        blueprint=population.lifecycle.blueprint[row, slots],
        shapley=shapley(population, row)[slots],
        left_out=leave_one_out(population, row)[slots],
    )


@dataclass(frozen=True)
class Judgement:
    """How a controller did."""

    controller: str
    contexts: tuple[str, ...]
    scores: Tensor  # [C, E] net gain over the paired control / scale, on validation data
    best: Attributed | None = None  # of the best episode, where this process played it

    @property
    def mean(self) -> Estimate:
        return mean_interval(self.scores)

    def event(self, round_: int) -> Evaluated:
        """Every context, and the figure over all of them."""
        found = [self.mean, *(mean_interval(row[None]) for row in self.scores)]
        return Evaluated(
            round=round_,
            controller=self.controller,
            context=["all", *self.contexts],
            score=[found[0].value, *self.scores.mean(1).tolist()],
            low=[each.low for each in found],
            high=[each.high for each in found],
            episodes=[self.scores.numel(), *[self.scores.shape[1]] * len(self.contexts)],
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
        rent: float,
        processes: Processes,
    ) -> None:
        self.contexts, self.seeds, self.controls = tuple(contexts), seeds, controls
        self.rent, self.processes = rent, processes
        # Context by context, so that a process's share is not all of one context.
        self.cases = [
            Case(context, SELECTION_SEED + number)
            for context in contexts
            for number in range(seeds)
        ]
        self.own = list(range(processes.rank, len(self.cases), processes.size))
        self._ground = Playground(rows, test=False, **controls.world)

    def judge(self, controller: Controller, *, attribute: bool = False) -> Judgement:
        """The controller's scores, the same in every process.

        With `attribute`, the process that played the best episode with a fossilized seed also
        finds out what its seeds are worth.
        """
        scores = torch.zeros(len(self.cases), dtype=torch.float64)
        grown = torch.zeros_like(scores)  # 1 where a seed was fossilized
        best: Attributed | None = None
        jobs = [Job(controller, self.cases[number]) for number in self.own]
        for places, played in self._ground.play(jobs):
            numbers = torch.tensor(self.own)[places]
            cases = [jobs[place].case for place in places]
            found = self.controls.scores(cases, played, self.rent)
            scores[numbers], grown[numbers] = found, (played.seeds > 0).double()
            score, row = found.masked_fill(played.seeds == 0, -torch.inf).max(0)
            if attribute and float(score) > (-torch.inf if best is None else best.score):
                population = self._ground.episodes([cases[0].context], len(cases)).population
                best = attribution(population, int(row), jobs[places[int(row)]], float(score))
        self.processes.sum_(scores)
        self.processes.sum_(grown)
        winner = int(scores.masked_fill(grown == 0, -torch.inf).argmax())
        names = tuple(context.name for context in self.contexts)
        return Judgement(
            controller.name,
            names,
            scores.view(len(names), self.seeds),
            best if winner % self.processes.size == self.processes.rank else None,
        )


class PlotJudge:
    """Plays controllers on the greenhouse's worlds for validation, each process its share."""

    def __init__(self, seeds: int, longest: int, processes: Processes, **how: Any) -> None:
        """`seeds` cases of every world, whose episodes are cut; `how`: settings of populations."""
        house = Greenhouse(group=VALIDATION, longest=longest)
        self.plots = [house.plot(number, seeds) for number in range(LISTED)]
        self.seeds, self.processes, self.device = seeds, processes, how.pop("device", "cpu")
        self.how, self._costs = how, Costs()

    def judge(self, controller: Controller, *, attribute: bool = False) -> Judgement:
        """The controller's scores, the same in every process."""
        plots = self.plots

        def play(number: int) -> Tensor:
            plot = plots[number]
            jobs = [Job(player, case) for player in ((), controller) for case in plot.cases]
            how: Any = {"horizon": plot.horizon, "device": self.device, "rent": plot.rent}
            settings = plot.population(**self.how)
            played = Playground(len(jobs), config=settings, test=False, **how).play_all(jobs)
            gain = played.validation[self.seeds :] - played.validation[: self.seeds]
            net = net_of_rent(gain, played.exposure[self.seeds :], plot.rent)
            return net / torch.tensor([context.scale for context in plot.contexts])

        work = [(plot.name, float(plot.horizon)) for plot in plots]
        turns = in_turns(play, work, costs=self._costs, ranks=self.processes)
        scores = torch.stack([score for turn in turns for _, score in turn]).double()
        return Judgement(controller.name, tuple(plot.name for plot in plots), scores)
