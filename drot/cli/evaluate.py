"""The command `drot eval`, and its tables."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from drot.checkpoint.tables import Table
from drot.cli.log import tell
from drot.cli.output import print_json, print_line, print_table
from drot.cli.progress_bars import working
from drot.core.errors import BrokenModelError, UserError

#: models beside each other in a table; further ones are in a table below
MOST_COLUMNS = 5


def evaluate(
    models: list[str],
    ppl: list[str] | None = None,
    against: str | None = None,
    tasks: str = "",
    seqlen: int | None = None,
    text_column: str = "text",
    limit: int | None = None,
    batch_size: int = 1,
    num_fewshot: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    stream: bool = False,
    fail_above: float | None = None,
    no_record: bool = False,
    as_json: bool = False,
) -> None:
    """Measure the perplexity of models, their agreement with a dense original, and accuracy in tasks.

    Example: drot eval llama-2of4 --ppl wikitext2 --tasks paper

    Arguments:
        models MODEL...: Names on the Hugging Face hub, or local folders. A model may be pruned by drot or
            not. Several models give one table.
    Measures:
        ppl [ORG/NAME|PATH]: Text for the perplexity: wikitext2 (its test split); any dataset on the hub as
            org/name, org/name:split or org/name:config:split; or a .txt, .json, .jsonl or .parquet file. It
            may be given several times. Default without --tasks, with --tasks own and with --against:
            wikitext2.
        against MODEL: The dense original of the models. Compares the predictions on the texts of --ppl: share
            of equal next tokens, KL divergence, difference in perplexity.
        tasks: Tasks of lm_eval, separated by commas, as in piqa,winogrande. paper: the five zero-shot tasks
            of the paper, with their average. reasoning: gsm8k and mmlu, with 5 examples. drot_continuation: a
            task on Python source that needs no network. They need the package lm_eval. own: questions made
            from each text of --ppl, which of four pieces of it comes next; without lm_eval.
        seqlen:
        text_column:
    Tasks:
        limit: Questions of each task to ask, for a quick look. drot.json then gets no figures of tasks.
            Default: all.
        batch_size: Questions that the model reads at a time.
        num_fewshot: Solved examples in the prompt. Default: 5 for gsm8k and mmlu, none for other tasks.
    Run:
        device:
        dtype:
        stream: Read one decoder layer at a time from the files, for models that are larger than the GPU or
            the main memory. A model that does not fit is streamed in any case. Not with tasks of lm_eval.
    Output:
        fail_above PERPLEXITY: Exit with status 1 if the perplexity of a model on the first text is above this
            figure, after all figures were printed and recorded. For tests that watch a model.
        no_record: Leave drot.json as it is. Otherwise the figures are added to the drot.json of each model
            that has one; they replace those of the same measurement.
        as_json: Print the result as JSON on stdout: an object, or a list of objects for several models.
            Infinity and NaN become null.
    """
    from drot.evaluation import evaluate as evaluation

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    texts = ppl or ([] if names and "own" not in names and against is None else ["wikitext2"])
    check_bound(fail_above, texts)
    broken: BrokenModelError | None = None
    with working() as progress:
        try:
            results = evaluation.evaluate(
                models,
                ppl=texts,
                tasks=names,
                against=against,
                seqlen=seqlen,
                text_column=text_column,
                limit=limit,
                batch_size=batch_size,
                num_fewshot=num_fewshot,
                device=device,
                dtype=dtype,
                stream=stream,
                record=not no_record,
                progress=progress,
            )
        except BrokenModelError as error:
            if not error.finished:
                raise
            broken, results = error, list(error.finished)
    if as_json:
        print_json(results[0] if len(models) == 1 else results)
    else:
        print_figures(results)
    if broken is not None:  # after the figures of the other models
        raise broken
    fail(results, texts, fail_above)


def check_bound(fail_above: float | None, texts: list[str]) -> None:
    """Raises UserError for a bound that no perplexity is compared with, or that is no number above 0."""
    if fail_above is None:
        return
    if not texts:
        raise UserError("`fail_above` compares the perplexity on a text: name one as `ppl`")
    if not (math.isfinite(fail_above) and fail_above > 0):
        raise UserError(f"`fail_above` must be a finite number above 0; got {fail_above:g}")


def fail(results: list[dict[str, Any]], texts: list[str], bound: float | None) -> None:
    """Says which models have a perplexity above `bound` on the first text; exits with status 1 if one has."""
    if bound is None:
        return
    text = texts[0]
    above = {figures["model"]: figures["perplexity"][text] for figures in results}
    above = {model: perplexity for model, perplexity in above.items() if perplexity > bound}
    if above:
        named = ", ".join(f"{perplexity:.3f} of {model}" for model, perplexity in above.items())
        tell(f"drot: the perplexity on {text} is above {bound:g}: {named}")
        raise typer.Exit(1)


def print_figures(results: list[dict[str, Any]]) -> None:
    """Prints how the figures of one or several models were measured, and their tables."""
    first, names = results[0], _short_names([figures["model"] for figures in results])
    single = len(results) == 1
    title, columns = (first["model"], ["value"]) if single else ("evaluation", names)
    parts = [slice(start, start + MOST_COLUMNS) for start in range(0, len(results), MOST_COLUMNS)]
    for part in parts:
        print_table(_table(title, "measure", columns[part], _rows(results[part])))
    for source in first["agreement"]:
        title = f"{source} by position in a window: equal next tokens, mean KL divergence"
        for part in parts:
            print_table(_table(title, "positions", names[part], _by_position(results[part], source)))
    print_texts(first)
    for name, figures in zip(names, results, strict=True):
        if figures["texts"] != first["texts"]:
            print_line(
                f"{name} reads other tokens, so its perplexities cannot be compared with {names[0]}'s:"
            )
            print_texts(figures)
    if first["against"] is not None:
        print_line(f"agreement: with {first['against']}; KL divergence of its predictions, in nats")
    streamed = ", one decoder layer at a time" if any(figures["streamed"] for figures in results) else ""
    print_line(f"computed in {', '.join({f['dtype']: 0 for f in results})} on {first['machine']}{streamed}")


def print_texts(figures: dict[str, Any]) -> None:
    """Prints a line for each text on which a perplexity was measured."""
    for source, text in figures["texts"].items():
        split = f", {text['split']} split" if text["split"] else ""
        print_line(
            f"{source}{split}: {text['tokens']} tokens, {text['windows']} windows of {figures['seqlen']}, "
            f"SHA-256 of the token ids {text['sha256']}"
        )


def _table(title: str, first: str, columns: list[str], rows: Iterator[tuple[str, list[str]]]) -> Table:
    """A table of rows, each a name and a cell for each column."""
    return Table(title, [{first: name, **dict(zip(columns, cells, strict=True))} for name, cells in rows])


def _rows(results: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Each measure, with its figure for each model."""
    first = results[0]
    for source in first["texts"]:
        yield f"perplexity on {source}", [f"{figures['perplexity'][source]:.3f}" for figures in results]
        if source in first["agreement"]:
            found = [figures["agreement"][source] for figures in results]
            yield "  of the original", [f"{each['dense_perplexity']:.3f}" for each in found]
            yield "  difference", [f"{each['perplexity_difference']:+.3f}" for each in found]
            yield "  equal next tokens", [f"{each['equal_tokens']:.2%}" for each in found]
            for key, words in (("mean", "mean"), ("p99", "99th percentile")):
                yield f"  KL divergence, {words}", [f"{each['kl'][key]:.4f}" for each in found]
    for task, details in first["task_details"].items():
        fewshot = f", {details['fewshot']} examples" if details["fewshot"] else ""
        yield f"{task} ({details['metric']}{fewshot})", [_accuracy(figures, task) for figures in results]
    for suite in first["averages"]:
        yield f"average of {suite}", [f"{figures['averages'][suite]:.2%}" for figures in results]


def _accuracy(figures: dict[str, Any], task: str) -> str:
    stderr = figures["task_details"][task]["stderr"]
    return f"{figures['tasks'][task]:.2%}" + (f" ± {stderr:.2%}" if stderr is not None else "")


def _by_position(results: list[dict[str, Any]], source: str) -> Iterator[tuple[str, list[str]]]:
    """The agreement by the position in a window: equal next tokens, and mean KL divergence."""
    parts = [figures["agreement"][source]["positions"] for figures in results]
    for ranges in zip(*parts, strict=True):
        cells = [f"{part['equal_tokens']:.2%}, {part['kl']:.4f}" for part in ranges]
        yield f"{ranges[0]['first']} … {ranges[0]['last']}", cells


def _short_names(models: list[str]) -> list[str]:
    """The last parts of the models' names, or the whole names if two models have the same last part."""
    short = [Path(model).name for model in models]
    return short if len(set(short)) == len(short) else models
