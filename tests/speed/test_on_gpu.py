"""benchmarks/on_gpu.sh: which programs it runs on a machine with a GPU. A stub takes the place of Python."""

import os
import re
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

#: writes its arguments to CALLS, and answers the question for the GPU's architecture
STUB = """#!/bin/bash
[[ $1 == - ]] && { cat > /dev/null; echo 9.0; exit; }
echo "$*" >> "$CALLS"
[[ $* == *rotation_step* ]] && { echo "  fast  2.00 x reference  target 6: MISSED"; exit 1; }
[[ $* == *llama-3-70b* ]] && echo "  whole layer: 1 s  target 45 s: met"
exit 0
"""


@pytest.fixture
def done(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    path = os.pathsep.join(["/usr/bin", "/bin"])  # without compute-sanitizer
    return subprocess.run(
        [str(BENCHMARKS / "on_gpu.sh"), str(tmp_path / "rows")],
        env={"PATH": path, "PYTHON": str(stub), "CALLS": str(tmp_path / "calls")},
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs the checkout")
def test_everything_that_has_an_aim_is_measured(
    done: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    calls = (tmp_path / "calls").read_text()
    run = re.findall(r"^benchmarks/(bench_\w+)\.py --device cuda(?: --shape (\S+))?", calls, re.MULTILINE)
    first = [("bench_entropy_loss", ""), ("bench_pruned_importance", "")]
    layers = [("bench_prune_layer", "llama-3-8b"), ("bench_prune_layer", "llama-3-70b")]
    assert run[:4] == first + layers
    rest = {path.stem for path in BENCHMARKS.glob("bench_*.py")} - {name for name, _ in run[:4]}
    assert run[4:] == [(name, "") for name in sorted(rest)]
    assert "optimizers.py --device cuda --synthetic 256 512 1024 2048 " in calls
    assert calls.count("info --measure") == 1
    assert calls.index("check_ops.py --device cuda") < calls.index("info --measure") < calls.index("bench_")


@pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs the checkout")
def test_what_misses_its_aim_is_said_at_the_end(
    done: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[-2:] == [
        "bench_prune_layer-llama-3-70b.log:  whole layer: 1 s  target 45 s: met",
        "bench_rotation_step.log:  fast  2.00 x reference  target 6: MISSED",
    ]
    summary = (tmp_path / "rows" / "summary.txt").read_text().splitlines()
    assert [line.split()[-1] for line in summary if line.startswith("FAILED")] == ["bench_rotation_step"]
