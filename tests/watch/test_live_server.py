"""Who is answered, with what; and that those who mean no good get nothing."""

import asyncio
import json
import os
import socket
import sqlite3
from collections.abc import Iterator, MutableMapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.requests import Request

from esper.nissa import RunStarted, RunStore, Stepped, UpdateMetrics
from esper.watch.found_runs import FoundRun
from esper.watch.live_server import Site
from esper.watch.views import Answers
from tests.nissa.runs import LAYOUT
from tests.watch.served import CONFIG, Served, served, whole

HOSTILE = "<script>document.title='hacked'<"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    whole(folder / "first")
    whole(folder / HOSTILE, rounds=1, state="")
    (folder / "secret.txt").write_text("nobody may read this")
    (folder / "broken").mkdir()
    (folder / "broken" / "events.sqlite").write_bytes(b"SQLite format 3\0" + os.urandom(4000))
    (folder / "other.sqlite").write_bytes(b"")
    outside = tmp_path_factory.mktemp("outside")
    whole(outside / "private", rounds=1)
    (folder / "way-out").symlink_to(outside, target_is_directory=True)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[Served]:
    with served(folder) as page:
        yield page


def test_all_runs_below_the_folder_are_listed_and_none_that_a_link_leads_to(page: Served) -> None:
    found = {run["run"]: run["state"] for run in page.ask("summary")}
    assert found == {"first": "finished", HOSTILE: "running", "broken": "unreadable"}


def test_a_view_holds_what_the_run_holds(page: Served) -> None:
    found = page.ask("training", run="first")
    columns = found["evaluations"]["columns"]
    scores = [dict(zip(columns, row, strict=True)) for row in found["evaluations"]["rows"]]
    assert [row["score"] for row in scores if row["controller"] == "tamiyo"] == [0.1, 0.2, 0.3]
    assert found["config"]["suite"] == "garden_mlp"
    hosts = page.ask("environments", run="first", round=2)
    columns, rows = hosts["steps"]["columns"], hosts["steps"]["rows"]
    for env, row in enumerate(rows):
        own = dict(zip(columns, row, strict=True))
        curve = [40.0 + env + step for step in range(10)]
        assert (own["env"], own["last"], json.loads(own["curve"])) == (env, 9, curve)
    assert len(rows) == 6
    episode = page.ask("episode", run="first", round=2, env=4)
    assert episode["failed"]["rows"][0][1] == "loss is NaN"


def test_environments_can_be_asked_for_before_anything_was_measured(tmp_path: Path) -> None:
    with RunStore(tmp_path, LAYOUT) as store:
        store.write([RunStarted(round=0, config=CONFIG)])
        run = FoundRun("begun", store.path)
        for more, rows in (([], 0), ([Stepped(round=1, step=0, rewards=[1.0, 2.0])], 2)):
            store.write(more)
            run.look(1)
            text, _ = Answers().ask("environments", run, {})
            found = json.loads(text)["steps"]
            assert len(found["rows"]) == rows
            assert all(row[found["columns"].index("curve")] == "[null]" for row in found["rows"])


def test_only_those_with_the_token_are_answered(page: Served) -> None:
    for path in ("/", "/ask?view=summary", "/words", "/app.js", "/nothing"):
        assert page.get(path, own=False).status == 403
    guesses = [page.token[:-1], page.token + "x", "", page.token.swapcase()]
    assert {page.get(f"/?token={guess}", own=False).status for guess in guesses} == {403}
    opened = page.get(f"/?token={page.token}", own=False)
    assert (opened.status, opened.headers["location"]) == (303, "/")
    cookie = opened.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert page.get("/", own=False, Cookie=cookie.partition(";")[0]).status == 200
    name = cookie.partition("=")[0]
    assert page.get("/", own=False, Cookie=f"{name}=guess").status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Host": "evil.example@127.0.0.1:80"},
        {"Host": "["},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ],
    ids=str,
)
def test_other_names_and_other_pages_are_refused_even_with_the_token(
    page: Served, headers: dict[str, str]
) -> None:
    assert page.get("/ask?view=summary", **headers).status in (400, 403)


@pytest.mark.parametrize("name", ["localhost:9999", "127.0.0.1", "[::1]:8642"])
def test_names_of_this_machine_are_answered_on_any_port_as_behind_a_tunnel(
    page: Served, name: str
) -> None:
    assert page.get("/ask?view=summary", Host=name, Origin=f"http://{name}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_nothing_but_get_is_answered(page: Served, method: str) -> None:
    assert page.get("/ask?view=summary", method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/secret.txt",
        "/vendor/../../found_runs.py",
        "//etc/passwd",
        "/page/%2e%2e/views.py",
        "/ask?view=../secret.txt",
        f"/ask?view=training&run={quote('../outside/private', safe='')}",
        "/ask?view=training&run=way-out/private",
        "/ask?view=episode&run=first&round=1&env=0%20OR%201=1",
        "/ask?view=episode&run=first&round=1",
        "/ask?view=episode&run=first&round=-1&env=0",
        "/ask?view=summary&sql=select%201",
        "/ask?view=decision&run=first&round=1&env=0&step=1&step2=1",
    ],
)
def test_nothing_else_can_be_asked_for(page: Served, path: str) -> None:
    answer = page.get(path)
    assert answer.status in (400, 404), answer.body
    assert b"nobody" not in answer.body
    assert len(answer.body) < 400


def test_numbers_of_any_size_find_nothing_and_do_no_harm(page: Served) -> None:
    found = page.ask("episode", run="first", round="9" * 400, env="9" * 400)
    assert found["steps"]["rows"] == []


def test_a_request_that_is_too_long_is_refused(page: Served) -> None:
    assert page.get(f"/ask?view={'x' * 100_000}").status >= 400
    assert page.get("/ask?view=summary").status == 200


def test_every_answer_forbids_what_the_page_does_not_need(page: Served) -> None:
    for path in ("/", "/ask?view=summary", "/none"):
        headers = page.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_page_names_no_other_machine() -> None:
    files = Path(__file__).parents[2] / "src" / "esper" / "watch" / "page"
    own = [file for file in files.iterdir() if file.is_file()]
    assert {"index.html", "app.js", "style.css"} <= {file.name for file in own}
    for file in own:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, file
        assert "https:" not in text, file
        assert "dangerouslySetInnerHTML" not in text, file
        assert "innerHTML" not in text, file


def damaged(folder: Path) -> None:
    """Runs that are wrong in one way each."""
    wrongs = {
        "no-table": "DROP TABLE anomalies",
        "no-events": "DROP TABLE events",
        "another-version": "PRAGMA user_version = 99",
        "foreign": "PRAGMA application_id = 1",
        "no-settings": "UPDATE runs SET config = '[]'",
        "strange-model": """UPDATE runs SET config = '{"metric": 1, "model": "?"}'""",
        "no-json": "UPDATE runs SET config = '{'",
        "text-for-numbers": "UPDATE evaluations SET score = 'x'",
        "not-finite": "UPDATE episodes SET returns = 9e999",
    }
    for name, statement in wrongs.items():
        with closing(sqlite3.connect(whole(folder / name, rounds=1) / "events.sqlite")) as store:
            store.execute(statement)
            store.commit()
    cut = whole(folder / "cut-off", rounds=1) / "events.sqlite"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    (folder / "empty").mkdir()
    (folder / "empty" / "events.sqlite").touch()
    os.mkfifo(folder / "empty" / "lock")


def test_damaged_runs_are_named_and_hide_no_other(tmp_path: Path) -> None:
    damaged(tmp_path)
    whole(tmp_path / "sound", rounds=1)
    with served(tmp_path) as page:
        found = {run["run"]: run for run in page.ask("summary")}
        assert found.keys() == {path.name for path in tmp_path.iterdir()}
        states = {name: run["state"] for name, run in found.items()}
        assert states.pop("sound") == "finished"
        fine = {"no-settings", "text-for-numbers", "not-finite"}
        assert {name for name, state in states.items() if state != "unreadable"} == fine
        for name, run in found.items():
            assert run["state"] != "unreadable" or run["why"], name
            for view in ("training", "growth", "environments"):
                assert page.ask(view, run=name)["run"] == name
        assert page.ask("environments", run="sound")["steps"]["rows"]


def test_a_browser_that_never_reads_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.watch.live_server.READING_SECONDS", 0.05)
    scope = {"type": "http", "method": "GET", "path": "/words", "headers": [], "query_string": b""}
    said: list[str] = []

    async def hear() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def take(message: MutableMapping[str, Any]) -> None:
        said.append(message["type"])
        if len(said) > 1:
            await asyncio.sleep(60)  # its buffers are full

    async def listen() -> int:
        site = Site([tmp_path])
        stream = await site.words(Request(scope, hear))
        await asyncio.wait_for(stream(scope, hear, take), 10)
        return site.streams

    assert asyncio.run(listen()) == 0
    assert said == ["http.response.start", "http.response.body"]


def test_more_pages_than_there_is_room_for_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.watch.live_server.MOST_STREAMS", 0)
    with served(tmp_path) as page:
        assert page.get("/words").status == 503


def test_answers_that_are_kept_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.watch.views.KEPT_ANSWERS", 3)
    run, answers = FoundRun("first", folder / "first" / "events.sqlite"), Answers()
    run.look(1)
    texts = [answers.ask("episode", run, {"round": 1, "env": env})[0] for env in range(6)]
    assert len(set(texts)) == 6
    opened = []
    monkeypatch.setattr("esper.watch.views.RunReader", lambda file: opened.append(file))
    assert answers.ask("episode", run, {"round": 1, "env": 5}) == (texts[5], True)
    assert not opened, "it is still there"
    forgotten, _ = answers.ask("episode", run, {"round": 1, "env": 2})
    assert opened, "it has to be read again"
    assert json.loads(forgotten)["state"] == "unreadable"


def test_curves_have_as_many_points_as_can_be_seen_however_long_a_run_is(tmp_path: Path) -> None:
    tmp_path.joinpath("long").mkdir()
    store = RunStore(tmp_path / "long", LAYOUT)
    numbers = [UpdateMetrics(round=n, metrics={"kl": float(n)}) for n in range(1, 3001)]
    store.write([RunStarted(round=0, config=CONFIG), *numbers])
    store.close()
    with served(tmp_path) as page:
        found = page.ask("training", run="long")
        rows = [row for row in found["health"]["rows"] if row[0] == "kl"]
        assert found["wide"] == 11
        assert len(rows) == 273
        assert rows[1] == ["kl", 11, 16.0, 11.0, 21.0], "its mean, its lowest and its highest value"


def test_words_go_on_where_a_browser_was(page: Served) -> None:
    def first_word(**headers: str) -> tuple[str, dict[str, object]]:
        with socket.create_connection((page.host, page.port), timeout=20) as line:
            told = {"Host": "localhost", "Authorization": f"Bearer {page.token}", **headers}
            lines = [f"{name}: {value}" for name, value in told.items()]
            line.sendall("\r\n".join(["GET /words HTTP/1.1", *lines, "", ""]).encode())
            text = ""
            while "data:" not in text or not text.endswith("\n\n\r\n"):
                text += line.recv(65536).decode()
        said = dict(part.split(": ", 1) for part in text.splitlines() if part[:3] in ("id:", "dat"))
        return said["id"], json.loads(said["data"])

    number, word = first_word()
    assert {run["run"] for run in word["runs"]} == {"first", HOSTILE, "broken"}
    again, nothing = first_word(**{"Last-Event-ID": number})
    assert (again, nothing["runs"]) == (number, [])
    _, anew = first_word(**{"Last-Event-ID": "another.7"})
    assert anew["runs"] == word["runs"]
