"""Pages that are generated from code say what the code says now."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests import programs

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = ("first-hour.md", "rl.md")  # their snippets are one program each
_spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
assert _spec is not None
assert _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


@pytest.mark.parametrize("page", list(generate.PAGES))
def test_a_generated_page_is_up_to_date(page: str) -> None:
    written = (DOCS / page).read_text(encoding="utf-8")
    assert written == generate.PAGES[page](), "run: .venv/bin/python docs/generate.py"


def test_the_drawing_has_an_arrow_for_every_transition() -> None:
    arrows = sum(len(afters) for afters in generate.TRANSITIONS.values())
    assert generate.lifecycle_svg().count('class="edge"') == arrows


def _snippets() -> list[tuple[str, str]]:
    root, found = DOCS.parent, []
    for page in (root / "README.md", root / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))):
        codes = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
        if page.name in TUTORIALS:
            codes = ["\n".join(codes)]
        found += [(f"{page.name}-{index}", code) for index, code in enumerate(codes)]
    return found


# Epochs of the garden and generated data are short, so that the snippets run quickly.
SHORT = """
from esper.garden import episodes
from esper.datasets import generated
episodes.GARDEN_BATCHES = 4
generated.SAMPLES = {"train": 2000, "validation": 1000, "test": 1000}
del episodes, generated
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [code for _, code in _snippets()], ids=[n for n, _ in _snippets()])
def test_a_snippet_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    done = programs.run(SHORT + code, cwd=tmp_path)  # what one keeps must not meet the next run
    assert done.returncode == 0, done.stderr
