"""What the site adds to docs/: the pages beside it, and fields in the reference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "LICENSE": "LICENSE"}
BESIDE |= {"security.md": "SECURITY.md", "changelog.md": "CHANGELOG.md"}
BESIDE |= {"CITATION.cff": "CITATION.cff"}
NAMES = (griffe.ExprName, griffe.ExprAttribute)


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


class ReadableReference(griffe.Extension):
    """Dataclasses and enumerations are described with their fields and the comments beside them;
    defaults that are names of constants are shown as what they are."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        described = list(_inside(pkg))
        for each in described:
            if each.docstring:  # what follows is indented, and needs no mark of its own
                each.docstring.value = each.docstring.value.replace("::\n", ":\n")
            if isinstance(each, griffe.Function):
                for parameter in each.parameters:
                    if constant := _constant(parameter.default, pkg):
                        parameter.default = constant.value
        for each in described:
            if each.docstring and isinstance(each, griffe.Class) and _is_record(each):
                fields = [*each.inherited_members.values(), *each.members.values()]
                shown = [_shown(field, pkg) for field in fields if _is_field(field)]
                each.docstring.value += "\n\n" + "\n".join(shown)


def _inside(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    for member in parent.members.values():
        if not member.is_alias:
            yield member
            if member.is_module or member.is_class:
                yield from _inside(member)


def _constant(default: str | griffe.Expr | None, pkg: griffe.Module) -> griffe.Attribute | None:
    """The constant of this package, or the default of a dataclass in it, that is named here."""
    if not isinstance(default, NAMES) or not default.canonical_path.startswith("esper."):
        return None
    found: Any = pkg
    for name in default.canonical_path.split(".")[1:]:
        if name not in found.members:
            return None
        found = found.members[name]
        found = found.final_target if found.is_alias else found
    if found.is_attribute and (found.parent.is_module or "dataclass" in found.parent.labels):
        return _constant(found.value, pkg) or found
    return None


def _is_record(kind: griffe.Class) -> bool:
    return "dataclass" in kind.labels or any(str(base).endswith("Enum") for base in kind.bases)


def _is_field(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_attribute and member.is_public and "property" not in member.labels


def _shown(field: griffe.Object | griffe.Alias, pkg: griffe.Module) -> str:
    declared, _, comment = " ".join(field.lines).strip().partition("  # ")
    constant = _constant(field.value, pkg)
    if constant is not None:
        declared = f"{declared.partition(' = ')[0]} = {constant.value}"
        comment = comment or " ".join(constant.lines).partition("  # ")[2]
    return f"- `{declared.partition(' = field(')[0]}`" + (f": {comment}" if comment else "")
