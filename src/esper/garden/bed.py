"""A bed: hosts of one shape side by side, each started on a case of its own.

Shapes: `N` rows, `K` rows in question, `S` slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from esper.garden.contexts import Context, Source
from esper.garden.families import LENGTH
from esper.garden.lesions import lesion_mask
from esper.kasmina.blueprints import build_catalogue
from esper.leyline.catalogue import BlueprintCatalogue
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH
from esper.leyline.errors import AgreementError, UnknownNameError
from esper.leyline.streams import derive_seed
from esper.tolaria.data.splits import Splits
from esper.tolaria.feed import Feed
from esper.tolaria.flops import count_flops
from esper.tolaria.population import Population
from esper.tolaria.population_config import EpochRecord, PopulationConfig
from esper.tolaria.tasks import DEFAULT_BUDGET, GARDEN_BATCH, GARDEN_BATCHES

EPOCHS_ALONE = 3  # of a host before anything is planted: what it lacks shows while it learns
GARDEN_SEED = 0  # of every bed: a case is the same host with the same data wherever it grows


@dataclass(frozen=True)
class Case:
    """One environment: a context, and the seed of its weights, its order of data and its drift."""

    context: Context
    seed: int

    def __str__(self) -> str:
        return f"{self.context.name} #{self.seed}"

    @property
    def identity(self) -> int:
        """What all its random streams follow from; equal seeds of two contexts share nothing."""
        return derive_seed(self.context.key, self.seed)


class Bed:
    """A population whose rows are started, one episode after the other, on given cases."""

    def __init__(
        self,
        contexts: Sequence[Context],
        rows: int,
        *,
        horizon: int = DEFAULT_EPISODE_LENGTH,
        device: torch.device | str = "cpu",
        config: PopulationConfig | None = None,
    ) -> None:
        self.horizon = horizon
        self.contexts = {context.key: context for context in contexts}
        first = one_shape(contexts)
        self._sources = _sources_of(contexts)
        config = config or PopulationConfig()
        alone = max(config.rules.min_host_epochs, EPOCHS_ALONE)
        config = replace(config, rules=replace(config.rules, min_host_epochs=alone))
        feed = Feed(
            [_loaded(source).to(device) for source in self._sources],
            [0] * rows,
            batch=GARDEN_BATCH,
            batches=GARDEN_BATCHES,
            device=device,
            dtype=config.dtype,
        )
        host = first.build_host()
        if config.budget is None:
            size = sum(parameter.numel() for parameter in host.parameters())
            config = replace(config, budget=int(DEFAULT_BUDGET * size))
        self._live = {
            lesion: torch.ones(sum(p.numel() for p in host.parameters()), dtype=torch.bool)
            if lesion is None
            else lesion_mask(host, lesion)
            for lesion in {context.lesion for context in contexts}
        }
        self.population = Population(
            first.build_host, feed, identities=range(rows), seed=GARDEN_SEED, config=config
        )
        self.flops = count_flops(host, torch.zeros(1, LENGTH), self.population.catalogue)
        self.cases: list[Case | None] = [None] * rows
        self._drift_epoch = torch.full((rows,), -1)  # never
        self._drift_data = torch.zeros(rows, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.population)

    def start(self, rows: Tensor, cases: Sequence[Case]) -> None:
        """Begin an episode in these rows [K], each on its case."""
        for case in cases:
            if case.context.key not in self.contexts:
                known = sorted(context.name for context in self.contexts.values())
                raise UnknownNameError.of("context of this bed", case.context.name, known)
        self.population.reset_rows(rows, [case.identity for case in cases])
        place = {source: index for index, source in enumerate(self._sources)}
        data = torch.tensor([place[case.context.source] for case in cases])
        self.population.feed.assign(rows, data)
        if set(self._live) != {None}:
            live = torch.stack([self._live[case.context.lesion] for case in cases])
            self.population.silence_rows(rows, live)
        for row, case in zip(rows.tolist(), cases, strict=True):
            self.cases[row] = case
            epoch = case.context.drift_epoch(case.seed)
            self._drift_epoch[row] = -1 if epoch is None else epoch
            if epoch is not None and case.context.drift is not None:
                self._drift_data[row] = place[case.context.drift]

    def train_epoch(self) -> EpochRecord:
        """One epoch of every row; what changes its task at this epoch does so first."""
        rows = self.drifting()
        if len(rows):
            self.population.feed.assign(rows, self._drift_data[rows])
        return self.population.train_epoch()

    def training_flops(self) -> Tensor:
        """[N]: what the next epoch costs every row, as it is now."""
        population = self.population
        samples = population.feed.batch * population.feed.batches
        return self.flops.training(population.lifecycle, samples, population.config.isolation)

    @property
    def drift_epochs(self) -> Tensor:
        """[N]: with which epoch each row's task changes; -1: it does not."""
        return self._drift_epoch.clone()

    def drifting(self) -> Tensor:
        """[K]: the rows whose task changes with the next epoch."""
        return (self._drift_epoch == self.population.lifecycle.epoch).nonzero()[:, 0]


def one_shape(contexts: Sequence[Context]) -> Context:
    """The first context, after making sure that all have hosts of one shape."""
    if not contexts:
        raise AgreementError("A bed needs contexts", given="none", valid="at least one")
    first = contexts[0]
    for other in contexts[1:]:
        if (other.host, other.host_sizes) != (first.host, first.host_sizes):
            raise AgreementError(
                "The contexts of one bed must have hosts of one shape",
                given=f"{first.name!r}: {first.host} {dict(first.host_sizes)}, "
                f"{other.name!r}: {other.host} {dict(other.host_sizes)}",
                fix="use one bed for each shape: by_shape(contexts)",
            )
    return first


def by_shape(contexts: Sequence[Context]) -> list[list[Context]]:
    """The contexts in groups whose hosts have one shape, in the order of their first members."""
    groups: dict[object, list[Context]] = {}
    for context in contexts:
        groups.setdefault((context.host, context.host_sizes), []).append(context)
    return list(groups.values())


def catalogue_of(context: Context, blueprints: tuple[str, ...] | None = None) -> BlueprintCatalogue:
    """What can be planted in a context's host, without a bed."""
    host = context.build_host()
    size = sum(parameter.numel() for parameter in host.parameters())
    return build_catalogue(host.slot_specs(), size, blueprints)


@lru_cache(maxsize=64)
def _loaded(source: Source) -> Splits:
    """Generated once: beds of the same contexts are made again and again."""
    return source.load()


def _sources_of(contexts: Sequence[Context]) -> list[Source]:
    found: dict[Source, None] = {}
    for context in contexts:
        found[context.source] = None
        if context.drift is not None:
            found[context.drift] = None
    return list(found)
