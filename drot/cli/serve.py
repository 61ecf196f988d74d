"""The command `drot serve`."""

import json
from pathlib import Path

from drot.cli.chat import compiled
from drot.cli.log import tell
from drot.cli.output import print_line

#: addresses that only programs of the same machine reach
LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    sequential: bool = False,
    cache_tokens: int | None = None,
    compile: bool = False,
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Serve MODEL over HTTP, with the requests and answers of OpenAI's API: chats, completions, streams.

    It ends with Ctrl-C or SIGTERM. It has no password and no encryption.

    Example: drot serve llama-packed --port 8000

    Arguments:
        model MODEL: A model: a folder that drot wrote, dense or packed, any other folder, or a name on the
            Hugging Face hub.
    Server:
        host: Address to listen on. 0.0.0.0 lets other machines in.
        port: Port to listen on. 0 is any free port.
        name: The name by which requests call the model. Default: the name of the folder, or MODEL.
    Generation:
        sequential: Generate one request at a time. An answer then does not depend on other requests, and
            requests can name a seed. Without it, requests are generated in one batch.
        cache_tokens: Tokens of all requests of the batch together for which keys and values are kept.
            It is rounded up to a multiple of 256. Default: what fits in the memory of a GPU, 16384 on a CPU.
        compile: With --sequential: compile the step that generates a token, which takes 5 to 20 seconds at
            the start. Where it is not possible, drot says so and serves without.
    Run:
        device:
        dtype: Dtype of the weights. auto is the dtype of the checkpoint.
    """
    from drot.serving.requirements import check_requirements

    check_requirements()
    from transformers.utils import logging

    from drot.serving.server import bound, serving

    logging.disable_progress_bar()
    listening = bound(host, port)
    own = name or (Path(model).resolve().name if Path(model).is_dir() else model)
    started = serving(
        model,
        own,
        sequential=sequential,
        cache_tokens=cache_tokens,
        compiled=compiled if compile else None,
        device=device,
        dtype=dtype,
    )
    with listening, started as server:
        taken = listening.getsockname()[1]
        address = f"http://{f'[{host}]' if ':' in host else host}:{taken}/v1"
        if host not in LOCAL:
            tell(f"drot: everyone who reaches {host} can use the model: the server has no password")
        if alone := server.engine.always_alone:
            named = ", ".join(f"{key}={value}" for key, value in alone.items())
            tell(f"drot: generation_config.json has {named}: requests are generated one at a time")
        print_line(f"{own} is served at {address} (up to {server.engine.context} tokens). For example:")
        print_line(example(address, own, chat=server.chat))
        server.run([listening])


def example(address: str, name: str, *, chat: bool) -> str:
    """A command line of curl that asks the server."""
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
    body = json.dumps({"model": name, **asked, "max_tokens": 50}).replace("'", "'\\''")
    path = "chat/completions" if chat else "completions"
    return f"  curl {address}/{path} -H 'Content-Type: application/json' -d '{body}'"
