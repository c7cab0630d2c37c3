"""What is kept: archives of tensors, files that are never half written, and folders of runs."""

from typing import TYPE_CHECKING

from esper.lazy import attach

if TYPE_CHECKING:
    from .files import append_lines, as_toml, read_toml, sync, write_whole
    from .run_folders import KeptFolder, RunKind
    from .tensors import Archive, ArchiveError, kind_of, read_archive, seal_of, write_archive
    from .trees import KeepingError, packed, unpacked

__getattr__, __dir__, __all__ = attach(__name__)
