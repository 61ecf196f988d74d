"""The bodies of requests: what is checked before transformers' handlers read them."""

import json
import math
from typing import Any

from fastapi import HTTPException

#: field → the values at which it changes nothing. drot refuses others, which transformers would ignore.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "echo": (False,), "logprobs": (False, 0), "top_logprobs": (0,)},
    **{"presence_penalty": (0,), "response_format": ({"type": "text"},), "modalities": (["text"],)},
    **{"audio": (), "functions": (), "function_call": (), "tool_choice": ("auto",), "prediction": ()},
    **{"parallel_tool_calls": (True,), "web_search_options": ()},
}
#: number → least and greatest value
RANGES = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "frequency_penalty": (-1, 2),  # transformers makes a factor of it, 1 + penalty
    "max_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "seed": (-(2**63), 2**63 - 1),
}
WHOLE = ("max_tokens", "max_completion_tokens", "seed")
ROLES = ("system", "developer", "user", "assistant", "tool")
#: the longest list of stop strings, as OpenAI has it
MOST_STOPS = 4


def refuse(problem: str) -> None:
    """Raises HTTPException 400."""
    raise HTTPException(400, problem)


def check_body(body: dict[str, Any], *, seeds: bool) -> None:
    """Raises HTTPException 400 for a field of a completion or a chat that has a wrong value or is not served.

    seeds: whether a seed can be kept.
    """
    if "generation_config" in body:
        refuse("generation_config is not served: send temperature, top_p, max_tokens and stop")
    if body.get("seed") is not None and not seeds:
        refuse("a seed cannot be kept in a batch: start drot serve with --sequential, or leave it out")
    for field, kept in WITHOUT_EFFECT.items():
        value = body.get(field)
        if value is not None and value not in kept:
            refuse(f"{field} is not served, got {json.dumps(value)[:100]}: leave it out")
    for field, (least, most) in RANGES.items():
        value = body.get(field)
        if value is None:
            continue
        number = isinstance(value, int) or (isinstance(value, float) and field not in WHOLE)
        if isinstance(value, bool) or not number or not least <= value <= most or value == math.inf:
            kind = "a whole number" if field in WHOLE else "a number"
            refuse(f"{field} must be {kind} from {least} to {most}, got {json.dumps(value)[:100]}")
    if body.get("frequency_penalty") == -1:
        refuse("frequency_penalty must be above -1, got -1")
    if not isinstance(body.get("stream", False), bool | None):
        refuse(f"stream must be true or false, got {json.dumps(body['stream'])[:100]}")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and not (
        isinstance(stops, list)
        and 0 < len(stops) <= MOST_STOPS
        and all(s and isinstance(s, str) for s in stops)
    ):
        refuse(f"stop must be a text or a list of 1 to {MOST_STOPS} texts, got {json.dumps(stop)[:100]}")
    bias = body.get("logit_bias")
    if bias is not None and not (
        isinstance(bias, dict)
        and all(key.isdecimal() for key in bias)
        and all(isinstance(value, int | float) for value in bias.values())
    ):
        refuse(f"logit_bias must be an object of token ids and numbers, got {json.dumps(bias)[:100]}")


def check_messages(messages: Any) -> None:
    """Raises HTTPException 400 unless `messages` is a list of messages with a role and a text."""
    if not isinstance(messages, list) or not messages:
        refuse("messages must be a list of at least one object with role and content")
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            refuse(f"{where} must be an object with role and content")
        if message.get("role") not in ROLES:
            refuse(
                f"{where}.role must be one of {', '.join(ROLES)}, got {json.dumps(message.get('role'))[:100]}"
            )
        content = message.get("content")
        parts = [] if content is None or isinstance(content, str) else content
        texts = isinstance(parts, list) and all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in parts
        )
        if not texts or (content is None and not message.get("tool_calls")):
            refuse(f"{where}.content must be a text or a list of parts of type text: no other is served")
        _check_calls(f"{where}.tool_calls", message.get("tool_calls"))


def _check_calls(where: str, calls: Any) -> None:
    for call in [] if calls is None else calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        try:
            json.loads(arguments)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            refuse(
                f"{where} must be a list of calls with function.name and function.arguments, a text of JSON"
            )
