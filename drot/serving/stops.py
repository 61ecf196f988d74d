"""Stops: texts that end an answer. As in OpenAI's API, neither they nor what follows them is part of it."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria
from transformers.cli.serving.utils import _StreamError

#: the most tokens of a character, which tokens of single bytes may divide
TOKENS_OF_A_CHARACTER = 4


class BeforeStop:
    """A text that comes in pieces, up to the first of several stops.

    found: whether a stop came.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops, self.held, self.found = stops, "", False

    def take(self, piece: str) -> str:
        """What can be sent after the next piece. An end that may be the beginning of a stop is held back."""
        if self.found:
            return ""
        text = self.held + piece
        places = [text.index(stop) for stop in self.stops if stop in text]
        self.found = bool(places)
        end = min(places) if places else len(text) - self._length_of_beginning(text)
        self.held = "" if self.found else text[end:]
        return text[:end]

    def rest(self) -> str:
        """What was held back, when no more pieces come."""
        held, self.held = self.held, ""
        return held

    def _length_of_beginning(self, text: str) -> int:
        """The length of the longest end of `text` with which a stop begins."""
        return max(
            (
                length
                for stop in self.stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )


def before_stop(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first stop."""
    answer = BeforeStop(stops)
    return answer.take(text) + answer.rest()


class AtStop(StoppingCriteria):
    """Ends the generation with the token in which a stop ends. A stop in the prompt does not count.

    transformers' own criterion also finds a stop that begins in the prompt.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: int, config: GenerationConfig) -> None:
        """prompt: the number of its tokens. config: of the request, as the handler of transformers has it."""
        self.tokenizer, self.stops, self.prompt, self.config = tokenizer, stops, prompt, config
        self.tokens = TOKENS_OF_A_CHARACTER * (1 + max(map(len, stops)))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """input_ids [1, tokens of the prompt and the answer] -> whether the generation ends, bool [1]."""
        start = max(self.prompt, input_ids.shape[-1] - self.tokens)
        text = self.tokenizer.decode(input_ids[0, start:])
        found = any(stop in text for stop in self.stops)
        if found:  # with a limit, the handler would take an answer that has just so many tokens for cut off
            self.config.max_new_tokens = None
        return torch.full((1,), found, device=input_ids.device)


class StreamQueue:
    """The queue of a stream of transformers, without the first stop and the texts after it."""

    def __init__(self, queue: Any, streamer: Any, stops: Sequence[str]) -> None:
        """streamer: what fills `queue`."""
        self.queue, self.streamer, self.answer = queue, streamer, BeforeStop(stops)
        self.kind: Any = str
        self.ready: deque[Any] = deque()

    def end(self, problem: str) -> None:
        """Ends the stream with an error, unless its answer is whole: its end lies before the error then."""
        self.streamer.cancel()
        self.queue.put_nowait(_StreamError(problem))

    async def get(self) -> Any:
        """The next item, when there is one."""
        while not self.ready:
            self._take(await self.queue.get())
        return self.ready.popleft()

    def get_nowait(self) -> Any:
        """The next item. Raises asyncio.QueueEmpty if there is none."""
        while not self.ready:
            self._take(self.queue.get_nowait())
        return self.ready.popleft()

    def _take(self, item: Any) -> None:
        """Items are texts of the answer or of the reasoning, a class of its own, and others, as the end."""
        if type(item) is not self.kind:
            self._send(self.answer.rest())
        if isinstance(item, str):
            self.kind = type(item)
            self._send(self.answer.take(item))
        else:
            self.ready.append(item)

    def _send(self, text: str) -> None:
        if text:
            self.ready.append(self.kind(text))
