"""The bodies of requests: what is checked before transformers' handlers read them."""

import json
from typing import Annotated, Any, Literal, Self

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, field_validator, model_validator

from drot.core.checks import shortened

#: characters of a prompt that is tokenised in any case
SHORT_PROMPT = 1 << 16
#: as many as OpenAI has
MOST_STOPS = 4
#: what the server itself gives a chat template
OF_THE_SERVER = {
    "tokenize",
    "return_tensors",
    "return_dict",
    "add_generation_prompt",
    "tools",
    "conversation",
    "messages",
    "chat_template",
    "continue_final_message",
    "documents",
    "padding",
    "processor_kwargs",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "truncation",
}
#: settings of a GenerationConfig that OpenAI's API lacks, under the names that vLLM and SGLang give them
BEYOND_OPENAI = ("top_k", "min_p", "repetition_penalty")
#: words of pydantic's messages → words that fit behind the name of a field
_PLAIN = {
    "Value error, ": "",
    "Field required": "is missing",
    "Input should be None": "must be left out",
    "Input should": "must",
    "String should": "must",
    "List should": "must",
}
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[int, Field(ge=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class RequestPart(BaseModel):
    """A part of a content, or of a body. None is as good as no value, and a bool is no number."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Completion(RequestPart):
    """A completion. Other values than those of a Literal or None are refused: transformers ignores them."""

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # those of BEYOND_OPENAI
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    # transformers makes a factor of it, 1 + penalty
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    stop: Text | list[Text] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Bias] | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: Literal[False, 0] | None = None
    top_logprobs: Literal[0] | None = None
    presence_penalty: float | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    modalities: list[Literal["text"]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    generation_config: None = None
    prediction: None = None
    reasoning_effort: None = None
    suffix: None = None
    web_search_options: None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _has_few_stops(cls, value: Any) -> Any:
        if isinstance(value, list) and not 1 <= len(value) <= MOST_STOPS:
            raise ValueError(f"must be a text or 1 to {MOST_STOPS} texts")
        return value

    @field_validator("presence_penalty")
    @classmethod
    def _has_no_presence_penalty(cls, value: float | None) -> float | None:
        if value:
            raise ValueError("must be 0 or left out, since transformers has no such penalty")
        return value


class TextPart(RequestPart):
    type: Literal["text"]
    text: str


class Function(RequestPart):
    arguments: Json[Any]


class Call(RequestPart):
    function: Function


class Message(RequestPart):
    """A message, of which no images or sounds are served."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Call] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _has_texts_alone(cls, content: Any) -> Any:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise ValueError(f"must be a text, as nothing else is served; a part is {part.get('type')!r}")
        return content

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be a text")
        return self


class NamedFunction(RequestPart):
    name: Text


class Tool(RequestPart):
    type: Literal["function"]
    function: NamedFunction


class Chat(Completion):
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _leaves_the_rest_to_the_server(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := sorted(OF_THE_SERVER & (value or {}).keys()):
            raise ValueError(f"must hold no {taken[0]}, which the server gives the template itself")
        return value


def check_body(kind: type[Completion], body: dict[str, Any], *, seeds: bool, vocabulary: int) -> None:
    """Raises HTTPException 400 for a field of a completion or a chat that has a wrong value or is not served.

    seeds: whether a seed can be kept. vocabulary: the number of tokens.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise HTTPException(400, f"a text holds {half}, half of a character: send whole ones") from None
    try:
        asked = kind.model_validate(body)
    except ValidationError as error:
        raise HTTPException(400, _problem(error)) from None
    if (largest := max(map(int, asked.logit_bias or {}), default=0)) >= vocabulary:
        raise HTTPException(400, f"logit_bias: the model has {vocabulary} tokens, got the token {largest}")
    if asked.seed is not None and not seeds:
        raise HTTPException(
            400, "a seed cannot be kept in a batch: start drot serve with --sequential, or leave it out"
        )


def check_prompt(body: dict[str, Any], tokenizer: Any, context: int | None) -> None:
    """Raises HTTPException 400 for a prompt that cannot fit into the context, before it is tokenised.

    Other requests wait while a prompt is tokenised. A token of the vocabulary has the most characters that
    a token of a prompt can have.
    """
    texts = [body.get("prompt")]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        texts += content if isinstance(content, list) else [content]
    found = (text.get("text") if isinstance(text, dict) else text for text in texts)
    length = sum(len(text) for text in found if isinstance(text, str))
    if context is None or length <= SHORT_PROMPT:
        return
    most = context * max(map(len, tokenizer.get_vocab()))
    if length > most:
        raise HTTPException(
            400,
            f"the prompt has {length} characters, and prompt and answer must have at most {context} tokens "
            "together: send a shorter prompt",
        )


def _problem(error: ValidationError) -> str:
    """The first wrong field, what it must be, and what came."""
    first = error.errors(include_url=False)[0]
    # pydantic names the members of a union too, as in `stop.list[constrained-str].0`
    parts = [str(part) for part in first["loc"] if isinstance(part, int) or part.isidentifier()]
    field = ".".join(part for part in parts if part not in ("str", "bool"))
    problem = first["msg"]
    for words, plain in _PLAIN.items():
        problem = problem.replace(words, plain)
    return f"{field}: {problem}, got {shortened(first['input'])}"
