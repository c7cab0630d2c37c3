"""Seeds that train unnoticed: what the seed pass and the straight way leave alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import (
    GateRules,
    Isolation,
    SlottedModel,
    blueprint,
    unregister_blueprint,
    zeroed,
)
from esper.kasmina.isolation import randomness_kept, state_kept
from esper.leyline import Family, SlotSpec
from tests.kasmina.twins import RULES, random_states, require_same, seed_of, stir, throw
from tests.tolaria.reference import gradient_norms

SAMPLE = torch.linspace(-1, 1, 24).view(6, 4)


@pytest.fixture
def _noisy_blueprints() -> Iterator[None]:
    @blueprint("noisy", Family.DENSE)
    def noisy(spec: SlotSpec) -> nn.Module:
        last = zeroed(nn.Linear(spec.channels, spec.channels))
        return nn.Sequential(nn.BatchNorm1d(spec.channels), nn.Dropout(0.5), last)

    yield
    unregister_blueprint("noisy", Family.DENSE)


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 2)
        )


def host(isolation: Isolation = Isolation.DUAL_PASS, rules: GateRules = RULES) -> SlottedModel:
    return SlottedModel(model(), ["1", "3"], SAMPLE, isolation=isolation, rules=rules)


@pytest.mark.usefixtures("_noisy_blueprints")
@pytest.mark.parametrize("isolation", list(Isolation))
def test_a_seed_with_dropout_takes_no_random_numbers_from_the_host(isolation: Isolation) -> None:
    plain, grown = model(), host(isolation)
    grown.germinate("1", "noisy")
    results = []
    for each in (plain, grown):
        throw(4)
        each(SAMPLE).square().mean().backward()
        if each is grown and grown.has_isolated_seeds:
            with grown.seed_pass():
                grown(SAMPLE).square().mean().backward()
        results.append([each(SAMPLE).detach(), *random_states()])
    require_same(*results)
    assert gradient_norms(grown)["1"] > 0


@pytest.mark.usefixtures("_noisy_blueprints")
def test_a_newborn_seed_has_seen_no_data() -> None:
    grown = host()
    grown.germinate("1", "noisy")
    assert seed_of(grown, 0).body[0].num_batches_tracked == 0


@pytest.mark.usefixtures("_noisy_blueprints")
def test_the_seed_pass_leaves_blended_seeds_alone() -> None:
    grown = host()
    grown.germinate("1", "noisy", "immediate")
    grown.germinate("3", "noisy")
    grown(SAMPLE).square().mean().backward()
    blended, training = seed_of(grown, 0), seed_of(grown, 1)
    before = {name: tensor.clone() for name, tensor in blended.state_dict().items()}
    gradients = [p.grad.clone() for p in blended.parameters()]
    with grown.seed_pass():
        grown(SAMPLE).square().mean().backward()
    require_same(before, blended.state_dict())
    require_same(gradients, [p.grad for p in blended.parameters()])
    assert training.body[0].num_batches_tracked == 1
    assert all(p.requires_grad for p in grown.parameters())


def test_the_seed_pass_gives_no_gradient_to_its_inputs() -> None:
    grown = host()
    grown.germinate("1", "mlp")
    inputs = SAMPLE.clone().requires_grad_()
    with grown.seed_pass():
        grown(inputs).square().mean().backward()
    assert inputs.grad is None
    assert gradient_norms(grown)["1"] > 0


@pytest.mark.parametrize("training", [True, False])
def test_the_seed_pass_may_come_between_forward_and_backward(training: bool) -> None:
    plain, grown = model().train(training), host().train(training)
    grown.germinate("1", "mlp")
    throw(2)
    plain(SAMPLE).square().mean().backward()
    throw(2)
    loss = grown(SAMPLE).square().mean()
    with grown.seed_pass():
        grown(SAMPLE).square().mean().backward()
    loss.backward()
    require_same(
        {name: p.grad for name, p in plain.named_parameters()},
        {name: p.grad for name, p in grown.model.named_parameters()},
    )


def test_the_seed_pass_ends_well_when_it_fails() -> None:
    grown = host()
    grown.germinate("1", "mlp")
    expected = grown.eval()(SAMPLE)
    stir(seed_of(grown, 0))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), grown.seed_pass():
        grown(torch.ones(2, 3))
    assert torch.equal(expected, grown(SAMPLE))
    assert all(p.requires_grad for p in grown.parameters())


def test_counterfactuals_can_be_nested() -> None:
    grown = host().eval()
    for index, slot in enumerate(("1", "3")):
        grown.germinate(slot, "mlp", "immediate")
        stir(seed_of(grown, index))
    both = grown(SAMPLE)
    with grown.without("1", "3"):
        none = grown(SAMPLE)
    with grown.without("1"):
        without_one = grown(SAMPLE)
        with grown.without("3"):
            assert torch.equal(none, grown(SAMPLE))
        assert torch.equal(without_one, grown(SAMPLE))
        with grown.committed():
            assert torch.equal(none, grown(SAMPLE))
        grown.measure(loss_rise=0.0)
        grown.pass_time()
        assert torch.equal(without_one, grown(SAMPLE))
    assert torch.equal(both, grown(SAMPLE))


def test_a_straight_seed_serves_under_vmap() -> None:
    grown = host(Isolation.STRAIGHT_THROUGH).eval()
    grown.germinate("1", "mlp")
    parameters = {name: p.detach() for name, p in grown.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(grown, parameters, (x[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, SAMPLE)
    grown(SAMPLE).square().sum().backward()
    for name, parameter in grown.named_parameters():
        torch.testing.assert_close(per_sample[name].sum(0), parameter.grad)


def test_what_a_pass_leaves_in_a_module_is_put_back() -> None:
    class Diary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("late", None)
            self.register_buffer("sizes", torch.tensor([]))  # as observers of quantisation have it
            self.last: Tensor | None = None
            self.cache = torch.zeros(2)  # no buffer
            self.pages, self.words, self.seen = ["first"], {"a": 1}, {1}

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.cache += 1
            self.sizes.resize_(3).fill_(7)
            self.late, self.last, self.new = x, x, x
            self.pages.append("next")
            self.words["b"] = self.words.pop("a")
            self.seen.add(2)
            self.layer = nn.Linear(2, 2)
            return x

    diary = Diary()
    count = diary.count
    with state_kept(diary):
        diary(SAMPLE)
    assert diary.count is count
    assert diary.count == 0
    assert diary.cache.tolist() == [0, 0]
    assert diary.sizes.shape == (0,)
    assert diary.last is None
    assert diary.late is None
    assert not hasattr(diary, "new")
    assert (diary.pages, diary.words, diary.seen) == (["first"], {"a": 1}, {1})
    assert not list(diary.children())


def test_all_random_streams_start_anew_and_are_put_back() -> None:
    part = nn.Identity()
    part.dice = torch.Generator().manual_seed(3)
    before = [*random_states(), part.dice.get_state()]
    drawn = []
    for _ in range(2):
        with randomness_kept(part, stream=7):
            drawn.append([*random_states(), part.dice.get_state()])
            torch.rand(3, generator=part.dice)
            torch.rand(3)
    require_same(*drawn)
    require_same(before, [*random_states(), part.dice.get_state()])
