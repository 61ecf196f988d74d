"""Access to the Hugging Face hub, with one quick request in place of many slow retries without a network."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drot.core.errors import UserError, quoted

#: the name of a model on the hub: MODEL or OWNER/MODEL
HUB_NAME = re.compile(r"(?=.{1,96}$)(\w[\w.-]*/)?\w[\w.-]*")
#: seconds in which the hub must answer
PATIENCE = 5.0


def check_model_name(model: str) -> None:
    """Raises UserError if `model` is neither a folder nor a file, and no name on the hub. Asks nobody.

    A GGUF file has the folder, or the name on the hub, in front of its own name.
    """
    owner = model.rpartition("/")[0] if model.endswith(".gguf") else model
    if not (os.path.exists(Path(owner)) or HUB_NAME.fullmatch(owner)):
        raise UserError(f"there is no such folder: {model!r}")


@contextlib.contextmanager
def hub_access(problem: str, advice: str) -> Iterator[None]:
    """A block in which the libraries of Hugging Face reach the hub, or use their caches only.

    The caches are used if the environment variable HF_HUB_OFFLINE is set, or if the hub does not answer one
    request within PATIENCE; the libraries themselves would ask six times and wait between. An exception in
    the block becomes a UserError that says why the hub was not reached: '<problem> (<reason>): <advice>'. A
    UserError passes unchanged.
    """
    reason = ""
    try:
        with quick_hub() as reason:
            yield
    except UserError:
        raise
    except Exception as error:  # the libraries raise exceptions of many classes
        raise UserError(f"{problem} ({reason or quoted(error)}): {advice}") from error


@contextlib.contextmanager
def quick_hub() -> Iterator[str]:
    """The block of `hub_access`. Its exceptions stay as they are. Yields why the hub is not asked, or ''."""
    reason = _unreachable()
    with _offline() if reason else contextlib.nullcontext():
        yield reason


def _unreachable() -> str:
    """Why the hub cannot be reached; an empty string if it answers."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it is not in the cache"
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)  # any status is an answer
    except Exception as error:  # of httpx, whose name and version depend on those of huggingface_hub
        return f"no connection to {constants.ENDPOINT}, {quoted(error)}, and it is not in the cache"
    return ""


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """A block in which huggingface_hub, transformers and datasets, where it is imported, use their caches."""
    from huggingface_hub import constants

    modules: list[Any] = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
