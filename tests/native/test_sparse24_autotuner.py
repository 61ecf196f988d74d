"""Which algorithm sparse24_linear takes on a GPU: measured once and kept in the tuning cache.

The times are made up, the file of the cache is real.
"""

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import CSRC, compiled

SKINNY, CUSPARSELT, DENSE = range(3)
CUSPARSELT_FOUND, CUSPARSELT_DEFAULT = "cusparselt 7 2 1 3", "cusparselt -1 0 0 0"


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled("sparse24_autotuner", "-shared", "-fPIC", sources=(CSRC / "common" / "tuning_cache.cpp",))


class Process:
    """The autotuner of one process; two processes share the tuning cache only."""

    def __init__(self, library: Path) -> None:
        self.native = ctypes.CDLL(str(library))
        self.native.new_autotuner.restype = ctypes.c_void_p
        self.native.choose.restype = ctypes.c_char_p
        self.autotuner = ctypes.c_void_p(self.native.new_autotuner())

    def choose(
        self,
        key: str,
        times: dict[int, float],
        may_measure: bool = True,
        again: dict[int, float] | None = None,
    ) -> tuple[str, int]:
        """The choice, and the number of times that were measured for it.

        again: the times of the second measurement; None for those of the first.
        """
        algorithms = (ctypes.c_int * len(times))(*times)
        both = [*times.values(), *(again or times).values()]
        seconds = (ctypes.c_double * len(both))(*both)
        measured = ctypes.c_int(0)
        text = self.native.choose(
            self.autotuner,
            key.encode(),
            algorithms,
            len(times),
            may_measure,
            seconds,
            ctypes.byref(measured),
        )
        return text.decode(), measured.value


@pytest.fixture
def process(library: Path, tmp_path: Path, monkeypatch):
    """Makes processes that share a tuning cache."""
    monkeypatch.setenv("DROT_CACHE", str(tmp_path / "cache"))
    return lambda: Process(library)


def cached_lines(tmp_path: Path) -> list[str]:
    return (tmp_path / "cache" / "measured.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("times", "fastest"),
    [
        ({CUSPARSELT: 2.0, SKINNY: 1.0, DENSE: 3.0}, "skinny"),
        ({CUSPARSELT: 2.0, SKINNY: 4.0, DENSE: 3.0}, CUSPARSELT_FOUND),
        ({CUSPARSELT: 2.0, DENSE: 1.0}, "dense"),
    ],
)
def test_fastest_is_measured_once_and_cached(process, tmp_path, times, fastest) -> None:
    first = process()
    assert first.choose("a", times) == (fastest, 2 * len(times))
    other = {algorithm: -seconds for algorithm, seconds in times.items()}
    assert first.choose("a", other) == (fastest, 0)
    assert process().choose("a", other) == (fastest, 0)
    assert cached_lines(tmp_path) == [f"a\t{fastest}"]
    assert process().choose("another", times)[1] == 2 * len(times)


def test_without_a_measurement_the_first_candidate_is_taken_once(process) -> None:
    times = {CUSPARSELT: 2.0, DENSE: 1.0}
    first = process()
    assert first.choose("a", times, may_measure=False) == (CUSPARSELT_DEFAULT, 0)
    assert first.choose("a", times) == ("dense", 4)
    assert process().choose("a", times, may_measure=False) == ("dense", 0)


@pytest.mark.parametrize(
    ("times", "choice"),
    [
        ({CUSPARSELT: math.inf, DENSE: 1.0}, "dense"),
        ({CUSPARSELT: math.inf, DENSE: math.inf}, CUSPARSELT_DEFAULT),
    ],
)
def test_an_algorithm_that_failed_is_tried_by_the_next_process(process, tmp_path, times, choice) -> None:
    first = process()
    assert first.choose("a", times)[0] == choice
    assert first.choose("a", times) == (choice, 0)
    assert not (tmp_path / "cache").exists()
    assert process().choose("a", {CUSPARSELT: 1.0, DENSE: 2.0}) == (CUSPARSELT_FOUND, 4)


@pytest.mark.parametrize(
    ("again", "choice"),
    [
        ({CUSPARSELT: 2.0, SKINNY: 3.0}, "skinny"),  # the smallest time of both measurements is skinny's
        ({CUSPARSELT: 0.5, SKINNY: 3.0}, CUSPARSELT_FOUND),
        ({CUSPARSELT: math.inf, SKINNY: 1.0}, "skinny"),
    ],
)
def test_measurements_that_disagree_are_not_cached(process, tmp_path, again, choice) -> None:
    first, times = process(), {CUSPARSELT: 2.0, SKINNY: 1.0}
    assert first.choose("a", times, again=again) == (choice, 4)
    assert first.choose("a", times) == (choice, 0)
    assert not (tmp_path / "cache").exists()
    assert process().choose("a", times) == ("skinny", 4)


def test_a_choice_that_was_refused_is_replaced_for_this_process(process) -> None:
    first, times = process(), {CUSPARSELT: 1.0, DENSE: 2.0}
    assert first.choose("a", times) == (CUSPARSELT_FOUND, 4)
    first.native.replace_by_dense(first.autotuner, b"a")
    assert first.choose("a", times) == ("dense", 0)
    assert process().choose("a", times) == (CUSPARSELT_FOUND, 0)


def test_what_is_refused_in_a_capture_is_measured_later(process) -> None:
    first, times = process(), {CUSPARSELT: 1.0, DENSE: 2.0}
    assert first.choose("a", times, may_measure=False) == (CUSPARSELT_DEFAULT, 0)
    first.native.replace_by_dense(first.autotuner, b"a")
    assert first.choose("a", times) == (CUSPARSELT_FOUND, 4)


def test_plans_are_made_for_few_numbers_of_tokens(library) -> None:
    """Multiples of 8 that are little more than the tokens, and few in all."""
    native = ctypes.CDLL(str(library))
    native.planned.restype, native.planned.argtypes = ctypes.c_int64, [ctypes.c_int64]
    planned = {tokens: native.planned(tokens) for tokens in range(1, 8193)}
    assert all(tokens <= found and found % 8 == 0 for tokens, found in planned.items())
    assert all(found < tokens + max(8, tokens / 16 + 1) for tokens, found in planned.items())
    assert planned[8192] == 8192 and len(set(planned.values())) == 112


@pytest.mark.parametrize(
    ("most", "keys", "made"),
    [
        (2, [1, 2, 1, 3, 1, 2], [1, 1, 0, 1, 0, 1]),  # 3 replaces 2, which was used before 1
        (1, [1, 1, 2, 1], [1, 0, 1, 1]),
        (2, [1, -1, 2, -1, 1, 2], [1, -1, 1, -1, 0, 0]),  # what cannot be made takes no place
    ],
)
def test_the_cache_of_plans_is_bounded(library, most, keys, made) -> None:
    found = (ctypes.c_int * len(keys))()
    ctypes.CDLL(str(library)).use_cache(most, (ctypes.c_int * len(keys))(*keys), len(keys), found)
    assert list(found) == made


@pytest.mark.parametrize(
    "text",
    [
        "a\tcusparselt 7 2",
        "a\tcusparselt 7 2 1 3 4\n",
        "a\tcuspars",
        "a\t",
        "a",
        "a\tskinny\n",  # not a candidate
        "a\tlibrary 7 2 1 3\n",  # an older version of drot wrote this line and the next
        "a\tfew\n",
        "\0\xff\n",
        "\n\na dense\n",
    ],
)
def test_a_line_that_is_not_understood_is_measured_anew(process, tmp_path, text: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "measured.txt").write_text(text)
    times = {CUSPARSELT: 2.0, DENSE: 1.0}
    assert process().choose("a", times) == ("dense", 4)
    assert process().choose("a", times) == ("dense", 0)


def test_the_last_line_of_a_key_is_valid(process, tmp_path) -> None:
    (tmp_path / "cache").mkdir()
    lines = "a\tdense\nab\tskinny\na\tskinny\nb\tdense\n"
    (tmp_path / "cache" / "measured.txt").write_text(lines)
    assert process().choose("a", {SKINNY: 2.0, DENSE: 1.0}) == ("skinny", 0)


@pytest.mark.parametrize("cache", ["", "/dev/null/no/folder"])
def test_where_the_cache_cannot_be_written_each_process_measures(process, monkeypatch, cache: str) -> None:
    monkeypatch.setenv("DROT_CACHE", cache)
    first = process()
    assert first.choose("a", {SKINNY: 2.0, DENSE: 1.0}) == ("dense", 4)
    assert first.choose("a", {SKINNY: 2.0, DENSE: 1.0}) == ("dense", 0)
    assert process().choose("a", {SKINNY: 2.0, DENSE: 1.0}) == ("dense", 4)


def test_processes_that_write_at_the_same_time_lose_no_line(process, library: Path, tmp_path) -> None:
    script = (
        "import ctypes, sys\n"
        "native = ctypes.CDLL(sys.argv[1])\n"
        "for i in range(200):\n"
        "    assert native.store(f'{sys.argv[2]} {i}'.encode(), b'dense')"
    )
    command = [sys.executable, "-c", script, str(library)]
    writers = [subprocess.Popen([*command, str(number)], env=dict(os.environ)) for number in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    assert sorted(cached_lines(tmp_path)) == sorted(f"{w} {i}\tdense" for w in range(4) for i in range(200))
