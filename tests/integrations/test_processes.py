"""Two processes on gloo: what grows is the same in both, under every loop."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from esper.api import Budget, wrap
from esper.kasmina.gates import GateRules
from tests.api.tables import INPUTS, LABELS, Script, accuracy, mlp
from tests.integrations import test_lightning, test_transformers
from tests.integrations.processes import free_port, in_processes

PORT = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def ranked(program: Callable[[int], None], rank: int, port: int) -> None:
    """As a launcher starts it."""
    os.environ |= PORT | {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "1"}
    program(rank)


def run_two(program: Callable[[int], None]) -> None:
    port = free_port()
    assert in_processes(*(partial(ranked, program, rank, port) for rank in range(2))) == [0, 0]


def require_alike(folder: Path, grown: str) -> None:
    """Every tensor is the same in both, and seeds have learned."""
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first["ticks"] == second["ticks"]
    assert first["losses"] != second["losses"], "they saw other data"
    weights = first["weights"]
    assert all(torch.equal(weights[name], second["weights"][name]) for name in weights)
    assert any(grown in name for name in weights)


def keep(folder: Path, rank: int, model: Any, ticks: list[Any], losses: list[float]) -> None:
    kept = {"weights": dict(model.named_parameters()), "losses": losses}
    torch.save(kept | {"ticks": [str(tick.decision) for tick in ticks]}, folder / f"{rank}.pt")


def test_a_lightning_module_grows_alike(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        callback, losses = test_lightning.scripted(), []

        class Look(test_lightning.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
                losses.append(float(outputs["loss"]))

        module = test_lightning.fit(
            tmp_path, callback, 8, Look(), strategy="ddp", devices=2, gradient_clip_val=0.1
        )
        keep(tmp_path, rank, module, callback.ticks, losses)

    run_two(program)
    require_alike(tmp_path, "esper.slots.0.seed")


def test_a_hugging_face_model_grows_alike(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        callback, losses = test_transformers.scripted(), []
        made = test_transformers.trainer(tmp_path, 7, callback, max_grad_norm=0.1)
        callback._saw_loss = lambda loss: losses.append(loss.item())  # type: ignore
        made.train()
        keep(tmp_path, rank, made.model, callback.ticks, losses)

    run_two(program)
    require_alike(tmp_path, "esper.slots.0.seed")


def test_a_host_that_accelerate_prepares_grows_alike(tmp_path: Path) -> None:
    """Prepared once; what is saved and loaded goes on to the same end."""
    decisions = {1: ("plant", "2", "norm", "ramp"), 2: ("plant", "5", "mlp", "ramp")}
    decisions |= {3: ("blend in", "2"), 4: ("prune", "5")}

    def program(rank: int) -> None:
        accelerator = Accelerator(cpu=True)
        losses: list[float] = []
        ends = []
        for epochs in (range(6), range(3, 6)):
            host = wrap(mlp(), INPUTS[:5], slots=["2", "5"], rules=GateRules.unmeasured(),
                        budget=Budget(epochs=9))  # fmt: skip
            optimizer = host.optimizer(torch.optim.AdamW, lr=0.01)
            loader = DataLoader(TensorDataset(INPUTS[:64], LABELS[:64]), 16)
            model, stepper, batches = accelerator.prepare(host, optimizer, loader)
            if epochs.start:
                accelerator.load_state(str(tmp_path / "state"))
            ticks = []
            torch.manual_seed(rank)
            for epoch in epochs:
                for x, y in batches:
                    loss = cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    stepper.step()
                    stepper.zero_grad()
                    losses.append(loss.item())
                ticks.append(host.tick(Script(decisions), train_loss=1.0, evaluate=accuracy))
                if epoch == 2:
                    accelerator.save_state(str(tmp_path / "state"))
                    torch.manual_seed(rank)
            ends.append([parameter.clone() for parameter in host.parameters()])
            accelerator.free_memory()
        assert all(map(torch.equal, *ends))
        keep(tmp_path, rank, host, ticks, losses)

    run_two(program)
    require_alike(tmp_path, "slots.0.seed")
