"""The compiled decode step of `drot chat` and `drot serve`."""

import shutil

import pytest
import torch

from drot.checkpoint.load import load
from drot.cli import chat as command
from drot.core.errors import UserError
from drot.model.compiled import SMALLEST_CACHE, cache_length, compile_step, compiled_settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("tokens", "context", "size"),
    [(1, 2048, SMALLEST_CACHE), (513, 2048, 1024), (1024, None, 1024), (1500, 2000, 2000), (9, 100, 100)],
)
def test_the_cache_holds_the_tokens_and_has_few_sizes(tokens, context, size):
    assert cache_length(tokens, context) == size


@pytest.mark.parametrize(("cuda_graph", "mode"), [(False, "default"), (True, "reduce-overhead")])
def test_a_cuda_graph_is_taken_where_it_is_asked_for(cuda_graph, mode):
    settings = compiled_settings(32, 2048, cuda_graph=cuda_graph)
    assert settings["compile_config"].mode == mode
    assert settings["max_cache_len"] == SMALLEST_CACHE


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_greedy_tokens_are_those_of_the_step_that_is_not_compiled(packed, device):
    """In float32; the compiled step is one graph, and the second conversation compiles nothing."""
    model = load(packed, device=device)
    graph = {"cuda_graph": device != "cpu"}
    compile_step(model, **graph)
    ids = torch.randint(100, (1, 8), device=device)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
    length = dict(min_new_tokens=24, max_new_tokens=24)
    compiled = model.generate(ids, **options, **length, **compiled_settings(32, 2048, **graph))
    with torch._dynamo.config.patch(error_on_recompile=True):
        again = model.generate(ids, **options, **length, **compiled_settings(32, 2048, **graph))
    wanted = model.generate(ids, **options, **length)
    assert torch.equal(compiled, wanted)
    assert torch.equal(again, wanted)


def test_a_step_that_cannot_be_compiled_is_left_out_and_said(packed, monkeypatch, capsys):
    def refuse(*call, **settings):
        raise RuntimeError("no compiler")

    model = load(packed)
    monkeypatch.setattr(model, "generate", refuse)
    assert not command.compiled(model)
    assert "not compiled: the decode step cannot be compiled (no compiler)" in capsys.readouterr().err
    monkeypatch.setattr(model, "generate", lambda *call, **settings: None)
    with pytest.raises(UserError, match="transformers does not compile"):
        compile_step(model)


def test_a_batch_is_not_compiled(packed):
    pytest.importorskip("fastapi")
    from drot.serving.server import serving

    wanted = "`compile` needs `sequential`"
    with pytest.raises(UserError, match=wanted), serving(str(packed), "packed", compiled=lambda model: True):
        pass
