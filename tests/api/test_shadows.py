"""Shadows beside a model of one's own: never seen by it, measured, planted warm, kept."""

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
from esper.api.ticking import TickError
from esper.kasmina.shadow_seeds import COUNTS, ShadowKey
from esper.leyline.shadows import AuditionPlan, ShadowReadings

SILENT = "audition:spend=50,certain=1000,unlearned=1,rounds=3"  # listens, and plants nothing


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
    return grow(
        model(), data(), data(48), loss="cross_entropy", budget="+80%", controller=controller,
        quiet=True, **choices,
    )  # fmt: skip


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


@pytest.mark.parametrize(("share", "learned"), [(1.0, 8), (0.5, 4), (0.3, 2), (0.0, 0)])
def test_shadows_learn_from_their_share_of_the_batches(share: float, learned: int) -> None:
    host, optimizer, _ = shadowed(share)
    epoch(host, optimizer)
    assert host.shadows.learned == learned


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


@pytest.mark.parametrize("after", [2, 4])
def test_a_run_that_stops_in_its_audition_goes_on_to_the_bit(after: int, tmp_path: Path) -> None:
    controller = "audition:spend=50,unlearned=0,most_gap=9,rounds=3,certain=0,least=0,margin=-100"
    whole = run(controller)
    with pytest.raises(KeyboardInterrupt):
        run(controller, out=tmp_path / "run", on_epoch=stopping(after))
    again = resume(tmp_path / "run", model(), data(), data(48), quiet=True)
    assert equal(whole.host.state_dict(), again.host.state_dict())
    heard = [
        [[(each["slot"], each["gain"]) for each in record.get("shadows", ())] for record in history]
        for history in (whole.history, again.history)
    ]
    assert heard[0] == heard[1]
    assert any(each["decision"]["op"] == "GERMINATE" for each in whole.history)


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
        with pytest.raises(TickError, match=given):
            host.tick("audition", train_loss=1.0, evaluate=lambda _: 50.0)
