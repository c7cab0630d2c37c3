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
from esper.leyline.errors import AgreementError, OptimizerMismatchError
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


@pytest.mark.parametrize("of", ["host", "model", "a module that holds the host"])
def test_an_average_made_before_planting_is_refused(of: str) -> None:
    host = grown("empty")
    whole = nn.ModuleDict({"inside": host})
    model = {"host": host, "model": host.model}.get(of, whole)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with silence():
        average.update_parameters(model)
    host.germinate("2", "mlp")
    before = copy.deepcopy(average.state_dict())
    with pytest.raises(AgreementError, match=r"grown since this AveragedModel.*esper\.ema\(host"):
        average.update_parameters(model)
    require_same(before, average.state_dict())
    host.remove_now("2")
    average.update_parameters(model)  # of no more than it knows


def test_an_average_of_the_model_is_not_taken_for_one_of_the_host() -> None:
    host = grown("empty")
    average = AveragedModel(host.model)
    average.update_parameters(host)
    host.germinate("2", "mlp")
    with pytest.raises(AgreementError, match="AveragedModel"):
        average.update_parameters(host)


def test_an_average_of_a_grown_host_holds_all_until_a_seed_moves_on() -> None:
    host = grown()
    average = AveragedModel(host)
    average.update_parameters(host)
    host.pass_time()
    host.advance("5")  # its copy in the average would stay silent
    host.pass_time()
    with pytest.raises(AgreementError, match="AveragedModel"):
        average.update_parameters(host)
    alike = AveragedModel(host)
    for _ in range(2):
        alike.update_parameters(host)
    require_same(dict(alike.module.named_parameters()), dict(host.named_parameters()))


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
