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
EntropySteps = Literal["relevant", "legal"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of the learner; every checkpoint contains them."""

    gamma: Share = constants.DEFAULT_GAMMA
    """discount factor"""
    gae_lambda: Share = constants.DEFAULT_GAE_LAMBDA
    """lambda of generalised advantage estimation"""
    clip_ratio: Positive = constants.DEFAULT_CLIP_RATIO
    """clip range of the policy ratio"""
    value_clip: Positive = constants.DEFAULT_VALUE_CLIP
    """clip range of value changes, in units of the return scale"""
    value_coef: NotNegative = constants.DEFAULT_VALUE_COEF
    """weight of the value loss"""
    value_weight_decay: NotNegative = constants.DEFAULT_VALUE_WEIGHT_DECAY
    """weight decay of the value head"""
    entropy_coef: Finite = constants.DEFAULT_ENTROPY_COEF
    """weight of the entropy bonus, divided among the heads"""
    entropy_targets: Mapping[str, float] = field(default_factory=dict)
    """by head, entropy above which there is no bonus, 0 to 1"""
    lr: Positive = constants.DEFAULT_LEARNING_RATE
    """learning rate of AdamW"""
    adam_eps: Positive = constants.DEFAULT_ADAM_EPSILON
    """epsilon of AdamW"""
    max_grad_norm: Positive = constants.DEFAULT_MAX_GRAD_NORM
    """norm to which gradients are clipped"""
    target_kl: Positive | None = constants.DEFAULT_TARGET_KL
    """KL divergence near which an update ends; none disables this"""
    epochs: Count = constants.DEFAULT_PPO_EPOCHS
    """passes over each rollout"""
    minibatches: Count = constants.DEFAULT_MINIBATCHES
    """minibatches per epoch, each of whole sequences"""
    accumulation_steps: Count = constants.DEFAULT_ACCUMULATION_STEPS
    """micro-batches of a minibatch, to save memory"""
    sequence_length: Count | None = None
    """steps of a training sequence; none: the whole rollout"""
    head_average: HeadAverage = "relevant"
    """steps over which the loss of a head is averaged"""
    entropy_steps: EntropySteps = "legal"
    """steps in which the entropy of a head counts: a legal op uses the head, or it is relevant"""
    normalize_observations: bool = True
    """update the running mean and variance of observations"""
    bf16: bool = False
    """act and learn under bf16 autocast"""
    compile_network: bool = False
    """compile the network with torch.compile"""
    compile_backend: str = "inductor"
    """backend of torch.compile"""
    compile_mode: CompileMode = "default"
    """mode of torch.compile"""
    strict: bool = False
    """raise an error if stored and recomputed log-probabilities differ"""

    def __post_init__(self) -> None:
        require_settings(self, "The learner's setting", error=AgreementError)
        for head, target in self.entropy_targets.items():
            require(f"The entropy target of {head!r}", target, SHARE, error=AgreementError)
        require_known("head average", self.head_average, get_args(HeadAverage))
        require_known("kind of entropy steps", self.entropy_steps, get_args(EntropySteps))
        require_known("compile mode", self.compile_mode, get_args(CompileMode))
        if self.compile_mode != "default" and not self.compile_network:
            raise AgreementError(
                "A compile mode needs a compiled network",
                given=f"mode {self.compile_mode!r} and compile_network false",
                fix="set compile_network to true as well",
            )
