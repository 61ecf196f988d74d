"""Runs a function on several ranks: copies of the test's process, with the variables of torchrun."""

import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The result of `function(*arguments)` on each rank, or the exception that it raised there.

    The results must be picklable, and so must the function.
    """
    port = free_port()
    context = multiprocessing.get_context("fork")  # which has imported torch already
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(results, rank, size, port, function, arguments), daemon=True)
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


def _run(results: Any, rank: int, size: int, port: int, function: Callable[..., Any], arguments: Any) -> None:
    become_rank(rank, size, port)
    try:
        result = function(*arguments)
    except BaseException as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        result = error
    results.put(pickle.dumps((rank, result)))  # tensors too by value
