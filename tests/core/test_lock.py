"""The lock on `out`: a second run is refused at once, and what a killed run left behind is taken over."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import small_model

import drot
from drot.checkpoint.convert import convert
from drot.core.errors import UserError
from drot.core.lock import lock_file, locked


def test_a_second_run_is_refused_before_its_model_is_loaded(tmp_path):
    """Another process holds the lock. The model of the second run does not even exist."""
    out = tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from drot.core.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "locked\n"
        message = f"another run writes to {out} now"
        with pytest.raises(UserError, match=message):
            drot.prune(tmp_path / "no-model", out=out)
        with pytest.raises(UserError, match=message):
            convert(tmp_path / "no-model", out, "packed")
        with pytest.raises(UserError, match=message):
            drot.finetune(tmp_path / "no-model", out=out)
        with pytest.raises(UserError, match=message):
            drot.apply_artifact(tmp_path / "no-artifact", out)
    finally:
        other.communicate("")
    assert not lock_file(out).exists()
    with locked(out):
        assert lock_file(out).exists()


def test_what_lies_beside_the_current_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert lock_file(Path(".")) == tmp_path.with_name(f"{tmp_path.name}.lock")
    assert lock_file(Path("..")) == tmp_path.parent.with_name(f"{tmp_path.parent.name}.lock")
    assert (lock_file(Path("a")), lock_file(Path("../a"))) == (Path("a.lock"), Path("../a.lock"))


def test_the_lock_is_released_after_an_error(tmp_path):
    with pytest.raises(UserError, match="needs `tokenizer`"):
        drot.prune(small_model("llama"), out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_lock_that_a_killed_run_left_is_taken_over(tmp_path):
    """The kernel has released it."""
    lock_file(tmp_path / "out").touch()
    with locked(tmp_path / "out"):
        pass
    assert not lock_file(tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["[package]\nname = 'mine'\n", "{\n}", "\0", '{"hosts": 1}'])
@pytest.mark.parametrize("kind", ["file", "link", "hard link"])
def test_a_file_that_is_no_lock_stays_as_it_is(tmp_path, content, kind):
    """`--out poetry` beside a poetry.lock, and a link whose target would be overwritten."""
    (tmp_path / "mine").write_text(content)
    if kind == "link":
        lock_file(tmp_path / "out").symlink_to(tmp_path / "mine")
    else:
        (shutil.copy if kind == "file" else os.link)(tmp_path / "mine", lock_file(tmp_path / "out"))
    with pytest.raises(UserError, match="cannot write" if kind == "link" else "is not a lock of drot"):
        drot.prune("./no-model", out=tmp_path / "out")
    assert lock_file(tmp_path / "out").read_text() == (tmp_path / "mine").read_text() == content


def test_a_lock_file_that_its_owner_deletes_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """The other run ends between our open and our flock: the deleted file must not count as the lock."""
    out, real, calls = tmp_path / "out", fcntl.flock, []

    def flock(descriptor, operation):
        calls.append(operation)
        if len(calls) == 1:
            lock_file(out).unlink()
        return real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(out):
        assert lock_file(out).exists() and len(calls) == 2
        with pytest.raises(UserError, match="writes to"), locked(out):
            pass


def test_without_locks_a_warning_says_so(tmp_path, monkeypatch, caplog):
    """Some network file systems have no flock."""

    def flock(descriptor, operation):
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "out"):
        assert "has no locks: start no second run" in caplog.text


def test_a_folder_without_permission_is_one_line(tmp_path, monkeypatch):
    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(UserError, match=r"cannot write .*out\.lock: Permission denied"),
        locked(tmp_path / "out"),
    ):
        pass
