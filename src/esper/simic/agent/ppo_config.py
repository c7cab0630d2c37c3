"""Settings of the learner, without torch, so that the command line can show them at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from esper.leyline import AgreementError, constants
from esper.leyline.errors import require_known
from esper.leyline.settings import (
    SHARE,
    Count,
    Finite,
    NotNegative,
    Positive,
    Share,
    require,
    require_settings,
)

HeadAverage = Literal["relevant", "all"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of the learner; saved with every checkpoint."""

    gamma: Share = constants.DEFAULT_GAMMA
    gae_lambda: Share = constants.DEFAULT_GAE_LAMBDA
    clip_ratio: Positive = constants.DEFAULT_CLIP_RATIO
    value_clip: Positive = constants.DEFAULT_VALUE_CLIP  # in units of the running return scale
    value_coef: NotNegative = constants.DEFAULT_VALUE_COEF
    value_weight_decay: NotNegative = constants.DEFAULT_VALUE_WEIGHT_DECAY
    entropy_coef: Finite = constants.DEFAULT_ENTROPY_COEF  # divided among the heads
    entropy_targets: Mapping[str, float] = field(default_factory=dict)  # by head, 0 to 1
    learning_rate: Positive = constants.DEFAULT_LEARNING_RATE
    adam_eps: Positive = constants.DEFAULT_ADAM_EPS
    max_grad_norm: Positive = constants.DEFAULT_MAX_GRAD_NORM
    target_kl: Positive | None = constants.DEFAULT_TARGET_KL
    epochs: Count = constants.DEFAULT_PPO_EPOCHS
    minibatches: Count = constants.DEFAULT_MINIBATCHES  # per epoch, each of whole sequences
    sequence: Count | None = None  # steps of a sequence that is learned from; None: whole rollouts
    head_average: HeadAverage = "relevant"  # steps a head's loss is averaged over
    normalize_observations: bool = True
    bf16: bool = False  # autocast
    compile_backend: str | None = None  # of torch.compile; None runs eagerly
    compile_mode: CompileMode = "default"  # of that backend, as torch.compile names them
    strict: bool = False  # raise if stored and recomputed log-probs differ; else it is a metric

    def __post_init__(self) -> None:
        require_settings(self, "The learner's setting", error=AgreementError)
        for head, target in self.entropy_targets.items():
            require(f"The entropy target of {head!r}", target, SHARE, error=AgreementError)
        require_known("head average", self.head_average, get_args(HeadAverage))
        require_known("compile mode", self.compile_mode, get_args(CompileMode))
        if self.compile_mode != "default" and self.compile_backend is None:
            raise AgreementError(
                "A compile mode is of a compile backend",
                given=f"mode {self.compile_mode!r} and no backend",
                fix="set compile_backend as well, as to 'inductor'",
            )
