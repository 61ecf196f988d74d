"""The share of the gap between a baseline and the dense model that a model closes."""

import pytest

from drot.checkpoint.tables import gap_closed, short_source


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


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("allenai/c4", "allenai/c4"),
        ("/home/a/wiki.txt", "wiki.txt"),
        ("/home/a/wiki.txt,c4,/home/a/own.jsonl=2", "wiki.txt,c4,own.jsonl=2"),
    ],
)
def test_a_card_names_every_text_without_its_folder(source, expected):
    assert short_source(source) == expected
