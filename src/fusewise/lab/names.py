"""Names in messages: suggestions for an unknown one, and a short form of a long one."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Iterable

#: Limit on suggestions.
MOST = 3


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The fix at the end of an error: `try 'eager'` for 'egaer', `try 'fusewise-cpu' or 'fusewise-cpu-inplace'` for
    'cpu', `otherwise` if nothing is similar."""
    every = list(dict.fromkeys(known))
    low = name.lower()
    found = difflib.get_close_matches(name, every, MOST) or [n for n in every if low and low in n.lower()][:MOST]
    return f"try {' or '.join(map(repr, found))}" if found else otherwise


def checksum(text: str) -> int:
    """A 32-bit checksum that also accepts text that is not valid UTF-8, such as a path."""
    return zlib.crc32(text.encode(errors="surrogatepass"))


def shortened(text: str, longest: int) -> str:
    """The text, or if too long its beginning plus a checksum that keeps it distinct."""
    return text if len(text) <= longest else f"{text[: longest - 10]}… {checksum(text):08x}"
