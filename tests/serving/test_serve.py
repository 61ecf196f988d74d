"""`drot serve`, asked by real clients: the openai package, and sockets for what it does not send."""

import asyncio
import concurrent.futures
import http.client
import json
import shutil
import socket
import time
import urllib.request
from types import SimpleNamespace

import pytest
from serve_extra import MISSING
from together import started_drot

from drot.checkpoint.load import load_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]
PROMPTS = [
    "def main(",
    "import os\n",
    "class A:\n",
    "for i in range(",
    "return ",
    "with open(",
    "try:\n",
    "x = ",
]


def client_of(server):
    import openai

    return openai.OpenAI(base_url=server.address, api_key="none", max_retries=0, timeout=60)


def completion(server, prompt, tokens=24, **settings):
    settings = {"temperature": 0} | settings
    client = client_of(server)
    return client.completions.create(model="packed", prompt=prompt, max_tokens=tokens, **settings).choices[0]


def post(server, body, path="/v1/completions"):
    """Status and body of the answer to `body`, bytes or what JSON can hold."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def wait_until_idle(server, seconds=5.0):
    end = time.monotonic() + seconds
    while server.working and time.monotonic() < end:
        time.sleep(0.02)
    assert not server.working


@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_the_text_is_that_of_generate(way, request, greedy):
    served = completion(request.getfixturevalue(way), PROMPTS[0])
    assert served.text == greedy(PROMPTS[0], 24) != ""
    assert served.finish_reason == "length"


def test_requests_at_once_do_not_change_each_other(batched, greedy):
    """Greedy ones have the text of `generate`, although sampled ones and one with a stop are in between."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        texts = [pool.submit(completion, batched, prompt) for prompt in PROMPTS]
        drawn = [pool.submit(completion, batched, PROMPTS[0], temperature=1.5) for _ in range(6)]
        stopped = pool.submit(completion, batched, PROMPTS[0], 200, stop=["\n"])
    assert [each.result().text for each in texts] == [greedy(prompt, 24) for prompt in PROMPTS]
    assert len({each.result().text for each in drawn}) > 1
    assert stopped.result().text == greedy(PROMPTS[0], 200).split("\n")[0]
    assert stopped.result().finish_reason == "stop"


@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_a_chat_streams_what_it_answers(way, request, greedy):
    server = request.getfixturevalue(way)
    chats = client_of(server).chat.completions
    asked = dict(model="packed", messages=[{"role": "user", "content": "add"}], max_tokens=16, temperature=0)
    whole = chats.create(**asked)
    parts = list(chats.create(**asked, stream=True))
    assert whole.choices[0].message.content == greedy("# user: add\ndef ", 16)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16


def test_a_stream_ends_as_clients_expect(batched):
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    request = urllib.request.Request(
        f"{batched.address}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and len(lines) > 2


def test_a_cancelled_stream_leaves_the_batch(batched):
    stream = client_of(batched).completions.create(
        model="packed", prompt="x", max_tokens=1900, temperature=1.5, stream=True
    )
    for _ in range(3):
        next(iter(stream))
    assert batched.working
    stream.close()
    wait_until_idle(batched)
    assert completion(batched, "x", 4).text


@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_a_client_that_goes_away_costs_no_more_tokens(way, request):
    server = request.getfixturevalue(way)
    body = json.dumps({"prompt": "x", "max_tokens": 1900, "temperature": 1.5}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        gone.sendall(head.encode() + body)
        time.sleep(0.5)
    start = time.process_time()  # the server is a thread of this process
    if way == "batched":
        wait_until_idle(server)
    assert completion(server, "x", 2).text
    assert time.process_time() - start < 6  # 1900 tokens take longer


def test_a_prompt_beyond_the_context_is_refused(batched, packed):
    """And an answer ends where the context ends."""
    import openai

    from drot.checkpoint.load import load_tokenizer

    tokenizer, text = load_tokenizer(packed), "x "
    while len(tokenizer(text + "x x x x ")["input_ids"]) < 510:
        text += "x x x x "
    tokens = len(tokenizer(text)["input_ids"])
    answer = client_of(batched).completions.create(model="packed", prompt=text, max_tokens=5000)
    assert answer.usage.prompt_tokens == tokens and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 512 - tokens

    with pytest.raises(openai.BadRequestError, match="at most 512 tokens together"):
        completion(batched, "x " * 3000)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"prompt": "x"', "JSON"),
        (b"", "body"),
        ([1], "JSON object"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "no tokens"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "top_p": 2}, "top_p"),
        ({"prompt": "x", "top_k": 1.5}, "top_k"),
        ({"prompt": "x", "min_p": -1}, "min_p"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "x", "n": 2}, "n: must be 1, got 2"),
        ({"prompt": "x", "presence_penalty": 1.5}, "presence_penalty: must be 0 or left out"),
        ({"prompt": "x", "stop": [1]}, "stop"),
        ({"prompt": "x", "stop": ""}, "stop: "),
        ({"prompt": "x", "seed": 1}, "--sequential"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias: the model has"),
        ({"prompt": "x", "suffix": "y"}, "suffix: must be left out, got 'y'"),
        ({"prompt": "x", "stop": list("abcde")}, "stop: must be a text or 1 to 4 texts"),
        (b'{"prompt": "\\ud800"}', "half of a character"),
        ({"prompt": "x", "generation_config": "{}"}, "generation_config"),
        ({"prompt": "x", "unknown": 1}, "unknown"),
    ],
)
def test_a_malformed_request_is_answered_in_one_line(body, told, batched):
    status, answer = post(batched, body)
    assert 400 <= status < 500 and told in answer["error"]["message"], answer


@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_a_bias_draws_a_token(way, packed, request):
    """Of a completion and of a chat, also in whole numbers; an empty one changes nothing."""
    from drot.checkpoint.load import load_tokenizer

    server = request.getfixturevalue(way)
    token = load_tokenizer(packed)("x", add_special_tokens=False).input_ids[0]
    common = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token): 100}}
    status, answer = post(server, {"prompt": "y", **common})
    assert status == 200 and answer["choices"][0]["text"] == 3 * load_tokenizer(packed).decode([token]), (
        answer
    )
    messages = [{"role": "user", "content": "y"}]
    status, answer = post(server, {"messages": messages, **common}, "/v1/chat/completions")
    assert status == 200 and answer["choices"][0]["message"]["content"].count("x") == 3, answer
    texts = [post(server, {"prompt": "y", **common, "logit_bias": bias})[1]["choices"] for bias in ({}, None)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("way", ["batched", "sequential"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_settings_beyond_those_of_openai(way, path, request):
    """Of top_k 1 and of min_p 1 the most likely token is left; a penalty changes a greedy answer."""
    server = request.getfixturevalue(way)
    asked = {"max_tokens": 12, "temperature": 1.5}
    asked |= (
        {"prompt": "def f("} if "chat" not in path else {"messages": [{"role": "user", "content": "add"}]}
    )

    def answer(**settings):
        status, answer = post(server, asked | settings, path)
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]

    greedy = answer(temperature=0)
    assert answer(top_k=1) == answer(min_p=1.0) == greedy
    assert answer(temperature=0, top_k=-1, min_p=None) == greedy
    assert answer(temperature=0, repetition_penalty=0.01) != greedy


@pytest.mark.parametrize("way", ["batched", "sequential"])
def test_a_tiny_temperature_is_greedy_and_ends_nothing(way, request, greedy):
    """Logits divided by it would overflow, and the error would end the thread of the batch."""
    server = request.getfixturevalue(way)
    assert completion(server, "import", 4, temperature=1e-40).text == greedy("import", 4)
    assert server.engine.is_alive()


def test_a_token_that_the_model_lacks_is_refused(served, packed, tmp_path):
    """A tokenizer can have tokens that were added after the training, without rows of the embedding."""
    folder = shutil.copytree(packed, tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens(["<later>"])
    tokenizer.save_pretrained(folder)
    (folder / "drot.json").unlink()
    with served.func(folder) as server:
        status, answer = post(server, {"prompt": "x <later>", "max_tokens": 2})
        assert status == 400 and "leave out the text of that token" in answer["error"]["message"]
        assert completion(server, "import", 2).text and server.engine.is_alive()


@pytest.mark.parametrize(("value", "status"), [(None, 200), ({}, 200), ({"tokenize": False}, 400), ([], 400)])
def test_settings_of_the_chat_template(batched, value, status):
    asked = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 2, "chat_template_kwargs": value}
    got, answer = post(batched, asked, "/v1/chat/completions")
    assert got == status and (status == 200 or "chat_template_kwargs" in answer["error"]["message"]), answer


def test_a_message_that_the_chat_template_cannot_add(packed, served, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "packed")
    template = "{% for message in messages %}{{ message.content + 1 }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    asked = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 2}
    with served.func(folder) as server:
        status, answer = post(server, asked, "/v1/chat/completions")
    assert status == 400 and "the chat template refuses the messages" in answer["error"]["message"], answer


@pytest.mark.parametrize("tools", ["f", [1], [{"a": 1}], [{"type": "function", "function": {"name": ""}}]])
def test_malformed_tools_are_refused(tools, batched):
    messages = [{"role": "user", "content": "add"}]
    status, answer = post(batched, {"messages": messages, "tools": tools}, "/v1/chat/completions")
    assert status == 400 and "tools" in answer["error"]["message"], answer


def test_tools_that_must_not_be_called_are_left_out(batched):
    asked = {"messages": [{"role": "user", "content": "add"}], "max_tokens": 8, "temperature": 0}
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    answers = [post(batched, asked | more, "/v1/chat/completions") for more in ({}, tools)]
    assert answers[0][0] == 200 and answers[0][1]["choices"] == answers[1][1]["choices"]


def test_an_image_is_refused_in_words(batched):
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    status, answer = post(
        batched, {"messages": [{"role": "user", "content": content}]}, "/v1/chat/completions"
    )
    told = "messages.0.content: must be a text, as nothing else is served; a part is 'image_url'"
    assert status == 400 and told in answer["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "hi"}],
        [{"role": "friend", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_malformed_messages_are_refused(messages, batched):
    status, answer = post(batched, {"messages": messages}, "/v1/chat/completions")
    assert status == 400 and "messages" in answer["error"]["message"], answer


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_for_another_model_is_refused(path, batched):
    status, answer = post(batched, {"model": "org/other", "prompt": "x", "messages": []}, path)
    assert status == 404 and "'packed' and no other" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/load_model", "/reset", "/v1/responses", "/docs"])
def test_what_transformers_serves_beside_is_not_there(path, batched):
    assert post(batched, {"model": "org/other"}, path)[0] == 404


def test_health_and_the_list_of_models(batched):
    assert [model.id for model in client_of(batched).models.list()] == ["packed"]
    assert client_of(batched).models.retrieve("packed").id == "packed"
    with urllib.request.urlopen(f"http://127.0.0.1:{batched.port}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok", "model": "packed"}


def test_a_seed_repeats_an_answer_of_a_sequential_server(sequential):
    texts = [completion(sequential, "x", temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_serve_as_a_process_ends_by_sigterm(packed, tmp_path):
    process = started_drot(["serve", str(packed), "--port", "0", "--name", "mine"], tmp_path)
    try:
        while process.is_alive() and "/chat/completions" not in (tmp_path / "stdout").read_text():
            time.sleep(0.02)
        assert process.is_alive(), (tmp_path / "stderr").read_text()
        line, example, *_ = (tmp_path / "stdout").read_text().splitlines()
        assert line.startswith("mine is served at http://127.0.0.1:")
        address = line.split(" at ")[1].split()[0]
        assert f"curl {address}/chat/completions" in example
        body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
        asked = urllib.request.Request(f"{address}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["model"] == "mine"
        process.terminate()
        process.join(30)
        assert process.exitcode == 143
        assert (tmp_path / "stderr").read_text() == "drot: interrupted\n"
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("sequential", [False, True])
def test_a_stream_that_a_stop_cuts_ends_with_an_error(served, monkeypatch, sequential):
    import openai

    monkeypatch.setattr("drot.serving.server.GRACE", 0.1)
    with served(sequential=sequential) as server:
        stream = client_of(server).completions.create(
            model="packed", prompt="x", max_tokens=2000, stream=True
        )
        next(iter(stream))
        server.stop()
        with pytest.raises(openai.APIError, match="the server was stopped: the answer is not whole"):
            list(stream)


@pytest.mark.parametrize(("items", "last"), [(["a"], "not whole"), (["a", None], "[DONE]")])
def test_a_stream_is_whole_with_the_end_of_its_answer(batched, monkeypatch, items, last):
    """items: what the engine has put into the queue when the server is stopped."""
    from drot.serving.engine import STOPPED, Engine
    from drot.serving.stops import StreamQueue

    def generated(*request, **options):
        queue = asyncio.Queue()
        for item in items:
            queue.put_nowait(item)
        streamer = SimpleNamespace(total_tokens=1, cancel=lambda: None)
        stream = StreamQueue(queue, streamer, [])
        stream.end(STOPPED)
        return stream, streamer

    monkeypatch.setattr(Engine, "generate_streaming", generated)
    connection = http.client.HTTPConnection("127.0.0.1", batched.port, timeout=60)
    asked = {"prompt": "x", "max_tokens": 3, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
    first, *_, end, rest = connection.getresponse().read().decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
    assert last in end and ('"code": 503' in end) == (last == "not whole") and not rest


def test_what_goes_wrong_in_a_stream_is_an_error_that_clients_can_read():
    """transformers writes the message between quotes, whatever it holds."""
    from drot.serving.server import _with_end

    async def failing():
        yield 'data: {"a": 1}\n\ndata: {"error": "no "JSON"\nContent: {"}\n\n'
        pytest.fail("the stream went on")

    async def received():
        return [part async for part in _with_end(failing())]

    first, last = asyncio.run(received())
    assert first == 'data: {"a": 1}\n\n'
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["message"] == 'no "JSON"\nContent: {' and error["code"] == 500


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(batched, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    for method in ("__call__", "apply_chat_template"):
        monkeypatch.setattr(PreTrainedTokenizerFast, method, lambda *args, **rest: pytest.fail("tokenised"))
    long = "x" * 3_000_000
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]},
        ),
    ):
        status, answer = post(batched, body, path)
        assert status == 400 and "the prompt has 3000000 characters" in answer["error"]["message"]


def test_a_model_that_is_null_is_the_one_that_is_served(batched):
    assert post(batched, {"model": None, "prompt": "x", "max_tokens": 1})[0] == 200


def test_a_port_that_is_taken_is_refused(packed, capsys):
    from drot.cli import app as cli

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.run(["serve", str(packed), "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_an_address_of_another_machine_is_refused(packed, capsys):
    from drot.cli import app as cli

    assert cli.run(["serve", str(packed), "--port", "0", "--host", "192.0.2.1"]) == 2
    told = capsys.readouterr().err
    assert "cannot listen on --host 192.0.2.1, --port 0" in told and "give another --host or --port" in told
