"""What the tests of every library's adapters ask of one."""

import pytest

from fusewise.lab import Unsupported, truth


def is_right_or_refuses(peer, problem, cannot):
    """The adapter is right, twice: nothing that it keeps refers to what the first call changed. Or it says that it cannot."""
    if cannot:
        with pytest.raises(Unsupported):
            peer().build(problem)
        return
    run = peer().build(problem)
    verdict = truth.check(problem, run)
    assert verdict.reason == ""
    assert truth.check(problem, run).errors == verdict.errors
