"""What was grown on models of the zoo, as code for their own classes: the same bits, both modes."""

import ast
from pathlib import Path
from runpy import run_path

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import SlottedModel, additions_export, blueprint, export_additions, export_module
from esper.kasmina import unregister_blueprint as forget
from esper.kasmina.blueprints import zeroed
from esper.leyline import ExportError, SlotSpec
from tests.kasmina.grown_hosts import HOSTS, RULES, USERS, plant
from tests.kasmina.test_python_export import grown
from tests.kasmina.twins import outputs, require_same
from tests.kasmina.zoo import ACCEPTED, Entry


@pytest.mark.parametrize("entry", ACCEPTED[::3], ids=lambda entry: entry.name)
def test_a_model_of_its_own_class_becomes_the_exported_one(entry: Entry, tmp_path: Path) -> None:
    host = grown(entry)
    written = export_additions(host, entry.sample, tmp_path / "net")
    assert written.difference == 0.0
    assert sorted(file.name for file in written.path.iterdir()) == [
        "module.py",
        "weights.safetensors",
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["net"]
    plain = export_module(host, entry.sample)
    made = run_path(str(written.path / "module.py"))["load"](entry.model(start=2))
    assert {n for n, _ in made.named_parameters()} == {n for n, _ in plain.named_parameters()}
    require_same(outputs(entry, plain), outputs(entry, made))


@pytest.mark.parametrize("name", USERS)
def test_every_way_to_carry_a_seed_is_written(name: str, tmp_path: Path) -> None:
    host, sample = HOSTS[name].build()
    written = export_additions(host, sample, tmp_path / "net")
    assert written.difference == 0.0
    tree = ast.parse((written.path / "module.py").read_text(encoding="utf-8"))
    imported = {
        alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
    }
    assert {"json", "torch"} <= imported <= {"hashlib", "json", "math", "operator", "torch"}


def test_the_loaded_model_learns_as_the_exported_one_does(tmp_path: Path) -> None:
    entry = next(entry for entry in ACCEPTED if entry.name == "resnet basic")
    host = grown(entry)
    written = export_additions(host, entry.sample, tmp_path / "net")
    pair = [
        export_module(host, entry.sample),
        run_path(str(written.path / "module.py"))["load"](entry.model(start=2)),
    ]
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            entry.loss(entry.run(model)).backward()
            optimizer.step()
    plain, made = (dict(model.named_parameters()) for model in pair)
    require_same(plain, made, "weights")


class Precise(nn.Module):
    """Not all that it computes with is in its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.head = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
        self.register_buffer("shift", torch.linspace(0, 1, 6), persistent=False)
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.ones(6)), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        turned = (self.act(self.layer(x)) + self.shift) * self.turn.imag.to(self.shift.dtype)
        return self.head(turned.to(self.head.weight.dtype))  # type: ignore[no-any-return]

    def in_precision(self, usual: torch.dtype, head: torch.dtype) -> "Precise":
        """`Module.to` would cut complex numbers, too."""
        for tensor in [*self.layer.parameters(), self.shift]:
            tensor.data = tensor.data.to(usual)
        self.head.to(head)
        return self


@pytest.mark.parametrize(
    ("usual", "head"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float32),
        (torch.float32, torch.float16),
    ],
)
def test_a_new_model_gets_the_precision_of_the_one_that_grew(
    usual: torch.dtype, head: torch.dtype, tmp_path: Path
) -> None:
    sample = torch.randn(4, 6).to(usual)
    host = SlottedModel(Precise().in_precision(usual, head), ["act"], sample, rules=RULES)
    plant(host, "act", "mlp")
    host.fossilize("act")
    written = export_additions(host, sample, tmp_path / "net")
    assert written.difference == 0.0
    plain = export_module(host, sample).eval()
    made = run_path(str(written.path / "module.py"))["load"](Precise()).eval()
    dtypes = [
        {name: tensor.dtype for name, tensor in [*m.named_parameters(), *m.named_buffers()]}
        for m in (plain, made)
    ]
    assert dtypes[0] == dtypes[1]
    assert torch.equal(plain(sample), made(sample))


def test_a_file_that_mixes_precisions_does_not_pass_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(additions_export, "_precisions", lambda plain: (torch.float32, {}))
    sample = torch.randn(4, 6, dtype=torch.float64)
    host = SlottedModel(nn.Sequential(nn.Linear(6, 6)).double(), ["0"], sample, rules=RULES)
    with pytest.raises(
        ExportError, match=r"does not load.*0.weight is torch.float64 in .*, not torch.float32"
    ):
        export_additions(host, sample, tmp_path / "net")
    assert not list(tmp_path.iterdir())


def test_nothing_grown_is_the_weights_alone(tmp_path: Path) -> None:
    sample = torch.randn(4, 6)
    host = SlottedModel(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), ["0"], sample, rules=RULES)
    written = export_additions(host, sample, tmp_path / "net")
    made = run_path(str(written.path / "module.py"))["load"](
        nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    )
    assert torch.equal(made(sample), host(sample))


def test_a_host_of_espers_own_is_refused_with_what_to_do(tmp_path: Path) -> None:
    host, sample = HOSTS["own mlp"].build()
    with pytest.raises(ExportError, match=r"a MlpHost, not a class of yours.*python and pt2"):
        export_additions(host, sample, tmp_path / "net")
    assert not list(tmp_path.iterdir())


class Drawn(nn.Module):
    """A seed that looks at its mode: not a graph, and of a class of the user's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = zeroed(nn.Linear(channels, channels))

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h * 2 if self.training else h)


def test_a_seed_of_a_foreign_class_is_refused_by_name(tmp_path: Path) -> None:
    @blueprint("drawn", "dense")
    def build(spec: SlotSpec) -> nn.Module:
        """A seed."""
        return Drawn(spec.channels)

    try:
        sample = torch.randn(4, 6)
        host = SlottedModel(nn.Sequential(nn.Linear(6, 6)), ["0"], sample, rules=RULES)
        plant(host, "0", "drawn")
        host.fossilize("0")
        with pytest.raises(ExportError, match="a seed holds a Drawn"):
            export_additions(host, sample, tmp_path / "net")
    finally:
        forget("drawn", "dense")
