"""A run gives the same bytes again, mostly also with other threads; its manifest names the machine."""

import json
import logging

import pytest
import torch
from runs import assert_same_weights, interrupted, prune
from runs import recipe as small_recipe
from same_bytes import threads
from small_models import random_tokens, small_model

from drot.checkpoint.manifest import read_manifest
from drot.machine import environment

#: multiples of 64, as the sizes of real models are
SIZES = dict(
    hidden_size=192,
    intermediate_size=192,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=64,
    num_hidden_layers=1,
)
TOKENS = random_tokens(4, 64)


def recipe(mode="layer", quality="best", **fields):
    recover = "block" if quality == "best" else "none"
    small = dict(steps=2, recover=recover, recover_epochs=1, block_size=128)
    return small_recipe(mode, quality=quality, **small | fields)


def pruned(sizes, **settings):
    """A small model after a run."""
    return prune(small_model("llama", **sizes), recipe(**settings), calibration=TOKENS).model


def test_a_run_gives_the_same_bytes_again():
    """In all phases of a run, with the number of threads that the process has."""
    assert_same_weights(pruned({}), pruned({}))


@pytest.mark.parametrize("settings", [{}, {"quality": "fast", "sparsity": "0.5", "mode": "shared"}], ids=str)
@pytest.mark.slow
def test_the_bytes_do_not_depend_on_the_number_of_threads(settings):
    """With LAPACK's factors and inverses they did."""
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(pruned(SIZES, **settings))
    for result in results:
        assert_same_weights(result, results[0])


def test_the_manifest_names_the_machine(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    machine = environment.machine(torch.device("cpu"))
    assert machine["threads"] == torch.get_num_threads() and machine["gpu"] is None
    assert machine["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    if not machine["variables"].keys() & {"DROT_SIMD", "ATEN_CPU_CAPABILITY"}:
        assert machine["kernels"].split()[0] in (machine["cpu_capability"], "baseline")
    assert machine["variables"]["MKL_CBWR"] == "AUTO"
    assert json.loads(json.dumps(machine)) == machine
    has_mkl = torch.backends.mkl.is_available()
    assert any("Math Kernel Library" in line for line in machine["math_libraries"]) == has_mkl
    assert {"torch", "transformers", "tokenizers", "safetensors", "numpy"} <= environment.versions().keys()


def test_a_run_that_goes_on_elsewhere_says_so(tmp_path, monkeypatch, caplog):
    chosen, out = recipe("none", "fast"), tmp_path / "out"
    interrupted(chosen=chosen, out=out)
    here = environment.machine(torch.device("cpu"))
    monkeypatch.setattr("drot.pipeline.prune.machine", lambda device: here | {"threads": 77})
    with caplog.at_level(logging.WARNING, "drot"):
        manifest = prune(chosen=chosen, out=out, resume=True).manifest
    told = [record.getMessage() for record in caplog.records if "computed elsewhere" in record.getMessage()]
    assert len(told) == 1 and f"threads: {here['threads']} in those parts, 77 now" in told[0]
    assert [other["threads"] for other in manifest.other_machines] == [here["threads"]]
    assert read_manifest(out).machine == here


def test_a_run_that_goes_on_here_says_nothing(tmp_path, caplog):
    chosen, out = recipe("none", "fast"), tmp_path / "out"
    interrupted(chosen=chosen, out=out)
    with caplog.at_level(logging.WARNING, "drot"):
        manifest = prune(chosen=chosen, out=out, resume=True).manifest
    assert not caplog.records and not manifest.other_machines
