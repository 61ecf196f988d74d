"""Layers whose objectives do not depend on each other, trained side by side on several devices."""

import queue
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from drot.rotation.objective import LayerObjective

Trained = TypeVar("Trained")


def train_apart(
    objectives: Iterable[LayerObjective],
    train: Callable[[int, LayerObjective], Trained],
    devices: list[torch.device],
    done: dict[int, Trained],
) -> list[Trained]:
    """`train(index, objective)` of every objective, in order; `done` are not trained again.

    The next objective is asked for when a device is free, so no more of them exist than devices, and
    a training that failed ends the others at their end. With one device everything runs in turn.
    """
    idle: queue.SimpleQueue[torch.device] = queue.SimpleQueue()
    for device in devices:
        idle.put(device)

    def work(index: int, objective: LayerObjective, device: torch.device) -> Trained:
        try:
            with torch.no_grad():  # grad mode is a thread's own
                return train(index, objective.on(device))
        finally:
            idle.put(device)

    running: dict[int, Future[Trained]] = {}
    with ThreadPoolExecutor(len(devices)) as pool:
        device = idle.get()
        for index, objective in enumerate(objectives):
            if index not in done:
                running[index] = pool.submit(work, index, objective, device)
                device = idle.get()
            for future in running.values():
                if future.done():
                    future.result()  # raises what the training raised
    return [result for _, result in sorted((done | {i: f.result() for i, f in running.items()}).items())]
