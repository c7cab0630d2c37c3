"""The registry of blueprints: users' own, and errors that say what to do."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from esper.kasmina import SlottedModel, build_host
from esper.kasmina.blueprints import (
    blueprint,
    blueprint_names,
    build_catalogue,
    cost,
    find_blueprint,
    unregister_blueprint,
    zeroed,
)
from esper.leyline.catalogue import NOT_APPLICABLE
from esper.leyline.errors import BlueprintError, DuplicateNameError, UnknownNameError
from esper.leyline.slots import Family, Layout, SlotSpec

DENSE = SlotSpec(name="early", layout=Layout.DENSE, channels=6)
FREE = SlotSpec(name="early", layout=Layout.SEQUENCE, channels=6, extent=(None,))
NAME = "scratch"


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """What a test registers under NAME is removed after it."""
    yield
    if NAME in blueprint_names(Family.DENSE):
        unregister_blueprint(NAME, Family.DENSE)


def test_a_function_and_a_class_can_both_be_registered() -> None:
    @blueprint(NAME, "dense")
    def shift(spec: SlotSpec) -> nn.Module:
        """Adds a constant."""
        return zeroed(nn.Linear(spec.channels, spec.channels))

    assert find_blueprint(NAME, Family.DENSE).summary == "Adds a constant."
    assert cost(find_blueprint(NAME, "dense"), DENSE) == 42
    unregister_blueprint(NAME, Family.DENSE)

    @blueprint(NAME, Family.DENSE)
    class Shift(nn.Linear):
        """Adds another constant."""

        def __init__(self, spec: SlotSpec) -> None:
            super().__init__(spec.channels, spec.channels)
            zeroed(self)

    assert find_blueprint(NAME, Family.DENSE).summary == "Adds another constant."
    assert isinstance(find_blueprint(NAME, Family.DENSE).build(DENSE), Shift)


def test_a_name_cannot_be_registered_twice() -> None:
    with pytest.raises(DuplicateNameError, match="'norm' is already registered for dense slots"):
        blueprint("norm", Family.DENSE)(lambda spec: nn.Identity())


def test_the_same_name_in_another_family_is_another_blueprint() -> None:
    assert find_blueprint("norm", Family.DENSE) != find_blueprint("norm", Family.CONV1D)


def test_an_unknown_name_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'convpool'"):
        find_blueprint("convpol", Family.DENSE)


def test_a_catalogue_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'lowrank'"):
        build_catalogue([DENSE], host_params=100, allowed=["lowrnk"])


def test_hosts_of_esper_offer_block_only_if_named() -> None:
    names = SlottedModel(build_host("gpt")).catalogue.names
    assert names == ("norm", "lora", "gate", "attention", "mlp")
    named = SlottedModel(build_host("gpt"), blueprints=[*names, "block"]).catalogue
    assert named.names == (*names, "block")
    assert all(costs[-1] > costs[-2] for costs in named.costs)


def test_wrapped_models_are_offered_block_last() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11))
    catalogue = SlottedModel(model, ["1"], torch.zeros(3, 5, dtype=torch.int64)).catalogue
    assert catalogue.names == ("norm", "lora", "gate", "attention", "mlp", "block")


def test_a_family_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"given: 'dens'; .* did you mean .*dense"):
        blueprint(NAME, "dens")


@pytest.mark.parametrize("name", ["", "two words", "9lives", "a-b"])
def test_a_name_that_is_no_identifier_is_refused(name: str) -> None:
    with pytest.raises(BlueprintError, match="must be an identifier"):
        blueprint(name, Family.DENSE)


def test_a_seed_that_changes_the_shape_is_refused_with_both_shapes() -> None:
    blueprint(NAME, Family.DENSE)(lambda spec: nn.Linear(spec.channels, 3))
    with pytest.raises(BlueprintError, match=r"\[2, 6\] -> \[2, 3\]"):
        cost(find_blueprint(NAME, Family.DENSE), DENSE)


def test_a_seed_that_returns_no_tensor_is_refused() -> None:
    class Pair(nn.Module):
        def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return h, h

    blueprint(NAME, Family.DENSE)(lambda spec: Pair())
    with pytest.raises(BlueprintError, match="tuple"):
        cost(find_blueprint(NAME, Family.DENSE), DENSE)


def test_a_seed_that_cannot_run_on_the_slot_is_refused_with_the_cause() -> None:
    blueprint(NAME, Family.DENSE)(lambda spec: nn.Linear(5, 5))
    with pytest.raises(BlueprintError, match="cannot be built for slot 'early'"):
        cost(find_blueprint(NAME, Family.DENSE), DENSE)


def test_what_depends_on_the_length_does_not_fit_where_lengths_vary() -> None:
    token_mix = find_blueprint("token_mix", Family.CONV1D)
    assert not token_mix.fits(FREE)
    assert cost(token_mix, FREE) == NOT_APPLICABLE
    assert find_blueprint("conv", Family.CONV1D).fits(FREE)


def test_a_blueprint_does_not_fit_slots_of_another_family() -> None:
    assert cost(find_blueprint("conv", Family.CONV1D), DENSE) == NOT_APPLICABLE
