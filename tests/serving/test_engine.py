"""The engine of `drot serve --sequential`, without HTTP."""

import asyncio

import pytest
from serve_extra import MISSING
from small_models import small_model
from transformers import GenerationConfig

from drot.checkpoint.load import load, load_tokenizer
from drot.core.errors import UserError

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


@pytest.fixture
def asked(packed):
    """The texts of requests that come at once. A request is a seed, and whether its answer is streamed."""
    from drot.serving.engine import SEED, Engine

    model, tokenizer = load(packed, device="cpu"), load_tokenizer(packed)
    engine = Engine(model, sequential=True)

    async def text(number, seed, streamed):
        inputs = tokenizer("x", return_tensors="pt")
        config = GenerationConfig(do_sample=True, temperature=1.5, max_new_tokens=12, pad_token_id=0)
        setattr(config, SEED, seed)
        request = model, tokenizer, inputs, config, str(number)
        if not streamed:
            return (await engine.generate_non_streaming(*request))[0]
        queue, _ = engine.generate_streaming(*request)
        pieces = []
        while (piece := await queue.get()) is not None:
            pieces.append(piece)
        return "".join(pieces)

    async def together(requests):
        return await asyncio.gather(*(text(n, *request) for n, request in enumerate(requests)))

    return lambda *requests: asyncio.run(together(requests))


@pytest.mark.slow
def test_a_seed_does_not_change_later_answers_without_one(asked):
    found = {asked((5, False), (None, False))[1] for _ in range(3)}
    assert len(found) > 1


@pytest.mark.parametrize("family", ["gemma2", "phi3-longrope"])
def test_models_that_a_batch_would_change_are_refused(family):
    from drot.serving.engine import Batch

    with pytest.raises(UserError, match="cannot be batched .* try `sequential=True`"):
        Batch(small_model(family), None)


@pytest.mark.slow
def test_settings_of_the_model_that_no_batch_holds_are_known(packed):
    from drot.serving.engine import Engine

    model = load(packed, device="cpu")
    model.generation_config.repetition_penalty = 1.05
    engine = Engine(model)
    try:
        assert engine.always_alone == {"repetition_penalty": 1.05}
    finally:
        engine.stop()


@pytest.mark.slow
def test_requests_at_once_keep_their_seeds(asked):
    """Each has the text of its seed alone, and so has one that waits behind a stream."""
    alone = {seed: asked((seed, False))[0] for seed in (1, 2, 3)}
    assert len(set(alone.values())) == 3
    for streamed in ((False, False, False), (False, True, False), (True, False, True)):
        found = asked(*zip((1, 2, 3), streamed, strict=True))
        assert found == list(alone.values())
