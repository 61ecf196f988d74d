"""What killed runs leave behind."""

import signal
import subprocess
import sys

from drot.core.lock import locked


def test_the_next_run_removes_what_a_killed_run_left(tmp_path, caplog):
    out = tmp_path / "out"
    code = (
        "import os, signal, sys; from pathlib import Path; from drot.core.files import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as part:\n"
        "    (part / 'weights').write_bytes(bytes(1000)); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-P", "-c", code, str(out)])
    (left,) = tmp_path.iterdir()
    assert killed.returncode == -signal.SIGKILL and left.name.startswith("out.") and left.suffix == ".part"
    others = [tmp_path / name for name in ("out.mymodel1.part", "out.long_name.part", "other.abcdefgh.part")]
    for other in others:
        (other / "mine").mkdir(parents=True)
    (tmp_path / "target").mkdir()
    link = tmp_path / "out.12345678.part"
    link.symlink_to(tmp_path / "target")
    with locked(out):
        assert {path.name for path in tmp_path.iterdir()} - {"out.lock"} == {
            *(other.name for other in others), "target", link.name
        }  # fmt: skip
    assert f"removed {left}, which a run to {out} left when it was killed" in caplog.text
