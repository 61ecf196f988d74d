"""An HTTP server for one model, with the requests and answers of OpenAI's API.

The handlers are those of `transformers serve`. The application is drot's: the application of transformers
lists all models in the cache, loads and downloads what a request names, and unloads the model on request.
"""

import asyncio
import contextlib
import json
import socket
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from logging import getLogger
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.cli.serving import utils
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.utils import logging

from drot.checkpoint.load import load, load_tokenizer
from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.serving.answers import reading_answers
from drot.serving.conversation import LEAST_TEMPERATURE
from drot.serving.engine import SEED, STOPPED, Engine, OneEngine, stops_of
from drot.serving.requests import BEYOND_OPENAI, Chat, Completion, check_body, check_prompt
from drot.serving.stops import before_stop

#: seconds that running requests have to end when the server stops, and streams then have to say so
GRACE, LAST_WORDS = 5, 1
#: between these, transformers writes what went wrong in a stream, which may be no JSON
STREAM_ERROR, STREAM_ERROR_END = 'data: {"error": "', '"}\n\n'
#: position of the GenerationConfig in the arguments with which transformers' handlers answer
CONFIG_ARGUMENT = 5


class _OneModel:
    """Mixin in front of a handler of transformers, for one model that is loaded already."""

    kind: type[Completion] = Completion

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str, engine: Engine) -> None:
        super().__init__(ModelManager, OneEngine(engine))  # type: ignore[call-arg]
        self.served = name, model, tokenizer
        self.engine = engine

    def _validate_request(self: Any, body: dict[str, Any]) -> None:
        name, _, tokenizer = self.served
        if body.get("model") not in (None, name):
            raise HTTPException(404, _no_other(name, body["model"]))
        check_prompt(body, tokenizer, self.engine.context)
        vocabulary = self.served[1].config.get_text_config().vocab_size
        check_body(self.kind, body, seeds=self.engine.batch is None, vocabulary=vocabulary)
        if body.get("tool_choice") == "none":
            body.pop("tools", None)
        if body.get("chat_template_kwargs", {}) is None:
            del body["chat_template_kwargs"]
        if 0 < (body.get("temperature") or 0) < LEAST_TEMPERATURE:
            body["temperature"] = 0.0
        known = {name: value for name, value in body.items() if name not in BEYOND_OPENAI}
        super()._validate_request(known)  # type: ignore[misc]

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        return self.served

    def _build_generation_config(self: Any, body: dict[str, Any], base: Any, use_cb: bool = False) -> Any:
        others = {name: value for name, value in body.items() if name not in ("seed", "logit_bias")}
        config = super()._build_generation_config(others, base, use_cb=use_cb)  # type: ignore[misc]
        if bias := body.get("logit_bias"):  # transformers takes that of chats alone, and no whole numbers
            config.sequence_bias = {(int(token),): float(value) for token, value in bias.items()}
        for name in BEYOND_OPENAI:
            if (value := body.get(name)) is not None:
                setattr(config, name, 0 if (name, value) == ("top_k", -1) else value)  # both switch it off
        if body.get("temperature"):  # transformers takes the temperature, and stays greedy for a greedy model
            config.do_sample = True
        if body.get("seed") is not None:
            setattr(config, SEED, body["seed"])
        return config

    def _streaming(self, *request: Any, **options: Any) -> Any:
        response = super()._streaming(*request, **options)  # type: ignore[misc]
        response.body_iterator = _with_end(response.body_iterator)
        return response


def _no_other(name: str, asked: Any) -> str:
    return f"this server has the model {name!r} and no other, got {shortened(asked)}"


async def _with_end(parts: Any) -> AsyncIterator[str]:
    """`parts`, and the line that ends a stream in OpenAI's API; an error as that API has it."""
    async with contextlib.aclosing(parts):
        async for part in parts:
            text, mark, problem = part.partition(STREAM_ERROR)
            yield text
            if mark:
                message = problem.removesuffix(STREAM_ERROR_END)
                yield f"data: {json.dumps(_error(503 if message == STOPPED else 500, message))}\n\n"
                return
    yield "data: [DONE]\n\n"


class _Chat(_OneModel, ChatCompletionHandler):
    kind = Chat

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        name, _, tokenizer = self.served
        if not tokenizer.chat_template:
            raise HTTPException(400, f"{name} has no chat template: send a prompt to /v1/completions")

    async def _non_streaming(self, *request: Any, **options: Any) -> Any:
        """Cuts the message before a stop: for some models, transformers reads it from the tokens again, and
        strips the white space in which the stop may have ended."""
        response = await super()._non_streaming(*request, **options)
        if not (stops := stops_of(request[CONFIG_ARGUMENT])):
            return response
        answer = json.loads(bytes(response.body))
        choice = answer["choices"][0]
        message = choice["message"]
        _, model, tokenizer = self.served
        stripped = choice["finish_reason"] == "stop" and utils.get_response_template(tokenizer, model)
        for part in ("content", "reasoning_content"):
            if text := message.get(part):  # the message of a call of a tool has none
                message[part] = before_stop(text, stops)
                ends = [end for stop in stops if (end := stop.rstrip()) != stop and text.endswith(end)]
                if stripped and ends and message[part] == text:
                    message[part] = text.removesuffix(max(ends, key=len))
        return JSONResponse(answer)


class _Completion(_OneModel, CompletionHandler):
    pass


def application(model: PreTrainedModel, tokenizer: Any, name: str, engine: Engine) -> FastAPI:
    """The application for `model`, which requests call `name`."""
    # without FastAPI's pages of documentation, which load scripts from other hosts
    app = FastAPI(title="drot", docs_url=None, redoc_url=None, openapi_url=None)
    chat, completion = (kind(model, tokenizer, name, engine) for kind in (_Chat, _Completion))
    started = int(time.time())
    listed = {"id": name, "object": "model", "created": started, "owned_by": "drot"}

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: dict[str, Any]) -> Any:
        return await _answer(chat.handle_request, request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: dict[str, Any]) -> Any:
        return await _answer(completion.handle_request, request, body)

    @app.get("/v1/models")
    def models() -> Any:
        return {"object": "list", "data": [listed]}

    @app.get("/v1/models/{asked:path}")
    def one_model(asked: str) -> Any:
        if asked != name:
            raise HTTPException(404, _no_other(name, asked))
        return listed

    @app.get("/health")
    def health() -> Any:
        alive = engine.is_alive()
        return JSONResponse({"status": "ok" if alive else "unhealthy", "model": name}, 200 if alive else 503)

    _add_errors(app)
    return app


def _error(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's API writes it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": status}}


def _add_errors(app: FastAPI) -> None:
    """Lets errors be answered as in OpenAI's API, with one object `error`."""

    def answer(status: int, message: str) -> JSONResponse:
        return JSONResponse(_error(status, message), status)

    @app.exception_handler(AnyHTTPException)
    async def known(_: Request, error: AnyHTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail))

    @app.exception_handler(RequestValidationError)
    async def unreadable(_: Request, error: RequestValidationError) -> JSONResponse:
        return answer(400, f"the body must be a JSON object: {error.errors()[0]['msg']}")

    @app.exception_handler(CBWorkerDeadError)
    async def dead(_: Request, error: CBWorkerDeadError) -> JSONResponse:
        return answer(503, str(error))

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> JSONResponse:
        return answer(500, quoted(error))


async def _answer(handle: Callable[..., Any], request: Request, body: dict[str, Any]) -> Any:
    """The answer of a handler, which is cancelled if the client goes before it is there."""
    # an id of the client could be that of another request
    answer = asyncio.ensure_future(handle(body, str(uuid.uuid4())))
    gone = asyncio.ensure_future(request.receive())  # the body is read, so what comes is the end
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            await asyncio.wait((answer,))
            return JSONResponse({}, 499)  # nobody reads it
        return answer.result()
    except Exception as error:
        if not _of_template(error):
            raise
        raise HTTPException(400, f"the chat template refuses the messages: {quoted(error)}") from error
    finally:
        gone.cancel()
        answer.cancel()


def _of_template(error: Exception) -> bool:
    """Whether a chat template raised the error, as a TypeError for a message without content."""
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, TemplateError) or any(
        frame.f_code.co_filename == "<template>" for frame, _ in frames
    )


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`, 0 being any free one. Raises UserError if it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot listen on `host={host}`, `port={port}` ({quoted(error)}): give another `host` or `port`"
        ) from None


class Server(uvicorn.Server):
    """Answers until it is stopped. Then it takes no request, and those that run have GRACE seconds to end.

    engine: what generates. Its `context` is the most tokens of a prompt and its answer.
    chat: whether the model has a chat template.
    """

    def __init__(self, app: FastAPI, engine: Engine, chat: bool) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE + LAST_WORDS)
        )
        self.engine, self.chat = engine, chat

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers requests until SIGINT or SIGTERM, which is then raised again."""
        log = getLogger("uvicorn.error")

        def runs(record: object) -> bool:  # of an answer that it cuts uvicorn logs the traceback
            return not self.should_exit

        log.addFilter(runs)
        try:
            super().run(sockets)
        finally:
            log.removeFilter(runs)  # another server of this process may follow

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the streams that still run after GRACE; uvicorn would cut them without a word."""
        asyncio.get_running_loop().call_later(GRACE, self.engine.end_streams)
        await super().shutdown(sockets)


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
) -> Iterator[Server]:
    """A server of the model at `model`, which requests call `name`. At the end of the block its engine stops.

    Raises UserError as `drot.load` does, for a model without a fast tokenizer, and for one that cannot be
    batched, unless `sequential`.

    compiled: compiles the decode step of the loaded model, and returns whether it could; None leaves it out.
    """
    if compiled is not None and not sequential:
        raise UserError("`compile` needs `sequential`: a batch has no compiled step")
    if cache_tokens is not None and cache_tokens < 1:
        raise UserError(f"`cache_tokens` must be at least 1, got {cache_tokens}")
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
        with reading_answers(loaded, tokenizer):
            yield Server(app, engine, bool(tokenizer.chat_template))
    finally:
        engine.stop()
