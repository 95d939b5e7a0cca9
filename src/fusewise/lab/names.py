"""A name that is not known, and the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """The fix that an error ends with: `try 'eager'` for 'egaer', `otherwise` where nothing is like it."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"try {found[0]!r}" if found else otherwise
