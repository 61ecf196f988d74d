"""The lock on the output of a run, so that two runs never write to the same folder.

The package filelock is not used: it locks a file of any content, and its SoftFileLock deletes a file of
another program after two seconds.
"""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from drot.core.errors import UserError
from drot.core.files import beside, remove_leftovers, writing

logger = logging.getLogger("drot")

#: errors of flock on file systems without locks, as some network file systems are
NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


def lock_file(out: Path) -> Path:
    """The file that is locked while a run writes to `out`."""
    return beside(out, ".lock")


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Locks `out` for the caller, and removes what killed runs to `out` left (`remove_leftovers`).

    Raises UserError at once if another run has the lock.

    The lock is the kernel's (flock) on the empty file `<out>.lock`, which ends with the process. The file is
    deleted at the end; one that a killed run left behind is taken over. A link is refused, and so is a file
    with content, such as poetry.lock for `out` poetry. A warning says if the file system has no locks.
    """
    file = lock_file(out)
    with writing(file):
        descriptor = _acquire(out, file)
    try:
        with writing(out):
            remove_leftovers(out)
        yield
    finally:
        file.unlink(missing_ok=True)  # before the lock is released, so that no other run's file is deleted
        os.close(descriptor)


def _acquire(out: Path, file: Path) -> int:
    """The descriptor of the locked file."""
    while True:
        with contextlib.ExitStack() as opened:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another run writes to {out} now: wait for its end or name another `out`"
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                logger.warning("the file system of %s has no locks: start no second run to it", out)
            found = os.fstat(descriptor)
            if found.st_size:
                raise UserError(
                    f"{file} is not a lock of drot, which needs this name: move it or name another `out`"
                )
            if found.st_nlink:  # 0: its owner deleted it between open and lock
                opened.pop_all()
                return descriptor
