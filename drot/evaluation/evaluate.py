"""Perplexity and zero-shot accuracy of one model; mistakes are found before its weights are read."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drot.checkpoint.load import load, load_config, load_tokenizer
from drot.devices import parse_dtype, pick_device
from drot.evaluation.perplexity import check_windows, load_eval_tokens, perplexity
from drot.progress import Progress, silent


def evaluate(
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
    pick_device(device)
    if dtype != "auto":
        parse_dtype(dtype)
    config = load_config(model).get_text_config()
    tokenizer = load_tokenizer(model)
    texts: dict[str, Tensor] = {}
    for source in ppl:
        texts[source] = load_eval_tokens(source, tokenizer, text_column)
        check_windows(texts[source], config, seqlen)
    if tasks:
        from drot.evaluation.zeroshot import load_tasks, zero_shot

        prepared = load_tasks(tasks)
    loaded = load(model, device=device, dtype=dtype, compress=True)
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
