"""Typed results of the learner. Per-head results are keyed by the heads of the action space."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, TypeVar

from torch import Tensor

from esper.leyline.errors import AgreementError

V = TypeVar("V")


class PerHead(dict[str, V]):
    """A value for each head, in table order: exactly the heads it was declared with."""

    def __init__(self, heads: tuple[str, ...], values: Mapping[str, V]) -> None:
        if set(values) != set(heads):
            raise AgreementError(
                "Per-head values do not match the heads",
                given=", ".join(values),
                valid=", ".join(heads),
            )
        super().__init__({name: values[name] for name in heads})


PerHeadAdvantages = PerHead[Tensor]


@dataclass(frozen=True)
class HeadGradientNorms:
    """Gradient norm of every policy head and of the value head, before clipping."""

    heads: PerHead[float]
    value: float


class HeadUpdateMetrics(TypedDict):
    """What one update reports of one head."""

    loss: float
    entropy: float
    kl: float
    clip_fraction: float
    relevant_fraction: float
    ratio_min: float
    ratio_mean: float
    ratio_max: float


class PPOUpdateMetrics(TypedDict):
    """What one update reports."""

    policy_loss: float
    value_loss: float
    entropy: float
    kl: float
    explained_variance: float
    value_mean: float
    value_std: float
    return_mean: float
    return_std: float
    return_scale: float
    gradient_norm: float  # of all parameters together, before clipping
    gradient_norms: HeadGradientNorms
    learning_rate: float
    stored_log_prob_error: float  # the largest |ratio - 1| before the first step
    stored_log_prob_tolerance: float  # an error above this is an anomaly
    valid_steps: int
    optimizer_steps: int
    stopped_by_kl: bool
    peak_memory_bytes: int
    heads: Mapping[str, HeadUpdateMetrics]


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
    relevant: Tensor | None = None  # [E, H] bool: the heads that mattered, if the world can tell
