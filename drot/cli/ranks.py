"""`--gpus`: the same command line again on several ranks, which torchrun starts and watches."""

import logging
import os
import signal
from collections.abc import Sequence

import typer

from drot.cli.log import tell
from drot.core import torchrun
from drot.core.errors import UserError


def checked_ranks(count: int | None, device: str) -> int:
    """The ranks of the run: `count`, the value of --gpus, or without it those that torchrun started.

    Raises UserError unless a run on `count` GPUs, or with `device` cpu of `count` processes, can start.
    """
    if count is None:
        return torchrun.world_size()
    if count < 1:
        raise UserError(f"`gpus` must be at least 1, got {count}")
    from drot.machine.devices import is_gpu, pick_device

    if count > 1 and device == "auto" and not is_gpu(pick_device(device)):
        raise UserError(
            f"torch finds no GPU for `gpus={count}`: `device=cpu` shares the run between {count} processes"
        )
    return count


def launch_if_asked(count: int | None, arguments: Sequence[str]) -> None:
    """Runs `drot` with these arguments on `count` ranks, the value of --gpus, and exits.

    Returns without a `count`, in a rank, and with one: a single rank would take itself for this process, and
    start another. The ranks tell their errors. The exit status is that of the first rank that fails, or 1 if
    a signal ended it; after a signal to this process, 128 and the number of the signal.
    """
    if count is not None and count > 1 and torchrun.world_size() == 1:
        raise typer.Exit(_launch(arguments, count))


def _launch(arguments: Sequence[str], count: int) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # of torchrun: the ranks say what happened
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # of one rank; torchrun would take 1
        os.environ.setdefault(name, str(threads))
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={count}", "--module", "drot", *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            tell(f"drot: rank {rank} was ended by the signal {signal.Signals(-failure.exitcode).name}")
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + error.sigval
    finally:
        logging.disable(logging.NOTSET)
    return 0
