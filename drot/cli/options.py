"""What the commands share: options, and how results reach stdout."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from drot.devices import DTYPES

#: panels of `--help`
ROTATION, PRUNING, CALIBRATION, OUTPUT, RUN = "Rotation", "Pruning", "Calibration", "Output", "Run"
#: what `--help` shows in the place of the value of an option that takes none
FLAG = " "


def option(panel: str, help: str, *names: str, choices: Sequence[str] = (), **settings: Any) -> Any:
    """An option in a panel of `--help`.

    choices: are shown there and completed by the shell. The library checks the value, so that a mistake
    is answered in the same words from Python and from the command line.
    """
    if choices:
        settings = {"metavar": f"[{'|'.join(choices)}]", "autocompletion": lambda: list(choices)} | settings
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Json = Annotated[
    bool,
    option(
        OUTPUT,
        "Print one JSON object on stdout and nothing else there. A figure that is not finite is null.",
        "--json",
        metavar=FLAG,
    ),
]
Device = Annotated[
    str,
    option(
        RUN,
        "auto is the first GPU, or the CPU.",
        metavar="[auto|cpu|cuda:N]",
        autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0"],
    ),
]
Dtype = Annotated[
    str, option(RUN, "Dtype of the weights. auto is the checkpoint's own.", choices=["auto", *DTYPES])
]
TextColumn = Annotated[str, option(CALIBRATION, "Column of .json, .jsonl and .parquet files with the text.")]


@contextlib.contextmanager
def stdout_for_the_result() -> Iterator[None]:
    """Sends what libraries print to stderr, and switches the bars of transformers off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(data: dict[str, Any]) -> None:
    """Prints standard JSON, which has neither Infinity nor NaN: both become null."""
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
