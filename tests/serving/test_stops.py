"""Stops of `drot serve`: neither a stop nor what follows it is part of an answer, whole or streamed."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from serve_extra import MISSING
from test_serve import PROMPTS, client_of

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")

MESSAGES = [{"role": "user", "content": "add"}]
#: what MESSAGES are in the chat template of the tests
PROMPT_OF_CHAT = "# user: add\ndef "


@pytest.mark.parametrize(
    ("pieces", "stops", "sent", "held"),
    [
        (["a city", " of"], [" city"], ["a", ""], ""),
        (["a city", " of"], ["it"], ["a c", ""], ""),
        (["a ci", "ty", " of"], ["city"], ["a ", "", ""], ""),
        (["a ci", "rcle"], ["city"], ["a ", "circle"], ""),
        (["aab", "aac"], ["aabaac"], ["", ""], ""),
        (["aab", "aab", "aac"], ["aabaac"], ["", "aab", ""], ""),
        (["xyz"], ["z", "y"], ["x"], ""),
        (["a", "b"], ["abc", "b"], ["", "a"], ""),
        (["one", "\n"], ["\n\n", "e\nf"], ["on", ""], "e\n"),
    ],
)
def test_pieces_of_a_text(pieces, stops, sent, held):
    from drot.serving.stops import BeforeStop, before_stop

    answer = BeforeStop(stops)
    assert [answer.take(piece) for piece in pieces] == sent
    assert answer.rest() == held
    assert before_stop("".join(pieces), stops) == "".join(sent) + held


def test_pieces_are_cut_where_the_whole_text_is():
    from drot.serving.stops import BeforeStop

    draw = random.Random(0)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=12))
        stop = "".join(draw.choices("ab", k=draw.randint(1, 5)))
        answer, sent, start = BeforeStop([stop]), "", 0
        while start < len(text):
            end = start + draw.randint(1, 4)
            sent, start = sent + answer.take(text[start:end]), end
            assert stop not in sent
        assert sent + answer.rest() == text.split(stop)[0]


def test_a_queue_of_answer_and_reasoning():
    """What is held back comes before an item of another kind, and each text keeps its kind."""
    from transformers.cli.serving.utils import ReasoningText, ToolCall

    from drot.serving.stops import StreamQueue

    call = ToolCall("f", "{}")

    async def read(items):
        queue = asyncio.Queue()
        for item in items:
            queue.put_nowait(item)
        cut = StreamQueue(queue, None, ["stop"])
        found = [await cut.get()]
        while found[-1] is not None:
            found.append(cut.get_nowait())
        with pytest.raises(asyncio.QueueEmpty):
            cut.get_nowait()
        return found

    found = asyncio.run(read([ReasoningText("why st"), "so s", call, "an", "d sto", None]))
    assert found == ["why ", "st", "so ", "s", call, "an", "d ", "sto", None]
    assert [type(item) for item in found[:3]] == [ReasoningText, ReasoningText, str]
    assert asyncio.run(read(["a st", "op b", call, "c", None])) == ["a ", call, None]


def test_a_stream_that_waits_for_a_token_can_be_ended():
    """What is held back comes before the error, and nothing more is generated."""
    from drot.serving.stops import StreamQueue

    cancelled = []

    async def read():
        queue = asyncio.Queue()
        queue.put_nowait("a st")
        streamer = SimpleNamespace(cancel=lambda: cancelled.append(True))
        stream = StreamQueue(queue, streamer, ["stop"])
        asyncio.get_running_loop().call_later(0.05, stream.end, "not whole")
        return [await stream.get() for _ in range(3)]

    *sent, error = asyncio.run(asyncio.wait_for(read(), 10))
    assert sent == ["a ", "st"] and error.msg == "not whole" and cancelled


def answered(server, kind, stream, tokens=12, **settings):
    """The text of an answer, and why it ended."""
    asked = dict(model="packed", max_tokens=tokens, temperature=0, stream=stream, **settings)
    if kind == "chat":
        answer = client_of(server).chat.completions.create(**{"messages": MESSAGES} | asked)
    else:
        answer = client_of(server).completions.create(**{"prompt": PROMPTS[0]} | asked)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    if kind == "chat":
        texts = [(choice.delta if stream else choice.message).content for choice in choices]
    else:
        texts = [choice.text for choice in choices]
    return "".join(text or "" for text in texts), choices[-1].finish_reason


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_an_answer_ends_before_its_stop(way, kind, stream, request, packed, greedy):
    from drot.checkpoint.load import load_tokenizer

    server, prompt = request.getfixturevalue(way), PROMPT_OF_CHAT if kind == "chat" else PROMPTS[0]
    text, tokenizer = greedy(prompt, 12), load_tokenizer(packed)
    first = next(end for end in range(1, 12) if len(greedy(prompt, end)) > 2)
    inside = greedy(prompt, first)[1:-1]  # it ends before the end of its token
    second = len(greedy(prompt, first))
    across = text[second - 1 : second + 2]
    assert len(tokenizer(across)["input_ids"]) > 1
    for stops in ([inside], inside, [across], ["\0", across, inside], [text[-3:]]):
        first_stop = min(text.index(each) for each in ([stops] if stops == inside else stops) if each in text)
        assert answered(server, kind, stream, stop=stops) == (text[:first_stop], "stop"), stops
    # the last token that the request allows
    assert answered(server, kind, stream, first, stop=[inside]) == (text[: text.index(inside)], "stop")
    # no stop comes: what was held back is sent at the end
    assert answered(server, kind, stream, stop=[text[-3:] + "\0"]) == (text, "length")
    # a stop in the prompt, or one that begins there, is none
    assert answered(server, kind, stream, stop=[prompt[-2:], prompt[-1] + text[0]]) == (text, "length")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_transformers_parses_ends_before_its_stop(stream, sequential, greedy, monkeypatch):
    """As those of Qwen3: the content of a whole answer is read from its tokens."""
    from transformers.cli.serving import utils

    template = {"start_anchor": "def ", "fields": {"content": {"content": "text"}}}
    monkeypatch.setattr(utils, "get_response_template", lambda processor, model: template)
    text = greedy(PROMPT_OF_CHAT, 12)
    assert answered(sequential, "chat", stream) == (text, "length")
    assert answered(sequential, "chat", stream, stop=[text[4:6]]) == (text[: text.index(text[4:6])], "stop")
    # transformers strips the white space with which this stop ends
    space = next(place for place in range(5, len(text)) if text[place].isspace())
    stop = text[space - 1 : space + 1]
    assert answered(sequential, "chat", stream, stop=[stop]) == (text[: text.index(stop)], "stop")
