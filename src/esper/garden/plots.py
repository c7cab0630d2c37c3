"""Plots side by side: populations of different hosts in one rollout, drawn anew every round.

A plot's population has its players and, behind them, every case once more: never grown, the control
that the case's players are paired with. What rows see and may do has the form that a layout of
tokens gives it, so those of all plots stand in one batch, whatever their hosts. Episodes differ in
length: a row that is through idles until the round's end.

Shapes: `N` rows of all plots, `M` of one plot's players, `F` features, `H` heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from esper.garden.episodes import Episodes
from esper.garden.greenhouse import Greenhouse, Plot
from esper.garden.playing import idle_where
from esper.garden.reward_settings import RewardConfig
from esper.garden.rewards import RewardState, rewards
from esper.leyline import Actions, Legality, LifecycleOp
from esper.leyline.errors import AgreementError
from esper.leyline.results import Outcome
from esper.leyline.shadows import AuditionPlan
from esper.tamiyo.controllers.auditioning import ATTENTIVE, Audition
from esper.tamiyo.token_layout import TokenLayout

LAYOUT = TokenLayout(slots=8, blueprints=7)  # room for all that is drawn


class Bed:
    """One plot's population: so many `players` of each of its cases, and the cases' controls."""

    def __init__(
        self,
        plot: Plot,
        players: int,
        *,
        reward: RewardConfig | None = None,
        device: torch.device | str = "cpu",
        deterministic: bool = False,
        test: bool = False,
    ) -> None:
        """`test`: as for episodes."""
        self.plot, self.reward = plot, replace(reward or RewardConfig(), rent=plot.rent)
        known = torch.arange(len(plot.contexts))
        of = torch.cat([known.repeat_interleave(players), known])  # of rows: their cases
        self.players = torch.arange(players * len(known))  # [M] rows
        self._control = of + len(self.players)  # the row of each one's
        self.cases = [plot.cases[place] for place in of.tolist()]
        self.episodes = Episodes(
            plot.contexts,
            len(of),
            horizon=plot.horizon,
            rent=plot.rent,
            test=test,
            device=device,
            config=plot.population(deterministic=deterministic),
        )
        self.episodes.begin(torch.arange(len(of)), self.cases)
        self._scale = torch.tensor([case.context.scale for case in self.cases]).double()
        self.rule, self.state = Audition(ATTENTIVE), self._owed()
        self._look(torch.ones_like(self.players, dtype=torch.bool))

    @property
    def over(self) -> bool:
        return bool((self.episodes.population.lifecycle.epoch >= self.plot.horizon).all())

    def step(self, actions: Tensor, deaf: Tensor | None = None) -> Outcome:
        """One decision [M, H] and one epoch of every player, and of the shadows that the rule
        wants to hear, but of those who are `deaf` [M] bool; nothing happens any more once the plot
        is over."""
        episodes, count = self.episodes, len(self.players)
        nobody = torch.zeros(count, dtype=torch.bool)
        if self.over:
            return Outcome(self.observations, nobody.float(), nobody, nobody, active=nobody)
        space, extra = episodes.population.space, len(self.cases) - count
        own = pad(LAYOUT.narrow(actions, space).values, (0, 0, 0, extra))
        chosen = idle_where(~episodes.running, Actions(space, own))
        self.rule.overruled(self.advice, Actions(space, chosen.values[:count]))
        where, share = self.rule.audition(*self.seen)  # knows what was done, as in use
        where = where if deaf is None else where & ~deaf[:, None, None]
        plan = AuditionPlan(pad(where, (0, 0, 0, 0, 0, extra)), pad(share, (0, extra)))
        epoch = episodes.advance(chosen, plan)
        before, self.state = self.state, self._owed()
        terms = rewards(before, self.state, self._scale, self.reward)
        self._look(nobody)
        told = (terms.total.float(), epoch.ended, epoch.active)
        paid, ended, active = (each[:count] for each in told)
        return Outcome(self.observations, paid, ended, nobody, active=active)

    def _owed(self) -> RewardState:
        ledger, life = self.episodes.ledger, self.episodes.population.lifecycle
        return RewardState.of(ledger, life, ledger.committed[self._control])

    def _look(self, starts: Tensor) -> None:
        """What players see and may do now, and what the rule would do."""
        signals = self.episodes.signals().rows(self.players)
        legal = self.episodes.legal().rows(self.players)
        self.advice, self.seen = self.rule.act(signals, legal, starts), (signals, legal)
        self.observations = LAYOUT.observe(signals, self.advice)
        self.legal = LAYOUT.widen(legal)
        if self.over:
            self.legal.masks["op"][:] = torch.arange(len(LifecycleOp)) == LifecycleOp.WAIT


class Plots:
    """A vectorised world: the next plots of a greenhouse in every round."""

    def __init__(
        self,
        greenhouse: Greenhouse,
        envs: int,
        *,
        plots: int = 16,
        players: int = 4,
        place: int = 0,
        of: int = 1,
        **how: Any,
    ) -> None:
        """`envs` rows in so many plots, `players` of every case; it is the `place`-th `of` so many
        such worlds that share the greenhouse's plots of a round. `how` is that of beds.
        """
        self.worlds, rest = divmod(envs, plots * players)  # of every plot
        if rest or not self.worlds:
            raise AgreementError(
                "Every plot needs as many rows as the others, and every case as many players",
                given=f"{envs} rows in {plots} plots with {players} players of a case",
                valid=f"a multiple of {plots * players} rows",
            )
        self.greenhouse = greenhouse
        self.num_envs = envs
        self.players = players
        self.how = how
        self.action_space = LAYOUT.space
        self.state_dim = LAYOUT.state_dim
        self.horizon = greenhouse.longest  # steps of a round
        self._plots, self._place, self._of = plots, place, of
        self._round, self._step = -1, 0
        self.beds: list[Bed] = []

    def reset(self) -> Tensor:
        """Draw the plots of the next round; returns first observations [N, F]."""
        self.last = [(bed.plot.contexts[0].host, bed.state.lifecycle.stage) for bed in self.beds]
        self._round, self._step, self.beds = self._round + 1, 0, []
        first = (self._round * self._of + self._place) * self._plots
        for number in range(first, first + self._plots):
            plot = self.greenhouse.plot(number, self.worlds)
            self.beds.append(Bed(plot, self.players, **self.how))
        return torch.cat([bed.observations for bed in self.beds])

    def legal(self) -> Legality:
        parts = [bed.legal.masks for bed in self.beds]
        masks = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return Legality(self.action_space, self.num_envs, masks)

    def step(self, actions: Tensor) -> Outcome:
        """One decision [N, H] and one epoch of every row that is not through."""
        chosen = actions.cpu().split([len(bed.players) for bed in self.beds])
        found = [bed.step(own) for bed, own in zip(self.beds, chosen, strict=True)]
        whole = {name: torch.cat([getattr(each, name) for each in found]) for name in _PARTS}
        self._step += 1
        if self._step == self.horizon:
            whole["observations"] = self.reset()
        return Outcome(**whole)

    def state_dict(self) -> dict[str, Tensor]:
        """Which round it is: between rounds that is all there is."""
        assert not self._step, "plots are saved between rounds"
        return {"number": torch.full((self.num_envs,), self._round)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> Tensor:
        """Go on from there; returns the observations [N, F] to go on with."""
        self._round = int(state["number"][0]) - 1
        return self.reset()


_PARTS = ("observations", "rewards", "terminals", "truncations", "active")
