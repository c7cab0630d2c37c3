"""Shadows beside a model of one's own: never seen by it, measured, planted warm, kept."""

import functools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.api import GrownRun, grow, resume, wrap
from esper.api.growing_model import GrowingModel
from esper.kasmina.shadow_seeds import COUNTS, ShadowKey
from esper.leyline.errors import DataError, EsperError
from esper.leyline.shadows import AuditionPlan, ShadowReadings
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import save_controller

# Listens, and plants nothing
SILENT = "audition:tries=0,spend=50,certain=1000,unlearned=1,rounds=3,finalists=99"


def model() -> nn.Module:
    """With all that a pass could leave behind: batch statistics, dropout."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(8, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Linear(12, 3),
    )


def data(samples: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 8, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def run(controller: str, **choices: Any) -> GrownRun:
    choices = {"epochs": 8, "slots": "every", "batch_size": 24, "lr": 0.01} | choices
    choices = {"loss": "cross_entropy", "controller": controller, "quiet": True} | choices
    return grow(model(), data(), data(48), budget="+80%", **choices)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(123.0), other.nan_to_num(123.0))
    return bool(one == other)


def test_a_host_does_not_notice_its_shadows() -> None:
    alone, beside = run("never", epochs=15), run(SILENT, epochs=15)
    heard = [record["shadows"] for record in beside.history if "shadows" in record]
    assert len(heard) >= 3
    assert len(heard[0]) >= 15
    assert equal(alone.host.model.state_dict(), beside.host.model.state_dict())
    for one, other in zip(alone.history, beside.history, strict=True):
        assert one["train_loss"] == other["train_loss"]
        assert one["val_loss"] == other["val_loss"]
    states = [each.host.optimizers[0].state_dict() for each in (alone, beside)]
    assert equal(*states)


def shadowed(share: float = 1.0) -> tuple[GrowingModel, torch.optim.Optimizer, ShadowKey]:
    """A host with one shadow that is going to train."""
    host = wrap(model(), data()[0], slots=["2", "5"], isolation="dual_pass")
    optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
    key = ShadowKey(1, host.catalogue.index("wide"))
    where = torch.zeros(1, *torch.tensor(host.catalogue.costs).shape, dtype=torch.bool)
    where[(0, *key)] = True
    host.shadows.restore(
        {}, ShadowReadings.none(1, torch.ones(where.shape[1:])), dict.fromkeys(COUNTS, 0)
    )
    host.shadows.adopt(host, AuditionPlan(where, torch.tensor([share])), batches=8)
    return host, optimizer, key


def test_a_scaled_loss_teaches_a_shadow_what_the_loss_itself_does() -> None:
    taught = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**14)):
        host, _, key = shadowed()
        host.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            host.seed_step(lambda net=host: losses(net).mean(), scaler=scaler)
        shadow = host.shadows.living[key]
        taught.append([shadow.seed.state_dict(), shadow.gains, shadow.squares])
    assert equal(*taught)
    assert bool(torch.stack(taught[0][2]).all())


def test_a_step_of_a_shadow_whose_gradients_overflow_is_left_out() -> None:
    host, _, key = shadowed()
    newborn = deepcopy(host.shadows.living[key].seed.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    host.seed_step(lambda: 1e6 * losses(host).mean(), scaler=scaler)
    assert equal(host.shadows.living[key].seed.state_dict(), newborn)
    host.seed_step(lambda: losses(host).mean())
    assert not equal(host.shadows.living[key].seed.state_dict(), newborn)


def epoch(host: GrowingModel, optimizer: torch.optim.Optimizer, batches: int = 8) -> None:
    inputs, labels = data()
    host.train()
    for batch in range(batches):
        some = slice(12 * batch, 12 * batch + 12)
        optimizer.zero_grad()
        cross_entropy(host(inputs[some]), labels[some]).backward()
        host.seed_step(lambda some=some: cross_entropy(host(inputs[some]), labels[some]))
        optimizer.step()


def losses(net: nn.Module) -> Tensor:
    inputs, labels = data(48)
    return cross_entropy(net(inputs), labels, reduction="none")


@pytest.mark.parametrize(("share", "learned"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.13, 1), (0.1, 0)])
def test_shadows_learn_from_their_share_of_the_batches(share: float, learned: int) -> None:
    host, optimizer, _ = shadowed(share)
    epoch(host, optimizer)
    assert host.shadows.learned == learned


def test_what_is_less_than_a_batch_is_owed_to_them_in_the_next_epoch() -> None:
    host, optimizer, key = shadowed(0.1)
    where = torch.zeros(1, *torch.tensor(host.catalogue.costs).shape, dtype=torch.bool)
    where[(0, *key)] = True
    learned = []
    for _ in range(3):
        epoch(host, optimizer)
        learned.append(host.shadows.learned)
        host.shadows.adopt(host, AuditionPlan(where, torch.tensor([0.1])), batches=8)
    assert learned == [0, 1, 1]  # 0.8, 1.6 and 2.4 batches


@pytest.mark.parametrize(
    ("share", "norm", "shares"),
    [(0.25, False, [0.25] * 16), (0.0625, False, [0.125] * 8), (0.5, True, []), (1.0, False, [])],
)
def test_shadows_learn_from_a_part_of_many_batches_unless_something_goes_by_whole_ones(
    share: float, norm: bool, shares: list[float]
) -> None:
    torch.manual_seed(0)
    between = nn.BatchNorm1d(12) if norm else nn.ReLU()
    host = wrap(
        nn.Sequential(nn.Linear(8, 12), between, nn.Linear(12, 3)),
        data()[0],
        slots=["1"],
        isolation="dual_pass",
    )
    host.optimizer(torch.optim.AdamW, lr=0.01)
    where = torch.zeros(1, *torch.tensor(host.catalogue.costs).shape, dtype=torch.bool)
    where[0, 0, host.catalogue.index("wide")] = True
    readings = ShadowReadings.none(1, torch.ones(where.shape[1:]))
    host.shadows.restore({}, readings, dict.fromkeys(COUNTS, 0))
    host.shadows.adopt(host, AuditionPlan(where, torch.tensor([share])), batches=16)
    inputs, labels = data()
    asked: list[float] = []

    def part(size: float) -> Tensor:
        asked.append(size)
        count = round(12 * size)
        return cross_entropy(host(inputs[:count]), labels[:count])

    for _ in range(16):
        host.seed_step(lambda: cross_entropy(host(inputs), labels), part)
    assert asked[::2] == shares  # with the shadow and without it
    assert host.shadows.learned == pytest.approx(16 * share)


def test_gains_are_paired_over_samples_and_batch_statistics_are_those_of_the_batch() -> None:
    host, optimizer, key = shadowed()
    epoch(host, optimizer)
    seed = host.shadows.living[key].seed
    host.eval()
    host.shadows.measure(host, losses, lambda loss: loss, 1.0)
    readings = host.shadows.readings
    assert readings is not None
    host.model[1].train()  # as the comparison does
    with torch.no_grad():
        base = losses(host)
        hook = host.model[5].register_forward_hook(lambda _m, _i, h: h + seed(h))
        better = (base - losses(host)).double()
        hook.remove()
    assert float(readings.gain[(0, *key)]) == pytest.approx(float(better.mean()), abs=1e-6)
    error = float(better.std()) / 48**0.5
    assert float(readings.error[(0, *key)]) == pytest.approx(error, rel=1e-4)
    assert float(readings.epochs[(0, *key)]) == 1.0
    assert bool(readings.gain.isnan().sum() == readings.gain.numel() - 1)


def test_a_shadow_is_planted_with_what_it_has_learned_and_shows_nothing_yet() -> None:
    host, optimizer, key = shadowed()
    epoch(host, optimizer)
    learned = [each.clone() for each in host.shadows.living[key].seed.parameters()]
    moments = host.shadows.living[key].optimizer
    assert moments is not None
    states = [moments.state[each]["exp_avg"] for each in host.shadows.living[key].seed.parameters()]
    host.eval()
    before = host(data()[0])
    host.germinate("5", "wide", "ramp")
    assert torch.equal(before, host(data()[0]))
    planted = list(host.slots[1].parameters())
    assert equal(learned, [each.detach() for each in planted])
    assert equal(states, [optimizer.state[each]["exp_avg"] for each in planted])
    assert not host.shadows


def test_an_immediate_seed_is_newborn_whatever_its_shadow_has_learned() -> None:
    host, optimizer, _ = shadowed()
    epoch(host, optimizer)
    host.eval()
    before = host(data()[0])
    host.germinate("5", "wide", "immediate")
    assert torch.equal(before, host(data()[0]))


def stopping(epochs: int) -> Callable[[Any], None]:
    def stop(news: Any) -> None:
        if news["epoch"] == epochs:
            raise KeyboardInterrupt

    return stop


HEARING = "audition:tries=0,spend=50,unlearned=0,most_gap=9,rounds=3,certain=0,least=0,margin=-100"


@functools.cache
def undisturbed() -> GrownRun:
    return run(HEARING)


@pytest.mark.parametrize("after", [2, 4])
def test_a_run_that_stops_in_its_audition_goes_on_to_the_bit(after: int, tmp_path: Path) -> None:
    whole = undisturbed()
    with pytest.raises(KeyboardInterrupt):
        run(HEARING, out=tmp_path / "run", on_epoch=stopping(after))
    again = resume(tmp_path / "run", model(), data(), data(48), quiet=True)
    assert equal(whole.host.state_dict(), again.host.state_dict())
    heard = [
        [[(each["slot"], each["gain"]) for each in record.get("shadows", ())] for record in history]
        for history in (whole.history, again.history)
    ]
    assert heard[0] == heard[1]
    assert any(each["decision"]["op"] == "GERMINATE" for each in whole.history)


def test_an_untrained_network_over_tokens_grows_a_model_as_its_rule_does(tmp_path: Path) -> None:
    """Kept in a directory, on a model that it never met; and a run of it goes on to the bit."""
    rule = "audition:tries=0,spend=50,unlearned=0,most_gap=9,rounds=2,certain=0,least=0,margin=-100"
    kept = str(save_controller(TokenActorCritic(), tmp_path / "kept", None, {}, rule=rule))
    by_rule, whole = run(rule), run(kept)
    told = [[record["decision"] for record in each.history] for each in (by_rule, whole)]
    assert told[0] == told[1]
    assert any(each["op"] == "GERMINATE" for each in told[0])
    assert equal(by_rule.export().state_dict(), whole.export().state_dict())
    with pytest.raises(KeyboardInterrupt):
        run(kept, out=tmp_path / "run", on_epoch=stopping(4))
    again = resume(tmp_path / "run", model(), data(), data(48), quiet=True)
    assert equal(whole.host.state_dict(), again.host.state_dict())


def test_a_hosts_own_state_holds_its_shadows() -> None:
    host, optimizer, key = shadowed()
    epoch(host, optimizer, batches=3)
    other, others, _ = shadowed()
    other.load_state_dict(host.state_dict())
    others.load_state_dict(deepcopy(optimizer.state_dict()))
    for each, made in ((host, optimizer), (other, others)):
        torch.manual_seed(1)
        epoch(each, made, batches=3)
    assert equal(host.state_dict(), other.state_dict())
    assert bool(host.shadows.living[key].seed.body[0].weight.abs().sum() > 0)


def test_without_a_loss_the_rule_is_refused_in_a_sentence() -> None:
    inputs, labels = data()
    for isolation, given in (("straight_through", "isolation"), ("dual_pass", "no losses=")):
        host = wrap(model(), inputs, slots="every", isolation=isolation)
        optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
        cross_entropy(host(inputs), labels).backward()
        optimizer.step()
        with pytest.raises(EsperError, match=given):
            host.tick("audition", train_loss=1.0, evaluate=lambda _: 50.0)


class Counting(torch.optim.SGD):
    """One that keeps something of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


class Aside(nn.Module):
    """With a branch that the loss does not look at."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.other = (
            model(),
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), self.other(x)


EAGER = "audition:spend=50,unlearned=0,most_gap=9,rounds=1,certain=0,least=0,margin=-100"


def test_a_last_batch_of_one_is_measured_without_its_statistics() -> None:
    grown = grow(
        model(), data(), data(25), loss="cross_entropy", budget="+80%", controller=EAGER,
        epochs=6, batch_size=24, lr=0.01, quiet=True,
    )  # fmt: skip
    assert any("shadows" in record for record in grown.history)


def test_shadows_learn_with_an_optimiser_of_the_users_that_never_steps_for_them() -> None:
    grown = run(EAGER, epochs=6, optimizer=Counting)
    optimizer = grown.host.optimizers[0]
    assert isinstance(optimizer, Counting)
    assert optimizer.steps == 6 * 4


def test_what_never_reaches_the_loss_is_heard_in_silence_and_not_planted() -> None:
    rule = "audition:spend=50,unlearned=0,most_gap=9,rounds=1,certain=1000,margin=-100"
    grown = grow(
        Aside(), data(), data(48), budget="+80%", slots=["other.1", "main.5"], controller=rule,
        loss=lambda outputs, labels: cross_entropy(outputs[0], labels), epochs=6, batch_size=24,
        metric=lambda outputs, labels: 50.0, lr=0.01, quiet=True,
    )  # fmt: skip
    heard = next(record["shadows"] for record in grown.history if "shadows" in record)
    assert {note["gain"] for note in heard if note["slot"] == "other.1"} == {0.0}
    assert {
        each["decision"]["slot"] for each in grown.history if each["decision"]["op"] == "GERMINATE"
    } == {"main.5"}


def test_rates_fall_over_all_that_is_heard_however_many_batches_a_step_has() -> None:
    host, optimizer, _ = shadowed(share=0.0)
    inputs, labels = data()
    for each in range(8):
        cross_entropy(host(inputs), labels).backward()
        host.seed_step(lambda: cross_entropy(host(inputs), labels))
        if each % 4 == 3:
            optimizer.step()
    assert host.shadows.seen == 8
    host.tick("never", train_loss=1.0, evaluate=lambda _: 50.0)
    assert not host.shadows  # nobody listens any more
    assert host.shadows.seen == 0


def test_shadows_go_on_with_another_optimiser_of_the_model() -> None:
    host, optimizer, _ = shadowed()
    epoch(host, optimizer, batches=2)
    parts = [list(host.model[:3].parameters()), list(host.model[3:].parameters())]
    other = host.optimizer(torch.optim.SGD, groups=[{"params": p} for p in parts], lr=0.1)
    epoch(host, other, batches=2)
    back = host.optimizer(torch.optim.AdamW, lr=0.01)
    host.germinate("5", "wide", "ramp")
    epoch(host, back, batches=2)
    assert all("exp_avg" in back.state[each] for each in host.slots.parameters())


def test_shadows_learn_in_the_closure_of_a_step_and_move_with_their_host() -> None:
    host, optimizer, key = shadowed()
    host.double()
    inputs, labels = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(host(inputs.double()), labels)
        loss.backward()
        host.seed_step(lambda: cross_entropy(host(inputs.double()), labels))
        return loss

    for _ in range(2):
        optimizer.step(closure)
    learned = host.shadows.living[key]
    assert learned.seed.body[0].weight.dtype is torch.float64
    assert learned.optimizer is not None
    assert all(float(each["step"]) == 2.0 for each in learned.optimizer.state.values())


@pytest.mark.parametrize("given", [torch.tensor(1.0), 1.0, torch.ones(4, 3)])
def test_losses_that_are_not_of_samples_are_refused_in_a_sentence(given: Any) -> None:
    host, optimizer, _ = shadowed()
    epoch(host, optimizer, batches=1)
    with pytest.raises(DataError, match="the loss of every validation sample"):
        host.shadows.measure(host, lambda _: given, lambda loss: loss, 1.0)


def test_a_host_without_any_gradient_leaves_that_of_shadows_unknown() -> None:
    host, optimizer, key = shadowed()
    epoch(host, optimizer, batches=1)
    host.shadows.measure(host, lambda _: torch.ones(1), lambda loss: loss, 0.0)
    assert host.shadows.readings is not None
    assert bool(host.shadows.readings.gradient[(0, *key)].isnan())
    assert bool(host.shadows.readings.error[(0, *key)].isnan())


def test_gains_keep_their_sign_where_losses_are_negative() -> None:
    grown = run(
        SILENT, epochs=6, loss=lambda outputs, labels: cross_entropy(outputs, labels) - 5.0,
        metric=lambda outputs, labels: 100.0 * (outputs.argmax(1) == labels).float().mean(),
    )  # fmt: skip
    assert grown.host.memory.relative(1.0) > 0.0


def test_too_few_epochs_are_refused_without_advice_that_is_refused_too() -> None:
    with pytest.raises(EsperError, match="train for at least 4 epochs") as caught:
        run("audition", epochs=3)
    assert "first=" not in str(caught.value)


def test_nothing_is_heard_where_it_is_too_late_to_plant_it() -> None:
    assert not any("shadows" in record for record in run(EAGER, epochs=5).history)
