"""A process that learns with the first one of a run: `python -m … RUN PLACE RANK PARENT`."""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

FOLLOWING_SECONDS = 0.2  # how often a child looks whether its parent lives


def main() -> None:
    path, place, rank, parent = sys.argv[1:]
    follow(int(parent))  # before all that takes long
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process decides when to stop
        signal.signal(number, signal.SIG_IGN)
    try:
        _learn(path, Path(place), int(rank))
    except Exception as error:
        _leave_word(error, Path(place), int(rank))
        os._exit(1)  # connections may be broken: nothing is waited for


def _learn(path: str, place: Path, rank: int) -> None:
    import torch

    from esper.simic.training.launch import joined
    from esper.simic.training.loop import Trainer
    from esper.simic.training.runs import RunFolder

    torch.set_num_threads(1)
    run = RunFolder.open(path)
    with joined(place, rank, run.config.processes) as processes:
        trainer = Trainer(run, processes=processes)
        try:
            if trainer.begin():
                trainer.train()
        finally:
            trainer.close()


def reason_file(place: Path, rank: int) -> Path:
    """Where a process that failed leaves word of why, for the first one to tell."""
    return place / f"reason-{rank}"


def _leave_word(error: Exception, place: Path, rank: int) -> None:
    from esper.leyline.errors import EsperError

    text = str(error)
    if not isinstance(error, EsperError):
        text = "".join(traceback.format_exception(error))
    if place.is_dir():
        reason_file(place, rank).write_text(text.strip(), encoding="utf-8")


def follow(parent: int) -> None:
    """End this process soon after its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(FOLLOWING_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="follow", daemon=True).start()


if __name__ == "__main__":
    main()
