"""benchmarks/layer_kernels.py and inference.py: what they count is what drot stores, computes and starts."""

import csv
import ctypes
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compiled import compiled
from safetensors.torch import save_file
from transformers import AutoConfig

from drot.evaluation.variants import DENSE, ROTATED, SPARSE, layer_variants
from drot.model.decoder import DecoderModel

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="needs the checkout")

WIDTH, TOKENS = 128, 48  # more tokens than the kernel for few of them takes


def config():
    return AutoConfig.for_model(
        "llama", hidden_size=WIDTH, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=1, vocab_size=8, tie_word_embeddings=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def scripts():
    """layer_kernels.py and inference.py as modules."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import inference
        import layer_kernels
    finally:
        sys.path.remove(str(BENCHMARKS))
    return SimpleNamespace(kernels=layer_kernels, times=inference)


@pytest.fixture(scope="module")
def found(scripts):
    return scripts.kernels.layer_kernels(config(), 1, 2, TOKENS)


def of_kind(kernels, *kinds: str):
    return [kernel for kernel in kernels if kernel.kind in kinds]


def weight_bytes(kernels, *kinds: str) -> int:
    """The bytes that kernels read for any number of tokens: twice those of one token, less those of two."""
    one, two = (sum(k.bytes for k in of_kind(kernels[tokens], *kinds)) for tokens in (1, 2))
    return 2 * one - two


def stored(tmp_path: Path, model, *names: str) -> int:
    """Bytes of the tensors of the layer with these names in a file."""
    layer = DecoderModel(model).layer_modules[0].state_dict()
    tensors = {key: tensor.contiguous() for key, tensor in layer.items() if key.endswith(names)}
    save_file(tensors, tmp_path / "layer.safetensors")
    header = int.from_bytes((tmp_path / "layer.safetensors").read_bytes()[:8], "little")
    return (tmp_path / "layer.safetensors").stat().st_size - 8 - header


def test_bytes_of_the_weights_are_those_of_a_file(found, tmp_path) -> None:
    models = layer_variants(config(), dtype=torch.bfloat16, device=torch.device("cpu"))
    dense = stored(tmp_path, models[DENSE], "proj.weight")
    packed = stored(tmp_path, models[SPARSE], "values", "positions")
    rotations = stored(tmp_path, models[ROTATED], "rotation.weight")
    assert weight_bytes(found[DENSE], "dense") == dense
    assert weight_bytes(found[SPARSE], "packed") == packed == dense * 9 / 16
    assert weight_bytes(found[ROTATED], "packed", "blocks") == packed + rotations


def test_operations_are_two_a_weight_and_token(found) -> None:
    layer = DecoderModel(layer_variants(config(), dtype=torch.bfloat16, device=torch.device("meta"))[DENSE])
    weights = sum(linear.weight.numel() for linear in layer.layers[0].linears.values())
    for variant, kinds in ((DENSE, ("dense",)), (SPARSE, ("packed",))):
        for tokens in (1, TOKENS):
            work = sum(k.operations for k in of_kind(found[variant][tokens], *kinds))
            assert work == 2 * tokens * weights


def test_the_fusion_saves_launches_and_an_add(found, scripts) -> None:
    """Of a token the product with R1 and the add, of many the add and what it reads more."""
    apart, fused = found[scripts.kernels.APART], found[ROTATED]
    assert len(apart[1]) - len(fused[1]) == 2
    assert len(apart[TOKENS]) - len(fused[TOKENS]) == 1
    for tokens in (1, TOKENS):
        products = [sum(k.operations for k in variant[tokens]) for variant in (apart, fused)]
        assert products[0] == products[1]
    assert weight_bytes(apart, "dense", "packed", "blocks") == weight_bytes(fused, "packed", "blocks")
    moved = [sum(k.bytes for k in variant[TOKENS]) for variant in (apart, fused)]
    assert moved[0] - moved[1] == 2 * (2 * TOKENS * WIDTH)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_ratios_stay_within_those_of_the_bytes(found, scripts, share: float) -> None:
    rates = scripts.times.Rates(memory=1e12, share=share, launch=0.0, gain=1.0)
    seconds = {
        variant: rates.seconds(scripts.kernels.products(kernels[1])) for variant, kernels in found.items()
    }
    ratios = {variant: seconds[DENSE] / value for variant, value in seconds.items()}
    light = scripts.kernels.LIGHT
    assert share * 16 / 9 > ratios[SPARSE] > ratios[light] > ratios[ROTATED]
    waits = scripts.times.Rates(memory=1e12, share=share, launch=1.0, gain=1.0)  # a launch is all of the time
    layers = [waits.seconds(found[variant][1]) for variant in (DENSE, SPARSE)]
    assert layers[0] - layers[1] == pytest.approx(3)  # q, k, v and gate, up are two products of five


def test_an_aim_is_met_with_the_rate_that_it_needs(found, scripts) -> None:
    needed, rates = scripts.times.needed, scripts.times.Rates(memory=1e12, share=1.0, launch=1e-9, gain=1.0)

    def ratio(share: float) -> float:
        changed = scripts.times.replace(rates, share=share)
        return rates.seconds(found[DENSE][1]) / changed.seconds(found[SPARSE][1])

    least = needed(ratio, 1.1)
    assert ratio(least) == pytest.approx(1.1) and ratio(least * 0.99) < 1.1
    assert needed(ratio, 100.0) == float("inf")


@pytest.mark.parametrize(
    ("met", "verdict"),
    [
        ([True, True, True], "met"),
        ([False, True, True], "met, MISSED at low"),
        ([True, True, False], "met, MISSED at high"),
        ([True, False, True], "MISSED"),
    ],
)
def test_verdict(scripts, met: list[bool], verdict: str) -> None:
    assert scripts.times.verdict_of(met) == verdict


def test_bytes_in_flight_are_those_of_the_kernel(scripts) -> None:
    times = scripts.times
    library = ctypes.CDLL(
        str(compiled("sparse24_skinny", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"))
    )
    for function in (library.bytes_in_flight, library.shared_bytes):
        function.restype = ctypes.c_int64
    for tiles in (1, 2):
        assert times.bytes_of_block(tiles) == library.bytes_in_flight(ctypes.c_int64(tiles))
        # 228 KB of a multiprocessor, of which each block takes 1 KB more
        places = (228 << 10) // (library.shared_bytes(ctypes.c_int64(tiles)) + 1024)
        registers = -(-registers_of(f"sparse24_skinny<Bf16Element, {tiles}, 1>") // 8) * 8
        assert min(places, 65536 // (256 * registers)) == times.BLOCKS
    places = times.BLOCKS * times.MULTIPROCESSORS
    assert times.bytes_in_flight(16 * places) == (times.BLOCKS * times.bytes_of_block(1),) * 2
    last, before = times.bytes_in_flight(16 * (places + 1))
    assert last * times.MULTIPROCESSORS == pytest.approx(times.bytes_of_block(1)) and before > last


def registers_of(kernel: str) -> int:
    """The registers of a thread on an H100 or H200."""
    with (ROOT / "csrc/ops/cuda/resources.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if (row["kernel"], row["arch"]) == (kernel, "sm_90"))
    return int(row["registers"])


@pytest.mark.slow
def test_rows(tmp_path, monkeypatch, capsys) -> None:
    """Each figure with an aim has a verdict; the earlier kernel's rate misses what the counted one meets."""
    monkeypatch.setattr(sys, "argv", ["inference.py", "--csv", str(tmp_path)])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "inference.py"), run_name="__main__")
    printed = capsys.readouterr().out
    with (tmp_path / "inference.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["gpu"] for row in rows} == {"H100", "H200"}
    assert all(bool(row["wanted"]) == bool(row["verdict"]) for row in rows)
    assert all(row["figure"] in printed for row in rows)
    decode = [row for row in rows if row["figure"].startswith("decode")]
    assert decode and all(float(row["low"]) < 1 < float(row["counted"]) < 16 / 9 for row in decode)
    assert {row["verdict"] for row in decode} <= {"met, MISSED at low", "MISSED"}
    assert len((tmp_path / "inference_layer.csv").read_text().splitlines()) == 11
