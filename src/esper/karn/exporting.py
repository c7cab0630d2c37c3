"""The network of a finished run, written so that it runs without Esper."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from esper.karn.commands.growing import FORMATS, Export
from esper.karn.growing import is_growth, load_growth, origin_of
from esper.kasmina import export_additions, export_onnx, export_program, export_python
from esper.kasmina.export_files import Written
from esper.leyline.errors import UnknownNameError
from esper.simic.training import RunError

PLACES = {"module": "module", "pt2": "model.pt2", "onnx": "model.onnx", "python": "python"}
USES = {
    "module": "from module import load; model = load({name}())",
    "pt2": "torch.export.load({path!r}).module()",
    "onnx": "onnxruntime.InferenceSession({path!r})",
    "python": "from model import Model; Model()(x)",
}


def export_run(command: Export) -> None:
    """Write it, and print how far its outputs are from the network's."""
    path = command.path
    if command.format not in FORMATS:
        raise UnknownNameError.of("format", command.format, FORMATS)
    if not is_growth(path):
        raise RunError(
            f"{path} is not a run of esper grow",
            given="no such directory" if not path.is_dir() else "no checkpoint in it",
            fix="name the directory that esper grow wrote",
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
