"""Options that several commands share, and the output of results on stdout."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from drot.config import SEQLEN, CalibrationConfig
from drot.config.settings import description_of
from drot.machine.devices import DTYPES

#: panels of `--help`
ROTATION, PRUNING, RECOVERY = "Rotation", "Pruning", "Recovery"
CALIBRATION, OUTPUT, RUN = "Calibration", "Output", "Run"


def option(panel: str, help: str, *names: str, choices: Sequence[str] = (), **settings: Any) -> Any:
    """A typer option.

    Args:
        panel: the panel of `--help` that shows the option.
        help: the text in the panel.
        names: the option's names, as in `--json`; by default, the name of the parameter.
        choices: values that `--help` shows and the shell completes. Only the library checks the value, so
            that the error message is the same from Python and from the command line.
        settings: further arguments of typer.Option.
    """
    if choices:
        settings = {"metavar": f"[{'|'.join(choices)}]", "autocompletion": lambda: list(choices)} | settings
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


Json = Annotated[
    bool,
    option(
        OUTPUT,
        "Print the result as one JSON object on stdout. Infinity and NaN become null.",
        "--json",
    ),
]
Device = Annotated[
    str,
    option(
        RUN,
        "Device to use. auto is the first GPU, or the CPU if there is no GPU.",
        metavar="[auto|cpu|cuda:N]",
        autocompletion=lambda: ["auto", "cpu", "cuda", "cuda:0"],
    ),
]
Dtype = Annotated[
    str,
    option(RUN, "Dtype of the weights. auto is the dtype of the checkpoint.", choices=["auto", *DTYPES]),
]
SEQLEN_DEFAULT = f"Default: {SEQLEN}, or what the model reads if that is less."
TEXT_COLUMN = description_of(CalibrationConfig, "text_column")
#: the sources of a text, for the help of --calibration and --text
SOURCES = description_of(CalibrationConfig, "source")
COMPUTE_DTYPE = (
    "Dtype of the computation. auto is the dtype of the checkpoint on a GPU, and float32 on a CPU."
)


@contextlib.contextmanager
def stdout_for_the_result() -> Iterator[None]:
    """Redirects the output of libraries from stdout to stderr, and disables transformers' progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(data: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Prints `data` as standard JSON, which has no Infinity and no NaN: they become null."""
    print(json.dumps(_finite(data), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
