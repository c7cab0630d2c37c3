"""A folder with a file of Python and its weights beside it, written whole or not at all."""

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from safetensors.torch import save_file
from torch import Tensor

from esper.kasmina.export_files import origin_of, require_folder
from esper.leyline.errors import ExportError

WEIGHTS_FILE = "weights.safetensors"
_TEMPLATES = Path(__file__).with_name("templates")
# Imports that a file has only if it uses them, by what that looks like.
_IMPORTS = {
    r"\bmath\.": "import math",
    r"\boperator\.": "import operator",
    r"\bOrderedDict\(": "from collections import OrderedDict",
    r"\bnamedtuple\(": "from collections import namedtuple",
    r"(?<!\.)\binf\b": "from math import inf",
    r"(?<!\.)\bnan\b": "from math import nan",
}


def filled(template: str, fillings: Mapping[str, str]) -> str:
    """The template of this name, with the weights' reader, the imports and what is given."""
    written = "\n".join(fillings.values())
    imports = [line for used, line in _IMPORTS.items() if re.search(used, written)]
    text = _read(template)
    for mark, filling in {"READER": _read("reader").rstrip(), **fillings}.items():
        text = text.replace(f"@{mark}@", filling)
    return text.replace("@IMPORTS@\n", "".join(f"{line}\n" for line in imports))


def _read(template: str) -> str:
    return (_TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")


@contextmanager
def writing(
    target: Path, code_name: str, source: str, tensors: Mapping[str, Tensor]
) -> Iterator[Path]:
    """Inside, the file lies elsewhere, to be tried; after that it is in the folder `target`."""
    _require_room(target, code_name, source.partition("\n")[0])
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        code = Path(scratch) / code_name
        code.write_text(source, encoding="utf-8")
        whole = {
            name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()
        }
        try:
            save_file(whole, code.with_name(WEIGHTS_FILE))
        except Exception as error:  # its errors have no common base
            raise ExportError("The weights cannot be written", given=origin_of(error)) from error
        yield code
        target.mkdir(exist_ok=True)
        for name in (WEIGHTS_FILE, code_name):
            os.replace(Path(scratch) / name, target / name)


def _require_room(target: Path, code_name: str, first_line: str) -> None:
    """Raise if anything but an earlier export would be written over."""
    require_folder(target)
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} is a file", fix="name a folder")
    found = {each.name for each in target.iterdir()} if target.is_dir() else set()
    foreign = sorted(found - {code_name, WEIGHTS_FILE, "__pycache__"})
    if code_name in found:
        with (target / code_name).open(encoding="utf-8", errors="replace") as file:
            foreign += [] if file.readline().rstrip("\n") == first_line else [code_name]
    if foreign:
        raise ExportError(
            f"{target} holds other files",
            given=", ".join(foreign[:3]),
            fix="name a new folder, or an empty one",
        )


def load_source(code: Path) -> ModuleType:
    """Run a written file."""
    spec = importlib.util.spec_from_file_location(f"_written_{code.stem}", code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
