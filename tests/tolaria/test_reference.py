"""The reference trainer does what its few lines say."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from esper.kasmina import GateRules, SlottedModel, build_host
from tests.tolaria.reference import accuracy, contributions, shuffled_batches, train_epoch


def test_batches_are_whole_shuffled_and_without_repetition() -> None:
    inputs, labels = torch.arange(23.0)[:, None], torch.arange(23)
    batches = list(shuffled_batches(inputs, labels, 5, torch.Generator().manual_seed(0)))
    assert [len(x) for x, _ in batches] == [5, 5, 5, 5]
    seen = torch.cat([y for _, y in batches])
    assert len(seen.unique()) == 20
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)


def test_an_epoch_equals_the_same_steps_written_out() -> None:
    torch.manual_seed(0)
    host, twin = SlottedModel(build_host("mlp")), build_host("mlp")
    twin.load_state_dict(host.model.state_dict())
    x, y = torch.randn(30, 40), torch.randint(10, (30,))
    batches = list(shuffled_batches(x, y, 10, torch.Generator().manual_seed(1)))
    optimizer = torch.optim.AdamW(host.parameters(), lr=0.01)
    report = train_epoch(host, optimizer, cross_entropy, batches)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01)
    losses = []
    for inputs, labels in batches:
        plain.zero_grad()
        loss = cross_entropy(twin(inputs), labels)
        loss.backward()
        plain.step()
        losses.append(loss.item())
    assert report.loss == sum(losses) / 3
    for a, b in zip(host.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_isolated_seeds_learn_and_their_gradient_is_reported() -> None:
    torch.manual_seed(0)
    host = SlottedModel(build_host("mlp"), rules=GateRules.unmeasured())
    host.germinate("mid", "mlp")
    before = [parameter.clone() for parameter in host.slots.parameters()]
    optimizer = torch.optim.Adam(host.parameters(), lr=0.01)
    batch = torch.randn(8, 40), torch.randint(10, (8,))
    report = train_epoch(host, optimizer, cross_entropy, [batch] * 3)
    assert report.gradient["mid"] > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, host.slots.parameters(), strict=True))


def test_accuracy_is_in_percent_and_leaves_the_mode_alone() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Fixed().train()
    logits = torch.eye(4)
    assert accuracy(model, logits, torch.tensor([0, 1, 2, 0])) == 75.0
    assert model.training


def test_contribution_is_the_score_with_minus_without_for_seeds_that_are_on() -> None:
    torch.manual_seed(0)
    host = SlottedModel(build_host("mlp"), rules=GateRules.unmeasured())
    host.germinate("early", "mlp", "immediate")
    host.germinate("late", "mlp", "ramp")
    with torch.no_grad():
        for parameter in host.slots.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    x, y = torch.randn(200, 40), torch.randint(10, (200,))
    measured = contributions(host, lambda: accuracy(host, x, y))
    with host.without("early"):
        without = accuracy(host, x, y)
    assert measured == {"early": accuracy(host, x, y) - without}
