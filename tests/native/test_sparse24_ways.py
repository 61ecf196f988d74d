"""Which way sparse24_linear takes on a GPU: measured once, remembered for the processes to come. The times
are made up, the file is a real one."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
COMPILER = shutil.which("c++")
FEW, LIBRARY, DENSE = range(3)
LIBRARY_FOUND, LIBRARY_DEFAULT = "library 7 2 1 3", "library -1 0 0 0"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    library = tmp_path_factory.mktemp("ways") / "sparse24_ways.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{CSRC}"]
    sources = [str(HERE / "sparse24_ways.cpp"), str(CSRC / "common" / "remembered.cpp")]
    build = subprocess.run(
        [str(COMPILER), *flags, *sources, "-o", str(library)], capture_output=True, text=True
    )
    assert build.returncode == 0, build.stderr
    return library


class Process:
    """What one process knows; the next one has the file alone."""

    def __init__(self, library: Path) -> None:
        self.native = ctypes.CDLL(str(library))
        self.native.new_process.restype = ctypes.c_void_p
        self.native.choose.restype = ctypes.c_char_p
        self.chosen = ctypes.c_void_p(self.native.new_process())

    def choose(self, key: str, times: dict[int, float], may_measure: bool = True) -> tuple[str, int]:
        """The choice, and how many ways were measured for it."""
        ways, seconds = (ctypes.c_int * len(times))(*times), (ctypes.c_double * len(times))(*times.values())
        measured = ctypes.c_int(0)
        text = self.native.choose(
            self.chosen, key.encode(), ways, len(times), may_measure, seconds, ctypes.byref(measured)
        )
        return text.decode(), measured.value


@pytest.fixture
def process(library: Path, tmp_path: Path, monkeypatch):
    """Makes processes that share a folder for what they remember."""
    monkeypatch.setenv("DROT_CACHE", str(tmp_path / "cache"))
    return lambda: Process(library)


def remembered(tmp_path: Path) -> list[str]:
    return (tmp_path / "cache" / "measured.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("times", "fastest"),
    [
        ({LIBRARY: 2.0, FEW: 1.0, DENSE: 3.0}, "few"),
        ({LIBRARY: 2.0, FEW: 4.0, DENSE: 3.0}, LIBRARY_FOUND),
        ({LIBRARY: 2.0, DENSE: 1.0}, "dense"),
    ],
)
def test_fastest_is_measured_once_and_remembered(process, tmp_path, times, fastest) -> None:
    first = process()
    assert first.choose("a", times) == (fastest, len(times))
    other = {way: -seconds for way, seconds in times.items()}
    assert first.choose("a", other) == (fastest, 0)
    assert process().choose("a", other) == (fastest, 0)
    assert remembered(tmp_path) == [f"a\t{fastest}"]
    assert process().choose("another", times)[1] == len(times)


def test_what_may_not_be_measured_is_taken_for_once(process) -> None:
    times = {LIBRARY: 2.0, DENSE: 1.0}
    first = process()
    assert first.choose("a", times, may_measure=False) == (LIBRARY_DEFAULT, 0)
    assert first.choose("a", times) == ("dense", 2)
    assert process().choose("a", times, may_measure=False) == ("dense", 0)


@pytest.mark.parametrize(
    ("times", "found"),
    [({LIBRARY: math.inf, DENSE: 1.0}, "dense"), ({LIBRARY: math.inf, DENSE: math.inf}, LIBRARY_DEFAULT)],
)
def test_a_way_that_could_not_be_gone_is_tried_by_the_next_process(process, tmp_path, times, found) -> None:
    first = process()
    assert first.choose("a", times)[0] == found
    assert first.choose("a", times) == (found, 0)
    assert not (tmp_path / "cache").exists()
    assert process().choose("a", {LIBRARY: 1.0, DENSE: 2.0}) == (LIBRARY_FOUND, 2)


@pytest.mark.parametrize(
    "damaged",
    [
        "a\tlibrary 7 2",
        "a\tlibrary 7 2 1 3 4\n",
        "a\tlibr",
        "a\t",
        "a",
        "a\tfew\n",
        "\0\xff\n",
        "\n\na dense\n",
    ],
)
def test_a_damaged_line_is_measured_anew(process, tmp_path, damaged: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "measured.txt").write_text(damaged)
    times = {LIBRARY: 2.0, DENSE: 1.0}  # not few
    assert process().choose("a", times) == ("dense", 2)
    assert process().choose("a", times) == ("dense", 0)


def test_the_last_line_counts(process, tmp_path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "measured.txt").write_text("a\tdense\nab\tfew\na\tfew\nb\tdense\n")
    assert process().choose("a", {FEW: 2.0, DENSE: 1.0}) == ("few", 0)


@pytest.mark.parametrize("cache", ["", "/dev/null/no/folder"])
def test_where_nothing_can_be_written_each_process_measures(process, monkeypatch, cache: str) -> None:
    monkeypatch.setenv("DROT_CACHE", cache)
    first = process()
    assert first.choose("a", {FEW: 2.0, DENSE: 1.0}) == ("dense", 2)
    assert first.choose("a", {FEW: 2.0, DENSE: 1.0}) == ("dense", 0)
    assert process().choose("a", {FEW: 2.0, DENSE: 1.0}) == ("dense", 2)


def test_processes_that_write_at_a_time_lose_nothing(process, library: Path, tmp_path) -> None:
    script = (
        "import ctypes, sys\n"
        "native = ctypes.CDLL(sys.argv[1])\n"
        "for i in range(200):\n"
        "    assert native.remember(f'{sys.argv[2]} {i}'.encode(), b'dense')"
    )
    command = [sys.executable, "-c", script, str(library)]
    writers = [subprocess.Popen([*command, str(number)], env=dict(os.environ)) for number in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert sorted(remembered(tmp_path)) == sorted(f"{w} {i}\tdense" for w in range(4) for i in range(200))
