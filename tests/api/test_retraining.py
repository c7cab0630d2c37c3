"""The architecture that a run has found, with fresh weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.api import GrownRun, grow, load_run, resume
from esper.api.ticking import NotFiniteError
from esper.leyline.errors import EsperError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.LayerNorm(10), nn.Linear(10, 3))


class WithToken(nn.Module):
    """Has a parameter that no layer draws."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body = nn.Parameter(torch.ones(6)), net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x + self.token)
        return out


def data() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    return inputs, inputs[:, :3].argmax(1)


def grown(model: nn.Module, **more: object) -> GrownRun:
    path = "body.1" if isinstance(model, WithToken) else "1"
    return grow(
        model, data(), data(), loss="cross_entropy", budget=None, epochs=5, slots=[path], lr=0.01,
        controller=f"fixed:slot={path},blueprint=wide,epoch=1", quiet=True, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_fresh_is_the_same_architecture_with_other_weights_and_leaves_the_run_alone() -> None:
    run = grown(net())
    before = {name: each.clone() for name, each in run.host.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    plain, old = run.fresh(), run.export()
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in old.named_parameters()
    }
    trained = dict(old.named_parameters())
    drawn = [n for n, p in plain.named_parameters() if p.dim() > 1]
    assert drawn
    assert not any(torch.equal(plain.get_parameter(n), trained[n]) for n in drawn)
    assert all(bool(plain.get_parameter(n).any()) for n in drawn)  # the last layer of a seed too
    for name, each in run.host.state_dict().items():
        assert torch.equal(each.nan_to_num(), before[name].nan_to_num())


def test_the_weights_of_a_newborn_are_taken_over() -> None:
    run = grown(WithToken())
    newborn = WithToken()
    plain = run.fresh(newborn)
    for name, parameter in newborn.named_parameters():
        assert torch.equal(plain.get_parameter(name), parameter)
    assert bool(plain(data()[0]).isfinite().all())


def test_what_cannot_be_drawn_anew_and_another_model_are_refused() -> None:
    run = grown(WithToken())
    with pytest.raises(EsperError, match="token"):
        run.fresh()
    with pytest.raises(EsperError, match="another"):
        run.fresh(nn.Linear(6, 3))


def test_retraining_trains_every_rate_and_tells_which_was_best(tmp_path: Path) -> None:
    run = grown(net(), out=tmp_path / "run")
    found = run.retrain([0.003, 0.01])
    assert set(found.runs) == {0.003, 0.01}
    best = max(found.runs.values(), key=lambda each: each.after["score"])
    assert found.best is best
    assert found.export()(data()[0]).shape == (60, 3)
    assert str(found).count("afresh, lr") == 2
    sizes = {sum(p.numel() for p in each.parameters()) for each in (found.export(), run.export())}
    assert len(sizes) == 1
    with pytest.raises(EsperError, match="rate"):
        run.retrain([-1.0])
    with pytest.raises(EsperError, match="data"):
        load_run(tmp_path / "run", net()).retrain()
    assert resume(tmp_path / "run", net()).finished


def test_a_rate_that_diverges_does_not_cost_what_the_others_came_to() -> None:
    run = grown(net(), optimizer="SGD")
    found = run.retrain([1e30, 0.01])
    assert set(found.runs) == {0.01}
    assert found.diverged == (1e30,)
    assert found.best is found.runs[0.01]
    assert "afresh, lr 1e+30  diverged" in str(found)
    with pytest.raises(NotFiniteError):
        run.retrain([1e30])


def test_norms_without_weights_forget_what_they_have_seen_and_no_rates_are_the_runs_own() -> None:
    run = grown(
        nn.Sequential(
            nn.Linear(6, 10), nn.ReLU(), nn.BatchNorm1d(10, affine=False), nn.Linear(10, 3)
        )
    )
    norms = [m for m in run.fresh().modules() if isinstance(m, nn.BatchNorm1d)]
    assert [float(each.running_mean.abs().sum()) for each in norms] == [0.0]
    assert set(run.retrain([]).runs) == {0.01}
