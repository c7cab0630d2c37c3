"""What flows past the slots of a model, for controllers that were trained to look at it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from esper.kasmina.flow_statistics import flow_statistics
from esper.kasmina.isolation import state_kept
from esper.kasmina.slot import part_of
from esper.kasmina.watching import call
from esper.leyline.signals import FLOW_STATISTICS

if TYPE_CHECKING:
    from esper.api.hosts import GrowingModel


def slot_flow(host: "GrowingModel") -> Tensor:
    """[1, S, K]: statistics of what reaches each slot, on the host's sample; NaN where nothing did.

    Ask it where it measures, in evaluation mode; buffers are afterwards as they were before.
    """
    found = torch.full((len(host.specs), len(FLOW_STATISTICS)), torch.nan, dtype=torch.float64)
    hooks = []
    for index, place in enumerate(host.slot_places):

        def look(module: nn.Module, args: Any, output: Any, index: int = index) -> None:
            place = host.slot_places[index]
            if bool(found[index].isnan().all()):
                h = part_of(output, place.part).detach().permute(place.spec.to_canonical)
                found[index] = flow_statistics(h[None], place.spec.channel_axis)[0].double().cpu()

        hooks.append(place.module.register_forward_hook(look, prepend=True))
    try:
        with state_kept(host):
            call(host, host.sample)
    finally:
        for hook in hooks:
            hook.remove()
    return found[None]
