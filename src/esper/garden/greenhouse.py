"""The greenhouse: worlds that are drawn, not listed, and what no training ever draws.

A plot is a host of one shape with its slots and blueprints, its rate, horizon, rent and budget, and
several contexts in it: what one population can hold. The n-th plot follows from the greenhouse's
seed and n alone, on any machine and in any company; no two contexts have the same samples.

Shapes of hosts are a finite list, since engines compile for each: everything else is drawn. What is
held out is said once, in tables. A held-out group has one thing that training never sees;
all else in it is as in training. docs/greenhouse.md registers the groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from esper.archive.files import read_toml
from esper.garden.cases import Case
from esper.garden.contexts import Context, Lesion, Source
from esper.garden.families import FAMILIES, MOST_CLASSES
from esper.garden.reward_settings import RewardConfig
from esper.kasmina.blueprints import blueprint_names
from esper.kasmina.hosts import SegmentedHost
from esper.leyline.constants import MIN_REWARD_SCALE
from esper.leyline.errors import require_known
from esper.leyline.streams import derive_seed
from esper.tolaria.population_config import PopulationConfig

X = TypeVar("X")

# Worlds that judge a controller while it learns, and those that it is reported on, have streams of
# their own: no seed of a greenhouse meets them.
TRAINING, VALIDATION = "training", "validation"
GROUPS = ("parameters", "sizes", "kinds", "families", "lesions", "drift", "spaces")
HELD_OUT = 12  # contexts of each group
VALIDATED = 8  # worlds by which a run chooses its best controller
SETS = 2  # of blueprints, of every shape
LONGEST = 60  # epochs of an episode
SHORTEST = 12


class Shape(NamedTuple):
    """A host, and in which group it occurs."""

    group: str
    host: str
    sizes: tuple[tuple[str, int | str], ...]

    @classmethod
    def of(cls, group: str, text: str) -> "Shape":
        host, *pairs = text.split()
        sizes = (pair.split("=") for pair in pairs)
        return cls(group, host, tuple((k, int(v) if v.isdigit() else v) for k, v in sizes))


_TABLES = read_toml(Path(__file__).parent / "data" / "greenhouse.toml", "tables of the greenhouse")
SHAPES = tuple(Shape.of(group, text) for group, all_ in _TABLES["shapes"].items() for text in all_)
RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = _TABLES["ranges"]  # in training
_BLUEPRINTS = {"mlp": "dense", "conv1d": "conv1d", "folded": "conv2d", "pieces": "transformer"}
WHOLE = ("translation", "order")  # parameters
HELD_OUT_FAMILIES = ("events", "textures")
BEYOND = 0.3  # of a range's width: how far outside parameters of the group `parameters` lie
WIDENED = ("noise", "amplitude", "gain")  # of which there can be more than in training

LESIONS, HELD_OUT_LESION = ("narrow", "tap", "blind"), "sparse"
DRIFTS, HELD_OUT_DRIFT = ("samples", "labels", "parameters"), "family"
MOST_NOISE = 0.9  # of labels
SCALE = 0.2  # of what there is to learn: points that count as 1 in rewards


class Chance:
    """Draws from a stream that names alone decide."""

    def __init__(self, *names: int | str) -> None:
        self._source = torch.Generator().manual_seed(derive_seed("greenhouse", *names))

    def share(self) -> float:
        """From 0 to 1."""
        return float(torch.rand((), generator=self._source, dtype=torch.float64))

    def one(self, of: Sequence[X]) -> X:
        return of[int(self.share() * len(of))]

    def within(self, low: float, high: float) -> float:
        return round(low + (high - low) * self.share(), 4)

    def ratio(self, low: float, high: float) -> float:
        """As likely to be in one doubling as in another."""
        return float(low * (high / low) ** self.share())

    def some(self, of: Sequence[X], least: int) -> tuple[X, ...]:
        """At least so many of them, in their order."""
        count = least + int(self.share() * (len(of) - least + 1))
        ranks = [self.share() for _ in of]
        kept = sorted(ranks)[min(count, len(of)) - 1]
        return tuple(each for each, rank in zip(of, ranks, strict=True) if rank <= kept)


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What one population holds: contexts on hosts of one shape that are run alike."""

    name: str
    contexts: tuple[Context, ...]
    blueprints: tuple[str, ...]
    rate: float
    horizon: int
    rent: float
    budget: float  # parameters that may be added, as a share of the host's

    @property
    def cases(self) -> list[Case]:
        """One of every context; of two neighbours with drift about one sees it."""
        return [Case(context, number) for number, context in enumerate(self.contexts)]

    @cached_property
    def host(self) -> SegmentedHost:
        return self.contexts[0].build_host()

    def population(self, **others: Any) -> PopulationConfig:
        """How it trains; `others` are further settings."""
        size = sum(parameter.numel() for parameter in self.host.parameters())
        budget = int(self.budget * size)
        return PopulationConfig(rate=self.rate, blueprints=self.blueprints, budget=budget, **others)

    def reward(self, base: RewardConfig | None = None) -> RewardConfig:
        """What is paid for here."""
        return replace(base or RewardConfig(), rent=self.rent)


def blueprint_set(shape: Shape, number: int) -> tuple[str, ...]:
    """A few of those that fit its slots; of the numbers below `SETS` training draws one."""
    names = blueprint_names(_BLUEPRINTS[shape.host])
    trained: list[tuple[str, ...]] = []
    for place in range(number + 1):
        chance, tries = Chance("set", str(shape), place), 0
        found = chance.some(names, 2)
        while found in trained and tries < 100:  # so few have few sets
            found, tries = chance.some(names, 2), tries + 1
        trained.append(found)
    return trained[number]


@dataclass(frozen=True)
class Greenhouse:
    """Draws plots: `training` ones by its seed, those of a group by the group alone."""

    seed: int = 0
    group: str = TRAINING
    longest: int = LONGEST  # epochs of an episode: longer ones are cut

    def __post_init__(self) -> None:
        require_known("group of the greenhouse", self.group, (TRAINING, VALIDATION, *GROUPS))

    def plot(self, number: int, contexts: int = 1) -> Plot:
        """The `number`-th plot, with so many contexts; fewer of them are the first ones."""
        place = (self.group, self.seed if self.group == TRAINING else 0, number)
        chance = Chance("plot", *place)
        shape = chance.one(
            [each for each in SHAPES if each.group == self._of("sizes", "kinds", "spaces")]
        )
        chosen = int(chance.share() * SETS) + (SETS if self.group == "spaces" else 0)
        horizon = min(self.longest, round(chance.ratio(SHORTEST, LONGEST)))
        classes = chance.one((4, 10, round(chance.ratio(2, MOST_CLASSES))))
        rent = 2.0 if chance.share() < 0.5 else chance.within(0.0, 5.0)
        name = "-".join(map(str, place))
        drawn = _Drawing(self.group, shape, classes, horizon)
        return Plot(
            name=name,
            contexts=tuple(
                drawn.context(f"{name}-{each}", Chance("context", *place, each), each)
                for each in range(contexts)
            ),
            blueprints=blueprint_set(shape, chosen),
            rate=float(f"{chance.ratio(1e-3, 1e-2):.2g}"),
            horizon=horizon,
            rent=rent,
            budget=float(f"{chance.ratio(0.25, 3.0):.2g}"),
        )

    def _of(self, *groups: str) -> str:
        return self.group if self.group in groups else TRAINING

    @classmethod
    def held_out(cls, group: str) -> tuple[Plot, ...]:
        """The registered worlds of a group, one context each."""
        return tuple(cls(group=group).plot(number) for number in range(HELD_OUT))

    @classmethod
    def validation(cls) -> tuple[Plot, ...]:
        """Worlds by which a run chooses: as in training, and none of them."""
        return tuple(cls(group=VALIDATION).plot(number) for number in range(VALIDATED))


@dataclass(frozen=True)
class _Drawing:
    """Draws contexts of one plot."""

    group: str
    shape: Shape
    classes: int
    horizon: int

    def context(self, name: str, chance: Chance, number: int) -> Context:
        source = self._source(chance, self._family(chance))
        drift: Source | None = None
        if self.group == "drift" or chance.share() < 0.25:
            drift = self._drifted(chance, source)
        first = max(4, self.horizon // 4)
        learnable = 100.0 * (1.0 - source.label_noise) * (1.0 - 1.0 / self.classes)
        return Context(
            name=name,
            family=source.family,
            source=source,
            lesion=self._lesion(chance),
            drift=drift,
            drift_window=(first, max(first, 3 * self.horizon // 5)),
            host=self.shape.host,
            host_sizes=(*self.shape.sizes, ("classes", MOST_CLASSES)),
            scale=max(MIN_REWARD_SCALE, SCALE * learnable),
        )

    def _family(self, chance: Chance) -> str:
        held = self.group == "families"
        return chance.one(
            [
                name
                for name in RANGES
                if (name in HELD_OUT_FAMILIES) == held
                and (FAMILIES[name].any_classes or FAMILIES[name].classes == self.classes)
            ]
        )

    def _source(self, chance: Chance, family: str) -> Source:
        beyond = self.group == "parameters" and chance.share() < 0.5
        given: dict[str, Any] = {}
        for name, (low, high) in RANGES[family].items():
            if beyond and name in WIDENED:
                low, high = high, high + BEYOND * (high - low)
            value = chance.within(low, high)
            given[name] = int(value) if name in WHOLE else value
        noisy = chance.share() < 2 / 3
        return Source(
            family=family,
            samples=round(chance.ratio(100, 8000)),
            label_noise=round(MOST_NOISE * chance.share() ** 3, 3) if noisy else 0.0,
            seed=int(chance.share() * 2**52),
            classes=self.classes,
            **given,
        )

    def _lesion(self, chance: Chance) -> Lesion | None:
        """In a stage that can have it: a dense host reads first, a line has no half of channels."""
        held = self.group == "lesions"
        if self.shape.host == "pieces" or not (held or chance.share() < 0.25):
            return None
        dense, sizes = self.shape.host == "mlp", dict(self.shape.sizes)
        last = int(sizes["depth"]) if dense else int(sizes["stages"]) - 1
        impossible = "tap" if dense else "blind" if not last else ""
        kinds = [kind for kind in LESIONS if kind != impossible]
        kind = HELD_OUT_LESION if held else chance.one(kinds)
        return Lesion(kind=kind, stage=chance.one(range(dense or kind == "blind", last + 1)))

    def _drifted(self, chance: Chance, source: Source) -> Source:
        """What the task becomes: always with samples of its own."""
        kind = HELD_OUT_DRIFT if self.group == "drift" else chance.one(DRIFTS)
        other = self._source(chance, source.family)
        if kind == "parameters":
            return replace(other, samples=source.samples, label_noise=source.label_noise)
        if kind == "family":
            family = source.family
            while family == source.family:
                family = self._family(chance)
            return self._source(chance, family)
        noise = other.label_noise if kind == "labels" else source.label_noise
        samples = other.samples if kind == "samples" else source.samples
        return replace(source, seed=other.seed, samples=samples, label_noise=noise)
