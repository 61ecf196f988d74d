"""Which layer holds the matrix Q between two bases, and in which basis each layer writes."""

import itertools

import pytest
import torch
from small_models import random_rotations, small_model

from drot.model.rotation import Bases

LAYERS = 3
#: place → for each layer, whether it writes in the basis of the next layer, and whether it holds a matrix
PLACES = {
    "input": ([False, False, False], [False, True, True]),
    "residual": ([True, True, False], [True, True, False]),
    None: ([False, False, False], [False, False, False]),
}


@pytest.fixture
def rotations():
    return random_rotations(small_model("llama"))


@pytest.mark.parametrize("place", PLACES)
def test_who_writes_and_who_holds(place, rotations):
    bases = Bases(place, LAYERS)
    writes_next, holds = PLACES[place]
    assert [bases.writes_next(index) for index in range(LAYERS)] == writes_next
    assert [bases.holds(index) for index in range(LAYERS)] == holds
    assert [bases.held(index, rotations) is not None for index in range(LAYERS)] == holds
    for index, following in enumerate(writes_next):
        assert bases.writes_in(index) == index + following


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("sharing", [1, 2, 3])
def test_a_matrix_lies_only_where_r1_changes(layers, sharing):
    segments = [index // sharing for index in range(layers)]
    changes = [before != after for before, after in itertools.pairwise(segments)]
    for place, holds in (("input", [False, *changes]), ("residual", [*changes, False])):
        bases = Bases(place, layers, sharing)
        assert [bases.holds(index) for index in range(layers)] == holds
        assert [bases.ends_segment(index) for index in range(layers)] == [*changes, True]
        assert [segments[bases.writes_in(index)] for index in range(layers)] == [
            segments[index + (place == "residual" and changed)]
            for index, changed in enumerate([*changes, False])
        ]


@pytest.mark.parametrize("place", ["input", "residual"])
def test_the_matrix_leads_from_one_basis_to_the_next(place, rotations):
    """Q = R1(l)ᵀ R1(l+1): a hidden state h R1(l) becomes h R1(l+1)."""
    bases, hidden = Bases(place, LAYERS), torch.randn(5, 32, dtype=torch.float64)
    for before in range(LAYERS - 1):
        boundary = bases.held(before if place == "residual" else before + 1, rotations)
        assert boundary.place == place
        r1, next_r1 = rotations[before].r1, rotations[before + 1].r1
        torch.testing.assert_close(hidden @ r1 @ boundary.matrix(), hidden @ next_r1)


def test_only_the_rotations_at_the_boundary_are_needed(rotations):
    """The check of a model draws its rotations one by one."""
    known = {1: rotations[1], 2: rotations[2]}
    assert Bases("input", LAYERS).held(2, known).r1 is rotations[1].r1
    assert Bases("residual", LAYERS).held(1, known).next_r1 is rotations[2].r1
    with pytest.raises(KeyError):
        Bases("residual", LAYERS).held(0, known)


@pytest.mark.parametrize("place", PLACES)
def test_a_model_of_one_layer_has_no_boundary(place, rotations):
    bases = Bases(place, 1)
    assert not bases.holds(0) and bases.held(0, rotations) is None
    assert bases.writes_in(0) == 0
