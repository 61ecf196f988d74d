"""A decode step that is compiled: one graph for each token, with a cache of keys and values of a fixed size.

transformers has the pieces, and uses them by itself on a GPU only. The first token waits for the compiler.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers import CompileConfig

from drot.core.errors import UserError, quoted
from drot.model.sizes import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Tokens of the smallest cache. A step attends to the whole cache, so it grows with the conversation, and
#: each size is compiled once.
SMALLEST_CACHE = 512
#: Tokens that are generated to compile a step. torch compiles a function at most eight times: a model that it
#: would compile at each step, as with a cache of a sliding window, is refused before it answers.
STEPS = 12


def cache_length(tokens: int, context: int | None) -> int:
    """The size of the cache for a prompt and its answer of `tokens`: a power of two, at most `context`."""
    size = max(SMALLEST_CACHE, 1 << (tokens - 1).bit_length())
    return size if context is None else max(tokens, min(size, context))


def compiled_settings(tokens: int, context: int | None, *, cuda_graph: bool = False) -> dict[str, Any]:
    """Settings with which `generate` compiles its decode step, for a prompt and its answer of `tokens`.

    cuda_graph: whether the step is a CUDA graph too, so that Python and the launches of its kernels take no
        time of their own. torch keeps the graph for the main thread, which must compile it and generate.
    """
    mode = "reduce-overhead" if cuda_graph else "default"
    config: Any = CompileConfig(fullgraph=True, dynamic=False, mode=mode)
    config._compile_all_devices = True  # otherwise transformers compiles on GPUs only
    size = cache_length(tokens, context)
    return {"cache_implementation": "static", "max_cache_len": size, "compile_config": config}


@torch.no_grad()
def compile_step(model: "PreTrainedModel", *, cuda_graph: bool = False) -> None:
    """Compiles the decode step of `model` for the smallest cache, and keeps it.

    cuda_graph: as in `compiled_settings`.

    Raises UserError with the compiler's reason if the step cannot be compiled.
    """
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    context = positions_of(model.config)
    length: dict[str, Any] = dict(min_new_tokens=STEPS, max_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    generate: Any = model.generate
    try:
        generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **length,
            **compiled_settings(STEPS + 1, context, cuda_graph=cuda_graph),
        )
    except Exception as error:
        raise UserError(
            f"the decode step cannot be compiled ({quoted(error)}): leave `compile` out"
        ) from error
    if not hasattr(model, "_compiled_call"):
        family = model.config.model_type
        raise UserError(f"transformers does not compile the decode step of {family}: leave `compile` out")
