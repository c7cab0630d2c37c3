"""The network as a file of Python: it runs with torch alone and gives the network's bits."""

import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from esper.kasmina import SlottedModel, export_files, export_module, export_python
from esper.kasmina.watching import Sample, call
from esper.leyline import ExportError
from tests.kasmina.grown_hosts import HOSTS, RULES, plant
from tests.kasmina.twins import blueprint_for
from tests.kasmina.zoo import ACCEPTED, Entry

FILES = ["model.py", "weights.safetensors"]
# Torch runs its own encoder layers by a fused kernel in evaluation, which a graph does not hold.
FUSED = {"transformer encoder, batch first"}
EXPORTED = (
    "resnet basic", "spectral norm", "deep supervision", "transformer encoder, batch first",
    "keywords only", "mixed precision",
)  # fmt: skip
EXPORTED_AT_NIGHT = ("table with categories", "unet", "swin", "llama", "nerf")
ZOO = [pytest.param(entry, id=entry.name) for entry in ACCEPTED if entry.name in EXPORTED]
ZOO += [
    pytest.param(entry, id=entry.name, marks=pytest.mark.nightly)
    for entry in ACCEPTED
    if entry.name in EXPORTED_AT_NIGHT
]


def grown(entry: Entry) -> SlottedModel:
    """With a seed that does something in every place, for good."""
    host = SlottedModel(entry.model(), entry.places, entry.sample, rules=RULES)
    for index, spec in enumerate(host.specs):
        plant(host, spec.name, blueprint_for(spec, index), "gate" if index % 2 else "immediate")
        host.fossilize(spec.name)
    return host


def rows(sample: Sample, count: int) -> Any:
    cycle = torch.arange(count) % 4
    return tree_map_only(Tensor, lambda tensor: tensor[cycle], sample)


def arguments(sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, dict):
        return (), sample
    return (tuple(sample) if isinstance(sample, tuple) else (sample,)), {}


def outputs(model: nn.Module, sample: Sample) -> list[Tensor]:
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(call(model, sample)) if torch.is_tensor(leaf)]


@pytest.mark.parametrize("entry", ZOO)
def test_the_file_gives_the_networks_bits(entry: Entry, tmp_path: Path) -> None:
    host = grown(entry)
    written = export_python(host, entry.sample, tmp_path / "net")
    assert written.path == tmp_path / "net"
    assert sorted(file.name for file in written.path.iterdir()) == FILES
    assert host.training
    assert [file.name for file in tmp_path.iterdir()] == ["net"]
    if entry.name in FUSED:
        assert written.difference < 1e-6
    else:
        assert written.difference == 0.0
    model = export_module(host.eval(), entry.sample).eval()
    loaded = run_path(str(written.path / "model.py"))["Model"]()
    for batch in (1, 3):
        inputs = rows(entry.sample, batch)
        for found, wanted in zip(outputs(loaded, inputs), outputs(model, inputs), strict=True):
            assert torch.equal(found, wanted) or entry.name in FUSED
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


ELSEWHERE = """
import importlib.util, json, sys
from pathlib import Path

sys.path = [place for place in sys.path if place not in sys.argv[2:]]
import torch
from torch.utils._pytree import tree_leaves

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("esper", "safetensors", "tests"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
torch.set_num_threads(1)  # as here: the bits depend on it
report = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Model()
    report[folder.name] = []
    for args, kwargs, wanted in torch.load(folder / "cases.pt", weights_only=True):
        with torch.no_grad():
            given = [leaf for leaf in tree_leaves(model(*args, **kwargs)) if torch.is_tensor(leaf)]
        same = len(given) == len(wanted) and all(map(torch.equal, given, wanted))
        report[folder.name].append(same)
report["foreign"] = sorted({"esper", "safetensors", "tests"} & set(sys.modules))
print(json.dumps(report))
"""


class Halved(nn.Module):
    """Its own code enters blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.thin = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = self.thin(h)
            with torch.no_grad():
                shift = self.thin(h).mean(1, keepdim=True)
        return narrow.float() + shift.float()


@pytest.mark.parametrize(
    "names",
    [
        ("lstm", "tied weights", "named tuple part"),
        pytest.param(("conv1d", "dense", "residual cnn"), marks=pytest.mark.nightly),
    ],
)
def test_files_run_where_there_is_torch_alone(names: tuple[str, ...], tmp_path: Path) -> None:
    inputs = torch.randn(8, 6)
    blocks = SlottedModel(Halved(), ["body"], inputs, rules=RULES), inputs
    hosts = {name: HOSTS[name].build() for name in names} | {"blocks": blocks}
    for name, (host, sample) in hosts.items():
        folder = export_python(host, sample, tmp_path / name).path
        model = export_module(host.eval(), sample).eval()
        cases = []
        for batch in (1, 4, 7):
            inputs = rows(sample, batch)
            cases.append((*arguments(inputs), outputs(model, inputs)))
        torch.save(cases, folder / "cases.pt")
    finished = subprocess.run(
        [sys.executable, "-I", "-c", ELSEWHERE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report.pop("foreign") == []
    assert report == {folder.name: [True] * 3 for folder in tmp_path.iterdir()}


def test_the_file_imports_torch_and_the_standard_library_alone(tmp_path: Path) -> None:
    host, sample = HOSTS["residual cnn"].build()
    text = (export_python(host, sample, tmp_path / "net").path / "model.py").read_text()
    homes = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            homes |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            homes.add((node.module or "").partition(".")[0])
    assert "torch" in homes
    assert homes - {"torch"} <= set(sys.stdlib_module_names)
    assert "# layer1.0.conv: Conv2d" in text


class Encoded(NamedTuple):
    mean: Tensor
    spread: Tensor


class Mixed(nn.Module):
    """Constants, blocks of another precision, sizes, and a nest of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.thin = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor, pair: Any, scale: float = 1.0) -> dict[str, Any]:
        h = self.body(x + pair["left"][0] + pair["left"][1])
        with torch.autocast("cpu", torch.bfloat16):
            narrow = self.thin(h)
        noise = torch.rand(x.shape[0], 4, device=x.device)
        found = Encoded(h * scale + self.table + torch.tensor([1.0, 2, 3, 4]), narrow.float())
        return {"found": found, "rows": x.shape[0] * 2, "noise": noise, "same": [None, 3, (x,)]}


def test_constants_blocks_sizes_and_nests_are_written(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    sample = {"x": x, "pair": {"left": [x, 2 * x]}, "scale": 0.5}
    host = SlottedModel(Mixed(), ["body"], sample, rules=RULES)
    plant(host, "body", "mlp")
    host.fossilize("body")
    written = export_python(host, sample, tmp_path / "net")
    assert written.difference == 0.0
    model = run_path(str(written.path / "model.py"))["Model"]()
    found = model(x[:2], {"left": [x[:2], x[:2]]}, 0.5)
    assert found["rows"] == 4
    assert found["same"][:2] == [None, 3]
    assert found["found"]._fields == ("mean", "spread")
    assert found["found"].spread.dtype == torch.float32
    with pytest.raises(ValueError, match=r"scale should be 0\.5, not 0\.25"):
        model(x, {"left": [x, x]}, 0.25)
    with pytest.raises(ValueError, match=r"x should be torch\.float32 \(None, 4\), not .*\(3, 5\)"):
        model(torch.randn(3, 5), {"left": [x, x]}, 0.5)
    with pytest.raises(TypeError, match="should be a tensor, not list"):
        model([1.0], {"left": [x, x]}, 0.5)


LAYERS = st.sampled_from(["linear", "relu", "gelu", "norm", "dropout", "batch norm", "skip"])


class Skip(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def stack(kinds: list[str], width: int, positions: int) -> nn.Module:
    """Layers on [B, width], or on [B, width, positions] if there are any."""
    channels = nn.Conv1d(width, width, 3, padding=1) if positions else nn.Linear(width, width)
    made = {
        "linear": channels,
        "relu": nn.ReLU(inplace=True),
        "gelu": nn.GELU(),
        "norm": nn.GroupNorm(1, width),
        "dropout": nn.Dropout(0.5),
        "batch norm": nn.BatchNorm1d(width),
        "skip": Skip(nn.Sequential(channels, nn.Tanh())),  # shares its weights with "linear"
    }
    return nn.Sequential(channels, *(made[kind] for kind in kinds))


@settings(max_examples=6, deadline=None)
@given(
    kinds=st.lists(LAYERS, max_size=4),
    width=st.integers(3, 5),  # of two features one may happen to be dead, which looks like a past
    positions=st.sampled_from([0, 6]),
    batch=st.integers(1, 9),
)
def test_any_stack_of_layers_is_written_bit_for_bit(
    kinds: list[str], width: int, positions: int, batch: int
) -> None:
    torch.manual_seed(0)
    shape = (width, positions) if positions else (width,)
    sample = torch.randn(3, *shape)
    host = SlottedModel(stack(kinds, width, positions), ["0"], sample, rules=RULES)
    plant(host, "0", blueprint_for(host.specs[0]))
    host.fossilize("0")
    with tempfile.TemporaryDirectory() as folder:
        written = export_python(host, sample, Path(folder) / "net")
        model = run_path(str(written.path / "model.py"))["Model"]()
    assert written.difference == 0.0
    inputs = torch.randn(batch, *shape)
    with torch.no_grad():
        assert torch.equal(model(inputs), host.eval()(inputs))


def test_weights_keep_their_names_and_can_be_moved_and_loaded(tmp_path: Path) -> None:
    host, sample = HOSTS["residual cnn"].build()
    host.model.stem.weight.requires_grad_(False)
    written = export_python(host, sample, tmp_path / "net")
    model = run_path(str(written.path / "model.py"))["Model"]()
    plain = export_module(host, sample)
    state = plain.state_dict()
    assert set(model.state_dict()) <= set(state)
    missing = set(state) - set(model.state_dict())
    assert all(name.endswith("num_batches_tracked") for name in missing)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "stem.weight" not in learns
    assert "fc.weight" in learns
    model.load_state_dict(model.state_dict())
    assert next(model.to(torch.float64).parameters()).dtype == torch.float64


# --- refusals ---------------------------------------------------------------------------------


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h * 2 if h.sum() > 0 else h


class Remembering(Branching):
    """Keeps the last output in an attribute and looks at it."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        given, self.last = self.last, h.detach().mean(0)
        return h if given is None else h + given


class Strange(Branching):
    def forward(self, x: Tensor) -> Any:
        found = torch.max(self.fc(x), 1)
        return {"found": found}


class Shadowing(Branching):
    def forward(self, torch: Tensor) -> Tensor:
        return F.relu(self.fc(torch))


class Fixed(Branching):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + x.new_ones(len(x), 6)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Branching, r"cannot capture.*data-dependent.*let torch\.where choose"),
        (Remembering, "remembers something between calls"),
        (Strange, r"it returns a max; return tensors in tuples"),
        (Shadowing, r"is called 'torch'; rename it"),
        (Fixed, r"write x\.shape\[0\] in place of len\(x\)"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_reason(
    model: type[nn.Module], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = torch.randn(4, 6)
    host = SlottedModel(model(), ["fc"], sample, rules=RULES)
    with pytest.raises(ExportError, match=reason):
        export_python(host, sample, tmp_path / "net")
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr() == ("", ""), "torch says nothing beside it"


def test_an_older_export_stays_when_the_new_one_does_not_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, sample = HOSTS["containers"].build()
    folder = export_python(host, sample, tmp_path / "net").path
    before = (folder / "model.py").read_text()
    monkeypatch.setattr(export_files, "tolerance_of", lambda _model: -1.0)
    with pytest.raises(ExportError, match="The file does not give what the host gives"):
        export_python(host, sample, folder)
    assert (folder / "model.py").read_text() == before
    assert [file.name for file in tmp_path.iterdir()] == ["net"]


def test_files_that_are_not_an_export_are_never_written_over(tmp_path: Path) -> None:
    host, sample = HOSTS["containers"].build()
    own = tmp_path / "project"
    own.mkdir()
    (own / "model.py").write_text("# mine\n")
    with pytest.raises(
        ExportError, match=r"project holds other files; given: model\.py; name a new"
    ):
        export_python(host, sample, own)
    assert (own / "model.py").read_text() == "# mine\n"
    (own / "model.py").rename(own / "diary.txt")
    with pytest.raises(ExportError, match=r"given: diary\.txt"):
        export_python(host, sample, own)
    with pytest.raises(ExportError, match="is a file; name a folder"):
        export_python(host, sample, own / "diary.txt")
    assert [file.name for file in own.iterdir()] == ["diary.txt"]


def test_names_that_anyone_chose_cannot_become_code(tmp_path: Path) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a\nraise SystemExit": nn.Linear(6, 6)})

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            [part] = self.parts.values()
            return {'"""\nraise SystemExit #': part(x)}

    sample = torch.randn(4, 6)
    host = SlottedModel(Keyed(), ["parts.a\nraise SystemExit"], sample, rules=RULES)
    written = export_python(host, sample, tmp_path / "net")
    model = run_path(str(written.path / "model.py"))["Model"]()
    assert list(model(sample)) == ['"""\nraise SystemExit #']


def test_the_batch_may_be_fixed(tmp_path: Path) -> None:
    sample = torch.randn(4, 6)
    host = SlottedModel(Fixed(), ["fc"], sample, rules=RULES)
    written = export_python(host, sample, tmp_path / "net", dynamic_batch=False)
    model = run_path(str(written.path / "model.py"))["Model"]()
    with pytest.raises(ValueError, match=r"should be torch\.float32 \(4, 6\), not"):
        model(sample[:2])
