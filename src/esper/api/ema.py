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
        # By name: the parameter itself, since another may come to have its name, and its average.
        self._kept: dict[str, tuple[nn.Parameter, Tensor]] = {}
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
        known = self._present()
        self._kept = {
            name: (p, known[name].to(p.device) if name in known else _wide(p.detach().clone()))
            for name, p in self.host.named_parameters()
        }
        pairs = []
        for parameter, average in (self._kept[name] for name in known):
            if average.is_floating_point() or average.is_complex():
                pairs.append((average, _wide(parameter.detach())))
            else:
                average.copy_(parameter)
        if pairs:
            averages, values = map(list, zip(*pairs, strict=True))
            torch._foreach_lerp_(averages, values, 1.0 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the host has the averaged weights; afterwards its own again, to the bit."""
        outer, averages = self._applied, self._present()
        own = {name: self._kept[name][0].detach().clone() for name in averages}
        parameters = {name: self._kept[name][0] for name in averages}
        try:
            self._applied = True
            _put(averages, parameters)
            yield
        finally:
            self._applied = outer
            _put(own, parameters)

    def export(self, sample: Sample | None = None) -> nn.Module:
        """The committed network with averaged weights, as a plain module."""
        with self.applied():
            return self.host.export(sample)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, by the host's names of the parameters."""
        return self._present()

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
            name: (parameters[name], _wide(average.to(parameters[name].device, copy=True)))
            for name, average in state.items()
        }

    def _present(self) -> dict[str, Tensor]:
        """The averages of parameters that the host still has."""
        kept = self._kept
        return {
            name: kept[name][1]
            for name, parameter in self.host.named_parameters()
            if name in kept and kept[name][0] is parameter
        }


ema = GrowingAverage
"""Makes an average: the same class, under the name of what it does."""


def _wide(value: Tensor) -> Tensor:
    """In float32 where steps of an average would be lost to rounding."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


@torch.no_grad()
def _put(values: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)
