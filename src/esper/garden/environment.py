"""The garden: N environments that train, decide and are rewarded, one host epoch a step.

Row i plays the cases that its draw gives it, whatever N is. All rows start together and have the
same horizon, so rollouts stay aligned with episodes; a row that was rolled back idles until then.
With `in_place` every row starts anew as soon as its own episode is over.

Shapes: `N` rows, `F` features, `H` heads, `T` epochs of an episode.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from esper.garden.cases import Case, Deal
from esper.garden.episodes import Episodes, Epoch, World
from esper.garden.playing import Controls, idle_where
from esper.garden.reward_settings import RewardConfig
from esper.garden.rewards import RewardState, RewardTerms, rewards
from esper.leyline import Actions, AgreementError, Legality, Lifecycle
from esper.leyline.results import Outcome
from esper.leyline.shadows import AuditionPlan
from esper.leyline.signals import Signals
from esper.leyline.slots import require_form
from esper.tamiyo.features import FeatureTable, signals_to_features


@dataclass(frozen=True, kw_only=True)
class Transition(Outcome):
    """What a step did, for learner, metrics and log alike."""

    cases: tuple[Case, ...]  # of the rows while it was taken
    actions: Actions  # as carried out: rows that idle wait
    terms: RewardTerms  # sum to the rewards
    before: RewardState  # rewards are functions of these two
    after: RewardState
    scale: Tensor  # [N] points that count as 1
    epoch: Epoch


class Garden:
    """A vectorised world of growing hosts."""

    def __init__(
        self,
        draw: Deal,
        envs: int,
        *,
        controls: Controls | None = None,
        reward: RewardConfig | None = None,
        in_place: bool = False,
        test: bool = False,
        **world: Unpack[World],
    ) -> None:
        """`test`: score the last epochs on test data too, for reports; nothing is told of it.
        The world is that of the controls, where they are given."""
        self.draw, self.reward, self.in_place = draw, reward or RewardConfig(), in_place
        if controls is None:  # empty ones are false, and are to be filled and shared
            controls = Controls(**world)
        elif world:
            raise AgreementError("A garden is in the world of its controls", given=list(world))
        self.controls = controls
        self.episodes = Episodes(draw.contexts, envs, test=test, **controls.world)
        self.num_envs = envs
        self.horizon = self.episodes.horizon
        self.population = self.episodes.population  # the hosts themselves, for whoever inspects
        self.catalogue = self.population.catalogue
        self.action_space = self.population.space
        self.table = FeatureTable.of(self.catalogue)
        self.state_dim = self.table.size
        self.reward.check_budget(int(self.population.budget.max()) / self.catalogue.host_params)
        self._number = torch.full((envs,), -1)  # of the episode that each row is in
        self._control = torch.zeros(envs, self.horizon, dtype=torch.float64)  # scores of controls
        self._scale = torch.ones(envs, dtype=torch.float64)  # never observed
        self._state = self._reward_state()

    @property
    def lifecycle(self) -> Lifecycle:
        """Where every row and every seed is."""
        return self.population.lifecycle

    @property
    def cases(self) -> tuple[Case, ...]:
        """What every row is playing."""
        return tuple(case for case in self.episodes.cases if case is not None)

    def reset(self, draw: Deal | None = None) -> Tensor:
        """Start the next episode of every row; returns first observations [N, F].

        Given another deal of the same contexts, its first episodes.
        """
        if draw is not None:
            self.draw = draw
            self._number.fill_(-1)
        self._begin(torch.arange(self.num_envs))
        return self.observations()

    def legal(self) -> Legality:
        return self.episodes.legal()

    def signals(self) -> Signals:
        return self.episodes.signals()

    def observations(self) -> Tensor:
        """[N, F] float32, where hosts are computed."""
        return signals_to_features(self.episodes.signals(deciding=False).to(self.population.device))

    def step(self, actions: Actions | Tensor, plan: AuditionPlan | None = None) -> Transition:
        """One decision and one epoch of every row, and of the shadows in `plan`."""
        if isinstance(actions, Tensor):
            actions = Actions(self.action_space, actions.cpu())
        chosen = idle_where(~self.episodes.running, actions)
        cases = self.cases
        epoch = self.episodes.advance(chosen, plan)
        before, self._state = self._state, self._reward_state()
        after, scale = self._state, self._scale.clone()
        terms = rewards(before, after, scale, self.reward)
        observations = final = self.observations()
        # A round lasts as long as an episode, also if every row was rolled back before.
        over = epoch.ended if self.in_place else self.lifecycle.epoch >= self.horizon
        if bool(over.any()):
            self._begin(over.nonzero()[:, 0])
            observations = self.observations()
        return Transition(
            observations=observations,
            rewards=terms.total.float(),
            terminals=epoch.ended,
            truncations=torch.zeros_like(epoch.ended),
            final_observations=final if self.in_place else None,
            active=epoch.active,
            cases=cases,
            actions=chosen,
            terms=terms,
            before=before,
            after=after,
            scale=scale,
            epoch=epoch,
        )

    def _begin(self, rows: Tensor) -> None:
        """Start the next episode of these rows."""
        self._number[rows] += 1
        numbered = zip(rows.tolist(), self._number[rows].tolist(), strict=True)
        cases = [self.draw(row, number) for row, number in numbered]
        self.controls.require(cases)
        self.episodes.begin(rows, cases)
        self._control[rows] = self.controls.validation(cases)
        scales = [case.context.scale for case in cases]
        self._scale[rows] = torch.tensor(scales, dtype=torch.float64)
        self._state = self._reward_state()

    def _reward_state(self) -> RewardState:
        return RewardState.of(self.episodes.ledger, self.lifecycle, self._control)

    def state_dict(self) -> dict[str, Tensor]:
        """Where every row is in its sequence of cases: between rounds that is all there is."""
        if bool((self.lifecycle.epoch > 0).any()):
            raise AgreementError(
                "A garden is saved between rounds",
                given="rows in the middle of an episode",
                valid="after reset() or after the step that ended all episodes",
            )
        return {"number": self._number.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Tensor:
        """Go on from there; returns the observations [N, F] to go on with."""
        what = "The saved garden has another number of rows"
        require_form(what, state["number"], self._number.shape)
        self._number = state["number"] - 1
        return self.reset()
