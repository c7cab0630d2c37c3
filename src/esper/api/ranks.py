"""Several processes that train copies of one model: what they agree on, and who does which part.

Every process makes the same calls in the same order, so that numbers and decisions made from them
are the same in all. On its own, a process keeps what it has. Messages go where the model is: that
is where NCCL wants them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, distributed, nn

from esper.api.batches import Pair, part_of, samples_of
from esper.archive import KeptFolder
from esper.distributed import Processes
from esper.leyline.errors import EsperError
from esper.leyline.streams import derive_seed
from esper.simic.training import run_processes

P = ParamSpec("P")
T = TypeVar("T")


def count() -> int:
    here = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if here else 1


def rank() -> int:
    return distributed.get_rank() if count() > 1 else 0


def is_restart_of(model: nn.Module, folder: KeptFolder) -> bool:
    """Return whether this launch started the run in the folder and then lost a process.

    All processes get the answer of rank 0.
    """
    if not run_processes.restart_count():
        return False
    is_restart = torch.tensor(run_processes.is_restart_of(folder))
    return bool(shared(model, is_restart))


def together(work: Callable[P, T]) -> Callable[P, T]:
    """Have processes that torchrun started meet for this call, unless they have met already."""

    @wraps(work)
    def met(*args: P.args, **named: P.kwargs) -> T:
        if not run_processes.is_launched() or distributed.is_initialized():
            return work(*args, **named)
        given = [each for each in (*args, named.get("model")) if isinstance(each, nn.Module)]
        present = [parameter.device for model in given for parameter in model.parameters()]
        where = str(named.get("device") or next(iter(present), "cpu"))
        cuda = torch.cuda.is_available() and not where.startswith("cpu")
        with run_processes.init_distributed("cuda" if cuda else "cpu"):
            return work(*args, **named)

    return met


# --- numbers ---------------------------------------------------------------------------------


def shared(model: nn.Module, values: Tensor) -> Tensor:
    """This tensor as rank 0 has it, on the CPU."""
    return _agreed(model, values, partial(distributed.broadcast, src=0))


def averaged(model: nn.Module, values: Tensor) -> Tensor:
    """The mean over processes, on the CPU."""
    return values if count() == 1 else summed(model, values) / count()


def summed(model: nn.Module, values: Tensor) -> Tensor:
    """The sum over processes, on the CPU."""
    return _agreed(model, values, distributed.all_reduce)


def gathered(model: nn.Module, values: Tensor) -> Tensor:
    """[samples of all processes]: their values, in the order of ranks."""
    if count() == 1:
        return values
    processes = Processes.from_default_group()
    device = next(model.parameters()).device
    row_slice = processes.env_slice(len(values), device)
    return processes.all_gather_rows(values.to(device), row_slice).cpu()


def _agreed(model: nn.Module, values: Tensor, agree: Callable[[Tensor], object]) -> Tensor:
    if count() == 1:
        return values
    sent = values.to(next(model.parameters()).device, copy=True)
    agree(sent)
    return sent.cpu()


def require_same(model: nn.Module, what: str, told: str) -> None:
    """Refuse, in every process, what is not the same in all."""
    own = torch.tensor(derive_seed(told))
    if bool(summed(model, (shared(model, own) != own).long())):
        fix = "give all of them the same, in the same order: Esper divides it between them"
        raise EsperError(f"Processes that learn together were given different {what}", fix=fix)


# --- weights and gradients -------------------------------------------------------------------


def share(model: nn.Module) -> None:
    """Give every process the weights and buffers of the first, so that they learn as one."""
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    kinds = [(name, each.dtype, each.shape) for name, each in held.items()]
    require_same(model, "models", str(kinds))
    # (As bytes: whatever kind of number it is.)
    _agree_in_place(held.values(), lambda of: distributed.broadcast(of.view(torch.uint8), src=0))


def average_gradients(module: nn.Module) -> None:
    """Of its parameters, over all processes, whenever a backward pass has added to them.

    A parallel wrapper lists parameters when it is made, and seeds come later. What was averaged
    already, and is only accumulated to, stays the same by being averaged again.
    """
    if count() > 1:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: average_tensors([p.grad]))


def average_tensors(tensors: Iterable[Tensor | None]) -> None:
    """In place, over all processes."""
    _agree_in_place(tensors, distributed.all_reduce, summed_over=count())


@torch.no_grad()
def _agree_in_place(
    tensors: Iterable[Tensor | None], agree: Callable[[Tensor], object], summed_over: int = 1
) -> None:
    """In one message for each kind of number."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors if count() > 1 else ():
        if tensor is not None and tensor.is_sparse:
            fix = "make the layer without them, such as nn.Embedding(..., sparse=False)"
            raise EsperError("Sparse gradients are not averaged over processes", fix=fix)
        if tensor is not None:
            kinds.setdefault(tensor.dtype, []).append(tensor)
    for held in kinds.values():
        agree(whole := torch.cat([tensor.flatten() for tensor in held]))
        whole = whole / summed_over if summed_over > 1 else whole
        parts = whole.split([tensor.numel() for tensor in held])
        for tensor, part in zip(held, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def average_step(model: nn.Module) -> None:
    """The gradients of a model that no parallel wrapper holds, and that a step is made from.

    Where only some processes have one, it is averaged with nothing.
    """
    if count() > 1:
        held = [each for each in model.parameters() if each.requires_grad]
        counts = torch.tensor([float(each.grad is not None) for each in held])
        for each, known in zip(held, summed(model, counts).tolist(), strict=True):
            if known and each.grad is None:
                each.grad = torch.zeros_like(each)
        average_tensors(each.grad for each in held)


# --- data ------------------------------------------------------------------------------------


def own_part(batch: Pair, ignored: int | None = None) -> tuple[Pair, float]:
    """This process's samples of a batch, and their weight: losses times it have the mean of the
    whole batch's, over labels that are not `ignored`. A batch belongs to all, whole, if it cannot
    be divided, or if a part had no such label, or one sample, which cannot be normalised."""
    size = samples_of(batch) if count() > 1 else 0
    if size < 2 * count():
        return batch, 1.0
    cuts = [slice(size * n // count(), size * (n + 1) // count()) for n in range(count())]
    counted = torch.ones(size) if ignored is None else batch[1] != ignored
    weights = torch.stack([counted[cut].sum() for cut in cuts]).tolist()
    if not min(weights):
        return batch, 1.0
    return part_of(batch, cuts[rank()]), weights[rank()] * count() / sum(weights)


def own_parts(batches: Iterable[Pair]) -> Iterator[Pair]:
    """The same where samples are only counted; what cannot be divided goes to one after another."""
    for place, batch in enumerate(batches):
        part, _ = own_part(batch)
        if part is not batch or place % count() == rank():
            yield part
