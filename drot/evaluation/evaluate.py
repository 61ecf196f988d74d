"""Perplexity and zero-shot accuracy of a model."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from drot.architectures import positions_of
from drot.checkpoint.load import load, load_config, load_tokenizer
from drot.config import default_seqlen
from drot.devices import computing_dtype, parse_dtype, pick_device
from drot.evaluation.perplexity import check_logits, check_windows, load_eval_tokens, perplexity
from drot.progress import Progress, ProgressEvent, silent


def evaluate(
    model: str,
    *,
    ppl: Sequence[str] = (),
    tasks: Sequence[str] = (),
    seqlen: int | None = None,
    text_column: str = "text",
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> dict[str, Any]:
    """The figures of one model: {model, seqlen, perplexity: text → value, tasks: task → accuracy}.

    Raises UserError for a wrong argument, model, text or task. Arguments, texts and tasks are checked before
    the weights are loaded, which takes long for a large model.

    Args:
        model: a name on the Hugging Face hub or a local folder.
        ppl: texts for the perplexity, `wikitext2` or files, as in `load_eval_tokens`.
        tasks: names of lm_eval's tasks.
        seqlen: tokens in a window of the perplexity; None is 2048, or the positions of the model if they are
            fewer.
        text_column: the column of the text in .json, .jsonl and .parquet files.
        device: `auto`, `cpu` or `cuda[:N]`.
        dtype: dtype of the computation. `auto` is the checkpoint's own on a GPU, and float32 on a CPU.
        progress: receives the events of reading and loading, and `evaluate` after each batch of windows.
    """
    target = pick_device(device)
    if dtype != "auto":
        parse_dtype(dtype)
    config = load_config(model).get_text_config()
    if seqlen is None:
        seqlen = default_seqlen(positions_of(config))
    tokenizer = load_tokenizer(model)
    texts: dict[str, Tensor] = {}
    for source in ppl:
        texts[source] = load_eval_tokens(source, tokenizer, text_column, progress)
        check_windows(texts[source], config, seqlen)
    if tasks:
        from drot.evaluation.zeroshot import load_tasks, zero_shot

        prepared = load_tasks(tasks)
    progress(ProgressEvent(phase="load"))
    loaded = load(model, device=target, dtype=computing_dtype(dtype, target), compress=True)
    if tasks:
        check_logits(loaded)
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
