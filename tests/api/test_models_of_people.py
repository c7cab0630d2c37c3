"""Models as people write them, each from inspection to export, without naming a place: taken and
exact, or refused with a reason that is true.
"""

import importlib.util
from pathlib import Path

import pytest
from torch.optim import SGD

import esper
from esper.api import GrowingModel
from esper.api.inspection import Inspection
from esper.kasmina import GateRules, Isolation
from esper.leyline.errors import EsperError
from tests.kasmina.twins import condition, outputs, require_same, seed_of, step, stir, unequal
from tests.kasmina.zoo_of_people import PEOPLE, Model
from tests.nightly import thinned

RULES = GateRules(
    min_gradient=None,
    min_contribution=None,
    max_loss_rise=None,
    min_holding_epochs=0,
    min_training_epochs=0,
    blend_tempo=1,
)
DOCS = Path(__file__).resolve().parents[2] / "docs"
LEAST_MODELS, LEAST_TAKEN = 50, 45
TAKEN = [model for model in PEOPLE if model.chosen]
each_model = pytest.mark.parametrize("entry", PEOPLE, ids=lambda entry: entry.name)
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")


_FOUND: dict[str, Inspection] = {}


def inspected(entry: Model) -> Inspection:
    """Once for all tests, of a model that is afterwards what it was."""
    if entry.name not in _FOUND:
        model, before = entry.model(), condition(entry.model())
        _FOUND[entry.name] = esper.inspect(model, entry.sample)
        require_same(before, condition(model), "the model after it was inspected")
    return _FOUND[entry.name]


@each_model
def test_places_are_found_or_there_are_none(entry: Model) -> None:
    found = inspected(entry)
    assert found.chosen == entry.chosen
    if not entry.chosen:
        with pytest.raises(EsperError) as refusal:
            esper.wrap(entry.model(), entry.sample)
        assert entry.reason in str(refusal.value)


def planted(entry: Model, isolation: Isolation) -> GrowingModel:
    """With a seed in each place that "auto" takes, of as many blueprints as there are places."""
    options = {place.path: list(place.options) for place in inspected(entry).places}
    host = esper.wrap(
        entry.model(), entry.sample, slots=list(entry.chosen), rules=RULES, isolation=isolation
    )
    for index, name in enumerate(entry.chosen):
        blueprints = options[name]
        host.germinate(name, blueprints[(len(entry.name) + index) % len(blueprints)], "ramp")
    return host


@pytest.mark.parametrize("entry", thinned(TAKEN, 3), ids=lambda entry: entry.name)
def test_seeds_train_unnoticed_and_are_exported_as_they_grew(entry: Model) -> None:
    isolation = list(Isolation)[len(entry.name) % 2]
    alone, host = entry.model(), planted(entry, isolation)
    optimizers = SGD(alone.parameters(), 0.05, 0.9), host.optimizer(SGD, lr=0.05, momentum=0.9)
    expected = step(entry, alone, optimizers[0], dice=1)
    require_same(expected, step(entry, host, optimizers[1], dice=1), "a step of training")
    require_same(condition(alone, optimizers[0]), condition(host, optimizers[1]), "the host")
    for index, name in enumerate(entry.chosen):
        seed = seed_of(host, index)
        assert any(p.grad is not None and bool(p.grad.any()) for p in seed.parameters()), name
        host.advance(name)
        stir(seed)
    for _ in range(2):
        host.pass_time()
    for name in entry.chosen:
        host.fossilize(name)
    grown = outputs(entry, host)
    assert unequal(outputs(entry, alone), grown), "permanent seeds do something"
    require_same(grown, outputs(entry, host.export()), "outputs of the export")


def test_the_page_of_places_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    written = (DOCS / generate.PLACES).read_text(encoding="utf-8")
    command = "run: .venv/bin/python docs/generate.py places.md"
    assert written == generate.places_page(inspected), command


def test_most_models_are_taken() -> None:
    assert len({model.name for model in PEOPLE}) >= LEAST_MODELS
    assert len(TAKEN) >= LEAST_TAKEN
