"""`drot bench`: its variants, its rows and its error messages, but no speed."""

import json
import shutil
import time

import pytest
import torch
from small_models import random_tokens, small_model

import drot
from drot.checkpoint.quantization_config import DrotConfig
from drot.cli import app as cli
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.evaluation import speed, timing, variants
from drot.evaluation.cases import Case
from drot.evaluation.timing import Replay, Timing, interleaved, replayed
from drot.evaluation.variants import DENSE, ROTATED, SPARSE, layer_variants, model_variants
from drot.model.boundary import down_rotations, rotation_place
from drot.model.decoder import DecoderModel
from drot.ops import nm_mask
from drot.reporting.demo import MODEL
from drot.sparse.fused import DeferredLinear
from drot.sparse.linear import is_packed

pytestmark = pytest.mark.slow

TINY = dict(
    model_type="qwen2", hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=3, vocab_size=96, tie_word_embeddings=False,
)  # fmt: skip
CPU = torch.device("cpu")
VERDICTS = (
    *("slower than dense", "faster than dense", "as fast as dense", "too noisy to tell", "too few repeats"),
)


@pytest.fixture
def checkpoint(tmp_path, request):
    mode, down, format = getattr(request, "param", ("layer", 16, "packed"))
    recipe = Recipe(
        rotation=RotationConfig(mode=mode, down_rotation=down, steps=1),
        pruning=PruningConfig(method="magnitude"),
        calibration=CalibrationConfig(seqlen=16),
    )
    tokens = random_tokens(2, 16)
    result = drot.prune(small_model("llama"), recipe, calibration=tokens, device="cpu", format=format)
    result.model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "checkpoint",
    [
        ("layer", "auto", "packed"),
        ("shared", 16, "packed"),
        ("none", "none", "dense"),
    ],
    indirect=True,
)
def test_rows_of_a_checkpoint(checkpoint, capsys):
    options = ["--tokens", "8,16", "--batch", "3", "--repeats", "2", "--device", "cpu", "--json"]
    assert cli.run(["bench", str(checkpoint), *options]) == 0
    data = json.loads(capsys.readouterr().out)
    rotated = "quantization_config" in json.loads((checkpoint / "config.json").read_text())
    held = rotated and drot.load(checkpoint).config.quantization_config
    rotated = rotated and (held.boundary or held.down_rotation)
    timed = [DENSE, SPARSE, *([ROTATED] if rotated else [])]
    assert data["variants"] == {"layer": timed, "model": timed}
    seen = [(row["what"], row["phase"], row["size"], row["variant"]) for row in data["rows"]]
    assert seen == [
        (what, phase, size, variant)
        for what in ("layer", "model")
        for phase, sizes in (("prefill", (8, 16)), ("decode", (3,)))
        for size in sizes
        for variant in data["variants"][what]
    ]
    assert data["dtype"] == "float32"
    dense_ms = {}
    for row in data["rows"]:
        case = row["what"], row["phase"], row["size"]
        dense_ms.setdefault(case, row["milliseconds"])
        assert row["p20"] <= row["milliseconds"] <= row["p80"]
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["size"] / row["milliseconds"])
        if row["variant"] == DENSE:
            assert row["speedup"] is None and row["verdict"] is None
        else:
            assert row["speedup"] == pytest.approx(dense_ms[case] / row["milliseconds"])
            assert row["verdict"] in VERDICTS


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_one_sequence_with_a_compiled_step(checkpoint, monkeypatch, capsys):
    """Rows of dense and of the checkpoint, whose calls compile nothing, and no rows in the other cases."""
    steps = []

    def timed(calls, **options):
        with torch._dynamo.config.patch(error_on_recompile=True):
            for name in [name for name in calls if name.endswith(speed.COMPILED)]:
                steps.append(calls[name]().shape)
        return interleaved(calls, **options)

    monkeypatch.setattr(speed, "interleaved", timed)
    options = ["--batch", "1,2", "--repeats", "1", "--device", "cpu", "--compile", "--json"]
    assert cli.run(["bench", str(checkpoint), *options]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    plain, compiled = [DENSE, SPARSE, ROTATED], [f"{name}, compiled" for name in (DENSE, ROTATED)]
    found = [(row["what"], row["size"], row["variant"]) for row in rows]
    assert [row for row in found if row[2] in compiled] == [("model", 1, name) for name in compiled]
    assert [row for row in found if row[2] in plain] == [
        (what, size, name) for what in ("layer", "model") for size in (1, 2) for name in plain
    ]
    assert steps == [(1, 1 + speed.NEW_TOKENS)] * 2
    bytes_of = {row["variant"]: row["weight_bytes"] for row in rows if row["what"] == "model"}
    assert bytes_of[compiled[1]] == bytes_of[ROTATED] < bytes_of[compiled[0]] == bytes_of[DENSE]


def test_a_step_that_cannot_be_compiled_is_refused(checkpoint, monkeypatch, capsys):
    def refuse(model, cuda_graph):
        raise UserError("the decode step cannot be compiled (no compiler): leave `compile` out")

    monkeypatch.setattr(speed, "compile_step", refuse)
    capsys.readouterr()
    assert cli.run(["bench", str(checkpoint), "--batch", "1", "--device", "cpu", "--compile"]) == 2
    assert "cannot be compiled (no compiler): leave --compile out" in capsys.readouterr().err


def test_variants_of_a_checkpoint(checkpoint):
    """ROTATED computes what the checkpoint computes, and DENSE what SPARSE computes."""
    model = drot.load(checkpoint, device="cpu")
    found = model_variants(model)
    tokens = random_tokens(1, 8)
    assert torch.equal(found[ROTATED](tokens).logits, model(tokens).logits)
    torch.testing.assert_close(found[DENSE](tokens).logits, found[SPARSE](tokens).logits)
    assert not torch.equal(found[SPARSE](tokens).logits, model(tokens).logits)
    assert [is_packed(found[name]) for name in (DENSE, SPARSE, ROTATED)] == [False, True, True]
    assert is_packed(model) and model.model.layers[1].residual_rotation is not None
    assert found[DENSE].model.embed_tokens.weight is model.model.embed_tokens.weight


def test_bytes(checkpoint):
    """Against counts by hand, for hidden size 32, intermediate size 48, 4 heads and 2 KV heads of 12."""
    data = speed.measure_speed(checkpoint, tokens=[8], batches=[2], repeats=1, device="cpu")
    weights = 32 * (48 + 24 + 24 + 48 + 3 * 48)
    dense, packed, rotated, norms = 4 * weights, 4 * weights * 17 // 32, 4 * 32 * 32, 4 * 2 * 32
    ends = 4 * 96 * 32  # the embedding; lm_head has as many bytes
    held = {(row["what"], row["variant"]): row["weight_bytes"] for row in data["rows"]}
    assert held["layer", DENSE] == dense + norms
    assert held["layer", SPARSE] == packed + norms
    down = 4 * 48 * 16
    assert held["layer", ROTATED] == packed + norms + rotated + down
    assert held["model", ROTATED] == 3 * (packed + norms + down) + 2 * rotated + 2 * ends + norms // 2


def test_shape(monkeypatch, capsys):
    monkeypatch.setitem(variants.SHAPES, "tiny", TINY)
    assert cli.run(["bench", "--shape", "tiny", "--batch", "1,2", "--repeats", "1", "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    for text in ("tiny, bfloat16", "layer decode 2", "2:4 + rotation", " dense\n"):
        assert text in "".join(line.rstrip() + "\n" for line in captured.out.splitlines()), text
    assert "prefill" not in captured.out and "measuring, case 2 of 2" in captured.err
    assert max(map(len, captured.out.splitlines())) <= 100


def test_few_repetitions_give_no_verdict(monkeypatch, capsys):
    monkeypatch.setitem(variants.SHAPES, "tiny", TINY)
    one = Timing(1.0, 1.0, 1.0), Timing(0.1, 0.1, 0.1)
    assert [speed.verdict(*one, repeats) for repeats in (1, 2)] == ["too few repeats"] * 2
    assert speed.verdict(*one, 3) == "faster than dense"
    assert cli.run(["bench", "--shape", "tiny", "--batch", "1", "--repeats", "1", "--device", "cpu"]) == 0
    assert "too few repeats" in (out := capsys.readouterr().out)
    assert "than dense" not in out and "as fast" not in out


@pytest.mark.parametrize(
    ("family", "keep", "format"),
    [("lfm2", (), "dense"), *(("llama", ("down_proj",), f) for f in ("dense", "packed"))],
)
def test_layers_of_several_kinds_are_timed_as_a_whole(tmp_path, family, keep, format):
    """The first layer of LFM2 is a convolution, and the first of many mixtures has no experts."""
    recipe = Recipe().replace(
        mode="none", method="magnitude", solve="none", target="self", token_weights="equal", keep=keep
    )
    drot.prune(
        small_model(family, head_dim=16) if keep else small_model(family), recipe, device="cpu",
        calibration=random_tokens(2, 16), out=tmp_path / "out", format=format,
    )  # fmt: skip
    data = speed.measure_speed(tmp_path / "out", tokens=[8], batches=[1], repeats=1, device="cpu")
    assert data["variants"] == {"model": [DENSE, SPARSE]}
    assert {row["what"] for row in data["rows"]} == {"model"}


def test_learned_positions_are_the_most_tokens(tmp_path, capsys):
    """OPT has a row of a table for each position, and the default is 128 tokens."""
    model = small_model("opt", max_position_embeddings=40)
    for name, weight in model.named_parameters():
        if name.endswith(("proj.weight", "fc1.weight", "fc2.weight")):
            weight.masked_fill_(nm_mask(weight.abs(), 2, 4), 0)
    model.save_pretrained(tmp_path)
    capsys.readouterr()  # discards the output of saving
    options = [str(tmp_path), "--repeats", "1", "--device", "cpu"]
    assert cli.run(["bench", *options, "--tokens", "8,41"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "--tokens must be at most 40, the positions that this model has learned; got 41: name" in error
    assert cli.run(["bench", *options]) == 0
    shown = capsys.readouterr().out
    assert "layer prefill 40 " in shown and "model prefill 40 " in shown and "model decode 8 " in shown


def test_mistakes(capsys, tmp_path, checkpoint):
    cases = [
        ([], "name either a checkpoint or a --shape; got neither"),
        ([checkpoint, "--shape", "llama-3-8b"], "name either a checkpoint or a --shape"),
        ([checkpoint, "--batch", "1000000"], "--batch must be whole numbers from 1 to 4096; got 1000000"),
        (["--shape", "gpt-2"], "--shape must be one of llama-2-7b, llama-3-8b"),
        ([checkpoint, "--tokens", "0"], "--tokens must be whole numbers from 1 to 131072; got 0"),
        ([checkpoint, "--batch", "1,x"], "--batch must be whole numbers separated by commas; got '1,x'"),
        (["--shape", "llama-3-8b", "--compile"], "--compile needs a whole model; got the --shape llama-3-8b"),
        ([checkpoint, "--batch", "2,4", "--compile"], "in --batch; got 2, 4: add 1"),
        ([checkpoint, "--tokens", "8", "--compile"], "in --batch; got none: add 1"),
        ([checkpoint, "--repeats", "0"], "--repeats must be at least 1; got 0"),
        ([tmp_path / "nothing"], "there is no such folder"),
        ([MODEL], "layer 0, q_proj: the weight must hold at most 2 non-zeros"),
    ]
    capsys.readouterr()  # discards the output of saving the checkpoint
    for arguments, message in cases:
        assert cli.run(["bench", *map(str, arguments), "--device", "cpu"]) == 2
        captured = capsys.readouterr()
        (error,) = captured.err.splitlines()
        assert message in error and captured.out == ""


@pytest.mark.parametrize("name", variants.SHAPES)
def test_shapes_are_models(name):
    """The dimensions of each shape can be packed, and a smaller model of its family gives layer variants."""
    config = variants.shape_config(name)
    heads = config.num_attention_heads * config.head_dim if hasattr(config, "head_dim") else 0
    assert not any(size % 8 for size in (config.hidden_size, config.intermediate_size, heads))
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, 16
    layer = layer_variants(config, dtype=torch.float32, device=torch.device("cpu"))
    assert len(layer[ROTATED].model.layers) == 1


@pytest.mark.parametrize(
    ("p20", "median", "p80", "words"),
    [
        (1.9, 2.0, 2.1, "slower than dense"),
        (1.03, 1.04, 1.05, "slower than dense"),
        (0.98, 1.02, 1.05, "as fast as dense"),
        (0.5, 0.98, 2.0, "as fast as dense"),
        (0.9, 0.95, 0.98, "faster than dense"),
        (0.4, 0.5, 0.99, "too noisy to tell"),
        (1.0, 1.5, 2.0, "too noisy to tell"),
    ],
)
def test_verdict(p20, median, p80, words):
    assert speed.verdict(Timing(0.99, 1.0, 1.01), Timing(p20, median, p80), repeats=3) == words


@pytest.mark.parametrize("down", [None, 16])
@pytest.mark.parametrize("boundary", ["input", "residual", None])
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_rotations_of_a_layer_are_those_of_the_checkpoint(boundary, down, as_dict):
    """A checkpoint without rotations gives those that a packed checkpoint has by default."""
    config, entry = small_model("llama").config, DrotConfig(boundary=boundary, down_rotation=down)
    config.quantization_config = entry.to_dict() | {"quant_method": "drot"} if as_dict else entry
    layer = layer_variants(config, dtype=torch.float32, device=CPU)[ROTATED].model.layers[0]
    if not (boundary or down):
        boundary, down = "residual", 48
    assert rotation_place(layer) == boundary
    assert [part.weight.shape[-1] for part in down_rotations(layer)] == ([] if down is None else [down])
    assert isinstance(layer.mlp.down_proj, DeferredLinear) == (boundary == "residual")


@pytest.mark.parametrize("case", [Case("layer", "decode", 2), Case("layer", "prefill", 5)], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "mixtral", "deepseek_v3"])
@torch.no_grad()
def test_a_layer_is_timed_alone(family, case):
    """Without the last norm and what a pass makes for all layers; its output is that in its model."""
    model = layer_variants(small_model(family).config, dtype=torch.float32, device=CPU)[DENSE]
    torch.manual_seed(1)
    call = speed.call_of(model, case, CPU)
    torch.manual_seed(1)
    shape = (1, case.size) if case.phase == "prefill" else (case.size, 1)
    hidden, inputs = torch.randn(*shape, model.config.hidden_size), []
    decoder = DecoderModel(model)
    for module in (decoder.final_norm, decoder.embedding):
        module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    output = call()
    assert not inputs
    model.base_model(inputs_embeds=hidden, use_cache=False)
    torch.testing.assert_close(inputs[0], output, rtol=1e-4, atol=1e-5)


def test_short_calls_are_captured_in_one_graph(monkeypatch):
    """A replay lasts SHORTEST, and the time of one call is its part of the replay."""
    clock, launches, second = [0.0], [], 2.0**-15
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def function():
        clock[0] += second

    def capture(step):
        return lambda: (launches.append(1), step())[1], torch.empty(0)

    found = replayed(function, CPU, capture)
    assert isinstance(found, Replay)
    assert (found.calls - 1) * second < timing.SHORTEST <= found.calls * second
    launches.clear()
    timings = interleaved({"short": found}, device="cpu", repeats=3, warmup=1)
    assert len(launches) == 4 and timings["short"].median == second


def test_a_long_call_is_one_graph_and_a_cpu_has_none(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def function():
        clock[0] += 1.0

    assert replayed(function, CPU) is function
    found = replayed(function, CPU, lambda step: (step, torch.empty(0)))
    assert found.calls == 1


def test_no_time_is_shorter_than_the_shortest_that_was_measured():
    clock = iter([0.0, 1.0, 0.0, 5.0, 0.0, 6.0])
    measured = dict(device="cpu", repeats=3, warmup=0, clock=lambda: next(clock))
    timing = interleaved({"a": lambda: None}, **measured)["a"]
    assert 1.0 <= timing.p20 <= timing.median == 5.0 <= timing.p80 <= 6.0


def test_interleaved_takes_turns():
    calls = []
    functions = {name: lambda name=name: (calls.append(name), time.sleep(0.001)) for name in "ab"}
    timings = interleaved(functions, device="cpu", repeats=3, warmup=1)
    assert calls == ["a", "b"] * 4
    assert all(0.001 <= t.p20 <= t.median <= t.p80 for t in timings.values())
