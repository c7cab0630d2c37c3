"""Gains as data: collected in parts, learned from, gone on from by PPO, judged on other worlds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.garden import LAYOUT, Bed, Greenhouse
from esper.garden.episodes import EPOCHS_ALONE, Episodes
from esper.garden.greenhouse import GROUPS
from esper.leyline import Actions, Legality, LifecycleOp
from esper.leyline.signals import Signals
from esper.simic.agent.ppo import PPOAgent
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.auditioning import Audition
from esper.tamiyo.controllers.learned import load_saved, save_controller
from studies import greenhouse, greenhouse_gains, judging
from studies.averaged import decode_without_memory, dropped
from studies.garden_plots import GardenHouse, open_contexts
from studies.greenhouse import (
    Fitting,
    figures_of,
    leaving_loss,
    parsed,
    planting_loss,
)
from studies.greenhouse_gains import WAITED, WAITER, Anchors, Gains, Measurement, net_points
from studies.preferences import Preferences

MADE = ("--cases", 2, "--longest", 14, "--seed", 8)


@pytest.fixture(autouse=True, scope="module")
def _small() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
        patch.setattr(greenhouse_gains, "PLOTS_OF_PART", 1)
        yield


def run(*words: object) -> None:
    options = parsed([str(word) for word in words])
    options.work(options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("gains")
    run("collect", "--out", out, "--plots", 3, *MADE, "--place", 1, "--of", 2)
    run("collect", "--out", out, "--plots", 3, *MADE)  # what is there is not made again
    return out


def test_gains_are_kept_in_parts_with_what_was_seen_and_done(folder: Path) -> None:
    parts = sorted(file.name for file in folder.glob("*.npz"))
    assert parts == ["gains-000000.npz", "gains-000001.npz", "gains-000002.npz"]
    data = Gains.load([folder])
    first = data.first
    assert 0 < int(first.sum()) <= 6
    assert data.observations.shape == (len(data.gains), LAYOUT.state_dim)
    assert bool(data.observations.isfinite().all())
    assert float(data.gains[:, 0].abs().max()) == 0.0  # who waits, and likes nothing, is a control
    planted = data.actions[:, 1:, 0] == LifecycleOp.GERMINATE
    assert torch.equal(planted, ~data.gains[:, 1:].isnan())
    assert bool(planted[first].any(1).all())
    assert not bool(planted[~first][:, 3:].any())  # a later decision has three choices


def test_where_a_fit_is_given_it_chooses_all_seeds_but_the_last(
    tmp_path: Path,
) -> None:
    network = TokenActorCritic(LAYOUT)
    with torch.no_grad():  # it has likings of its own, and does not listen to the rule
        for head in (network.heads["slot"], network.heads["blueprint"]):
            head[-1].weight.normal_(generator=torch.Generator().manual_seed(3))  # type: ignore[index]
        for scale in network.rule_logit_scale.values():
            scale.zero_()
    save_controller(network, tmp_path / "fit", None, {})
    run("collect", "--out", tmp_path / "gains", "--plots", 2, *MADE, "--fitted", tmp_path / "fit")
    with pytest.raises(SystemExit, match="made with"):  # by nobody's likings
        run("collect", "--out", tmp_path / "gains", "--plots", 3, *MADE)
    data = Gains.load([tmp_path / "gains"])
    masks, drawn = data.masks, list[bool]()
    for place in range(len(data.gains)):
        logits = network(data.observations[place : place + 1]).logits
        slots, kinds, blends = (logits[head][0] for head in ("slot", "blueprint", "blend"))
        legal = masks["blueprint"][place] & masks["slot"][place][LifecycleOp.GERMINATE][:, None]
        where = slots[LifecycleOp.GERMINATE].masked_fill(~legal.any(1), -torch.inf).log_softmax(-1)
        liked = where[:, None] + kinds.masked_fill(~legal, -torch.inf).log_softmax(-1).nan_to_num(
            -torch.inf
        )
        found = liked.flatten().topk(min(4, int(legal.sum()))).indices
        best = [(int(each) // LAYOUT.blueprints, int(each) % LAYOUT.blueprints) for each in found]
        first = bool(data.first[place])
        chosen = data.actions[place, 1 : 4 if first else 3]
        tried = [tuple(each) for each in chosen[:, 1:3].tolist()]
        assert tried == best[: len(tried)]
        last = tuple(data.actions[place, 4 if first else 3, 1:3].tolist())
        drawn += [last != liked_next for liked_next in best[len(tried) : len(tried) + 1]]
        for slot, kind, blend in chosen[
            :, 1:
        ].tolist():  # and by the blend that it likes best there
            legal_blends = masks["blend"][place][slot, kind]
            assert blend == int(blends[slot, kind].masked_fill(~legal_blends, -torch.inf).argmax())
    assert any(drawn)  # the last one is whatever comes


def test_a_rollback_forfeits_what_was_gained_and_more() -> None:
    bed = Bed(Greenhouse(8, longest=14).plot(0), players=1)
    state = replace(
        bed.state,
        committed_gain=torch.full_like(bed.state.committed_gain, 3.0),
        exposure=torch.full_like(bed.state.exposure, 0.5),
        rolled_back=torch.tensor([True, False]),
    )
    tested = torch.tensor([6.0, 6.0])  # of twice as many samples
    found = net_points(state, tested.double(), rent=2.0).tolist()
    assert found == pytest.approx([3.0 - 1.0 - 23.0, 5.0 - 1.0])


def test_harm_costs_more_than_the_points_that_are_lost(folder: Path) -> None:
    data = Gains.load([folder])
    data.gains[:, 1], data.gains[:, 2], data.gains[:, 3] = 2.0, -3.0, -0.4
    assert data.worth(0.0, 10.0)[0, 1:4].tolist() == pytest.approx([0.2, -0.3, -0.04])
    assert data.worth(5.0, 10.0)[0, 1:4].tolist() == pytest.approx([0.2, -0.8, -0.04])
    assert data.worth(1.0, 0.5)[0, 1:4].tolist() == pytest.approx([2.0, -4.0, -0.8])
    data.base[0] = 2.8  # points that were there before: 2.8 - 3 is no harm
    assert data.worth(5.0, 10.0)[0, 1:4].tolist() == pytest.approx([0.2, -0.3, -0.04])
    data.base[0] = torch.nan  # nobody knows: it may be
    likely = -0.3 - 0.5 * greenhouse_gains.LIKELY
    assert data.worth(5.0, 10.0)[0, 1:4].tolist() == pytest.approx([0.2, likely, -0.04])


def test_where_nothing_could_be_tried_nothing_is_learned_of_whether_to_plant() -> None:
    op = torch.zeros(2, requires_grad=True)
    near = torch.ones(2, 1)
    untried = torch.tensor([[0.0, torch.nan], [0.5, 1.0]])
    planting_loss(Preferences(op, near.log(), near), untried).backward()
    assert op.grad is not None
    assert op.grad.tolist() == pytest.approx([0.0, -0.5])


def test_waiting_is_taken_for_never_planting_where_it_was_not_measured(
    folder: Path, tmp_path: Path
) -> None:
    part = dict(np.load(folder / "gains-000000.npz"))
    part["gains"][:, 0] = 7.0
    part["gains"][0, 0] = np.nan
    np.savez(tmp_path / "gains-000000.npz", **part)
    found = Gains.load([tmp_path]).gains[:, 0].tolist()
    assert found == [0.0] + [7.0] * (len(found) - 1)
    assert len(found) > 1


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_decode_without_memory_equals_network_with_zero_memory_proj(seed: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    network = TokenActorCritic(LAYOUT).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        for parameter in network.memory_proj.parameters():
            parameter.zero_()
    states = torch.randn(rows, LAYOUT.state_dim, generator=generator).double()
    with torch.no_grad():
        expected = network(states)
        logits, values = decode_without_memory(network, states)
    torch.testing.assert_close(values.float() * network.return_scale, expected.values)
    assert logits.keys() == expected.logits.keys()
    for head, head_logits in expected.logits.items():
        torch.testing.assert_close(logits[head], head_logits)
    no_logits, no_values = decode_without_memory(network, states[:0])
    assert no_values.shape == (0,)
    assert no_logits["blend"].shape == (0, *expected.logits["blend"].shape[1:])


def test_what_is_judged_of_a_fit_drops_nothing_out(folder: Path) -> None:
    data = Gains.load([folder])
    fitting = Fitting(parsed(["fit", "--gains", "-", "--out", "-", "--dropout", "0.5"]))
    sure = [fitting.mean.encode(data.observations) for _ in range(2)]
    vague = [fitting.network.encode(data.observations) for _ in range(2)]
    assert torch.equal(*sure)
    assert not torch.equal(*vague)


class Played(NamedTuple):
    """A measurement that ran to its end, and what was recorded while it ran."""

    measured: Measurement
    gains: dict[str, Any]
    drawn: list[int]  # the epoch of each case's first decision before the measurement ran
    deaf: list[torch.Tensor]  # [cases, players] bool of each epoch: the row has no shadows


def play(op_bias: float) -> Played:
    """Play two cases with a network whose bias for planting is `op_bias`."""
    network = TokenActorCritic(LAYOUT)
    network.bias_action_logit("op", LifecycleOp.GERMINATE, op_bias)
    with torch.no_grad():
        network.rule_logit_scale["seed"].zero_()  # so it always likes the same
    measured = Measurement(Greenhouse(8, longest=20).plot(6, 2), 6, "cpu", network)
    drawn, deaf_rows = list(measured.first), list[torch.Tensor]()
    step = measured.bed.step

    def recorded_step(values: torch.Tensor, deaf: torch.Tensor) -> object:
        deaf_rows.append(deaf.view(2, -1))
        outcome = step(values, deaf)
        living = measured.bed.episodes.population.shadows.living.flatten(1).any(1)
        assert not bool((living[: len(deaf)] & deaf).any())
        return outcome

    measured.bed.step = recorded_step  # type: ignore[method-assign,assignment]
    return Played(measured, measured.run(), drawn, deaf_rows)


@pytest.fixture(scope="module")
def eager() -> Played:
    """The network plants whenever it may."""
    return play(20.0)


@pytest.fixture(scope="module")
def idle() -> Played:
    """The network never plants."""
    return play(-20.0)


def test_who_waits_decides_some_epochs_later_as_the_fit_does(eager: Played, idle: Played) -> None:
    assert eager.measured.first == [EPOCHS_ALONE] * 2
    for plans in eager.measured.plans:
        (waited,) = plans[WAITER]
        assert waited.epoch == EPOCHS_ALONE + WAITED
        assert (waited.slot, waited.blueprint) == (plans[0][0].slot, plans[0][0].blueprint)
    first = ~np.isnan(eager.gains["rule"])
    assert np.abs(eager.gains["gains"][first, 0]).max() > 0.0  # it was no control
    assert np.abs(eager.gains["gains"][~first, 0]).max() == 0.0
    assert np.abs(idle.gains["gains"][:, 0]).max() == 0.0
    assert not any(plans[WAITER] for plans in idle.measured.plans)


def test_a_later_seed_does_harm_if_the_case_ends_below_its_control(folder: Path) -> None:
    measured = Measurement(Greenhouse(8, longest=20).plot(6, 2), 6, "cpu")
    found = measured.run()
    later = np.isnan(found["rule"])
    assert later.any()
    assert not found["base"][~later].any()
    first = {case: found["gains"][place, 1] for place, case in enumerate(_cases(measured))
             if not later[place]}  # fmt: skip
    bases = [first[case] for case in np.array(_cases(measured))[later]]
    assert found["base"][later] == pytest.approx(bases)


def _cases(measured: Measurement) -> list[int]:
    return torch.cat([cases for cases, _, _ in measured.noted.chosen]).tolist()


def test_seeds_that_are_chosen_later_are_compared_with_the_one_that_was_there(folder: Path) -> None:
    data = Gains.load([folder])
    later = ~data.first
    assert bool(later.any())
    own = LAYOUT.split(data.observations)[1][..., 1:]  # of slots, beside that they are there
    for plot in data.plot[later].unique().tolist():
        here = data.plot == plot
        assert float((own[here & later] - own[here & ~later][:1]).abs().max()) > 0.0
    chosen = data.actions[later][:, 1]
    assert bool((chosen[:, 0] == LifecycleOp.GERMINATE).any())


def test_anchors_are_moments_in_which_the_rule_tends(folder: Path) -> None:
    anchors = Anchors.load([folder])
    assert len(anchors.op) > 0
    plain = torch.tensor([LifecycleOp.WAIT, LifecycleOp.GERMINATE])
    assert not bool(torch.isin(anchors.op, plain).any())
    assert bool(anchors.mask.gather(1, anchors.op[:, None]).all())


def test_packed_gains_are_those_that_were_collected(folder: Path, tmp_path: Path) -> None:
    run("pack", "--gains", folder, "--out", tmp_path / "gains.npz.xz")
    one, other = (Gains.load([each]) for each in (folder, tmp_path / "gains.npz.xz"))
    assert torch.equal(one.observations, other.observations)
    assert torch.equal(one.gains.nan_to_num(-1e3), other.gains.nan_to_num(-1e3))
    with pytest.raises(SystemExit, match="collect them first"):
        Gains.load([tmp_path])


def test_without_a_fit_nobody_who_waits_plants_and_so_nothing_is_known_of_waiting(
    folder: Path, tmp_path: Path
) -> None:
    data = Gains.load([folder])
    assert not bool(data.waits.any())
    assert not bool(data.gains[data.first, 0].any())
    old = np.load(next(folder.glob("gains-*.npz")))
    few = {name: old[name] for name in old.files if name != "waits"}
    np.savez(tmp_path / "gains-seed8.npz", **few)
    assert not bool(Gains.load([tmp_path / "gains-seed8.npz"]).waits.any())


def test_who_is_hasty_takes_waiting_for_never_planting(folder: Path, tmp_path: Path) -> None:
    data = Gains.load([folder])
    first = data.first
    dearer = data.waiting(torch.full_like(data.rule, 7.0), first)
    assert bool((dearer.gains[first, 0] == 7.0).all())
    assert torch.equal(dearer.gains[~first, 0], data.gains[~first, 0])
    for file in folder.glob("gains-*.npz"):  # as if waiting had brought something
        part = dict(np.load(file))
        part["gains"][:, 0], part["waits"][:] = 5.0, True
        np.savez(tmp_path / file.name, **part)
    (tmp_path / "made.json").write_bytes((folder / "made.json").read_bytes())
    words = ("fit", "--gains", tmp_path, "--out", tmp_path / "fit", "--epochs", 1)
    run(*words, "--hasty")
    run(*words[:3], "--out", tmp_path / "slow", "--epochs", 1)
    waited = [json.loads((tmp_path / name / "done.json").read_text())[0]["first_waited"]
              for name in ("fit", "slow")]  # fmt: skip
    assert waited == pytest.approx([0.0, 5.0])
    with pytest.raises(SystemExit, match="'hasty': True"):
        run(*words[:-1], 2)


def test_a_folder_made_otherwise_is_refused(folder: Path) -> None:
    with pytest.raises(SystemExit, match="made with"):
        run("collect", "--out", folder, "--plots", 3, "--cases", 3, "--longest", 14, "--seed", 8)


def test_a_fit_prefers_what_gained_more_and_plants_only_what_is_worth_it(folder: Path) -> None:
    data, anchors = Gains.load([folder]), Anchors.load([folder])
    wins = (data.plot % 2 == 0)[:, None]
    data.gains[:, 1] = torch.where(data.gains[:, 1].isnan(), torch.nan, 10.0)
    lost = -data.gains.abs() - 1.0
    lost[:, 0] = 0.0
    data = data._replace(gains=torch.where(wins, data.gains, lost))
    fitting = Fitting(parsed(["fit", "--gains", "-", "--out", "-", "--rate", "0.01"]))
    first = figures_of(fitting, data, anchors)
    for _ in range(80):
        fitting.learn(data, anchors)
    last = figures_of(fitting, data, anchors)
    assert last["rank"] < 0.7 * first["rank"]
    assert last["plant"] < 0.7 * first["plant"]
    assert last["tend"] < max(0.1, 1.1 * first["tend"])
    assert last["first_chosen"] > last["random"]
    preferred = Preferences.of(fitting.mean(data.observations, None).logits, data)
    there = data.gains[:, 1:].isfinite().any(1)
    right = (preferred.op > 0) == wins[:, 0]
    assert float(right[there].float().mean()) > 0.8


def test_what_grows_is_let_alone_where_the_rule_has_nothing_to_tend(folder: Path) -> None:
    data = Gains.load([folder])
    data.masks["op"][:] = True
    advised = LAYOUT.split(data.observations)[0][:, -len(LifecycleOp) :]  # a view
    advised[:] = torch.eye(len(LifecycleOp))[LifecycleOp.WAIT]
    advised[0] = torch.eye(len(LifecycleOp))[LifecycleOp.PRUNE]
    op = torch.zeros(len(data.gains), len(LifecycleOp), requires_grad=True)
    leaving_loss(op, data).backward()
    assert op.grad is not None
    assert not bool(op.grad[0].any())  # there the rule knows better
    assert bool((op.grad[1:, LifecycleOp.ADVANCE :] > 0).all())  # a step makes them less likely
    assert bool((op.grad[1:, : LifecycleOp.ADVANCE] < 0).all())


def test_whether_to_plant_is_learned_from_what_would_be_planted() -> None:
    op = torch.zeros(2, requires_grad=True)
    near = torch.tensor([[1.0, 0.1], [0.01, 0.001]])  # the second: nothing liked
    preferred = Preferences(op, near.log(), near)
    planting_loss(preferred, torch.tensor([[0.0, 1.0, -1.0], [0.0, -1.0, 1.0]])).backward()
    assert op.grad is not None
    assert float(op.grad[0]) < 0.0 < float(op.grad[1])  # a step makes it likelier, and less so
    assert float(op.grad[0] / op.grad[1]) == pytest.approx(-100.0)


def test_how_near_a_seed_is_to_the_likeliest_follows_from_all_that_may_be_planted(
    folder: Path,
) -> None:
    data, network = Gains.load([folder]), TokenActorCritic(LAYOUT)
    with torch.no_grad():
        network.heads["blueprint"][-1].weight.normal_(generator=torch.Generator().manual_seed(3))  # type: ignore[index]
        logits = network(data.observations, None).logits
        near = Preferences.of(logits, data).near
    planted = data.actions[:, 1:, 0] == LifecycleOp.GERMINATE
    assert float(near[planted].max()) <= 1.0 + 1e-5
    for row, seed in planted.nonzero().tolist():
        chances, where = {}, logits["slot"][row, LifecycleOp.GERMINATE]
        for slot in data.masks["slot"][row, LifecycleOp.GERMINATE].nonzero()[:, 0].tolist():
            kinds = data.masks["blueprint"][row, slot]
            own = logits["blueprint"][row, slot].masked_fill(~kinds, -torch.inf).softmax(0)
            for kind in kinds.nonzero()[:, 0].tolist():
                chances[slot, kind] = float(where[slot].exp() * own[kind])
        place = tuple(data.actions[row, 1 + seed, 1:3].tolist())
        blend = int(data.actions[row, 1 + seed, 3])
        own = logits["blend"][row][place].masked_fill(~data.masks["blend"][row][place], -torch.inf)
        expected = chances[place] / max(chances.values()) * float((own[blend] - own.max()).exp())
        assert float(near[row, seed]) == pytest.approx(expected, rel=1e-4)


def test_where_a_fit_is_given_it_decides_when_it_would_plant(eager: Played, idle: Played) -> None:
    earliest = eager.measured.earliest
    assert eager.measured.first == [earliest] * 2
    assert eager.measured.later == [earliest + 2] * 2
    assert idle.measured.first == idle.drawn
    assert idle.drawn != eager.measured.first


def test_shadows_are_heard_by_those_of_whom_a_decision_is_still_asked(eager: Played) -> None:
    measured, deaf = eager.measured, eager.deaf
    assert bool(eager.gains["waits"].all())
    first, later = measured.earliest, measured.later[0]
    assert not bool(deaf[first - 1].any())
    assert deaf[first][0].tolist() == [True] * 4 + [False] * 5
    assert deaf[later][0, :7].tolist() == [True] * 5 + [False, True]
    assert not bool(torch.stack(deaf)[:, :, [5, -1]].any())  # these are looked at to the end


def test_what_was_pruned_is_not_planted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.garden.episodes.GARDEN_BATCHES", 1)
    advise = Audition.act

    def prune(
        self: Audition, signals: Signals, legality: Legality, starts: torch.Tensor
    ) -> Actions:
        """Whatever may be pruned is."""
        values = advise(self, signals, legality, starts).values.clone()
        rows = legality.masks["op"][:, LifecycleOp.PRUNE].nonzero()[:, 0]
        where = legality.masks["slot"][rows, LifecycleOp.PRUNE].int().argmax(1)
        values[rows] = 0
        values[rows, 0], values[rows, 1] = int(LifecycleOp.PRUNE), where
        return Actions(legality.space, values)

    monkeypatch.setattr(Audition, "act", prune)
    measured = Measurement(Greenhouse(8, longest=30).plot(7, 2), 7, "cpu")
    done = list[torch.Tensor]()
    step = measured.bed.step

    def note(values: torch.Tensor, deaf: torch.Tensor) -> object:
        done.append(values[:, 0].clone())
        return step(values, deaf)

    monkeypatch.setattr(measured.bed, "step", note)
    measured.run()
    ops = torch.stack(done)[:, measured.rows]  # [epochs, C, players]
    planted = (ops == LifecycleOp.GERMINATE).sum(0)
    assert int((ops == LifecycleOp.PRUNE).sum()) > 0
    assert planted[:, :4].tolist() == [[1] * 4] * 2
    assert int(planted[:, 4:-1].max()) <= 2
    for case, row in ((case, row) for case in range(2) for row in range(7)):
        assert int(planted[case, row]) <= len(measured.plans[case][row])


def test_gains_of_the_garden_are_of_its_open_contexts_and_of_no_case_that_is_judged(
    tmp_path: Path,
) -> None:
    house = GardenHouse()
    names = [context.name for context in open_contexts()]
    assert len(names) == 18
    assert not any(name.startswith("tap") or "-to-" in name for name in names)
    cases = [case for number in range(20) for case in house.plot(number, 5).cases]
    assert len(set(map(str, cases))) == 100
    assert [case.context.name for case in cases[:18]] == names
    assert max(case.seed for case in cases) == 99 // 18
    measured = Measurement(house.plot(3, 1), 3, "cpu")
    assert measured.bed.episodes.population.catalogue.names == house.plot(3, 1).blueprints
    assert measured.plot.horizon == 25
    assert int(measured.bed.episodes.population.budget[0]) > 0
    other = GardenHouse(1001)
    assert not {case.seed for case in other.plot(0, 18).cases} & set(range(1000))
    assert other.plot(3, 1).name != house.plot(3, 1).name  # so other moments and seeds are drawn


def test_a_fit_goes_on_to_the_bit_and_its_memory_is_silent(folder: Path, tmp_path: Path) -> None:
    for name, stops in (("parts", (1, 3)), ("whole", (3,))):
        for epochs in stops:
            run("fit", "--gains", folder, "--out", tmp_path / name, "--epochs", epochs)
    one, other = (
        greenhouse.read_archive(tmp_path / name / "state", kind="fit of gains", version=4).tensors
        for name in ("parts", "whole")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    kept = load_saved(tmp_path / "whole" / "best").network
    assert not any(bool(each.any()) for each in kept.memory_proj.parameters())


def test_ppo_goes_on_from_a_fit_and_from_its_last_round(folder: Path, tmp_path: Path) -> None:
    run("fit", "--gains", folder, "--out", tmp_path / "fitted", "--epochs", 1)
    words = ("train", "--out", tmp_path / "run", "--fitted", tmp_path / "fitted" / "best",
             "--envs", 4, "--plots", 2, "--players", 2, "--longest", 8,
             "--minibatches", 1)  # fmt: skip
    run(*words, "--rounds", 1)
    run(*words, "--rounds", 2)
    run("train", *words[1:2], tmp_path / "whole", *words[3:], "--rounds", 2)
    one, other = (PPOAgent.load(tmp_path / name / "agent" / "round-2") for name in ("run", "whole"))
    for left, right in zip(one.network.parameters(), other.network.parameters(), strict=True):
        assert torch.equal(left, right)
    assert [each.name for each in (tmp_path / "run" / "agent").iterdir()] == ["round-2"]


def test_controllers_are_judged_on_the_same_cases(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("fit", "--gains", folder, "--out", tmp_path / "fitted", "--epochs", 1)
    words = ("judge", "--out", tmp_path / "judged", "--worlds", 1, "--cases", 2, "--longest", 14,
             "--rows", 8)  # fmt: skip
    run(*words, "periodic", f"one={tmp_path / 'fitted' / 'best'}")
    lines = (tmp_path / "judged" / "validation-000.jsonl").read_text().splitlines()[1:]
    found = [json.loads(line) for line in lines]
    assert {each["controller"] for each in found} == {"periodic", "one"}
    assert len({(each["seed"], each["control"]) for each in found}) == 2
    (told,) = map(json.loads, (tmp_path / "judged" / judging.TOOK).read_text().splitlines())
    assert (told["group"], told["world"]) == ("validation", 0)
    assert told["seconds"] > 0
    assert "periodic" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [8, 128])
def test_who_never_grows_ends_as_the_control_however_many_play_beside_it(
    rows: int, tmp_path: Path
) -> None:
    whole = judging.world_of("validation", 0, 0, 12)
    alone = Episodes(whole.contexts, 4, **whole.how).population.backend
    beside = judging.computed_alike(whole, rows, "cpu")["config"].backend
    assert alone == "fused"  # as a few rows are computed
    many = Episodes(whole.contexts, 80, **whole.how).population.backend
    assert beside == ("auto" if rows == 8 else many)
    words = ("judge", "--out", tmp_path, "--worlds", 1, "--longest", 12, "--rows", rows)
    run(*words, "never", "--cases", 40 if rows > 40 else 4)
    run(*words, "gap:least_loss=1000", "--cases", 4)  # a few rows alone, that wait as well
    nets = judging.read_judged(tmp_path, "validation")
    assert {net.points for net in nets} == {0.0}
    assert {net.controller for net in nets} == {"never", "gap:least_loss=1000.0"}


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_held_out_is_not_looked_at_by_accident(group: str, tmp_path: Path) -> None:
    words = ("judge", "periodic", "--out", tmp_path / "judged", "--group", "validation", group)
    with pytest.raises(SystemExit, match="held out"):
        run(*words)
    assert not (tmp_path / "judged").exists()


def test_worlds_of_several_groups_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = list[str]()

    def note(options: object, world: judging.World, until: float) -> list[object]:
        played.append(world.file)
        return []

    monkeypatch.setattr(judging, "_judged", note)
    words = ("judge", "never", "--out", tmp_path, "--worlds", 1, "--group", "validation", "garden",
             "training", "--of", 3)  # fmt: skip
    for place in range(3):
        run(*words, "--place", place)
    assert played == ["validation-000.jsonl", "garden-000.jsonl", "training-000.jsonl"]


def test_dropping_makes_a_share_of_numbers_zero_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    tokens = torch.ones(301, 1007, dtype=torch.float64)
    tokens[0] = 0.0  # padding
    found = dropped(tokens, 0.05)
    rows = found[1:]
    few = round(0.05 * 256) / 256
    assert (rows == 0).double().mean().item() == pytest.approx(few, abs=0.002)
    torch.testing.assert_close(rows[rows != 0], torch.full_like(rows[rows != 0], 1 / (1 - few)))
    assert rows.mean().item() == pytest.approx(1.0, abs=0.002)
    assert not found[0].any()
    again = dropped(tokens, 0.05)
    assert (again[1:] != rows).any()
    torch.testing.assert_close(dropped(tokens, 0.0), tokens)
