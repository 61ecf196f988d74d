"""Layers whose objectives do not depend on each other, trained side by side on several devices."""

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from drot.rotation.objective import LayerObjective

Trained = TypeVar("Trained")


def train_in_parallel(
    objectives: Iterable[tuple[int, LayerObjective]],
    train: Callable[[int, LayerObjective], Trained],
    devices: list[torch.device],
) -> dict[int, Trained]:
    """index → `train(index, objective)` of every objective.

    The next objective is asked for when a device is free, so no more of them exist than devices, and
    a training that failed ends the others at their end. With one device everything runs in turn.
    """
    idle: queue.SimpleQueue[torch.device] = queue.SimpleQueue()
    for device in devices:
        idle.put(device)

    def work(index: int, objective: LayerObjective, device: torch.device) -> Trained:
        try:
            with torch.no_grad():  # each thread has its own grad mode
                return train(index, objective.to(device))
        finally:
            idle.put(device)

    running: dict[int, Future[Trained]] = {}
    with ThreadPoolExecutor(len(devices)) as pool:
        device = idle.get()
        for index, objective in objectives:
            running[index] = pool.submit(work, index, objective, device)
            device = idle.get()
            for future in running.values():
                if future.done():
                    future.result()  # raises what the training raised
    return {index: future.result() for index, future in running.items()}
