"""The ranks of a run: processes that share its work, each on its own GPU, which torchrun starts."""

import contextlib
import datetime
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group, _set_pg_timeout  # none is public
from torch.utils import _pytree as pytree

from drot.core.errors import ToldElsewhere, UserError
from drot.core.torchrun import local_rank, local_size, world_size
from drot.machine.devices import is_gpu
from drot.machine.transfer import in_main_memory

Value = TypeVar("Value")

#: how long a rank waits for another that lives, which may download the model or write the checkpoint
TIMEOUT = datetime.timedelta(hours=24)
#: how long a rank waits at the start for the others, which may import Python's modules from a slow disk
JOIN = datetime.timedelta(minutes=5)
#: seconds that a rank waits for the others, after one has ended: for signs of life, or for their words
LAST_WORDS = 4.0
#: Seconds between two beats of a rank's heart; beats between two looks at the others' hearts; and looks in
#: which a heart stands until the process ends. Python stops the heart while a library holds its lock.
BEAT, BEATS, LOOKS = 1.0, 5, 9
#: beats of a rank that has ended its work without an error
DONE = 1 << 40
CPU = torch.device("cpu")
#: torch has the first name from 2.13 on, and warns of the second
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
#: how often this process has joined others
_joined = itertools.count()


class RankEnded(UserError):
    """Another rank has ended, and this rank cannot go on without it."""


class Ranks:
    """The ranks of a run. Of one rank, each sum is its own value, and nothing is sent.

    All ranks must call the same collective methods in the same order: `add_`, `total`, `gather_rows`,
    `gather_rows_`, `each` and `on_rank`. A method raises RankEnded if another rank has ended.

    rank, size: this rank, in [0, size), and the number of ranks.
    local_rank: the number of this rank on its machine, which is that of its GPU.
    store: a store that all ranks share; None without torchrun.
    local_size: the number of ranks on this machine, whose main memory they share; None: all ranks.

    Attributes:
        device: where this rank computes.
        where: what this rank does, for the message if one ends. then: what the message says behind it.
        sent: `sums`, `rows` and `values` → the bytes of tensors that this rank has sent in `add_`, in
            `gather_rows` and `gather_rows_`, and in `on_rank`, if they go round in a ring: 2 (n - 1) / n of a
            sum, n - 1 times its rows, and (n - 1) / n of a value. Pickled objects are left out.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        store: Any = None,
        local_size: int | None = None,
    ) -> None:
        self.rank, self.size, self.local_rank, self._store = rank, size, local_rank, store
        self.local_size = size if local_size is None else local_size
        self.device, self.where, self.then = torch.device("cpu"), "the start", ""
        self.sent: Counter[str] = Counter()

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes files and messages."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """The rows of `count` that this rank computes; those of all ranks differ by at most one in number."""
        return self.shares(count)[self.rank]

    def shares(self, count: int) -> list[slice]:
        """The `share` of each rank."""
        stops = [count * rank // self.size for rank in range(self.size + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(stops)]

    def sequences(self, count: int) -> range:
        """The sequences of `count` that this rank holds: every `size`-th."""
        return range(self.rank, count, self.size)

    def add_(self, *tensors: Tensor) -> None:
        """Replaces each tensor by its sum over the ranks, with the same bits on all of them."""
        for tensor in tensors if self.size > 1 else ():
            dense = tensor.contiguous()
            self.sent["sums"] += 2 * dense.nbytes * (self.size - 1) // self.size
            self._reduce(dense)
            if dense is not tensor:
                tensor.copy_(dense)

    def _reduce(self, tensor: Tensor) -> None:
        with self._alive():
            dist.all_reduce(tensor)

    def total(self, value: float) -> float:
        """The sum of a number over the ranks, in fp64."""
        if self.size == 1:
            return value
        found = torch.zeros(self.size, dtype=torch.float64)
        found[self.rank] = value
        self._reduce(found)
        return sum(found.tolist())

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The rows [r, ...] of all ranks, one below the other; r is that of `share`.

        Of a batch [batch, r, in] the rows of each matrix.
        """
        if self.size == 1:
            return rows
        if rows.dim() == 3:
            gathered = self.gather_rows(rows.transpose(0, 1).flatten(1))
            return gathered.unflatten(1, (len(rows), -1)).transpose(0, 1)
        whole = rows.new_empty(int(self.total(len(rows))), *rows.shape[1:])
        whole[self.share(len(whole))] = rows
        self.gather_rows_(whole)
        return whole

    def gather_rows_(self, matrix: Tensor, parts: Sequence[slice] | None = None) -> None:
        """Replaces the rows of `matrix` that other ranks have computed by theirs.

        parts: the rows of each rank, in ascending or in descending order; None are its `shares`.
        """
        if self.size == 1 or not len(matrix):
            return
        parts = self.shares(len(matrix)) if parts is None else parts
        most = max(part.stop - part.start for part in parts)
        self.sent["rows"] += (self.size - 1) * most * matrix[:1].nbytes
        target = matrix[min(part.start for part in parts) : max(part.stop for part in parts)]
        ascending, equal = parts[0].start <= parts[-1].start, len(target) == self.size * most
        if equal and ascending and target.is_contiguous():
            self._gather_(target)
            return
        own = matrix[parts[self.rank]]
        whole = matrix.new_empty(self.size, most, *matrix.shape[1:])
        whole[self.rank, : len(own)] = own
        self._gather_(whole)
        if equal:  # one copy, since a GPU takes longer to start the copies of many ranks than to make them
            places = torch.arange(self.size, device=matrix.device)
            places = places if ascending else places.flip(0)
            target.unflatten(0, (self.size, most)).index_copy_(0, places, whole)
            return
        for rank, part in enumerate(parts):
            if rank != self.rank:
                matrix[part] = whole[rank, : part.stop - part.start]

    def _gather_(self, whole: Tensor) -> None:
        """Gives each rank the parts of the others. whole: contiguous, with equally many rows of each rank."""
        # bytes, because not every backend knows every dtype
        sent = whole.view(-1).view(torch.uint8)
        with self._alive():
            _all_gather(sent, sent.chunk(self.size)[self.rank])

    def each(self, value: Value) -> list[Value]:
        """The value of each rank, which must be picklable."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            with self._alive():
                dist.all_gather_object(found, value)
        return found

    def on_rank(self, rank: int, function: Callable[[], Value], device: torch.device = CPU) -> Value:
        """The result of `function` on one rank, for all ranks; its exception is raised on all of them.

        Tensors in dicts, lists and tuples go from GPU to GPU.

        device: where the other ranks get them: in main memory, or on the GPU of each; `meta` for a rank
            that needs their shapes alone.
        """
        if self.size == 1:
            return function()
        message: list[Any] = [None, None]
        tensors: list[Tensor] = []
        if self.rank == rank:
            try:
                leaves, tree = pytree.tree_flatten(function())
                tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
                shapes = [torch.empty_like(t, device="meta") if isinstance(t, Tensor) else t for t in leaves]
                message[0] = pytree.tree_unflatten(shapes, tree)
            except Exception as error:
                message[1] = error
        with self._alive():
            dist.broadcast_object_list(message, src=rank, device=CPU)
        if message[1] is not None:
            raise message[1]
        leaves, tree = pytree.tree_flatten(message[0])
        sent = iter(tensors)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.sent["values"] += leaf.nbytes * (self.size - 1) // self.size
                leaves[index] = self._broadcast(next(sent, leaf), rank, device)
        found: Value = pytree.tree_unflatten(leaves, tree)
        return found

    def _broadcast(self, tensor: Tensor, rank: int, device: torch.device) -> Tensor:
        """The tensor of a rank, on `device`; the other ranks give one with its shape on `meta`."""
        if self.rank == rank:
            there = tensor.to(self.device).contiguous()
        else:
            there = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        with self._alive():
            dist.broadcast(there.flatten().view(torch.uint8), src=rank)
        if self.rank == rank and not is_gpu(device):
            return tensor
        return in_main_memory(there) if device == CPU else there.to(device)

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
        """Tells the other ranks every second that this rank lives, until `stopped`.

        Ends this process, with status 2, if the heart of another rank stands for long. The work may wait for
        that rank without an error: NCCL lets a GPU wait, and Python hears no signal meanwhile.
        """
        # its own connection, since a call through the other waits until the call of the work has returned
        own = Ranks(self.rank, self.size, self.local_rank, self._store.clone())
        before, stands = [0] * self.size, [0] * self.size
        with contextlib.suppress(RuntimeError):  # the machine of the store has ended
            for count in itertools.count(1):
                if stopped.wait(BEAT):
                    return
                own._store.add(f"beats of {self.rank}", 1)
                if count % BEATS:
                    continue
                beats = own._beats()
                for rank, (old, new) in enumerate(zip(before, beats, strict=True)):
                    stands[rank] = stands[rank] + 1 if 0 < old == new < DONE else 0
                before = beats
                if ended := [str(rank) for rank, looks in enumerate(stands) if looks >= LOOKS]:
                    if own.speaks():
                        told = f"rank {', '.join(ended)} has ended at {self.where}{self.then}"
                        print(f"drot: {told}", file=sys.__stderr__, flush=True)
                    os._exit(2)

    def meet(self, backend: str) -> None:
        """Waits until all ranks have started, and connects them. Raises RankEnded if one does not start."""
        with self._alive():
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=JOIN
            )
        _set_pg_timeout(TIMEOUT)

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
    found, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"drot {next(_joined)}", found)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    ranks, logger = Ranks(rank, size, local_rank(), store, local_size()), logging.getLogger("drot")
    level, stopped = logger.level, threading.Event()
    if rank:
        logger.setLevel(logging.ERROR)
    threading.Thread(target=ranks.beat, args=(stopped,), daemon=True).start()
    try:
        ranks.meet(backend)
        yield ranks
    except Exception as error:
        speaks = ranks.speaks()
        if dist.is_initialized():  # a caller may catch the error, and join again
            _abort_process_group()
        if not speaks:
            raise ToldElsewhere(str(error)) from error
        if rank:
            error.add_note(f"rank {rank}")
        raise
    else:
        store.add(f"beats of {rank}", DONE)
        dist.destroy_process_group()
    finally:
        stopped.set()
        logger.setLevel(level)
