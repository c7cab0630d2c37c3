"""A one-shot bandit: it looks at the first epochs, chooses one arm of the atlas, and keeps to it.

What can be known without a memory and without a second decision. It has the atlas to learn from:
what every arm was worth, by validation data, in every case whose first epochs it is shown.

Shapes: `P` cases, `F` features, `A` arms and waiting, `N` rows.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.garden import Case, Job, Playground
from esper.garden.atlas import FIRST_ATLAS_SEED, Atlas
from esper.garden.episodes import EPOCHS_ALONE
from esper.leyline.legality import Actions, Legality
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.schedules import Schedule, follow, plans_of
from esper.tamiyo.features import signals_to_features
from esper.tamiyo.normalization import GARDEN_VARIANCE_FLOOR

Predict = Callable[[Tensor], Tensor]  # features [N, F] -> worth [N, A]
Fit = Callable[[Tensor, Tensor], Predict]

RIDGES = (1.0, 10.0, 100.0, 1000.0)
WIDTHS = (0.5, 1.0, 2.0, 4.0)  # of the kernel, in units of the median distance to a neighbour


@dataclass(frozen=True)
class _Rule:
    """A way to predict, by name."""

    name: str
    fit: Fit


def _ridge(strength: float) -> Fit:
    def fit(seen: Tensor, worth: Tensor) -> Predict:
        mean = worth.mean(0)
        gram = seen @ seen.T + strength * torch.eye(len(seen), dtype=seen.dtype)
        weights = torch.linalg.solve(gram, worth - mean)
        return lambda new: mean + (new @ seen.T) @ weights

    return fit


def _kernel(width: float) -> Fit:
    def fit(seen: Tensor, worth: Tensor) -> Predict:
        near = torch.cdist(seen, seen).fill_diagonal_(torch.inf).amin(1).median()

        def predict(new: Tensor) -> Tensor:
            logits = -(torch.cdist(new, seen) / (width * near)).square()
            return logits.softmax(1) @ worth

        return predict

    return fit


RULES = (
    *(_Rule(f"ridge {strength:g}", _ridge(strength)) for strength in RIDGES),
    *(_Rule(f"kernel {width:g}", _kernel(width)) for width in WIDTHS),
)


class Bandit:
    """Decides once, after the epochs in which every host is alone."""

    name = "bandit"

    def __init__(
        self, predict: Predict, schedules: Sequence[Schedule], mean: Tensor, scale: Tensor
    ) -> None:
        self._predict, self.schedules = predict, tuple(schedules)
        self._mean, self._scale = mean, scale
        self._choice = torch.zeros(0, dtype=torch.int64)  # [N]

    @property
    def fingerprint(self) -> str:
        """From what it predicts for a few made-up observations: another fit has another one."""
        chance = torch.Generator().manual_seed(0)
        seen = torch.randn(64, len(self._mean), generator=chance, dtype=self._mean.dtype)
        worth = self._predict(seen).float().numpy().tobytes()
        numbers = torch.stack([self._mean, self._scale]).float().numpy().tobytes()
        found = hashlib.blake2b(repr(self.schedules).encode() + numbers + worth, digest_size=6)
        return found.hexdigest()

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        if len(self._choice) != len(signals) or bool(starts.all()):
            self._choice = torch.zeros(len(signals), dtype=torch.int64)  # waiting
        now = signals.lifecycle.epoch == EPOCHS_ALONE
        if bool(now.any()):
            seen = (signals_to_features(signals).double() - self._mean) * self._scale
            self._choice = torch.where(now, self._predict(seen).argmax(1), self._choice)
        numbers, row = self._choice.unique(return_inverse=True)
        chosen = tuple(self.schedules[number] for number in numbers.tolist())
        return follow(plans_of(chosen, signals.catalogue).rows(row), signals, legality)


def fit_bandit(
    atlas: Atlas, *, rows: int = 64, device: torch.device | str = "cpu"
) -> tuple[Bandit, dict[str, float]]:
    """The bandit, and what each way to predict was worth on seeds it was not fitted on."""
    seeds = atlas.gain.shape[2]
    cases = [
        Case(context, FIRST_ATLAS_SEED + number)
        for context in atlas.contexts
        for number in range(seeds)
    ]
    raw = first_observations(atlas, cases, rows, device).double()
    mean = raw.mean(0)
    scale = raw.var(0, correction=0).clamp(min=GARDEN_VARIANCE_FLOOR).rsqrt()
    seen = (raw - mean) * scale
    scales = torch.tensor([context.scale for context in atlas.contexts], dtype=torch.float64)
    worth = (atlas.judged() / scales[:, None, None]).permute(0, 2, 1).flatten(0, 1)  # [P, arms]
    worth = torch.cat([torch.zeros(len(worth), 1, dtype=worth.dtype), worth], 1)
    fold = torch.arange(len(cases)) % seeds
    log = {rule.name: _on_other_seeds(rule.fit, seen, worth, fold) for rule in RULES}
    best = max(RULES, key=lambda rule: log[rule.name])
    schedules: list[Schedule] = [(), *((arm,) for arm in atlas.arms)]
    return Bandit(best.fit(seen, worth), schedules, mean, scale), log


def _on_other_seeds(fit: Fit, seen: Tensor, worth: Tensor, fold: Tensor) -> float:
    """Mean worth of what is chosen for the cases of a seed after fitting on the other seeds."""
    gained = torch.zeros(len(seen), dtype=worth.dtype)
    for number in fold.unique().tolist():
        out = fold == number
        chosen = fit(seen[~out], worth[~out])(seen[out]).argmax(1, keepdim=True)
        gained[out] = worth[out].gather(1, chosen)[:, 0]
    return float(gained.mean())


class _Looker:
    """Waits, and keeps what it sees when something may first be planted."""

    name = "looker"

    def __init__(self) -> None:
        self.seen = torch.zeros(0)  # [N, F]

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        if bool((signals.lifecycle.epoch == EPOCHS_ALONE).all()):
            self.seen = signals_to_features(signals)
        return Actions.of(legality.space, len(signals))


def first_observations(
    atlas: Atlas, cases: Sequence[Case], rows: int, device: torch.device | str
) -> Tensor:
    """[P, F]: what is seen of every case when something may first be planted."""
    looker = _Looker()
    found: dict[int, Tensor] = {}
    ground = Playground(rows, device=device, test=False)
    for places, _ in ground.play([Job(looker, case) for case in cases], epochs=EPOCHS_ALONE + 1):
        found.update(zip(places, looker.seen, strict=True))
    return torch.stack([found[place] for place in range(len(cases))])
