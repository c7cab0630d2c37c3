"""A live page in a thread of this process, and runs for it to show."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from esper.nissa import RunEnded, RunStarted
from esper.watch.live_server import listening, server_of
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
