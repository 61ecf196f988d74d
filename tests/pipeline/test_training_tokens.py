"""Rotations are trained with the first calibration sequences; the pruning reads all of them."""

import pytest
import torch
from runs import prune, recipe
from small_models import random_tokens, small_model

from drot.config import Recipe, resolve
from drot.config.rotation import TRAINING_TOKENS

pytestmark = pytest.mark.slow

HIDDEN, SEQLEN = 32, 128
USED = TRAINING_TOKENS * HIDDEN // SEQLEN
TOKENS = random_tokens(USED + 4, SEQLEN)


@pytest.mark.parametrize(
    ("nsamples", "seqlen", "hidden", "expected"),
    [(128, 2048, 4096, 64), (128, 2048, 8192, 128), (100, 500, 64, 5), (3, 16, 4096, 3), (0, 16, 64, 0)],
)
def test_the_number_of_sequences(nsamples: int, seqlen: int, hidden: int, expected: int) -> None:
    assert resolve(Recipe()).training_nsamples(nsamples, seqlen, hidden) == expected
    for whole in ({"optimizer": "paper"}, {"reference_compat": True}, {"training_tokens": 0}):
        all_tokens = resolve(Recipe().replace(**whole))
        assert all_tokens.training_nsamples(nsamples, seqlen, hidden) == nsamples
        assert all_tokens.to_dict()["rotation"]["training_tokens"] == 0
    asked = resolve(Recipe().replace(optimizer="paper", training_tokens=TRAINING_TOKENS))
    assert asked.training_nsamples(nsamples, seqlen, hidden) == expected


@pytest.mark.parametrize("hessians", ["sequential", "dense"])
@pytest.mark.parametrize("optimizer", ["fast", "paper"])
def test_what_the_last_sequences_change(optimizer: str, hessians: str) -> None:
    """Other last sequences: the same training of the first layer, unless the paper is reproduced."""
    other = torch.cat([TOKENS[:USED], random_tokens(4, SEQLEN, seed=1)])
    chosen = recipe(optimizer=optimizer, hessians=hessians, steps=2, token_weights="equal")
    first, second = (
        prune(small_model("llama", head_dim=16), chosen, calibration=tokens).manifest
        for tokens in (TOKENS, other)
    )
    trained, again = (manifest.layers[0].rotation for manifest in (first, second))
    assert trained.nsamples == (USED if optimizer == "fast" else len(TOKENS))
    assert (trained.loss_curve == again.loss_curve) == (optimizer == "fast")
    pruned, pruned_again = (manifest.layers[0].linears["q_proj"] for manifest in (first, second))
    assert pruned.output_error != pruned_again.output_error
