"""Controllers on the same cases of worlds that they did not learn from.

Worlds are those of a greenhouse's streams, of the groups that are held out, or the garden's own
contexts. Every world has a file of results, which is gone on with if it was cut off, and to which
other controllers are added later.
"""

import argparse
import json
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from esper.archive.files import append_lines
from esper.garden.contexts import Context
from esper.garden.episodes import Episodes
from esper.garden.evaluation import HARM, Result, evaluate, parse
from esper.garden.greenhouse import GROUPS, LISTED, TRAINING, VALIDATION, Greenhouse
from esper.garden.playing import Playground, StoppedError
from esper.garden.suites import find_suite
from esper.leyline.constants import DEFAULT_RENT
from esper.leyline.errors import DataError, require_known
from esper.leyline.streams import derive_seed
from esper.tamiyo.controllers import Controller, make_controller
from esper.tamiyo.controllers.learned import LearnedController
from esper.tolaria.chip.launch import FEW_HOSTS
from esper.tolaria.population_config import PopulationConfig
from studies.ablations import controller_in
from studies.any_host import AnyHost
from studies.garden_plots import GARDEN
from studies.greenhouse_gains import deadline

TOOK = "took.jsonl"  # seconds of each world, of one process
JUDGED = (TRAINING, VALIDATION, GARDEN, *GROUPS)
_NAMED = re.compile(r"([\w-]+)=(.+)")


class Net(NamedTuple):
    """What came of one episode."""

    controller: str
    made: str  # its fingerprint
    group: str
    world: int
    case: int
    points: float  # over the paired control, less the world's rent


class World(NamedTuple):
    """What a file of results is of."""

    group: str
    number: int
    contexts: Sequence[Context]
    rent: float
    how: dict[str, Any]  # episodes are played

    @property
    def file(self) -> str:
        return f"{self.group}-{self.number:03d}.jsonl"


def world_of(group: str, number: int, seed: int, longest: int) -> World:
    if group == GARDEN:
        return World(group, number, find_suite(GARDEN).training[number : number + 1],
                     DEFAULT_RENT, {})  # fmt: skip
    plot = Greenhouse(derive_seed(seed, "judge"), group, longest=longest).plot(number)
    how = {"horizon": plot.horizon, "config": plot.population(), "rent": plot.rent}
    return World(group, number, plot.contexts, plot.rent, how)


def numbers_of(group: str, first: int, count: int | None) -> range:
    """Of a group's worlds: as many as are registered, if nothing else is said."""
    most = len(find_suite(GARDEN).training) if group == GARDEN else LISTED
    return range(first, first + (most if count is None else count))


def name_of(word: str) -> str:
    """That results of this controller have."""
    named = _NAMED.fullmatch(word)
    return named[1] if named else word


def controller_of(word: str) -> Controller:
    """By its spec; or a kept one by its folder, `name=FOLDER` under a name of its own."""
    named = _NAMED.fullmatch(word)
    folder = Path(named[2] if named else word)
    if folder.is_dir():
        return controller_in(folder, name_of(word))
    if named:
        raise DataError("No controller is kept there", given=folder, fix="train it first")
    return AnyHost(word) if "@" in word else make_controller(word)


def read_judged(folder: Path, group: str) -> list[Net]:
    """All that was played of a group; a line that was cut off is none."""
    found = []
    for file in sorted(folder.glob(f"{group}-*.jsonl")):
        header, *lines = file.read_text(encoding="utf-8").rpartition("\n")[0].split("\n")
        rent = json.loads(header).get("rent", DEFAULT_RENT)
        number = int(file.stem.rpartition("-")[2])
        for place, line in enumerate(lines):
            each = parse(line, file, place + 2)
            points = each.net_gain(rent)
            found.append(Net(each.controller, each.made, group, number, each.seed, points))
    return found


def require_open(groups: Sequence[str], final: bool) -> None:
    """Refuse what is held out, unless all is chosen."""
    for group in groups:
        require_known("group of worlds", group, JUDGED)
        if group in GROUPS and not final:
            raise SystemExit(
                f"Group {group!r} is held out: nothing may be chosen after it was looked at. "
                "--final says that all is chosen."
            )


def judge(options: argparse.Namespace) -> None:
    """Controllers on the same cases; a share of all worlds is played."""
    require_open(options.group, options.final)
    options.out.mkdir(parents=True, exist_ok=True)
    until, results = deadline(options), list[tuple[float, Result]]()
    places = [
        (group, number)
        for group in options.group
        for number in numbers_of(group, options.first, options.worlds)
    ]
    for group, number in places[options.place :: options.of]:
        world, began = world_of(group, number, options.seed, options.longest), time.monotonic()
        try:
            found = [] if began > until else _judged(options, world, until)
        except StoppedError:
            found = []
        if not found:
            print(f"stopped before world {number} of {group} was over; the same command goes on")
            break
        results += [(world.rent, result) for result in found]
        host, took = world.contexts[0].host, time.monotonic() - began
        told = {"group": group, "world": number, "seconds": round(took, 1)}
        append_lines(options.out / TOOK, [json.dumps(told)])
        print(f"{group}, world {number}: {host}, {took:.0f} s", flush=True)
    for name in dict.fromkeys(result.controller for _, result in results):
        own = [result.net_gain(rent) for rent, result in results if result.controller == name]
        harmed = fmean(gain < -HARM for gain in own)
        print(f"{name}: {fmean(own):+.2f} points, harmful {harmed:.3f}, {len(own)} episodes")


def computed_alike(world: World, rows: int, device: str) -> dict[str, Any]:
    """How its episodes are played: all by one backend, however many are played together, so that
    who never grows ends as the control does."""
    how: dict[str, Any] = {"device": device, "config": PopulationConfig()} | world.how
    if rows >= FEW_HOSTS:
        chosen = Episodes(world.contexts, FEW_HOSTS, **how).population.backend
        how["config"] = replace(how["config"], backend=chosen)
    return how


def _judged(options: argparse.Namespace, world: World, until: float) -> list[Result]:
    controllers = [controller_of(word) for word in options.controllers]
    for each in controllers:
        if isinstance(each, LearnedController):
            each.network.to(options.device)
    return evaluate(
        controllers,
        world.contexts,
        Playground(options.rows, **computed_alike(world, options.rows, options.device)),
        seeds=options.cases,
        file=options.out / world.file,
        stop=lambda: time.monotonic() > until,
    )
