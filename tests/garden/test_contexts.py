"""Contexts as values: equality, keys, drift, tables, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.garden import Context, Lesion, Source
from esper.leyline.errors import DataError, EsperError, UnknownNameError

PLAIN = Context(name="plain", family="mnist1d", source=Source(family="mnist1d"))
RICH = Context(
    name="rich",
    family="drift",
    source=Source(family="gain", samples=500, gain=1.5, label_noise=0.3, seed=3),
    lesion=Lesion(kind="narrow", stage=1),
    drift=Source(family="xor", noise=0.2),
    drift_window=(4, 9),
    host_sizes=(("kernel", 3), ("channels", 6)),
    scale=12.0,
)


def test_a_context_is_a_value() -> None:
    twin = Context.from_dict(RICH.to_dict())
    assert twin == RICH
    assert hash(twin) == hash(RICH)
    assert len({PLAIN, RICH, twin}) == 2


def test_a_context_says_what_it_is() -> None:
    assert str(PLAIN) == "plain: mnist1d × 4000; conv1d"
    assert str(RICH) == (
        "rich: gain × 500, gain 1.5, 30% label noise, seed 3; "
        "half the time then xor × 4000, noise 0.2 (from epoch 4-9); "
        "narrow at stage 1; conv1d channels=6 kernel=3"
    )


def test_building_a_context_draws_nothing_from_the_global_stream() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    replace(RICH, host_sizes=(("channels", 5),))
    assert torch.equal(before, torch.get_rng_state())


def test_a_context_builds_its_host() -> None:
    assert RICH.build_host().slot_specs()[0].channels == 6
    assert PLAIN.build_host()(torch.zeros(2, 40)).shape == (2, 10)


# --- the key -------------------------------------------------------------------------------


def test_the_key_ignores_what_changes_no_number() -> None:
    other = replace(RICH, name="another", family="else", scale=99.0)
    assert other.key == RICH.key
    assert replace(PLAIN, drift_window=(1, 2)).key == PLAIN.key  # there is no drift
    turned = replace(RICH, host_sizes=tuple(reversed(RICH.host_sizes)))
    assert turned == RICH


@pytest.mark.parametrize(
    "change",
    [
        {"source": replace(RICH.source, samples=501)},
        {"source": replace(RICH.source, gain=1.6)},
        {"source": replace(RICH.source, seed=4)},
        {"lesion": None},
        {"lesion": Lesion(kind="narrow", stage=2)},
        {"lesion": Lesion(kind="tap", stage=1)},
        {"drift": None},
        {"drift": replace(RICH.source, gain=1.6)},
        {"drift_window": (4, 8)},
        {"host_sizes": ()},
    ],
)
def test_the_key_knows_everything_that_changes_numbers(change: dict[str, Any]) -> None:
    assert replace(RICH, **change).key != RICH.key


def test_the_key_is_the_same_on_every_machine_and_day() -> None:
    assert PLAIN.key == "e0f819abc5a7"


# --- drift ---------------------------------------------------------------------------------


def test_the_task_changes_half_the_time_and_within_the_window() -> None:
    epochs = [RICH.drift_epoch(seed, horizon=25) for seed in range(1000)]
    changed = [epoch for epoch in epochs if epoch is not None]
    assert 440 < len(changed) < 560
    assert set(changed) == set(range(4, 10))


def test_drift_is_decided_by_the_seed_alone() -> None:
    epochs = [RICH.drift_epoch(seed) for seed in range(50)]
    assert epochs == [replace(RICH, name="other", scale=5.0).drift_epoch(s) for s in range(50)]
    assert epochs != [RICH.drift_epoch(seed) for seed in range(50, 100)]


def test_a_change_after_the_last_epoch_does_not_come() -> None:
    for seed in range(100):
        epoch = RICH.drift_epoch(seed)
        expected = epoch if epoch is not None and epoch < 6 else None
        assert RICH.drift_epoch(seed, horizon=6) == expected


def test_a_context_without_drift_never_changes() -> None:
    assert all(PLAIN.drift_epoch(seed) is None for seed in range(50))


# --- tables --------------------------------------------------------------------------------


def test_a_table_holds_plain_values_and_nothing_absent() -> None:
    assert PLAIN.to_dict() == {
        "name": "plain",
        "family": "mnist1d",
        "source": {
            "family": "mnist1d",
            "samples": 4000,
            "label_noise": 0.0,
            "seed": 0,
            "translation": 48,
            "noise": 0.25,
            "amplitude": 0.4,
        },
        "host": "conv1d",
        "scale": 3.0,
    }
    record = RICH.to_dict()
    assert record["lesion"] == {"kind": "narrow", "stage": 1}
    assert record["drift_window"] == [4, 9]
    assert record["host_sizes"] == {"channels": 6, "kernel": 3}


SOURCE = {"family": "mnist1d"}
TABLE = {"name": "mine", "family": "mnist1d", "source": SOURCE}


def test_a_short_table_is_enough() -> None:
    assert Context.from_dict(TABLE) == replace(PLAIN, name="mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sauce": SOURCE}, "Unknown key of a context; given: 'sauce'.*did you mean 'source'"),
        ({"source": SOURCE | {"sampels": 5}}, "key of a source.*did you mean 'samples'"),
        ({"source": {}}, "A source lacks its family; given: nothing; valid: at least family"),
        ({"source": "mnist1d"}, "Wrong type of source; given: 'mnist1d'; valid: a table"),
        ({"drift": 3}, "Wrong type of source; given: 3"),
        ({"lesion": {"kind": "tap"}}, "A lesion lacks its stage; given: kind; valid: at least k"),
        ({"lesion": {"kind": "tap", "stag": 1}}, "key of a lesion.*did you mean 'stage'"),
        ({"lesion": "tap"}, "Wrong type of lesion"),
        ({"host_sizes": 6}, "Wrong type of host_sizes of a context; given: 6"),
        ({"drift_window": 6}, "Impossible drift_window of a context; given: 6"),
        ({"drift_window": [6]}, "Impossible drift_window"),
        ({"drift_window": [9, 6]}, "Impossible drift_window.*first epoch <= last epoch"),
        ({"drift_window": [6, "9"]}, "Impossible drift_window"),
        ({"scale": 0}, "'scale' is out of range; given: 0; valid: a number above 0"),
        ({"scale": -1}, "context's setting 'scale' is out of range; given: -1"),
        ({"scale": "big"}, "'scale' is out of range; given: 'big'; valid: a number"),
        ({"name": ""}, "Impossible name of a context; given: ''"),
        ({"name": "two words"}, "Impossible name of a context; given: 'two words'; valid: letters"),
        ({"name": "a[/b]"}, "Impossible name of a context"),
        ({"name": "a$x$"}, "Impossible name of a context"),
        ({"family": 3}, "Impossible family of a context; given: 3"),
        ({"host": "conv1"}, "Unknown host; given: 'conv1'.*did you mean 'conv1d'"),
        ({"host_sizes": {"chanels": 6}}, "size of the host 'conv1d'.*did you mean 'channels'"),
        (
            {"host_sizes": {"channels": 0}},
            "'channels' of the host 'conv1d' is out of range; given: 0",
        ),
        (
            {"host_sizes": {"channels": "6"}},
            "'channels' of the host 'conv1d' is out of range; given: '6'; valid: a whole",
        ),
        ({"host_sizes": {"classes": 4}}, r"does not fit.*it makes of one line.*: \[1, 4\]"),
        ({"host": "conv2d"}, "The host 'conv2d' does not fit the garden's data"),
        ({"host": "mlp", "lesion": {"kind": "tap", "stage": 1}}, "cannot have a lesion"),
        ({"lesion": {"kind": "narrow", "stage": 3}}, "valid: stage 0 or 1 or 2"),
    ],
)
def test_a_malformed_table_is_refused_in_one_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EsperError, match=message) as caught:
        Context.from_dict(TABLE | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", list(TABLE))
def test_a_context_that_lacks_a_part_is_refused(missing: str) -> None:
    table = {key: value for key, value in TABLE.items() if key != missing}
    with pytest.raises(DataError, match=f"A context lacks its {missing}; .* name, family, source"):
        Context.from_dict(table)


def test_parts_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(DataError, match=r"Wrong type of source of a context.*a Source"):
        replace(PLAIN, source={"family": "xor"})
    with pytest.raises(DataError, match=r"Wrong type of lesion of a context.*a Lesion"):
        replace(PLAIN, lesion="tap")
    with pytest.raises(DataError, match=r"Wrong type of host_sizes of a context.*pairs"):
        replace(PLAIN, host_sizes={"channels": 6})


def test_an_error_of_a_name_can_be_told_from_others() -> None:
    with pytest.raises(UnknownNameError):
        Context.from_dict(TABLE | {"hots": "mlp"})
