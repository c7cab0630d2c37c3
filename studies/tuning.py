"""Rules tuned on training contexts: random settings, the best of them played again.

Every kind of rule gets the same number of candidates and episodes. What they may plant comes from
the atlas, so they know what it knows. Judged by validation data on cases that nothing else uses.

Shapes: `C` contexts, `A` candidates, `K` random seeds of a case.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from esper.distributed import SINGLE_PROCESS
from esper.garden import Atlas, Case, Controls, Job, Playground, Suite
from esper.garden.controller_choice import TUNED
from esper.garden.dealing import Ranks
from esper.leyline.constants import DEFAULT_RENT
from esper.tamiyo.controllers import Controller, make_controller

TUNING_SEED = 600_000  # where the cases begin on which rules are tuned
KINDS = ("periodic", "plateau", "gap", "race", "heuristic")
MOST_PLACES = 10  # of the atlas, that candidates draw from

_SOON = (3, 4, 6)
_SETTINGS: Mapping[str, Mapping[str, Sequence[object]]] = {
    "periodic": {
        "blend": ("immediate", "gate"),
        "first": _SOON,
        "seeds": (1, 2, 3),
        "every": (1, 2, 4, 6),
    },
    "plateau": {
        "blend": ("immediate", "gate"),
        "first": _SOON,
        "seeds": (1, 2, 3),
        "patience": (1, 2, 3, 4),
        "delta": (0.5, 1.0, 2.0, 4.0, 8.0),
    },
    "gap": {
        "blend": ("immediate", "gate"),
        "first": _SOON,
        "seeds": (1, 2, 3),
        "most_gap": (0.02, 0.05, 0.1, 0.2, 0.4),
        "least_loss": (0.2, 0.3, 0.5, 0.7, 0.85),
        "spacing": (1, 2, 4),
    },
    "race": {
        "turns": ("true", "false"),
        "first": (3, 4),
        "epochs": (3, 4, 5, 7),
        "threshold": (0.5, 1.0, 2.0, 3.0, 5.0),
        "keep": (1, 2, 3),
    },
    "heuristic": {
        "blend": ("immediate", "gate"),
        "first": (3, 4),
        "spacing": (1, 2),
        "patience": (0, 1, 2, 3),
        "delta": (1.0, 2.0, 4.0),
        "most_gap": ("none", 0.1, 0.2, 0.4),
        "together": (1, 2, 3),
        "probation": (3, 4, 5),
        "trial": (5, 6, 7, 9),
        "margin": (0.5, 1.0, 2.0, 3.0),
    },
}


@dataclass(frozen=True, kw_only=True)
class TuningSize:
    """How much is played for each kind of rule."""

    candidates: int = 32
    seeds: int = 2  # of each context, in the first heat
    finalists: int = 8
    final_seeds: int = 6

    def episodes(self, contexts: int) -> int:
        first, last = self.candidates * self.seeds, self.finalists * self.final_seeds
        return contexts * (first + last)


@dataclass(frozen=True)
class Tuned:
    """The best rule of a kind, and all that were tried."""

    spec: str
    score: float  # mean net gain / scale on validation data, over both heats
    episodes: int
    log: tuple[tuple[str, float, int], ...]  # spec, mean score, episodes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def candidates_of(kind: str, atlas: Atlas, suite: Suite, count: int, seed: int = 0) -> list[str]:
    """Different specs of one kind: the one that was best so far, and random ones."""
    chance = random.Random(f"{kind} {seed}")  # noqa: S311 - a search, not a secret
    places = best_places(atlas)
    known = make_controller(TUNED[suite.name]).name if suite.name in TUNED else ""
    found = dict.fromkeys([known] if known.partition(":")[0] == kind else [])
    while len(found) < count:
        chosen = chance.sample(places, chance.choice((1, 2, 2, 3, 3)))
        settings = {name: chance.choice(list(each)) for name, each in _SETTINGS[kind].items()}
        words = [f"places={'+'.join(chosen)}", *(f"{k}={v}" for k, v in settings.items())]
        found[make_controller(f"{kind}:{','.join(words)}").name] = None
    return list(found)


def best_places(atlas: Atlas) -> list[str]:
    """Those of the oracle's schedules, then the best for all contexts."""
    used = [f"{arm.slot}/{arm.blueprint}" for plan in atlas.schedules() for arm in plan]
    used.sort(key=used.count, reverse=True)
    scores = (atlas.judged().mean(2) / atlas.scales()[:, None]).mean(0)
    order = [atlas.arms[place] for place in scores.argsort(descending=True).tolist()]
    places = dict.fromkeys([*used, *(f"{arm.slot}/{arm.blueprint}" for arm in order)])
    return list(places)[:MOST_PLACES]


def tune(
    atlas: Atlas,
    suite: Suite,
    *,
    kinds: Sequence[str] = KINDS,
    size: TuningSize | None = None,
    rows: int = 64,
    device: torch.device | str = "cpu",
    controls: Controls,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
    ranks: Ranks = SINGLE_PROCESS,
) -> dict[str, Tuned]:
    """The best rule of each kind. All kinds of one heat are played side by side."""
    size = size or TuningSize()
    contexts = suite.training
    how: dict[str, Any] = {"horizon": controls.horizon, "device": device, "ranks": ranks}
    ground = Playground(rows, test=False, **how)
    field = {kind: candidates_of(kind, atlas, suite, size.candidates) for kind in kinds}
    scores: dict[str, list[Tensor]] = {}
    for heat, seeds in enumerate((size.seeds, size.final_seeds)):
        first = TUNING_SEED + heat * size.seeds
        cases = [Case(each, first + number) for number in range(seeds) for each in contexts]
        specs = [spec for kind in kinds for spec in field[kind]]
        found = judged(ground, [make_controller(spec) for spec in specs], cases, controls, tell)
        for spec, row in zip(specs, found, strict=True):
            scores.setdefault(spec, []).append(row)
        ranked = {spec: float(torch.cat(parts).mean()) for spec, parts in scores.items()}
        log = {kind: [(s, ranked[s]) for s in scores if s.startswith(kind)] for kind in kinds}
        field = {
            kind: sorted(field[kind], key=lambda spec: -ranked[spec])[: size.finalists]
            for kind in kinds
        }
    spent = {spec: sum(len(part) for part in parts) for spec, parts in scores.items()}
    return {
        kind: Tuned(
            field[kind][0],
            ranked[field[kind][0]],
            size.episodes(len(contexts)),
            tuple((spec, score, spent[spec]) for spec, score in log[kind]),
        )
        for kind in kinds
    }


def judged(
    ground: Playground,
    controllers: Sequence[Controller],
    cases: Sequence[Case],
    controls: Controls,
    tell: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Tensor:
    """[A, C * K]: net gain / scale of every controller on every case, on validation data."""
    controls.require(cases, ground.ranks)
    jobs = [Job(controller, case) for controller in controllers for case in cases]
    played = ground.play_all(
        jobs, progress=lambda done, total: tell("tuning rules, episodes", done, total)
    )
    scores = controls.scores([job.case for job in jobs], played, DEFAULT_RENT)
    return scores.view(len(controllers), len(cases))
