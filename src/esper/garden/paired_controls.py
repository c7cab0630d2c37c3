"""Paired controls: the same case, never grown. Growth is credited against them.

Shapes: `N` cases, `T` epochs of an episode.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from esper.garden.cases import Case
from esper.garden.contexts import by_shape
from esper.garden.episodes import Episodes
from esper.leyline.constants import DEFAULT_EPISODE_LENGTH, SCORED_EPOCHS
from esper.leyline.errors import AgreementError
from esper.leyline.legality import Actions
from esper.tolaria.population_config import PopulationConfig

ROWS_AT_ONCE = {"cpu": 64, "cuda": 1024}


class Controls:
    """Scores of never-grown cases, measured once each."""

    def __init__(
        self,
        *,
        horizon: int = DEFAULT_EPISODE_LENGTH,
        device: torch.device | str = "cpu",
        config: PopulationConfig | None = None,
    ) -> None:
        self.horizon, self.device, self.config = horizon, torch.device(device), config
        self._validation: dict[tuple[str, int], Tensor] = {}  # [T] each
        self._test: dict[tuple[str, int], float] = {}

    def __len__(self) -> int:
        return len(self._validation)

    def missing(self, cases: Sequence[Case]) -> list[Case]:
        """Those that have not been measured, each once."""
        unknown = {_key(case): case for case in cases if _key(case) not in self._validation}
        return list(unknown.values())

    def missing_tests(self, cases: Sequence[Case]) -> list[Case]:
        """Those whose test score is not known, each once."""
        unknown = {_key(case): case for case in cases if _key(case) not in self._test}
        return list(unknown.values())

    def learn_test(self, key: str, seed: int, test: float) -> None:
        """The test score of a control as it was measured before, unless it is known here."""
        self._test.setdefault((key, seed), test)

    def require(self, cases: Sequence[Case]) -> None:
        """Measure what is missing."""
        for batch in self.batches(cases):
            self._run(batch)

    def batches(self, cases: Sequence[Case]) -> Iterator[list[Case]]:
        """The missing cases in groups that train together."""
        missing = self.missing(cases)
        most = ROWS_AT_ONCE[self.device.type]
        for contexts in by_shape([case.context for case in missing]):
            keys = {context.key for context in contexts}
            alike = [case for case in missing if case.context.key in keys]
            for first in range(0, len(alike), most):
                yield alike[first : first + most]

    def _run(self, cases: Sequence[Case]) -> None:
        contexts = list({case.context.key: case.context for case in cases}.values())
        episodes = Episodes(
            contexts,
            len(cases),
            horizon=self.horizon,
            device=self.device,
            config=self.config,
            test=True,
            attribute=False,
        )
        episodes.begin(torch.arange(len(cases)), cases)
        wait = Actions.of(episodes.population.space, len(cases))
        for _ in range(self.horizon):
            episodes.advance(wait)
        tests = episodes.ledger.test[:, -SCORED_EPOCHS:].mean(1)
        self.learn(cases, episodes.ledger.committed, tests)

    def learn(self, cases: Sequence[Case], curves: Tensor, tests: Tensor) -> None:
        """Never-grown cases that were played elsewhere: validation [N, T] and test scores [N]."""
        for case, curve, test in zip(cases, curves, tests.tolist(), strict=True):
            self._validation[_key(case)] = curve.clone()
            self._test[_key(case)] = test

    def validation(self, cases: Sequence[Case]) -> Tensor:
        """[N, T] percent, epoch by epoch."""
        return torch.stack([self._validation[_key(case)] for case in cases])

    def test(self, cases: Sequence[Case]) -> Tensor:
        """[N] percent, mean of the last epochs."""
        return torch.tensor([self._test[_key(case)] for case in cases], dtype=torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that was measured, for checkpoints."""
        return {
            f"{key}.{seed}": torch.cat([curve, torch.tensor([self._test[key, seed]]).double()])
            for (key, seed), curve in self._validation.items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, values in state.items():
            key, _, seed = name.partition(".")
            if values.shape != (self.horizon + 1,):
                raise AgreementError(
                    "Stored controls are of episodes of another length",
                    given=f"{values.numel() - 1} epochs",
                    valid=f"{self.horizon} epochs",
                )
            self._validation[key, int(seed)] = values[:-1].clone()
            self._test[key, int(seed)] = float(values[-1])


def _key(case: Case) -> tuple[str, int]:
    return case.context.key, case.seed
