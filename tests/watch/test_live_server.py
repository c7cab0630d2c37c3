"""Who is answered, with what; and that those who mean no good get nothing."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.watch.served import Served, served, whole

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
    assert {row[2] for row in hosts["steps"]["rows"]} == set(range(6))
    episode = page.ask("episode", run="first", round=2, env=4)
    assert episode["failed"]["rows"][0][1] == "loss is NaN"


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
