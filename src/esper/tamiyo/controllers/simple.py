"""The two ends of knowing nothing: never grow, and any legal action.

Shapes: `N` environments, `H` heads, `A` actions of a head.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper.leyline.errors import EsperError
from esper.leyline.legality import Actions, Legality
from esper.leyline.ops import LifecycleOp
from esper.leyline.signals import Signals
from esper.tamiyo.controllers.proposals import draw
from esper.tamiyo.controllers.specs import OwnSettings


@dataclass(frozen=True, kw_only=True)
class NeverGrow(OwnSettings):
    """Waits: the small host as it is."""

    kind: ClassVar[str] = "never"

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        return Actions.of(legality.space, legality.hosts, op=LifecycleOp.WAIT)


@dataclass(frozen=True, kw_only=True)
class RandomLegal(OwnSettings):
    """Any legal action: first the op, then each other head among what is open to it."""

    kind: ClassVar[str] = "random"
    rate: float | None = None  # chance of not waiting; None: every legal op is equally likely

    def __post_init__(self) -> None:
        if self.rate is not None and not 0.0 <= self.rate <= 1.0:
            raise EsperError("The rate of controller 'random' is a chance", given=self.rate,
                             valid="from 0 to 1")  # fmt: skip

    def act(self, signals: Signals, legality: Legality, starts: Tensor) -> Actions:
        space = legality.space
        values = Actions.of(space, legality.hosts).values
        for head, name in enumerate(space.names):
            open_ = legality.mask(name, values)  # [N, A]
            weights = self._op_weights(open_) if head == 0 else open_
            values[:, head] = draw(weights, signals.draws[:, head])
        return Actions(space, values)

    def _op_weights(self, open_: Tensor) -> Tensor:
        """[N, ops]"""
        if self.rate is None:
            return open_
        waits = torch.arange(open_.shape[1]) == LifecycleOp.WAIT
        doing = (open_ & ~waits).double()
        choices = doing.sum(1, keepdim=True)
        weights = doing * self.rate / choices.clamp(min=1.0)
        weights[:, LifecycleOp.WAIT] = torch.where(choices[:, 0] > 0, 1.0 - self.rate, 1.0)
        return weights
