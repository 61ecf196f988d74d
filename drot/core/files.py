"""Writing of files and folders. Each is complete or does not exist, also after a power failure."""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from drot.core.errors import UserError

logger = logging.getLogger("drot")

#: errors of fsync on the folders of file systems that cannot sync a folder
CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
#: Bytes of the longest name of a file or folder to write. File systems allow 255, and the longest suffix,
#: that of the temporary folder of tempfile, takes 14.
LONGEST_NAME = 240


class WriteError(UserError):
    """A file could not be written, as on a full disk."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the exceptions of a failed write into a WriteError of one line that names `path`."""
    try:
        yield
    except Exception as error:
        # the package tokenizers raises a plain Exception, as in 'No space left on device (os error 28)'
        of_tokenizers = type(error) is Exception and "os error" in str(error)
        if not (of_tokenizers or isinstance(error, OSError | SafetensorError)):
            raise
        raise WriteError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the folder of `path`. The file that the caller writes there replaces `path`.

    The file is synced first and gets the permissions of the umask. If the caller or the sync fails, the
    temporary file is deleted and `path` stays as it was. Raises WriteError if writing fails.
    """
    part = path.with_name(path.name + ".part")
    with writing(path):
        try:
            part.unlink(missing_ok=True)
            part.touch()
            mode = part.stat().st_mode  # safetensors makes files that only their owner can read
            yield part
            part.chmod(mode)
            sync(part)
            os.replace(part, path)
            sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def new_folder(out: Path, scratch: Path | None = None) -> Iterator[Path]:
    """Yields a temporary folder. When the caller has filled it, it is synced and renamed to `out`.

    So `out` is complete if it exists. After an error `out` is as it was. Raises WriteError if writing fails.

    out: a folder that is new or empty.
    scratch: an existing folder on the same file system for the temporary folder, which a killed process
        leaves behind; None is the parent of `out`.
    """
    prefix = None if scratch else out.name + "."
    with writing(out), tempfile.TemporaryDirectory(".part", prefix, scratch or out.parent) as temporary:
        # unlike the temporary folder around it, the new folder has the permissions of the umask
        part = Path(temporary) / out.name
        part.mkdir()
        yield part
        finish_folder(part)
        if out.exists():
            out.rmdir()
        os.replace(part, out)
        sync(out.parent)


def remove_leftovers(out: Path) -> None:
    """Removes the temporary folders that killed runs left beside `out`, and names them in a warning.

    The caller has locked `out`, so that no run fills one of them. A run fills a folder named like `out` in
    its temporary folder, as `new_folder` does; one with anything else is left alone.
    """
    left = re.compile(re.escape(out.name) + r"\.[a-z0-9_]{8}\.part")
    for folder in [path for path in out.parent.iterdir() if left.fullmatch(path.name)]:
        if (
            folder.is_dir()
            and not folder.is_symlink()
            and {each.name for each in folder.iterdir()} <= {out.name}
        ):
            shutil.rmtree(folder)
            logger.warning("removed %s, which a run to %s left when it was killed", folder, out)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` to the file `path`. Raises WriteError if writing fails."""
    with new_file(path) as part:
        part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def sync(path: Path) -> None:
    """Waits until the content of a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def finish_folder(folder: Path) -> None:
    """Syncs all files and folders in `folder`, and gives the files the permissions of the umask."""
    mode = folder.stat().st_mode & 0o666  # mkdir made the folder with the umask
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(mode)
        sync(path)
    sync(folder)


def beside(out: Path, suffix: str) -> Path:
    """The path beside `out` with its name and `suffix`, also of `.` and `..`, which say no name."""
    named = out if out.name not in ("", "..") else Path(os.path.abspath(out))
    return named.with_name(named.name + suffix)


def check_file_name(file: Path) -> None:
    """Raises UserError if the name of a file or folder to write is too long."""
    if (length := len(os.fsencode(file.name))) > LONGEST_NAME:
        raise UserError(
            f"cannot write {file.name[:20]}...: a name must have at most {LONGEST_NAME} bytes, got {length}: "
            "shorten it"
        )


def check_writable(file: Path, *, dry_run: bool = False) -> None:
    """Creates the parent folder of a file or folder to write.

    Raises UserError if nothing can be written there, and as `check_file_name` does.

    dry_run: whether to create nothing, and to look at the folder in which the first one would be created.
    """
    check_file_name(file)
    try:
        folder = file.parent
        if dry_run:
            folder = next(parent for parent in file.absolute().parents if parent.exists())
        else:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: {file.parent}") from None


def same_disk(file: Path, other: Path) -> bool:
    """Whether two paths, which need not exist yet, lie in the same file system."""
    first, second = (
        next(parent for parent in path.resolve().parents if parent.exists()).stat().st_dev
        for path in (file, other)
    )
    return first == second
