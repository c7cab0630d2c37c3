"""Optimiser surgery: parameters join and leave a running optimiser by name.

Survivors keep their state untouched, newborns start fresh. Newborns join the first group and share
its settings; those with a learning-rate scale get a group of their own. Prepare those groups before
making a learning-rate scheduler, which cannot cope with groups that appear later.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, Adagrad, Muon, Optimizer, SparseAdam

from esper.leyline.errors import OptimizerMismatchError

SCALE_KEY = "learning_rate_scale"
# What seeds cannot join, and why: a seed has vectors and scalars too, and its gradients are dense.
_CLOSED: dict[type[Optimizer], str] = {
    LBFGS: "LBFGS, which cannot take in parameters while it runs",
    Muon: "Muon, which trains nothing but matrices",
    SparseAdam: "SparseAdam, which takes nothing but sparse gradients",
}
_SHOWN = 5  # names in a message


def prepare_groups(optimizer: Optimizer, scales: Iterable[float]) -> None:
    """Make sure there is a (possibly empty) group for each learning-rate scale."""
    for kind, reason in _CLOSED.items():
        if isinstance(optimizer, kind):
            raise OptimizerMismatchError(
                "Seeds cannot join this optimiser",
                given=reason,
                valid="any that trains parameters of every shape, such as SGD or AdamW",
            )
    for scale in scales:
        _group_for(optimizer, scale)


def _group_for(optimizer: Optimizer, scale: float) -> dict[str, Any]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        if group.get(SCALE_KEY, 1.0) == scale:
            return group
    model = groups[0]
    if "initial_lr" in model:
        raise OptimizerMismatchError(
            "A learning-rate scheduler exists already, so no parameter group can be added",
            given=f"{len(groups)} groups, none with {SCALE_KEY} = {scale}",
            fix="call prepare_groups(optimizer, scales) before making the scheduler",
        )
    empty: dict[str, Any] = {key: [] for key in ("params", "param_names") if key in model}
    groups.append({**model, **empty, "lr": model["lr"] * scale, SCALE_KEY: scale})
    return groups[-1]


def add_parameters(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    scales: Mapping[str, float] | None = None,
) -> None:
    """Give newborn parameters to the optimiser, with fresh state; on error, none of them."""
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    counts = Counter(held + [id(parameter) for parameter in named.values()])
    twice = [name for name, parameter in named.items() if counts[id(parameter)] > 1]
    if twice:
        raise OptimizerMismatchError(
            "The optimiser already holds parameters that were to be added", given=", ".join(twice)
        )
    groups = {name: _group_for(optimizer, (scales or {}).get(name, 1.0)) for name in named}
    for name, parameter in named.items():
        groups[name]["params"].append(parameter)
        if "param_names" in groups[name]:
            groups[name]["param_names"].append(name)
    if isinstance(optimizer, Adagrad):  # in older torch, its state is made with it or never
        optimizer.state.update(Adagrad(named.values(), **optimizer.defaults).state)


def remove_parameters(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Take parameters and their state out of the optimiser; everything else stays as it is."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    absent = [name for name, parameter in named.items() if id(parameter) not in held]
    if absent:
        raise OptimizerMismatchError(
            "Parameters to remove are not in the optimiser", given=", ".join(absent)
        )
    leaving = {id(parameter) for parameter in named.values()}
    for group in optimizer.param_groups:
        _select(group, [i for i, p in enumerate(group["params"]) if id(p) not in leaving])
    for parameter in named.values():
        optimizer.state.pop(parameter, None)


def arrange_parameters(optimizer: Optimizer, last: Sequence[nn.Parameter]) -> None:
    """In each group, put those of `last` in this order behind all others.

    An optimiser's saved state goes by position, so the order must follow from what has grown
    and not from when it was planted.
    """
    place = {id(parameter): position for position, parameter in enumerate(last)}
    for group in optimizer.param_groups:
        places = [place.get(id(parameter), -1) for parameter in group["params"]]
        _select(group, sorted(range(len(places)), key=places.__getitem__))


def _select(group: dict[str, Any], indices: Sequence[int]) -> None:
    for key in ("params", "param_names"):
        if key in group:
            group[key][:] = [group[key][index] for index in indices]


def require_same_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise unless the optimiser holds exactly the model's trainable parameters.

    Frozen parameters may be in the optimiser or not.
    """
    owned = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for key, name in wanted.items() if key not in set(held)]
    foreign = sum(key not in owned for key in held)
    twice = len(held) - len(set(held))
    shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
    faults = {
        f"{len(missing)} missing ({shown})": missing,
        f"{foreign} that are not the model's": foreign,
        f"{twice} held twice": twice,
    }
    if any(faults.values()):
        raise OptimizerMismatchError(
            "The optimiser does not hold the model's parameters",
            given=", ".join(text for text, found in faults.items() if found),
            valid="exactly the model's trainable parameters",
            fix="make the optimiser from this model's parameters and let the host track it",
        )
