"""Two launchers with one process each, as two machines would have them, and one of them killed.

    python -m tests.faults.agents [--json FILE]

Trains, evaluates and runs a part of a study over both, by torchrun with c10d on loopback, and says
what it saw; a check that fails ends it. A few minutes on two cores.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from esper.nissa import RunReader
from esper.simic.training import RunFolder
from tests.programs import ENVIRONMENT, children_of, is_alive, wait_until
from tests.simic.training.tiny import assert_same, tiny_files, tiny_run

ROUNDS, KILLED = 10, 3
QUICK = (
    "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,"
    "read_timeout=10"
)
LIMIT = 240.0  # seconds that anything may take


def agent(port: int, nodes: str, *words: object, cwd: Path) -> subprocess.Popen[str]:
    """One launcher, which meets the others at this port."""
    given = [
        *("--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-id", "agents", "--rdzv-conf", QUICK),
        *("--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost"),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *given, "-m", *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def pair(nodes: str, *words: object, cwd: Path) -> list[subprocess.Popen[str]]:
    """Two launchers, the first of which holds the meeting place."""
    port = free_port()
    first = agent(port, nodes, *words, cwd=cwd)
    wait_until(lambda: socket.socket().connect_ex(("localhost", port)) == 0, LIMIT)
    return [first, agent(port, nodes, *words, cwd=cwd)]


def ended(program: subprocess.Popen[str]) -> str:
    out, _ = program.communicate(timeout=LIMIT)
    return out


def train_and_kill(folder: Path, which: int) -> tuple[RunFolder, list[str], float]:
    """Train with two launchers and kill one of them.

    Returns:
        The run, the output of both launchers, and the seconds until the other launcher ended.
    """
    folder.mkdir()
    run = tiny_run(folder / "run", processes=2, rounds=ROUNDS)
    both = pair("2", "esper", "resume", "run", "--quiet", cwd=folder)
    wait_until(lambda: max([0, *run.rounds()]) >= KILLED, LIMIT)
    workers = [child for each in both for child in children_of(each.pid)]
    assert len(workers) == 2, workers
    own = children_of(both[which].pid)
    os.kill(both[which].pid, signal.SIGKILL)
    began = time.monotonic()
    wait_until(lambda: not any(map(is_alive, own)), 10.0)
    other = both[1 - which]
    wait_until(lambda: other.poll() is not None, LIMIT)
    spent = time.monotonic() - began
    said = [ended(each) for each in both]
    assert other.returncode is not None
    return run, said, spent


def resume_alone(run: RunFolder, launcher: list[str]) -> None:
    """Change the number of processes to 1 and finish the run."""
    settings = (run.path / "config.toml").read_text(encoding="utf-8")
    assert "processes = 2" in settings
    settings = settings.replace("processes = 2", "processes = 1")
    (run.path / "config.toml").write_text(settings, encoding="utf-8")
    command = [*launcher, "esper", "resume", str(run.path), "--quiet"]
    subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=LIMIT)
    assert run.rounds()[-1] == ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as home:
        place = Path(home)
        alone = [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m"]
        for name, killed in (("node", 1), ("meeting", 0)):
            run, outputs, seconds = train_and_kill(place / name, killed)
            figures[f"{name}_lost.seconds_until_the_other_ended"] = seconds
            last_round = run.rounds()[-1]
            assert last_round < ROUNDS, "two processes are needed to continue"
            last_line = outputs[1 - killed].strip().splitlines()[-1][:100]
            print(f"Launcher {killed} of two killed ({name}): the other ended after "
                  f"{seconds:.0f} s, in round {last_round}; its last line: {last_line}",
                  flush=True)  # fmt: skip
            resume_alone(run, alone)
            with RunReader(run.path) as reader:
                notes = [str(note) for note in reader.each("notes")]
            assert any("The number of processes changed from 2 to 1" in note for note in notes), (
                notes
            )
            print("With processes = 1, esper resume finished the run.", flush=True)

        whole = tiny_run(place / "whole", processes=2, rounds=3)
        other = tiny_run(place / "both", processes=2, rounds=3)
        two = [*alone[:-1], "--nproc-per-node", "2", "-m", "esper", "resume", str(whole.path)]
        subprocess.run(two, env=ENVIRONMENT, check=True, capture_output=True, timeout=LIMIT)
        said = [ended(each) for each in pair("2", "esper", "resume", other.path, cwd=place)]
        assert_same(other, whole)
        print("Two launchers with a process each train what one with two does, to the bit.")

        tiny_files(place)
        words = ["esper", "evaluate", "--suite", "tiny.toml", "--seeds", "2", "--rows", "2"]
        words += ["--controllers", "random", "heuristic", "--quiet", "--out"]
        one = [sys.executable, "-m", *words, "one"]
        subprocess.run(one, cwd=place, env=ENVIRONMENT, check=True, capture_output=True)
        said = [ended(each) for each in pair("2", *words, "two", cwd=place)]
        assert (place / "one").read_bytes() == (place / "two").read_bytes(), said
        print("An evaluation over both is that of one process, to the byte.", flush=True)

        study = ["studies", "c1", "--seconds", "1", "--quiet", "--out"]
        subprocess.run([sys.executable, "-m", *study, "s1"], cwd=place, env=ENVIRONMENT, check=True)
        said = [ended(each) for each in pair("2", *study, "s2", cwd=place)]
        first, both = ((place / each / "tuning.jsonl").read_bytes() for each in ("s1", "s2"))
        assert both.startswith(first), said
        lines = len(both.splitlines()) - 1
        figures["study.trials"] = lines
        print(f"A part of a study over both, {lines} trials, begins with one process's, to the "
              "byte.")  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
