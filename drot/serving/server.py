"""An HTTP server for one model, with the requests and answers of OpenAI's API.

The handlers are those of `transformers serve`. The application is drot's: the application of transformers
lists all models in the cache, loads and downloads what a request names, and unloads the model on request.
"""

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as AnyHTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import CBWorkerDeadError

from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.serving.engine import SEED, Engine, OneEngine
from drot.serving.requests import check_body, check_messages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: seconds that running requests have to end when the server stops
GRACE = 5


class _OneModel:
    """Mixin in front of a handler of transformers, for one model that is loaded already."""

    def __init__(self, model: "PreTrainedModel", tokenizer: Any, name: str, engine: Engine) -> None:
        super().__init__(ModelManager, OneEngine(engine))  # type: ignore[call-arg]
        self.served = name, model, tokenizer
        self.engine = engine

    def _validate_request(self: Any, body: dict[str, Any]) -> None:
        name = self.served[0]
        if body.get("model", name) != name:
            raise HTTPException(404, _no_other(name, body["model"]))
        check_body(body, seeds=self.engine.batch is None)
        super()._validate_request(body)  # type: ignore[misc]

    def _resolve_model(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        return self.served

    def _build_generation_config(self: Any, body: dict[str, Any], base: Any, use_cb: bool = False) -> Any:
        unseeded = {name: value for name, value in body.items() if name != "seed"}
        config = super()._build_generation_config(unseeded, base, use_cb=use_cb)  # type: ignore[misc]
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
    """`parts`, and the line that ends a stream in OpenAI's API."""
    async with contextlib.aclosing(parts):
        async for part in parts:
            yield part
    yield "data: [DONE]\n\n"


class _Chat(_OneModel, ChatCompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        name, _, tokenizer = self.served
        if not tokenizer.chat_template:
            raise HTTPException(400, f"{name} has no chat template: send a prompt to /v1/completions")
        check_messages(body.get("messages"))


class _Completion(_OneModel, CompletionHandler):
    pass


def application(model: "PreTrainedModel", tokenizer: Any, name: str, engine: Engine) -> FastAPI:
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


def _add_errors(app: FastAPI) -> None:
    """Lets errors be answered as in OpenAI's API, with one object `error`."""

    def answer(status: int, message: str) -> JSONResponse:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)

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
    except TemplateError as error:
        raise HTTPException(400, f"the chat template refuses the messages: {quoted(error)}") from error
    finally:
        gone.cancel()
        answer.cancel()


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on `host` and `port`, 0 being any free one. Raises UserError if it cannot."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}, `port={port}` ({quoted(error)}): name another") from None


def run(app: FastAPI, listening: socket.socket) -> None:
    """Answers requests until SIGINT or SIGTERM, which is then raised again."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE)
    uvicorn.Server(config).run(sockets=[listening])
