"""An audit names what a model lacks and where, never more than it measured, and leaves it alone."""

import json
import random
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import esper
from esper.api import auditing, ranks
from esper.leyline.errors import DataError
from esper.show.audit_facts import CERTAIN, WORTH, Audit, Candidate, Verdict, judged
from tests.api.test_shadows import equal

LINE = 24
PATTERNS = torch.tensor(
    [[1.0, -1, 1, -1, 1], [1, 1, -1, -1, -1], [-1, 0, 2, 0, -1], [-1, -1, -1, 1, 1]]
)


def patterns(samples: int, seed: int, *, noise: bool = False) -> tuple[Tensor, Tensor]:
    """Lines with one of four patterns anywhere on them; or with labels that mean nothing."""
    generator = torch.Generator().manual_seed(seed)
    labels, other = (torch.randint(4, (samples,), generator=generator) for _ in range(2))
    start = torch.randint(LINE - 5, (samples,), generator=generator)
    lines = 0.3 * torch.randn(samples, LINE, generator=generator)
    for point in range(5):
        lines[torch.arange(samples), start + point] += 2 * PATTERNS[labels, point]
    return lines, other if noise else labels


def parities(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Nothing is seen of it until all of it is."""
    lines = torch.randn(samples, LINE, generator=torch.Generator().manual_seed(seed))
    return lines, (lines[:, :8] > 0).sum(1) % 2


def net(classes: int = 4) -> nn.Sequential:
    """Looks at every point at its own place."""
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(LINE), nn.Linear(LINE, 24), nn.ReLU(), nn.Linear(24, classes))


def audit(model: nn.Module | None = None, task: Any = patterns, **options: Any) -> Audit:
    usual = {"loss": "cross_entropy", "budget": "+80%", "lr": 1e-2, "quiet": True}
    data = task(768, 0), task(512, 1)
    return esper.audit(model or net(), *data, **{**usual, **options})


@cache
def found() -> Audit:
    return audit()


def test_the_mechanism_that_is_missing_is_named_at_its_place() -> None:
    heard = found()
    assert heard.verdict is Verdict.MISSING
    best, second = heard.best(2)
    assert (best.slot, best.blueprint, best.verdict) == ("0", "convpool", Verdict.MISSING)
    assert best.low > 2 * second.gain
    assert best.epochs == heard.epochs == 3
    assert len(heard.candidates) == 15
    assert heard.combinations[0][0] is best
    text = str(heard)
    assert "convpool at 0 (+504) is missing" in text
    assert "15 of 15 seeds that fit were heard, one by one, for 3 epochs on 100% of the b" in text


def test_labels_that_mean_nothing_show_nothing_missing() -> None:
    heard = audit(task=lambda samples, seed: patterns(samples, seed, noise=True), epochs=2)
    assert heard.verdict in (Verdict.PLATEAU, Verdict.MEMORISE)
    assert Verdict.MISSING not in {each.verdict for each in heard.candidates}
    assert not heard.combinations


def test_a_plateau_is_named_and_nothing_is_said_of_it() -> None:
    heard = audit(net(2), parities, epochs=2)
    assert heard.verdict is Verdict.PLATEAU
    assert "nothing can be said" in heard.headline
    assert not heard.combinations


def test_the_model_and_all_random_numbers_are_left_as_they_were() -> None:
    model = nn.Sequential(
        nn.Linear(LINE, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.ReLU(), nn.Linear(12, 4)
    )
    model[1].eval()
    before, modes = deepcopy(model.state_dict()), [each.training for each in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    audit(model, epochs=1, blueprints=["gate"])
    assert equal(dict(model.state_dict()), dict(before))
    assert [each.training for each in model.modules()] == modes
    assert all(each.grad is None for each in model.parameters())
    assert not any(each._forward_hooks for each in model.modules())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_the_same_seed_finds_the_same() -> None:
    short = {"epochs": 1, "blueprints": ["norm", "lowrank"]}
    assert audit(**short).candidates == audit(**short).candidates


def test_an_audit_is_a_value_that_json_holds() -> None:
    heard = found()
    assert Audit.of_json(heard.to_json()) == heard
    one = replace(heard, candidates=(replace(heard.candidates[0], error=None),))
    assert Audit.of_json(one.to_json()) == one  # of a single validation sample
    assert json.loads(heard.to_json())["candidates"][0]["verdict"] == "missing here"
    for text in ("", "[]", "{}", heard.to_json().replace("missing here", "lost")):
        with pytest.raises(DataError, match="This is no audit"):
            Audit.of_json(text)


def test_verdicts_say_no_more_than_intervals_do() -> None:
    worth = WORTH * 2.0
    assert judged(worth, worth / CERTAIN * 0.99, 0.0, 2.0, 0.0) is Verdict.MISSING
    assert judged(worth, worth / CERTAIN * 1.01, 0.0, 2.0, 0.0) is Verdict.UNCLEAR
    assert judged(0.9 * worth, 0.01 * worth, 0.0, 2.0, 0.0) is Verdict.NOTHING
    assert judged(-worth, 0.4 * worth, 1.1 * worth, 2.0, 0.0) is Verdict.MEMORISE
    assert judged(-worth, 0.4 * worth, 0.9 * worth, 2.0, 0.0) is Verdict.NOTHING
    assert judged(-worth, 1.5 * worth, 1.1 * worth, 2.0, 0.0) is Verdict.UNCLEAR
    assert judged(9.0, None, 9.0, 2.0, 0.0) is Verdict.UNCLEAR


def test_what_a_model_gains_faster_by_itself_is_not_called_missing() -> None:
    gain = 9 * WORTH * 2.0
    assert judged(gain, gain / 10, 0.0, 2.0, 0.9 * gain) is Verdict.MISSING
    assert judged(gain, gain / 10, 0.0, 2.0, 1.1 * gain) is Verdict.UNCLEAR
    best = found().best()[0]
    still = [replace(best, verdict=Verdict.UNCLEAR), *(silent().candidates)]
    early = replace(found(), candidates=tuple(still), fell=2 * best.gain)
    assert early.verdict is Verdict.UNCLEAR
    assert "the model alone by" in early.headline
    assert not early.combinations
    assert replace(early, fell=0.5 * best.gain).verdict is not Verdict.UNCLEAR


def silent(**losses: float) -> Audit:
    """In which no candidate is certain to help; losses in units of guessing."""
    heard = [each for each in found().candidates if each.verdict is Verdict.NOTHING]
    scaled = {name: value * found().guess for name, value in losses.items()}
    return replace(found(), candidates=tuple(heard), **scaled)


def test_where_nothing_is_missing_the_host_tells_what_that_means() -> None:
    much = silent(train_loss=0.5, val_loss=0.55)
    assert much.verdict is Verdict.CAPACITY
    assert [each.params for each in much.combinations[0]] == [
        max(each.params for each in much.candidates)
    ]
    assert silent(train_loss=0.05, val_loss=0.1).verdict is Verdict.NOTHING
    assert silent(train_loss=0.05, val_loss=0.4).verdict is Verdict.MEMORISE
    assert silent(train_loss=0.99, val_loss=0.99).verdict is Verdict.PLATEAU
    unclear = [replace(each, verdict=Verdict.UNCLEAR) for each in much.candidates]
    assert replace(much, candidates=tuple(unclear)).verdict is Verdict.UNCLEAR


def test_combinations_are_of_different_places_within_the_budget() -> None:
    def missing(slot: str, params: int, gain: float) -> Candidate:
        known = {"slot": slot, "params": params, "gain": gain, "verdict": Verdict.MISSING}
        return replace(found().candidates[0], **known)

    best, like, second, large = (
        missing("0", 300, 0.4), missing("0", 100, 0.39), missing("1", 250, 0.3),
        missing("2", 500, 0.2),
    )  # fmt: skip
    heard = replace(found(), candidates=(best, like, second, large), room=560)
    assert heard.combinations == ((best, second), (like, second), (best,))


def test_guessing_is_what_the_mean_is_worth_where_there_are_no_classes() -> None:
    def sums(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        lines, _ = patterns(samples, seed)
        return lines, lines.sum(1, keepdim=True) + 9.0

    short: dict[str, Any] = {"epochs": 1, "blueprints": ["lowrank"]}
    heard = audit(net(1), sums, loss="mse", **short)
    assert heard.guess == pytest.approx(float(sums(512, 1)[1].var(correction=0)), rel=1e-4)
    own = audit(net(1), sums, loss=lambda out, y: (out - y).square().mean(), **short)
    assert own.guess == pytest.approx(heard.guess)
    assert own.candidates[0].gain == pytest.approx(heard.candidates[0].gain, rel=0.5)


def test_fewer_seconds_hear_less_and_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditing, "_step_seconds", lambda *_: 0.01)  # 6 of them are an epoch
    short: dict[str, Any] = {"blueprints": ["gate", "lowrank", "mlp"], "epochs": 2, "quiet": False}
    short["task"] = lambda samples, seed: patterns(samples // 2, seed)
    told = {}
    for seconds in (None, 1.2, 0.4, 0.3):
        heard = audit(**short, seconds=seconds)
        told[seconds] = capsys.readouterr().err.partition(": as much as")[0]
        longest = sorted(each.epochs for each in heard.candidates)
        if seconds is None:
            assert longest == [2.0] * 9
        elif seconds == 1.2:
            assert len(longest) == 9
            assert 1.0 < longest[0] == longest[-1] < 2.0
        else:
            assert len(longest) == (5 if seconds == 0.4 else 3)
            assert longest[0] == longest[-1]
        assert f"{len(longest)} of 9 seeds that fit were heard" in str(heard)
    assert told[None] == "Audit of Sequential: 9 of 9 seeds that fit, on 100% of the batches"
    assert told[0.4].startswith("Audit of Sequential: 5 of 9 seeds that fit, on 20% of the batches")


def test_a_run_plants_what_an_audit_found_also_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = patterns(768, 0), patterns(512, 1)
    same: dict[str, Any] = {"loss": "cross_entropy", "budget": "+80%", "lr": 1e-2, "quiet": True}

    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] in (3, 4):
            raise KeyboardInterrupt

    given = {"audit": found(), "epochs": 8, **same}
    whole = esper.grow(net(), *data, **given)
    with pytest.raises(KeyboardInterrupt):
        esper.grow(net(), *data, **given, out=tmp_path / "run", on_epoch=stop)
    monkeypatch.setattr(ranks, "is_restart_of", lambda *_: True)  # as after a process was lost
    with pytest.raises(KeyboardInterrupt):
        esper.grow(net(), *data, **given, out=tmp_path / "run", on_epoch=stop)
    again = esper.resume(tmp_path / "run", net(), *data, quiet=True)
    assert [(life.name, life.planted, life.fate) for life in whole.seeds] == [
        ("convpool at 0", 1, "permanent")
    ]
    assert equal(whole.export().state_dict(), again.export().state_dict())
    assert "convpool" in again.settings.controller
    empty = replace(found(), candidates=silent(train_loss=0.05, val_loss=0.1).candidates[:1])
    empty = replace(empty, train_loss=0.0, val_loss=0.0)
    assert esper.grow(net(), *data, **{**given, "audit": empty, "epochs": 1}).seeds == ()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*patterns(64, 0), strict=True))


WRONG: dict[str, tuple[Any, str]] = {
    "no epochs": (lambda: audit(epochs=0), "An audit takes epochs and time"),
    "no seconds": (lambda: audit(seconds=-1.0), "seconds=-1.0; valid: whole numbers"),
    "no time": (lambda: audit(seconds=1e-6), "There is no time for an audit; given: seconds=1e-06"),
    "no model": (lambda: esper.audit(3, *([patterns(8, 0)] * 2), loss="mse"), "torch nn.Module"),
    "no room": (lambda: audit(budget=0), "no seed fits the budget"),
    "a stream in time": (
        lambda: esper.audit(net(), DataLoader(Stream(), 32), patterns(64, 1), loss="cross_entropy",
                            budget="+80%", seconds=3.0),
        "None, since these data do not know their length",
    ),
    "a model that is part of a computation": (
        lambda: audit(_computed()), "The model cannot be copied"
    ),
    "an audit of another": (
        lambda: esper.grow(net(2), patterns(64, 0), patterns(64, 1), loss="cross_entropy",
                           budget="+80%", audit=found()),
        "The audit is of another model",
    ),
    "a controller beside": (
        lambda: esper.grow(net(), patterns(64, 0), patterns(64, 1), loss="cross_entropy",
                           budget="+80%", audit=found(), controller="never"),
        "and neither controller nor slots",
    ),
    "a page in a file": (lambda: found().save("/dev/null/audit.html"), "cannot be written"),
}  # fmt: skip


def _computed() -> nn.Module:
    model = net()
    model.last = torch.ones(3, requires_grad=True) * 2
    return model


@pytest.mark.parametrize("name", WRONG)
def test_one_sentence_says_what_is_wrong(name: str) -> None:
    call, sentence = WRONG[name]
    with pytest.raises(esper.leyline.errors.EsperError) as caught:
        call()
    assert sentence in str(caught.value)


class Told:
    """Outputs that torch does not know."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Told:
        return Told(self.inner(x))


def test_outputs_of_any_form_and_losses_below_zero_are_audited() -> None:
    heard = audit(
        Telling(), epochs=1, blueprints=["gate"], metric=lambda outputs, labels: 50.0,
        loss=lambda outputs, labels: nn.functional.cross_entropy(outputs.logits, labels) - 9.0,
    )  # fmt: skip
    assert heard.guess > 0.0
    assert "gate" in str(heard)


def test_a_single_validation_sample_of_a_regression_is_too_little_to_tell() -> None:
    lines = torch.randn(64, LINE)
    held_out = lines[:1], torch.ones(1, 1)
    model = net(1)
    heard = esper.audit(
        model, (lines, lines[:, :1]), held_out, loss="mse", budget="+80%", epochs=1, quiet=True
    )
    assert {each.verdict for each in heard.candidates} == {Verdict.UNCLEAR}
    assert str(heard)
