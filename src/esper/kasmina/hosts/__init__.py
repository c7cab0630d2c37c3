"""Esper's own hosts, by name."""

from collections.abc import Callable

from esper.kasmina.hosts.conv1d import Conv1dHost
from esper.kasmina.hosts.conv2d import Conv2dHost
from esper.kasmina.hosts.gpt import GptHost
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.segmented import SegmentedHost, SlotShape
from esper.leyline.errors import UnknownNameError

HOSTS: dict[str, Callable[..., SegmentedHost]] = {
    "conv1d": Conv1dHost,
    "conv2d": Conv2dHost,
    "mlp": MlpHost,
    "gpt": GptHost,
}


def build_host(name: str, **sizes: object) -> SegmentedHost:
    """The named host; `sizes` are its constructor's keyword arguments."""
    if name not in HOSTS:
        raise UnknownNameError.of("host", name, HOSTS)
    return HOSTS[name](**sizes)


__all__ = [
    "HOSTS",
    "Conv1dHost",
    "Conv2dHost",
    "GptHost",
    "MlpHost",
    "SegmentedHost",
    "SlotShape",
    "build_host",
]
