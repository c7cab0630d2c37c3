"""What every controller promises: legal, a row's own, and made again from its name."""

import functools
import json
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

import pytest
import torch

from esper.leyline import (
    AgreementError,
    DataError,
    DuplicateNameError,
    EsperError,
    LifecycleOp,
    UnknownNameError,
)
from esper.tamiyo import (
    Controller,
    FactoredRecurrentActorCritic,
    FeatureTable,
    LearnedController,
    Privileged,
    TokenActorCritic,
    TokenController,
    controller_names,
    make_controller,
    register_controller,
)
from esper.tamiyo.controllers import Arm, FixedSchedule, NeverGrow, Oracle, RowSchedule
from esper.tamiyo.controllers.by_name import _KINDS
from esper.tamiyo.controllers.specs import written
from tests.tamiyo import scripted
from tests.tamiyo.gardens import Tape, TapeGarden, catalogue_of, decisions, play

ARM = Arm(slot="early", blueprint="conv", epoch=3)
CATALOGUE = catalogue_of()
DOCS = Path(__file__).parents[2] / "docs" / "controllers.md"

SPECS = (
    "never",
    "random",
    "random:rate=0.7",
    "fixed:slot=early,blueprint=conv",
    "fixed:slot=mid+late,blueprint=norm+token_mix,blend=ramp+gate,epoch=0+7,train=2",
    "periodic",
    "periodic:places=*/conv+*/norm,every=3,first=0,seeds=2",
    "plateau",
    "plateau:places=late/*,blend=ramp,delta=5.0,patience=2",
    "gap",
    "gap:most_gap=1.0,least_loss=0.0,blend=gate,spacing=1",
    "race",
    "race:turns=true,epochs=2,places=early/*,threshold=3.0",
    "race:places=*/conv,keep=2,measure=gain,spacing=3",
    "audition",
    "audition:certain=5.0,spend=0.1,rounds=2,unlearned=0.0,most_gap=1.0",
    "heuristic",
    "heuristic:blend=ramp,patience=0,together=3,trial=3,most_gap=0.5,places=*/*",
)


def learned(greedy: bool) -> Controller:
    torch.manual_seed(0)
    garden = TapeGarden(Tape.random(1))
    size = FeatureTable.of(CATALOGUE).size
    network = FactoredRecurrentActorCritic(garden.space, state_dim=size, lstm_hidden_dim=16)
    for (
        head
    ) in network.heads.values():  # far from uniform, so that greedy decisions differ between rows
        torch.nn.init.normal_(head[-1].weight)  # type: ignore[index]
    return LearnedController(network, greedy=greedy)


def over_tokens(greedy: bool) -> Controller:
    torch.manual_seed(0)
    network = TokenActorCritic()
    for head in network.heads.values():  # so that it often does something else than the rule says
        torch.nn.init.normal_(head[-1].weight)  # type: ignore[index]
    return TokenController(network, greedy=greedy)


MADE: dict[str, Callable[[], Controller]] = {
    **{spec: (lambda spec=spec: make_controller(spec, CATALOGUE)) for spec in SPECS},
    "oracle": lambda: Oracle(
        {"context0": ARM, "context1": None, "context2": [ARM, Arm(slot="mid", blueprint="norm")]}
    ),
    "learned greedy": lambda: learned(True),
    "learned sampled": lambda: learned(False),
    "tokens greedy": lambda: over_tokens(True),
    "tokens sampled": lambda: over_tokens(False),
    "wasteful": scripted.wasteful,
    "destructive": lambda: scripted.destructive(ARM),
    "unfinished": lambda: scripted.unfinished(ARM),
    "spammy": lambda: scripted.spammy(ARM),
    "late": lambda: scripted.late(ARM),
    "wrong_slot": lambda: scripted.wrong_slot(ARM, "late"),
}
every_controller = pytest.mark.parametrize("name", MADE)
TAPE = Tape.random(24, seed=3)


@functools.cache
def decided(name: str) -> torch.Tensor:
    """[N, epochs, H]: by a controller that has seen nothing before."""
    return decisions(TapeGarden(TAPE), MADE[name]())


@every_controller
def test_no_decision_is_ever_illegal(name: str) -> None:
    controller = MADE[name]()
    assert isinstance(controller, Controller)
    for _ in play(TapeGarden(Tape.random(64, seed=1)), controller):
        pass  # `play` checks every decision, and carrying out an illegal one raises


@every_controller
def test_a_row_decides_the_same_whoever_is_beside_it_and_whatever_was_before(name: str) -> None:
    controller = MADE[name]()
    for rows in (list(range(23, -1, -2)), [7], [7]):  # other numbers of rows, and another episode
        found = decisions(TapeGarden(TAPE, rows), controller)
        assert torch.equal(found, decided(name)[rows])


@pytest.mark.parametrize("host", ["mlp", "gpt"])
@pytest.mark.parametrize(
    "spec", [n for n in controller_names() if n not in ("oracle", "specialist")]
)
def test_it_runs_on_every_host_without_settings(spec: str, host: str) -> None:
    tape = Tape.random(8, host=host)
    if spec == "fixed":
        spec += f":slot={tape.catalogue.slots.names[0]},blueprint={tape.catalogue.names[0]}"
    controller = make_controller(spec, tape.catalogue)
    for _ in play(TapeGarden(tape), controller):
        pass


@pytest.mark.parametrize("spec", ["race:first=0", "heuristic:first=0,patience=0"])
def test_single_rows_may_start_anew(spec: str) -> None:
    """Rows that start in the middle of the others' episode forget what they knew."""
    tape, row = Tape.random(6, seed=5), torch.tensor([2])
    controller, garden = make_controller(spec), TapeGarden(tape)
    running = play(garden, controller)
    for _ in range(9):
        next(running)
    assert bool((garden.life.interventions[row] > 0).all())
    begun, there = garden.signals(), garden.legal()
    fresh, here = TapeGarden(tape).signals(), TapeGarden(tape).legal()

    def mixed(later: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return later.index_copy(0, row, first[row])

    tensors = {
        name: mixed(value, getattr(fresh, name))
        for name, value in vars(begun).items()
        if isinstance(value, torch.Tensor)
    }
    life = begun.lifecycle.with_rows(row, fresh.lifecycle.rows(row))
    masks = {name: mixed(mask, here.masks[name]) for name, mask in there.masks.items()}
    actions = controller.act(
        replace(begun, lifecycle=life, **tensors), replace(there, masks=masks), torch.arange(6) == 2
    )
    first = make_controller(spec).act(fresh, here, torch.ones(6, dtype=torch.bool))
    assert torch.equal(actions.values[row], first.values[row])
    assert int(first["op"][row]) == LifecycleOp.GERMINATE


@pytest.mark.parametrize("name", ["race", "heuristic"])
def test_the_number_of_rows_may_not_change_in_an_episode(name: str) -> None:
    controller, tape = make_controller(name), Tape.random(4)
    garden = TapeGarden(tape)
    running = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(AgreementError, match="in the middle of an episode; given: 4 rows, none"):
        controller.act(garden.signals(), garden.legal(), running)
    controller.act(garden.signals(), garden.legal(), ~running)
    fewer = TapeGarden(tape, [0, 1])
    with pytest.raises(AgreementError, match="2 rows, 4 before"):
        controller.act(fewer.signals(), fewer.legal(), running[:2])


@pytest.mark.parametrize("spec", SPECS)
def test_a_name_makes_the_same_controller_again(spec: str) -> None:
    controller = make_controller(spec, CATALOGUE)
    assert make_controller(controller.name).name == controller.name
    again = make_controller(controller.name)
    assert torch.equal(decisions(TapeGarden(TAPE), again), decided(spec))


def test_names_are_short_and_leave_defaults_out() -> None:
    assert make_controller("random").name == "random"
    assert make_controller(" heuristic:first=2,delta=2").name == "heuristic"
    spec = "fixed:slot=early,blueprint=conv,blend=immediate,epoch=5"
    assert make_controller(spec).name == "fixed:slot=early,blueprint=conv"
    two = FixedSchedule([ARM, Arm(slot="late", blueprint="conv", blend="gate", epoch=9)])
    assert two.name == "fixed:slot=early+late,blueprint=conv,blend=immediate+gate,epoch=3+9"
    assert make_controller("random:rate=none").name == "random"
    assert make_controller("race:turns=false").name == "race"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("plato", "Unknown controller; given: 'plato'; .*did you mean 'plateau'?"),
        ("", "Unknown controller; given: ''"),
        ("never:patience=3", "Unknown setting of controller 'never'; .*write it as 'never' alone"),
        ("plateau:patients=3", "given: 'patients'; .*did you mean 'patience'?"),
        ("plateau:patience", "'patience' of controller 'plateau' needs one value"),
        ("plateau:patience=2,patience=3", "needs one value"),
        ("plateau:patience=two", "wrong form; given: 'two'; valid: a whole number"),
        (
            "plateau:patience=8",
            "'patience' is out of range; given: 8; valid: a whole number from 1 up to 7",
        ),
        ("plateau:patience=0", "out of range; given: 0"),
        ("plateau:blend=slow", "Unknown blend; given: 'slow'; valid: immediate, ramp, gate"),
        ("plateau:first=-1", "controller 'plateau' setting 'first' is out of range; given: -1"),
        ("plateau:seeds=0", "controller 'plateau' setting 'seeds' is out of range"),
        ("gap:spacing=0", "controller 'gap' setting 'spacing' is out of range"),
        ("periodic:every=0", "controller 'periodic' setting 'every' is out of range"),
        ("periodic:places=conv", "A place is written slot/blueprint; given: 'conv'"),
        ("periodic:places=earl/conv", "Unknown slot; given: 'earl'; .*did you mean 'early'?"),
        ("periodic:places=*/konv", "Unknown blueprint; given: 'konv'; .*did you mean 'conv'?"),
        (
            "periodic:first=24",
            "given: epoch 24 of 25; valid: epochs 0 to 23; train for at least 26 epochs, or plant "
            "earlier: periodic:first=23",
        ),
        ("fixed:slot=early", "'fixed' needs more settings; .*also blueprint"),
        ("fixed", "also slot, blueprint, as in fixed:slot=VALUE"),
        ("fixed:slot=earl,blueprint=conv", "Unknown slot; given: 'earl'"),
        ("fixed:slot=early,blueprint=cnv", "Unknown blueprint; given: 'cnv'"),
        ("fixed:slot=early,blueprint=conv,blend=x", "Unknown blend; given: 'x'"),
        ("fixed:slot=early,blueprint=conv,epoch=-1", "'epoch' is out of range; given: -1"),
        ("fixed:slot=early,blueprint=conv,epoch=24", "cannot become permanent; .*0 to 23"),
        ("fixed:slot=early,blueprint=conv,blend=ramp,epoch=21", "0 to 20 with this blend"),
        ("fixed:slot=early,blueprint=conv,train=0", "Arm .* 'train' is out of range"),
        ("fixed:slot=early+early,blueprint=conv", "a slot only once"),
        ("fixed:slot=early+mid+late,blueprint=conv+norm", "differ in length; given: 3, 2"),
        ("random:rate=2", "'rate' is out of range; given: 2.0; valid: a number from 0 up to 1"),
        ("race:measure=luck", "Unknown measure of controller 'race'"),
        ("race:turns=maybe", "wrong form; given: 'maybe'; valid: true or false"),
        ("race:epochs=25", "does not end in time"),
        ("race:keep=0", "controller 'race' setting 'keep' is out of range"),
        ("heuristic:trial=1", "ends before its probation"),
        ("heuristic:first=23", "too late to become permanent"),
        ("oracle", "'oracle' needs more settings"),
        ("oracle:table=/nowhere.json", "There is no such oracle table"),
    ],
)
def test_a_wrong_description_is_refused_in_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(EsperError, match=sentence) as refusal:
        make_controller(spec, CATALOGUE)
    assert "\n" not in str(refusal.value)


def test_a_blueprint_that_does_not_fit_is_refused_by_name_and_skipped_by_wildcards() -> None:
    costs = (CATALOGUE.costs[0], (-1, *CATALOGUE.costs[1][1:]), CATALOGUE.costs[2])
    picky = replace(CATALOGUE, costs=costs)
    with pytest.raises(EsperError, match=r"'norm' does not fit slot 'mid'; .*valid: squeeze"):
        make_controller("plateau:places=mid/norm", picky)
    with pytest.raises(EsperError, match="does not fit"):
        make_controller("fixed:slot=mid,blueprint=norm", picky)
    make_controller("plateau:places=*/norm+mid/*", picky)


def test_the_oracle_needs_to_know_every_context(tmp_path: Path) -> None:
    stored = tmp_path / "table.json"
    stored.write_text(json.dumps({"noisy": [], "plain": [asdict(ARM)]}))
    oracle = make_controller(f"oracle:table={stored}", CATALOGUE)
    assert isinstance(oracle, Privileged)
    garden = TapeGarden(Tape.random(2))
    with pytest.raises(UnknownNameError, match="did you mean 'plain'"):
        oracle.reset(["noisy", "plane"])
    with pytest.raises(AgreementError, match="0 contexts for 2 environments"):
        oracle.act(garden.signals(), garden.legal(), torch.ones(2, dtype=torch.bool))
    for text in ("[1]", "{", '{"a": [{"slot": "early"}]}', '{"a": [3]}'):
        stored.write_text(text)
        with pytest.raises(DataError, match="cannot be read"):
            make_controller(f"oracle:table={stored}")
    stored.write_text('{"a": [{"slot": "early", "blueprint": "conv", "epok": 3}]}')
    with pytest.raises(UnknownNameError, match="did you mean 'epoch'"):
        make_controller(f"oracle:table={stored}")
    with pytest.raises(EsperError, match="cannot become permanent"):
        Oracle({"a": Arm(slot="early", blueprint="conv", epoch=24)}).require_possible(CATALOGUE, 25)


def test_an_oracle_may_know_contexts_of_other_hosts() -> None:
    elsewhere = Arm(slot="early", blueprint="convpool")  # no blueprint of this host
    oracle = Oracle({"mlp": elsewhere, "conv": ARM})
    garden = TapeGarden(Tape.random(2))
    oracle.reset(["conv", "conv"])
    oracle.act(garden.signals(), garden.legal(), torch.ones(2, dtype=torch.bool))
    oracle.reset(["conv", "mlp"])
    with pytest.raises(UnknownNameError, match="given: 'convpool'"):
        oracle.act(garden.signals(), garden.legal(), torch.ones(2, dtype=torch.bool))


def test_rows_can_follow_schedules_of_their_own_and_rows_beyond_them_wait() -> None:
    tape = Tape.steady(rows=4)
    schedule = RowSchedule([ARM, None, Arm(slot="late", blueprint="norm", epoch=0)])
    found = decisions(TapeGarden(tape), schedule)
    for row, arm in ((0, ARM), (2, Arm(slot="late", blueprint="norm", epoch=0))):
        alone = decisions(TapeGarden(tape, [row]), FixedSchedule(arm))
        assert torch.equal(found[row : row + 1], alone)
    assert not bool(found[[1, 3]].any())
    with pytest.raises(AgreementError, match="more schedules than environments"):
        decisions(TapeGarden(tape, [0]), schedule)


def test_arms_survive_storing() -> None:
    arm = Arm(slot="mid", blueprint="norm", blend="gate", epoch=2, train=3)
    assert Arm.from_dict(json.loads(json.dumps(asdict(arm)))) == arm
    assert str(arm) == "mid/norm/gate@2"


def test_others_can_register_their_controller() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Calm:
        epochs: int = 3

    try:
        register_controller("calm", Calm, lambda settings: NeverGrow())
        assert "calm" in controller_names()
        assert make_controller("calm:epochs=4").name == "never"
        with pytest.raises(DuplicateNameError, match="'calm'"):
            register_controller("calm", Calm, lambda settings: NeverGrow())
    finally:
        del _KINDS["calm"]


@pytest.mark.parametrize("name", controller_names())
def test_the_docs_name_every_setting_with_its_default(name: str) -> None:
    section = DOCS.read_text(encoding="utf-8").split(f"## `{name}`")[1].split("\n## ")[0]
    for field in fields(_KINDS[name][0]):
        default = "required" if field.default is MISSING else f"`{written(field.default)}`"
        assert f"| `{field.name}` | {default} |" in section
