"""Growing a network of your own: a new run or an old one, how it ended, and its export."""

import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper import api
from esper.api import GrowthFolder
from esper.api.batches import Batches
from esper.garden.own_code import spoken
from esper.karn.commands import FORMATS, RUNS, BudgetOptions, Export, Grow, Inspect, RoomOptions
from esper.karn.named_sources import NamedData, absolute, build_model, load_data
from esper.kasmina import export_additions, export_onnx, export_program, export_python
from esper.kasmina.export_files import Written
from esper.leyline.errors import EsperError, UnknownNameError
from esper.simic.training import RunError

REPORT = "report.txt"
FAILURE = "failure.txt"
SAMPLE_ROWS = 8
UNLIMITED = "none"  # the word for a budget without limit
PLACES = {"module": "module", "pt2": "model.pt2", "onnx": "model.onnx", "python": "python"}
USES = {
    "module": "from module import load; model = load({name}())",
    "pt2": "torch.export.load({path!r}).module()",
    "onnx": "onnxruntime.InferenceSession({path!r})",
    "python": "from model import Model; Model()(x)",
}


def is_growth(path: Path) -> bool:
    """Is this the directory of a run of `esper grow`?"""
    return GrowthFolder(path).holds_run


def start_growing(command: Grow) -> None:
    """Make a run directory and grow."""
    budget = budget_of(command.budget)
    model = build_model(command.model, command.seed)
    data = load_data(command.data, seed=command.seed, flat=command.flat, samples=command.samples)
    device = _device(command.device)
    path = command.out or GrowthFolder.next_in(RUNS, command.model.rpartition(":")[2].lower())
    GrowthFolder(path).require_fresh(
        fix=f"name another directory, or go on with: esper resume {path}"
    )
    origin = {
        "model": absolute(command.model),
        "data": absolute(command.data),
        "flat": command.flat,
        "samples": command.samples,
        "seed": command.seed,
        "device": command.device,
    }
    epochs = command.budget.epochs
    if not command.quiet:
        weights = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{path}: {type(model).__name__} with {weights:,} parameters, {epochs} epochs, "
            f"budget {budget.params or UNLIMITED}, controller {command.controller}. "
            "Ctrl-C stops; nothing but the present epoch is lost.",
            flush=True,
        )
    slots: Any = "auto" if command.slots == ("auto",) else list(command.slots)
    _watched(
        path,
        lambda tell: api.grow(
            model,
            data.train,
            data.val,
            test=data.test,
            loss=_loss(command.loss, data),
            budget=budget,
            slots=slots,
            controller=command.controller,
            optimizer=command.optimizer,
            lr=command.lr,
            batch_size=command.batch_size,
            device=device,
            seed=command.seed,
            out=path,
            origin=origin,
            on_epoch=tell,
        ),
        epochs,
        quiet=command.quiet,
    )


def resume_growing(path: Path, *, model: str | None, data: str | None, quiet: bool) -> None:
    """Go on from the last checkpoint; model and data are built anew from where they came."""
    origin = origin_of(path)
    run = load_growth(path, model=model, data=data, quiet=quiet)
    if run.finished:
        epochs = len(run.history)
        print(f"{path} is finished: {epochs} epochs. Write its network: esper export {path}")
        return
    if not quiet and not needs_sample(path):  # else this was said already
        _say_code(data or origin["data"])
    found = _data_of(origin, data)
    device = _device(origin["device"])
    if not quiet:
        print(f"{path}: going on after epoch {len(run.history)}", flush=True)
    _watched(
        path,
        lambda tell: api.resume(
            path,
            model_of(path, origin, model),
            found.train,
            found.val,
            test=found.test,
            device=device,
            sample=_sample_of(path, found, device),
            on_epoch=tell,
        ),
        run.settings.epochs,
        quiet=quiet,
    )


def origin_of(path: Path) -> dict[str, Any]:
    """Where the model and the data of a run come from."""
    origin = api.read_origin(path)
    if "model" not in origin:
        raise RunError(
            f"{path} was not made by esper grow",
            given="a run of esper.grow(...) in a program",
            fix=f"there, use esper.resume({str(path)!r}, model, train, val)",
        )
    return origin


def model_of(path: Path, origin: dict[str, Any], elsewhere: str | None) -> nn.Module:
    """The model of a run, built anew."""
    try:
        return build_model(elsewhere or origin["model"], origin["seed"])
    except EsperError as error:
        if elsewhere is not None:
            raise
        raise RunError(
            f"The model of {path} cannot be built any more",
            given=str(error).rstrip("."),
            fix="if its file was moved, say where it is with --model FILE.py:NAME",
        ) from error


def load_growth(
    path: Path, *, model: str | None = None, data: str | None = None, quiet: bool = False
) -> api.GrownRun:
    """A run as it is, around a model that is built anew; says which code of yours that runs."""
    origin = origin_of(path)
    again = needs_sample(path)
    if not quiet:
        _say_code(model or origin["model"], *([data or origin["data"]] if again else []))
    rebuilt = model_of(path, origin, model)
    sample = _sample_of(path, _data_of(origin, data), torch.device("cpu")) if again else None
    return api.load_run(path, rebuilt, sample=sample)


def _say_code(*named: str) -> None:
    """Which files are run because a run's folder names them, which may have come from elsewhere."""
    files = dict.fromkeys(text.rpartition(":")[0] for text in named if ":" in text)
    if files:
        print(f"Running the code in {', '.join(files)}", flush=True)


def needs_sample(path: Path) -> bool:
    """Has the run's folder no sample, because inputs are not tensors alone?"""
    return not GrowthFolder(path).holds_sample


def _sample_of(path: Path, data: NamedData, device: torch.device) -> Any:
    """The sample that a run could not keep, from its data as when it began; None if it is kept."""
    if not needs_sample(path):
        return None
    settings = api.GrowSettings.of(GrowthFolder(path).checkpoint().notes["settings"])
    batches = Batches.of("train", data.train, settings.batch_size, shuffle=True)
    return batches.first(settings.seed, device)[0]


def _data_of(origin: dict[str, Any], elsewhere: str | None) -> NamedData:
    return load_data(
        elsewhere or origin["data"],
        seed=origin["seed"],
        flat=origin["flat"],
        samples=origin["samples"],
    )


def show_growth(path: Path) -> None:
    """What a run came to."""
    print(load_growth(path).report())


def line_of(path: Path) -> tuple[str, str, str]:
    """What a list of runs says of one: model, epochs, score; one that is damaged is listed too."""
    try:
        notes = GrowthFolder(path).checkpoint().notes
    except EsperError:
        return ("unreadable", "", "")
    settings, history = notes["settings"], notes["history"]
    model = (settings["origin"] or {}).get("model", "")
    scores = [notes["after"], *history[-1:]]
    score = next((f"{each['score']:.2f}" for each in scores if each), "")
    return Path(model).name, f"{len(history)} of {settings['epochs']}", score


def show_places(command: Inspect) -> None:
    """Where a model could grow."""
    model = build_model(command.model, 0)
    data = load_data(command.data, flat=command.flat)
    sample, _ = _first_batch(data)
    print(api.inspect(model, sample, budget=budget_of(command.budget)))


def budget_of(options: RoomOptions) -> api.Budget:
    params = None if options.params == UNLIMITED else options.params
    return api.Budget(params, options.epochs if isinstance(options, BudgetOptions) else None)


def _first_batch(data: NamedData) -> tuple[Any, Any]:
    batches = Batches.of("train", data.train, SAMPLE_ROWS, shuffle=False)
    return batches.first(0, torch.device("cpu"))


def _loss(name: str, data: NamedData) -> str:
    if name != "auto":
        return name
    _, targets = _first_batch(data)
    if not isinstance(targets, torch.Tensor):
        raise RunError(
            "It is not certain which loss fits these targets",
            given=type(targets).__name__,
            fix="say it with --loss; for a loss of your own, call esper.grow in a program",
        )
    return "mse" if targets.is_floating_point() else "cross_entropy"


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RunError(
            "There is no such device",
            given=name,
            valid="cpu" + (", cuda" if torch.cuda.is_available() else ""),
        ) from error
    return device


def _watched(
    path: Path,
    work: Callable[[Callable[[dict[str, Any]], None]], api.GrownRun],
    epochs: int,
    *,
    quiet: bool,
) -> None:
    """Do the work, saying how it goes; an interruption says how to go on."""

    def tell(record: dict[str, Any]) -> None:
        if not quiet:
            print(_line(record, epochs), flush=True)

    try:
        run = work(tell)
    except KeyboardInterrupt:
        if not is_growth(path):
            print(f"Stopped before anything was written to {path}.", file=sys.stderr)
        else:
            print(f"\nStopped. Go on with: esper resume {path}", file=sys.stderr)
        raise SystemExit(130) from None
    except EsperError:
        raise
    except Exception as error:  # code of yours, in the middle of training
        raise _failed(path, error) from error
    text = str(run.report())
    (path / REPORT).write_text(text + "\n", encoding="utf-8")
    if not quiet:
        print(f"\n{text}\n")
    print(f"{path} is finished. Write its network: esper export {path}")


def _failed(path: Path, error: Exception) -> RunError:
    """What to say of an error in the model's or the data's own code."""
    fix = None
    if is_growth(path):
        (path / FAILURE).write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        fix = f"{path / FAILURE} says where; once it is mended, go on with: esper resume {path}"
    return RunError("Training fails", given=spoken(error, ""), fix=fix)


def _line(record: dict[str, Any], epochs: int) -> str:
    facts = [
        f"epoch {record['epoch']}/{epochs}",
        f"loss {record['train_loss']:.4f}, validation {record['val_loss']:.4f}",
        f"score {record['score']:.2f}",
        f"{record['added']:,} parameters in seeds",
    ]
    decision = api.GrowthDecision.of(record["decision"])
    if decision.changes_something:
        facts.append(str(decision))
    else:  # stages that passed with time, the last of each slot
        reached = {event["slot"]: event["after"] for event in record["events"]}
        facts += [f"{slot}: {stage}" for slot, stage in reached.items()]
    return " · ".join(facts)


# --- the finished network, written so that it runs without Esper --------------------------------


def export_run(command: Export) -> None:
    """Write it, and print how far its outputs are from the network's."""
    path = command.path
    if command.format not in FORMATS:
        raise UnknownNameError.of("format", command.format, FORMATS)
    GrowthFolder(path).require_run(
        "is not a run of esper grow", fix="name the directory that esper grow wrote"
    )
    origin = origin_of(path)
    run = load_growth(path, model=command.model)
    if not run.finished:
        raise RunError(
            f"{path} is not finished",
            given=f"epoch {len(run.history)} of {run.settings.epochs}",
            fix=f"go on with: esper resume {path}",
        )
    out = command.out or path / PLACES[command.format]
    batch = not command.fixed_batch
    writers: dict[str, Callable[[], Written]] = {
        "module": partial(export_additions, run.host, run.sample, out),
        "pt2": partial(export_program, run.host, run.sample, out, dynamic_batch=batch),
        "onnx": partial(export_onnx, run.host, run.sample, out, dynamic_batch=batch),
        "python": partial(export_python, run.host, run.sample, out, dynamic_batch=batch),
    }
    written = writers[command.format]()
    print(
        f"{_listed(written.path)}: largest difference from the grown network on a sample "
        f"{written.difference:.3g}"
    )
    name = (command.model or origin["model"]).rpartition(":")[2]
    print("Use it: " + USES[command.format].format(path=str(written.path), name=name))


def _listed(path: Path) -> str:
    if path.is_file():
        return str(path)
    return f"{path} ({', '.join(sorted(file.name for file in path.iterdir()))})"
