"""Files of the exported network: both formats give its outputs, and failures leave no file."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter import _onnx_program
from torch.utils._pytree import tree_leaves

from esper.kasmina import (
    SlottedModel,
    export_files,
    export_module,
    export_onnx,
    export_program,
    export_python,
)
from esper.kasmina.watching import call
from esper.leyline import ExportError
from tests.kasmina.grown_hosts import FAMILIES, HOSTS, RULES, plant

Export = Callable[..., Path]
EXPORTS = pytest.mark.parametrize("export", [export_program, export_onnx])


def runner(path: Path) -> Callable[[Any], list[Tensor]]:
    """Runs a file the way its user would."""
    if path.suffix == ".pt2":
        program = torch.export.load(path).module()
        return lambda sample: [t for t in tree_leaves(call(program, sample)) if torch.is_tensor(t)]
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(path))

    def infer(sample: Any) -> list[Tensor]:
        inputs = [leaf.numpy() for leaf in tree_leaves(sample) if torch.is_tensor(leaf)]
        names = [each.name for each in session.get_inputs()]
        return [
            torch.from_numpy(output)
            for output in session.run(None, dict(zip(names, inputs, strict=True)))
        ]

    return infer


def named(export: Export) -> str:
    """A file's name as the export wants it."""
    return {export_program: "net.pt2", export_onnx: "net.onnx"}.get(export, "net")


def rows(sample: Any, count: int) -> Any:
    """The sample, cut or repeated to another batch size."""
    cycle = torch.arange(count) % 4
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor[cycle], sample)


TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
PAIRS = [
    ("transformer", export_program),
    ("conv2d", export_program),
    ("tied weights", export_program),
    ("dict part", export_program),
    ("containers", export_program),
    ("dense block", export_program),
    ("dense", export_onnx),
    ("conv2d", export_onnx),
    ("dict part", export_onnx),
]
# Exporting one of these hosts takes up to eight seconds.
EVERY_PAIR = [(name, export) for name in FAMILIES for export in (export_program, export_onnx)]
EVERY_PAIR += [("lstm", export_onnx), ("encoder", export_onnx)]
EVERY_PAIR += [(name, export_program) for name in ("residual cnn", "u-net", "called twice")]
FURTHER_PAIRS = [
    pytest.param(*pair, marks=pytest.mark.nightly) for pair in EVERY_PAIR if pair not in PAIRS
]


@pytest.mark.parametrize(("name", "export"), PAIRS + FURTHER_PAIRS)
def test_a_file_gives_the_outputs_of_the_network(name: str, export: Export, tmp_path: Path) -> None:
    if (name, export) == ("dense", export_onnx) and TORCH < (2, 13):
        pytest.skip("older versions do not convert the pooling of `convpool` to ONNX")
    host, sample = HOSTS[name].build()
    path = tmp_path / named(export)
    written = export(host, sample, path)
    assert written.path == path
    assert written.difference < 1e-5
    assert list(tmp_path.iterdir()) == [path]
    assert host.training
    saved = runner(path)
    host.eval()
    for batch in (1, 4, 7):
        inputs = rows(sample, batch)
        with host.committed(), torch.no_grad():
            output = call(host, inputs)
        expected = [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]
        for given, wanted in zip(saved(inputs), expected, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)


@EXPORTS
def test_the_batch_may_be_fixed(export: Export, tmp_path: Path) -> None:
    host, sample = HOSTS["containers"].build()
    path = tmp_path / named(export)
    export(host, sample[:1], path, dynamic_batch=False)
    saved = runner(path)
    assert saved(sample[:1])[0].shape == (1, 2)
    with pytest.raises(Exception, match=r"(?i)shape|dimension|guard"):
        saved(sample)


def test_a_sample_of_one_row_does_not_show_the_batch(tmp_path: Path) -> None:
    host, sample = HOSTS["containers"].build()
    with pytest.raises(ExportError, match=r"a batch of 1; valid: .* dynamic_batch=False"):
        export_program(host, sample[:1], tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


class Keywords(nn.Module):
    """Takes whatever it is given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return self.head(self.layer(x).relu() * more["scale"]) + more.get("shift", 0)


@pytest.mark.parametrize(
    ("export", "given"),
    [
        (export_program, ("x", "scale")),  # all of them capture calls in the same way
        (export_program, ("shift", "scale", "x")),
        (export_onnx, ("shift", "scale", "x")),
        (export_python, ("shift", "scale", "x")),
    ],
)
def test_keywords_that_a_forward_takes_by_two_stars_are_exported(
    export: Export, given: tuple[str, ...], tmp_path: Path
) -> None:
    every = {"x": torch.randn(4, 6), "scale": torch.rand(4, 1), "shift": torch.rand(4, 2)}
    sample = {name: every[name] for name in given}
    host = SlottedModel(Keywords(), ["layer"], sample, rules=RULES)
    plant(host, "layer", "mlp")
    host.fossilize("layer")
    written = export(host, sample, tmp_path / named(export))
    assert written.difference < 1e-5
    if export is export_program:  # the others were run from their files by the export
        inputs = rows(sample, 7)
        torch.testing.assert_close(runner(written.path)(inputs)[0], host.eval()(**inputs))


class Fixed(nn.Module):
    """Only takes batches of four."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(4, 6)


@EXPORTS
def test_a_network_that_cannot_be_captured_leaves_no_file(export: Export, tmp_path: Path) -> None:
    sample = torch.randn(4, 6)
    host = SlottedModel(Fixed(), ["layer"], sample, rules=RULES)
    with pytest.raises(ExportError, match=r"cannot capture.*dynamic_batch=False"):
        export(host, sample, tmp_path / named(export))
    assert not list(tmp_path.iterdir())
    export(host, sample, tmp_path / named(export), dynamic_batch=False)


@dataclass
class Answer:
    scores: Tensor


class Wrapping(nn.Module):
    """Returns a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x))


def test_an_output_that_no_file_can_hold_is_refused_with_what_to_return(tmp_path: Path) -> None:
    sample = torch.randn(4, 6)
    host = SlottedModel(Wrapping(), ["layer"], sample, rules=RULES)
    with pytest.raises(ExportError, match=r"Answer.*; return tensors in tuples, named tuples"):
        export_program(host, sample, tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


@EXPORTS
def test_nothing_but_an_earlier_export_is_written_over_and_only_by_one_that_matches(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sample = HOSTS["containers"].build()
    path = tmp_path / named(export)
    export(host, sample, path)
    with torch.no_grad():
        host.model[0][0].weight += 1.0
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(export_files, "tolerance_of", lambda _model: -1.0)  # so nothing matches
        with pytest.raises(ExportError, match="does not give what the host gives"):
            export(host, sample, path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before
    export(host, sample, path)
    assert path.read_bytes() != before
    path.unlink()
    wrong = {
        "notes.py": "must end in",
        "net": "must end in",
        f"mine/{named(export)}": "is a folder",
        f"other/{named(export)}": "is not an earlier export",
        f"empty/{named(export)}": "is not an earlier export",
        f"beside/{named(export)}": "would be written over",
    }
    for name in wrong:
        (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "mine" / named(export)).mkdir()
    (tmp_path / "notes.py").write_text("mine")
    (tmp_path / "other" / named(export)).write_text("mine")
    (tmp_path / "empty" / named(export)).touch()
    (tmp_path / "beside" / f"{named(export)}.data").write_text("mine")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for name, reason in wrong.items():
        with pytest.raises(ExportError, match=reason):
            export(host, sample, tmp_path / name)
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}


def test_a_network_that_onnxruntime_cannot_run_leaves_no_file(tmp_path: Path) -> None:
    sample = torch.randn(4, 6, dtype=torch.bfloat16)
    host = SlottedModel(nn.Sequential(nn.Linear(6, 6)).bfloat16(), ["0"], sample, rules=RULES)
    with pytest.raises(ExportError, match="could not be written, read back and run"):
        export_onnx(host, sample, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_command(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sample = HOSTS["containers"].build()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match=rf"no {package};.*pip install '\.\[export\]'\."):
        export_onnx(host, sample, tmp_path / "net.onnx")
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    host, sample = HOSTS["containers"].build()
    with pytest.raises(ExportError, match="no such folder"):
        export_program(host, sample, tmp_path / "missing" / "net.pt2")


def test_weights_too_large_for_one_onnx_file_go_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sample = HOSTS["containers"].build()
    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 0)
    path = export_onnx(host, sample, tmp_path / "net.onnx").path
    assert {each.name for each in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    model = export_module(host, sample).eval()
    torch.testing.assert_close(runner(path)(sample)[0], model(sample), rtol=1e-5, atol=1e-5)
