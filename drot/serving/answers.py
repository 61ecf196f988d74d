"""How transformers' handlers read what a model wrote: reasoning, calls of tools, and the text beside them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from jinja2 import TemplateError
from transformers.cli.serving import chat_completion, utils

#: what transformers raises for a call of a tool that is no JSON, or lacks its name or arguments
MALFORMED = (ValueError, KeyError, TypeError)
#: the name of transformers' response templates by model type
FALLBACKS = "_RESPONSE_TEMPLATE_FALLBACKS"


@contextlib.contextmanager
def reading_answers(model: Any, tokenizer: Any) -> Iterator[None]:
    """A block in which what a chat cannot be read as stays text.

    transformers reads the answer of some model types by marks, such as <tool_call>. It raises an error for a
    call that is malformed or cut off: the answer is then the text as it was written. And where the chat
    template of the model is not that of its type, transformers takes the whole prompt for the beginning of
    the answer: such a model is read as any other.
    """
    build, read = chat_completion.build_response_parser, chat_completion.parse_assistant_message

    def built(*args: Any, **options: Any) -> Any:
        parser = build(*args, **options)
        return None if parser is None else LenientParser(parser, tokenizer.all_special_tokens)

    def message(*args: Any, **options: Any) -> Any:
        try:
            return read(*args, **options)
        except MALFORMED:
            return options["cleaned_content"], None, None

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(chat_completion, "build_response_parser", built))
        patches.enter_context(mock.patch.object(chat_completion, "parse_assistant_message", message))
        if not _is_anchored(model, tokenizer) and hasattr(utils, FALLBACKS):
            patches.enter_context(mock.patch.object(utils, FALLBACKS, {}))
        yield


def _is_anchored(model: Any, tokenizer: Any) -> bool:
    """Whether the chat template writes where an answer begins, as the response template expects it."""
    template = utils.get_response_template(tokenizer, model)
    if not isinstance(template, dict) or not tokenizer.chat_template:
        return True
    anchors = template.get("start_anchor") or ""
    try:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "."}], add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, *MALFORMED):  # the requests say what is wrong with it
        return True
    return any(anchor in prompt for anchor in ([anchors] if isinstance(anchors, str) else anchors))


class LenientParser:
    """A ResponseParser of transformers that goes on with plain text where it cannot read what it gets.

    special: the special tokens, which that text is not to hold.
    """

    def __init__(self, parser: Any, special: list[str]) -> None:
        self._parser, self._special = parser, special
        self.initial_events = parser.initial_events
        #: the text that no event has given yet, and whether the rest is plain text
        self._held, self._plain = "", False

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The events of further text."""
        self._held += text
        if self._plain:
            return self._as_text()
        try:
            events: list[dict[str, Any]] = self._parser.feed(text)
            utils.response_events_to_chunks(events)
        except MALFORMED:
            self._plain = True
            return self._as_text()
        for event in events:
            self._forget(event)
        return events

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The message and the last events."""
        if self._plain:
            return {}, []
        try:
            message, events = self._parser.finalize()
            utils.response_events_to_chunks(events)
        except MALFORMED:
            return {}, self._as_text()
        return message, events

    def _forget(self, event: dict[str, Any]) -> None:
        """Leaves out of the held text what an event has given."""
        text = event.get("text") or ""
        if event["type"] == "region_close" and event.get("field") == "tool_calls":
            self._held = ""
        elif event["type"] == "region_chunk" and text and not event.get("dirty"):
            # behind the text can lie a mark that has only begun
            self._held = "" if self._held.endswith(text) else self._held.partition(text)[2]

    def _as_text(self) -> list[dict[str, Any]]:
        text, self._held = self._held, ""
        for token in self._special:
            text = text.replace(token, "")
        return [{"type": "region_chunk", "field": "content", "text": text}] if text else []
