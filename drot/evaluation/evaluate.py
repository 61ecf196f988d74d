"""Perplexity, agreement with a dense original, and accuracy in tasks, for one model or several."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drot.checkpoint.load import load, load_config, load_tokenizer
from drot.config import default_seqlen
from drot.core.checks import is_a
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.evaluation.agreement import agreement
from drot.evaluation.perplexity import check_logits, load_eval_tokens, perplexity_of
from drot.evaluation.predictions import Predictions, check_windows, predict, predict_streamed
from drot.evaluation.record import check_recordable
from drot.evaluation.record import record as record_figures
from drot.evaluation.tasks import averages, expand, load_tasks, run_tasks
from drot.machine.devices import computing_dtype, dtype_name, parse_dtype, pick_device
from drot.machine.environment import machine_name
from drot.model.families import family_of, positions_of
from drot.sparse.packed import compress_model
from drot.text.source import SPLITS, calibration_hash

logger = logging.getLogger("drot")

#: the largest share of a GPU's free memory that weights may take; the rest is for logits and activations
WEIGHTS_SHARE = 0.85


def evaluate(
    models: Sequence[str],
    *,
    ppl: Sequence[str] = (),
    tasks: Sequence[str] = (),
    against: str | None = None,
    seqlen: int | None = None,
    text_column: str = "text",
    device: str = "auto",
    dtype: str = "auto",
    stream: bool = False,
    record: bool = True,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """The figures of each model, in plain JSON types.

    model, seqlen, dtype, machine: what was measured, and where.
    streamed: whether one decoder layer at a time was on the device.
    texts: text → tokens, windows, split (None for a file) and the SHA-256 of its token ids.
    perplexity: text → perplexity (`perplexity_of`).
    against: the model of `against`, or None.
    agreement: text → figures of `agreement` with that model; empty without one.
    tasks: task → accuracy in [0, 1]. task_details: task → metric, number of examples in the prompt, stderr.
    averages: suite → mean accuracy of its tasks, for `paper`.

    Raises UserError for a wrong argument, model, text or task, and BrokenModelError for a model without a
    finite loss. Arguments, texts and tasks are checked before the weights are loaded, which takes long for a
    large model. Models are loaded one after the other.

    Args:
        models: names on the Hugging Face hub or local folders.
        ppl: texts for perplexity and agreement, as in `load_eval_tokens`.
        tasks: names of lm_eval's tasks, of its groups, of `drot_continuation`, and of SUITES.
        against: the dense original of the models, with which their predictions are compared on `ppl`.
        seqlen: tokens in a window; None is the smallest `default_seqlen` of the models.
        text_column: the column of the text in .json, .jsonl and .parquet files.
        device: `auto`, `cpu` or `cuda[:N]`.
        dtype: dtype of the weights. `auto` is the checkpoint's own on a GPU, and float32 on a CPU.
        stream: keeps the models in main memory and moves one decoder layer at a time to the device. That also
            happens, with a warning, if the weights do not fit on the device.
        record: whether to add the figures to the manifest of each model that has one (`record`).
        progress: receives the events of reading and loading, an event after each batch of windows, and an
            event after each layer of a streamed model.
    """
    is_a("models", models, list, tuple)
    target = pick_device(device)
    if dtype != "auto":
        parse_dtype(dtype)
    dtype = str(computing_dtype(dtype, target))
    if against is not None and not ppl:
        raise UserError("`against` compares predictions on a text, got none: name one as `ppl`")
    if stream and tasks:
        raise UserError("`tasks` need the whole model on the device: leave out `stream=True`")
    if record:
        for name in models:
            check_recordable(name)
    everyone = [*models] if against is None else [*models, against]
    configs = {name: load_config(name).get_text_config() for name in everyone}
    if stream:
        for config in configs.values():
            family_of(config)
    if seqlen is None:
        seqlen = min(default_seqlen(positions_of(config)) for config in configs.values())
    tokenizers = {name: load_tokenizer(name) for name in everyone}
    texts = {
        name: {s: load_eval_tokens(s, tokenizers[name], text_column, progress) for s in ppl}
        for name in everyone
    }
    for name in everyone:
        for tokens in texts[name].values():
            check_windows(tokens, configs[name], seqlen)
        if against is not None:
            _check_vocabularies(name, texts[name], configs[name], against, texts[against], configs[against])
    prepared = load_tasks(expand(tasks)) if tasks else None
    progress(ProgressEvent(phase="load"))
    dense = None if against is None else load(against, device="cpu", dtype=dtype)

    def measure(name: str) -> dict[str, Any]:
        """The figures of one model, which is not in memory any more when they are returned."""
        loaded = load(name, device="cpu", dtype=dtype)
        streamed = place([loaded] if dense is None else [loaded, dense], name, target, stream=stream)
        if streamed and tasks:
            raise UserError(f"`tasks` need the whole of {name} on {target}, where it does not fit")
        figures: dict[str, Any] = {
            "model": name,
            "seqlen": seqlen,
            "dtype": dtype_name(loaded.dtype),
            "machine": machine_name(target),
            "streamed": streamed,
            "texts": {source: _describe(source, tokens, seqlen) for source, tokens in texts[name].items()},
            "perplexity": {},
            "against": against,
            "agreement": {},
        }
        for source, tokens in texts[name].items():
            own = predict_on(loaded, tokens, seqlen, target, streamed, progress)
            if dense is None:
                figures["perplexity"][source] = perplexity_of(own, progress=progress)
            else:
                theirs = predict_on(dense, tokens, seqlen, target, streamed, progress)
                figures["agreement"][source] = agreement(theirs, own, progress=progress)
                figures["perplexity"][source] = figures["agreement"][source].pop("perplexity")
        scores = {}
        if prepared is not None:
            check_logits(loaded)
            scores = run_tasks(loaded, tokenizers[name], prepared)
        figures["tasks"] = {task: score.accuracy for task, score in scores.items()}
        figures["task_details"] = {
            task: {"metric": score.metric, "fewshot": score.fewshot, "stderr": score.stderr}
            for task, score in scores.items()
        }
        figures["averages"] = averages(tasks, figures["tasks"])
        if record:
            record_figures(name, figures)
        return figures

    results = []
    for name in models:
        try:
            results.append(measure(name))
        except BrokenModelError as error:
            raise BrokenModelError(f"{name}: {error}") from None
    return results


def _describe(source: str, tokens: Tensor, seqlen: int) -> dict[str, Any]:
    return {
        "split": "test" if source in SPLITS["test"] else None,
        "tokens": len(tokens),
        "windows": len(tokens) // seqlen,
        "sha256": calibration_hash(tokens),
    }


def _check_vocabularies(
    name: str, texts: dict[str, Tensor], config: Any, against: str, other_texts: dict[str, Tensor], other: Any
) -> None:
    """Raises UserError unless two models have as many logits and the same token ids for every text.

    Args:
        name: one model.
        texts: its token ids by text.
        config: its config.
        against: the other model.
        other_texts: the token ids of the other model by text.
        other: the config of the other model.
    """
    if config.vocab_size != other.vocab_size:
        raise UserError(
            f"`against` must have the vocabulary of {name}, {config.vocab_size} tokens; {against} has "
            f"{other.vocab_size}: name the model from which {name} was pruned"
        )
    for source, tokens in texts.items():
        if not torch.equal(tokens, other_texts[source]):
            raise UserError(
                f"`against` must have the tokenizer of {name}; the token ids of {against} for {source} "
                f"differ: name the model from which {name} was pruned"
            )


def predict_on(
    model: PreTrainedModel,
    tokens: Tensor,
    seqlen: int,
    device: torch.device,
    streamed: bool,
    progress: Progress,
) -> Predictions:
    if streamed:
        return predict_streamed(model, tokens, seqlen, device, progress)
    return predict(model, tokens, seqlen)


# ---- memory ------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int | None:
    """The bytes that are free on a GPU, with those that torch keeps for reuse; None for the CPU."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def place(models: list[PreTrainedModel], name: str, device: torch.device, *, stream: bool) -> bool:
    """Moves the models to `device`, or with `stream` to main memory; returns whether they are streamed.

    Models that do not fit on `device` are streamed too, and a warning says so.

    Args:
        models: the models that are needed at the same time.
        name: the name of the first, for the warning.
        device: the device that computes.
        stream: whether to stream the models in any case.
    """
    moved = [model for model in models if next(model.parameters()).device != device]
    needed, free = sum(int(model.get_memory_footprint()) for model in moved), free_memory(device)
    if not stream and free is not None and needed > WEIGHTS_SHARE * free:
        both = " and of its original" if len(models) > 1 else ""
        logger.warning(
            "the weights of %s%s, %.1f GiB, do not fit on %s, which has %.1f GiB free: one decoder layer at "
            "a time is moved there, which is slower",
            name, both, needed / 2**30, device, free / 2**30,
        )  # fmt: skip
        stream = True
    for model in models:
        model.to(torch.device("cpu") if stream else device)  # type: ignore[arg-type]
        if not stream and (free is None or 2 * needed <= WEIGHTS_SHARE * free):
            compress_model(model)  # takes as many bytes as the packed weights
    return stream
