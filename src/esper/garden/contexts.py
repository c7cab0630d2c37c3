"""Contexts: a source of data, a host, a lesion and a change of task, as one frozen value.

Shapes: `P` parameters of a host.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from esper.datasets.generated import CLASSES, LENGTH
from esper.garden.families import FAMILIES, MOST_CLASSES, PARAMETERS, noisy_labels
from esper.kasmina.blueprints import build_catalogue
from esper.kasmina.hosts import HOSTS, SegmentedHost, build_host
from esper.leyline import BlueprintCatalogue, DataError, EsperError
from esper.leyline.constants import MIN_REWARD_SCALE
from esper.leyline.errors import require_known
from esper.leyline.settings import (
    COUNT,
    Count,
    NotNegative,
    Positive,
    Range,
    Share,
    Whole,
    require,
    require_settings,
)
from esper.leyline.streams import derive_seed
from esper.tolaria.data.removed_sets import refuse_removed_set
from esper.tolaria.data.splits import Split, Splits

VALIDATION_SAMPLES = 1000  # the same in every context, so that one population can hold them all
TEST_SAMPLES = 2000
NARROW_CHANNELS = 2  # that a narrowed stage still has


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where data comes from: a family with its parameters, and how much of it.

    Parameters that the family has are its defaults unless given; the others stay None. Labels are
    noisy in all three splits alike: what a controller is told and what is reported come from the
    distribution that was trained on.
    """

    family: str
    samples: Count = 4000  # to train on
    label_noise: Share = 0.0  # share of labels drawn anew
    seed: Whole = 0  # another seed has other samples in all three splits
    translation: Whole | None = None  # points of the padded line, at most
    noise: NotNegative | None = None  # beside the glyph, or around the spikes
    amplitude: NotNegative | None = None  # spread of the glyph's height, as a fraction
    gain: NotNegative | None = None  # spread of the logarithm of a sample's gain
    order: Whole | None = None  # which permutation of the points, or set of curves
    width: Positive | None = None  # of a bump, in points
    spread: NotNegative | None = None  # over which classes lie apart
    # Where a family has any number of them; None: as many as the garden's hosts have logits.
    classes: Count | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            refuse_removed_set(self.family)
        require_known("family of data", self.family, FAMILIES)
        family = FAMILIES[self.family]
        for name in PARAMETERS:
            if getattr(self, name) is None:
                _put(self, name, family.defaults.get(name))
            else:
                require_known(f"parameter of the family {self.family!r}", name, family.defaults)
        require_settings(self, "The source's setting", error=DataError)
        counts = (2, MOST_CLASSES) if family.any_classes else (family.classes, family.classes)
        known = Range(*counts, whole=True, optional=True)
        require(f"The classes of the family {self.family!r}", self.classes, known, error=DataError)
        for name in ("label_noise", "noise", "amplitude", "gain", "width", "spread"):
            if getattr(self, name) is not None:  # 1 and 1.0 are one value, with one key
                _put(self, name, float(getattr(self, name)))

    def load(self) -> Splits:
        """The data: always the same for equal sources."""
        family = FAMILIES[self.family]
        classes = self.classes or family.classes
        splits = {}
        sizes = {"train": self.samples, "validation": VALIDATION_SAMPLES, "test": TEST_SAMPLES}
        for name, samples in sizes.items():
            seed = derive_seed(self.seed, "garden", self.family, name)
            given = {**self.parameters(), "classes": classes}
            inputs, labels = family.generate(samples, seed, given)
            labels = noisy_labels(labels, self.label_noise, classes, seed)
            splits[name] = Split(inputs, labels)
        return Splits(**splits, classes=self.classes or CLASSES, origin=f"generated: {self}")

    def parameters(self) -> dict[str, float]:
        """Those that the family has."""
        return {name: getattr(self, name) for name in FAMILIES[self.family].defaults}

    def __str__(self) -> str:
        defaults = FAMILIES[self.family].defaults
        parts = [f"{self.family} × {self.samples}"]
        parts += [
            f"{name} {value:g}"
            for name, value in self.parameters().items()
            if value != defaults[name]
        ]
        if self.classes:
            parts.append(f"{self.classes} classes")
        if self.label_noise:
            parts.append(f"{self.label_noise:.0%} label noise")
        if self.seed:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Lesion:
    """`narrow`: two channels of the stage's output live; `tap`: its kernel's centre lives; `blind`:
    it sees the first half of its inputs."""

    kind: str
    stage: Whole

    def __post_init__(self) -> None:
        require_known("kind of lesion", self.kind, _LESIONED)
        require_settings(self, "A lesion's setting")

    def __str__(self) -> str:
        return f"{self.kind} at stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an episode draws: a task, the host that meets it, and what becomes of both."""

    name: str  # in tables; unique within a suite
    family: str  # for reports and for the scale, which is one number per family
    source: Source
    lesion: Lesion | None = None
    drift: Source | None = None  # what the task becomes, with probability 1/2
    drift_window: tuple[int, int] = (6, 14)  # first and last epoch at which it may
    host: str = "conv1d"
    host_sizes: tuple[tuple[str, int | str], ...] = ()
    # Points that count as 1 in rewards and scores: the best net gain or more. Never observed.
    scale: Positive = MIN_REWARD_SCALE

    def __post_init__(self) -> None:
        for what in ("name", "family"):
            check_label(f"{what} of a context", getattr(self, what))
        for what, kind in _PARTS.items():  # tables of a file become what they describe
            value = getattr(self, what)
            if not isinstance(value, kind) and (value is not None or what == "source"):
                _put(self, what, kind(**table_of(kind, kind.__name__.lower(), value)))
        window = self.drift_window
        pair = isinstance(window, tuple | list) and len(window) == 2
        if not pair or not all(map(COUNT.holds, window)) or window[0] > window[1]:
            valid = "two whole numbers, 1 <= first epoch <= last epoch"
            raise EsperError("Impossible drift_window of a context", given=window, valid=valid)
        _put(self, "drift_window", tuple(window))
        require_settings(self, "The context's setting", error=DataError)
        _put(self, "scale", float(self.scale))
        require_known("host", self.host, HOSTS)
        if not isinstance(self.host_sizes, tuple | Mapping):
            valid = "a table of names and sizes, or pairs of them, like (('channels', 6),)"
            raise wrong_type("host_sizes of a context", self.host_sizes, valid)
        known, sizes = inspect.signature(HOSTS[self.host]).parameters, dict(self.host_sizes)
        for name, size in sizes.items():
            require_known(f"size of the host {self.host!r}", name, known)
            if not isinstance(known[name].default, str):
                what = f"The size {name!r} of the host {self.host!r}"
                require(what, size, COUNT, error=DataError)
        _put(self, "host_sizes", tuple(sorted(sizes.items())))
        # Refuses a lesion that the host cannot have.
        tasks = (self.source, self.drift)
        counts = [task.classes or 0 for task in tasks if task is not None]
        lesion_mask(_sketch(self.host, self.host_sizes, max(counts)), self.lesion)

    def build_host(self) -> SegmentedHost:
        """A new host, unharmed; its weights come from torch's current random stream."""
        return build_host(self.host, **dict(self.host_sizes))

    def catalogue(self, blueprints: tuple[str, ...] | None = None) -> BlueprintCatalogue:
        """What can be planted in its host."""
        host = self.build_host()
        size = sum(parameter.numel() for parameter in host.parameters())
        return build_catalogue(host.slot_specs(), size, blueprints)

    @property
    def host_shape(self) -> str:
        """Contexts with the same one can share a population."""
        return " ".join([self.host, *(f"{name}={size}" for name, size in self.host_sizes)])

    @cached_property
    def key(self) -> str:
        """A short hash of everything that changes numbers: not the name, the label or the scale."""
        record = self.to_dict()
        for label in ("name", "family", "scale"):
            del record[label]
        text = json.dumps(record, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def drift_epoch(self, seed: int) -> int | None:
        """The first epoch (counted from 0) on the other task, or None if it never comes.

        `seed` is the environment's; of 2k and 2k + 1 exactly one sees the change, so that any run
        of seeds is balanced. One after the last epoch of an episode does not come.
        """
        if self.drift is None:
            return None
        pair, odd = divmod(seed, 2)
        spared, epoch = _drift(derive_seed(pair, "drift", self.key), *self.drift_window)
        return None if odd == spared else epoch

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.source}"]
        if self.drift is not None:
            first, last = self.drift_window
            parts.append(f"half the time then {self.drift} (from epoch {first}-{last})")
        if self.lesion is not None:
            parts.append(f"{self.lesion}")
        return "; ".join([*parts, self.host_shape])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for TOML and result files; what is absent is left out."""
        record = asdict(self, dict_factory=lambda pairs: {n: v for n, v in pairs if v is not None})
        window = list(self.drift_window) if self.drift is not None else None
        record |= {"drift_window": window, "host_sizes": dict(self.host_sizes)}
        return {name: value for name, value in record.items() if value not in (None, {})}

    @classmethod
    def from_dict(cls, given: object) -> Self:
        return cls(**table_of(cls, "context", given))


_PARTS: dict[str, type[Source | Lesion]] = {"source": Source, "lesion": Lesion, "drift": Source}


@lru_cache(maxsize=2**12)
def _drift(seed: int, first: int, last: int) -> tuple[int, int]:
    """Which seed of a pair sees no change, and when the other one does."""
    source = torch.Generator().manual_seed(seed)
    spared = int(torch.randint(2, (), generator=source))
    return spared, int(torch.randint(first, last + 1, (), generator=source))


def by_shape(contexts: Sequence[Context]) -> list[list[Context]]:
    """The contexts in groups whose hosts have one shape, in the order of their first members."""
    groups: dict[str, list[Context]] = {}
    for context in contexts:
        groups.setdefault(context.host_shape, []).append(context)
    return list(groups.values())


@lru_cache
def _sketch(name: str, sizes: tuple[tuple[str, int | str], ...], classes: int) -> SegmentedHost:
    """The host with meaningless weights, if it reads a line and has enough logits; in the garden,
    which says nothing of `classes`, ten."""
    try:
        with torch.device("meta"):  # draws nothing from torch's random stream
            host = build_host(name, **dict(sizes))
        host = host.to_empty(device="cpu")
        with torch.no_grad():
            logits = host(torch.zeros(1, LENGTH))
        got, fits = str(list(logits.shape)), logits.ndim == 2 and logits.shape[1] >= classes
    except (RuntimeError, ValueError, TypeError) as error:
        got, fits = str(error).splitlines()[0], False
    if not (fits if classes else got == str([1, CLASSES])):
        raise DataError(
            f"The host {name!r} does not fit the garden's data",
            given=f"with sizes {dict(sizes)} it makes of one line of {LENGTH} points: {got}",
            valid=f"[1, {classes or CLASSES}]: enough logits, in the garden ten",
        )
    return host


# --- lesions -------------------------------------------------------------------------------


def lesion_mask(host: SegmentedHost, lesion: Lesion | None) -> Tensor:
    """[P] bool over the host's parameters, in the order of its names: True where one lives.

    With the others at exactly zero, a narrowed host computes what a host with two channels at that
    stage would, one with a single tap what a kernel of size 1 would, and a blind stage sees the
    first half of what reaches it.
    """
    live = {
        name: torch.ones(parameter.shape, dtype=torch.bool)
        for name, parameter in host.named_parameters()
    }
    if lesion is not None:
        wanted, found = (
            _LESIONED[lesion.kind],
            dict[int, str](),
        )  # layers that can have it, by stage
        for stage in range(len(host.slot_specs())):  # all but the head
            for name, part in host.segments[stage].named_modules():
                if isinstance(part, wanted):
                    found.setdefault(stage, f"segments.{stage}.{name}".rstrip("."))
        if lesion.stage not in found:
            what = "convolution" if nn.Linear not in wanted else "convolution or dense layer"
            raise EsperError(
                f"This host cannot have a lesion {str(lesion)!r}",
                given=f"{type(host).__name__}, whose stage {lesion.stage} has no {what}",
                valid="stage " + " or ".join(map(str, found)) if found else f"a host with a {what}",
            )
        layer = found[lesion.stage]
        weight = live[f"{layer}.weight"]  # [outputs, inputs, points of the kernel]
        if lesion.kind == "tap":
            centre: Any = (..., *(points // 2 for points in weight.shape[2:]))
            weight[:] = False
            weight[centre] = True
        elif lesion.kind == "blind":
            weight[:, (weight.shape[1] + 1) // 2 :] = False
        else:
            for name in {f"{layer}.weight", f"{layer}.bias"} & live.keys():
                live[name][NARROW_CHANNELS:] = False
    return torch.cat([part.flatten() for part in live.values()])


# The kinds of lesions, and of the layers that can have them.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_LESIONED: dict[str, tuple[type[nn.Module], ...]] = {
    "narrow": (*_CONVOLUTIONS, nn.Linear),
    "tap": _CONVOLUTIONS,
    "blind": (*_CONVOLUTIONS, nn.Linear),
}


# --- checks --------------------------------------------------------------------------------


_LABEL = re.compile(r"[A-Za-z0-9._+-]+")


def check_label(what: str, value: object) -> None:
    """Refuse what would not stand in one cell of a table."""
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        valid = "letters, digits and . _ + -, like gain-2.0"
        raise EsperError(f"Impossible {what}", given=repr(value), valid=valid)


def _put(record: object, name: str, value: object) -> None:
    object.__setattr__(record, name, value)


def table_of(kind: Any, what: str, given: object) -> dict[str, Any]:
    """A table of a dataclass's fields, refused if one is unknown or missing."""
    if not isinstance(given, Mapping):
        raise wrong_type(what, given, f"a table of the {what}'s settings")
    names = [each.name for each in fields(kind)]
    for name in given:
        require_known(f"key of a {what}", name, names)
    needed = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
    for name in needed:
        if name not in given:
            raise DataError(
                f"A {what} lacks its {name}",
                given=", ".join(given) or "nothing",
                valid="at least " + ", ".join(needed),
            )
    return dict(given)


def wrong_type(what: str, given: object, valid: str) -> DataError:
    """The error of a file or a call that gives something of another kind."""
    return DataError(f"Wrong type of {what}", given=repr(given), valid=valid)
