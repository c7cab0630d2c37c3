"""Where data files are looked for.

In this order: `$ESPER_DATA/NAME`, `data/NAME` below the current folder, and the places where a
package puts them. The first folder that holds one of the files has to hold all of them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from esper.leyline.errors import DataError

VARIABLE = "ESPER_DATA"


def candidate_folders(name: str, packaged: Sequence[Path] = ()) -> list[Path]:
    """The folders in which the data set's files may lie, best first."""
    chosen = os.environ.get(VARIABLE)
    return [*([Path(chosen) / name] if chosen else []), Path("data") / name, *packaged]


def find_files(
    title: str,
    name: str,
    wanted: Sequence[Sequence[str]],
    *,
    packaged: Sequence[Path] = (),
    fix: str,
) -> list[Path]:
    """One path for each of `wanted`, whose entries are the names that a file may have."""
    folders = candidate_folders(name, packaged)
    for folder in folders:
        found = [_first_file(folder, names) for names in wanted]
        present = [path for path in found if path is not None]
        if len(present) == len(wanted):
            return present
        if present:
            missing = [names[0] for names, path in zip(wanted, found, strict=True) if path is None]
            raise DataError(
                f"{title} is incomplete in {folder}",
                given=f"no {', '.join(missing)}",
                valid=f"{len(wanted)} files in one folder",
                fix=fix,
            )
    raise DataError(
        f"{title} is not on this machine",
        given=f"no {wanted[0][0]} in {', '.join(map(str, folders))}",
        valid=f"{len(wanted)} files in one of these folders, or in ${VARIABLE}/{name}",
        fix=fix,
    )


def _first_file(folder: Path, names: Sequence[str]) -> Path | None:
    paths = (folder / name for name in names)
    return next((path for path in paths if path.is_file()), None)
