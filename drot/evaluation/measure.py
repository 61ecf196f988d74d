"""`drot eval`: every mistake that can be known is found before the model's weights are read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drot import checkpoint
from drot.evaluation.perplexity import check_windows, load_eval_tokens, perplexity
from drot.progress import Progress, silent


def measure(
    model: str,
    *,
    ppl: Sequence[str] = (),
    tasks: Sequence[str] = (),
    seqlen: int,
    text_column: str = "text",
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """{model, seqlen, perplexity: source → value, tasks: task → accuracy} of a hub name or local folder.

    ppl: as of load_eval_tokens; tasks: names of lm_eval.
    Raises UserError for a wrong option, model, text or task.
    """
    checkpoint.pick_device(device)
    if dtype != "auto":
        checkpoint.parse_dtype(dtype)
    config = checkpoint.load_config(model).get_text_config()
    tokenizer = checkpoint.load_tokenizer(model)
    texts: dict[str, Tensor] = {}
    for source in ppl:
        texts[source] = load_eval_tokens(source, tokenizer, text_column)
        check_windows(texts[source], config, seqlen)
    if tasks:
        from drot.evaluation.zeroshot import load_tasks, zero_shot

        prepared = load_tasks(tasks)
    loaded = checkpoint.load(model, device=device, dtype=dtype, compress=True)
    values = {
        source: perplexity(loaded, tokens, seqlen=seqlen, progress=progress)
        for source, tokens in texts.items()
    }
    return {
        "model": model,
        "seqlen": seqlen,
        "perplexity": values,
        "tasks": zero_shot(loaded, tokenizer, prepared) if tasks else {},
    }
