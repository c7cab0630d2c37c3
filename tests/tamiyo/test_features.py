"""Observations: named, bounded, honest about what is not measured, and a row's own."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import (
    NOTHING,
    AgreementError,
    Blend,
    Lifecycle,
    LifecycleOp,
    SeedStage,
    UnknownNameError,
)
from esper.leyline.signals import FLOW_STATISTICS, SIGNAL_WINDOW, Signals
from esper.tamiyo import FeatureTable, signals_to_features
from esper.tamiyo.controllers import RandomLegal
from esper.tamiyo.features import GLOBAL_FEATURES, LAGS
from tests.tamiyo.gardens import HORIZON, Tape, TapeGarden, catalogue_of, play

CATALOGUE = catalogue_of()
TABLE = FeatureTable.of(CATALOGUE)
WILD = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e30, 1e-30, 1.0, 50.0, 1e4])


def wild_signals(seed: int, rows: int, classes: int = 10) -> Signals:
    """Any lifecycle and any measurement, sensible or not."""
    chance = torch.Generator().manual_seed(seed)
    slots = len(CATALOGUE.slots)

    def pick(*shape: int) -> torch.Tensor:
        return WILD[torch.randint(len(WILD), shape, generator=chance)].double()

    def count(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=chance)

    def flags(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=chance) < 0.5

    life = replace(
        Lifecycle.dormant(rows, slots),
        stage=count(len(SeedStage), rows, slots),
        blueprint=count(len(CATALOGUE.names), rows, slots, low=NOTHING),
        blend=count(len(Blend), rows, slots, low=NOTHING),
        alpha=torch.rand(rows, slots, generator=chance).double(),
        age=count(60, rows, slots),
        epochs_in_stage=count(60, rows, slots),
        embargo=count(5, rows, slots),
        params=count(9_000, rows, slots),
        contribution=pick(rows, slots),
        contribution_known=flags(rows, slots),
        gradient=pick(rows, slots),
        gradient_known=flags(rows, slots),
        loss_rise=pick(rows),
        loss_rise_known=flags(rows),
        epoch=count(60, rows),
        interventions=count(60, rows),
    )
    window = [pick(rows, SIGNAL_WINDOW) for _ in range(4)]
    budget = torch.where(flags(rows), torch.iinfo(torch.int64).max, count(9_000, rows))
    return Signals(
        CATALOGUE,
        life,
        budget,
        count(60, rows),
        classes,
        *window,
        host_gradient=pick(rows),
        draws=torch.rand(rows, 4, generator=chance),
        flow=pick(rows, slots, len(FLOW_STATISTICS)),
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 9), classes=st.sampled_from([1, 2, 10]))
def test_whatever_was_measured_observations_are_finite_and_in_range(
    seed: int, rows: int, classes: int
) -> None:
    features = signals_to_features(wild_signals(seed, rows, classes))
    low, high = TABLE.bounds()
    assert features.shape == (rows, TABLE.size)
    assert features.dtype == torch.float32
    assert bool(features.isfinite().all())
    assert bool(((features >= low) & (features <= high)).all())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_a_presence_flag_is_on_exactly_where_something_was_measured(seed: int) -> None:
    signals = wild_signals(seed, 7)
    life = signals.lifecycle
    whole, slots = TABLE.split(signals_to_features(signals))

    def column(name: str) -> torch.Tensor:
        return whole[:, TABLE.index(name)].bool()

    def slot_column(name: str) -> torch.Tensor:
        return slots[..., TABLE.index(f"early:{name}") - TABLE.globals].bool()

    series = (signals.train_loss, signals.validation_loss, signals.validation_accuracy)
    known = ~torch.stack(series).isnan().any(0)  # [N, W]
    assert torch.equal(column("measured"), known[:, -1])
    for lag in LAGS:
        assert torch.equal(column(f"measured_{lag}"), known[:, -1] & known[:, -1 - lag])
    assert torch.equal(column("committed_known"), ~signals.latest("committed_accuracy").isnan())
    assert torch.equal(column("gradient_known"), ~signals.host_gradient.isnan())
    rises = life.loss_rise_known & ~life.loss_rise.isnan()
    assert torch.equal(column("loss_rise_known"), rises)
    contributes = life.contribution_known & ~life.contribution.isnan()
    assert torch.equal(slot_column("contribution_known"), contributes)
    both = life.gradient_known & ~life.gradient.isnan() & ~signals.host_gradient.isnan()[:, None]
    assert torch.equal(slot_column("gradient_known"), both)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_what_is_not_measured_is_zero(seed: int) -> None:
    features = signals_to_features(wild_signals(seed, 7))
    prefixes = ["", *(f"{slot}:" for slot in CATALOGUE.slots.names)]
    for place, prefix in enumerate(prefixes):
        for feature in TABLE.slot_features if place else GLOBAL_FEATURES:
            for flag in feature.flags:
                absent = features[:, TABLE.index(prefix + flag)] == 0
                assert not bool(features[absent, TABLE.index(prefix + feature.name)].any())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(seed: int, data: st.DataObject) -> None:
    signals = wild_signals(seed, 6)
    features = signals_to_features(signals)
    rows = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=12))
    chosen = torch.tensor(rows)
    assert torch.equal(signals_to_features(signals.rows(chosen)), features[chosen])


def test_signals_are_not_changed() -> None:
    signals = wild_signals(3, 5)
    copy = signals.rows(torch.arange(5))
    signals_to_features(signals)
    for name, value in vars(signals).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, getattr(copy, name), equal_nan=True)
    for name, value in signals.lifecycle.state_dict().items():
        torch.testing.assert_close(value, getattr(copy.lifecycle, name), equal_nan=True)


def test_the_numbers_mean_what_the_table_says() -> None:
    garden = TapeGarden(Tape.random(4, seed=1))
    for actions in play(garden, RandomLegal()):
        del actions
        if garden.epoch == 9:
            break
    signals = garden.signals()
    life = replace(
        signals.lifecycle,
        contribution=torch.full((4, 3), 5.0).double(),
        contribution_known=torch.ones(4, 3, dtype=torch.bool),
    )
    flat = torch.full((4, SIGNAL_WINDOW), math.log(10)).double()
    rising = torch.linspace(20, 55, SIGNAL_WINDOW).expand(4, -1).double()
    signals = replace(
        signals,
        lifecycle=life,
        train_loss=flat,
        validation_loss=1.5 * flat,
        validation_accuracy=rising,
        committed_accuracy=rising - 9,
        host_gradient=torch.full((4,), 100.0).double(),
    )
    seen = TABLE.describe(signals_to_features(signals)[0])
    host = CATALOGUE.host_params
    expected = {
        "epoch": 9 / HORIZON,
        "remaining": 1 - 9 / HORIZON,
        "measured": 1.0,
        "train_loss": 1.0,
        "validation_loss": 1.5,
        "generalisation_gap": 0.5,
        "validation_accuracy": 0.5,
        "best_accuracy": 0.5,
        "since_best": 0.0,
        "committed_accuracy": 0.4,
        "uncommitted_gain": 0.1,
        "train_loss_change_1": 0.0,
        "validation_accuracy_change_1": 5 / 90,
        "validation_accuracy_change_3": 15 / 90,
        "validation_accuracy_change_7": 35 / 90,
        "gradient": 0.5,
        "added_params": float(life.params[0].sum()) / host,
        "early:contribution": math.tanh(0.5),
        "early:position": 0.0,
        "mid:position": 0.5,
        "late:position": 1.0,
        "late:dearest": math.log10(1 + 1000 * (656 + 9) / host) / 4,
        f"early:stage.{SeedStage(int(life.stage[0, 0])).name}": 1.0,
    }
    assert {name: seen[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_features_are_computed_where_their_signals_are() -> None:
    there = torch.device("meta")
    for signals in (wild_signals(0, 3), replace(wild_signals(0, 3), flow=None)):
        features = signals_to_features(signals.to(there))
        assert (features.device, features.shape) == (there, (3, TABLE.size))


def test_slots_have_blocks_of_the_same_layout() -> None:
    features = signals_to_features(wild_signals(0, 3))
    whole, slots = TABLE.split(features)
    assert whole.shape == (3, TABLE.globals)
    assert slots.shape == (3, len(CATALOGUE.slots), TABLE.per_slot)
    assert torch.equal(torch.cat([whole, slots.flatten(1)], 1), features)
    for place, slot in enumerate(CATALOGUE.slots.names):
        first = TABLE.globals + place * TABLE.per_slot
        names = TABLE.names[first : first + TABLE.per_slot]
        inside = TABLE.names[TABLE.globals : TABLE.globals + TABLE.per_slot]
        assert [name.replace(f"{slot}:", "early:") for name in names] == list(inside)
    sequences = features.expand(5, 3, -1)
    assert TABLE.split(sequences)[1].shape == (5, 3, len(CATALOGUE.slots), TABLE.per_slot)


@pytest.mark.parametrize("host", ["conv1d", "conv2d", "mlp", "gpt"])
def test_every_feature_has_one_name_and_the_table_fits_every_host(host: str) -> None:
    garden = TapeGarden(Tape.random(2, host=host))
    table = FeatureTable.of(garden.tape.catalogue)
    assert len(set(table.names)) == len(table.names) == table.size
    assert [table.index(name) for name in table.names] == list(range(table.size))
    assert FeatureTable.of(garden.tape.catalogue) is table
    for _ in play(garden, RandomLegal()):
        assert signals_to_features(garden.signals()).shape == (2, table.size)


def test_before_the_first_epoch_every_measured_feature_is_absent() -> None:
    seen = TABLE.describe(signals_to_features(TapeGarden(Tape.random(1)).signals())[0])
    flags = {flag for feature in GLOBAL_FEATURES for flag in feature.flags}
    assert {seen[flag] for flag in flags} == {0.0}
    assert seen["remaining"] == 1.0
    assert seen["early:stage.DORMANT"] == 1.0


def test_wrong_names_and_shapes_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'early:alpha'"):
        TABLE.index("early:alfa")
    with pytest.raises(AgreementError, match=rf"\[\.\.\., {TABLE.size}\]"):
        TABLE.split(torch.zeros(2, 3))
    with pytest.raises(AgreementError, match="one observation at a time"):
        TABLE.describe(torch.zeros(2, TABLE.size))
    signals = wild_signals(0, 2)
    with pytest.raises(AgreementError, match="wrong number of epochs; given: 4; valid: 8"):
        signals_to_features(replace(signals, train_loss=signals.train_loss[:, :4]))


def test_every_op_can_be_seen_in_the_stages_it_leads_to() -> None:
    """The lifecycle on the tape is really exercised: no feature of a slot stays 0 for ever."""
    garden = TapeGarden(Tape.random(64, seed=5))
    rows, seen_ops = [], set()
    for actions in play(garden, RandomLegal(), episodes=2):
        seen_ops |= set(actions["op"].tolist())
        rows.append(signals_to_features(garden.signals()))
    assert seen_ops == set(LifecycleOp)
    _, slots = TABLE.split(torch.cat(rows))
    dead = {
        name
        for name, used in zip(
            TABLE.names[TABLE.globals :], slots.flatten(0, 1).any(0).tolist(), strict=False
        )
        if not used
    }
    # With the default tempo nobody ever sees these between two epochs.
    assert dead == {"early:stage.GERMINATED", "early:stage.PRUNED"}
