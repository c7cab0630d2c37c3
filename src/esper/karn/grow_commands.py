"""Growing a network of your own: a new run or an old one, how it ended, and its export."""

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper import api
from esper.api import GrowthFolder
from esper.api.batches import Batches
from esper.api.devices import device_name, find_device
from esper.api.grow_settings import AUTO
from esper.garden.own_code import allow_code, remember, spoken
from esper.karn.commands import RUNS, AuditModel, Export, Grow, Inspect, Resume, Show
from esper.karn.named_sources import NamedData, absolute, build_model, code_of, load_data
from esper.karn.watch_commands import start_watching
from esper.kasmina import export_onnx, export_program, export_python
from esper.kasmina.export_files import Written
from esper.leyline.errors import EsperError, in_words, printable, require_known
from esper.nissa import RunReader, StoreError, require_sinks
from esper.show.report import require_matplotlib
from esper.show.terminal import require_writable
from esper.simic.training import RunError
from esper.simic.training.run_processes import is_launched

REPORT = "report.txt"
FAILURE = "failure.txt"
SAMPLE_ROWS = 8
UNLIMITED = "none"  # the word for a budget without limit
SAME = "optimizer lr weight_decay batch_size precision seed quiet"  # in api.grow and api.audit
FORMATS: Mapping[str, tuple[Callable[..., Written], str, str]] = {  # writer, file, how to use it
    "pt2": (export_program, "model.pt2", "torch.export.load({path!r}).module()"),
    "onnx": (export_onnx, "model.onnx", "onnxruntime.InferenceSession({path!r})"),
    "python": (export_python, "python", "from model import Model; Model()(x)"),
}


def start_growing(command: Grow) -> None:
    """Make a run directory and grow."""
    epochs = command.budget.epochs
    budget = api.Budget(_limit(command.budget.params), epochs)
    require_sinks(command.sinks)
    model = build_model(command.model, command.seed)
    data = load_data(command.data, seed=command.seed, flat=command.flat, samples=command.samples)
    device = find_device(command.device)
    path = command.out or GrowthFolder.next_in(RUNS, command.model.rpartition(":")[2].lower())
    GrowthFolder(path).require_fresh(
        fix=f"name another directory, or go on with: esper resume {path}"
    )
    origin = {name: getattr(command, name) for name in ("flat", "samples", "seed", "device")}
    origin["sinks"] = list(command.sinks)
    origin |= {name: absolute(getattr(command, name)) for name in ("model", "data")}
    remember(code_of((origin["model"], origin["data"])))
    weights = sum(parameter.numel() for parameter in model.parameters())
    idle = " (--device auto takes the GPU)" if find_device(AUTO).type != device.type else ""
    said = (
        f"{type(model).__name__} with {weights:,} parameters, {epochs} epochs, "
        f"budget {budget.params or UNLIMITED}, controller {command.controller}, on "
        f"{device_name(device)}{idle}. Ctrl-C stops; nothing but the present epoch is lost."
    )
    slots: Any = AUTO if command.slots == (AUTO,) else list(command.slots)
    _watched(
        command,
        path,
        said,
        lambda: api.grow(
            model,
            **data,
            loss=_loss(command.loss, data),
            budget=budget,
            slots=slots,
            device=device,
            out=path,
            origin=origin,
            controller=command.controller,
            sinks=command.sinks,
            **{name: getattr(command, name) for name in SAME.split()},
        ),
    )


def resume_growing(command: Resume) -> None:
    """Go on from the last checkpoint; model and data are built anew from where they came."""
    path = command.path
    origin = GrowthOrigin(path, command.model, command.data)
    epochs = len(origin.report.epochs)
    if origin.report.after:
        print(f"{path} is finished: {epochs} epochs. Write its network: esper export {path}")
        return
    origin.allow_code(quiet=command.quiet)
    found = origin.load_data()
    device = find_device(origin.notes["device"])
    _watched(
        command,
        path,
        f"going on after epoch {epochs}",
        lambda: api.resume(
            path,
            origin.build_model(),
            **found,
            device=device,
            sample=origin.sample_of(found, device),
            sinks=origin.notes.get("sinks", ()),
            quiet=command.quiet,
        ),
    )


class GrowthOrigin:
    """Where the model and the data of a run come from: as its folder says, or where they are now
    if they were moved."""

    def __init__(self, path: Path, model: str | None = None, data: str | None = None) -> None:
        self.path, self.report = path, api.read_report(path)
        self.notes = self.report.origin
        if "model" not in self.notes:
            raise RunError(
                f"{path} was not made by esper grow",
                given="a run of esper.grow(...) in a program",
                fix=f"there, use esper.resume({str(path)!r}, model, train, val)",
            )
        self.model, self.data = model or self.notes["model"], data or self.notes["data"]
        self.moved, self.given = model is not None, (model, data)
        # A folder has no sample where inputs are not tensors alone.
        self.keeps_sample = GrowthFolder(path).holds_sample

    def allow_code(self, *, data: bool = True, quiet: bool = False) -> None:
        """Ask before code is run that the folder names and the command line does not."""
        named = [self.model, self.data] if data else [self.model]
        files = code_of(each for each in named if each not in self.given)
        allow_code(files, self.path, quiet=quiet)

    def build_model(self) -> nn.Module:
        """The model of the run, built anew."""
        try:
            return build_model(self.model, self.notes["seed"])
        except EsperError as error:
            if self.moved:
                raise
            raise RunError(
                f"The model of {self.path} cannot be built any more",
                given=str(error).rstrip("."),
                fix="if its file was moved, say where it is with --model FILE.py:NAME",
            ) from error

    def load_data(self) -> NamedData:
        same = {name: self.notes[name] for name in ("seed", "flat", "samples")}
        return load_data(self.data, **same)

    def sample_of(self, data: NamedData, device: torch.device) -> Any:
        """The sample that the run could not keep, from its data as when it began."""
        if self.keeps_sample:
            return None
        settings = self.report.settings
        batches = Batches.of("train", data["train"], settings["batch_size"], shuffle=True)
        return batches.first(settings["seed"], device)[0]


def show_growth(command: Show) -> None:
    """What a run came to; neither its model nor its data are needed."""
    print(printable(str(api.read_report(command.path))))
    try:
        with RunReader(command.path) as reader:
            for row in reader.each("anomalies"):
                said = f"epoch {row['round']}: ANOMALY {row['message']} {row['advice']}"
                print(printable(said))
            for row in reader.each("notes"):
                print(printable(row["text"]))
    except StoreError as error:
        print(f"The telemetry cannot be read: {error}")


def show_places(command: Inspect) -> None:
    """Where a model could grow."""
    model = build_model(command.model, 0)
    data = load_data(command.data, flat=command.flat)
    sample, _ = _first_batch(data)
    print(api.inspect(model, sample, budget=_limit(command.budget.params)))


def audit_model(command: AuditModel) -> None:
    """Say what a model lacks, and write what was asked for."""
    require_writable(command.json)
    if command.out is not None:
        require_matplotlib()
    model = build_model(command.model, command.seed)
    data = load_data(command.data, seed=command.seed, flat=command.flat, samples=command.samples)
    same = {name: getattr(command, name) for name in (*SAME.split(), "epochs", "seconds")}
    same |= {"loss": _loss(command.loss, data), "budget": _limit(command.budget.params)}
    parts = data["train"], data["val"]
    with in_words("Training fails", error=RunError, say=lambda error: spoken(error, "")):
        found = api.audit(model, *parts, device=find_device(command.device), **same)
    print(found)
    if command.out is not None:
        print(f"The page: {found.save(command.out / 'audit.html')}")
        found.plot().savefig(command.out / "audit.png")
    for file in (command.json, command.out and command.out / "audit.json"):
        if file is not None:
            file.write_text(found.to_json(), encoding="utf-8")


def _limit(params: str) -> str | None:
    return None if params == UNLIMITED else params


def _first_batch(data: NamedData) -> tuple[Any, Any]:
    batches = Batches.of("train", data["train"], SAMPLE_ROWS, shuffle=False)
    return batches.first(0, torch.device("cpu"))


def _loss(name: str, data: NamedData) -> str:
    if name != "auto":
        return name
    _, targets = _first_batch(data)
    real = isinstance(targets, torch.Tensor) and targets.is_floating_point()
    return "mse" if real else "cross_entropy"


def _watched(
    command: Grow | Resume, path: Path, said: str, work: Callable[[], api.GrownRun]
) -> None:
    """Do the work and report on it; an interruption says how to go on."""
    if not command.quiet:
        print(f"{path}: {said}", flush=True)
    if command.watch:
        start_watching(path)
    if is_launched():
        script = "run a script of yours under torchrun that calls esper.grow"
        raise EsperError("The command line grows networks in one process", fix=script)
    try:
        run = work()
    except KeyboardInterrupt:
        stopped = f"Stopped before anything was written to {path}."
        if GrowthFolder(path).holds_run:
            stopped = f"\nStopped. Go on with: esper resume {path}"
        print(stopped, file=sys.stderr)
        raise SystemExit(130) from None
    except EsperError:
        raise
    except OSError as error:  # of a full disk, where nothing more can be written
        again = f"esper resume {path}" if GrowthFolder(path).holds_run else "the same command"
        fix = f"make room, or make it writable; then go on with: {again}"
        raise RunError(f"{path} cannot be kept", given=error, fix=fix) from error
    except Exception as error:  # code of yours, in the middle of training
        fix = None
        if GrowthFolder(path).holds_run:
            failure = path / FAILURE
            failure.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
            fix = f"{failure} says where; once it is mended, go on with: esper resume {path}"
        raise RunError("Training fails", given=spoken(error, ""), fix=fix) from error
    text = str(run.report())
    (path / REPORT).write_text(text + "\n", encoding="utf-8")
    if not command.quiet:
        print(f"\n{text}\n")
    print(f"{path} is finished. Write its network: esper export {path}")
    try:
        said = f"The report: {run.write_report()}"
    except (EsperError, OSError) as error:  # the network is there all the same
        said = f"No report was written. {error}"
    if not command.quiet:
        print(said)


# --- the finished network, written so that it runs without Esper --------------------------------


def export_run(command: Export) -> None:
    """Write it, and print how far its outputs are from the network's."""
    path = command.path
    require_known("format", command.format, FORMATS)
    GrowthFolder(path).require_run(
        "is not a run of esper grow", fix="name the directory that esper grow wrote"
    )
    origin = GrowthOrigin(path, command.model)
    if not origin.report.after:
        raise RunError(
            f"{path} is not finished",
            given=f"epoch {len(origin.report.epochs)} of {origin.report.planned}",
            fix=f"go on with: esper resume {path}",
        )
    sample = None
    origin.allow_code(data=not origin.keeps_sample)
    if not origin.keeps_sample:
        sample = origin.sample_of(origin.load_data(), torch.device("cpu"))
    run = api.load_run(path, origin.build_model(), sample=sample)
    write, place, use = FORMATS[command.format]
    target = command.out or path / place
    written = write(run.host, run.sample, target, dynamic_batch=not command.fixed_batch)
    files = ""
    if written.path.is_dir():
        files = f" ({', '.join(sorted(file.name for file in written.path.iterdir()))})"
    print(
        f"{written.path}{files}: largest difference from the grown network on a sample "
        f"{written.difference:.3g}"
    )
    print("Use it: " + use.format(path=str(written.path)))
