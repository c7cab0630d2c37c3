"""Networks that do not grow: small hosts, and grown architectures that train from scratch.

They train in the same population as everything else, on the same cases: host weights and order of
data are those of the case. One training is scored at several marks, since the first epochs of a
longer one are the same.

Shapes: `N` rows, `T` epochs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.distributed import SINGLE_PROCESS
from esper.garden import Case, Episodes, by_shape
from esper.garden.dealing import Costs, Ranks, in_turns
from esper.garden.playing import StoppedError
from esper.kasmina import ScalarGate
from esper.leyline import NOTHING, AgreementError, Blend, SeedStage
from esper.leyline.constants import SCORED_EPOCHS
from esper.tamiyo.controllers import Arm
from esper.tolaria import Population
from esper.tolaria.pools import UNIFORM, Template
from esper.tolaria.population_config import PopulationConfig
from esper.tolaria.random_streams import fold

LONGER = 1.5  # times the shortest training of a batch may be the longest


class Start(StrEnum):
    """How the seeds of a network that never grew begin; either may be the better for it."""

    USUAL = "usual"  # every layer as torch starts it, the last one of a seed too; scalar gates at 1
    ZERO = "zero"  # as a seed is planted, so that it adds nothing at first


class GrownPart(NamedTuple):
    """One seed of a grown architecture, by indices of the catalogue."""

    slot: int
    blueprint: int
    blend: Blend


@dataclass(frozen=True)
class FixedRun:
    """One training of a network whose architecture stays as it is."""

    case: Case
    rate: float
    marks: tuple[int, ...]  # epochs after which it is scored
    arms: tuple[Arm, ...] = ()  # seeds that it has from the beginning
    start: Start = Start.USUAL

    def __post_init__(self) -> None:
        if not self.marks or min(self.marks) < SCORED_EPOCHS:
            raise AgreementError(
                "A training is scored over its last epochs",
                given=f"marks {list(self.marks)}",
                valid=f"at least one, from {SCORED_EPOCHS} epochs",
            )


class Mark(NamedTuple):
    """What a training was worth after so many epochs; means of the last few."""

    epochs: int
    test: float  # percent
    validation: float  # percent
    area: float  # mean validation over all epochs
    added: int  # parameters in seeds
    seeds: int
    flops: float


def train_fixed(
    runs: Sequence[FixedRun],
    *,
    rows: int = 64,
    device: torch.device | str = "cpu",
    config: PopulationConfig | None = None,
    ranks: Ranks = SINGLE_PROCESS,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[tuple[FixedRun, list[Mark]]]]:
    """Train all, `rows` together; yields batches as they are done, shorter trainings first.

    `ranks` share the batches, and all hear of all. To be told to `stop` while there are more is an
    error.
    """
    batches: list[list[FixedRun]] = []
    for alike in by_shape([run.case.context for run in runs]):
        keys = {context.key for context in alike}
        mine = [run for run in runs if run.case.context.key in keys]
        batches += _of_like_length(mine, rows)

    def train(number: int) -> list[list[list[float]]]:
        found = _train(batches[number], device, config)
        return [[list(mark) for mark in marks] for marks in found]

    sizes = [float(len(batch) * max(batch[-1].marks)) for batch in batches]
    shapes = [batch[0].case.context.host_shape for batch in batches]
    work = list(zip(shapes, sizes, strict=True))
    for turn in in_turns(train, work, costs=Costs(), ranks=ranks):
        for number, found in turn:
            marks = [[Mark(*mark) for mark in each] for each in found]  # type: ignore[arg-type]
            yield list(zip(batches[number], marks, strict=True))
        left = len(batches) - turn[-1][0] - 1
        if left and any(ranks.all_gather_object(stop())):
            raise StoppedError("Training was told to stop", given=f"{left} batches left")


def _of_like_length(runs: Sequence[FixedRun], most: int) -> Iterator[list[FixedRun]]:
    """Batches in which none trains much longer than another: all train until the last is done."""
    batch: list[FixedRun] = []
    for run in sorted(runs, key=lambda run: max(run.marks)):
        longer = batch and max(run.marks) > LONGER * max(batch[0].marks)
        if len(batch) == most or longer:
            yield batch
            batch = []
        batch.append(run)
    if batch:
        yield batch


def _train(
    runs: Sequence[FixedRun], device: torch.device | str, config: PopulationConfig | None
) -> list[list[Mark]]:
    last = max(max(run.marks) for run in runs)
    contexts = {run.case.context.key: run.case.context for run in runs}
    episodes = Episodes(
        list(contexts.values()), len(runs), horizon=last, device=device, config=config
    )
    population, everyone = episodes.population, torch.arange(len(runs))
    episodes.begin(everyone, [run.case for run in runs])
    rates = torch.tensor([run.rate for run in runs], dtype=torch.float64)
    population.set_rates(everyone, rate=rates)
    _plant(episodes, runs)
    per_epoch = episodes.training_flops()
    validation = torch.zeros(len(runs), last, dtype=torch.float64)
    test = torch.full_like(validation, torch.nan)
    scored = {epoch for run in runs for mark in run.marks for epoch in _last_epochs(mark)}
    for epoch in range(last):
        episodes.train_epoch()
        validation[:, epoch] = population.evaluate("validation").accuracy
        if epoch in scored:
            test[:, epoch] = population.evaluate("test").accuracy
        population.pass_time()
    life = population.lifecycle
    added, seeds = life.params.sum(1).tolist(), life.occupied.sum(1).tolist()
    return [
        [
            Mark(
                epochs=mark,
                test=_mean(test[row, mark - SCORED_EPOCHS : mark]),
                validation=_mean(validation[row, mark - SCORED_EPOCHS : mark]),
                area=_mean(validation[row, :mark]),
                added=added[row],
                seeds=seeds[row],
                flops=float(per_epoch[row]) * mark,
            )
            for mark in run.marks
        ]
        for row, run in enumerate(runs)
    ]


def _plant(episodes: Episodes, runs: Sequence[FixedRun]) -> None:
    """Put the seeds of each architecture into the rows that have it."""
    catalogue = episodes.population.catalogue
    for arms, start in dict.fromkeys((run.arms, run.start) for run in runs if run.arms):
        rows = [row for row, run in enumerate(runs) if (run.arms, run.start) == (arms, start)]
        parts = [GrownPart(*arm.place(catalogue), Blend.named(arm.blend)) for arm in arms]
        plant_grown(episodes.population, torch.tensor(rows), parts, start)


def plant_grown(
    population: Population,
    environments: Tensor,
    parts: Sequence[GrownPart],
    start: Start = Start.USUAL,
) -> None:
    """Give newborn environments [K] these seeds, permanent and fully on, from the first step."""
    life = population.lifecycle.rows(environments)
    if bool((life.epoch > 0).any()) or bool(life.occupied.any()):
        raise AgreementError(
            "A network from scratch has its parts before it trains",
            given="environments that have trained or hold seeds",
            fix="reset_rows() them first",
        )
    costs = population.catalogue.total_costs
    for slot, kind, blend in parts:
        streams = fold(population.seeds[environments], "scratch", slot)
        population.newborn((("seed", slot, kind), environments, streams))
        if start is Start.USUAL:
            pool = population.pools["seed", slot, kind]
            rows = population.pool_rows[environments, slot]
            pool.state.theta[rows] = _as_usual(pool.template, streams).to(pool.state.theta)
        if blend is Blend.GATE:  # starts as 1 either way
            population.newborn((("gate", slot, NOTHING), environments, streams))
        life.stage[:, slot] = SeedStage.FOSSILIZED
        life.blueprint[:, slot] = kind
        life.blend[:, slot] = blend
        life.alpha[:, slot] = 1.0
        life.params[:, slot] = costs[slot, kind, blend]
    population.adopt(environments, life)


def _as_usual(template: Template, streams: Tensor) -> Tensor:
    """Rows [K, P]: every layer as torch starts it, and scalar gates at 1, from streams [K]."""
    rows = []
    with torch.random.fork_rng(devices=[]):
        for stream in streams.tolist():
            torch.manual_seed(stream)
            module = template.build()
            for part in module.modules():
                if isinstance(part, UNIFORM):
                    part.reset_parameters()
                elif isinstance(part, ScalarGate):
                    nn.init.ones_(part.weight)
            rows.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    return torch.stack(rows)


def _last_epochs(mark: int) -> range:
    return range(mark - SCORED_EPOCHS, mark)


def _mean(values: Tensor) -> float:
    return float(values.mean())
