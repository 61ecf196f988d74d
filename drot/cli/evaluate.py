"""The command `drot eval`: its options and its tables."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from drot.cli.options import (
    COMPUTE_DTYPE,
    OUTPUT,
    RUN,
    SEQLEN_DEFAULT,
    TEXT_COLUMN,
    Device,
    Json,
    option,
    print_json,
    stdout_for_the_result,
)
from drot.cli.tables import number_table, output, print_line
from drot.config import CalibrationConfig
from drot.machine.devices import DTYPES

DEFAULTS = CalibrationConfig()

EPILOG = (
    "Example: drot eval llama-2of4 --ppl wikitext2 --tasks paper\n\n"
    "Example: drot eval llama-2of4 other-2of4 --against meta-llama/Llama-3.1-8B"
)


Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Names on the Hugging Face hub, or local folders. A model may be pruned by drot or not. "
        "Several models give one table.",
    ),
]
Ppl = Annotated[
    list[str] | None,
    option(
        "Measures",
        "Text for the perplexity: wikitext2 (its test split); any dataset on the hub as org/name, "
        "org/name:split or org/name:config:split; or a .txt, .json, .jsonl or .parquet file. It may be "
        "given several times. Default without --tasks: wikitext2.",
        metavar="[ORG/NAME|PATH]",
    ),
]
Against = Annotated[
    str | None,
    option(
        "Measures",
        "The dense original of the models. Compares the predictions on the texts of --ppl: share of "
        "equal next tokens, KL divergence, difference in perplexity.",
        metavar="MODEL",
    ),
]
Tasks = Annotated[
    str,
    option(
        "Measures",
        "Tasks of lm_eval, separated by commas, as in piqa,winogrande. paper: the five zero-shot tasks "
        "of the paper, with their average. reasoning: gsm8k and mmlu, with 5 examples. "
        "drot_continuation: a task on Python source that needs no network. Needs the package lm_eval.",
    ),
]
Seqlen = Annotated[
    int | None,
    option(
        "Measures",
        "Length in tokens of the windows into which a text is cut, without overlap. " + SEQLEN_DEFAULT,
    ),
]
Stream = Annotated[
    bool,
    option(
        RUN,
        "Move one decoder layer at a time to the device, for models that are larger than the GPU. A "
        "model that does not fit is streamed in any case. Not with --tasks.",
        "--stream",
    ),
]
NoRecord = Annotated[
    bool,
    option(
        OUTPUT,
        "Leave drot.json as it is. Otherwise the figures are added to the drot.json of each model that "
        "has one; they replace those of the same measurement.",
        "--no-record",
    ),
]


def evaluate(
    models: Models,
    ppl: Ppl = None,
    against: Against = None,
    tasks: Tasks = "",
    seqlen: Seqlen = None,
    text_column: Annotated[str, option("Measures", TEXT_COLUMN)] = DEFAULTS.text_column,
    device: Device = "auto",
    dtype: Annotated[str, option(RUN, COMPUTE_DTYPE, choices=["auto", *DTYPES])] = "auto",
    stream: Stream = False,
    no_record: NoRecord = False,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of models, their agreement with a dense original, and accuracy in tasks."""
    from drot.cli.progress_bars import progress_bar
    from drot.evaluation import evaluate as evaluation

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    original = dense_original(models) if against is None else None
    with stdout_for_the_result(), progress_bar() as progress:
        results = evaluation.evaluate(
            models,
            ppl=ppl or ([] if names and against is None else ["wikitext2"]),
            tasks=names,
            against=against,
            seqlen=seqlen,
            text_column=text_column,
            device=device,
            dtype=dtype,
            stream=stream,
            record=not no_record,
            progress=progress,
        )
    if as_json:
        print_json(results[0] if len(results) == 1 else results)
    else:
        print_figures(results)
    if original is not None and results[0]["texts"]:
        hint = f"drot: --against {original} would compare the predictions with those of the dense original"
        print(hint, file=sys.stderr)


def dense_original(models: list[str]) -> str | None:
    """The local folder from which all `models` were pruned, if their manifests name one."""
    from drot.manifest.manifest import MANIFEST, read_any_manifest

    if not all((Path(model) / MANIFEST).exists() for model in models):
        return None
    originals = {read_any_manifest(model).base_model for model in models}
    original = originals.pop()
    return original if original and not originals and Path(original).is_dir() else None


def print_figures(results: list[dict[str, Any]]) -> None:
    """Prints how the figures of one or several models were measured, and their tables."""
    first, names = results[0], _short_names([figures["model"] for figures in results])
    single = len(results) == 1
    table = number_table(
        "measure", *(["value"] if single else names), title=first["model"] if single else "evaluation"
    )
    for measure, cells in _rows(results):
        table.add_row(measure, *cells)
    output().print(table)
    for source in first["agreement"]:
        output().print(_positions_table(results, names, source))
    for source, text in first["texts"].items():
        split = f", {text['split']} split" if text["split"] else ""
        print_line(
            f"{source}{split}: {text['tokens']} tokens, {text['windows']} windows of {first['seqlen']}, "
            f"SHA-256 of the token ids {text['sha256']}"
        )
    if first["against"] is not None:
        print_line(f"agreement: with {first['against']}; KL divergence of its predictions, in nats")
    streamed = ", one decoder layer at a time" if any(figures["streamed"] for figures in results) else ""
    print_line(f"computed in {', '.join({f['dtype']: 0 for f in results})} on {first['machine']}{streamed}")


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
            for key, words in (("mean", "mean"), ("median", "median"), ("p99", "99th percentile")):
                yield f"  KL divergence, {words}", [f"{each['kl'][key]:.4f}" for each in found]
    for task, details in first["task_details"].items():
        fewshot = f", {details['fewshot']} examples" if details["fewshot"] else ""
        yield f"{task} ({details['metric']}{fewshot})", [_accuracy(figures, task) for figures in results]
    for suite in first["averages"]:
        yield f"average of {suite}", [f"{figures['averages'][suite]:.2%}" for figures in results]


def _accuracy(figures: dict[str, Any], task: str) -> str:
    stderr = figures["task_details"][task]["stderr"]
    return f"{figures['tasks'][task]:.2%}" + (f" ± {stderr:.2%}" if stderr is not None else "")


def _positions_table(results: list[dict[str, Any]], names: list[str], source: str) -> Table:
    """The agreement by the position in a window: equal next tokens, and mean KL divergence."""
    title = f"{source} by position in a window: equal next tokens, mean KL divergence"
    table = number_table("positions", *names, title=title)
    parts = [figures["agreement"][source]["positions"] for figures in results]
    for ranges in zip(*parts, strict=True):
        cells = [f"{part['equal_tokens']:.2%}, {part['kl']:.4f}" for part in ranges]
        table.add_row(f"{ranges[0]['first']} … {ranges[0]['last']}", *cells)
    return table


def _short_names(models: list[str]) -> list[str]:
    """The last parts of the models' names, or the whole names if two models have the same last part."""
    short = [Path(model).name for model in models]
    return short if len(set(short)) == len(short) else models
