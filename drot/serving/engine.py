"""What generates the answers of the server: requests in one batch, or one after the other.

Both ways are those of `transformers serve`: continuous batching, in which a request joins and leaves the
batch at any token, and `generate`. drot adds the limit of the context, settings for each request of a batch,
an end for requests whose client has gone, and answers that end before a stop.
"""

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteria
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBGenerateManager,
    GenerateManager,
    GenerationState,
)

from drot.core.errors import UserError, quoted
from drot.machine.devices import is_gpu
from drot.model.compiled import compiled_settings
from drot.model.sizes import head_shape, positions_of
from drot.serving.sampling import Sampling, beyond_a_batch, sampling_of
from drot.serving.stops import AtStop, StreamQueue, before_stop

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: tokens of a page of the cache of keys and values
PAGE = 256
#: Tokens of all requests that the cache holds on a CPU, whose free memory other programs use as well, and the
#: most tokens of one step there: the attention of a step takes a mask of step x cache. On a GPU, transformers
#: takes both from the free memory.
CPU_CACHE_TOKENS, CPU_STEP_TOKENS = 16384, 512
#: seconds in which a GPU or a CPU must generate the first token of a new server
PATIENCE = 300.0
#: the error of a stream that ends before its answer
STOPPED = "the server was stopped: the answer is not whole"
ONE_AT_A_TIME = "try `sequential=True`, which generates one request at a time"


class Alone(GenerateManager):
    """One request after the other, by `generate`.

    compiled: whether the decode step is that of `compile_step` (drot/model/compiled.py).
    context: the most tokens that the model reads, or None.
    """

    def __init__(self, compiled: bool, context: int | None) -> None:
        super().__init__()
        self.compiled, self.context = compiled, context

    def prepared(self, inputs: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
        """Adds the settings of a compiled step, and takes the stops from transformers, which keeps them."""
        stops = config.stop_strings or []
        setattr(config, STOPS, [stops] if isinstance(stops, str) else stops)
        config.stop_strings = None
        if self.compiled and config.max_new_tokens is not None:
            tokens = inputs["input_ids"].shape[-1] + config.max_new_tokens
            config.update(**compiled_settings(tokens, self.context))
        return inputs

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """What transformers' class returns. A cancelled request stops."""
        gone = threading.Event()
        inputs = {**inputs, "stopping_criteria": [_Gone(gone)]}
        answer = super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        try:
            text, *tokens = await asyncio.shield(asyncio.ensure_future(answer))
            return before_stop(text, stops_of(gen_config)), *tokens
        except asyncio.CancelledError:
            gone.set()
            raise


#: attributes of the GenerationConfig of a request: a seed, if the request names one, and its stops
SEED, STOPS = "seed_of_request", "stops_of_request"


def stops_of(config: GenerationConfig) -> list[str]:
    """The stops of a request; [] if it has none, as each request of the batch."""
    stops: list[str] = getattr(config, STOPS, [])
    return stops


class _Asked:
    """A model whose `generate` does what a request asks beyond the settings of transformers.

    If the request names a seed, the generator of random numbers is seeded first. The thread that generates
    runs both as one job. As two jobs, that of another request could come between.
    """

    def __init__(self, model: Any, config: GenerationConfig) -> None:
        self.model, self.config = model, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, **inputs: Any) -> Any:
        if stops := stops_of(self.config):
            at_stop = AtStop(inputs["tokenizer"], stops, inputs["input_ids"].shape[-1], self.config)
            inputs["stopping_criteria"] = [*inputs.get("stopping_criteria", ()), at_stop]
        if (seed := getattr(self.config, SEED, None)) is None:
            return self.model.generate(**inputs)
        device = self.model.device
        gpus = [device.index or 0] if is_gpu(device) else []
        with torch.random.fork_rng(gpus, device_type=device.type):  # later requests do not draw from it
            torch.manual_seed(seed)
            return self.model.generate(**inputs)


class _Gone(StoppingCriteria):
    def __init__(self, gone: threading.Event) -> None:
        self.gone = gone

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.gone.is_set(), device=input_ids.device)


class Batch(CBGenerateManager):
    """Continuous batching, with settings of its own for each request."""

    def __init__(self, model: "PreTrainedModel", cache_tokens: int | None) -> None:
        """Starts the batch. Raises UserError if the model cannot be batched.

        cache_tokens: tokens of all requests that the cache holds. None: what fits in the free memory of a
            GPU, or CPU_CACHE_TOKENS.
        """
        super().__init__()
        if reason := not_batched(model):
            raise UserError(f"the requests cannot be batched ({reason}): {ONE_AT_A_TIME}")
        self.vocabulary = model.config.get_text_config().vocab_size
        on_gpu = is_gpu(model.device)
        if cache_tokens is None and not on_gpu:
            cache_tokens = CPU_CACHE_TOKENS
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=None if cache_tokens is None else -(-cache_tokens // PAGE),
            max_batch_tokens=None if on_gpu else CPU_STEP_TOKENS,
            auto_switch_to_flash=False,  # it would download kernels from the hub
        )
        try:
            manager: Any = model.init_continuous_batching(  # type: ignore[operator]
                generation_config=GenerationConfig(do_sample=True, eos_token_id=-1),
                continuous_batching_config=config,
            )
        except Exception as error:
            raise UserError(f"the requests cannot be batched ({quoted(error)}): {ONE_AT_A_TIME}") from error
        manager.logit_processor = Sampling()
        self._cb: Any = manager
        self._sampling: dict[str, Any] = {}
        add, cancel = manager.add_request, manager.cancel_request
        # transformers passes no sampling settings of a request on, and keeps the callbacks of cancelled ones
        manager.add_request = lambda *given, **named: add(*given, **named, **self._sampling)

        def cancel_and_forget(request_id: str) -> None:
            cancel(request_id)
            manager.output_router.result_handlers.pop(request_id, None)

        manager.cancel_request = cancel_and_forget
        manager.start()
        self._generate_one_token()

    def _generate_one_token(self) -> None:
        """Raises UserError if the thread that generates fails on its first request."""
        self._sampling = sampling_of(GenerationConfig(), self.vocabulary)
        self._cb.add_request([0], max_new_tokens=1)
        end = time.monotonic() + PATIENCE
        result = None
        while result is None and self.is_alive() and time.monotonic() < end:
            result = self._cb.get_result(timeout=0.1)
        error = self._cb.background_thread_status.fatal_error or (result and result.error)
        if result is None or error:
            self.end()
            reason = quoted(error) if isinstance(error, Exception) else error or "no token came"
            raise UserError(f"the requests cannot be batched ({reason}): {ONE_AT_A_TIME}")

    @property
    def cache_tokens(self) -> int:
        """The tokens that the cache of keys and values holds."""
        config = self._cb.continuous_batching_config
        return int(config.num_blocks * PAGE)

    def prepared(self, inputs: dict[str, Any], config: GenerationConfig) -> dict[str, Any]:
        """The inputs as the batch takes them. The request that joins the batch next has these settings."""
        self._sampling = sampling_of(config, self.vocabulary)
        return {"input_ids": inputs["input_ids"][0].tolist()}

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """What transformers' class returns. A cancelled request leaves the batch."""
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except asyncio.CancelledError:
            self._cb.cancel_request(request_id)
            raise

    def end(self) -> None:
        """Stops the thread that generates, whatever it works on."""
        self._cb.stop(block=True, timeout=10, hard_stop=True)


def not_batched(model: "PreTrainedModel") -> str | None:
    """Why the model would answer otherwise in a batch; None if it would not.

    The batch has an attention of its own in place of an eager one, without the cap of its scores, and one
    choice of the long or the short factors of RoPE for all requests of a step. Its cache has heads of one
    size.
    """
    config = model.config.get_text_config()
    if len({head_shape(config, index).head_dim for index in range(config.num_hidden_layers)}) > 1:
        return "its layers have heads of different sizes"
    if config._attn_implementation == "eager":
        return "torch has no kernel for its attention"
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [each for each in (rope, *rope.values()) if isinstance(each, dict)]
    kinds = {part.get("rope_type") for part in parts} & {"longrope", "dynamic"}
    return f"its RoPE of type {kinds.pop()} depends on the longest request" if kinds else None


def take_turns(model: "PreTrainedModel") -> None:
    """Lets one thread at a time run the model.

    transformers writes whether the attention of a call is causal into the config of the model while the call
    runs. A call in another thread would read it there, and look at tokens that come later.
    """
    turn = threading.Lock()

    def begin(*call: Any) -> None:
        turn.acquire()

    def end(*call: Any) -> None:
        turn.release()

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


class Engine(BaseGenerateManager):
    """Generates each request in the batch, or alone if there is none or the batch cannot hold its settings.

    context: the most tokens of a prompt and its answer.
    streams: those that the server still sends.
    always_alone: the settings of the model, of generation_config.json, with which no request can be batched.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        sequential: bool = False,
        cache_tokens: int | None = None,
        compiled: bool = False,
    ) -> None:
        """Raises UserError if the model cannot be batched.

        sequential: whether to generate one request at a time.
        cache_tokens: as of `Batch`.
        compiled: as of `Alone`.
        """
        if not sequential:
            take_turns(model)  # `Alone` has one thread, and a compiled step cannot wait
        context = positions_of(model.config)
        embedding: Any = model.get_input_embeddings()
        self.vocabulary: int = embedding.weight.shape[0]
        self.streams: WeakSet[StreamQueue] = WeakSet()
        self.always_alone: dict[str, Any] = {}
        if not sequential and model.generation_config is not None:
            self.always_alone = beyond_a_batch(model.generation_config)
        self.alone = Alone(compiled, context)
        self.batch = None if sequential else Batch(model, cache_tokens)
        limits = [context, None if self.batch is None else self.batch.cache_tokens]
        self.context: int | None = min((limit for limit in limits if limit is not None), default=None)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *request: Any, **options: Any
    ) -> Any:
        """The queue of the pieces of text and the streamer. Raises HTTPException 400 for a long prompt."""
        engine, inputs = self._prepared(inputs, gen_config)
        queue, streamer = engine.generate_streaming(
            _Asked(model, gen_config), processor, inputs, gen_config, *request, **options
        )
        stream = StreamQueue(queue, streamer, stops_of(gen_config))
        self.streams.add(stream)
        return stream, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Text, number of the tokens of the prompt, and the new tokens. Raises HTTPException as above."""
        # up to the first `await`, where the request is in the batch, no other request comes between
        engine, inputs = self._prepared(inputs, gen_config)
        asked = _Asked(model, gen_config)
        return await engine.generate_non_streaming(asked, processor, inputs, gen_config, request_id)

    def end_streams(self) -> None:
        """Ends the streams whose answer is not whole with the error STOPPED."""
        for stream in self.streams:
            stream.end(STOPPED)

    def _prepared(self, inputs: Any, config: GenerationConfig) -> tuple[Any, dict[str, Any]]:
        """What generates a request, and the inputs that it takes.

        `max_new_tokens` of the request is lowered to what the context has room for.
        """
        tokens = inputs["input_ids"].shape[-1]
        if tokens == 0:
            raise HTTPException(400, "the prompt has no tokens: send a text")
        if (largest := int(inputs["input_ids"].max())) >= self.vocabulary:
            raise HTTPException(
                400,
                f"the tokenizer gives token {largest} for the prompt, and the model has {self.vocabulary} "
                "tokens: leave out the text of that token",
            )
        if self.context is not None:
            if tokens >= self.context:
                raise HTTPException(
                    400,
                    f"the prompt has {tokens} tokens, and prompt and answer must have at most {self.context} "
                    "tokens together: send a shorter prompt",
                )
            config.max_new_tokens = min(config.max_new_tokens or self.context, self.context - tokens)
        engine = self.batch if self.batch is not None and not beyond_a_batch(config) else self.alone
        return engine, engine.prepared(inputs, config)

    def is_alive(self) -> bool:
        """Whether the thread of the batch, if there is one, still generates."""
        return self.batch is None or self.batch.is_alive()

    def stop(self) -> None:
        """Ends the batch. Requests in it fail."""
        if self.batch is not None:
            self.batch.end()


class OneEngine(GenerationState):
    """Tells the handlers of transformers to use one engine for all requests."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def get_manager(self, model_id: str, use_cb: bool = False) -> Engine:
        """The engine."""
        return self.engine
