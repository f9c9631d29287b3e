"""Mark the cases of a parametrised test that are left to `make test-all`."""

from __future__ import annotations

import pytest


def mark_extended(cases, *, quick):
    """Return `cases` as parameters in their order, all but those in `quick` marked `extended`.

    A case is one value, or a tuple of one value per argument of the test.
    """
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"quick cases that do not exist: {unknown}"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.extended,
        )
        for case in cases
    ]
