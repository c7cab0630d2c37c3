"""The server of the live page: files of the page, answers about runs, and word of what is new.

It can change nothing: there is no other method than GET, files are those of the package, runs are
those that were found, questions are those of `questions.toml`. It listens on this machine alone,
and answers only who has the token of its address, asks by a name of this machine, and does not come
from another page.

Word of what is new says which runs have events of which kinds since the last word, with a number
that a browser gives back when it comes again; whoever is slow gets one word for many, so nothing
waits in memory for anybody.
"""

import asyncio
import hmac
import json
import mimetypes
import os
import secrets
import socket
import sys
import time
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from esper.leyline.errors import EsperError
from esper.simic.training.run_processes import exit_with_parent
from esper.watch.found_runs import Lookout
from esper.watch.views import QUESTIONS, Answers, numbers_of

ADDRESS, PORT = "127.0.0.1", 8642
OWN_NAMES = {"127.0.0.1", "localhost", "::1"}
POLL_SECONDS = 0.1  # between looks, while somebody watches
WORD_SECONDS = 10.0  # between words, though nothing is new
READING_SECONDS = 20.0  # that a browser may take to read one
MOST_STREAMS, MOST_REQUESTS = 128, 256  # at once
NICENESS = 5  # where cores are short, the run that is watched comes first
LONGEST_REQUEST = 16 << 10  # bytes before its end
FILES = Path(__file__).with_name("page")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


class Guard:
    """Refuses whoever may not ask, before anything else looks at it."""

    def __init__(self, inner: Callable[..., Awaitable[None]], token: str, cookie: str) -> None:
        self.inner, self.token, self.cookie = inner, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        answer = self.refusal(Request(scope)) or self.inner
        await answer(scope, receive, guarded)

    def refusal(self, request: Request) -> Response | None:
        """Why it is refused, or None."""
        if request.method != "GET":
            return _said("Only GET is answered.", 405)
        headers = request.headers
        origins = [f"//{headers.get('host', '')}", *headers.getlist("origin")]
        if not all(_name(origin) in OWN_NAMES for origin in origins):
            return _said("Ask by a name of this machine: localhost or 127.0.0.1.", 403)
        moving = headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not moving:
            return _said("Another page may not ask.", 403)
        given = request.query_params.get("token")
        if given is not None and request.url.path == "/" and self._is_token(given):
            found = RedirectResponse("/", 303)
            found.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return found
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(request.cookies.get(self.cookie, "")) or self._is_token(bearer):
            return None
        return _said("Open the whole address that esper watch printed, with its token.", 403)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.token.encode())


def _name(origin: str) -> str:
    """The host in an address, without its port: behind a tunnel that is another one."""
    try:
        return "" if "@" in origin else urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _said(text: str, status: int) -> Response:
    return Response(text + "\n", status, media_type="text/plain")


def _file(file: Path) -> Callable[[Request], Response]:
    content, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0]
    return lambda request: Response(content, media_type=kind)


class Site:
    """What is asked of the server."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.lookout, self.answers = Lookout(roots), Answers()
        self.boot = secrets.token_hex(4)  # numbers of words are this server's own
        self.streams, self._looked = 0, 0.0

    def routes(self) -> list[Route]:
        files = {file.relative_to(FILES).as_posix(): file for file in FILES.rglob("*.*")}
        files[""] = files["index.html"]
        pages = [Route(f"/{path}", _file(file)) for path, file in files.items()]
        return [*pages, Route("/words", self.words), Route("/ask", self.ask)]

    def ask(self, request: Request) -> Response:
        """`/ask?view=training&run=NAME&round=3`; without a run, of all of them."""
        given = dict(request.query_params)
        name, wanted = given.get("view", ""), given.get("run")
        if name not in QUESTIONS:
            return _said(f"There is no such view; there are {', '.join(QUESTIONS)}.", 404)
        if not self.streams or wanted not in (None, *self.lookout.runs):
            self.lookout.look()
        runs = self.lookout.runs
        if wanted not in (None, *runs):
            return _said("There is no such run.", 404)
        try:
            numbers = numbers_of(name, given)
        except EsperError as error:
            return _said(str(error), 400)
        chosen = runs.values() if wanted is None else [runs[wanted]]
        found = [self.answers.ask(name, run, numbers) for run in chosen]
        text = b",".join(text for text, _ in found)
        late = {} if all(new for _, new in found) else {"Retry-After": "1"}
        text = b"[" + text + b"]" if wanted is None else text
        return Response(text, headers=late, media_type="application/json")

    async def words(self, request: Request) -> Any:
        """Word of what is new, as it comes; goes on after the one that a browser has heard last."""
        if self.streams >= MOST_STREAMS:
            return _said("Too many pages are open.", 503)
        boot, _, number = request.headers.get("last-event-id", "").partition(".")
        known = boot == self.boot and number.isdecimal() and len(number) < 12
        heard = int(number) if known else 0

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self.streams += 1
            try:
                await self._speak(heard, request, send)
            except (TimeoutError, OSError):
                return  # it did not read, and may come again
            finally:
                self.streams -= 1

        return stream

    async def _speak(self, heard: int, request: Request, send: Send) -> None:
        spoke = -WORD_SECONDS
        while not await request.is_disconnected():
            if time.monotonic() - self._looked >= POLL_SECONDS:  # once for all who listen
                self._looked = time.monotonic()
                await asyncio.to_thread(self.lookout.look)
            looks = self.lookout.looks
            if looks > heard or time.monotonic() - spoke >= WORD_SECONDS:
                said = {"runs": self.lookout.since(heard), "names": [*self.lookout.runs]}
                word = f"id: {self.boot}.{looks}\nretry: 1000\ndata: {json.dumps(said)}\n\n"
                body = {"type": "http.response.body", "body": word.encode(), "more_body": True}
                await asyncio.wait_for(send(body), READING_SECONDS)
                heard, spoke = looks, time.monotonic()
            await asyncio.sleep(POLL_SECONDS)


def server_of(roots: Sequence[Path], listener: socket.socket) -> tuple[uvicorn.Server, str]:
    """A server that is to be run with this socket, and the address to open."""
    token, port = secrets.token_urlsafe(24), listener.getsockname()[1]
    cookie = f"esper_{secrets.token_hex(4)}"  # ports are not told apart by browsers
    guarded = Guard(Starlette(routes=Site(roots).routes()), token, cookie)
    how: dict[str, Any] = {"log_level": "critical", "access_log": False, "server_header": False}
    how |= {"limit_concurrency": MOST_REQUESTS, "h11_max_incomplete_event_size": LONGEST_REQUEST}
    how |= {"http": "h11", "ws": "none", "lifespan": "off", "timeout_graceful_shutdown": 1}
    return uvicorn.Server(uvicorn.Config(guarded, **how)), f"http://{ADDRESS}:{port}/?token={token}"


def serve(roots: Sequence[Path], *, port: int | None = None, open_: bool = False) -> None:
    """Serve the page until Ctrl-C; says where it is."""
    listener = listening(port)
    server, address = server_of(roots, listener)
    print(f"Watch {', '.join(map(str, roots))} in a browser: {address}", flush=True)
    if open_:
        webbrowser.open(address)
    os.nice(NICENESS)
    with suppress(AttributeError, OSError):  # Linux: who wakes does not interrupt who computes
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    server.run(sockets=[listener])


def listening(port: int | None) -> socket.socket:
    """Where it listens; without a wish the usual port, or a free one if that is taken."""
    for wish in (PORT, 0) if port is None else (port,):
        with suppress(OSError, OverflowError):
            return socket.create_server((ADDRESS, wish))
    raise EsperError(f"Port {port} cannot be listened on", fix="name another, or none")


if __name__ == "__main__":  # beside a run: shows its folders for as long as its process lives
    exit_with_parent(int(sys.argv[1]))
    serve([Path(folder) for folder in sys.argv[2:]])
