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
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from numpy.random import Generator, default_rng

from esper.archive.files import read_toml
from esper.garden.cases import Case
from esper.garden.contexts import Context, Lesion, Source
from esper.garden.families import FAMILIES, MOST_CLASSES
from esper.kasmina.blueprints import blueprint_names
from esper.leyline.constants import MIN_REWARD_SCALE
from esper.leyline.errors import require_known
from esper.leyline.streams import derive_seed
from esper.tolaria.population_config import PopulationConfig

X = TypeVar("X")

# Worlds that judge a controller while it learns, and those that it is reported on, have streams of
# their own: no seed of a greenhouse meets them.
TRAINING, VALIDATION = "training", "validation"
GROUPS = ("parameters", "sizes", "kinds", "families", "lesions", "drift", "spaces")
LISTED = 12  # worlds of each group
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
HELD_OUT_FAMILIES = {"events", "halves"}
BEYOND = 0.3  # of a range's width: how far outside parameters of the group `parameters` lie
WIDENED = ("noise", "amplitude", "gain")  # of which there can be more than in training

LESIONS, HELD_OUT_LESION = ("narrow", "blind"), "tap"
DRIFTS, HELD_OUT_DRIFT = ("samples", "labels", "parameters"), "family"
MOST_NOISE = 0.9  # of labels
SCALE = 0.2  # of what there is to learn: points that count as 1 in rewards


def _chance(*names: int | str) -> Generator:
    return default_rng(derive_seed("greenhouse", *names))


def _one(chance: Generator, of: Sequence[X]) -> X:
    return of[int(chance.random() * len(of))]


def _ratio(chance: Generator, low: float, high: float) -> float:
    """As likely to be in one doubling as in another."""
    return float(low * (high / low) ** chance.random())


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

    def population(self, **others: Any) -> PopulationConfig:
        """How it trains; `others` are further settings."""
        budget = int(self.budget * self.contexts[0].catalogue().host_params)
        return PopulationConfig(rate=self.rate, blueprints=self.blueprints, budget=budget, **others)


def blueprint_set(shape: Shape, number: int) -> tuple[str, ...]:
    """Some of those that fit its slots: one of the first `SETS` is drawn.

    Hosts of the group `spaces` have sets that no host of their kind has in training.
    """
    names = blueprint_names(_BLUEPRINTS[shape.host])
    sets = {found for size in range(2, len(names) + 1) for found in combinations(names, size)}
    if shape.group == "spaces":
        alike = [each for each in SHAPES if each.host == shape.host and each.group == TRAINING]
        sets -= {blueprint_set(each, drawn) for each in alike for drawn in range(SETS)}
    return sorted(sets, key=lambda found: derive_seed("set", str(shape), *found))[number]


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
        chance = _chance("plot", *place)
        group = self.group if self.group in ("sizes", "kinds", "spaces") else TRAINING
        shapes = [each for each in SHAPES if each.group == group]
        if self.group == "lesions":  # there must be a kernel, with more than its centre
            wide = [each for each in shapes if each.host != "mlp"]
            shapes = [each for each in wide if ("kernel", 1) not in each.sizes]
        shape = _one(chance, shapes)
        chosen = int(chance.random() * SETS)
        horizon = min(self.longest, round(_ratio(chance, SHORTEST, LONGEST)))
        classes = _one(chance, (4, 10, round(_ratio(chance, 2, MOST_CLASSES))))
        rent = 2.0 if chance.random() < 0.5 else round(chance.uniform(0.0, 5.0), 3)
        name = "-".join(map(str, place))
        drawn = _Drawing(self.group, shape, classes, horizon)
        return Plot(
            name=name,
            contexts=tuple(
                drawn.context(f"{name}-{each}", _chance("context", *place, each))
                for each in range(contexts)
            ),
            blueprints=blueprint_set(shape, chosen),
            rate=float(f"{_ratio(chance, 1e-3, 1e-2):.2g}"),
            horizon=horizon,
            rent=rent,
            budget=float(f"{_ratio(chance, 0.25, 3.0):.2g}"),
        )

    @classmethod
    def listed(cls, group: str) -> tuple[Plot, ...]:
        """The registered worlds of a group, or those for validation, one context each."""
        return tuple(cls(group=group).plot(number) for number in range(LISTED))


@dataclass(frozen=True)
class _Drawing:
    """Draws contexts of one plot."""

    group: str
    shape: Shape
    classes: int
    horizon: int

    def context(self, name: str, chance: Generator) -> Context:
        source = self._source(chance, self._family(chance))
        drift: Source | None = None
        if self.group == "drift" or chance.random() < 0.25:
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

    def _family(self, chance: Generator) -> str:
        held = HELD_OUT_FAMILIES if self.group == "families" else set(RANGES) - HELD_OUT_FAMILIES
        known = {name: FAMILIES[name] for name in RANGES if name in held}
        return _one(
            chance, [n for n, f in known.items() if f.any_classes or f.classes == self.classes]
        )

    def _source(self, chance: Generator, family: str) -> Source:
        beyond = self.group == "parameters" and chance.random() < 0.5
        given: dict[str, Any] = {}
        for name, (low, high) in RANGES[family].items():
            if beyond and name in WIDENED:
                low, high = high, high + BEYOND * (high - low)
            value = round(chance.uniform(low, high), 4)
            given[name] = int(value) if name in WHOLE else value
        noisy = chance.random() < 2 / 3
        return Source(
            family=family,
            samples=round(_ratio(chance, 100, 8000)),
            label_noise=round(MOST_NOISE * chance.random() ** 3, 3) if noisy else 0.0,
            seed=int(chance.random() * 2**52),
            classes=self.classes,
            **given,
        )

    def _lesion(self, chance: Generator) -> Lesion | None:
        """In a stage that can have it: a dense host reads first, a line has no half of channels."""
        held = self.group == "lesions"
        if self.shape.host == "pieces" or not (held or chance.random() < 0.25):
            return None
        dense, sizes = self.shape.host == "mlp", dict(self.shape.sizes)
        last = int(sizes["depth"]) if dense else int(sizes["stages"]) - 1
        kind = HELD_OUT_LESION if held else _one(chance, LESIONS if last else LESIONS[:1])
        return Lesion(kind=kind, stage=_one(chance, range(dense or kind == "blind", last + 1)))

    def _drifted(self, chance: Generator, source: Source) -> Source:
        """What the task becomes: always with samples of its own."""
        kind = HELD_OUT_DRIFT if self.group == "drift" else _one(chance, DRIFTS)
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
