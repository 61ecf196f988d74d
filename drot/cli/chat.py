"""The command `drot chat`."""

import contextlib
import io
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from drot.cli.log import tell
from drot.cli.safe_text import readable
from drot.core.errors import UserError, quoted

PROMPT = ">>> "


def chat(
    model: str,
    system: str | None = None,
    max_tokens: int = 512,
    temperature: float | None = None,
    compile: bool = False,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Chat with MODEL in the terminal, or answer each line of stdin but empty ones.

    /new starts again, /exit ends, and so does Ctrl-D. Ctrl-C ends an answer or, between answers, the chat. A
    model without a chat template continues each line as plain text.

    Example: drot chat llama-packed

    Arguments:
        model MODEL: A model: a folder that drot wrote, dense or packed, any other folder, or a name on the
            Hugging Face hub.
    Generation:
        system TEXT: Message that tells the model how to answer.
        max_tokens: The most tokens of an answer.
        temperature: Randomness of the answers. 0 takes the most likely token. Default: the settings of the
            model.
        compile: Compile the step that generates a token. It takes 5 to 20 seconds at the start, and pays in
            long conversations with small models. Where it is not possible, drot says so and chats without.
    Run:
        device:
        dtype: Dtype of the weights. auto is the dtype of the checkpoint.
    """
    from transformers.utils import logging

    from drot.checkpoint.load import load, load_tokenizer
    from drot.machine.devices import is_gpu
    from drot.serving.conversation import Conversation

    logging.disable_progress_bar()
    tokenizer = load_tokenizer(model)
    loaded = load(model, device=device, dtype=dtype)
    conversation = Conversation(
        loaded,
        tokenizer,
        system=system,
        max_tokens=max_tokens,
        temperature=temperature,
        compiled=compile and compiled(loaded, cuda_graph=is_gpu(loaded.device)),
    )
    if not conversation.has_template:
        tell(f"drot: {model} has no chat template: it continues each line as plain text")
    person = sys.stdin.isatty()
    logging.set_verbosity_error()
    if person:
        tell("drot: /new starts again, /exit ends, Ctrl-C ends an answer")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as KeyboardInterrupt it would end an answer only
    for line in _lines(person):
        _answer(conversation, line, person)


def compiled(model: Any, cuda_graph: bool = False) -> bool:
    """Compiles the decode step of a model, and says how long it took or why it is not possible.

    cuda_graph: as in `compiled_settings` (drot/model/compiled.py).
    """
    from drot.model.compiled import compile_step

    tell("drot: compiling the step that generates a token")
    start = time.perf_counter()
    try:
        compile_step(model, cuda_graph=cuda_graph)
    except UserError as error:
        tell(f"drot: not compiled: {error}")
        return False
    tell(f"drot: compiled in {time.perf_counter() - start:.0f} s")
    return True


def _answer(conversation: Any, line: str, person: bool) -> None:
    """Prints the answer to a line. A person may end it by Ctrl-C."""
    from jinja2 import TemplateError

    if line == "/new":
        conversation.start_again()
        return
    try:
        conversation.answer(line, show)
    except UserError as error:  # the context is full
        if not person:
            raise
        tell(f"drot: {error}")
    except TemplateError as error:
        raise UserError(f"the chat template refuses the messages: {quoted(error)}") from error
    except KeyboardInterrupt:
        if not person:
            raise
    print(flush=True)


def show(piece: str) -> None:
    """Prints a piece of an answer at once, with escapes for the characters that a terminal would obey."""
    print(readable(piece), end="", flush=True)


def _lines(person: bool) -> Iterator[str]:
    """The lines that are typed, or those of stdin, up to /exit. Empty lines are left out."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # in some locales Python keeps wrong bytes as half characters
        sys.stdin.reconfigure(errors="strict")
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lets `input` edit the line)
    while True:
        try:
            line = input(PROMPT if person else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            if not person:
                raise
            break
        except UnicodeDecodeError as error:
            raise UserError(
                f"stdin must be UTF-8, got the byte 0x{error.object[error.start]:x}: convert it, for example "
                "with iconv"
            ) from None
        if line == "/exit":
            return
        if line:
            yield line
    if person:
        print()
