"""Two processes that train copies of one model see, learn and decide as one would with all data."""

import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from esper.api import Budget, grow, ranks, wrap
from esper.api.batches import IGNORED
from esper.api.fitting_controllers import resolve
from esper.api.ticking import slot_flow
from esper.kasmina.flow_statistics import flow_statistics
from esper.kasmina.gates import GateRules
from esper.leyline.errors import EsperError
from esper.simic.agent.ppo import PPOAgent
from esper.simic.training.run_processes import init_distributed
from esper.tamiyo.features import FeatureTable
from tests.api.tables import CLASSES, INPUTS, LABELS, TRAIN, VAL, Script, mlp, wrapped
from tests.ranks import torchrun

LIFE = {1: ("plant", "2", "mlp", "ramp"), 3: ("blend in", "2")}


def plain() -> nn.Sequential:
    """Nothing in it depends on who else is in a batch, and nothing on chance."""
    model = mlp()
    model[1], model[3] = nn.Identity(), nn.Identity()
    return model


def run_two(name: str, folder: Path, *words: object, restarts: int = 0) -> list[dict[str, Any]]:
    done = torchrun(2, f"{__name__}:{name}", *words, cwd=folder, restarts=restarts)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def tell(found: dict[str, Any]) -> None:
    Path(f"{os.environ['RANK']}.json").write_text(json.dumps(found))


# --- loops of one's own --------------------------------------------------------------------------


def other_samples() -> None:
    with init_distributed("cpu"):
        tell(decided_with_a_sample_of_its_own())


def decided_with_a_sample_of_its_own() -> dict[str, Any]:
    """A controller that looks at the flow; every process has a sample of its own.

    The parallel wrapper goes before its group does: if it were the last to hold the group, torch
    would wait for threads of Gloo's while these wait for Python, for ever.
    """
    rank, agent = ranks.rank(), sys.argv[1]
    torch.manual_seed(0)
    rows = slice(48 * rank, 48 * rank + 48)
    sample, rules = INPUTS[rows][:5] * (1 + rank), GateRules.unmeasured()
    host = wrap(net := mlp(), sample, slots=["2", "5"], rules=rules, budget=Budget(epochs=9))
    controller = resolve(agent, host.catalogue, 9)
    own = flow_statistics(net.eval()[:3](sample)[None], 1)[0].double().nan_to_num()
    alike = slot_flow(host)[0, 0].nan_to_num()
    optimizer = host.train().optimizer(torch.optim.SGD, lr=0.05)
    parallel, decisions = DistributedDataParallel(host), []
    for epoch in range(6):
        optimizer.zero_grad()
        cross_entropy(parallel(INPUTS[rows]), LABELS[rows]).backward()
        optimizer.step()
        seen = {"train_loss": 1.0 + rank, "evaluate": lambda m: 10.0 + 20.0 * rank}
        tick = host.tick(controller, **seen)
        decisions.append((str(tick.decision), tick.score))
        if epoch == 3:  # it need not be made anew, and may
            parallel = DistributedDataParallel(host)
    weights = [float(p.double().sum()) for p in host.parameters()]
    return {"own": torch.allclose(own, alike), "decisions": decisions, "weights": weights}


def test_processes_with_other_samples_decide_alike_by_what_both_measured(tmp_path: Path) -> None:
    host = wrapped()
    trained = PPOAgent(host.space, state_dim=FeatureTable.of(host.catalogue).size, seed=3)
    for op in (1, 2, 3):
        trained.network.bias_action_logit("op", op, 1.0)
    first, second = run_two("other_samples", tmp_path, trained.save(tmp_path / "agent"))
    assert first.pop("own"), "the flow is that of the first one's sample"
    assert not second.pop("own")
    assert first == second
    assert any(decision.startswith("plant") for decision, _ in first["decisions"])
    assert {score for _, score in first["decisions"]} == {20.0}


def trained_with_dual_pass(size: int) -> dict[str, Any]:
    """A seed that learns in passes of its own, on this process's half of every batch."""
    host = wrap(
        plain(), INPUTS[:5], slots=["2", "5"], isolation="dual_pass", budget=Budget(epochs=9)
    )
    optimizer = host.optimizer(torch.optim.SGD, lr=0.05)
    parallel = DistributedDataParallel(host) if size > 1 else host
    ticks = []
    rows = slice(ranks.rank(), None, size)
    inputs, labels = VAL[0][rows], VAL[1][rows]
    for _ in range(6):
        for start in range(0, 64, 16):
            x, y = (part[start : start + 16][rows] for part in TRAIN)
            optimizer.zero_grad()
            cross_entropy(parallel(x), y).backward()
            host.seed_step(lambda x=x, y=y: cross_entropy(host(x), y))  # type: ignore[misc]
            optimizer.step()

        def right(model: nn.Module) -> float:
            return 100.0 * float((model(inputs).argmax(1) == labels).double().mean())

        tick = host.tick(Script(LIFE), train_loss=1.0, evaluate=right)
        ticks.append([str(tick.decision), tick.score, dict(tick.contributions)])
    return {"ticks": ticks, "weights": [p.flatten().tolist() for p in host.parameters()]}


def dual_pass() -> None:
    with init_distributed("cpu"):
        tell(trained_with_dual_pass(2))


def test_a_pass_of_its_own_teaches_a_seed_in_two_processes_what_it_does_in_one(
    tmp_path: Path,
) -> None:
    first, second = run_two("dual_pass", tmp_path)
    alone = trained_with_dual_pass(1)
    assert first == second
    for (decision, score, worth), (same, whole, all_of_it) in zip(
        first["ticks"], alone["ticks"], strict=True
    ):
        assert decision == same
        assert score == pytest.approx(whole)
        assert worth == pytest.approx(all_of_it)
    assert any(worth for _, _, worth in first["ticks"]), "contributions were measured"
    for ours, theirs in zip(first["weights"], alone["weights"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


# --- esper.grow ----------------------------------------------------------------------------------


def grown(folder: Path | None) -> dict[str, Any]:
    labels = TRAIN[1].clone()
    labels[5:20] = IGNORED  # parts of a batch have more or fewer that count
    run = grow(
        plain(),
        (TRAIN[0], labels),
        VAL,
        loss="cross_entropy",
        budget="+200%",
        slots=["2", "5"],
        epochs=8,
        batch_size=15,  # of which a process has 7 or 8 samples, and of the last batch 2
        optimizer="SGD",
        lr=0.1,
        controller="audition",
        out=folder,
        quiet=True,
    )
    weights = [p.flatten().tolist() for p in run.host.parameters()]
    kept = ("decision", "train_loss", "val_loss", "score", "contributions", "shadows")
    history = [{name: each.get(name) for name in kept} for each in run.history]
    contributions = {
        slot: (contribution.value, contribution.standard_error)
        for slot, contribution in run.contributions.items()
    }
    return {"history": history, "weights": weights, "contributions": contributions}


def growing() -> None:
    tell(grown(Path("run")))


@pytest.mark.slow
def test_two_processes_grow_what_one_does(tmp_path: Path) -> None:
    first, second = run_two("growing", tmp_path)
    alone = grown(None)
    assert repr(first) == repr(second)
    assert any(each["shadows"] for each in alone["history"]), "shadows were heard"
    for ours, theirs in zip(first["history"], alone["history"], strict=True):
        assert ours["decision"] == {**theirs["decision"]}
        for name in ("train_loss", "val_loss", "score", "contributions"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), name
    assert first["contributions"].keys() == alone["contributions"].keys() != set()
    for slot, measured in alone["contributions"].items():
        assert first["contributions"][slot] == pytest.approx(measured, rel=1e-4, abs=1e-4)
    assert (tmp_path / "run" / "checkpoint").is_dir()


def killed() -> None:
    """The second process dies in the third epoch, once. Before, an older run is in the way."""
    with pytest.raises(EsperError, match="older holds a run already"):
        grown(Path("older"))
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        step, steps = torch.optim.SGD.step, iter(range(12))

        def dying(*given: Any, **named: Any) -> Any:
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(*given, **named)

        torch.optim.SGD.step = dying  # type: ignore[method-assign]
    tell(grown(Path("run")) | {"again": os.environ["TORCHELASTIC_RESTART_COUNT"]})


@pytest.mark.slow
def test_growing_goes_on_to_the_bit_after_a_process_was_lost(tmp_path: Path) -> None:
    (whole := tmp_path / "whole").mkdir()
    (older := tmp_path / "other" / "older" / "checkpoint").mkdir(parents=True)
    (older / "manifest.json").write_text("{}")
    undisturbed = run_two("growing", whole)
    found = run_two("killed", tmp_path / "other", restarts=1)
    assert [each.pop("again") for each in found] == ["1", "1"]
    assert repr(found) == repr(undisturbed)


class Uneven(nn.Module):
    """A model that every process draws for itself."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = mlp(start=ranks.rank())
        self.layers.append(nn.Linear(CLASSES, width))
        self.register_buffer("scale", torch.full((width,), 1.0 + ranks.rank()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale  # type: ignore[no-any-return]


class Opinion:
    """A metric that collects, and makes something else of it in every process."""

    def update(self, outputs: Tensor, targets: Tensor) -> None: ...

    def reset(self) -> None: ...

    def compute(self) -> float:
        return 10.0 + 20.0 * ranks.rank()


def uneven() -> None:
    def made(model: nn.Module, data: Any = TRAIN, **named: Any) -> Any:
        given: dict[str, Any] = {"loss": "cross_entropy", "budget": None, "controller": "never"}
        given |= {"epochs": 2, "optimizer": "SGD", "quiet": True, "batch_size": 61} | named
        return grow(model, data, data, **given)

    with init_distributed("cpu"):
        run, turned = made(Uneven(), metric=Opinion()), (TRAIN[0].roll(ranks.rank(), 0), TRAIN[1])
        words, sparse = torch.arange(64) % 7, nn.Embedding(7, 8, sparse=True)
        refused = []
        for model, data in (
            (Uneven(), turned),
            (Uneven(4 + ranks.rank()), TRAIN),
            (nn.Sequential(sparse, nn.Linear(8, 8)), (words, words)),
        ):
            with pytest.raises(EsperError) as refusal:
                made(model, data)
            refused.append(refusal.value.what)
        state = {name: each.tolist() for name, each in run.host.model.state_dict().items()}
        tell({"state": state, "scores": [each["score"] for each in run.history], "no": refused})


def test_processes_learn_as_one_from_the_first_ones_weights_or_refuse(tmp_path: Path) -> None:
    """The last batch has too few samples to be divided among layers that normalise."""
    first, second = run_two("uneven", tmp_path)
    assert first == second
    assert first["state"]["scale"] == [1.0] * 8
    assert first["scores"] == [10.0, 10.0]
    assert first["no"] == [
        "Processes that learn together were given different settings or data",
        "Processes that learn together were given different models",
        "Sparse gradients are not averaged over processes",
    ]


@pytest.mark.parametrize(("named", "place"), [({}, "cpu"), ({"device": "auto"}, "cuda")])
def test_processes_meet_where_the_model_is_to_be(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], place: str
) -> None:
    met: list[str] = []
    monkeypatch.setattr(ranks.run_processes, "is_launched", lambda: True)
    monkeypatch.setattr(
        ranks.run_processes, "init_distributed", lambda on: nullcontext(met.append(on))
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ranks.together(lambda *_, **__: None)("folder", nn.Linear(1, 1), **named)
    assert met == [place]


# --- who has which samples -----------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 99))
def test_every_sample_belongs_to_one_process_and_weights_make_the_mean_of_all(
    samples: int, size: int, nested: bool, counted: bool, chance: int
) -> None:
    x = torch.arange(samples)
    if counted:  # not every label does
        x[torch.rand(samples, generator=torch.Generator().manual_seed(chance)) < 0.5] = IGNORED
    batch: Any = ({"a": x, "b": (x, "word")} if nested else x, x)
    found: list[tuple[Tensor, float]] = []
    divided: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "count", lambda: size)
        for rank in range(size):
            patch.setattr(ranks, "rank", lambda rank=rank: rank)
            part, weight = ranks.own_part(batch, IGNORED if counted else None)
            found.append((part[1], weight))
            divided += [each[1] for each in ranks.own_parts([batch])]
    assert min(len(rows) for rows, _ in found) >= min(2, samples), "one cannot be normalised"
    means = [float(rows[rows != IGNORED].double().mean()) * weight for rows, weight in found]
    whole = float(x[x != IGNORED].double().mean())
    assert sum(means) / size == pytest.approx(whole, nan_ok=True)
    assert torch.cat(divided).sort().values.tolist() == x.sort().values.tolist()


def test_a_process_on_its_own_keeps_what_it_has() -> None:
    values = torch.tensor([1.0, torch.nan])
    for agreed in (ranks.shared, ranks.averaged, ranks.summed, ranks.gathered):
        assert agreed(wrapped(), values) is values
    assert not distributed.is_initialized()
