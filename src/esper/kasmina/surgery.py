"""Optimiser surgery: parameters join and leave a running optimiser by name.

Survivors keep their state untouched, newborns start fresh. Newborns join the first group and share
its settings; those with a learning-rate scale get a group of their own. Prepare those groups before
making a learning-rate scheduler, which cannot cope with groups that appear later.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.leyline.errors import OptimizerMismatchError

SCALE_KEY = "learning_rate_scale"


def prepare_groups(optimizer: Optimizer, scales: Iterable[float]) -> None:
    """Make sure there is a (possibly empty) group for each learning-rate scale."""
    for scale in scales:
        _group_for(optimizer, scale)


def _group_for(optimizer: Optimizer, scale: float) -> dict[str, object]:
    groups: list[dict[str, object]] = optimizer.param_groups
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
    options = {key: value for key, value in model.items() if key not in ("params", "param_names")}
    rate = options["lr"]
    assert isinstance(rate, (float, int, Tensor))
    options |= {"lr": rate * scale, SCALE_KEY: scale, "params": []}
    if "param_names" in model:
        options["param_names"] = []
    groups.append(options)
    return options


def add_parameters(
    optimizer: Optimizer,
    named: Mapping[str, nn.Parameter],
    scales: Mapping[str, float] | None = None,
) -> None:
    """Give newborn parameters to the optimiser, with fresh state."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in named.items():
        if id(parameter) in held:
            raise OptimizerMismatchError(
                "The optimiser already holds a parameter that was to be added", given=name
            )
        group = _group_for(optimizer, (scales or {}).get(name, 1.0))
        members, names = group["params"], group.get("param_names")
        assert isinstance(members, list)
        members.append(parameter)
        if isinstance(names, list):
            names.append(name)


def remove_parameters(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> None:
    """Take parameters and their state out of the optimiser; everything else stays as it is."""
    leaving = {id(parameter): name for name, parameter in named.items()}
    for group in optimizer.param_groups:
        kept = [index for index, member in enumerate(group["params"]) if id(member) not in leaving]
        for member in group["params"]:
            leaving.pop(id(member), None)
        group["params"][:] = [group["params"][index] for index in kept]
        if "param_names" in group:
            group["param_names"][:] = [group["param_names"][index] for index in kept]
    if leaving:
        raise OptimizerMismatchError(
            "Parameters to remove are not in the optimiser", given=", ".join(leaving.values())
        )
    for parameter in named.values():
        optimizer.state.pop(parameter, None)


def require_same_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise unless the optimiser holds exactly the model's trainable parameters.

    Frozen parameters may be in the optimiser or not.
    """
    owned = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for key, name in wanted.items() if key not in set(held)]
    foreign = sum(key not in owned for key in held)
    if missing or foreign or len(set(held)) != len(held):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise OptimizerMismatchError(
            "The optimiser does not hold the model's parameters",
            given=f"{len(missing)} missing ({shown or 'none'}), {foreign} that are not the model's",
            valid="exactly the model's trainable parameters",
            fix="make the optimiser from this model's parameters and let the host track it",
        )
