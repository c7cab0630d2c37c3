"""Processes that are forks of the test's own, so that large libraries are imported once."""

import socket
from collections.abc import Callable
from multiprocessing import get_context

import torch
from torch import Tensor


def in_processes(*programs: Callable[[], None], seconds: float = 120.0) -> list[int | None]:
    """Run them at the same time; their exit codes, below 0 if a signal ended them."""
    started = [get_context("fork").Process(target=program) for program in programs]
    for process in started:
        process.start()
    for process in started:
        process.join(seconds)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def require_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """To the bit, whatever was not measured (NaN) included."""
    assert first.keys() == second.keys(), first.keys() ^ second.keys()
    other = [name for name, each in first.items() if not _alike(each, second[name])]
    assert not other, other


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=one.is_floating_point())
