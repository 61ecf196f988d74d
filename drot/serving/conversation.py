"""A conversation with a model in one process: the answers come piece by piece, as they are generated."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TextStreamer

from drot.core.errors import UserError
from drot.machine.devices import is_gpu
from drot.model.compiled import compiled_settings
from drot.model.sizes import positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: below it, logits divided by the temperature can overflow: it is taken for 0, as in vLLM
LEAST_TEMPERATURE = 1e-5


class Conversation:
    """Messages to and from a model. Without a chat template, each message is continued as plain text.

    messages: the messages so far, as chat templates take them; with a system message, it is the first.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: Any,
        *,
        system: str | None = None,
        max_tokens: int = 512,
        temperature: float | None = None,
        compiled: bool = False,
    ) -> None:
        """Raises UserError for a wrong number, and for a system message without a chat template.

        system: the system message.
        max_tokens: the most tokens of an answer.
        temperature: 0 takes the most likely token; None leaves the settings of the model.
        compiled: whether the decode step is that of `compile_step` (drot/model/compiled.py).
        """
        self.has_template = bool(tokenizer.chat_template)
        if system is not None and not self.has_template:
            raise UserError("`system` needs a model with a chat template, and this has none: leave it out")
        if max_tokens < 1:
            raise UserError(f"`max_tokens` must be at least 1, got {max_tokens}")
        if temperature is not None and not 0 <= temperature < float("inf"):
            raise UserError(f"`temperature` must be 0 or more, got {temperature}")
        self.model: Any = model
        self.tokenizer, self.max_tokens, self.compiled = tokenizer, max_tokens, compiled
        self.settings: dict[str, Any] = {}
        if temperature is not None and temperature < LEAST_TEMPERATURE:
            temperature = 0.0
        if temperature is not None:
            self.settings = {"do_sample": temperature > 0}
        if temperature:
            self.settings["temperature"] = temperature
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = [*self._system]
        self.context = positions_of(model.config)

    def start_again(self) -> None:
        """Forgets all messages but the system message."""
        self.messages = [*self._system]

    def answer(self, text: str, show: Callable[[str], None]) -> str:
        """The answer to the message `text`, which joins the messages with it.

        Raises UserError if the conversation is longer than the context, and TemplateError of jinja2 if the
        chat template refuses the messages. After an exception, as KeyboardInterrupt, the message and what was
        generated up to it are part of the conversation, if anything was.

        show: gets the pieces of the answer.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        if self.has_template:
            inputs = self.tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = self.tokenizer(text, return_tensors="pt")
        tokens = inputs["input_ids"].shape[-1]
        room = self.max_tokens if self.context is None else min(self.max_tokens, self.context - tokens)
        if room < 1:
            raise UserError(
                f"the conversation has {tokens} tokens, and the model reads {self.context} with its answer: "
                "start again with /new"
            )
        shown: list[str] = []

        def take(piece: str) -> None:
            shown.append(piece)
            show(piece)

        compiled: dict[str, Any] = {}
        if self.compiled:
            graph = is_gpu(self.model.device)
            compiled = compiled_settings(tokens + room, self.context, cuda_graph=graph)
        try:
            self.model.generate(
                **inputs.to(self.model.device),
                max_new_tokens=room,
                streamer=_Pieces(self.tokenizer, take),
                **self.settings,
                **compiled,
            )
        finally:
            if shown and self.has_template:
                self.messages = [*asked, {"role": "assistant", "content": "".join(shown)}]
        return "".join(shown)


class _Pieces(TextStreamer):
    """Gives the pieces of a generated text to a function."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.show(text)
