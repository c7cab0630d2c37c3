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
import secrets
import socket
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
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
from esper.simic.training.run_processes import follow
from esper.watch.found_runs import FoundRun, Lookout
from esper.watch.views import VIEWS, Answers, Numbers, QuestionError

ADDRESS, PORT = "127.0.0.1", 8642
OWN_NAMES = {"127.0.0.1", "localhost", "::1"}
POLL_SECONDS = 0.1  # between looks, while somebody watches
WORD_SECONDS = 10.0  # between words, though nothing is new
READING_SECONDS = 20.0  # that a browser may take to read one
MOST_STREAMS, MOST_REQUESTS = 128, 256  # at once
LONGEST_REQUEST = 16 << 10  # bytes before its end
FILES = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Refuses whoever may not ask, before anything else looks at it."""

    def __init__(self, inner: Callable[..., Awaitable[None]], token: str, cookie: str) -> None:
        self.inner, self.token, self.cookie = inner, token, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.inner(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), text.encode()) for name, text in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
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


def _said(text: str, status: int = 200) -> Response:
    return Response(text + "\n", status, media_type="text/plain")


class Words:
    """One browser's stream of words, each the last one's number and what is new since."""

    def __init__(self, site: "Site", since: int) -> None:
        self.site, self.since = site, since

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_hung_up(receive))
        try:
            async with self.site.watched():
                while not gone.done():
                    await asyncio.wait_for(self._say(send), READING_SECONDS)
                    await self.site.news(self.since, gone)
        except (TimeoutError, OSError):  # it does not read: let go of it, it may come again
            return
        finally:
            gone.cancel()

    async def _say(self, send: Send) -> None:
        looks = self.site.lookout.looks
        runs = self.site.lookout.since(self.since)
        text = json.dumps({"runs": runs, "names": [*self.site.lookout.runs]})
        word = f"id: {self.site.boot}.{looks}\nretry: 1000\ndata: {text}\n\n".encode()
        await send({"type": "http.response.body", "body": word, "more_body": True})
        self.since = looks


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Site:
    """What is asked of the server."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.lookout, self.answers = Lookout(roots), Answers()
        self.boot = secrets.token_hex(4)  # numbers of words are this server's own
        self.streams = 0
        self._moved = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        files = {
            f"/{file.relative_to(FILES).as_posix()}": file
            for file in FILES.rglob("*.*")
            if file.suffix in TYPES
        }
        files["/"] = files["/index.html"]
        pages = [Route(path, _file(file)) for path, file in files.items()]
        return [*pages, Route("/words", self.words), Route("/ask", self.ask)]

    def ask(self, request: Request) -> Response:
        """`/ask?view=training&run=NAME&round=3`; without a run, of all of them."""
        given = dict(request.query_params)
        view = VIEWS.get(given.get("view", ""))
        if view is None:
            return _said(f"There is no such view; there are {', '.join(VIEWS)}.", 404)
        if not self.streams or given.get("run") not in (None, *self.lookout.runs):
            self.lookout.look()
        try:
            numbers = view.numbers(given)
            runs = self.lookout.runs
            chosen = [run for run in list(runs.values()) if given.get("run") in (None, run.name)]
            if "run" in given and not chosen:
                return _said("There is no such run.", 404)
            found = [self._answer(given["view"], run, numbers) for run in chosen]
        except QuestionError as error:
            return _said(str(error), 400)
        text = b",".join(text for text, _ in found)
        late = {} if all(new for _, new in found) else {"Retry-After": "1"}
        text = text if "run" in given else b"[" + text + b"]"
        return Response(text, headers=late, media_type="application/json")

    def _answer(self, view: str, run: FoundRun, numbers: Numbers) -> tuple[bytes, bool]:
        """One that cannot be read says so, and hides no other."""
        try:
            return self.answers.ask(view, run, numbers)
        except (EsperError, OSError) as error:
            told = {**run.known(), "state": "unreadable", "why": str(error)}
            return json.dumps(told).encode(), True

    async def words(self, request: Request) -> Any:
        if self.streams >= MOST_STREAMS:
            return _said("Too many pages are open.", 503)
        boot, _, number = request.headers.get("last-event-id", "").partition(".")
        known = boot == self.boot and number.isdecimal() and len(number) < 12
        return Words(self, int(number) if known else 0)

    # --- looking, while somebody watches ---------------------------------------------------

    def watched(self) -> "Site":
        return self

    async def __aenter__(self) -> None:
        self.streams += 1
        if self._looking is None:
            await asyncio.to_thread(self.lookout.look)
            self._looking = self._looking or asyncio.create_task(self._look())

    async def __aexit__(self, *failure: object) -> None:
        self.streams -= 1
        if not self.streams and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if await asyncio.to_thread(self.lookout.look):
                async with self._moved:
                    self._moved.notify_all()

    async def news(self, since: int, gone: "asyncio.Task[None]") -> None:
        """Wait until there is something new, or for a while."""

        async def moved() -> None:
            async with self._moved:
                await self._moved.wait_for(lambda: self.lookout.looks > since)

        waiting = asyncio.create_task(moved())
        await asyncio.wait(
            [waiting, gone], timeout=WORD_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        waiting.cancel()


def _file(file: Path) -> Callable[[Request], Response]:
    content, kind = file.read_bytes(), TYPES[file.suffix]
    return lambda request: Response(content, media_type=kind)


def server_of(roots: Sequence[Path], listener: socket.socket) -> tuple[uvicorn.Server, str]:
    """A server that is to be run with this socket, and the address to open."""
    token, port = secrets.token_urlsafe(24), listener.getsockname()[1]
    guarded = Guard(Starlette(routes=Site(roots).routes()), token, f"esper_watch_{port}")
    config = uvicorn.Config(
        guarded,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=MOST_REQUESTS,
        h11_max_incomplete_event_size=LONGEST_REQUEST,
        timeout_graceful_shutdown=1,
        http="h11",
        ws="none",
        lifespan="off",
    )
    return uvicorn.Server(config), f"http://{ADDRESS}:{port}/?token={token}"


def serve(roots: Sequence[Path], *, port: int | None = None, open_: bool = False) -> None:
    """Serve the page until Ctrl-C; says where it is."""
    listener = listening(port)
    server, address = server_of(roots, listener)
    print(f"Watch it in a browser: {address}", flush=True)
    if open_:
        webbrowser.open(address)
    server.run(sockets=[listener])


def listening(port: int | None) -> socket.socket:
    """Where it listens; without a wish the usual port, or a free one if that is taken."""
    for wish in (PORT, 0) if port is None else (port,):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ADDRESS, wish))
            listener.listen()
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            reason = error
    raise EsperError(
        f"Port {port} cannot be listened on", given=reason, fix="name another with --port"
    ) from reason


if __name__ == "__main__":  # beside a run: shows its folder for as long as its process lives
    follow(int(sys.argv[2]))
    serve([Path(sys.argv[1])])
