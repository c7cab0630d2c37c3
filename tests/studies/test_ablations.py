"""Controllers that lack something: only that is missing, in a fit and when they decide."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.garden import LAYOUT, Bed, Greenhouse
from esper.kasmina.blueprints import blueprint_names
from esper.leyline import Family, LifecycleOp
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import load_saved_controller, save_controller
from esper.tamiyo.token_layout import CANDIDATE_TOKEN, SLOT_TOKEN, WHOLE_TOKEN, TokenLayout
from studies.ablations import (
    ABLATION,
    AblatedController,
    ablated,
    by_identity,
    codes_of,
    controller_in,
    without_shadows,
)
from studies.greenhouse_gains import Anchors, Gains

PLANT = int(LifecycleOp.GERMINATE)
NAMES = sorted({name for kind in Family for name in blueprint_names(kind, wrapped=True)})


def names_of(layout: TokenLayout) -> list[str]:
    """Of every number in a padded row, with its kind of token before it."""
    seeds = layout.slots * layout.blueprints
    return [
        *(f"whole:{name}" for name in WHOLE_TOKEN.names),
        *(f"slot:{name}" for name in SLOT_TOKEN.names * layout.slots),
        *(f"seed:{name}" for name in CANDIDATE_TOKEN.names * seeds),
    ]


@st.composite
def rows(draw: st.DrawFn) -> tuple[TokenLayout, Tensor, int]:
    """Numbers that could be seen by three rows of a host that has some of the layout's room."""
    layout = TokenLayout(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    slots, kinds = (draw(st.integers(1, most)) for most in (layout.slots, layout.blueprints))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    states = torch.zeros(3, layout.state_dim)
    whole, own, seeds = layout.split(states)
    for part in (whole, own[:, :slots], seeds[:, :slots, :kinds]):
        part[:] = torch.rand(part.shape, generator=chance) + 0.1
        part[..., 0] = 1.0  # it is present
    advice = [place for place, name in enumerate(WHOLE_TOKEN.names) if name.startswith("advised")]
    whole[:, advice] = 0.0
    for row, op in enumerate((PLANT, int(LifecycleOp.WAIT), int(LifecycleOp.PRUNE))):
        whole[row, advice[op]] = 1.0
    return layout, states, kinds


@settings(max_examples=25, deadline=None)
@given(rows())
def test_without_shadows_nothing_else_changes_than_what_they_showed(
    made: tuple[TokenLayout, Tensor, int],
) -> None:
    layout, states, _ = made
    before, names = states.clone(), names_of(layout)
    found = without_shadows(layout, states)
    assert torch.equal(states, before)  # whoever else sees them
    shown = ("heard", "gain", "gain_of_rest", "certainty", "slope", "train_gain", "by_heart",
             "learned", "gain_rank", "certainty_rank", "gradient_known", "gradient",
             "gradient_rank")  # fmt: skip
    for place, name in enumerate(names):
        token, _, own = name.partition(":")
        here = found[:, place]
        if token == "seed" and (own in shown or own.startswith("advised.")):
            assert not bool(here.any()), name
        elif name == "slot:advised":  # beside planting the rule's advice stays
            assert float(here[0]) == 0.0
            assert torch.equal(here[1:], states[1:, place])
        elif name == "whole:advised.GERMINATE":
            assert not bool(here.any())
        elif name == "whole:advised.WAIT":
            assert here.tolist() == [1.0, 1.0, 0.0]
        else:
            assert torch.equal(here, states[:, place]), name
    assert torch.equal(without_shadows(layout, found), found)


@settings(max_examples=25, deadline=None)
@given(rows(), st.randoms(use_true_random=False))
def test_identities_stand_where_traits_were_and_padding_stays_empty(
    made: tuple[TokenLayout, Tensor, int], chance: object
) -> None:
    layout, states, kinds = made
    own = chance.sample(NAMES, kinds)  # type: ignore[attr-defined]
    found = by_identity(layout, states, codes_of(own, layout.blueprints))
    traits = torch.tensor([name.startswith("seed:trait.") for name in names_of(layout)])
    assert torch.equal(found[:, ~traits], states[:, ~traits])
    there = layout.split(states)[2][..., 0] > 0  # [N, S, P]
    columns = [place for place, name in enumerate(CANDIDATE_TOKEN.names) if "trait" in name]
    told = layout.split(found)[2][..., columns]
    assert not bool(told[~there].any())
    for number in range(kinds):
        assert told[:, :, number][there[:, :, number]].unique(dim=0).shape[0] == 1


def test_no_two_blueprints_have_the_same_identity() -> None:
    codes = codes_of(NAMES, len(NAMES))
    assert len(codes.unique(dim=0)) == len(NAMES)
    assert codes.sum(1).unique().tolist() == [4.0]
    assert not bool(codes_of(["somebody's own"], 2).any())


def test_gains_are_seen_with_the_names_that_their_plots_had() -> None:
    house, numbers = Greenhouse(8, longest=14), (0, 1)
    beds = [Bed(house.plot(number), players=1) for number in numbers]
    observations = torch.cat([bed.observations for bed in beds])
    plot, seed = torch.tensor(numbers), torch.full((2,), 8)
    nothing = torch.zeros(2)
    data = Gains(observations, {}, *[nothing] * 4, plot, seed, nothing)
    anchors = Anchors(observations, nothing, nothing, plot, seed)
    found, looked = ablated("properties", data), ablated("properties", anchors)
    for row, bed in enumerate(beds):
        codes = codes_of(bed.plot.blueprints, LAYOUT.blueprints)
        expected = by_identity(LAYOUT, bed.observations, codes)[0]
        assert torch.equal(found.observations[row], expected)
        assert torch.equal(looked.observations[row], expected)
    with pytest.raises(SystemExit, match="collect them anew"):
        ablated("properties", data._replace(seed=-seed))


@pytest.mark.parametrize("ablation", ["shadows", "properties"])
def test_what_decides_sees_what_its_fit_saw(ablation: str) -> None:
    bed = Bed(Greenhouse(8, longest=14).plot(1), players=2)
    controller = AblatedController(TokenActorCritic(), ablation, name="lacking")
    starts = torch.ones(len(bed.players), dtype=torch.bool)
    controller.act(*bed.seen, starts)
    seen = controller.thoughts().observations
    plain = TokenLayout.of(bed.seen[0].catalogue).observe(bed.seen[0], bed.advice)
    layout = controller.network.layout
    codes = codes_of(bed.plot.blueprints, layout.blueprints)
    expected = (
        without_shadows(layout, plain)
        if ablation == "shadows"
        else by_identity(layout, plain, codes)
    )
    assert torch.equal(seen, expected)


class Eager(AblatedController):
    """Plants wherever it may, and prunes what it planted."""

    def _encode_signals(self, signals: object, legality: object, starts: Tensor) -> Tensor:
        seen = super()._encode_signals(signals, legality, starts)  # type: ignore[arg-type]
        self.network.bias_action_logit("op", PLANT, 50.0)
        self.network.bias_action_logit("op", int(LifecycleOp.PRUNE), 40.0)
        return seen


def test_who_may_plant_once_never_plants_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 1)
    planted = {}
    for ablation in ("one_shot", "properties"):
        bed = Bed(Greenhouse(8, longest=14).plot(1), players=2)
        controller = Eager(TokenActorCritic(), ablation, name="eager")
        starts = torch.ones(len(bed.players), dtype=torch.bool)
        count = torch.zeros(len(bed.players))
        while not bed.over:
            actions = controller.act(*bed.seen, starts)
            assert bool(bed.seen[1].permits(actions).all())
            count += actions["op"] == PLANT
            bed.step(actions.values)
            starts = torch.zeros_like(starts)
        planted[ablation] = count
        if ablation == "one_shot":  # in an episode that begins it may
            assert bool((controller.act(*bed.seen, ~starts)["op"] == PLANT).all())
    assert planted["one_shot"].tolist() == [1.0, 1.0]
    assert float(planted["properties"].min()) > 1.0


def test_a_kept_controller_carries_what_it_lacks(tmp_path: Path) -> None:
    network = TokenActorCritic()
    save_controller(network, tmp_path / "one", None, {ABLATION: "one_shot"})
    save_controller(network, tmp_path / "whole", None, {})
    lacking, whole = controller_in(tmp_path / "one", "a"), controller_in(tmp_path / "whole", "a")
    assert isinstance(lacking, AblatedController)
    assert lacking.ablation == "one_shot"
    assert not isinstance(whole, AblatedController)
    assert whole.fingerprint == load_saved_controller(tmp_path / "whole", "a").fingerprint
    assert lacking.fingerprint != whole.fingerprint
