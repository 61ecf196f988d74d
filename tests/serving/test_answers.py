"""How answers are read: malformed calls of tools, and chat templates that are not those of the model type."""

import json
from types import SimpleNamespace

import pytest
from serve_extra import MISSING

from drot.checkpoint.load import load_tokenizer
from drot.reporting.demo import MODEL

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")

QWEN = SimpleNamespace(config=SimpleNamespace(model_type="qwen3"))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
OTHER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|Assistant|>"
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def tokenizer(template):
    found = load_tokenizer(MODEL)
    found.chat_template = template
    return found


@pytest.fixture
def reading():
    """transformers' functions as the server calls them, a tokenizer, and the tokens of PROMPT."""
    from transformers.cli.serving import chat_completion

    from drot.serving.answers import reading_answers

    own = tokenizer(CHATML)
    with reading_answers(QWEN, own):
        yield chat_completion, own, own(PROMPT, add_special_tokens=False)["input_ids"]


def streamed(parser, text, size=3):
    """What a stream gives for `text`, which the model writes in pieces."""
    from transformers.cli.serving.utils import response_events_to_chunks

    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    found = [chunk for piece in pieces for chunk in response_events_to_chunks(parser.feed(piece))]
    return found + response_events_to_chunks(parser.finalize()[1])


def test_a_call_is_read(reading):
    module, own, prompt = reading
    parser = module.build_response_parser(own, QWEN, prompt)
    written = 'well\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    *text, call = streamed(parser, written)
    assert "".join(text) == "well" and (call.name, json.loads(call.arguments)) == ("f", {"a": 1})


@pytest.mark.parametrize("call", ["not json", '{"name": "f"}', "[1, 2]", '{"name": "f", "arguments": '])
def test_a_malformed_call_stays_text(reading, call):
    module, own, prompt = reading
    written = f"well <tool_call>{call}</tool_call> and more"
    found = streamed(module.build_response_parser(own, QWEN, prompt), written)
    assert all(isinstance(each, str) for each in found)
    assert "".join(found).startswith("well") and call in "".join(found)
    assert "".join(found).endswith(" and more")
    new = own(written, add_special_tokens=False)["input_ids"]
    read = module.parse_assistant_message(own, QWEN, new, input_ids=prompt, cleaned_content=written)
    assert read == (written, None, None)


def test_the_prompt_is_no_part_of_an_answer_where_the_template_is_another():
    """transformers took the whole prompt for the beginning of the answer, system message included."""
    from transformers.cli.serving import chat_completion, utils

    from drot.serving.answers import reading_answers

    own = tokenizer(OTHER)
    with reading_answers(QWEN, own):
        assert chat_completion.build_response_parser(own, QWEN, [[1, 2]]) is None
        read = chat_completion.parse_assistant_message(own, QWEN, [1], input_ids=[1, 2], cleaned_content="x")
        assert read == ("x", None, None)
    assert utils.get_response_template(own, QWEN) is not None  # as before
