"""Slot configuration, agreement, errors, typed results, protocols, streams."""

import typing

import pytest
import torch

from esper import leyline
from esper.leyline import (
    CANONICAL_SLOTS,
    HEAD_NAMES,
    MASK_VALUE,
    AgreementError,
    EsperError,
    HeadGradientNorms,
    Layout,
    PerHead,
    SeedSlotProtocol,
    SeedStateProtocol,
    SlotConfig,
    SlotError,
    SlotSpec,
    SlottedHostProtocol,
    UnknownNameError,
    ordered_slots,
    require_agreement,
)
from esper.leyline.streams import derive_seed
from esper.simic import contracts


def test_slots_are_named_ordered_and_three_by_default() -> None:
    assert SlotConfig().names == CANONICAL_SLOTS
    assert len(SlotConfig()) == leyline.DEFAULT_SLOT_COUNT
    assert ordered_slots(["late", "early"]) == ("early", "late")


@pytest.mark.parametrize("count", [1, 2, 3, 16, 300])
def test_any_number_of_slots_is_possible(count: int) -> None:
    config = SlotConfig.of_size(count)
    assert len(config) == count
    assert [config.index(name) for name in config.names] == list(range(count))


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: SlotConfig(()), "number of slots"),
        (lambda: SlotConfig(("a", "a")), "must differ"),
        (lambda: SlotConfig().index("erly"), "did you mean 'early'"),
        (lambda: ordered_slots(["mid", "mid"]), "must differ"),
        (lambda: ordered_slots(["middle"]), "valid: early, mid, late"),
        (lambda: SlotSpec(name="x", layout=Layout.IMAGE, channels=3), "impossible shape"),
        (lambda: SlotSpec(name="x", layout=Layout.DENSE, channels=0), "impossible shape"),
    ],
)
def test_wrong_slots_are_refused_with_a_sentence(make, fragment: str) -> None:
    with pytest.raises((SlotError, UnknownNameError), match=fragment):
        make()


def test_disagreement_names_both_sides_and_both_values() -> None:
    require_agreement("slots", ("network", 3), ("buffer", 3))
    with pytest.raises(AgreementError, match=r"network and buffer .* network has 3, buffer has 4"):
        require_agreement("slots", ("network", 3), ("buffer", 4))


@pytest.mark.parametrize("layout", list(Layout))
def test_a_layouts_permutations_undo_each_other_and_put_the_channels_in_place(
    layout: Layout,
) -> None:
    axes = {Layout.DENSE: 0, Layout.IMAGE: 2, Layout.IMAGE_LAST: 2}.get(layout, 1)
    spec = SlotSpec(name="x", layout=layout, channels=7, extent=tuple(range(3, 3 + axes)))
    canonical = torch.zeros(spec.canonical_shape(batch=2))
    assert canonical.shape[spec.channel_axis] == 7
    laid_out = canonical.permute(spec.from_canonical)
    assert laid_out.permute(spec.to_canonical).shape == canonical.shape


@pytest.mark.parametrize("layout", list(Layout))
def test_a_layout_knows_its_batch_channels_and_extent_in_the_hosts_own_axes(layout: Layout) -> None:
    axes = {"image": 4, "image_last": 4, "dense": 2}.get(layout.value, 3)
    shape = list(range(10, 10 + axes))
    extent = layout.extent(shape)
    spec = SlotSpec(name="a", layout=layout, channels=shape[layout.channel_axis], extent=extent)
    canonical = tuple(shape[axis] for axis in spec.to_canonical)
    assert canonical == spec.canonical_shape(batch=shape[layout.batch_axis])


def test_the_mask_value_is_finite_in_half_precision() -> None:
    assert torch.isfinite(torch.tensor(MASK_VALUE, dtype=torch.float16))


def test_every_error_is_an_esper_error_and_says_all_it_was_told() -> None:
    errors = [
        value
        for name in leyline.__all__
        if isinstance(value := getattr(leyline, name), type) and issubclass(value, Exception)
    ]
    assert len(errors) > 8
    for error in errors:
        assert issubclass(error, EsperError)
        text = str(error("It broke", given="a wrong thing", valid="a right one", fix="do this"))
        assert text == "It broke; given: a wrong thing; valid: a right one; do this."


def test_per_head_results_hold_exactly_the_declared_heads() -> None:
    norms = HeadGradientNorms(PerHead(HEAD_NAMES, dict.fromkeys(HEAD_NAMES, 1.0)), value=2.0)
    assert tuple(norms.heads) == HEAD_NAMES
    for wrong in ({"op": 1.0}, {**dict.fromkeys(HEAD_NAMES, 1.0), "tempo": 1.0}):
        with pytest.raises(AgreementError, match="op, slot, blueprint, blend"):
            PerHead(HEAD_NAMES, wrong)


def test_protocols_are_typed_without_any_and_a_host_satisfies_them() -> None:
    from esper.kasmina import SlottedModel, build_host

    for protocol in (SeedStateProtocol, SeedSlotProtocol, SlottedHostProtocol):
        assert typing.Any not in typing.get_type_hints(protocol).values()
        for member in [kept for name, kept in vars(protocol).items() if not name.startswith("_")]:
            hints = typing.get_type_hints(member.fget if isinstance(member, property) else member)
            assert "return" in hints
            assert typing.Any not in hints.values()
    host = SlottedModel(build_host("mlp"))
    assert isinstance(host, SlottedHostProtocol)
    assert isinstance(host.seed_slots["early"], SeedSlotProtocol)
    assert host.seed_slots["early"].seed is None
    host.germinate("early", "mlp")
    assert isinstance(host.seed_slots["early"].seed, SeedStateProtocol)
    assert contracts.SlottedHostProtocol is SlottedHostProtocol


def test_streams_differ_by_name_and_are_the_same_everywhere() -> None:
    seeds = {derive_seed(*parts) for parts in [(0,), (1,), ("0",), (0, "a"), (0, "a", 0), ("a", 0)]}
    assert len(seeds) == 6
    assert derive_seed(1, "seed", 2) == 4265359907586417047
    assert all(0 <= seed < 2**63 for seed in seeds)
