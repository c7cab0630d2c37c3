"""Whatever would lose what has grown says so, once and with the fix; nothing else does."""

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from esper.api import GrowingModel, GrowthLostWarning
from esper.leyline.errors import OptimizerMismatchError
from tests.api.tables import (
    INPUTS,
    TRAIN,
    Script,
    accuracy,
    require_same,
    states,
    train_epoch,
    wrapped,
)


@contextmanager
def silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def grown(stage: str = "blended", **options: object) -> GrowingModel:
    host = wrapped(**options)
    host.optimizer(torch.optim.SGD, lr=0.01)
    if stage != "empty":
        host.germinate("2", "mlp", "gate" if stage == "training" else "immediate")
        host.germinate("5", "mlp", "gate")
    return host


# --- averages --------------------------------------------------------------------------------


OUTGROWN = r"since the AveragedModel of this network was made.*esper\.ema\(host"


@pytest.mark.parametrize("averaged", ["host", "a module that holds the host"])
def test_average_made_before_planting_warns_at_its_update(averaged: str) -> None:
    host = grown("empty")
    model = host if averaged == "host" else nn.ModuleDict({"inside": host})
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with silence():
        average.update_parameters(model)
    host.germinate("2", "mlp")
    with pytest.warns(GrowthLostWarning, match=OUTGROWN):
        average.update_parameters(model)
    with silence():  # the warning was given once
        average.update_parameters(model)


def test_average_without_a_removed_seed_is_silent() -> None:
    host = grown("empty")
    average = AveragedModel(host)
    host.germinate("2", "mlp")
    host.remove_now("2")
    with silence():
        average.update_parameters(host)


def test_average_of_a_grown_host_warns_when_a_seed_blends() -> None:
    host = grown()
    average = AveragedModel(host)
    with silence():
        average.update_parameters(host)
        average.update_parameters(host)
    require_same(dict(average.module.named_parameters()), dict(host.named_parameters()))
    host.pass_time()
    host.advance("5")  # the copy in the average keeps alpha 0
    host.pass_time()
    with pytest.warns(GrowthLostWarning, match=OUTGROWN):
        average.update_parameters(host)
    with silence():
        AveragedModel(host).update_parameters(host)


def test_average_of_a_grown_host_warns_when_a_seed_is_removed() -> None:
    host = grown()
    average = AveragedModel(host)
    host.remove_now("5")
    with pytest.warns(GrowthLostWarning, match=OUTGROWN):
        average.update_parameters(host)


def test_copy_outside_of_an_average_is_silent() -> None:
    host = grown("empty")
    model = nn.ModuleDict({"student": host})
    model["average"] = AveragedModel(host)
    model["teacher"] = copy.deepcopy(host)
    with silence():
        list(model.parameters())
    host.germinate("2", "mlp")
    with silence():
        list(model["teacher"].parameters())
        list(nn.ModuleList([model["teacher"]]).parameters())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        list(model.parameters())
    assert len(seen) == 1  # of the average, not of the teacher


def test_growing_leaves_the_class_of_torch_unchanged() -> None:
    before = dict(vars(AveragedModel))
    host = grown()
    AveragedModel(host).update_parameters(host)
    assert dict(vars(AveragedModel)) == before
    assert AveragedModel.update_parameters.__module__ == "torch.optim.swa_utils"


def test_copied_host_can_be_pickled() -> None:
    host = copy.deepcopy(grown())
    twin = pickle.loads(pickle.dumps(host))  # noqa: S301
    require_same(states(host), states(twin))


# --- the inner model -------------------------------------------------------------------------


def test_saving_the_inner_model_of_a_grown_host_warns_once() -> None:
    host = grown()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        host.model.state_dict()
        torch.save(host.model.state_dict(), io.BytesIO())
        nn.ModuleList([host.model]).state_dict()
    assert [each.category for each in seen] == [GrowthLostWarning]
    assert "lacks what has grown in it; take host.state_dict()" in str(seen[0].message)


@pytest.mark.parametrize("isolation", ["straight_through", "dual_pass"])
def test_nothing_is_said_where_nothing_is_lost(isolation: str) -> None:
    with silence():
        for stage in ("empty", "training"):
            host = grown(stage, isolation=isolation)
            host.model.state_dict()
            copy.deepcopy(host.model)(INPUTS)
        host = grown(isolation=isolation)
        state = host.state_dict()
        nn.ModuleDict({"inside": host}).state_dict()
        torch.nn.parallel.DataParallel(host).state_dict()
        wrapped(isolation=isolation).load_state_dict(state)
        twin = copy.deepcopy(host)
        twin(INPUTS)
        twin.state_dict()
        plain = host.export()
        plain.state_dict()
        copy.deepcopy(plain)(INPUTS)
        host.remove_now("2")
        host.model.state_dict()
    assert not any(module._state_dict_pre_hooks for module in plain.modules())


def test_a_copy_of_the_inner_model_says_that_its_seeds_would_not_learn() -> None:
    host = grown()
    loose = copy.deepcopy(host.model)
    with silence():
        loose.eval()(INPUTS)
    with pytest.warns(GrowthLostWarning, match=r"none of its parameters.*copy\.deepcopy\(host\)"):
        loose.train()(INPUTS)
    with pytest.warns(GrowthLostWarning, match="lacks what has grown"):
        loose.state_dict()
    with silence():  # said already; and the original is whole
        loose(INPUTS)
        host(INPUTS)


def test_a_pickled_host_is_whole() -> None:
    host = wrapped()
    host.germinate("2", "mlp", "immediate")
    twin = pickle.loads(pickle.dumps(host))  # noqa: S301
    with silence():
        require_same(states(host), states(twin))
        twin(INPUTS)


# --- optimisers ------------------------------------------------------------------------------


def steps(host: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(host(TRAIN[0]), TRAIN[1]).backward()
        optimizer.step()


def test_an_optimiser_that_nobody_tracks_is_an_error_at_the_tick_and_when_time_passes() -> None:
    host = wrapped()
    optimizer = torch.optim.SGD(host.parameters(), lr=0.1)
    host.germinate("2", "mlp")
    steps(host, optimizer)
    for end_of_epoch in (host.pass_time, lambda: host.tick("never", train_loss=1.0, val_score=9.0)):
        with pytest.raises(OptimizerMismatchError, match=r"knows no optimiser.*host\.track"):
            end_of_epoch()


@pytest.mark.parametrize("over", ["host", "model"])
def test_an_optimiser_that_took_the_place_of_the_tracked_one_is_an_error(over: str) -> None:
    host = wrapped()
    steps(host, host.optimizer(torch.optim.SGD, lr=0.1))
    host.tick(Script({1: ("plant", "2", "mlp", "ramp")}), train_loss=1.0, evaluate=accuracy)
    other = torch.optim.SGD((host if over == "host" else host.model).parameters(), lr=0.1)
    steps(host, other)
    with pytest.raises(OptimizerMismatchError, match=r"made no step since.*host\.optimizer"):
        host.tick("never", train_loss=1.0, val_score=9.0)
    if over == "model":
        with pytest.raises(OptimizerMismatchError, match=r"missing \(slots\.0\.seed.*this model's"):
            host.track(other)
    else:
        host.track(other)
        steps(host, other)
        host.tick("never", train_loss=1.0, val_score=9.0)


def test_an_optimiser_that_lost_seeds_is_an_error_at_the_tick() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    host.germinate("2", "mlp")
    optimizer.param_groups[0]["params"][:] = list(host.model.parameters())
    train_epoch(host, optimizer)
    with pytest.raises(OptimizerMismatchError, match=r"missing \(slots\.0"):
        host.tick("never", train_loss=1.0, val_score=9.0)
