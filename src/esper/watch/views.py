"""What a browser is shown of a run: answers to the questions of `questions.toml`, as JSON.

An answer is made once for all who ask, and not again before something that it depends on is
written; one that took long is kept for longer, so that looking costs a bounded share of a core.
"""

import json
import math
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError
from esper.nissa import RunReader, Thresholds
from esper.show.run_facts import control_of, read_controls
from esper.watch.found_runs import UNREADABLE, FoundRun

POINTS, FEW_POINTS = 300, 48  # of a curve, and of one in a list
DIGITS = 15  # of a number in an address
REST = 10.0  # times as long as it took to make, an answer is kept
KEPT_ANSWERS, KEPT_BYTES = 512, 64 << 20
LAID_OUT = ("environments", "episode", "decision", "growth")  # views that need a run's names
TOLD = ("suite", "rounds", "epochs", "controller", "controllers", "episodes", "envs", "horizon")

Numbers = Mapping[str, int]  # from the address

_FILE = Path(__file__).with_name("questions.toml")
QUESTIONS: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))


def numbers_of(name: str, given: Mapping[str, str]) -> dict[str, int]:
    """The numbers of an address, refused if they are not the ones that the view needs."""
    needs, may = (set(QUESTIONS[name].get(each, ())) for each in ("needs", "may"))
    found = {key: value for key, value in given.items() if key not in ("view", "run")}
    if not needs <= found.keys() <= needs | may or not all(map(str.isdecimal, found.values())):
        said, valid = ", ".join(sorted(found))[:200], ", ".join(sorted(needs | may)) or "none"
        raise EsperError("The address asks with other numbers", given=said, valid=valid)
    return {key: int(value[:DIGITS]) for key, value in found.items()}


def answered(name: str, run: FoundRun, numbers: Numbers) -> dict[str, Any]:
    """A view of a run."""
    view, config = QUESTIONS[name], run.config
    points = FEW_POINTS if name == "summary" else POINTS
    wide = max(1, math.ceil((run.round + 1) / points))  # rounds of a point
    about = {each: config[each] for each in TOLD if each in config}
    about |= {"model": config.get("model", {}).get("name"), "began": run.start.get("time")}
    shown = run.known() | {"kind": run.kind, "kinds": view["kinds"].split(), "wide": wide}
    shown["about"] = about | {"began_at": run.start.get("round", 0)}
    with RunReader(run.file) as reader:
        known = {"round": run.round, "first": 0, "wide": wide, **numbers}
        for asked, sql in (view["answers"] | view.get(f"answers_of_{run.kind}", {})).items():
            found = reader.query(sql, known)
            shown[asked] = {"columns": found.columns, "rows": plain(found.rows)}
        if name in LAID_OUT:
            shown["layout"] = vars(reader.layout)
        if name == "decision":
            decided = reader.decisions(known["round"], known["env"])
            chosen = next((each for each in decided if each.step == known["step"]), None)
            shown["decision"] = None if chosen is None else plain(asdict(chosen))
        if name == "episode":  # the curve of the same case, never grown
            for row in reader.query(view["answers"]["ended"], known):
                curve = control_of(row, read_controls(run.file.parent))
                shown["control"] = None if curve is None else plain(curve.tolist())
    if name in ("training", "growth", "evaluation"):
        shown |= {"config": config, "versions": run.start.get("versions", {})}
        shown["thresholds"] = asdict(Thresholds())
    return shown | {"round": known["round"]}


def plain(value: Any) -> Any:
    """As JSON can hold it, numbers with six digits; what is no number is nothing."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return f"{len(value)} bytes" if isinstance(value, bytes) else value


class Answers:
    """Views as JSON, kept for all who ask; the oldest ones are forgotten."""

    def __init__(self) -> None:
        # Of what each was made, until when it is not made anew, and the answer.
        self._kept: OrderedDict[object, tuple[object, float, bytes]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def ask(self, name: str, run: FoundRun, numbers: Numbers) -> tuple[bytes, bool]:
        """The view as JSON, and whether it is as it is now, or was a moment ago."""
        key = (name, run.name, *sorted(numbers.items()))
        version = [run.changed.get(kind, 0) for kind in QUESTIONS[name]["kinds"].split()]
        with self._lock:  # one at a time makes an answer; the others wait for it and take it
            now = time.monotonic()
            known, until, before = self._kept.get(key, (None, 0.0, b""))
            if known == version or now < until:
                return before, known == version
            try:
                text = json.dumps(answered(name, run, numbers), allow_nan=False).encode()
            except Exception as error:  # a damaged one hides no other
                told = run.known() | {"state": UNREADABLE, "why": str(error)}
                return json.dumps(told).encode(), True
            done = time.monotonic()
            self._kept[key] = (version, done + REST * (done - now), text)
            self._kept.move_to_end(key)
            self._bytes += len(text) - len(before)
            while len(self._kept) > KEPT_ANSWERS or self._bytes > KEPT_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1][2])
            return text, True
