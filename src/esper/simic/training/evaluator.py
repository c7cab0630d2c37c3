"""Evaluation of a controller during training: greedy episodes on fixed cases, validation data.

Test data is not used: it is for reports of finished controllers. The processes of a run divide the
cases, and every process gets all scores.

Shapes: `C` contexts, `E` cases of each context, `M` seeds of an episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.distributed import Processes
from esper.garden import Context, Controls, Greenhouse, Job, Playground
from esper.garden.attribution import leave_one_out, shapley
from esper.garden.cases import SELECTION_SEED, Case
from esper.garden.dealing import Costs, in_turns
from esper.garden.greenhouse import LISTED, VALIDATION
from esper.garden.rewards import net_of_rent
from esper.garden.statistics import Estimate, mean_interval
from esper.nissa import Attributed, Evaluated
from esper.tamiyo.controllers import Controller
from esper.tolaria.population import Population


@dataclass(frozen=True)
class EvalResult:
    """Scores of a controller on the cases of an evaluator."""

    controller: str
    contexts: tuple[str, ...]
    scores: Tensor  # [C, E] net gain over the paired control / scale of the context
    best_episode: Attributed | None = None  # in the process that ran it, if it was measured

    @property
    def mean(self) -> Estimate:
        """Mean score over contexts and cases, with its confidence interval."""
        return mean_interval(self.scores)

    def event(self, round_: int) -> Evaluated:
        """Return the telemetry event: the mean over all contexts, then every context."""
        intervals = [self.mean, *(mean_interval(row[None]) for row in self.scores)]
        cases_per_context = self.scores.shape[1]
        return Evaluated(
            round=round_,
            controller=self.controller,
            context=["all", *self.contexts],
            score=[self.mean.value, *self.scores.mean(1).tolist()],
            low=[interval.low for interval in intervals],
            high=[interval.high for interval in intervals],
            episodes=[self.scores.numel(), *[cases_per_context] * len(self.contexts)],
        )


class ControllerEvaluator(Protocol):
    """Evaluates controllers on fixed cases."""

    def evaluate(self, controller: Controller, *, attribute: bool = False) -> EvalResult:
        """Return the scores of a controller, the same in every process.

        Args:
            controller: The controller.
            attribute: Also measure the contributions of the seeds of the best episode.
        """
        ...


def seed_attribution(population: Population, row: int, job: Job, score: float) -> Attributed:
    """Measure the contributions of the seeds of a finished episode.

    Args:
        population: The population in which the episode took place.
        row: Row of the episode.
        job: Controller and case of the episode.
        score: Score of the episode.

    Returns:
        The telemetry event, with round 0: the caller sets the round.
    """
    assert not isinstance(job.player, tuple), "evaluated jobs have controllers, not schedules"
    (slots,) = (population.lifecycle.alpha[row] > 0).nonzero(as_tuple=True)
    return Attributed(
        round=0,
        controller=job.player.name,
        context=job.case.context.name,
        seed=job.case.seed,
        score=score,
        slot=slots,
        blueprint=population.lifecycle.blueprint[row, slots],
        shapley=shapley(population, row)[slots],
        left_out=leave_one_out(population, row)[slots],
    )


class Evaluator:
    """Evaluates controllers on the training contexts of a suite, with separate random seeds."""

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
        """Create an evaluator.

        Args:
            contexts: Contexts `C`.
            seeds: Cases `E` of every context.
            rows: Episodes that run at once.
            controls: Paired controls; those of `cases` must have been measured.
            rent: Rent of the scores, in points.
            processes: Processes that divide the cases.
        """
        self.contexts = tuple(contexts)
        self.seeds = seeds
        self.controls = controls
        self.rent = rent
        self.processes = processes
        self.cases = [
            Case(context, SELECTION_SEED + number)
            for context in contexts
            for number in range(seeds)
        ]
        # Cases are ordered by context. Every process takes each `size`-th one, so that its share
        # has several contexts.
        self.local_cases = list(range(processes.rank, len(self.cases), processes.size))
        self._playground = Playground(rows, test=False, **controls.world)

    def evaluate(self, controller: Controller, *, attribute: bool = False) -> EvalResult:
        """Return the scores of a controller, the same in every process.

        With `attribute`, the process that ran the best episode with a fossilized seed also
        measures the contributions of its seeds.
        """
        scores = torch.zeros(len(self.cases), dtype=torch.float64)
        has_seeds = torch.zeros_like(scores)  # 1 for episodes with a fossilized seed
        best: Attributed | None = None

        local_cases = torch.tensor(self.local_cases)
        jobs = [Job(controller, self.cases[number]) for number in self.local_cases]
        for job_indices, played in self._playground.play(jobs):
            cases = [jobs[index].case for index in job_indices]
            batch_scores = self.controls.scores(cases, played, self.rent)
            scores[local_cases[job_indices]] = batch_scores
            has_seeds[local_cases[job_indices]] = (played.seeds > 0).double()
            if not attribute:
                continue
            score, row = batch_scores.masked_fill(played.seeds == 0, -torch.inf).max(0)
            best_score = -torch.inf if best is None else best.score
            if float(score) > best_score:
                population = self._playground.episodes([cases[0].context], len(cases)).population
                job = jobs[job_indices[int(row)]]
                best = seed_attribution(population, int(row), job, float(score))

        self.processes.sum_(scores)
        self.processes.sum_(has_seeds)
        best_case = int(scores.masked_fill(has_seeds == 0, -torch.inf).argmax())
        ran_best_case = best_case % self.processes.size == self.processes.rank
        return EvalResult(
            controller=controller.name,
            contexts=tuple(context.name for context in self.contexts),
            scores=scores.view(len(self.contexts), self.seeds),
            best_episode=best if ran_best_case else None,
        )


class GreenhouseEvaluator:
    """Evaluates controllers on the validation plots of the greenhouse."""

    def __init__(
        self,
        seeds: int,
        max_horizon: int,
        processes: Processes,
        *,
        device: torch.device | str = "cpu",
        **population: Any,
    ) -> None:
        """Create an evaluator.

        Args:
            seeds: Cases `E` of every plot.
            max_horizon: Longer episodes are cut to this number of epochs.
            processes: Processes that divide the plots.
            device: Device of the populations.
            population: Further settings of the populations.
        """
        greenhouse = Greenhouse(group=VALIDATION, longest=max_horizon)
        self.plots = [greenhouse.plot(number, seeds) for number in range(LISTED)]
        self.seeds = seeds
        self.processes = processes
        self.device = device
        self.population_settings = population
        self._costs = Costs()

    def evaluate(self, controller: Controller, *, attribute: bool = False) -> EvalResult:
        """Return the scores of a controller, the same in every process.

        Contributions of seeds are not measured here; `attribute` has no effect.
        """

        def evaluate_plot(number: int) -> Tensor:
            return self._evaluate_plot(controller, number)

        work = [(plot.name, float(plot.horizon)) for plot in self.plots]
        turns = in_turns(evaluate_plot, work, costs=self._costs, ranks=self.processes)
        scores = torch.stack([score for turn in turns for _, score in turn]).double()
        return EvalResult(controller.name, tuple(plot.name for plot in self.plots), scores)

    def _evaluate_plot(self, controller: Controller, number: int) -> Tensor:
        """Return the scores of the plot's cases, [E].

        The controls run beside the controller: a schedule without entries never grows.
        """
        plot = self.plots[number]
        controls = [Job((), case) for case in plot.cases]
        jobs = controls + [Job(controller, case) for case in plot.cases]
        playground = Playground(
            len(jobs),
            config=plot.population(**self.population_settings),
            test=False,
            horizon=plot.horizon,
            device=self.device,
            rent=plot.rent,
        )
        played = playground.play_all(jobs)
        gain = played.validation[self.seeds :] - played.validation[: self.seeds]
        net_gain = net_of_rent(gain, played.exposure[self.seeds :], plot.rent)
        return net_gain / torch.tensor([context.scale for context in plot.contexts])
