"""Names of data sets that were built in before version 0.2.0, and the error for these names."""

from esper.leyline.errors import DataError

# Each name with the files that the data set was read from.
REMOVED_SETS = {
    "mnist": "IDX files",
    "fashion_mnist": "IDX files",
    "cifar10": "CIFAR files",
}
BUILT_IN_SETS = ("digits", "mnist1d", "stdlib")


def refuse_removed_set(name: str) -> None:
    """Raise an error if a data set of this name was removed.

    Call this when a name is not registered: users may register a name that has become free.

    Raises:
        DataError: If the data set was removed; says which commit reads it and what to do instead.
    """
    if name not in REMOVED_SETS:
        return
    raise DataError(
        f"Reading {REMOVED_SETS[name]} was removed in 0.2.0, and with it the data set {name!r}",
        valid=f"the built-in data sets {', '.join(BUILT_IN_SETS)}",
        fix="name FILE.py:FUNCTION, where the function returns (train, val), or a file of arrays "
        "(.npz, .safetensors) instead, or check out commit 28b7a14, which reads it",
    )
