"""Events own what they carry, and refuse what does not fit."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from esper.leyline import HEADS, AgreementError, Blend, BlueprintCatalogue, SlotConfig
from esper.leyline.results import HeadGradientNorms, PerHead
from esper.nissa import Decisions, Evaluated, Event, RunLayout, Stepped, flatten
from esper.nissa.events import KINDS
from esper.nissa.store import rows_of, schema, tables
from tests.nissa.runs import LAYOUT, decisions

N, H = 3, 4


def test_every_kind_of_event_has_a_table_of_its_own_and_a_version() -> None:
    assert all(name == kind.kind and kind.version >= 1 for name, kind in KINDS.items())
    assert len(set(tables())) == len(tables())
    assert {kind.table for kind in KINDS.values()} < set(tables())


def test_only_samples_may_be_dropped() -> None:
    assert [kind.kind for kind in KINDS.values() if kind.droppable] == ["sample"]


def test_an_event_does_not_change_with_the_tensors_it_was_made_from() -> None:
    actions, states = torch.ones(N, H, dtype=torch.int64), torch.ones(N, 4)
    event = Decisions(
        round=1,
        step=0,
        actions=actions,
        values=torch.zeros(N),
        log_probs=torch.zeros(N, H),
        observations=states,
    )
    actions.zero_()
    states.zero_()
    assert event.actions.all()
    assert event.observations.all()


def test_tensors_with_gradient_and_of_half_precision_are_taken() -> None:
    event = Stepped(
        round=1,
        step=0,
        rewards=torch.ones(N, requires_grad=True),
        measures={"accuracy": torch.ones(N, dtype=torch.bfloat16)},
    )
    assert event.rewards.tolist() == event.measures["accuracy"].tolist() == [1.0] * N


def test_a_tensor_elsewhere_is_refused_by_name() -> None:
    with pytest.raises(AgreementError, match="'rewards' is elsewhere; given: meta"):
        Stepped(round=1, step=0, rewards=torch.ones(N, device="meta"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros(N + 1)}, r"'values'.*given: \[4\]; valid: 1 axes, 3 rows"),
        ({"actions": np.zeros(N)}, r"'actions'.*given: \[3\]"),
        ({"active": [True]}, "'active'"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    right = {"actions": np.zeros((N, H)), "values": np.zeros(N), "log_probs": np.zeros((N, H))}
    with pytest.raises(AgreementError, match=message):
        Decisions(round=1, step=0, **{**right, **change})


@pytest.mark.parametrize("name", ["reward", "env", "Accuracy", "a b", 'x"; DROP', "reward_rent"])
def test_a_measurement_whose_name_cannot_be_a_column_is_refused(name: str) -> None:
    with pytest.raises(AgreementError, match="becomes a column"):
        Stepped(round=1, step=0, rewards=[0.0], measures={name: [1.0]})


def test_texts_must_be_as_many_as_rows() -> None:
    with pytest.raises(AgreementError, match=r"'context'.*given: 1; valid: 2"):
        Evaluated(round=1, controller="heuristic", context=["one"], score=[1.0, 2.0])


def test_only_watched_environments_keep_their_observations() -> None:
    event = decisions(1, 0, envs=6, watched=2)
    rows = rows_of(event, LAYOUT)
    assert len(rows["decisions"]["env"]) == 6
    (blob,) = rows["observations"]["observation"]
    assert len(blob) == 2 * 2 * 4  # environments, bytes, features
    assert event.observations.shape == (2, 4)


def test_idle_environments_decide_nothing() -> None:
    active = [True, False, True, False, False, True]
    rows = rows_of(decisions(1, 0, envs=6, active=active, watched=3, first_env=10), LAYOUT)
    assert rows["decisions"]["env"] == [10, 12, 15]
    assert np.frombuffer(rows["observations"]["envs"][0], "<i4").tolist() == [10, 12]
    assert rows["decisions"]["op"] == decisions(1, 0, envs=6).actions[[0, 2, 5], 0].tolist()


def catalogue() -> BlueprintCatalogue:
    return BlueprintCatalogue(
        slots=SlotConfig(("early", "late")),
        names=("norm", "conv"),
        costs=((3, 9), (3, 9)),
        blend_costs=((0,) * len(Blend),) * 2,
        host_params=100,
    )


def test_the_columns_of_decisions_are_the_heads_of_the_table() -> None:
    layout = RunLayout.of(HEADS.resolve(catalogue()), ("epoch",), catalogue())
    assert layout.heads == HEADS.names
    actions = dict(zip(layout.heads, layout.actions, strict=True))
    assert actions["op"][1] == "GERMINATE"
    assert actions["slot"][1] == "late"
    assert actions["blueprint"][1] == "conv"
    created = next(sql for sql in schema(layout) if "TABLE decisions" in sql)
    assert all(f'"{name}" INTEGER' in created for name in HEADS.names)
    assert RunLayout.from_json(layout.to_json()) == layout


def test_a_head_nobody_has_named_gets_a_column_and_numbered_actions() -> None:
    space = HEADS.resolve(catalogue())
    more = type(space)(
        names=(*space.names, "tempo"),
        sizes=(*space.sizes, 3),
        relevance=tuple((*row, False) for row in space.relevance),
        given=(*space.given, ()),
    )
    layout = RunLayout.of(more, (), catalogue())
    assert layout.actions[-1] == ("0", "1", "2")
    assert any('"tempo" INTEGER' in sql for sql in schema(layout))


def test_a_head_whose_name_is_a_column_already_is_refused() -> None:
    layout = RunLayout(heads=("value",), actions=(("0",),), relevance=((True,),))
    with pytest.raises(AgreementError, match="taken; given: value"):
        schema(layout)


def test_nested_metrics_become_flat_names() -> None:
    nested = {
        "kl": 0.5,
        "stopped_by_kl": True,
        "valid_steps": 3,
        "gradient_norms": HeadGradientNorms(PerHead(("op",), {"op": 2.0}), value=4.0),
        "heads": PerHead(("op",), {"op": {"loss": torch.tensor(1.5)}}),
        "comment": "no number",
    }
    assert flatten(nested) == {
        "kl": 0.5,
        "stopped_by_kl": 1.0,
        "valid_steps": 3.0,
        "gradient_norms.heads.op": 2.0,
        "gradient_norms.value": 4.0,
        "heads.op.loss": 1.5,
    }


def test_flat_metrics_stay_as_they_are() -> None:
    assert flatten({"heads.op.loss": 1.0}) == {"heads.op.loss": 1.0}


def test_events_are_frozen_records_with_a_round() -> None:
    for kind in KINDS.values():
        assert issubclass(kind, Event)
        assert "round" in {field.name for field in fields(kind)}
        assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
