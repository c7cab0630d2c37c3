"""What the site adds to docs/: the pages beside it, and fields in the reference."""

from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "LICENSE": "LICENSE"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give pages that stand beside docs/ a place in the site."""
    for place, source in BESIDE.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Bend links between those pages and docs/ to where they are in the site."""
    for place, source in BESIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({place}")
        if page.file.src_uri in BESIDE:
            markdown = markdown.replace(f"]({source}", f"]({place}").replace("](docs/", "](")
    return markdown


class FieldsOfDataclasses(griffe.Extension):
    """A dataclass is described with its fields, and these with the comments beside them."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if "dataclass" not in cls.labels or cls.docstring is None:
            return
        members = [*cls.inherited_members.values(), *cls.members.values()]
        fields = [each for each in members if each.is_attribute and each.is_public]
        shown = [_shown(each) for each in fields if "property" not in each.labels]
        cls.docstring.value += "\n\n" + "\n".join(shown)


def _shown(field: griffe.Object | griffe.Alias) -> str:
    declared, _, comment = " ".join(field.lines).strip().partition("  # ")
    return f"- `{declared.partition(' = field(')[0]}`" + (f": {comment}" if comment else "")
