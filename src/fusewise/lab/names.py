"""Names: one that is not known and those that were probably meant, and one that is too long."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Iterable

#: Names that are suggested at most.
MOST = 3


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The fix that an error ends with: `try 'eager'` for 'egaer', `try 'fusewise-cpu' or 'fusewise-cpu-inplace'` for 'cpu',
    `otherwise` where nothing is like it."""
    every = list(dict.fromkeys(known))
    low = name.lower()
    found = difflib.get_close_matches(name, every, MOST) or [n for n in every if low and low in n.lower()][:MOST]
    return f"try {' or '.join(map(repr, found))}" if found else otherwise


def checksum(text: str) -> int:
    """A number of 32 bits that tells texts apart; also those that are no UTF-8, as a path may be."""
    return zlib.crc32(text.encode(errors="surrogatepass"))


def shortened(text: str, longest: int) -> str:
    """The text, where it is not too long, else its beginning and what tells it from others that begin alike."""
    return text if len(text) <= longest else f"{text[: longest - 10]}… {checksum(text):08x}"
