"""Runs a function on several ranks: processes with the variables of torchrun."""

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import drot.cli.app
import drot.machine.ranks

#: The modules that the server of processes imports once, so that a rank starts fast. A rank is no fork of the
#: test's own process: autograd may have started threads there, and a fork of such a process cannot train.
PRELOADED = ["drot.pipeline.prune", "transformers.models.llama.modeling_llama"]


def start_server() -> None:
    """Starts the server of processes unless it runs. The server imports the drot that the test imports.

    By itself Python would let the server look into the working directory first. There a checkout may hold a
    drot that was built for another torch.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, PYTHONSAFEPATH="1", PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        multiprocessing.forkserver.ensure_running()


def on_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    last_words: float = drot.machine.ranks.LAST_WORDS,
) -> list[Any]:
    """The result of `function(*arguments)` on each rank, or the exception that it raised there.

    The results must be picklable, and so must the function.

    last_words: the seconds LAST_WORDS of drot/machine/ranks.py, on the ranks.
    """
    port = free_port()
    start_server()
    context = multiprocessing.get_context("forkserver")
    results = context.SimpleQueue()
    given = dict(os.environ), last_words, function, arguments
    processes = [
        context.Process(target=_run, args=(results, rank, size, port, *given), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=True)  # which outlives the ranks, as torchrun's does
    found_results = dict(pickle.loads(results.get()) for _ in processes)
    for process in processes:
        process.join(30)
    del store
    return [found_results[rank] for rank in range(size)]


def started(function: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """A process that has imported drot and calls `function(*arguments)`, which must be picklable."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(
        target=_alone, args=(dict(os.environ), function, arguments)
    )
    process.start()
    return process


def started_drot(arguments: list[str], folder: Path) -> multiprocessing.process.BaseProcess:
    """The program `drot` in a process of its own, which writes to files `stdout` and `stderr` in `folder`."""
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    return started(_drot, arguments, folder)


def _drot(arguments: list[str], folder: Path) -> None:
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["drot", *arguments]
    drot.cli.app.main()


def _alone(environment: dict[str, str], function: Callable[..., None], arguments: Any) -> None:
    os.environ |= environment  # of the test, and not of the first test that started processes
    torch.set_num_threads(1)
    function(*arguments)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def become_rank(rank: int, size: int, port: int) -> None:
    """Sets the variables that torchrun sets in a process. The store is at `port`, and not in a rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"


def _run(
    results: Any,
    rank: int,
    size: int,
    port: int,
    environment: dict[str, str],
    last_words: float,
    function: Callable[..., Any],
    arguments: Any,
) -> None:
    os.environ |= environment  # of the test, and not of the first test that started ranks
    os.fsync = lambda descriptor: None  # as in the other tests
    drot.machine.ranks.LAST_WORDS = last_words
    drot.machine.ranks.BEAT = last_words / 4  # as by default
    torch.set_num_threads(1)
    torch.manual_seed(0)
    become_rank(rank, size, port)
    try:
        result = function(*arguments)
    except BaseException as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        result = error
    results.put(pickle.dumps((rank, result)))  # tensors too by value
