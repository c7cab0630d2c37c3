"""Optimiser surgery: survivors do not notice, newborns start fresh, mistakes are named."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from esper.kasmina import (
    add_parameters,
    prepare_groups,
    remove_parameters,
    require_same_parameters,
)
from esper.kasmina.optimizer_surgery import SCALE_KEY, arrange_parameters
from esper.leyline.errors import OptimizerMismatchError
from tests.kasmina.twins import same_bits

SCALES = (1.0, 10.0)
RATE = 0.01
Groups = list[dict[str, Any]]

MAKERS: dict[str, Callable[[Groups], Optimizer]] = {
    "sgd": lambda groups: SGD(groups, lr=RATE, momentum=0.9, nesterov=True),
    "adam": lambda groups: Adam(groups, lr=RATE, amsgrad=True),
    "adamw": lambda groups: AdamW(groups, lr=RATE),
    "adamw, one by one": lambda groups: AdamW(groups, lr=RATE, foreach=False),
    "adam, rate as a tensor": lambda groups: Adam(groups, lr=torch.tensor(RATE), foreach=False),
}
each_maker = pytest.mark.parametrize("maker", MAKERS.values(), ids=list(MAKERS))


def weight(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((3,), float(value)))


def start(maker: Callable[[Groups], Optimizer], *, named: bool, groups: int) -> Optimizer:
    """An optimiser over two parameters in each group, ready for newborns."""
    params = [[(f"host{g}.{i}", weight(g + i)) for i in range(2)] for g in range(groups)]
    plain = [[parameter for _, parameter in group] for group in params]
    optimizer = maker([{"params": group} for group in (params if named else plain)])
    prepare_groups(optimizer, SCALES)
    return optimizer


def held(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def train(optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    torch.stack([(p * p).sum() for p in held(optimizer)]).sum().backward()
    optimizer.step()


def state_of(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """Each parameter's own values and, by key, the very objects of its state and copies of them."""
    return {
        id(p): {"value": p.detach().clone()}
        | {key: (value, torch.as_tensor(value).clone()) for key, value in state.items()}
        for p, state in ((p, optimizer.state.get(p, {})) for p in held(optimizer))
    }


def require_untouched(
    before: dict[int, dict[str, Any]], optimizer: Optimizer, survivors: set[int]
) -> None:
    for parameter in held(optimizer):
        if id(parameter) not in survivors:
            continue
        known = dict(before[id(parameter)])
        assert same_bits(parameter.detach(), known.pop("value"))
        state = optimizer.state.get(parameter, {})
        assert state.keys() == known.keys()
        for key, (value, content) in known.items():
            assert state[key] is value
            assert same_bits(torch.as_tensor(value), content)


# One step of a random history: plant a seed with or without a gate, or remove one, or train.
events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("train"), st.none()),
    ),
    max_size=12,
)


@each_maker
@given(named=st.booleans(), groups=st.integers(1, 3), history=events)
def test_whoever_comes_and_goes_survivors_do_not_notice(
    maker: Callable[[Groups], Optimizer], named: bool, groups: int, history: list[tuple[str, Any]]
) -> None:
    optimizer = start(maker, named=named, groups=groups)
    names = {id(p): n for g in optimizer.param_groups for p, n in _pairs(g)}
    seeds: list[dict[str, nn.Parameter]] = []
    for number, (what, choice) in enumerate(history):
        before, present = state_of(optimizer), {id(p) for p in held(optimizer)}
        if what == "train":
            train(optimizer)
            continue
        if what == "add":
            seed = {f"seed{number}.body": weight(), f"seed{number}.gate": weight(0.5)}
            scales = {f"seed{number}.gate": 10.0} if choice else None
            add_parameters(optimizer, seed, scales)
            seeds.append(seed)
            names |= {id(parameter): name for name, parameter in seed.items()}
            assert not any(parameter in optimizer.state for parameter in seed.values())
            rates = {id(p): float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
            assert rates[id(seed[f"seed{number}.body"])] == pytest.approx(RATE)
            assert rates[id(seed[f"seed{number}.gate"])] == pytest.approx(
                RATE * (10 if choice else 1)
            )
        elif seeds:
            seed = seeds.pop(choice % len(seeds))
            remove_parameters(optimizer, seed)
            gone = {id(parameter) for parameter in seed.values()}
            assert not gone & {id(parameter) for parameter in held(optimizer)}
            assert not any(parameter in optimizer.state for parameter in seed.values())
            present -= gone
        require_untouched(before, optimizer, present)
        if named:
            assert all(
                names[id(p)] == name for g in optimizer.param_groups for p, name in _pairs(g)
            )
    assert len(optimizer.param_groups) == groups + 1
    assert {id(p) for p in held(optimizer)} >= {id(p) for seed in seeds for p in seed.values()}
    train(optimizer)
    steps = [int(optimizer.state[p].get("step", 1)) for seed in seeds for p in seed.values()]
    assert all(count >= 1 for count in steps)


def _pairs(group: dict[str, Any]) -> list[tuple[nn.Parameter, str]]:
    return list(zip(group["params"], group.get("param_names", []), strict="param_names" in group))


@each_maker
def test_a_newborn_learns_as_if_the_optimiser_were_new(
    maker: Callable[[Groups], Optimizer],
) -> None:
    optimizer = start(maker, named=False, groups=1)
    train(optimizer)
    newborn, twin = weight(), weight()
    add_parameters(optimizer, {"newborn": newborn})
    train(optimizer)
    train(maker([{"params": [twin]}]))
    assert same_bits(newborn.detach(), twin.detach())


def test_a_scaled_group_has_the_settings_of_the_first_and_ten_times_its_rate() -> None:
    optimizer = SGD([{"params": [weight()], "weight_decay": 0.3}], lr=RATE, momentum=0.8)
    prepare_groups(optimizer, SCALES)
    first, scaled = optimizer.param_groups
    assert scaled == {**first, "params": [], "lr": 10 * RATE, SCALE_KEY: 10.0}
    prepare_groups(optimizer, SCALES)
    assert len(optimizer.param_groups) == 2


SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, [5 * group["lr"] for group in optimizer.param_groups], total_steps=8
    ),
}
each_scheduler = pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=list(SCHEDULERS))


@each_scheduler
def test_a_scheduler_made_after_the_groups_goes_on(
    scheduler: Callable[[Optimizer], lr_scheduler.LRScheduler],
) -> None:
    grown = start(MAKERS["sgd"], named=True, groups=2)
    plain = SGD([{"params": [weight()]}], lr=RATE, momentum=0.9, nesterov=True)
    schedules = [(optimizer, scheduler(optimizer)) for optimizer in (grown, plain)]
    newborn = {"seed.body": weight(), "seed.gate": weight()}
    for epoch in range(7):
        if epoch == 2:
            add_parameters(grown, newborn, {"seed.gate": 10.0})
        if epoch == 5:
            remove_parameters(grown, newborn)
        for optimizer, schedule in schedules:
            train(optimizer)
            schedule.step()
        expected = plain.param_groups[0]["lr"]
        rates = [group["lr"] for group in grown.param_groups]
        assert rates == pytest.approx([expected, expected, 10 * expected], rel=1e-5, abs=1e-12)


@each_scheduler
def test_a_scheduler_made_before_the_groups_is_named(
    scheduler: Callable[[Optimizer], lr_scheduler.LRScheduler],
) -> None:
    optimizer = SGD([weight()], lr=RATE, momentum=0.9)
    scheduler(optimizer)
    sentence = (
        "A learning-rate scheduler exists already, so no parameter group can be added; "
        "given: 1 groups, none with learning_rate_scale = 10.0; "
        "call prepare_groups(optimizer, scales) before making the scheduler."
    )
    with pytest.raises(OptimizerMismatchError) as refusal:
        prepare_groups(optimizer, SCALES)
    assert str(refusal.value) == sentence
    seed = {"seed.body": weight(), "seed.gate": weight()}
    with pytest.raises(OptimizerMismatchError):
        add_parameters(optimizer, seed, {"seed.gate": 10.0})
    assert len(held(optimizer)) == 1, "nothing of a refused seed stays behind"


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam])
def test_an_optimiser_that_seeds_cannot_join_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    matrix = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(OptimizerMismatchError, match=f"given: {kind.__name__}, which .* AdamW"):
        prepare_groups(kind([matrix]), SCALES)  # type: ignore[arg-type, call-arg]


def test_a_parameter_cannot_be_added_twice() -> None:
    optimizer = start(MAKERS["adam"], named=False, groups=1)
    new, old = weight(), held(optimizer)[0]
    sentence = "The optimiser already holds parameters that were to be added; given: again."
    with pytest.raises(OptimizerMismatchError) as refusal:
        add_parameters(optimizer, {"new": new, "again": old})
    assert str(refusal.value) == sentence
    with pytest.raises(OptimizerMismatchError, match="given: left, right"):
        add_parameters(optimizer, {"left": new, "right": new})
    assert len(held(optimizer)) == 2


def test_a_parameter_that_is_not_there_cannot_be_removed() -> None:
    optimizer = start(MAKERS["adam"], named=True, groups=1)
    train(optimizer)
    before = held(optimizer)
    sentence = "Parameters to remove are not in the optimiser; given: stranger."
    with pytest.raises(OptimizerMismatchError) as refusal:
        remove_parameters(optimizer, {"known": before[0], "stranger": weight()})
    assert str(refusal.value) == sentence
    assert all(a is b for a, b in zip(before, held(optimizer), strict=True))
    assert len(optimizer.state) == 2


@given(order=st.permutations(range(4)), named=st.booleans())
def test_the_order_follows_from_what_grew_and_not_from_when(order: list[int], named: bool) -> None:
    optimizer = start(MAKERS["adam"], named=named, groups=2)
    hosts = [list(group["params"]) for group in optimizer.param_groups]
    seeds = [weight(number) for number in range(4)]
    for number in order:
        add_parameters(optimizer, {f"seed{number}": seeds[number]})
        arrange_parameters(optimizer, seeds)
    first = optimizer.param_groups[0]
    assert [id(p) for p in first["params"]] == [id(p) for p in [*hosts[0], *seeds]]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in hosts[1]]
    if named:
        assert first["param_names"][2:] == ["seed0", "seed1", "seed2", "seed3"]


# --- agreement -------------------------------------------------------------------------------


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_an_optimiser_with_exactly_the_models_parameters_is_accepted() -> None:
    host = model()
    require_same_parameters(SGD(host.parameters(), lr=RATE), host)
    require_same_parameters(
        AdamW([{"params": [p]} for p in host.named_parameters()], lr=RATE), host
    )
    host[0].requires_grad_(False)
    require_same_parameters(SGD(host.parameters(), lr=RATE), host)
    require_same_parameters(SGD(host[1].parameters(), lr=RATE), host)


def wrong(host: nn.Sequential, kind: str) -> list[Tensor]:
    own = list(host.parameters())
    return {
        "missing": own[1:],
        "foreign": [*own, weight()],
        "both": [*own[2:], weight(), weight()],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("missing", "1 missing (0.weight)"),
        ("foreign", "1 that are not the model's"),
        ("both", "2 missing (0.weight, 0.bias), 2 that are not the model's"),
    ],
)
def test_a_missing_or_foreign_parameter_is_named(kind: str, found: str) -> None:
    host = model()
    with pytest.raises(OptimizerMismatchError) as refusal:
        require_same_parameters(SGD(wrong(host, kind), lr=RATE), host)
    assert str(refusal.value) == (
        f"The optimiser does not hold the model's parameters; given: {found}; "
        "valid: exactly the model's trainable parameters; "
        "make the optimiser from this model's parameters and let the host track it."
    )


def test_only_some_of_many_missing_parameters_are_listed() -> None:
    host = nn.Sequential(*(nn.Linear(1, 1) for _ in range(5)))
    with pytest.raises(
        OptimizerMismatchError, match=r"10 missing \(0.weight, .*2.weight, \.\.\.\)"
    ):
        require_same_parameters(SGD([weight()], lr=RATE), host)


def test_a_parameter_held_twice_is_noticed() -> None:
    host = model()
    optimizer = SGD(host.parameters(), lr=RATE)
    optimizer.param_groups[0]["params"].append(host[0].weight)
    with pytest.raises(OptimizerMismatchError, match="1 held twice"):
        require_same_parameters(optimizer, host)
