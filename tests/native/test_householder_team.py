"""The Householder code of the CUDA block, run by CPU threads under ThreadSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_lanes_and_warps_agree_without_races(tmp_path: Path) -> None:
    binary = tmp_path / "householder_team"
    source = HERE / "householder_team.cpp"
    include = HERE.parent.parent / "csrc"
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"]
    build = subprocess.run(
        [str(COMPILER), *flags, f"-I{include}", str(source), "-o", str(binary)],
        capture_output=True,
        text=True,
    )
    if "libtsan" in build.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert build.returncode == 0, build.stderr
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stderr
    assert "data race" not in done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(n) for n, _, _ in lines] == [1, 2, 3, 7, 13, 22]
    for _, orthogonality, residual in lines:
        assert float(orthogonality) < 2e-6
        assert float(residual) < 2e-5
