"""Several texts as one calibration text: their shares, their order, and the messages for mistakes."""

import pytest
import torch
from test_source import load

from drot.core.errors import UserError
from drot.text.mixture import counts_of, texts_of
from drot.text.source import spread


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("c4", [("c4", 1)]),
        ("a.txt,b.txt", [("a.txt", 1), ("b.txt", 1)]),
        ("a=b.txt=0.5, org/name:train=2", [("a=b.txt", 0.5), ("org/name:train", 2)]),
    ],
)
def test_the_texts_of_a_source(source, texts):
    assert texts_of(source) == texts


def test_a_file_whose_name_has_a_comma_or_a_share_is_one_text(tmp_path):
    for name in ("a,b=2.txt", "b.txt=2"):
        path = tmp_path / name
        path.write_text("the quick brown fox")
        assert texts_of(str(path)) == [(str(path), 1)]
    assert load(tmp_path / "a,b=2.txt").shape == (3, 4)


@pytest.mark.parametrize(
    "source",
    [
        "a.txt,",
        "a.txt,=2",
        "a.txt,a.txt=2",
        "a.txt=0,b.txt",
        "a.txt=1.2.3,b.txt",
        "a.txt=x,b.txt",
        f"a.txt=1{'0' * 19},b.txt",
        f"a.txt={'9' * 308},b.txt={'9' * 308}",
        f"a.txt,b.txt={'9' * 400}",
    ],
)
def test_a_wrong_mixture(source):
    with pytest.raises(UserError, match=r"must name each once, with a share above 0 .* in 'a\.txt"):
        texts_of(source)


def test_the_share_of_a_text_that_stands_alone():
    with pytest.raises(UserError, match=r"several texts for a share, .* got 'a\.txt=2': take 'a\.txt'"):
        texts_of("a.txt=2")


@pytest.mark.parametrize("shares", [[1, 1], [1, 2], [0.3, 0.3, 0.4], [5, 1, 1, 1]])
def test_the_counts_are_within_one_of_the_shares(shares):
    for nsamples in range(8, 40):
        counts = counts_of(shares, nsamples)
        assert sum(counts) == nsamples
        exact = [nsamples * share / sum(shares) for share in shares]
        assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))


def test_a_text_without_a_sequence_is_refused():
    with pytest.raises(UserError, match=r"gives them \[0, 4\]: raise `nsamples`"):
        counts_of([1, 20], 4)


def test_a_prefix_has_the_shares_of_the_whole():
    parts = [torch.full((count, 2), float(number)) for number, count in enumerate((8, 16, 40))]
    order = spread(parts)[:, 0]
    for length in range(1, 65):
        for number, share in enumerate((8, 16, 40)):
            assert abs(float((order[:length] == number).sum()) - length * share / 64) < 2
    alone = torch.arange(12).reshape(6, 2)
    assert torch.equal(spread([alone]), alone)


def test_each_text_is_cut_as_it_is_alone(tmp_path):
    paths = [tmp_path / "upper.txt", tmp_path / "lower.txt"]
    for path, text in zip(
        paths, ("ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 4, "abcdefghijklmnopqrstuvwxyz" * 4), strict=True
    ):
        path.write_text(text)
    mixed = load(f"{paths[0]},{paths[1]}=2", nsamples=9, seed=3)
    for path, count, is_part in zip(paths, (3, 6), (mixed < 97, mixed >= 97), strict=True):
        assert torch.equal(mixed[is_part].reshape(-1, 4), load(path, nsamples=count, seed=3))
