"""A name that is not known, and those that were probably meant."""

from __future__ import annotations

import difflib
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
