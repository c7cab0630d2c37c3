"""Synthetic episodes for rewards: random ones, and scripts that are good, idle or out to cheat."""

import itertools
from dataclasses import dataclass, replace

import hypothesis.strategies as st
import torch
from torch import Tensor

from esper.garden.episodes import Ledger
from esper.garden.reward_settings import RewardConfig
from esper.garden.rewards import RewardState, RewardTerms, rewards
from esper.leyline import Lifecycle, SeedStage
from esper.leyline.constants import DEFAULT_RENT

N, S = 3, 3
NEVER = -1
_S = SeedStage


@dataclass(frozen=True)
class Episode:
    """What happened after each decision, [N, T] each; a rollback at an epoch or NEVER."""

    committed: Tensor
    current: Tensor
    control: Tensor
    share: Tensor
    decided: Tensor
    stage: Tensor  # [N, T, S]
    rolled_back_at: Tensor  # [N]
    horizon: Tensor  # [N]

    def states(self) -> list[RewardState]:
        hosts, epochs, slots = self.stage.shape
        life, horizon = Lifecycle.dormant(hosts, slots), int(self.horizon.max())
        ledger = Ledger(hosts, horizon)
        control = torch.zeros(hosts, horizon, dtype=torch.float64)
        control[:, :epochs] = self.control
        states = [RewardState.of(ledger, life, control)]
        for t in range(epochs):
            active, failed = ~states[-1].ended, self.rolled_back_at == t
            decided = self.decided[:, t] & active
            ledger.write(
                torch.full((hosts,), t),
                active=active,
                decided=decided,
                failed=failed,
                added_share=self.share[:, t],
                committed=self.committed[:, t],
                current=self.current[:, t],
            )
            # A rollback puts the lifecycle back, the count of its decisions with it.
            made = life.interventions + (decided & ~failed)
            life = replace(life, stage=self.stage[:, t], interventions=made)
            states.append(RewardState.of(ledger, life, control))
        return states

    def net_score(self, rent: float = DEFAULT_RENT) -> Tensor:
        """[N]: the mean gain of the last three epochs, less the rent for what was added."""
        gains = (self.committed - self.control)[:, -3:].mean(1)
        return gains - rent * self.share.double().sum(1) / self.horizon

    def terms(self, config: RewardConfig, scale: Tensor | None = None) -> list[RewardTerms]:
        scale = torch.ones(len(self.horizon)) if scale is None else scale
        states = self.states()
        return [rewards(*pair, scale, config) for pair in itertools.pairwise(states)]


def returns(terms: list[RewardTerms], gamma: float = 1.0, name: str | None = None) -> Tensor:
    """[N]: the discounted sum of the reward, or of one of its terms."""
    steps = [each.total if name is None else each[name] for each in terms]
    return sum((gamma**t * step for t, step in enumerate(steps)), torch.zeros(len(steps[0])))


def quiet(epochs: int, hosts: int = 1, level: float = 50.0) -> Episode:
    """Never grow: the network and its control are the same."""
    scores = level + torch.arange(epochs, dtype=torch.float64).expand(hosts, epochs)
    return Episode(
        committed=scores,
        current=scores,
        control=scores,
        share=torch.zeros(hosts, epochs),
        decided=torch.zeros(hosts, epochs, dtype=torch.bool),
        stage=torch.full((hosts, epochs, S), int(_S.DORMANT)),
        rolled_back_at=torch.full((hosts,), NEVER),
        horizon=torch.full((hosts,), epochs),
    )


@st.composite
def episodes(draw: st.DrawFn, rollbacks: bool = True) -> Episode:
    epochs = draw(st.integers(1, 12))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=noise, dtype=torch.float64)

    at = torch.full((N,), NEVER)
    if rollbacks and draw(st.booleans()):
        at = torch.randint(NEVER, epochs, (N,), generator=noise)
    return Episode(
        committed=100 * uniform(N, epochs),
        current=100 * uniform(N, epochs),
        control=100 * uniform(N, epochs),
        share=3 * uniform(N, epochs),
        decided=uniform(N, epochs) < 0.5,
        stage=torch.randint(len(_S), (N, epochs, S), generator=noise),
        rolled_back_at=at,
        horizon=torch.full((N,), epochs),
    )


def spam(epochs: int) -> Episode:
    """Plant, prune, plant, ...: every second epoch a seed of a tenth of the host exists."""
    planted = torch.arange(epochs) % 2 == 0
    stage = torch.full((1, epochs, S), int(_S.DORMANT))
    stage[0, planted, 0] = int(_S.TRAINING)
    return replace(
        quiet(epochs),
        share=torch.where(planted, 0.1, 0.0)[None],
        decided=torch.ones(1, epochs, dtype=torch.bool),
        stage=stage,
    )


def toggle(epochs: int) -> Episode:
    """A useful seed goes in and out all the time and is never made permanent."""
    on = torch.arange(epochs) % 4 < 2
    stage = torch.full((1, epochs, S), int(_S.PRUNED))
    stage[0, on, 0] = int(_S.HOLDING)
    base = quiet(epochs)
    return replace(
        base,
        current=base.control + torch.where(on, 20.0, 0.0),
        share=torch.full((1, epochs), 0.1),
        decided=(torch.arange(epochs) % 2 == 0)[None],
        stage=stage,
    )


def claim(epochs: int) -> Episode:
    """A seed that does nothing, planted while the host itself learns fast."""
    base = quiet(epochs)
    fast = base.control + torch.linspace(0, 40, epochs)
    stage = base.stage.clone()
    stage[0, :2, 0] = int(_S.HOLDING)
    stage[0, 2:, 0] = int(_S.FOSSILIZED)
    decided = base.decided.clone()
    decided[0, [0, 2]] = True
    return replace(
        base,
        committed=fast,
        current=fast,
        control=fast,
        share=torch.full((1, epochs), 0.1),
        decided=decided,
        stage=stage,
    )


def grown(gain: float, at: int, epochs: int = 25, share: float = 0.2) -> Episode:
    """A seed planted at an epoch, blended in at once, fossilized two epochs later."""
    base = quiet(epochs)
    time = torch.arange(epochs)
    stage = base.stage.clone()
    stage[0, time >= at, 0] = int(_S.HOLDING)
    stage[0, time >= at + 2, 0] = int(_S.FOSSILIZED)
    decided = ((time == at) | (time == at + 2))[None]
    return replace(
        base,
        committed=base.control + torch.where(time >= at + 2, gain, 0.0),
        current=base.control + torch.where(time >= at, gain, 0.0),
        share=torch.where(time >= at, share, 0.0)[None],
        decided=decided,
        stage=stage,
    )
