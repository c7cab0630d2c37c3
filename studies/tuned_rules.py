"""Rules for any host, tuned on worlds of the training stream.

Every rule has the same number of candidates, from a grid that is said here, and is played as often
as the others: all candidates in a first heat, the best of them in a second one, on other worlds.
The best by the mean net gain over both is taken. These worlds are for nothing else, so their test
data say which is best.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean

from esper.archive import write_whole
from esper.garden.greenhouse import TRAINING
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.auditioning import ATTENTIVE, AuditionConfig
from esper.tamiyo.controllers.specs import parse_settings
from studies.any_host import CONSTANT, WITH_PLACES
from studies.judging import Net, read_judged

AUDITION = "audition"
RULES = (CONSTANT, *WITH_PLACES, AUDITION)

_PLACES = (
    "*/*", "*/dearest", "*/local", "*/large-local", "*/global", "*/normalises",
    "first/large-local+middle/global", "middle/global+first/large-local",
    "first/normalises+last/large-local",
)  # fmt: skip
_SETTINGS: Mapping[str, Mapping[str, Sequence[object]]] = {
    "periodic": {"every": (2, 6), "seeds": (1, 3)},
    "plateau": {"delta": (1.0, 4.0), "seeds": (1, 3)},
    "gap": {"most_gap": (0.1, 0.3), "seeds": (1, 3)},
    "race": {"turns": ("true", "false"), "epochs": (4, 7)},
    "heuristic": {"patience": (0, 2), "together": (1, 3)},
    AUDITION: {
        "seeds": (1, 2, 3),
        "certain": (2.0, 3.0, 5.0),
        "rent": (0.0, 2.0),
        "unlearned": (0.1, 1.0),
    },
}
_CONSTANTS = {  # where and what, at which epochs
    "3": [
        f"{slot}/{kind}"
        for slot in ("first", "middle", "last")
        for kind in ("local", "large-local", "global", "normalises", "cheapest", "dearest")
    ],
    "8": [
        f"{slot}/{kind}"
        for slot in ("first", "middle", "last")
        for kind in ("large-local", "global", "normalises")
    ],
    "3+5": [
        f"first/{one}+last/{other}"
        for one, other in product(("large-local", "global", "normalises"), repeat=2)
    ],
}


@dataclass(frozen=True)
class Heats:
    """How much is played for every rule."""

    worlds: tuple[int, int]  # of the first heat, and of the second
    cases: int
    finalists: int
    candidates: int | None = None  # the first so many; None: all

    def episodes(self, kind: str) -> int:
        first, last = self.worlds
        few = min(self.finalists, len(self.specs(kind)))
        return self.cases * (first * len(self.specs(kind)) + last * few)

    def specs(self, kind: str) -> list[str]:
        """Candidates, as results name them."""
        return list(dict.fromkeys(_grid(kind)))[: self.candidates]


def _grid(kind: str) -> Iterator[str]:
    if kind == CONSTANT:
        for epoch, wanted in _CONSTANTS.items():
            yield from (f"{CONSTANT}@{places}:epoch={epoch}" for places in wanted)
        return
    names = _SETTINGS[kind]
    chosen = [",".join(f"{k}={v}" for k, v in zip(names, values, strict=True))
              for values in product(*names.values())]  # fmt: skip
    if kind == AUDITION:
        yield from (make_controller(f"{kind}:{settings}").name for settings in chosen)
    else:
        yield from (f"{kind}@{place}:{each}" for place in _PLACES for each in chosen)


@dataclass(frozen=True)
class TunedRule:
    """The best of a kind, and all that were tried."""

    spec: str
    mean: float  # net points
    episodes: int
    log: tuple[tuple[str, float, int], ...]  # spec, mean, episodes


def rivals(found: Mapping[str, TunedRule]) -> list[str]:
    """The tuned rules, the default of `esper.grow`, and both kinds of auditions in which as much is
    heard as by learners."""
    plain = [*(rule.spec for rule in found.values()), AUDITION]
    rounds, spend = ATTENTIVE.rounds, ATTENTIVE.spend
    settings = [parse_settings(AUDITION, spec.partition(":")[2], AuditionConfig)
                for spec in plain if kind_of(spec) == AUDITION]  # fmt: skip
    return list(
        dict.fromkeys(
            [*plain, *(replace(own, rounds=rounds, spend=spend).name for own in settings)]
        )
    )


def kind_of(spec: str) -> str:
    return spec.partition(":")[0].partition("@")[0]


def finalists(folder: Path, heats: Heats) -> list[str]:
    """Those of all rules that are played in the second heat."""
    first = [net for net in read_judged(folder, TRAINING) if net.world < heats.worlds[0]]
    means = _means(first)
    return [
        spec
        for kind in RULES
        for spec in sorted(heats.specs(kind), key=lambda spec: -means[spec])[: heats.finalists]
    ]


def tuned(folder: Path, heats: Heats) -> dict[str, TunedRule]:
    """The best rule of each kind, by what was played; one of the second heat."""
    played, best = read_judged(folder, TRAINING), finalists(folder, heats)
    means, counts = _means(played), dict.fromkeys((net.controller for net in played), 0)
    for net in played:
        counts[net.controller] += 1
    found = {}
    for kind in RULES:
        ours = [spec for spec in best if kind_of(spec) == kind]
        log = tuple((spec, means[spec], counts[spec]) for spec in heats.specs(kind))
        spent = sum(count for _, _, count in log)
        spec = max(ours, key=means.__getitem__)
        found[kind] = TunedRule(spec, means[spec], spent, log)
    return found


def _means(played: Sequence[Net]) -> dict[str, float]:
    points: dict[str, list[float]] = {}
    for net in played:
        points.setdefault(net.controller, []).append(net.points)
    return {name: fmean(own) for name, own in points.items()}


def keep_tuned(path: Path, found: Mapping[str, TunedRule]) -> None:
    told = {kind: asdict(rule) for kind, rule in found.items()}
    write_whole(path, json.dumps(told, indent=1) + "\n")


def read_tuned(path: Path) -> dict[str, TunedRule]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {
        kind: TunedRule(**{**each, "log": tuple(map(tuple, each["log"]))})
        for kind, each in stored.items()
    }
