"""An average that grows along: against one by hand in float64, and against torch's own."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import esper
from esper.api import GrowingModel
from esper.leyline.errors import AgreementError, EsperError
from esper.leyline.stages import SeedStage
from tests.api.tables import (
    INPUTS,
    TRAIN,
    Script,
    accuracy,
    mlp,
    require_same,
    states,
    wrapped,
)

DECAY = 0.9
LIFE = {
    1: ("plant", "2", "mlp", "gate"),
    2: ("plant", "5", "norm", "ramp"),
    3: ("blend in", "2"),
    4: ("prune", "5"),
    8: ("keep", "2"),
    9: ("plant", "5", "norm", "ramp"),  # under the names of the one that was pruned
}
EPOCHS = 11


def step(host: nn.Module, optimizer: torch.optim.Optimizer, at: int) -> None:
    rows = torch.arange(8 * at, 8 * at + 8) % len(TRAIN[0])
    optimizer.zero_grad()
    nn.functional.cross_entropy(host(TRAIN[0][rows]), TRAIN[1][rows]).backward()
    optimizer.step()


def grown() -> tuple[GrowingModel, esper.ema, dict[str, Tensor], set[SeedStage]]:
    """A whole life, with an average by hand in float64."""
    host = wrapped()
    optimizer = host.optimizer(torch.optim.AdamW, lr=0.02)
    average, script = esper.ema(host, DECAY), Script(LIFE)
    by_hand: dict[int, tuple[nn.Parameter, Tensor]] = {}
    stages: set[SeedStage] = set()
    for epoch in range(EPOCHS):
        for number in range(3):
            step(host, optimizer, 3 * epoch + number)
            average.update()
            before, by_hand = by_hand, {}
            for p in host.parameters():
                now = p.detach().double()
                mean = DECAY * before[id(p)][1] + (1 - DECAY) * now if id(p) in before else now
                by_hand[id(p)] = p, mean.clone()
        host.tick(script, train_loss=1.0, evaluate=accuracy)
        stages |= {slot.stage for slot in host.seed_slots.values()}
    step(host, optimizer, 0)
    average.update()
    wanted = {}
    for name, p in host.named_parameters():
        now = p.detach().double()
        old = by_hand.get(id(p))
        wanted[name] = now if old is None else DECAY * old[1] + (1 - DECAY) * now
    return host, average, wanted, stages


def test_it_is_the_average_by_hand_over_a_whole_life() -> None:
    host, average, wanted, stages = grown()
    lived = {SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.FOSSILIZED, SeedStage.EMBARGOED}
    assert lived <= stages
    found = average.state_dict()
    assert found.keys() == wanted.keys() == dict(host.named_parameters()).keys()
    for name, mean in wanted.items():
        torch.testing.assert_close(found[name].double(), mean, rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(found[n], p) for n, p in host.named_parameters())


def test_the_host_has_the_average_inside_and_its_own_weights_afterwards() -> None:
    host, average, wanted, _ = grown()
    before = states(host)
    host.eval()
    own = host(INPUTS)
    with average.applied():
        for name, p in host.named_parameters():
            torch.testing.assert_close(p.detach().double(), wanted[name], rtol=1e-5, atol=1e-6)
        inside = host(INPUTS)
        with pytest.raises(EsperError, match="cannot be updated from itself"):
            average.update()
    assert not torch.equal(own, inside)
    assert torch.equal(own, host(INPUTS))
    host.train()
    require_same(before, states(host))
    host.eval()
    host.finish()
    with average.applied():
        committed = host(INPUTS)
    plain = average.export()
    assert not any(type(module).__module__.startswith("esper") for module in plain.modules())
    assert torch.equal(plain(INPUTS), committed)
    assert torch.equal(own, host(INPUTS))


def test_while_nothing_grows_it_is_torchs_own() -> None:
    host = wrapped()
    optimizer = host.optimizer(torch.optim.SGD, lr=0.1)
    average = esper.ema(host, decay=0.99)
    torchs = AveragedModel(mlp(), multi_avg_fn=get_ema_multi_avg_fn(0.99))
    for number in range(20):
        step(host, optimizer, number)
        average.update()
        torchs.update_parameters(host.model)
    host.eval()
    torchs.eval()
    with average.applied():
        require_same(host.model.state_dict(), torchs.module.state_dict())
        assert torch.equal(host(INPUTS), torchs(INPUTS))


def test_it_goes_on_from_a_checkpoint_to_the_bit() -> None:
    host, average, _, _ = grown()
    optimizer = host.optimizers[0]
    again = wrapped()
    its_optimizer = again.optimizer(torch.optim.AdamW, lr=0.02)
    its_average = esper.ema(again, DECAY)
    kept = copy.deepcopy((host.state_dict(), optimizer.state_dict(), average.state_dict()))
    with pytest.raises(AgreementError, match=r"grown otherwise; given: slots\..*load the host's"):
        its_average.load_state_dict(kept[2])
    again.load_state_dict(kept[0])
    its_optimizer.load_state_dict(kept[1])
    its_average.load_state_dict(kept[2])
    for pair, mean in (((host, optimizer), average), ((again, its_optimizer), its_average)):
        torch.manual_seed(3)
        for number in range(4):
            step(*pair, number)
            mean.update()
    require_same(average.state_dict(), its_average.state_dict())


def test_half_precision_is_averaged_in_float32() -> None:
    host = wrapped().bfloat16()
    average = esper.ema(host, decay=0.9999)
    average.update()
    with torch.no_grad():
        for p in host.parameters():
            p.add_(1.0)
    start = average.state_dict()["model.0.weight"].clone()
    average.update()
    assert (average.state_dict()["model.0.weight"] > start).all()
    with average.applied():
        assert host.model[0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("decay", [1.5, -0.1, "high", float("nan")])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(EsperError, match="decay is out of range"):
        esper.ema(wrapped(), decay)


def test_only_a_host_has_an_average_that_grows() -> None:
    with pytest.raises(EsperError, match=r"made of a host; given: Sequential; pass what"):
        esper.ema(mlp())  # type: ignore[arg-type]
