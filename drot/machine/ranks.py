"""The ranks of a run: processes that share its work, each on its own GPU, which torchrun starts."""

import contextlib
import datetime
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from drot.core.errors import ToldElsewhere, UserError
from drot.core.torchrun import world_size

Value = TypeVar("Value")

#: how long a rank waits for another, which may read a text or write the checkpoint meanwhile
TIMEOUT = datetime.timedelta(hours=1)
#: seconds that a rank waits for the others, after one has ended: for signs of life, or for their words
LAST_WORDS = 4.0
#: how often this process has joined others
_joined = itertools.count()


class RankEnded(UserError):
    """Another rank has ended, and this rank cannot go on without it."""


class Ranks:
    """The ranks of a run. Of one rank, each sum is its own value, and nothing is sent.

    All ranks must call the same collective methods in the same order: `add_`, `total`, `gather_rows`, `each`
    and `on_rank`. A method raises RankEnded if another rank has ended.

    rank, size: this rank, in [0, size), and the number of ranks.
    local_rank: the number of this rank on its machine, which is that of its GPU.
    store: a store that all ranks share; None without torchrun.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0, store: Any = None) -> None:
        self.rank, self.size, self.local_rank, self._store = rank, size, local_rank, store
        #: what this rank does, for the message if one ends
        self.where = "the start"

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes files and messages."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """The rows of `count` that this rank computes; those of all ranks differ by at most one in number."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def sequences(self, count: int) -> range:
        """The sequences of `count` that this rank holds: every `size`-th."""
        return range(self.rank, count, self.size)

    def add_(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over the ranks, with the same bits on all of them."""
        if self.size > 1:
            with self._alive():
                for tensor in tensors:
                    dense = tensor.contiguous()
                    dist.all_reduce(dense)
                    if dense is not tensor:
                        tensor.copy_(dense)

    def total(self, value: float) -> float:
        """The sum of a number over the ranks, in fp64."""
        if self.size == 1:
            return value
        return sum(self._numbers(value))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows [r, in] of all ranks, one below the other; the ranks may have different r.

        Of a batch [batch, r, in] the rows of each matrix.
        """
        if self.size == 1:
            return rows
        if rows.dim() == 3:
            gathered = self.gather_rows(rows.transpose(0, 1).flatten(1))
            return gathered.unflatten(1, (len(rows), -1)).transpose(0, 1)
        counts = [int(count) for count in self._numbers(len(rows))]
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        # bytes, because not every backend knows every dtype
        sent = padded.flatten().view(torch.uint8)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        with self._alive():
            dist.all_gather(found, sent)
        parts = [each.view(rows.dtype).view_as(padded) for each in found]
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _numbers(self, value: float) -> list[float]:
        """The number of each rank."""
        found = torch.zeros(self.size, dtype=torch.float64)
        found[self.rank] = value
        with self._alive():
            dist.all_reduce(found)
        numbers: list[float] = found.tolist()
        return numbers

    def each(self, value: Value) -> list[Value]:
        """The value of each rank, which must be picklable."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            with self._alive():
                dist.all_gather_object(found, value)
        return found

    def on_rank(self, rank: int, function: Callable[[], Value]) -> Value:
        """The result of `function` on one rank, for all ranks; its exception is raised on all of them."""
        if self.size == 1:
            return function()
        message: list[Any] = [None, None]
        if self.rank == rank:
            try:
                message[0] = function()
            except Exception as error:
                message[1] = error
        with self._alive():
            dist.broadcast_object_list(message, src=rank, device=torch.device("cpu"))
        found: Value = message[0]
        if message[1] is not None:
            raise message[1]
        return found

    def on_first(self, function: Callable[[], Value]) -> Value:
        """As `on_rank` for rank 0."""
        return self.on_rank(0, function)

    def one_after_the_other(self, function: Callable[[], Value]) -> Value:
        """The result of `function`, which the first rank of each machine calls before the others do."""
        found = [function()] if self.local_rank == 0 else []
        self.each(None)
        return found[0] if found else function()

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors have the same bits on all ranks; compares the sums of their bits."""
        if self.size == 1:
            return True
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [int(t.contiguous().view(words[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]
        return all(found == sums for found in self.each(sums))

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        """Turns the error of a collective call whose peer has ended into RankEnded."""
        try:
            yield
        except RuntimeError as error:  # as 'Connection closed by peer', but also for want of memory
            if (ended := self.who_ended()) is None:
                raise
            raise RankEnded(ended) from error

    def who_ended(self) -> str | None:
        """Says which ranks have ended, and where; None if none has. A rank has ended if its heart stands."""
        if self.size == 1:
            return None
        try:
            before = self._beats()
            time.sleep(LAST_WORDS)
            beats = zip(before, self._beats(), strict=True)
        except RuntimeError:
            return f"torchrun, or the machine of rank 0, has ended at {self.where}"
        missing = [str(rank) for rank, (old, new) in enumerate(beats) if old == new]
        return f"rank {', '.join(missing)} has ended at {self.where}" if missing else None

    def _beats(self) -> list[int]:
        """How often the heart of each rank has beaten. Raises RuntimeError if the store has ended."""
        return [self._store.add(f"beats of {rank}", 0) for rank in range(self.size)]

    def beat(self, stopped: threading.Event) -> None:
        """Tells the other ranks every second that this rank lives, until `stopped`."""
        with contextlib.suppress(RuntimeError):  # the machine of the store has ended
            while not stopped.wait(1.0):
                self._store.add(f"beats of {self.rank}", 1)

    def speaks(self) -> bool:
        """Whether this rank tells its error: the first that asks, which is rank 0 if it asks soon."""
        with contextlib.suppress(RuntimeError):
            patience = 0.0 if self.first else LAST_WORDS
            until = time.monotonic() + patience
            while time.monotonic() < until and not self._store.check(["told"]):
                time.sleep(0.1)
            return bool(self._store.compare_set("told", "", str(self.rank)) == str(self.rank).encode())
        return True


#: a process alone
ALONE = Ranks()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone. GPUs use NCCL, CPUs Gloo.

    An error is told by one rank: on the others the context raises ToldElsewhere in its place. Ranks but the
    first log errors alone.
    """
    if world_size() == 1:
        yield ALONE
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    found, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"drot {next(_joined)}", found)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    ranks, logger = Ranks(rank, size, local_rank, store), logging.getLogger("drot")
    level, stopped = logger.level, threading.Event()
    if rank:
        logger.setLevel(logging.ERROR)
    threading.Thread(target=ranks.beat, args=(stopped,), daemon=True).start()
    try:
        yield ranks
    except Exception as error:
        if not ranks.speaks():
            raise ToldElsewhere(str(error)) from error
        if rank:
            error.add_note(f"rank {rank}")
        raise
    else:
        dist.destroy_process_group()
    finally:
        stopped.set()
        logger.setLevel(level)
