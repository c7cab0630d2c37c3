"""What the learner's parts hand to each other.

Shapes: `E` environments, `T` time, `F` state features, `H` heads, `A` actions of the largest head,
`L` layers, `D` hidden size, `R` rows of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from esper.leyline.constants import (
    DEFAULT_ADAM_EPS,
    DEFAULT_CLIP_RATIO,
    DEFAULT_ENTROPY_COEF,
    DEFAULT_GAE_LAMBDA,
    DEFAULT_GAMMA,
    DEFAULT_LEARNING_RATE,
    DEFAULT_MAX_GRAD_NORM,
    DEFAULT_MINIBATCHES,
    DEFAULT_PPO_EPOCHS,
    DEFAULT_TARGET_KL,
    DEFAULT_VALUE_CLIP,
    DEFAULT_VALUE_COEF,
    DEFAULT_VALUE_WEIGHT_DECAY,
)
from esper.leyline.errors import AgreementError
from esper.tamiyo.sequences import Hidden


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of the learner; saved with every checkpoint."""

    gamma: float = DEFAULT_GAMMA
    gae_lambda: float = DEFAULT_GAE_LAMBDA
    clip_ratio: float = DEFAULT_CLIP_RATIO
    value_clip: float = DEFAULT_VALUE_CLIP  # in units of the running return scale
    value_coef: float = DEFAULT_VALUE_COEF
    value_weight_decay: float = DEFAULT_VALUE_WEIGHT_DECAY
    entropy_coef: float = DEFAULT_ENTROPY_COEF  # divided among the heads
    entropy_targets: Mapping[str, float] = field(default_factory=dict)  # by head, 0 to 1
    learning_rate: float = DEFAULT_LEARNING_RATE
    adam_eps: float = DEFAULT_ADAM_EPS
    max_grad_norm: float = DEFAULT_MAX_GRAD_NORM
    target_kl: float | None = DEFAULT_TARGET_KL
    epochs: int = DEFAULT_PPO_EPOCHS
    minibatches: int = DEFAULT_MINIBATCHES  # per epoch, each of whole sequences
    head_average: Literal["relevant", "all"] = "relevant"  # steps a head's loss is averaged over
    normalize_observations: bool = True
    bf16: bool = False  # autocast
    compile_backend: str | None = None  # of torch.compile; None runs eagerly

    def __post_init__(self) -> None:
        limits = {
            "gamma": 0 <= self.gamma <= 1,
            "gae_lambda": 0 <= self.gae_lambda <= 1,
            "clip_ratio": self.clip_ratio > 0,
            "value_clip": self.value_clip > 0,
            "learning_rate": self.learning_rate > 0,
            "max_grad_norm": self.max_grad_norm > 0,
            "target_kl": self.target_kl is None or self.target_kl > 0,
            "epochs": self.epochs >= 1,
            "minibatches": self.minibatches >= 1,
            "head_average": self.head_average in ("relevant", "all"),
            "entropy_targets": all(0 <= target <= 1 for target in self.entropy_targets.values()),
        }
        for name, holds in limits.items():
            if not holds:
                raise AgreementError(
                    f"The learner's setting {name!r} is out of range", given=getattr(self, name)
                )


@dataclass(frozen=True)
class Decision:
    """What an agent decided for all environments, and all that is kept of it for learning."""

    states: Tensor  # [E, F]
    actions: Tensor  # [E, H] int64
    masks: Tensor  # [E, H, A] bool, resolved
    log_probs: Tensor  # [E, H]
    values: Tensor  # [E]
    hidden: Hidden  # entering the step


@dataclass(frozen=True)
class Outcome:
    """What came of a decision in every environment.

    Where an episode ended, `observations` already shows the next one's first state, and
    `final_observations` the true last state of the one that ended.
    """

    observations: Tensor  # [E, F]
    rewards: Tensor  # [E]
    terminals: Tensor  # [E] bool: over, nothing follows
    truncations: Tensor  # [E] bool: cut from outside, it would have gone on
    final_observations: Tensor | None = None  # [E, F], needed where something was truncated
    active: Tensor | None = None  # [E] bool; the others idle, and nothing is learned from them


@dataclass(frozen=True)
class SequenceBatch:
    """Whole sequences of experience. Padding is closed by `valid`: zero states, action 0."""

    states: Tensor  # [R, T, F]
    actions: Tensor  # [R, T, H]
    masks: Tensor  # [R, T, H, A]
    log_probs: Tensor  # [R, T, H], as they were during the rollout
    values: Tensor  # [R, T]
    advantages: Tensor  # [R, T]
    returns: Tensor  # [R, T]
    valid: Tensor  # [R, T] bool
    starts: Tensor  # [R, T] bool, always on the CPU: it decides the shape of the computation
    hidden: Hidden  # [L, R, D] each, entering the first step

    def rows(self, rows: Tensor) -> "SequenceBatch":
        """These sequences only; `rows` is on the CPU."""
        there = rows.to(self.states.device)
        return replace(
            self,
            states=self.states[there],
            actions=self.actions[there],
            masks=self.masks[there],
            log_probs=self.log_probs[there],
            values=self.values[there],
            advantages=self.advantages[there],
            returns=self.returns[there],
            valid=self.valid[there],
            starts=self.starts[rows],
            hidden=(self.hidden[0][:, there], self.hidden[1][:, there]),
        )
