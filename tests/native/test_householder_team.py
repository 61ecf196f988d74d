"""The Householder code of the CUDA block, run by CPU threads under ThreadSanitizer."""

import subprocess

import pytest
from compiled import compiled


@pytest.mark.slow
def test_lanes_and_warps_agree_without_races() -> None:
    program = compiled("householder_team", "-g", "-pthread", sanitizer="thread")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stderr
    assert "data race" not in done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(n) for n, _, _ in lines] == [1, 2, 3, 7, 13, 22]
    for _, orthogonality, residual in lines:
        assert float(orthogonality) < 2e-6
        assert float(residual) < 2e-5
