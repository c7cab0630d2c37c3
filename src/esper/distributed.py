"""Processes that learn together: each has its own environments and a replica of the network.

Losses are weighted by counts over *all* processes, so losses and gradients are summed and never
averaged. Every process makes the same calls in the same order, also a process without a step to
learn from. A reduction returns identical bits in every process, and so the processes take identical
decisions.

torch is imported where it is needed: the command line imports this module before torch.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from esper.leyline.errors import EsperError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class ProcessesError(EsperError):
    """Processes that were to learn together and cannot."""


@dataclass(frozen=True)
class Processes:
    """The processes that share an update, seen from one of them.

    Without a group there is a single process, and every method returns its argument.
    """

    rank: int = 0
    size: int = 1
    group: "ProcessGroup | None" = None

    @classmethod
    def from_default_group(cls, group: "ProcessGroup | None" = None) -> "Processes":
        """Return the processes of `group`, by default all processes of `torch.distributed`."""
        from torch import distributed

        if not (distributed.is_available() and distributed.is_initialized()):
            raise ProcessesError(
                "There are no other processes to learn with",
                fix="start with torchrun and call torch.distributed.init_process_group first",
            )
        group = group or distributed.group.WORLD
        return cls(distributed.get_rank(group), distributed.get_world_size(group), group)

    def sum_(self, tensor: "Tensor") -> "Tensor":
        """Sum the tensor over the processes in place."""
        return self._all_reduce(tensor, "SUM")

    def max_(self, tensor: "Tensor") -> "Tensor":
        """Take the elementwise maximum over the processes in place."""
        return self._all_reduce(tensor, "MAX")

    def max_int(self, number: int, device: "torch.device") -> int:
        """Return the largest number of all processes; the group must be able to use `device`."""
        if self.group is None:
            return number
        import torch

        return int(self.max_(torch.tensor(number, device=device)))

    def env_slice(self, rows: int, device: "torch.device") -> tuple[int, int]:
        """Return the position of this process's rows among those of all processes.

        Args:
            rows: Number of rows of this process.
            device: A device that the group can use.

        Returns:
            Index of the first row in the order of ranks, and the number of all rows.
        """
        if self.group is None:
            return 0, rows
        import torch

        counts = torch.zeros(self.size, dtype=torch.int64, device=device)
        counts[self.rank] = rows
        rows_by_rank = self.sum_(counts).tolist()
        return sum(rows_by_rank[: self.rank]), sum(rows_by_rank)

    def all_gather_rows(self, rows: "Tensor", env_slice: tuple[int, int], dim: int = 0) -> "Tensor":
        """Return the rows of all processes, concatenated along `dim` in the order of ranks."""
        if self.group is None:
            return rows
        import torch

        first, total = env_slice
        shape = list(rows.shape)
        shape[dim] = total
        dtype = torch.uint8 if rows.dtype is torch.bool else rows.dtype
        all_rows = torch.zeros(shape, dtype=dtype, device=rows.device)
        all_rows.narrow(dim, first, rows.shape[dim]).copy_(rows)
        return self.sum_(all_rows).to(rows.dtype)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks, in every process."""
        if self.group is None:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def gather_object(self, value: T) -> list[T]:
        """Return the values of all processes on rank 0, and nothing on the other ranks."""
        if self.group is None:
            return [value]
        from torch import distributed

        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(value, values, group=self.group, group_dst=0)
        return values or []

    @contextmanager
    def raise_on_all_ranks(self, device: "torch.device") -> Iterator[None]:
        """Raise an error in all processes if one of them raises an `EsperError` inside.

        No process is then left waiting for another one.
        """
        error: EsperError | None = None
        try:
            yield
        except EsperError as raised:
            error = raised
        if self.max_int(error is not None, device):
            raise error or ProcessesError(
                "Another process could not use its data", fix="read the message of that process"
            )

    def sum_gradients(self, parameters: "Iterable[nn.Parameter]") -> None:
        """Replace every gradient by its sum over the processes, in a single message."""
        if self.group is None:
            return
        import torch

        gradients = []
        for parameter in parameters:
            if parameter.grad is None:  # this process had nothing to learn from
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        summed = self.sum_(torch.cat([gradient.flatten() for gradient in gradients]))
        parts = summed.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def broadcast_module(self, module: "nn.Module") -> None:
        """Give the module of every process the parameters and buffers of rank 0."""
        if self.group is None:
            return
        from torch import distributed

        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for tensor in state.values():
            distributed.broadcast(tensor, group_src=0, group=self.group)
        module.load_state_dict(state)

    def _all_reduce(self, tensor: "Tensor", operation: str) -> "Tensor":
        if self.group is not None:
            from torch import distributed

            op = getattr(distributed.ReduceOp, operation)
            distributed.all_reduce(tensor, op, group=self.group)
        return tensor


SINGLE_PROCESS = Processes()
