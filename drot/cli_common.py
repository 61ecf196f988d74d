"""What the commands of drot share: options, and how results reach stdout."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="One JSON object on stdout and nothing else there; a figure that is not finite is null.",
    ),
]
Device = Annotated[str, typer.Option(help="auto (the first GPU, else the CPU), cpu or cuda[:N].")]
TextColumn = Annotated[str, typer.Option(help="Column of json, jsonl and parquet files.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


@contextlib.contextmanager
def stdout_kept_for_the_result() -> Iterator[None]:
    """Sends whatever libraries print to stderr, and switches transformers' own bars off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(data: dict[str, Any]) -> None:
    """JSON as its standard has it: without Infinity and NaN, which stand there as null."""
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
