"""The share of the gap between a baseline and the dense model that a model closes."""

import pytest

from drot.checkpoint.tables import gap_closed


@pytest.mark.parametrize(
    ("dense", "baseline", "model", "expected"),
    [
        (10.0, 14.0, 11.0, 0.75),
        (10.0, 14.0, 10.0, 1.0),
        (10.0, 14.0, 14.0, 0.0),
        (10.0, 14.0, 9.0, 1.25),
        (10.0, 14.0, 16.0, -0.5),
        (10.0, 10.0, 9.0, None),
        (10.0, 9.0, 8.0, None),
        (None, 14.0, 11.0, None),
        (10.0, None, 11.0, None),
        (10.0, 14.0, None, None),
    ],
)
def test_gap_closed(dense, baseline, model, expected):
    assert gap_closed(dense, baseline, model) == expected
