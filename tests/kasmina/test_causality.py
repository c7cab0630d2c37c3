"""Seeds see no position that their model does not see: a causal model stays causal, to the bit."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.kasmina import GateRules, SlottedModel, blueprint, blueprint_names, export_module
from esper.kasmina.blueprints import cost, find_blueprint, unregister_blueprint
from esper.kasmina.probe import Place, probe
from esper.kasmina.python_export import export_python
from esper.kasmina.slot import untap
from esper.leyline import (
    Blend,
    Family,
    GateRefusedError,
    Layout,
    Reach,
    SeedStage,
    SlotError,
    SlotSpec,
)
from esper.leyline.catalogue import LOOKS_BEYOND
from tests.kasmina import causal_models as models
from tests.kasmina.causal_models import CAUSAL, LENGTH, PICTURES, SIGNAL, TOKENS, WIDTH, Case

RULES = GateRules(min_gradient=None, min_contribution=None, max_loss_rise=None)
ALL, PAST, OWN = Reach.ALL, Reach.PAST, Reach.OWN


def first_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def respected(model: nn.Module, case: Case) -> set[int]:
    """All t for which no output before t changes, in any bit, when inputs from t on do."""
    sample, kept = case.sample, set()
    length = sample.shape[case.given]
    with torch.no_grad():
        before = first_of(model(sample))
        for cut in range(1, length):
            other = sample.clone()
            late = other.narrow(case.given, cut, length - cut)
            late.copy_(1 - late if late.is_floating_point() else (late + 3) % (sample.max() + 1))
            early = [x.narrow(case.returned, 0, cut) for x in (before, first_of(model(other)))]
            kept |= {cut} if torch.equal(*early) else set()
    return kept


def disturb(host: SlottedModel) -> None:
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weights in host.slots.parameters():
            weights += 0.3 * torch.randn(weights.shape, generator=draw)


def plant_everywhere(host: SlottedModel, name: str, blend: Blend) -> None:
    """In every slot that it fits, and fully blended."""
    index = host.catalogue.index(name)
    for slot, costs in zip(host.specs, host.catalogue.costs, strict=True):
        if costs[index] >= 0:
            host.germinate(slot.name, name, blend)


def lead_on(host: SlottedModel, stage: SeedStage) -> None:
    host.pass_time()
    for slot, view in host.seed_slots.items():
        if view.stage is SeedStage.TRAINING and stage is SeedStage.BLENDING:
            host.advance(slot)
        elif view.stage is SeedStage.HOLDING and stage is SeedStage.FOSSILIZED:
            host.fossilize(slot)
    for _ in range({SeedStage.BLENDING: 1, SeedStage.HOLDING: 4}.get(stage, 0)):
        host.pass_time()


@cache
def probed(case: Case) -> tuple[nn.Module, list[Place]]:
    model = case.model()
    return model, probe(model, case.places, case.sample)


def wrapped(case: Case, reach: Reach | None = None) -> SlottedModel:
    """Its slots as they are found, or with another reach."""
    model, places = probed(case)
    for module in model.modules():
        untap(module)  # of the last host that it had
    if reach is not None:
        places = [replace(each, spec=replace(each.spec, reach=reach)) for each in places]
    return SlottedModel(model, places, case.sample, rules=RULES).eval()


# A seed on a ramp is the one that is blended at once, but for its share: they take turns.
BLENDED = [
    (name, blend)
    for number, name in enumerate(CAUSAL)
    for blend in (Blend.GATE, (Blend.IMMEDIATE, Blend.RAMP)[number % 2])
]


@pytest.mark.parametrize(("name", "blend"), BLENDED)
def test_no_seed_makes_a_model_look_ahead_at_any_stage(name: str, blend: Blend) -> None:
    case = CAUSAL[name]
    before = respected(case.model(), case)
    assert before >= {LENGTH // 2, LENGTH - 1}
    assert all(spec.reach is PAST for spec in wrapped(case).specs)
    for blueprint_name in wrapped(case).catalogue.names:
        host = wrapped(case)
        plant_everywhere(host, blueprint_name, blend)
        planted = bool(host.lifecycle.occupied.any())
        assert planted or blueprint_name == "squeeze"
        disturb(host)
        outputs = [first_of(case.model()(case.sample))]
        for stage in (SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED):
            lead_on(host, stage)
            outputs.append(first_of(host(case.sample)))
            if not torch.equal(*outputs[-2:]):  # else it is what it was
                assert respected(host, case) >= before, (blueprint_name, stage)
        acts = not torch.equal(outputs[0], outputs[1])
        assert acts == planted, blueprint_name


def test_what_grew_on_a_causal_model_is_exported_as_it_is(tmp_path: Path) -> None:
    case = CAUSAL["tcn"]
    for blueprint_name in ("norm", "conv", "depthwise", "attention", "token_mix"):
        host = wrapped(case)
        plant_everywhere(host, blueprint_name, Blend.IMMEDIATE)
        disturb(host)
        lead_on(host, SeedStage.FOSSILIZED)
        plain = export_module(host, case.sample)
        assert torch.equal(plain(case.sample), host(case.sample))
        assert respected(plain, case) == set(range(1, LENGTH))
        if blueprint_name in ("conv", "token_mix"):
            assert export_python(host, case.sample, tmp_path / blueprint_name).difference == 0


@pytest.mark.parametrize("name", ["norm", "squeeze", "depthwise", "conv", "token_mix", "attention"])
def test_without_care_the_same_seeds_look_ahead(name: str) -> None:
    host = wrapped(CAUSAL["tcn"], ALL)
    plant_everywhere(host, name, Blend.IMMEDIATE)
    disturb(host)
    assert respected(host, CAUSAL["tcn"]) == set()


FOUND: dict[str, tuple[nn.Module, Any, dict[str, Reach]]] = {
    "pooled": (models.Tcn(pool=True), TOKENS, {"blocks.0": ALL, "blocks.1": ALL}),
    "both ways": (models.Lstm(both_ways=True), TOKENS, {"rnn@0": ALL, "embedding": ALL}),
    "an encoder": (models.Encoder(causal=False), TOKENS, {"encoder.layers.0": ALL}),
    "an encoder beside a decoder": (
        models.Translator(), (TOKENS[:, :6], TOKENS),
        {"source": ALL, "target": PAST, "target.conv": PAST, "cross@0": PAST},
    ),
    "as many words on both sides": (
        models.Translator(), (TOKENS, TOKENS.flip(0)), {"source": ALL, "target": PAST},
    ),
    "blocks": (models.Patches(), SIGNAL[..., :8], {"patch": PAST, "chomp": PAST}),
    "no padding": (models.WaveNet(valid=True), SIGNAL, {"front": PAST, "mixes.1": PAST}),
    "rounding": (models.Fourier(), SIGNAL, {"front": PAST}),
    "every word alone": (
        nn.Sequential(nn.Conv1d(3, WIDTH, 1), nn.ReLU(), nn.Conv1d(WIDTH, 3, 1)), SIGNAL,
        {"1": PAST},
    ),
    "a head of zeros": (
        models.gpt_with_a_head_of_zeros(), TOKENS % models.sequence.WORDS,
        {"transformer.h.0": PAST},
    ),
    "the same word throughout": (models.Tcn(), torch.zeros_like(TOKENS), {"blocks.0": PAST}),
    "keyword arguments": (models.Tcn(), {"tokens": TOKENS}, {"blocks.0": PAST}),
    "a state to go on from": (models.StatefulLstm(), TOKENS, {"norm": OWN, "rnn@0": OWN}),
    "raster order": (models.pixel_cnn(), PICTURES, {"1": OWN, "3": OWN}),
    "every pixel alone": (
        nn.Sequential(nn.Conv2d(2, WIDTH, 1), nn.ReLU(), nn.Conv2d(WIDTH, 3, 1)), PICTURES,
        {"1": ALL},
    ),
    "pictures": (
        nn.Sequential(nn.Conv2d(2, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv2d(WIDTH, 3, 1)),
        PICTURES, {"1": ALL},
    ),
    "vectors": (nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 9)), SIGNAL[:, 0], {"0": ALL}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_a_seed_may_see_is_found_by_what_the_model_returns(name: str) -> None:
    model, sample, wanted = FOUND[name]
    found = {place.spec.name: place.spec.reach for place in probe(model, list(wanted), sample)}
    assert found == wanted


def test_numbers_stay_within_what_each_position_has_had() -> None:
    """Columns of categories have their own sizes, and one too large is fatal on some devices."""

    class Categories(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.columns = nn.ModuleList(nn.Embedding(size, 4) for size in (50, 3, 2))
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            largest.append(x.amax(0).tolist())
            columns = zip(self.columns, x.unbind(1), strict=True)
            return self.head(torch.stack([column(values) for column, values in columns], 1))

    largest: list[list[int]] = []
    sample = torch.tensor([[49, 0, 1], [3, 2, 0], [7, 1, 0]])
    probe(Categories(), ["head"], sample)
    assert len(largest) > 3
    assert all(
        each <= limit for seen in largest for each, limit in zip(seen, (49, 2, 1), strict=True)
    )


def test_positions_folded_into_the_rows_of_the_output_count() -> None:
    class Rows(models.Tcn):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).flatten(0, 1)

    [place] = probe(Rows(), ["blocks.0"], TOKENS)
    assert place.spec.reach is PAST


def test_a_place_whose_channels_hold_positions_is_refused() -> None:
    model = models.Made()
    with pytest.raises(SlotError, match=r"'first'.*channels there hold several positions"):
        probe(model, ["first"], SIGNAL[:, 0])


def test_looking_leaves_weights_and_random_numbers_as_they_were() -> None:
    model = models.gpt_with_a_head_of_zeros().train()
    model.register_buffer("seen", torch.zeros(3))
    before = {
        name: (id(t), t.clone(), t._version) for name, t in model.state_dict(keep_vars=True).items()
    }
    state = torch.get_rng_state()
    probe(model, ["transformer.h.0"], TOKENS % models.sequence.WORDS)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert (id(tensor), tensor._version) == before[name][::2]
        assert torch.equal(tensor, before[name][1])


@pytest.fixture
def own_blueprints() -> Iterator[None]:
    class Slide(nn.Module):
        """Moves everything by one position, times a gate."""

        def __init__(self, by: int) -> None:
            super().__init__()
            self.by, self.gate = by, nn.Parameter(torch.zeros(()))

        def forward(self, h: Tensor) -> Tensor:
            return (
                self.gate * h.roll(self.by, -1) * (torch.arange(h.shape[-1]) != 0 - (self.by < 0))
            )

    blueprint("from_later", Family.CONV1D)(lambda spec: Slide(-1))
    blueprint("from_earlier", Family.CONV1D)(lambda spec: Slide(1))
    yield
    for name in ("from_later", "from_earlier"):
        unregister_blueprint(name, Family.CONV1D)


@pytest.mark.usefixtures("own_blueprints")
def test_blueprints_of_ones_own_are_tried_out() -> None:
    host = wrapped(CAUSAL["tcn"])
    with pytest.raises(GateRefusedError, match=r"'from_later' does not fit slot 'blocks.0', where"):
        host.germinate("blocks.0", "from_later")
    host.germinate("blocks.0", "from_earlier", "immediate")
    disturb(host)
    assert respected(host, CAUSAL["tcn"]) == set(range(1, LENGTH))


REMAIN = {
    (Layout.SEQUENCE, PAST): {
        "norm",
        "pointwise",
        "depthwise",
        "conv",
        "token_mix",
        "attention",
        "block",
    },
    (Layout.SEQUENCE, OWN): {"norm", "pointwise", "block"},
    (Layout.IMAGE, OWN): {"norm", "bottleneck", "block"},
    (Layout.TOKENS, PAST): {"norm", "lora", "gate", "attention", "mlp", "block"},
    (Layout.TIME_FIRST, OWN): {"norm", "lora", "gate", "mlp"},
    (Layout.DENSE, OWN): {"norm", "gate", "lowrank", "mlp", "wide", "convpool", "block"},
}


@pytest.mark.parametrize(("layout", "reach"), REMAIN)
def test_these_blueprints_remain_where_not_all_may_be_seen(layout: Layout, reach: Reach) -> None:
    extent = {Layout.IMAGE: (5, 6), Layout.DENSE: ()}.get(layout, (7,))
    free = SlotSpec(name="x", layout=layout, channels=4, extent=extent)
    bound = replace(free, reach=reach)
    known = (*blueprint_names(free.family), "block")
    costs = {name: cost(find_blueprint(name, free.family), bound) for name in known}
    assert {name for name in known if costs[name] >= 0} == REMAIN[layout, reach] & set(known)
    for name in REMAIN[layout, reach] - {"token_mix", "bottleneck", "block"}:
        assert costs[name] == cost(find_blueprint(name, free.family), free)
    assert {costs[name] for name in set(known) - REMAIN[layout, reach]} <= {LOOKS_BEYOND}


def random_tokens(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(models.WORDS, (samples, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def test_a_tcn_that_grows_by_itself_cannot_foretell_random_tokens() -> None:
    """Nobody does better than log(16) = 2.77 on tokens that were not trained on."""
    torch.manual_seed(0)
    run = esper.grow(
        models.Tcn(),
        random_tokens(128, 0),
        random_tokens(256, 1),
        loss="cross_entropy",
        budget=esper.Budget("+300%", 8),
        controller="heuristic:places=blocks.0/conv+blocks.1/conv,patience=0,first=1",
        lr=2e-2,
    )
    assert run.history[0]["decision"]["blueprint"] == "conv"
    assert min(record["val_loss"] for record in run.history) > 2.75


@pytest.mark.parametrize("reach", [None, ALL], ids=["as found", "without care"])
def test_only_a_seed_that_looks_ahead_foretells_random_tokens(reach: Reach | None) -> None:
    host = copy.deepcopy(wrapped(CAUSAL["tcn"], reach))  # trains
    plant_everywhere(host, "conv", Blend.IMMEDIATE)
    optimizer = torch.optim.Adam(host.parameters(), lr=2e-2)
    losses = []
    for step in range(100):
        tokens, targets = random_tokens(64, step)
        loss = nn.functional.cross_entropy(host(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert (sum(losses[-10:]) / 10 > 2.74) == (reach is None)


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    return model


GPT2_PLACES = ["transformer.h.0.attn@0", "transformer.h.0", "transformer.h.1"]


@pytest.mark.parametrize("name", ["norm", "lora", "gate", "mlp"])
def test_a_grown_gpt2_generates_the_same_with_and_without_its_cache(gpt2: Any, name: str) -> None:
    prompt = 1 + TOKENS
    before = gpt2.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True)
    host = SlottedModel(gpt2, GPT2_PLACES, {"input_ids": prompt}, rules=RULES).eval()
    plant_everywhere(host, name, Blend.GATE)
    disturb(host)
    lead_on(host, SeedStage.BLENDING)
    lead_on(host, SeedStage.HOLDING)
    assert {view.stage for view in host.seed_slots.values()} == {SeedStage.HOLDING}
    texts, scores = [], []
    for use_cache in (True, False):
        given = {"use_cache": use_cache, "output_logits": True, "return_dict_in_generate": True}
        out = gpt2.generate(prompt, max_new_tokens=6, do_sample=False, **given)
        texts.append(out.sequences)
        scores.append(torch.stack(out.logits))
    host.remove_now(*host.seed_slots)
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], before)
    torch.testing.assert_close(*scores)


def test_what_would_break_cached_decoding_is_refused_with_advice(gpt2: Any) -> None:
    host = SlottedModel(gpt2, GPT2_PLACES, {"input_ids": TOKENS}, rules=RULES)
    with pytest.raises(GateRefusedError, match=r"decodes with a cache.*switch it off first"):
        host.germinate("transformer.h.0", "attention")
    [place] = probe(gpt2, GPT2_PLACES[1:2], {"input_ids": TOKENS, "use_cache": False})
    assert place.spec.reach is PAST
