"""Trying out the finalists of an audition: the run goes on as if they had been chosen when the
audition began, or as if nothing had been.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper.api import GrownRun, grow, resume, tryouts
from esper.api.batches import first_of, samples_of
from esper.api.grow_loop import Growth
from esper.api.ticking import NotFiniteError
from esper.api.tryouts import START
from esper.archive import ArchiveError
from esper.tamiyo import TokenActorCritic, TokenController
from esper.tamiyo.controllers import make_controller
from esper.tamiyo.controllers.auditioning import Audition

EPOCHS = 9
LAST = 1 + 3  # the epoch that tryouts end with: three tenths of all, after the first
HEARD = "audition:spend=50"


def model() -> nn.Module:
    """With all that a tryout could leave behind: batch statistics, dropout."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def data(samples: int = 96) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    inputs = torch.randn(samples, 12, generator=generator)
    return inputs, inputs.unfold(1, 4, 4).square().sum(-1).argmax(1)


def settings(**more: Any) -> dict[str, Any]:
    made = lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS)  # noqa: E731
    return {"batch_size": 24, "lr": 0.02, "scheduler": made, "quiet": True} | more


def run(controller: Any, **choices: Any) -> GrownRun:
    choices = settings(loss="cross_entropy", budget="+250%", epochs=EPOCHS, slots="every") | choices
    return grow(model(), data(), data(48), controller=controller, **choices)


@functools.cache
def undisturbed(controller: str) -> GrownRun:
    """To be compared with."""
    return run(controller)


def again(path: Path) -> GrownRun:
    made = settings()["scheduler"]
    return resume(path, model(), data(), data(48), scheduler=made, quiet=True)


def ahead_by(share: float, spec: str = HEARD) -> Audition:
    """The rule whose finalists must be better than the host alone by this share of its loss."""
    rule = make_controller(spec)
    assert isinstance(rule, Audition)
    object.__setattr__(rule.config, "ahead", share)
    return rule


def tryouts_of(found: GrownRun) -> list[dict[str, Any]]:
    assert all(("tryouts" in record) == (record["epoch"] == LAST) for record in found.history)
    held: list[dict[str, Any]] = found.history[LAST - 1]["tryouts"]
    return held


def plan_of(found: GrownRun) -> str:
    """What was tried out, as a plan from the first epoch on."""
    (name,) = tryouts_of(found)[-1]["seeds"]
    kind, place = name.split(" at ")
    return f"fixed:slot={place},blueprint={kind},epoch=1"


def weights(found: GrownRun) -> dict[str, Tensor]:
    return {n: each for n, each in found.host.state_dict().items() if not n.startswith("memory.")}


def same(one: GrownRun, other: GrownRun) -> bool:
    mine, its = weights(one), weights(other)
    moments = [each.host.optimizers[0].state_dict()["state"] for each in (one, other)]
    steps = [{key: sorted(state) for key, state in each.items()} for each in moments]
    return (
        mine.keys() == its.keys()
        and all(torch.equal(mine[name], its[name]) for name in mine)
        and steps[0] == steps[1]
        and one.after == other.after
    )


def test_what_is_ahead_goes_on_as_if_it_had_been_planted_when_the_audition_began() -> None:
    tried = run(ahead_by(-9.0, f"{HEARD},tries=1"))
    planned = run(plan_of(tried))
    assert same(tried, planned)
    for mine, its in zip(tried.history[LAST - 1 :], planned.history[LAST - 1 :], strict=True):
        assert mine["val_loss"] == its["val_loss"]
        assert mine["added"] == its["added"]
    assert tried.history[LAST - 1]["decision"]["op"] == "GERMINATE"
    assert {seed.name for seed in tried.report().seeds} == {s.name for s in planned.report().seeds}


def test_several_are_planted_one_after_the_other_and_all_of_them_are_kept() -> None:
    tried = run(ahead_by(-9.0))
    (note,), last = tryouts_of(tried), tried.history[-1]
    assert len(note["seeds"]) >= 2
    assert {seed.name for seed in tried.report().grown} == set(note["seeds"])
    assert last["added"] == sum(seed.params for seed in tried.report().grown)


class Nested(torch.optim.Optimizer):
    """Remembers squares of gradients in a list, and changes them in place."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    (seen,) = self.state[each].setdefault("GG", [torch.zeros_like(each)])
                    seen.add_(each.grad.square())
                    each.addcdiv_(each.grad, seen.sqrt() + 1e-8, value=-group["lr"])


@pytest.mark.parametrize("optimizer", ["adamw", Nested])
def test_what_does_not_get_ahead_together_may_alone(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Growth.epoch
    seen: list[int] = []

    def diverging(growth: Growth, number: int) -> Any:
        seen.append(number)
        if number == 2 and seen.count(2) == 2:  # of the first cast
            raise NotFiniteError("The loss is not finite")
        return trained(growth, number)

    monkeypatch.setattr(tryouts, "MOST_TRIED", 9.0)
    with monkeypatch.context() as patch:
        patch.setattr(Growth, "epoch", diverging)
        tried = run(ahead_by(-9.0), optimizer=optimizer)
    first, second = tryouts_of(tried)
    assert len(first["seeds"]) >= 2
    assert [each["chosen"] for each in (first, second)] == [False, True]
    assert same(tried, run(plan_of(tried), optimizer=optimizer))


def test_a_host_that_is_ahead_of_its_finalists_goes_on_as_if_nothing_had_been(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tryouts, "MOST_TRIED", 9.0)
    tried, never = run(ahead_by(9.0)), undisturbed("never")
    assert same(tried, never)
    assert [each["val_loss"] for each in tried.history] == [e["val_loss"] for e in never.history]
    first, second = tryouts_of(tried)
    assert len(second["seeds"]) == 1  # the most promising one, alone
    assert not first["chosen"]
    assert not second["chosen"]
    assert min(first["flops"], second["flops"]) > 0
    assert str(tried.report()).count("left out") == 2
    shadows = sum(each.get("shadow_cost", 0.0) * each["flops"] for each in tried.history)
    alone = sum(each["flops"] for each in never.history)
    assert tried.report().flops == pytest.approx(alone + shadows + first["flops"] + second["flops"])


def test_after_a_costly_tryout_there_is_no_other() -> None:
    (note,) = tryouts_of(run(ahead_by(9.0)))
    whole = sum(record["flops"] for record in undisturbed("never").history)
    assert not note["chosen"]
    assert note["flops"] > tryouts.MOST_TRIED * whole


def test_who_is_ahead_by_less_than_the_host_gains_in_a_part_of_an_epoch_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = ahead_by(0.0)
    (note,) = tryouts_of(run(rule))
    losses = [record["val_loss"] for record in undisturbed("never").history[LAST - 3 : LAST]]
    stride = abs(losses[0] - losses[2]) / 2  # of means over two epochs
    lead = note["alone"] - note["val_loss"]
    assert lead > 0
    for early, chosen in ((lead / stride * 0.9, True), (lead / stride * 1.1, False)):
        monkeypatch.setattr(tryouts, "EARLY", early)
        assert tryouts_of(run(rule))[0]["chosen"] is chosen


def test_a_host_that_gets_worse_sets_no_higher_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    mean = tryouts._validation_loss

    def better_before(history: Any) -> float:
        return mean(history) - 1e6 * (history[-1]["epoch"] == LAST - 1)

    monkeypatch.setattr(tryouts, "_validation_loss", better_before)
    assert tryouts_of(run(ahead_by(0.0)))[0]["chosen"]


def test_where_flops_cannot_be_counted_trying_out_ends_after_half_as_many_epochs_as_a_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.api.grow_loop.step_flops", lambda host: None)
    held = tryouts_of(run(ahead_by(9.0, f"{HEARD},casts=3")))
    epochs = LAST - 1  # of each
    assert (len(held) - 1) * epochs <= EPOCHS / 2 < len(held) * epochs


@pytest.mark.parametrize("after", [1, 3, LAST, LAST + 1])
def test_a_run_that_stops_goes_on_to_the_bit_whatever_it_was_doing(
    after: int, tmp_path: Path
) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == after:
            raise KeyboardInterrupt

    whole, place = undisturbed(HEARD), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(HEARD, out=place, on_epoch=stop)
    assert (place / START).is_dir() == (after <= LAST)  # the checkpoint before needs it too
    other = again(place)
    assert same(whole, other)
    assert json.dumps(whole.history) == json.dumps(other.history)
    assert not (place / START).exists()


def test_a_run_that_stops_in_the_middle_of_a_tryout_begins_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, place, trained = undisturbed(HEARD), tmp_path / "run", Growth.epoch
    seen: list[int] = []

    def stopping(growth: Growth, number: int) -> Any:
        seen.append(number)
        if seen.count(3) == 2:  # the second time is that of the first tryout
            raise KeyboardInterrupt
        return trained(growth, number)

    with monkeypatch.context() as patch:
        patch.setattr(Growth, "epoch", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(HEARD, out=place)
    assert same(whole, again(place))


def test_after_the_tryouts_the_checkpoint_before_them_ends_as_the_run_would_have(
    tmp_path: Path,
) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == LAST:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(HEARD, out=tmp_path, on_epoch=stop)
    (file,) = (tmp_path / "checkpoint").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    whole, other = undisturbed(HEARD), again(tmp_path)
    assert same(whole, other)
    assert json.dumps(whole.history) == json.dumps(other.history)
    assert not (tmp_path / START).exists()


def test_a_run_that_stops_before_it_removes_its_beginning_does_so_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tryouts, "shutil", SimpleNamespace(rmtree=stop))
        with pytest.raises(KeyboardInterrupt):
            run(HEARD, out=tmp_path)
    assert (tmp_path / START).is_dir()
    assert same(undisturbed(HEARD), again(tmp_path))
    assert not (tmp_path / START).exists()


def test_a_damaged_beginning_is_refused_when_the_run_goes_on(tmp_path: Path) -> None:
    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(HEARD, out=tmp_path, on_epoch=stop)
    file = next((tmp_path / START).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8] + b"damaged!")
    with pytest.raises(ArchiveError):
        again(tmp_path)


def test_finalists_that_diverge_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Growth.epoch
    seen: list[int] = []

    def diverging(growth: Growth, number: int) -> Any:
        seen.append(number)
        if number == 3 and seen.count(3) == 2:
            raise NotFiniteError("The loss is not finite")
        return trained(growth, number)

    monkeypatch.setattr(Growth, "epoch", diverging)
    tried = run(ahead_by(-9.0, f"{HEARD},casts=1"))
    assert same(tried, undisturbed("never"))
    assert tryouts_of(tried)[0]["val_loss"] is None
    assert "it diverged" in str(tried.report())


def test_a_diverged_trial_costs_every_epoch_it_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    mean_loss = Growth._mean_loss
    epochs_trained: list[int] = []

    def diverge_in_trial(growth: Growth, batch_losses: Tensor) -> float:
        epochs_trained.append(len(growth.trained_flops))
        if len(epochs_trained) == LAST + 2:  # the second epoch of the trial
            raise NotFiniteError("The loss is not finite")
        return mean_loss(growth, batch_losses)

    monkeypatch.setattr(Growth, "_mean_loss", diverge_in_trial)
    tried = run(ahead_by(-9.0, f"{HEARD},casts=1"))
    (trial,) = tryouts_of(tried)
    assert trial["val_loss"] is None
    assert trial["flops"] >= 2 * tried.history[0]["flops"]


def test_a_controller_over_tokens_tries_out_as_its_rule_does_and_has_its_say_in_who_comes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tryouts, "MOST_TRIED", 9.0)
    rule = ahead_by(9.0)  # no cast is, so all are tried out
    alone = run(rule)
    assert same(run(TokenController(TokenActorCritic(), rule)), alone)  # untrained it is the rule
    _, second = tryouts_of(alone)
    (name,) = second["seeds"]

    def others(self: TokenController, signals: Any) -> Tensor:
        blueprints, slots = signals.catalogue.names, signals.catalogue.slots.names
        named = [[f"{blueprint} at {slot}" == name for blueprint in blueprints] for slot in slots]
        return -1e3 * torch.tensor(named).double()

    monkeypatch.setattr(TokenController, "hopes", others)
    told = tryouts_of(run(TokenController(TokenActorCritic(), rule)))
    assert told[0]["seeds"] == tryouts_of(alone)[0]["seeds"]
    assert told[1]["seeds"] != second["seeds"]


def test_too_few_epochs_for_a_tryout_leave_the_rule_alone() -> None:
    assert not any("tryouts" in record for record in run(HEARD, epochs=5).history)
    assert not any("tryouts" in record for record in run("audition:tries=0,spend=9").history)


def test_a_share_of_a_batch_is_its_first_samples_and_one_at_least() -> None:
    inputs = {"x": torch.arange(12.0).view(6, 2), "mask": torch.ones(6, dtype=torch.bool)}
    pair = (inputs, torch.arange(6))
    assert samples_of(pair) == 6
    part = first_of(pair, 0.5)
    assert torch.equal(part[0]["x"], inputs["x"][:3])
    assert torch.equal(part[1], torch.arange(3))
    assert len(first_of(pair, 0.01)[1]) == 1
    assert samples_of((torch.zeros(6, 2), torch.zeros(5))) == 0
    assert samples_of((torch.zeros(6, 2), torch.tensor(1.0))) == 0
