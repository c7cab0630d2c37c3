"""The live page on the command line: alone, or beside a run that it shows."""

from esper.karn.commands import Watch
from esper.leyline.errors import EsperError


def watch_runs(command: Watch) -> None:
    try:
        from esper.watch.live_server import serve
    except ImportError as error:
        raise EsperError(
            "The live page needs a server, which is not installed",
            given=error.name,
            fix="pip install 'esper-ml[watch]'",
        ) from error
    serve(command.folders, port=command.port, open_=command.open)
