"""Two processes that train copies of one model decide alike; what would part them is refused."""

from pathlib import Path

import pytest
import torch
from torch import distributed

from esper.api.ticking import shared
from esper.leyline.errors import EsperError
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo.features import FeatureTable
from tests import programs
from tests.api.tables import INPUTS, wrapped

# A controller that looks at the flow; every process has a sample of its own.
WORKER = """
import sys
import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from esper.api.fitting_controllers import resolve
from esper.api.ticking import slot_flow
from tests.api.tables import INPUTS, LABELS, mlp, accuracy
from esper.api import Budget, wrap
from esper.kasmina.gates import GateRules

rank, store, agent = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
rows = slice(48 * rank, 48 * rank + 48)
sample, rules = INPUTS[rows][:5] * (1 + rank), GateRules.unmeasured()
host = wrap(mlp(), sample, slots=["2", "5"], rules=rules, budget=Budget(epochs=9))
controller = resolve(agent, host.catalogue, 9)
own = slot_flow(host.eval())
alike = host.flow()
print("flow", torch.equal(own.nan_to_num(), alike.nan_to_num()), float(alike.nansum()))
optimizer = host.train().optimizer(torch.optim.SGD, lr=0.05)
parallel = DistributedDataParallel(host)
for epoch in range(6):
    optimizer.zero_grad()
    cross_entropy(parallel(INPUTS[rows]), LABELS[rows]).backward()
    optimizer.step()
    tick = host.tick(controller, train_loss=1.0 + rank, evaluate=lambda m: accuracy(m) / (1 + rank))
    print(tick.decision)
    if epoch == 3:  # it need not be made anew, and may
        parallel = DistributedDataParallel(host)
print("weights", *(float(p.double().sum()) for p in host.parameters()))
try:
    wrap(mlp(), INPUTS[:5], slots=["2"], isolation="dual_pass")
except Exception as refusal:
    print("refused", refusal)
distributed.destroy_process_group()
"""


def test_processes_with_other_samples_decide_alike(tmp_path: Path) -> None:
    host = wrapped()
    trained = PPOAgent.build(host.space, FeatureTable.of(host.catalogue).size, 1, seed=3)
    for op in (1, 2, 3):
        trained.network.prefer("op", op, 1.0)
    agent = trained.save(tmp_path / "agent")
    workers = [programs.start(WORKER, rank, tmp_path / "store", agent) for rank in range(2)]
    told = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], told
    # Some versions of torch let gloo talk on the same line of output.
    first, second = ([s for s in out.splitlines() if "[Gloo]" not in s] for out, _ in told)
    assert first[0].startswith("flow True")
    assert second[0].startswith("flow False"), "its own sample says otherwise"
    assert first[0].split()[2] == second[0].split()[2]
    assert first[1:] == second[1:]
    assert any(line.startswith("plant") for line in first)
    assert "isolation 'dual_pass' in 2 processes; wrap with isolation" in first[-1]


def test_a_pass_for_seeds_alone_is_refused_where_gradients_are_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the processes found each other after the model was wrapped."""
    host = wrapped(isolation="dual_pass")
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(EsperError, match=r"not averaged.*'straight_through'"):
        host.seed_step(lambda: host(INPUTS).sum())
    with pytest.raises(EsperError, match="not averaged"):
        wrapped(isolation="dual_pass")
    wrapped(isolation="straight_through")


def test_a_process_on_its_own_keeps_what_it_has() -> None:
    values = torch.tensor([1.0, torch.nan])
    assert shared(wrapped(), values) is values
