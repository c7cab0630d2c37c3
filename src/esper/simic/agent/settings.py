"""Settings of the learner, without torch, so that the command line can show them at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
    strict: bool = False  # raise if stored and recomputed log-probs differ; else it is a metric

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
