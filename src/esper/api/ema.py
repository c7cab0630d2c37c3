"""An exponential moving average of a growing host's weights, which grows along with it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper.api.growing_model import GrowingModel
from esper.kasmina.probe import Sample
from esper.leyline.errors import AgreementError, EsperError
from esper.leyline.settings import SHARE, require


class GrowingAverage:
    """Keeps an average of the weights of a host, seeds included::

        average = esper.ema(host, decay=0.999)
        ...
            optimizer.step()
            average.update()
        ...
        with average.applied():  # inside, the host has the averaged weights
            print(accuracy(host))
        plain = average.export()

    A parameter's average starts at the value that it has in the first update that meets it, and is
    dropped when its seed is pruned. Buffers, such as the statistics of batch normalisation, are the
    host's own at any time. Parameters of half precision are averaged in float32.
    """

    def __init__(self, host: GrowingModel, decay: float = 0.999) -> None:
        if not isinstance(host, GrowingModel):
            raise EsperError(
                "An average that grows along is made of a host",
                given=type(host).__name__,
                fix="pass what esper.wrap returned: average = esper.ema(host, decay)",
            )
        require("decay", decay, SHARE)
        self.host, self.decay = host, decay
        # By the parameter itself: another one may come to have its name.
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._applied = False

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average; call it after every step of the optimiser."""
        if self._applied:
            raise EsperError(
                "The average cannot be updated from itself",
                given="update() inside applied()",
                fix="train and update outside of it",
            )
        kept = self._present().items()  # of whole numbers there is no average
        known = {p: mean for p, mean in kept if mean.is_floating_point() or mean.is_complex()}
        self._kept = {
            p: known[p].to(p.device) if p in known else _wide(p.detach().clone())
            for p in self.host.parameters()
        }
        if known:
            averages = [self._kept[p] for p in known]
            torch._foreach_lerp_(averages, [_wide(p.detach()) for p in known], 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the host has the averaged weights; afterwards its own again, to the bit."""
        outer, averages = self._applied, self._present()
        own = {parameter: parameter.detach().clone() for parameter in averages}
        try:
            self._applied = True
            _put(averages)
            yield
        finally:
            self._applied = outer
            _put(own)

    def export(self, sample: Sample | None = None) -> nn.Module:
        """The committed network with averaged weights, as a plain module."""
        with self.applied():
            return self.host.export(sample)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, by the host's names of the parameters."""
        present = self._present()
        return {name: present[p] for name, p in self.host.named_parameters() if p in present}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there; the host has taken over its own state before."""
        parameters = dict(self.host.named_parameters())
        wrong = [
            name
            for name, average in state.items()
            if name not in parameters or parameters[name].shape != average.shape
        ]
        if wrong:
            raise AgreementError(
                "The average is of a network that has grown otherwise",
                given=", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else ""),
                fix="load the host's state first, as it was saved together with the average",
            )
        self._kept = {
            parameters[name]: _wide(average.to(parameters[name].device, copy=True))
            for name, average in state.items()
        }

    def _present(self) -> dict[nn.Parameter, Tensor]:
        """The averages of parameters that the host still has."""
        return {p: self._kept[p] for p in self.host.parameters() if p in self._kept}


ema = GrowingAverage
"""Makes an average: the same class, under the name of what it does."""


def _wide(value: Tensor) -> Tensor:
    """In float32 where steps of an average would be lost to rounding."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


@torch.no_grad()
def _put(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        parameter.copy_(value)
