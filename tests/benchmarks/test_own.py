"""Controllers on users' tasks: trained once each, known by what they are."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from esper.tamiyo import TokenActorCritic
from esper.tamiyo.controllers.learned import save_controller

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a task for development in place of those that are held out."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "own", raising=False)  # a user's file of another test
    import growing_jobs
    import growing_tasks
    import own

    monkeypatch.setattr(growing_jobs, "RATES", (1e-3,))
    monkeypatch.setattr(own, "NAMED", {"small": growing_tasks.TASKS["mnist1d_mlp"]})
    monkeypatch.setattr(own, "processes", ThreadPoolExecutor)
    return own


@pytest.mark.slow
def test_every_controller_is_trained_once_and_known_by_what_it_is(
    own: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    network = TokenActorCritic()
    save_controller(network, tmp_path / "kept", None, {})
    who = ["periodic@*/cheapest:every=2,seeds=1", f"mine={tmp_path / 'kept'}"]
    words = ["own.py", "--runs", str(tmp_path / "runs"), "--quick", "--final", "--controllers"]
    monkeypatch.setattr("sys.argv", [*words, who[0]])
    own.main()
    monkeypatch.setattr("sys.argv", [*words, *who])
    own.main()
    assert "1 jobs done, 0 of them failed, 0 can be done next" in capsys.readouterr().out
    named = json.loads((tmp_path / "runs" / "controllers.json").read_text())
    assert list(named.values()) == [who[0], "mine"]
    files = {path.name for path in (tmp_path / "runs" / "small").iterdir()}
    assert files == {"tune-100-0.json", "never-20-0.json",
                     *(f"variant-20-{number}.json" for number in named)}  # fmt: skip
    found = json.loads(
        (tmp_path / "runs" / "small" / f"variant-20-{next(iter(named))}.json").read_text()
    )
    assert len(found["grown"]) <= 1
    assert json.loads((tmp_path / "runs" / "whole.json").read_text()) == [who[0], "mine"]
    network.bias_action_logit("op", 1, 1.0)
    save_controller(network, tmp_path / "kept", None, {})
    assert str(own.number_of(who[1])) not in named  # another controller under the same name


def test_held_out_tasks_are_not_trained_by_accident(
    own: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["own.py", "--runs", str(tmp_path), "--quick"])
    with pytest.raises(SystemExit):
        own.main()
    assert not list(tmp_path.iterdir())
