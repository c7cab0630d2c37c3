"""What inspect shows, and which places `slots="auto"` takes."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations as P

import esper
from esper.kasmina import blueprint, build_host, unregister_blueprint, zeroed
from esper.leyline import SeedStage, SlotSpec
from esper.leyline.errors import EsperError
from esper.leyline.ops import LifecycleOp
from tests.api.tables import INPUTS, mlp


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.conv(x))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, blocks: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(4) for _ in range(blocks)))
        self.head = nn.Linear(4, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One layer that runs twice, a skip, and a detached side branch."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.again = nn.Linear(8, 8)
        self.act = nn.GELU()
        self.side = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.enter(x))
        h = h + self.again(self.again(h)) + self.side(h).detach()
        return self.leave(h)  # type: ignore[no-any-return]


IMAGES = torch.randn(2, 1, 6, 6)


def test_every_place_says_what_fits_and_what_it_adds() -> None:
    found = esper.inspect(mlp(), INPUTS[:4])
    by_path = {place.path: place for place in found.places}
    assert list(by_path) == ["0", "1", "2", "3", "4", "5", "6"]  # in the order of the calls
    assert by_path["2"].layout == "dense [B, 8]"
    assert by_path["2"].kind == "ReLU"
    for path, options in ((place.path, place.options) for place in found.places):
        host = esper.wrap(mlp(), INPUTS[:4], slots=[path])
        costs = zip(host.catalogue.names, host.catalogue.costs[0], strict=True)
        assert {name: cost for name, cost in costs if cost >= 0} == options
        host.germinate(path, "mlp", "immediate")
        assert sum(p.numel() for p in host.slots.parameters()) == options["mlp"]


def test_refusals_say_why() -> None:
    found = esper.inspect(Shared(), torch.randn(2, 6))
    assert [refusal.path for refusal in found.refusals] == ["side"]
    assert "would never learn" in found.refusals[0].reason
    (refusal,) = esper.inspect(Residual(), IMAGES).refusals
    assert refusal.path == "unused"
    assert "does not call it" in refusal.reason


def test_a_model_may_have_any_number_of_places_and_of_slots() -> None:
    layers = [layer for _ in range(50) for layer in (nn.Linear(6, 6), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(6, 3))
    found = esper.inspect(model, INPUTS[:4])
    assert len(found.places) == 101
    assert found.chosen == ("1", "49", "99")
    everywhere = [place.path for place in found.places]
    host = esper.wrap(model, INPUTS[:4], slots=everywhere)
    before = host(INPUTS[:4])
    host.germinate("98", "mlp")
    assert torch.equal(host(INPUTS[:4]), before)
    assert host.seed_slots["98"].stage is SeedStage.TRAINING


def test_slots_that_differ_in_their_names_alone_are_tried_once() -> None:
    built: list[str] = []

    @blueprint("counted", "dense")
    def counted(spec: SlotSpec) -> nn.Module:
        built.append(spec.name)
        return nn.Sequential(zeroed(nn.Linear(spec.channels, spec.channels)))

    try:
        found = esper.inspect(mlp(), INPUTS[:4], blueprints=["counted"])
    finally:
        unregister_blueprint("counted", "dense")
    assert len(built) == len({place.layout for place in found.places}) < len(found.places)


def test_a_budget_leaves_out_what_it_has_no_room_for() -> None:
    found = esper.inspect(mlp(), INPUTS[:4], budget=60)
    assert found.room == 60
    assert all(max(place.options.values()) <= 60 for place in found.places)
    nothing = esper.inspect(mlp(), INPUTS[:4], budget=1)
    assert (nothing.places, nothing.chosen) == ((), ())
    assert "the budget allows 1" in nothing.refusals[0].reason


def test_the_table_shows_places_choices_and_refusals() -> None:
    text = str(esper.inspect(Residual(), IMAGES, budget="+50%"))
    assert text.startswith("Residual: ")
    assert any(line.startswith("*  blocks.0 ") for line in text.splitlines())
    assert "image [B, 4, 6, 6]" in text
    assert "refused" in text
    assert "unused" in text


def test_auto_takes_the_first_the_middle_and_the_last_block() -> None:
    chosen = esper.inspect(Residual(), IMAGES).chosen
    assert chosen == ("blocks.0", "blocks.2", "blocks.4")
    assert esper.wrap(Residual(), IMAGES).catalogue.slots.names == chosen


def test_auto_takes_activations_where_there_are_no_blocks() -> None:
    assert esper.wrap(mlp(), INPUTS[:4]).catalogue.slots.names == ("2", "5")


def test_auto_takes_no_module_that_runs_twice_and_no_output() -> None:
    assert esper.inspect(Shared(), torch.randn(2, 6)).chosen == ("act",)
    linear = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    assert esper.inspect(linear, INPUTS[:4]).chosen == ("0",)


def test_auto_takes_the_slots_that_a_host_of_espers_announces() -> None:
    host = build_host("conv1d")
    assert esper.inspect(host, torch.randn(2, 1, 40)).chosen == ("early", "mid", "late")
    assert esper.wrap(host, torch.randn(2, 1, 40)).catalogue.slots.names == ("early", "mid", "late")


def test_inspection_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = mlp().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    esper.inspect(model, INPUTS[:4])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_model_is_inspected_with_gradients_wherever_that_is_asked(
    off: Callable[[], AbstractContextManager[None]],
) -> None:
    model = mlp()
    with off():
        inside = esper.inspect(model, INPUTS[:4].clone())
    assert inside.chosen == esper.inspect(model, INPUTS[:4]).chosen != ()


class Recording(nn.Sequential):
    """Remembers what it saw, in ways that are no buffers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.calls, self.total, self.seen = 0, torch.zeros(()), [1]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += x.sum()
        self.seen.append(len(x))
        return super().forward(x)  # type: ignore[no-any-return]


def quantised() -> nn.Module:
    """Prepared for training with quantisation: observers resize their buffers at the first pass."""
    model = Recording(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    ).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    return torch.ao.quantization.prepare_qat(model)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")  # torch's, that quantisation is to move
def test_inspection_leaves_observers_modes_and_counters_as_they_were() -> None:
    model = quantised()
    model[3].eval()  # a mode of its own
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    assert esper.inspect(model, IMAGES).chosen == ("1", "4")  # layers with observers are no blocks
    after = model.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)
    assert [part.training for part in model.modules()] == modes
    assert (model.calls, float(model.total), model.seen) == (0, 0.0, [1])


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Hardswish, nn.LeakyReLU])
def test_activations_in_place_are_places_of_their_own(activation: type[nn.Module]) -> None:
    def model(inplace: bool) -> nn.Module:
        acts = (activation(inplace=inplace) for _ in range(3))
        layers = (nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        return nn.Sequential(*(part for pair in zip(layers, acts, strict=True) for part in pair))

    beside, within = (esper.inspect(model(inplace), INPUTS[:4]) for inplace in (False, True))
    assert within.chosen == beside.chosen == ("1", "3")
    assert within.places == beside.places


def test_what_works_in_place_and_is_not_taken_back_is_refused() -> None:
    class Statement(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.act, self.leave = nn.Linear(6, 8), nn.ReLU(True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.enter(x)
            self.act(h)
            return self.leave(h)  # type: ignore[no-any-return]

    (refusal,) = esper.inspect(Statement(), INPUTS[:4]).refusals
    assert refusal.path == "act"
    assert "does not reach the model's output" in refusal.reason


PARAMETRIZED = (P.weight_norm, P.spectral_norm, P.orthogonal)


@pytest.mark.parametrize("norm", PARAMETRIZED)
def test_a_parametrised_layer_is_a_layer(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(norm(nn.Linear(6, 8)), nn.ReLU(), norm(nn.Linear(8, 8)), nn.Tanh(),
                          nn.Linear(8, 3))  # fmt: skip
    found = esper.inspect(model, INPUTS[:4])
    assert [place.path for place in found.places] == ["0", "1", "2", "3", "4"]
    assert found.refusals == ()
    assert found.chosen == ("1", "3")
    with pytest.raises(EsperError, match=r"computes a weight .* name the layer that has the weigh"):
        esper.wrap(model, INPUTS[:4], slots=["0.parametrizations.weight"])


class Painter(nn.Module):
    """Images are all that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.act = nn.Linear(6, 8), nn.ReLU()
        self.paint = nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.paint(self.act(self.enter(x)).view(-1, 2, 2, 2))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Its only part runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


NOWHERE: dict[str, tuple[nn.Module, Tensor, str]] = {
    "one layer": (nn.Linear(6, 3), INPUTS[:4], "The model itself gives what the model returns"),
    "one layer inside": (
        nn.Sequential(nn.Linear(6, 3)),
        INPUTS[:4],
        "given: Sequential; Submodule '0' gives what the model returns; ",
    ),
    "one layer twice": (Twice(), INPUTS[:4], "Submodule 'layer' runs more than once in a pass; "),
    "activations of five axes": (
        nn.Sequential(nn.Conv3d(1, 2, 1), nn.ReLU(), nn.Conv3d(2, 2, 1)),
        torch.randn(2, 1, 3, 3, 3),
        r"Submodule '0' returns activations of 5 axes \(and 2 more like it\); name a submodule "
        r"whose output has them; print\(esper.inspect\(model, sample\)\) says of every",
    ),
}


@pytest.mark.parametrize("case", NOWHERE)
def test_a_model_that_can_grow_nowhere_is_told_why(case: str) -> None:
    model, sample, reason = NOWHERE[case]
    with pytest.raises(EsperError, match=rf"No place was found .*{reason}") as refusal:
        esper.wrap(model, sample)
    found = esper.inspect(model, sample)
    assert found.chosen == ()
    assert bool(found.places) == ("name some with slots=[" in str(refusal.value))
    for place in found.places:  # the advice helps
        esper.wrap(model, sample, slots=["" if place.path == "output" else place.path])


class Gpt(nn.Module):
    """Its positional embedding returns [T, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 6), nn.Embedding(9, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(6, 9)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.blocks(h))  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", [(7, 7), (2, 2), (7, 5), (4, 8), (1, 7)])
def test_a_batch_as_long_as_the_text_is_told_from_it_and_positions_are_refused(
    shape: tuple[int, int],
) -> None:
    found = esper.inspect(Gpt(), torch.zeros(shape, dtype=torch.int64))
    assert found.chosen == ("blocks.0", "blocks.1", "blocks.2")
    assert {place.layout for place in found.places} == {
        f"tokens [B, {shape[1]}, 6]", f"tokens [B, {shape[1]}, 9]"
    }  # fmt: skip
    (refusal,) = found.refusals
    assert refusal.path == "places"
    assert "no axis that could be the batch follows it" in refusal.reason


def test_names_of_blueprints_may_be_for_other_places_than_those_chosen() -> None:
    host = esper.wrap(mlp(), INPUTS[:4], slots=["2"], blueprints=["conv", "mlp"])
    assert host.catalogue.names == ("conv", "mlp")
    assert host.explain(LifecycleOp.GERMINATE, "2", blueprint="conv")
    host.germinate("2", "mlp")
    with pytest.raises(EsperError, match=r"Unknown blueprint.*'conv'"):
        esper.wrap(mlp(), INPUTS[:4], slots=["2"], blueprints=["conv"])
    with pytest.raises(EsperError, match=r"did you mean 'mlp'"):
        esper.wrap(mlp(), INPUTS[:4], slots=["2"], blueprints=["conv", "mpl"])


def test_blueprints_that_fit_some_places_only_narrow_the_choice() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    for name, chosen in (("conv", ("1",)), ("mlp", ("4",))):
        found = esper.inspect(model, IMAGES, blueprints=[name])
        assert found.chosen == chosen
        assert any("No blueprint fits" in refusal.reason for refusal in found.refusals)
        assert esper.wrap(model, IMAGES, blueprints=[name]).catalogue.slots.names == chosen
    with pytest.raises(
        EsperError, match=r"No blueprint fits the output of submodule 'enter' \(and"
    ):
        esper.wrap(Painter(), INPUTS[:4], blueprints=["conv"])


def test_where_only_the_output_has_room_the_budget_is_the_reason() -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    assert esper.inspect(model, INPUTS[:4], budget=20).chosen == ()
    with pytest.raises(EsperError, match="The budget has no room for any seed in these slots"):
        esper.wrap(model, INPUTS[:4], budget=20)


class Counting(nn.Sequential):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.passes += 1
        return super().forward(x)  # type: ignore[no-any-return]


def test_a_model_is_not_surveyed_again_to_be_wrapped() -> None:
    def passes(work: Callable[[nn.Module, Tensor], object]) -> int:
        Counting.passes = 0
        work(Counting(*mlp()), INPUTS[:4])
        return Counting.passes

    assert passes(esper.wrap) == passes(esper.inspect) > 0
    named = passes(lambda model, x: esper.wrap(model, x, slots=["2", "5"]))
    assert named < passes(esper.wrap)
