"""Where benchmarks leave their results: flat JSON, and their table in docs/performance.md.

Importing it also lets a benchmark import what lies beside the package: studies and tests.
"""

import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
sys.path.insert(0, str(ROOT))


def machine(device: str) -> str:
    """What the figures were measured on, in words."""
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, 1 thread"
    )
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def write_json(path: Path | None, figures: Mapping[str, float]) -> None:
    if path is not None:
        path.write_text(json.dumps(dict(figures), indent=1, sort_keys=True) + "\n")


def write_section(
    name: str,
    device: str,
    command: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    page: Path = PAGE,
) -> None:
    """Put a table between the marks of its section; the page says where sections are."""
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    lines = [f"`{command}` on {machine(device)}", "", *table]
    mark = f"{name} {device}"
    text = page.read_text(encoding="utf-8")
    section = f"<!-- {mark} -->\n" + "\n".join(lines) + f"\n<!-- end {mark} -->"
    pattern = rf"<!-- {mark} -->.*?<!-- end {mark} -->"
    if not re.search(pattern, text, re.S):
        raise SystemExit(f"{page} has no section '<!-- {mark} -->'; add its two marks first")
    page.write_text(re.sub(pattern, lambda _: section, text, flags=re.S), encoding="utf-8")
