"""Words of a text, for comparisons that ignore how it is set."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from hashlib import blake2b

# A decimal point or a sign makes another number: "1.5" is one word, and "-5" is not "5".
_WORD = re.compile(r"(?<!\w)-?\d+(?:[.,]\d+)*|\w+")


def words(text: str) -> list[str]:
    """Words and numbers in lower case, without punctuation."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def ngrams(found: list[str], n: int) -> Iterator[str]:
    """Every run of `n` words; a shorter text is one run."""
    for start in range(max(1, len(found) - n + 1) if found else 0):
        yield " ".join(found[start : start + n])


def digest(text: str, size: int = 8) -> bytes:
    """A hash of `size` bytes that is the same in every process."""
    return blake2b(text.encode(), digest_size=size).digest()
