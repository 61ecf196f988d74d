"""A model that is loaded for its server."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from drot.checkpoint.load import has_tokenizer, load, load_tokenizer
from drot.core.errors import UserError
from drot.serving.engine import Engine
from drot.serving.server import application, run


@dataclass(frozen=True)
class Served:
    """A model with the engine that generates its answers.

    engine: what generates. Its `context` is the most tokens of a prompt and its answer.
    chat: whether the model has a chat template.
    """

    app: Any
    engine: Engine
    chat: bool

    def run(self, listening: socket.socket) -> None:
        """Answers requests until SIGINT or SIGTERM, which is then raised again."""
        run(self.app, listening)


@contextlib.contextmanager
def serving(
    model: str,
    name: str,
    *,
    sequential: bool = False,
    cache_tokens: int | None = None,
    compiled: Callable[[Any], bool] | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> Iterator[Served]:
    """The model at `model`, which requests call `name`. At the end of the block its engine stops.

    Raises UserError as `drot.load` does, for a model without a fast tokenizer, and for one that cannot be
    batched, unless `sequential`.

    compiled: compiles the decode step of the loaded model, and returns whether it could; None leaves it out.
    """
    if compiled is not None and not sequential:
        raise UserError("`compile` needs `sequential`: a batch has no compiled step")
    if cache_tokens is not None and cache_tokens < 1:
        raise UserError(f"`cache_tokens` must be at least 1, got {cache_tokens}")
    if not has_tokenizer(model):
        raise UserError(
            f"{model} has no tokenizer, and a server reads text: copy the tokenizer's files there"
        )
    tokenizer = load_tokenizer(model)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{model} needs a tokenizer.json: a server reads text by a fast tokenizer")
    # in a thread that ends: its OpenMP workers end with it, and would slow down the thread that generates
    with ThreadPoolExecutor(1) as thread:
        loaded = thread.submit(load, model, device=device, dtype=dtype).result()
        done = compiled is not None and thread.submit(compiled, loaded).result()
    logging.set_verbosity_error()  # transformers warns of every request that it receives
    engine = Engine(loaded, sequential=sequential, cache_tokens=cache_tokens, compiled=done)
    try:
        app = application(loaded, tokenizer, name, engine)
        yield Served(app, engine, bool(tokenizer.chat_template))
    finally:
        engine.stop()
