"""Perplexity, agreement with a dense original, and accuracy in tasks, for one model or several."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.checkpoint.load import load_tokenizer
from drot.checkpoint.manifest import Manifest, find_manifest
from drot.checkpoint.opening import load_config
from drot.checkpoint.source import recorded_name
from drot.checkpoint.tables import short
from drot.config import default_seqlen
from drot.core.checks import is_a, is_callable
from drot.core.errors import BrokenModelError, UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.evaluation import choices
from drot.evaluation.agreement import agreement
from drot.evaluation.models import OpenModel, move_models, must_stream, open_model
from drot.evaluation.perplexity import check_logits, load_eval_tokens, perplexity_of
from drot.evaluation.predictions import Predictions, check_windows, predict
from drot.evaluation.record import record as record_figures
from drot.evaluation.record import text_record
from drot.evaluation.tasks import Score, TaskOptions, Tasks, averages, load_tasks, run_tasks
from drot.machine.devices import computing_dtype, dtype_name, parse_dtype, pick_device
from drot.machine.environment import machine_name
from drot.machine.products import without_autocast
from drot.model.families import family_of
from drot.model.sizes import positions_of

logger = logging.getLogger("drot")

#: the entries of figures without those of tasks
NO_TASKS: dict[str, Any] = {"tasks": {}, "task_details": {}, "averages": {}}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How models are measured.

    seqlen: tokens in a window.
    against: the name of the dense original, if there is one.
    task_names: as in `evaluate`. tasks: those of lm_eval among them (`prepare_tasks`).
    """

    seqlen: int
    device: torch.device
    against: str | None = None
    task_names: Sequence[str] = ()
    tasks: Tasks | None = None
    task_options: TaskOptions = field(default_factory=TaskOptions)
    progress: Progress = silent


@without_autocast()
def evaluate(
    models: Sequence[str | Path],
    *,
    ppl: Sequence[str | Path] = (),
    tasks: Sequence[str] = (),
    against: str | Path | None = None,
    seqlen: int | None = None,
    text_column: str = "text",
    limit: int | None = None,
    batch_size: int = 1,
    num_fewshot: int | None = None,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    stream: bool = False,
    record: bool = True,
    progress: Progress = silent,
) -> list[dict[str, Any]]:
    """The figures of each model, in plain JSON types.

    model, seqlen, dtype, machine: what was measured, and where.
    streamed: whether one decoder layer at a time was on the device.
    texts: text → tokens, windows, split (None for a file), and the SHA-256 of its token ids.
    perplexity: text → perplexity (`perplexity_of`).
    against: the model of `against`, or None.
    agreement: text → figures of `agreement` with that model; empty without one.
    tasks: task → accuracy in [0, 1]. task_details: task → metric, number of examples in the prompt, stderr.
    averages: suite → mean accuracy of its tasks, for `paper`.

    Raises UserError for a wrong argument, model, text or task, before the weights are loaded. Models are
    loaded one after the other. Raises BrokenModelError for models without a finite loss, when the others have
    been measured; its `finished` are their figures.

    Args:
        models: names on the Hugging Face hub or local folders.
        ppl: texts for perplexity and agreement, as in `load_eval_tokens`.
        tasks: names of lm_eval's tasks, of its groups, of `drot_continuation`, and of SUITES; `own` stands
            for questions made from each text of `ppl` (choices.py).
        against: the dense original of the models, with which their predictions are compared on `ppl`.
        seqlen: tokens in a window; None is the smallest `default_seqlen` of the models.
        text_column: the column of the text in .json, .jsonl and .parquet files.
        limit, batch_size, num_fewshot: as in TaskOptions. With a `limit`, figures of tasks are not recorded.
        device: `auto`, `cpu` or `cuda[:N]`.
        dtype: dtype of the weights. `auto` is the checkpoint's own on a GPU, and float32 on a CPU.
        stream: reads one decoder layer at a time from the files of the models. That also happens, with a
            warning, if the weights do not fit on the device or into the main memory.
        record: whether to add the figures to the manifest of each model that has one.
        progress: receives the events of reading, loading and measuring.
    """
    for name, given in (("models", models), ("ppl", ppl), ("tasks", tasks)):
        is_a(name, given, list, tuple)
    for task in tasks:
        is_a("tasks", task, str)
    is_a("seqlen", seqlen, int, or_none=True)
    is_a("against", against, str, Path, or_none=True)
    is_a("dtype", dtype, str, torch.dtype)
    is_a("stream", stream, bool)
    is_a("record", record, bool)
    if not models:
        raise UserError("`models` must name one model at least; got none")
    is_callable("progress", progress)
    names, sources = [str(model) for model in models], [str(text) for text in ppl]
    original = None if against is None else recorded_name(against)
    options, target = TaskOptions(limit, batch_size, num_fewshot), pick_device(device)
    _check_arguments(sources, tasks, original, options, dtype, stream)
    _check_manifests(names if record else (), original)
    if record and limit is not None:
        logger.warning("figures of %d questions of a task are not recorded", limit)
        record = bool(sources)
    everyone = [*names, *([original] if original else [])]
    configs = {name: load_config(name).get_text_config() for name in everyone}
    for config in configs.values() if stream else ():
        family_of(config)  # refuses a family whose layers cannot be read alone
    if seqlen is None:
        seqlen = min(default_seqlen(positions_of(config)) for config in configs.values())
    tokenizers = {name: load_tokenizer(name) for name in everyone}
    read = functools.partial(load_eval_tokens, text_column=text_column, progress=progress)
    texts = {name: {s: read(s, tokenizers[name]) for s in sources} for name in everyone}
    _check_texts(texts, configs, seqlen, original)
    if choices.OWN_TASK in tasks:
        for name, source in itertools.product(names, sources):
            choices.check_length(texts[name][source])
    setup = Setup(
        seqlen=seqlen, device=target, against=original, task_names=tasks, tasks=prepare_tasks(tasks),
        task_options=options, progress=progress,
    )  # fmt: skip
    results: list[dict[str, Any]] = []
    broken: list[str] = []
    dtype = dtype_name(computing_dtype(dtype, target))
    for name, found in _measured(names, tokenizers, texts, setup, dtype, stream=stream):
        if isinstance(found, BrokenModelError):
            broken.append(f"{name}: {found}")
            continue
        if record:
            record_figures(name, found if limit is None else found | NO_TASKS)
        results.append(found)
    if broken:
        together = BrokenModelError("; ".join(broken))
        together.finished = results
        raise together
    return results


def _measured(
    names: Sequence[str],
    tokenizers: Mapping[str, Any],
    texts: Mapping[str, dict[str, Tensor]],
    setup: Setup,
    dtype: str,
    *,
    stream: bool,
) -> Iterator[tuple[str, dict[str, Any] | BrokenModelError]]:
    """Each model with its figures, or with what keeps it from having some.

    The model of `setup.against` is opened once, unless the memory has room for it beside some models only.
    """
    original = setup.against
    dense: OpenModel | None = None
    for name in names:
        told = _naming(name, setup.progress) if len(names) > 1 else setup.progress
        told(ProgressEvent(phase="load"))
        whole = dense is not None and dense.weights is None
        needed = [name] if original is None or whole else [name, original]
        streamed = stream or must_stream(needed, dtype, setup.device)
        if original is not None and (dense is None or whole == streamed):
            dense = None  # before its other form takes memory
            dense = open_model(original, dtype, streamed=streamed)
        try:  # the model is in memory during this call only
            yield name, measure(
                open_model(name, dtype, streamed=streamed), name, tokenizers[name], texts[name],
                dataclasses.replace(setup, progress=told), dense,
            )  # fmt: skip
        except BrokenModelError as error:
            yield name, error.with_traceback(None)  # whose frames hold the model


def _naming(model: str, progress: Progress) -> Progress:
    """`progress`, whose events name a model."""
    return lambda event: progress(dataclasses.replace(event, name=short(model)))


def _check_manifests(recorded: Sequence[str], original: str | None) -> None:
    """Raises UserError for a broken manifest of a model in which figures are recorded.

    Logs a warning for an original that was pruned.
    """
    for name in recorded:
        find_manifest(name)
    if original is not None and isinstance(find_manifest(original), Manifest):
        logger.warning("%s is no dense original: drot pruned it", original)


def _check_arguments(
    ppl: Sequence[str],
    tasks: Sequence[str],
    against: str | None,
    options: TaskOptions,
    dtype: str | torch.dtype,
    stream: bool,
) -> None:
    """Raises UserError for arguments of `evaluate` that do not go together."""
    if not tasks and options != TaskOptions():
        raise UserError("`limit`, `batch_size` and `num_fewshot` are of `tasks`, got none: name one")
    if dtype != "auto":
        parse_dtype(dtype)
    if not set(tasks) - {choices.OWN_TASK} and options != TaskOptions(limit=options.limit):
        raise UserError("`batch_size` and `num_fewshot` are of tasks of lm_eval, got none: leave them out")
    if against is not None and not ppl:
        raise UserError("`against` compares predictions on a text, got none: name one as `ppl`")
    if choices.OWN_TASK in tasks and not ppl:
        raise UserError(f"the tasks `{choices.OWN_TASK}` are made from a text, got none: name one as `ppl`")
    if stream and set(tasks) - {choices.OWN_TASK}:
        raise UserError("`tasks` of lm_eval need the whole model on the device: leave out `stream=True`")


def _check_texts(
    texts: Mapping[str, Mapping[str, Tensor]], configs: Mapping[str, Any], seqlen: int, against: str | None
) -> None:
    """Raises UserError unless every text holds a window, and every model has the tokens of `against`.

    texts: model → text → token ids [n].
    """
    for name, config in configs.items():
        for tokens in texts[name].values():
            check_windows(tokens, config, seqlen)
        if against is None:
            continue
        advice = f"name the model from which {name} was pruned"
        if config.vocab_size != (other := configs[against].vocab_size):
            raise UserError(
                f"`against` must have the vocabulary of {name}, {config.vocab_size} tokens; {against} has "
                f"{other}: {advice}"
            )
        for source, tokens in texts[name].items():
            if not torch.equal(tokens, texts[against][source]):
                raise UserError(
                    f"`against` must have the tokenizer of {name}; the token ids of {against} for {source} "
                    f"differ: {advice}"
                )


def prepare_tasks(names: Sequence[str]) -> Tasks | None:
    """The tasks of lm_eval among `names`, as `load_tasks` loads them; None if there are none."""
    of_lm_eval = [name for name in names if name != choices.OWN_TASK]
    return load_tasks(of_lm_eval) if of_lm_eval else None


def measure(
    model: OpenModel,
    name: str,
    tokenizer: Any,
    texts: Mapping[str, Tensor],
    setup: Setup,
    dense: OpenModel | None = None,
) -> dict[str, Any]:
    """The figures of an open model, as `evaluate` returns them.

    A model in memory is moved to the device. If it does not fit there, one layer at a time is.

    Raises BrokenModelError for a model without a finite loss, and UserError for tasks of lm_eval if the model
    does not fit on the device.

    name: of the model. texts: name of a text → its token ids [n].
    dense: the dense original `setup.against`, in memory if `model` is.
    """
    seqlen, device, progress = setup.seqlen, setup.device, setup.progress
    opened = [model] if dense is None else [model, dense]
    streamed = model.weights is not None or move_models([each.model for each in opened], name, device)
    if streamed and set(setup.task_names) - {choices.OWN_TASK}:
        raise UserError(f"`tasks` need the whole of {name} on {device}, where it does not fit")
    perplexities, agreements, records = {}, {}, {}

    def predictions(each: OpenModel, tokens: Tensor, length: int) -> Predictions:
        return predict(each.model, tokens, length, device if streamed else None, progress, each.weights)

    for source, tokens in texts.items():
        found, *of_dense = (predictions(each, tokens, seqlen) for each in opened)
        if not of_dense:
            perplexities[source] = perplexity_of(found, progress=progress)
        else:
            agreements[source] = agreement(of_dense[0], found, progress=progress)
            perplexities[source] = agreements[source].pop("perplexity")
        records[source] = text_record(source, tokens, seqlen)
    scores: dict[str, Score] = {}
    if choices.OWN_TASK in setup.task_names:
        own_tasks = choices.task_names(setup.task_names, texts)
        for task, tokens in zip(own_tasks, texts.values(), strict=True):
            asked = choices.questions(tokens, setup.task_options.limit or choices.QUESTIONS)
            scores[task] = choices.score(predictions(model, asked.flatten(), choices.LENGTH), progress)
    if setup.tasks is not None:
        check_logits(model.model)
        scores |= run_tasks(model.model, tokenizer, setup.tasks, setup.task_options)
    accuracies = {task: score.accuracy for task, score in scores.items()}
    return {
        "model": name,
        "seqlen": seqlen,
        "dtype": dtype_name(model.model.dtype),
        "machine": machine_name(device),
        "streamed": streamed,
        "texts": records,
        "perplexity": perplexities,
        "against": setup.against,
        "agreement": agreements,
        "tasks": accuracies,
        "task_details": {task: score.model_dump(exclude={"accuracy"}) for task, score in scores.items()},
        "averages": averages(setup.task_names, accuracies),
    }
