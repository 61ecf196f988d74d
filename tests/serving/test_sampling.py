"""Settings of each request in a batch, against the definitions of temperature, top-k and top-p in fp64."""

import pytest
import torch
from serve_extra import MISSING
from transformers import GenerationConfig

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
VOCABULARY = 50


class Request:
    """What a batch knows of a request that gets a token."""

    has_new_token = True

    def __init__(self, **settings):
        from drot.serving.sampling import sampling_of

        self.state = self
        self.logit_processor_kwargs = sampling_of(GenerationConfig(**settings), VOCABULARY)


def probabilities(scores, temperature=1.0, top_k=VOCABULARY, top_p=1.0):
    """Of each token: p(t) in softmax(scores / temperature), of the top_k, of the smallest set with top_p."""
    p = (scores.double() / temperature).softmax(0)
    order = p.argsort(descending=True)[:top_k]
    share = p[order] / p[order].sum()
    kept = order[: int((share.cumsum(0) < top_p).sum()) + 1]
    return torch.zeros_like(p).index_copy(0, kept, p[kept] / p[kept].sum())


def processed(scores, requests):
    from drot.serving.sampling import Sampling

    sampling = Sampling()
    storage = torch.empty(sampling.tensors_required, len(requests) + 3, dtype=torch.int32)
    args = sampling.prepare_tensor_args(requests, storage)
    return sampling(torch.zeros(len(requests), dtype=torch.long), scores, args)


def test_each_row_has_its_own_settings():
    scores = 3 * torch.randn(4, VOCABULARY)
    requests = [
        Request(do_sample=False),
        Request(do_sample=True, temperature=0.7, top_k=9, top_p=0.8),
        Request(do_sample=True, temperature=2.0, top_k=0),
        Request(do_sample=True),
    ]
    found = processed(scores.clone(), requests).double().softmax(-1)
    expected = torch.stack(
        [
            torch.nn.functional.one_hot(scores[0].argmax(), VOCABULARY).double(),
            probabilities(scores[1], 0.7, 9, 0.8),
            probabilities(scores[2], 2.0),
            probabilities(scores[3]),
        ]
    )
    assert torch.allclose(found, expected, atol=1e-6)


def test_greedy_takes_the_first_of_equal_tokens():
    """As argmax in `generate` does; bf16 logits are often equal."""
    scores = torch.zeros(2, VOCABULARY)
    scores[:, [7, 30]] = 5.0
    for requests in ([Request(), Request()], [Request(), Request(do_sample=True)]):
        kept = processed(scores.clone(), requests)[0].isfinite().nonzero().flatten()
        assert kept.tolist() == [7]


@pytest.mark.parametrize(
    ("settings", "batched"),
    [
        ({}, True),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 5, "max_new_tokens": 9}, True),
        ({"repetition_penalty": 1.0, "num_beams": 1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"stop_strings": ["x"]}, False),
        ({"num_beams": 4}, False),
        ({"min_p": 0.1, "do_sample": True}, False),
    ],
)
def test_what_a_batch_cannot_hold_is_generated_alone(settings, batched):
    from drot.serving.sampling import beyond_a_batch

    assert (not beyond_a_batch(GenerationConfig(**settings))) == batched
