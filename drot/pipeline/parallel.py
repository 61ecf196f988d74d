"""Training of independent layers in parallel on several devices."""

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from drot.rotation.objective import LayerObjective

Result = TypeVar("Result")


def train_in_parallel(
    objectives: Iterable[tuple[int, LayerObjective]],
    train: Callable[[int, LayerObjective], Result],
    devices: list[torch.device],
) -> dict[int, Result]:
    """Index → result of `train(index, objective)`, called in a thread with the objective on a free device.

    The next objective is requested only when a device is free, so there is at most one for each device. After
    an exception of `train` no further training is started. It is raised again when the running ones have
    finished.
    """
    idle: queue.SimpleQueue[torch.device] = queue.SimpleQueue()
    for device in devices:
        idle.put(device)

    def work(index: int, objective: LayerObjective, device: torch.device) -> Result:
        try:
            with torch.no_grad():  # each thread has its own grad mode
                return train(index, objective.to(device))
        finally:
            idle.put(device)

    futures: dict[int, Future[Result]] = {}
    with ThreadPoolExecutor(len(devices)) as pool:
        device = idle.get()
        for index, objective in objectives:
            futures[index] = pool.submit(work, index, objective, device)
            device = idle.get()
            for future in futures.values():
                if future.done():
                    future.result()  # raises the exception of a failed training
    return {index: future.result() for index, future in futures.items()}
