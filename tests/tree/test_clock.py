"""Time that is measured is monotonic: a clock that is set back ends no wait and makes no damage."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "esper"
# When something was written, and how long ago that was, for people.
STAMPS = {"nissa/store.py", "nissa/trackers.py", "watch/found_runs.py"}
WALL = re.compile(r"\btime\.(time|localtime|ctime)\(|\bdatetime\.(now|utcnow|today)\(")


def test_only_what_people_read_is_taken_from_the_clock_on_the_wall() -> None:
    files = {file: file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py")}
    found = {str(file.relative_to(SOURCE)) for file, text in files.items() if WALL.search(text)}
    assert found <= STAMPS, "use time.monotonic()"
