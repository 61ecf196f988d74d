"""A packed checkpoint of the embedded model, with rotations and a chat template, and servers for it."""

import contextlib
import functools
import threading

import pytest

from drot.checkpoint.load import load, load_tokenizer
from drot.cli import app as cli
from drot.reporting.demo import HELD_OUT, MODEL

TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A packed checkpoint in float32, whose tokenizer has a chat template. Tests must not change it."""
    out = tmp_path_factory.mktemp("serving") / "packed"
    options = [
        *("--method", "magnitude", "--hessians", "sequential", "--device", "cpu", "--steps", "1"),
        *("--calibration", str(HELD_OUT), "--nsamples", "2", "--seqlen", "32"),
        *("--format", "packed", "--save-dtype", "float32"),
    ]
    assert cli.run(["prune", str(MODEL), "--out", str(out), *options]) == 0
    (out / "chat_template.jinja").write_text(TEMPLATE)
    return out


@pytest.fixture(scope="session")
def greedy(packed):
    """The greedy continuation of a text by `generate`, in a number of new tokens."""
    import torch

    model, tokenizer = load(packed), load_tokenizer(packed)

    def continued(text, tokens):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            new = model.generate(ids, do_sample=False, max_new_tokens=tokens)[0, ids.shape[1] :]
        return tokenizer.decode(new, skip_special_tokens=True)

    return continued


class Running:
    """A server in a thread of the tests.

    address: that of its API. engine: what generates. stop: stops it, as SIGTERM does.
    """

    def __init__(self, port, engine, stop):
        self.port, self.engine, self.stop = port, engine, stop
        self.address = f"http://127.0.0.1:{port}/v1"

    @property
    def working(self):
        """The requests in the batch, waiting for it, or with a callback left."""
        scheduler, manager = self.engine.batch.scheduler, self.engine.batch._cb
        return [
            *scheduler.active_requests,
            *scheduler.waiting_requests,
            *manager.output_router.result_handlers,
        ]


@contextlib.contextmanager
def running(folder, **settings):
    from drot.serving.server import bound, serving

    with bound("127.0.0.1", 0) as listening, serving(str(folder), "packed", **settings) as server:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()

        def stop():
            server.should_exit = True

        try:
            yield Running(listening.getsockname()[1], server.engine, stop)
        finally:
            stop()
            thread.join(timeout=20)
            assert not thread.is_alive()


@pytest.fixture
def served(packed):
    """A context manager with a server of its own."""
    return functools.partial(running, packed)


@pytest.fixture(scope="session")
def batched(packed):
    with running(packed) as server:
        yield server


@pytest.fixture(scope="session")
def sequential(packed):
    with running(packed, sequential=True) as server:
        yield server
