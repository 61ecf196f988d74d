"""What the system, a cgroup and a limit of the process leave of the main memory."""

import resource
import sys

import pytest

from drot.machine import memory
from drot.machine.memory import available_memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux tells"),
]


def cgroup(folder, **figures):
    folder.mkdir(parents=True)
    for name, content in figures.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_group_above_counts(version, tmp_path, monkeypatch):
    """A limit of 100 MB of which 30 MB are used, 10 MB of them for files, leaves 80 MB."""
    kind, own = ("memory", "1:memory:/a/b\n") if version == 1 else ("", "0::/a/b\n")
    figures = dict(
        memory__max="100000000", memory__current="30000000", memory__stat="anon 7\nfile 10000000\n"
    )
    if version == 1:
        used = dict(memory__usage_in_bytes="30000000", memory__stat="total_cache 10000000\n")
        figures = dict(memory__limit_in_bytes="100000000") | used
    cgroup(tmp_path / kind / "a", **figures)
    cgroup(tmp_path / kind / "a" / "b", memory__max="max")
    real = memory.Path.read_text
    told = lambda path, *args, **options: (  # noqa: E731
        own if str(path) == "/proc/self/cgroup" else real(path, *args, **options)
    )
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory.Path, "read_text", told)
    assert available_memory() == 80_000_000


def test_a_limit_of_the_process_counts():
    before, most = available_memory(), memory._of_process("VmData") + 2 * 10**8
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        found = available_memory()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert found < min(before, 2.1 * 10**8)
