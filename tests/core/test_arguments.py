"""A value of a wrong type is one line that names the argument, from each function of the package."""

import pytest
import torch

import drot

WRONG = 5, b"x", [], {}, 1.5, torch.zeros(2)


@pytest.mark.parametrize(
    ("function", "given", "argument"),
    [
        (drot.compare, {"ppl": ["text"]}, "folder"),
        (drot.report, {}, "folder"),
        (drot.report, {"folder": "none"}, "out"),
        (drot.compare, {"folder": "none", "ppl": ["text"]}, "model"),
        (drot.evaluate, {"models": ["none"], "against": None}, "dtype"),
        (drot.evaluate, {"models": ["none"]}, "against"),
        (drot.evaluate, {"models": ["none"]}, "stream"),
        (drot.sample, {"model": "none"}, "out"),
        (drot.sensitivity, {"model": "none"}, "rotations"),
        (drot.prune, {"model": "none"}, "device"),
        (drot.load, {"path": "none"}, "device"),
        (drot.load, {"path": "none"}, "verify"),
        (drot.measure_speed, {"model": None, "shape": "llama-3-8b"}, "device"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_wrong_types_are_refused(function, given, argument):
    for value in WRONG:
        with pytest.raises(drot.UserError, match=f"`{argument}` must be a"):
            function(**given, **{argument: value})


@pytest.mark.parametrize("argument", ["tokens", "batches", "repeats"])
def test_numbers_of_a_benchmark(argument):
    for value in ("16", 1.5, torch.ones(2), ["16"], [1.5]):
        with pytest.raises(drot.UserError, match=f"`{argument}` must be a"):
            drot.measure_speed(None, "llama-3-8b", device="cpu", **{argument: value})


@pytest.mark.parametrize("argument", ["tokens", "seqlen", "seed"])
def test_numbers_of_a_written_text(argument, tmp_path):
    for value in ("16", 1.5, torch.ones(2), None):
        with pytest.raises(drot.UserError, match=f"`{argument}` must be a"):
            drot.sample("none", tmp_path / "text.jsonl", **{argument: value})


def test_no_dtype_of_8_bits(tmp_path):
    with pytest.raises(drot.UserError, match="`save_dtype` must be auto or one of"):
        drot.prune("none", save_dtype=torch.float8_e4m3fn)
