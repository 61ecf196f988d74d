"""The lock on the output of a run, so that two runs never write to the same folder.

The package filelock is not used: it would take over one call of flock, but breaks three promises of `locked`.
Its refusal does not name the other process. It locks a file of any content, and its SoftFileLock deletes a
file of another program after two seconds. It falls back to that lock for ENOSYS alone, while network file
systems give ENOLCK or ENOTSUP.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drot.core.errors import UserError
from drot.core.files import remove_leftovers, writing
from drot.core.reading import parse_json

logger = logging.getLogger("drot")

#: errors of flock on file systems without locks, as some network file systems are
NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
#: the first bytes of a lock file, or a part of them if its run was killed while it wrote
BEGINS = b'{"host": '


def lock_file(out: Path) -> Path:
    """The file that is locked while a run writes to `out`."""
    return out.with_name(out.name + ".lock")


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Locks `out` for the caller, and removes what killed runs to `out` left (`remove_leftovers`).

    Raises UserError at once if another run has the lock.

    The lock is the kernel's (flock), which ends with the process; `<out>.lock` names the host and the process
    and is deleted at the end. A file that a killed run left behind is taken over. A link is refused, and so
    is a file that is no lock of drot, such as poetry.lock for `out` poetry. On a file system without flock
    the file alone is the lock: it counts while its process runs, and always if it names another host.
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
    """The descriptor of the locked file, in which this process is entered."""
    while True:
        if file.is_symlink():
            raise UserError(f"{file} is a link: remove it or name another `out`")
        with contextlib.ExitStack() as opened:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            opened.callback(os.close, descriptor)
            _lock(descriptor, out, file)
            if os.fstat(descriptor).st_nlink > 0:  # 0: its owner deleted it between open and lock
                _enter(descriptor, file)
                opened.pop_all()
                return descriptor


def _lock(descriptor: int, out: Path, file: Path) -> None:
    owner = _owner(descriptor, file)
    host, pid = owner.get("host"), owner.get("pid")
    who = f"process {pid} on {host}" if owner else "another process"
    elsewhere = bool(owner) and host != socket.gethostname()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{who} writes to {out} now: wait for its end or name another `out`") from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        logger.warning("the file system of %s has no locks: only %s guards it", out, file)
        if elsewhere or _runs(pid):
            raise UserError(
                f"by {file}, {who} writes to {out}: wait for its end, or delete the file if that process has "
                "ended"
            ) from None
    else:
        if elsewhere:
            logger.warning("%s was left by %s, which no longer holds the lock: this run goes on", file, who)


def _owner(descriptor: int, file: Path) -> dict[str, Any]:
    """The content of a lock file; {} if its run was killed while it wrote."""
    content = os.pread(descriptor, 4096, 0)
    if not BEGINS.startswith(content[: len(BEGINS)]):
        raise UserError(f"{file} is not a lock of drot, which needs this name: move it or name another `out`")
    try:
        owner = parse_json(content, str(file))
    except UserError:
        return {}
    return owner if isinstance(owner.get("pid"), int) and str(owner.get("host")).isprintable() else {}


def _runs(pid: Any) -> bool:
    """Whether a process of this host has the number `pid`."""
    try:
        os.kill(pid, 0)
    except PermissionError:  # the process of another user
        return True
    except (OSError, OverflowError, TypeError):
        return False
    return pid > 0  # 0 and negative numbers are groups of processes


def _enter(descriptor: int, file: Path) -> None:
    """Writes this host and this process to the locked file, which is deleted if the disk is full."""
    owner = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    except OSError:
        file.unlink(missing_ok=True)
        raise
