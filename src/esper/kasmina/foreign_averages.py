"""torch's averages of weights list their parameters once, and refuse what has grown since."""

from functools import cache, wraps

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.kasmina.slot import Slot, taps_on
from esper.leyline.errors import AgreementError


@cache
def refuse_outgrown_averages() -> None:
    """From the first seed in this process on.

    `update_parameters` walks along two lists of parameters to the end of the shorter one, and
    torch has no hook there: without this, averages would lack what has grown, and nobody would
    notice.
    """
    update = AveragedModel.update_parameters

    @wraps(update)
    def checked(self: AveragedModel, model: nn.Module) -> None:
        if _has_outgrown(model, self.module):
            raise AgreementError(
                "The network has grown since this AveragedModel was made, which would average "
                "without what grew",
                fix="keep the average with esper.ema(host, decay), which grows along, or make the "
                "AveragedModel of the host when nothing grows any more",
            )
        update(self, model)

    torch.optim.swa_utils.AveragedModel.update_parameters = checked  # type: ignore[method-assign]


def _has_outgrown(model: nn.Module, average: nn.Module) -> bool:
    """Has the model, or the host in it, seeds that the average does not know as they are now?"""
    ours, theirs = (
        [(part.seed is not None, part.alpha) for part in each.modules() if isinstance(part, Slot)]
        for each in (model, average)
    )
    if not ours:  # a model without its host, which owns what grows
        return any(taps_on(part) for part in model.modules())
    return ours != (theirs or [(False, 0.0)] * len(ours))
