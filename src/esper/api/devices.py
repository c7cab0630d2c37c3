"""Where a model is, where it could be, and where it can be trained."""

import torch
from torch import nn

from esper.api.grow_settings import AUTO
from esper.api.inspection import require_module
from esper.leyline.errors import EsperError, in_words


def find_device(asked: torch.device | str) -> torch.device:
    """The device of that name; "auto": CUDA where there is one."""
    if isinstance(asked, str) and asked == AUTO:
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    valid = 'such as "cpu", "cuda" or "cuda:1", where torch finds it, or "auto"'
    with in_words("There is no such device", given=f"{asked}: ", valid=valid):
        return torch.empty(0, device=asked).device


def device_name(device: torch.device) -> str:
    """For people: with that of the card."""
    card = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"{device}{card}"


def placed(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where it is, after it was moved to this device, if one is asked for."""
    require_module(model)
    if device is not None:
        model.to(find_device(device))
    if any(parameter.is_meta for parameter in model.parameters()):
        fix = "build it on a device that computes, or load its weights first"
        raise EsperError("The model's parameters have no values", given="device 'meta'", fix=fix)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def require_ordinary() -> None:
    """Refuse a caller's mode in which training would fail or, with old weights, go wrong."""
    half = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    if half or torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        given = f"a call inside of {'torch.autocast' if half else 'torch.no_grad() or the like'}"
        fix = "call it outside; for mixed precision pass precision='bf16'"
        raise EsperError("A run cannot be trained in here", given=given, fix=fix)
