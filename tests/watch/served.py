"""A live page in a thread of this process, and runs for it to show."""

import http.client
import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import numpy as np

from esper.garden import Result, ResultFile
from esper.leyline.ops import LifecycleOp
from esper.leyline.stages import SeedStage
from esper.nissa import (
    Auditioned,
    Contributed,
    Decisions,
    EpochEnded,
    Hub,
    LifecycleChanged,
    Refused,
    RunEnded,
    RunLayout,
    RunStarted,
    RunStore,
    Sampled,
)
from esper.watch.live_server import listening, server_of
from tests.nissa.runs import LAYOUT, stepped
from tests.show.report_runs import ENVS, STEPS, Run

CONFIG = {"suite": "garden_mlp", "rounds": 3, "envs": ENVS, "horizon": STEPS}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Served:
    """What a browser or an attacker can ask."""

    def __init__(self, address: str) -> None:
        self.address = address
        where = urlsplit(address)
        assert where.hostname is not None
        assert where.port is not None
        self.host, self.port = where.hostname, where.port
        self.token = where.query.removeprefix("token=")

    def get(self, path: str, *, method: str = "GET", own: bool = True, **headers: str) -> Answer:
        """`own`: with the token."""
        known = {"Authorization": f"Bearer {self.token}"} if own else {}
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=20)
        try:
            connection.request(method, path, headers=known | told)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def ask(self, view: str, **given: object) -> Any:
        answer = self.get(f"/ask?{urlencode({'view': view, **given})}")
        assert answer.status == 200, answer.body
        return json.loads(answer.body)


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    listener = listening(0)
    server, address = server_of([folder], listener)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield Served(address)
    finally:
        server.should_exit = True
        thread.join()


def begun(path: Path, **more: Any) -> Run:
    """A training run that is being written, two baselines judged."""
    run = Run(path, planned=3)
    run.hub.emit(RunStarted(round=0, config=CONFIG | more))
    run.judge(0, "random", -0.3)
    run.judge(0, "heuristic", 0.35)
    return run


def grown(path: Path) -> Path:
    """A network that grew, with an audition, a decision that was refused, and its end."""
    names, part = ("norm", "conv"), {"path": "0", "kind": "Linear", "params": 100, "depth": 0}
    parts = [part | {"opened": False, "slots": ["0"]}]
    model = {"name": "Net", "params": 100, "room": 50, "parts": parts}
    ops = tuple(op.name for op in LifecycleOp)
    layout = RunLayout(
        ("op", "slot", "blueprint"), (ops, ("0",), names), ((True,) * 3,) * 5, (), ("0",), names
    )
    config = {"epochs": 4, "controller": "audition", "metric": "accuracy", "model": model}
    stages = (SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.TRAINING)
    path.mkdir()
    with Hub(RunStore(path, layout)) as hub:
        hub.emit(RunStarted(round=0, config=config))
        hub.emit(EpochEnded(round=0, val_loss=2.0, score=10.0))
        for epoch in range(1, 5):
            score, added = 10.0 + 20.0 * epoch, 40 * (epoch > 1)
            known = {"val_loss": 2.0 / epoch, "train_loss": 1.5 / epoch, "committed": score - 5.0}
            hub.emit(EpochEnded(round=epoch, score=score, added=added, **known))
            op = [int(LifecycleOp.GERMINATE if epoch == 2 else LifecycleOp.WAIT), 0, 1]
            nothing = {"values": [math.nan], "log_probs": [[math.nan] * 3]}
            hub.emit(
                Decisions(
                    round=epoch, step=0, actions=[op], masks=np.ones((1, 3, 5), bool), **nothing
                )
            )
        hub.emit(
            Auditioned(
                round=1,
                slot=["0"] * 2,
                blueprint=names,
                epochs=[1.0] * 2,
                gain=[-0.01, 0.25],
                error=[0.01, 0.02],
            )
        )
        hub.emit(
            LifecycleChanged(
                round=2,
                step=0,
                env=[0, 0],
                slot=[0, 0],
                before=stages[:2],
                after=stages[1:],
                cause=[1, 1],
                blueprint=[1, 1],
                reason=["it fits the budget", ""],
            )
        )
        hub.emit(Sampled(round=2, values={"alpha_0": 0.0}))
        hub.emit(Sampled(round=3, values={"alpha_0": 0.5}))
        hub.emit(Contributed(round=4, slot=["0"], blueprint=["conv"], contribution=[7.5]))
        refused = {"slot": [0], "op": [LifecycleOp.ADVANCE], "reason": ["0 epochs in TRAINING"]}
        hub.emit(Refused(round=3, step=0, env=[0], **refused))
        hub.emit(RunEnded(round=4, state="failed", text="ValueError of yours"))
    return path


def seen(path: Path) -> None:
    """One decision with all that stood behind it: ADVANCE of slot early in environment 2."""
    path.mkdir()
    chances = np.zeros((3, 4, 5))
    chances[:, 0, :3] = 0.125, 0.25, 0.625
    masks = np.ones((3, 4, 5), bool)
    masks[:, 0, 3:] = False
    refused = {"slot": [1, 2], "op": [LifecycleOp.FOSSILIZE] * 2, "env": [2, 2]}
    with Hub(RunStore(path, LAYOUT)) as hub:
        hub.emit(
            Decisions(
                round=1,
                step=0,
                actions=[[LifecycleOp.ADVANCE, 0, 0, 0]] * 3,
                values=[0.5] * 3,
                log_probs=[[-0.5] * 4] * 3,
                observations=[[0.04, 0.25, 0.5, 1.0]] * 3,
                masks=masks,
                probabilities=chances,
            )
        )
        why = ["0 epochs in TRAINING, at least 1 needed"] * 2
        hub.emit(Refused(round=1, step=0, reason=why, **refused))
        hub.emit(stepped(1, 0, envs=3))


def compared(file: Path) -> None:
    """An evaluation of two controllers on two contexts."""
    same = {"made": "", "scale": 10.0, "control": 50.0, "validation": 0.0, "area": 0.0}
    same |= {"exposure": 0.0, "added": 5, "seeds": 1, "flops": 1.0, "interventions": 2}
    stored = ResultFile(file, {})
    with stored.watched(["never", "tamiyo"], 8):
        for number in range(8):
            who, where = ("never", "tamiyo")[number % 2], ("xor", "gain")[number // 4]
            own = {"controller": who, "context": where, "key": where, "seed": number}
            gained = 50.0 + (number if number % 2 else 0)
            stored.add([Result(**own, test=gained, rolled_back=False, **same)])


def go_on(run: Run, number: int) -> None:
    run.play(number, failing=4 if number == 2 else -1)
    run.learn(number)
    run.judge(number, "tamiyo", 0.1 * number)
    run.hub.commit(number)


def whole(path: Path, rounds: int = 3, state: str = "finished") -> Path:
    with begun(path) as run:
        for number in range(1, rounds + 1):
            go_on(run, number)
        if state:
            run.hub.emit(RunEnded(round=rounds, state=state))
    return path
