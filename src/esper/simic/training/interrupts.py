"""Being asked to stop: the first signal ends training after the round, the second at once."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import Popen

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress display may have hidden it


class Stopping:
    """Remembers that a signal asked to stop.

    Signals are heard by a thread of its own, also while the others wait for another process.
    """

    def __init__(self, say: bool = True) -> None:
        self.signal: int | None = None
        self.children: list[Popen[bytes]] = []
        self._say = say

    def __call__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take over SIGINT and SIGTERM; where that is impossible, as in a thread, do not."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        hear, told = os.pipe()
        os.set_blocking(told, False)
        before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        earlier = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(hear,), name="stop", daemon=True)
        listener.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(earlier)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(told)  # ends the listener
            listener.join()
            os.close(hear)

    def _listen(self, hear: int) -> None:
        while numbers := os.read(hear, 1):
            if numbers[0] in SIGNALS:
                self._told(numbers[0])

    def _told(self, number: int) -> None:
        if self.signal is None:
            self.signal = number
            if self._say:
                text = "Stopping after this round; a second signal stops at once."
                print(text, file=sys.stderr, flush=True)
            return
        for child in self.children:
            child.kill()
        if sys.stderr.isatty():
            os.write(2, SHOW_CURSOR.encode())
        os._exit(128 + number)
