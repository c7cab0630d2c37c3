"""Whether to plant now or later: moments of hosts that listen, and what waiting is worth then."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.garden import LAYOUT, Greenhouse
from esper.garden.plots import Bed
from esper.leyline import LifecycleOp
from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import save_controller
from esper.tamiyo.token_layout import WHOLE_TOKEN
from studies import greenhouse_gains, waiting
from studies.greenhouse import parsed
from studies.greenhouse_gains import Gains
from studies.listening import EPOCHS, Moments
from studies.preferences import Preferences
from studies.waiting import Worth, planted_worth, waited, waits_known, worth_of_waiting

MADE = ("--cases", 2, "--longest", 16, "--seed", 8)


@pytest.fixture(autouse=True, scope="module")
def _small() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.garden.episodes.GARDEN_BATCHES", 2)
        patch.setattr(greenhouse_gains, "PLOTS_OF_PART", 1)
        yield


def run(*words: object) -> None:
    options = parsed([str(word) for word in words])
    options.work(options)


def planter() -> TokenActorCritic:
    """Plants whenever it may."""
    network = TokenActorCritic(LAYOUT)
    network.bias_action_logit("op", LifecycleOp.GERMINATE, 20.0)
    return network


# --- moments ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moments")
    run("listen", "--out", out, "--plots", 3, *MADE)
    return out


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of gains of two plots, each in its own part."""
    out = tmp_path_factory.mktemp("gains")
    run("collect", "--out", out, "--plots", 2, *MADE)
    return out


def test_moments_of_a_case_follow_each_other(folder: Path) -> None:
    moments = Moments.load([folder])
    whole = LAYOUT.split(moments.observations)[0]
    column = lambda name: whole[:, WHOLE_TOKEN.names.index(name)]  # noqa: E731
    epochs = (column("epoch") * 10 ** (3 * column("horizon"))).round()
    later = moments.after >= 0
    assert int((~later).sum()) == 3 * 2  # one of every case is the last
    assert bool((epochs[moments.after[later]] > epochs[later]).all())
    assert torch.equal(moments.plot[moments.after[later]], moments.plot[later])
    assert len(moments.after[later].unique()) == int(later.sum())
    assert set(epochs.tolist()) <= set(EPOCHS)
    left = (column("remaining") * 10 ** (3 * column("horizon"))).round()
    assert float(left.min()) >= greenhouse_gains.LEAST_LEFT  # later ones are not asked for
    assert float(column("added_params").abs().max()) == 0.0
    assert set(moments.seed.tolist()) == {8}


def test_packed_moments_are_those_that_were_heard(folder: Path, tmp_path: Path) -> None:
    run("pack", "--gains", folder, "--out", tmp_path / "moments.npz.xz")
    for one, other in zip(Moments.load([folder]), Moments.load([tmp_path / "moments.npz.xz"]),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)
    twice = Moments.load([folder, tmp_path / "moments.npz.xz"])
    count = len(twice.after) // 2
    known = twice.after[:count] >= 0
    assert torch.equal(twice.after[count:][known], twice.after[:count][known] + count)


# --- what waiting is worth --------------------------------------------------------------------


@given(data=st.data(), cases=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_who_waits_gets_what_is_planted_next(data: st.DataObject, cases: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, len(EPOCHS)), min_size=cases, max_size=cases))
    count = sum(lengths)
    order = data.draw(st.permutations(range(count)))
    after, stops = torch.full((count,), -1), torch.zeros(count, dtype=torch.bool)
    worth, walks, places = torch.zeros(count), list[list[int]](), list(order)
    for length in lengths:
        walk, places = places[:length], places[length:]
        for one, following in pairwise(walk):
            after[one] = following
        walks.append(walk)
    for place in range(count):
        stops[place], worth[place] = data.draw(st.booleans()), data.draw(st.integers(-9, 9))
    found = waited(after, stops, worth)
    for walk in walks:
        for number, place in enumerate(walk):
            expected = next((worth[each] for each in walk[number + 1 :] if stops[each]), 0.0)
            assert float(found[place]) == float(expected)


def listened(*series: torch.Tensor) -> tuple[Moments, torch.Tensor]:
    """Cases [C] that go through so many moments, alike but for the time and for what their first
    worth is; with what planting is worth at each."""
    bed = Bed(Greenhouse(8, longest=14).plot(0), players=1)
    cases, turns = len(series[0]), len(series)
    seen = bed.observations[:1].repeat(cases * turns, 1)
    whole = LAYOUT.split(seen)[0]  # a view
    turn = torch.arange(turns).repeat_interleave(cases)
    whole[:, WHOLE_TOKEN.names.index("epoch")] = turn / turns
    whole[:, WHOLE_TOKEN.names.index("train_loss")] = series[0].repeat(turns)
    after = torch.where(turn < turns - 1, torch.arange(len(seen)) + cases, -1)
    return Moments(seen, after, turn, turn), torch.cat(series)


@pytest.fixture
def _thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "EPOCHS_OF_ROUND", 25)
    monkeypatch.setattr(waiting, "ROUNDS", 3)


def quiet(_: str) -> None:
    """Nobody has to read it."""


@pytest.mark.usefixtures("_thorough")
def test_waiting_is_worth_the_best_that_comes_not_the_first_that_is_good() -> None:
    # First half the cases promise something and are worth a little now, then 0.2, and 1 in the
    # end; the others end in a loss, which nobody has to take.
    promising = (torch.arange(64) % 2).float()
    moments, worth = listened(promising, torch.full((64,), 0.2), 2.0 * promising - 1.0)
    found = worth_of_waiting(moments, (worth, worth), quiet).of(moments.observations)
    first, second, last = found.split(64)
    assert float((first - torch.where(promising > 0, 1.0, 0.2)).abs().mean()) < 0.15
    assert float((second - promising).abs().mean()) < 0.15
    assert float(last.abs().mean()) < 0.15


@pytest.mark.usefixtures("_thorough")
def test_chance_is_no_reason_to_wait() -> None:
    chance = torch.Generator().manual_seed(3)
    drawn = torch.randn(2, 128 * 4, generator=chance)
    moments, _ = listened(*torch.zeros(4, 128))
    found = worth_of_waiting(moments, (drawn[0], drawn[1]), quiet).of(moments.observations)
    assert float(found[:128].mean()) < 0.2
    same = worth_of_waiting(moments, (drawn[0], drawn[0]), quiet).of(moments.observations)
    assert float(same[:128].mean()) > 0.4  # it would be, if one estimate said both


def test_moments_after_one_that_is_left_out_are_no_longer_reached() -> None:
    moments, _ = listened(*torch.zeros(3, 2))
    kept = torch.tensor([True, True, True, False, True, True])
    some = moments.among(kept)
    assert some.after.tolist() == [2, -1, 3, -1, -1]
    assert torch.equal(some.observations, moments.observations[kept])


def test_what_waiting_is_worth_stands_where_a_fit_looks_for_it(
    collected: Path, tmp_path: Path
) -> None:
    data = Gains.load([collected])
    estimate = Worth(5, "cpu")
    with torch.no_grad():
        estimate.mean.value_head[-1].bias += 0.5  # type: ignore[index,operator]
    card = {"harm": 3.0, "unit": 10.0, "ablation": None}
    save_controller(estimate.mean, tmp_path / "kept", None, card)
    words = ["fit", "--gains", str(collected), "--out", str(tmp_path / "fit")]
    words += ["--waiting", str(tmp_path / "kept"), "--unit", "10"]
    with pytest.raises(SystemExit, match=r"'harm': 4\.0"):
        run(*words, "--harm", 4)
    with pytest.raises(SystemExit, match="asked for"):
        run(*words, "--harm", 3, "--ablation", "shadows")
    measured = data.first & (torch.arange(len(data.first)) % 3 == 0)
    seen = data._replace(waits=measured)
    found = waits_known(seen, parsed([*words, "--harm", "3"]))
    assert torch.equal(found.gains[measured, 0], data.gains[measured, 0])
    found = waits_known(data, parsed([*words, "--harm", "3"]))
    told = 10.0 * estimate.of(data.observations).clamp(min=0.0)
    assert torch.allclose(found.gains[data.first, 0], told[data.first])
    assert float(told.max()) > 0.0
    assert torch.equal(found.gains[~data.first, 0], data.gains[~data.first, 0])
    assert torch.equal(found.gains[:, 1:].nan_to_num(-1e3), data.gains[:, 1:].nan_to_num(-1e3))
    run(*words, "--harm", 3, "--epochs", 1)
    assert (tmp_path / "fit" / "best").is_dir()
    without = [word for word in words if "kept" not in word and word != "--waiting"]
    with pytest.raises(SystemExit, match="was fitted with"):  # a fit goes on as it began
        run(*without, "--harm", 3, "--epochs", 2)


def test_the_whole_way_from_gains_to_what_waiting_is_worth(
    folder: Path, collected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_controller(planter(), tmp_path / "fit", None, {})
    run("waiting", "--gains", collected, "--moments", folder, "--fitted",
        tmp_path / "fit", "--harm", 3, "--out", tmp_path / "kept")  # fmt: skip
    assert "turn 5: waiting is worth" in capsys.readouterr().out
    run("fit", "--gains", collected, "--out", tmp_path / "again", "--harm", 3,
        "--waiting", tmp_path / "kept", "--epochs", 1)  # fmt: skip


def test_of_what_was_tried_that_counts_which_would_be_planted(collected: Path) -> None:
    data = Gains.load([collected])
    network = planter()
    with torch.no_grad():  # it has likings, and no memory
        for each in network.memory_proj.parameters():
            each.zero_()
        for head in (network.heads["blueprint"], network.heads["blend"]):
            head[-1].weight.normal_(generator=torch.Generator().manual_seed(3))  # type: ignore[index]
        preferred = Preferences.of(network(data.observations, None).logits, data)
    worth, near = planted_worth(network, data, 0.0, 12.0)
    for place, gains in enumerate(data.gains[:, 1:]):
        tried = [(float(score), float(each), float(close)) for score, each, close
                 in zip(preferred.scores[place], gains, preferred.near[place], strict=True)
                 if not each.isnan()]  # fmt: skip
        _, gain, close = max(tried)
        assert float(worth[place]) == pytest.approx(max(-2.0, min(2.0, gain / 12.0)), abs=1e-6)
        assert float(near[place]) == pytest.approx(close, abs=1e-5)
    assert len({round(float(each), 4) for each in near}) > 1


def test_one_plot_is_too_few_to_tell_what_waiting_is_worth(
    folder: Path, collected: Path, tmp_path: Path
) -> None:
    (tmp_path / "gains").mkdir()
    shutil.copy(collected / "gains-000000.npz", tmp_path / "gains")
    shutil.copy(collected / "made.json", tmp_path / "gains")
    save_controller(planter(), tmp_path / "fit", None, {})
    with pytest.raises(SystemExit, match="one plot is too few"):
        run("waiting", "--gains", tmp_path / "gains", "--moments", folder, "--fitted",
            tmp_path / "fit", "--out", tmp_path / "kept")  # fmt: skip
