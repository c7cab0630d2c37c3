"""What a network goes through while it grows is in its telemetry: all of it, once, whatever ends
the run, and without holding it up."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import esper
from esper.api.ticking import NotFiniteError
from esper.leyline.errors import EsperError
from esper.nissa import Event, RunReader, RunStore
from esper.tamiyo.controllers import LearnedController
from esper.tamiyo.controllers.protocol import Thoughts
from esper.tamiyo.features import FeatureTable
from esper.tamiyo.network import FactoredRecurrentActorCritic
from tests import programs
from tests.api.tables import TRAIN, VAL, Script, mlp, wrapped

LIVES = {
    1: ("plant", "2", "mlp", "ramp"),
    2: ("plant", "5", "norm", "gate"),
    3: ("blend in", "2"),
    4: ("blend in", "5"),
    6: ("prune", "5"),
}
EPOCHS = 8
SETTINGS: dict[str, Any] = {
    "loss": "cross_entropy",
    "budget": esper.Budget("+500%", epochs=EPOCHS),
    "slots": ["2", "5"],
    "lr": 0.01,
    "batch_size": 16,
}


class Listener:
    """A sink that keeps what it hears."""

    name = "listener"

    def __init__(self, fails: bool = False) -> None:
        self.heard: list[Event] = []
        self.fails, self.closed = fails, 0

    def write(self, batch: Sequence[Event]) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.heard += batch

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.heard if event.kind == kind]


def grown(**options: Any) -> Any:
    return esper.grow(mlp(), TRAIN, VAL, **{"controller": Script(LIVES), **SETTINGS, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that was not interrupted, kept as it was after every epoch."""
    home = tmp_path_factory.mktemp("whole")

    def copy(record: dict[str, Any]) -> None:
        shutil.copytree(home / "run", home / str(record["epoch"]))
        with RunReader(home / "run") as reader:  # while it is written
            assert reader.last_commit() == record["epoch"]
            assert list(reader.each("epochs"))[-1]["score"] == record["score"]

    return grown(out=home / "run", on_epoch=copy, test=VAL)


def reading(run: Any) -> RunReader:
    return RunReader(run.folder.path)


def test_every_epoch_is_in_the_store_as_in_the_history(whole: Any) -> None:
    with reading(whole) as reader:
        before, *epochs = reader.each("epochs")
        contributions = list(reader.each("contributions"))
        asked = "SELECT round, sum(value) FROM samples WHERE name GLOB 'seconds_*' GROUP BY round"
        spent = dict(reader.query(asked).rows)
        alphas = reader.query("SELECT round, name, value FROM samples WHERE name GLOB 'alpha_*'")
        assert reader.last_commit() == EPOCHS
    assert (before["round"], before["score"]) == (0, whole.before["score"])
    assert before["train_loss"] is None
    for record, row, seconds in zip(whole.history, epochs, whole.seconds, strict=True):
        assert row["round"] == record["epoch"]
        for name in ("train_loss", "val_loss", "score", "committed", "added", "most_added"):
            assert row[name] == record[name]
        assert spent[row["round"]] == pytest.approx(sum(seconds.values()))
        mine = {each["slot"]: each["contribution"] for each in contributions
                if each["round"] == record["epoch"]}  # fmt: skip
        assert mine == record["contributions"]
        held = {f"alpha_{slot}": each["alpha"] for slot, each in record["slots"].items()}
        assert {name: at for number, name, at in alphas.rows if number == record["epoch"]} == held
    assert {each["blueprint"] for each in contributions} == {"mlp", "norm"}


def test_decisions_and_changes_are_told_by_name_with_their_reasons(whole: Any) -> None:
    with reading(whole) as reader:
        planted = reader.decisions(1)[0]
        (pruned,) = reader.decisions(6)
        assert reader.decisions(EPOCHS) == []  # the end decides nothing
        changes = [
            (row["round"], row["slot"], row["blueprint"], row["after"])
            for row in reader.query("SELECT * FROM lifecycle ORDER BY round, event, n")
        ]
        reasons = reader.query("SELECT reason FROM lifecycle WHERE after = 'GERMINATED'").rows
    wanted = {"op": "GERMINATE", "slot": "2", "blueprint": "mlp", "blend": "RAMP"}
    assert planted.actions == wanted
    assert planted.legal is not None
    assert set(planted.legal["op"]) == {"WAIT", "GERMINATE"}
    assert "mlp" in planted.legal["blueprint"]
    assert (planted.value, planted.probabilities) == (None, None)  # a script has neither
    assert str(planted) == "step 0: op GERMINATE, slot 2, blueprint mlp, blend RAMP"
    assert pruned.actions == {"op": "PRUNE", "slot": "5"}
    told = [
        (record["epoch"], change["slot"], change["after"])
        for record in whole.history
        for change in record["events"]
    ]
    assert [(epoch, slot, after) for epoch, slot, _, after in changes] == told
    assert {(slot, blueprint) for _, slot, blueprint, _ in changes} == {("2", "mlp"), ("5", "norm")}
    assert all("fit the budget" in reason for (reason,) in reasons)


def test_the_beginning_and_the_end_say_what_a_run_is(whole: Any) -> None:
    with reading(whole) as reader:
        (start,) = reader.runs()
        (end,) = reader.query("SELECT * FROM outcomes")
        assert not list(reader.each("notes"))
        assert reader.dropped() == {}
    assert start["config"]["lr"] == 0.01
    assert start["config"]["device"] == "cpu"
    assert start["data"] == json.loads(json.dumps(whole.settings.data))
    assert {"esper", "torch"} <= start["versions"].keys()
    wanted = {name: end[name] for name in ("loss", "score", "test_loss", "test_score")}
    assert wanted == whole.after
    assert end["added"] == whole.host.added


def test_how_it_ended_and_what_gates_kept_it_from_is_told(whole: Any) -> None:
    with reading(whole) as reader:
        ((state, text),) = reader.query("SELECT state, text FROM ends").rows
        refused = list(reader.each("refusals"))
        for row in refused:
            (decided,) = reader.decisions(row["round"])
            assert decided.actions.get("slot") != row["slot"] or decided.actions["op"] != row["op"]
    assert (state, text) == ("finished", "")
    assert {row["op"] for row in refused} == {"FOSSILIZE"}
    assert all("at least" in row["reason"] for row in refused), refused


def test_what_candidates_showed_is_told_as_the_history_has_it(tmp_path: Path) -> None:
    settings = SETTINGS | {"budget": esper.Budget("+500%", epochs=EPOCHS)}
    settings["controller"] = "audition:spend=9"
    run = esper.grow(mlp(), TRAIN, VAL, out=tmp_path / "run", **settings)
    with reading(run) as reader:
        told = [
            [row["round"], *(row[name] for name in ("slot", "blueprint", "gain", "error"))]
            for row in reader.each("auditions")
        ]
    heard = [
        [record["epoch"], each["slot"], each["blueprint"], each["gain"], each["error"]]
        for record in run.history
        for each in record.get("shadows", ())
    ]
    assert heard
    assert told == heard


def test_what_seeds_were_worth_is_what_was_measured(whole: Any) -> None:
    for seed in whole.seeds:
        for epoch, worth in seed.contributions.items():
            assert worth == whole.history[epoch - 1]["contributions"][seed.slot]


@pytest.mark.parametrize("epoch", [1, 3, 6])
def test_an_interrupted_run_has_every_epoch_once_to_the_bit(whole: Any, epoch: int) -> None:
    folder = whole.folder.path.parent / str(epoch)
    with RunStore(folder, read_layout(folder)) as store:  # what came after the checkpoint
        store.write(whole_events(whole, epoch + 1))
    esper.resume(folder, mlp(77), TRAIN, VAL, test=VAL, controller=Script(LIVES))
    with reading(whole) as one, RunReader(folder) as other:
        assert other.digest() == one.digest()
        assert [row["round"] for row in other.each("epochs")] == list(range(EPOCHS + 1))
        assert [start["round"] for start in other.runs()] == [0, epoch]


def read_layout(folder: Path) -> Any:
    with RunReader(folder) as reader:
        return reader.layout


def whole_events(run: Any, epoch: int) -> list[Event]:
    from esper.nissa import EpochEnded

    record = run.history[epoch - 1]
    return [EpochEnded(round=epoch, val_loss=9.0, score=record["score"])]


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import esper
from esper.api import GrownRun
from tests.api.tables import TRAIN, VAL, Script, mlp
from tests.api.test_grow_telemetry import LIVES, SETTINGS
keep = GrownRun.keep
def killed(run, scheduler, ready):  # after the telemetry's commit, before the checkpoint
    def then():
        ready()
        if len(run.history) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    keep(run, scheduler, then)
GrownRun.keep = killed
esper.grow(mlp(), TRAIN, VAL, controller=Script(LIVES), out=sys.argv[1], **SETTINGS)
"""


def test_a_killed_run_goes_on_without_a_gap_or_a_double(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = programs.run(KILLED, folder)
    assert ended.returncode == -9, ended.stderr
    with RunReader(folder) as reader:  # as the kill left it
        assert reader.last_commit() == 4
    esper.resume(folder, mlp(77), TRAIN, VAL, controller=Script(LIVES))
    never = grown(out=tmp_path / "never")
    with reading(never) as one, RunReader(folder) as other:
        assert other.digest() == one.digest()
        assert [start["round"] for start in other.runs()] == [0, 3]


def test_a_store_that_was_lost_is_written_anew_from_the_history(whole: Any) -> None:
    folder = whole.folder.path.parent / "5"
    (folder / "events.sqlite").unlink()
    for rest in folder.glob("events.sqlite-*"):
        rest.unlink()
    esper.resume(folder, mlp(77), TRAIN, VAL, test=VAL, controller=Script(LIVES))
    with reading(whole) as one, RunReader(folder) as other:
        for table in ("epochs", "contributions", "lifecycle"):
            mine, theirs = (list(reader.each(table)) for reader in (one, other))
            for row in (*mine, *theirs):
                del row["event"]
            assert mine == theirs


def test_a_store_that_cannot_be_opened_is_told_of_and_done_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events.sqlite").write_text("a file of somebody else's, longer than a header" * 9)
    run = grown(out=tmp_path)
    assert run.finished
    told = capfd.readouterr().err
    assert told.count("goes on without telemetry") == 1
    assert "events.sqlite" in told


def test_sinks_hear_of_a_run_without_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    listener, failing = Listener(), Listener(fails=True)
    run = grown(sinks=[failing, listener])
    assert run.finished
    assert listener.closed == failing.closed == 1
    assert [event.round for event in listener.of("epoch")] == list(range(EPOCHS + 1))
    (start,) = listener.of("run")
    assert start.layout.slots == ("2", "5")
    assert len(listener.of("outcome")) == 1
    told = capfd.readouterr().err
    assert told.count("'listener' failed and was dropped, training goes on") == 1
    (note,) = listener.of("note")
    assert "the disk is full" in note.text


def test_what_stops_a_run_is_told() -> None:
    listener = Listener()

    def stop(record: dict[str, Any]) -> None:
        if record["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grown(sinks=[listener], on_epoch=stop)
    (note,) = listener.of("note")
    assert note.text == "Stopped after epoch 2: KeyboardInterrupt"
    assert listener.closed == 1


def test_a_run_that_diverges_has_an_anomaly(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError):
        grown(out=tmp_path, controller="never", optimizer="SGD", lr=1e18)
    with RunReader(tmp_path) as reader:
        (anomaly,) = reader.each("anomalies")
        (note,) = reader.each("notes")
    assert anomaly["name"] == "not_a_number"
    assert "smaller learning rate" in anomaly["advice"]
    assert "Stopped after epoch" in note["text"]


class Confused(Script):
    def thoughts(self) -> Thoughts:
        raise RuntimeError("I do not know why")


def test_a_controller_that_cannot_explain_itself_does_not_stop_the_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    listener = Listener()
    assert grown(controller=Confused(LIVES), sinks=[listener]).finished
    assert capfd.readouterr().err.count("RuntimeError: I do not know why") == 1
    assert listener.closed == 1


class Inventive(Script):
    def thoughts(self) -> Thoughts:
        space = wrapped().space
        heads, most = len(space), max(space.sizes)
        masks = torch.ones(1, heads, most, dtype=torch.bool)
        chances = torch.full((1, heads, most), 0.5)
        return Thoughts(torch.zeros(1, 5), masks, chances, torch.ones(1), torch.zeros(1, heads))


def test_a_controller_may_look_at_features_of_its_own(tmp_path: Path) -> None:
    grown(out=tmp_path, controller=Inventive(LIVES))
    with RunReader(tmp_path) as reader:
        assert reader.last_commit() == EPOCHS
        (decision,) = reader.decisions(1)
    assert (decision.value, decision.observation) == (1.0, None)


def test_what_has_learned_tells_what_it_saw_and_how_sure_it_was(tmp_path: Path) -> None:
    catalogue = wrapped().catalogue
    space, size = wrapped().space, FeatureTable.of(catalogue).size
    torch.manual_seed(3)
    network = FactoredRecurrentActorCritic(space, state_dim=size, lstm_hidden_dim=8).eval()
    listener = Listener()
    controller = LearnedController(network, greedy=False)
    grown(out=tmp_path, controller=controller, sinks=[listener])
    with RunReader(tmp_path) as reader:
        decisions = [reader.decisions(epoch)[0] for epoch in range(1, EPOCHS)]
    (last,) = listener.of("decision")[-1:]
    thoughts = controller.thoughts()  # once more
    assert float(last.values[0]) == float(thoughts.values[0])
    for decision in decisions:
        assert decision.value is not None
        assert decision.observation is not None
        assert len(decision.observation) == size
        assert decision.probabilities is not None
        assert decision.legal is not None
        assert decision.log_probs is not None
        for head, action in decision.actions.items():
            chances = decision.probabilities[head]
            assert sum(chances.values()) == pytest.approx(1.0, abs=5e-3)
            assert {name for name, each in chances.items() if each > 0} <= {*decision.legal[head]}
            said = float(torch.tensor(decision.log_probs[head]).exp())
            assert said == pytest.approx(chances[action], abs=2e-3)


@pytest.mark.parametrize("sinks", [["wandbb"], [object()], [print]])
def test_what_is_no_sink_is_refused_before_anything_begins(sinks: Any) -> None:
    with pytest.raises(EsperError, match="mlflow"):
        grown(sinks=sinks)


def test_a_checkpoint_waits_for_a_disk_that_is_slow_to_take_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, behind = RunStore.commit, []

    def slowly(store: RunStore, epoch: int) -> None:
        time.sleep(0.2)
        commit(store, epoch)

    def look(record: dict[str, Any]) -> None:  # the checkpoint of this epoch counts by now
        with RunReader(tmp_path / "run") as reader:
            behind.append(record["epoch"] - (reader.last_commit() or 0))

    monkeypatch.setattr(RunStore, "commit", slowly)
    grown(out=tmp_path / "run", on_epoch=look, budget=esper.Budget("+500%", epochs=2))
    assert behind == [0, 0]
