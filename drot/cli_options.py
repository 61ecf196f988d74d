"""What the commands share: options, and the one way in which a result reaches stdout."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else there.")]
Device = Annotated[str, typer.Option(help="auto (the first GPU, else the CPU), cpu or cuda[:N].")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]


@contextlib.contextmanager
def stdout_kept_for_the_result() -> Iterator[None]:
    """Sends whatever libraries print to stderr, and switches transformers' own bars off."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data))
