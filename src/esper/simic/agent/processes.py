"""Several processes that learn as one: each has environments and a replica, numbers are summed.

What a step weighs is one over the count of *all* processes, so losses and gradients are summed,
never averaged. Every process makes the same calls in the same order, also one without a step to
learn from; sums come out the same to the bit everywhere, and so do the decisions made from them.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from esper.archive import packed, unpacked
from esper.leyline.errors import EsperError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")


class ProcessesError(EsperError):
    """Processes that were to learn together and cannot."""


@dataclass(frozen=True)
class Processes:
    """This process among those that share an update; without a group it is alone.

    Alone, every method returns what it was given.
    """

    rank: int = 0
    size: int = 1
    group: "ProcessGroup | None" = None

    @classmethod
    def joined(cls, group: "ProcessGroup | None" = None) -> "Processes":
        """The processes of a group, by default all that `torch.distributed` was started with."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            raise ProcessesError(
                "There are no other processes to learn with",
                fix="start with torchrun and call torch.distributed.init_process_group first",
            )
        group = group or distributed.group.WORLD
        return cls(distributed.get_rank(group), distributed.get_world_size(group), group)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor, summed over the processes in place."""
        return self._reduce(tensor, "SUM")

    def max_(self, tensor: Tensor) -> Tensor:
        """The tensor, with the largest of the processes' numbers in each place."""
        return self._reduce(tensor, "MAX")

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of the processes' numbers; `device` is one that the group can reach."""
        return number if self.group is None else int(self.max_(torch.tensor(number, device=device)))

    def place(self, rows: int, device: torch.device) -> tuple[int, int]:
        """Where this process's rows begin among those of all, in the order of ranks, and how many
        there are in all."""
        if self.group is None:
            return 0, rows
        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = rows
        each = self.sum_(counts).tolist()
        return sum(each[: self.rank]), sum(each)

    def united(self, rows: Tensor, place: tuple[int, int], dim: int = 0) -> Tensor:
        """The rows of all processes, of which this one's stand at their `place`."""
        if self.group is None:
            return rows
        shape = list(rows.shape)
        shape[dim] = place[1]
        summed = torch.uint8 if rows.dtype is torch.bool else rows.dtype
        whole = torch.zeros(shape, dtype=summed, device=rows.device)
        whole.narrow(dim, place[0], rows.shape[dim]).copy_(rows)
        return self.sum_(whole).to(rows.dtype)

    def each(self, what: T) -> list[T]:
        """What every process says here, in the order of ranks: nested numbers, texts, tensors and
        arrays."""
        return [what] if self.group is None else self._collected(what, everyone=True)

    def handed_over(self, what: T) -> list[T]:
        """What the others say here, for the first process alone."""
        return [] if self.group is None else self._collected(what, everyone=False)[1:]

    def _collected(self, what: T, *, everyone: bool) -> list[T]:
        """What all say, for everyone or for the first process, as letters of one length."""
        from torch import distributed

        own = _letter(what)
        padded = torch.zeros(self.largest(len(own), own.device), dtype=torch.uint8)
        padded[: len(own)] = own
        reads = everyone or self.rank == 0
        found = [torch.empty_like(padded) for _ in range(self.size)] if reads else None
        if everyone:
            distributed.all_gather(found, padded, group=self.group)
        else:
            distributed.gather(padded, found, group=self.group, group_dst=0)
        return [_said(letter) for letter in found or ()]

    @contextmanager
    def refusing_together(self, device: torch.device) -> Iterator[None]:
        """What one process refuses in here, all of them refuse: nobody is left waiting."""
        refusal: EsperError | None = None
        try:
            yield
        except EsperError as error:
            refusal = error
        if self.largest(refusal is not None, device):
            raise refusal or ProcessesError(
                "Another process refused what it was to learn from", fix="see what that one says"
            )

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give every parameter the sum of its gradients in all processes, in one message."""
        if self.group is None:
            return
        held = list(parameters)
        for parameter in held:
            if parameter.grad is None:  # nothing was learned from here
                parameter.grad = torch.zeros_like(parameter)
        grads = [parameter.grad for parameter in held if parameter.grad is not None]
        whole = self.sum_(torch.cat([grad.flatten() for grad in grads]))
        parts = whole.split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    @torch.no_grad()
    def share(self, network: nn.Module) -> None:
        """Give the network of every process the weights and statistics of the first."""
        if self.group is None:
            return
        from torch import distributed

        for tensor in network.state_dict().values():
            first = tensor.clone()
            distributed.broadcast(first, group_src=0, group=self.group)
            tensor.copy_(first)  # written to as torch counts it, which a message is not

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        if self.group is not None:
            from torch import distributed

            distributed.all_reduce(tensor, getattr(distributed.ReduceOp, how), group=self.group)
        return tensor


_NOTE = "note"  # of a letter: what is no tensor, as JSON
_LENGTH = 8  # bytes before it that say how long it is


def _letter(what: object) -> Tensor:
    """[bytes] uint8: a message of data alone, which nothing executes to read."""
    tensors: dict[str, Tensor] = {}
    note = json.dumps(packed(what, tensors, of="A message between processes")).encode()
    held = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    held[_NOTE] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
    body = save(held)
    return torch.frombuffer(
        bytearray(len(body).to_bytes(_LENGTH, "little") + body), dtype=torch.uint8
    )


def _said(letter: Tensor) -> Any:
    raw = letter.numpy().tobytes()
    end = _LENGTH + int.from_bytes(raw[:_LENGTH], "little")
    tensors = load(raw[_LENGTH:end])
    return unpacked(json.loads(tensors.pop(_NOTE).numpy().tobytes()), tensors)


ALONE = Processes()
