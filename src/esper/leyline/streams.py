"""Named random streams: every use of chance has its own seed, derived from names, not order."""

import hashlib
from functools import lru_cache


@lru_cache(maxsize=2**14, typed=True)  # thousands of rows play the same cases again and again
def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for the stream named by `parts`, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
