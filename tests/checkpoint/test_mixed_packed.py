"""Packed checkpoints in which some linears are dense: writing, opening, fusing and converting them."""

import json
import shutil

import pytest
import torch
from runs import saved_tensors
from small_models import random_tokens, small_model
from torch import nn
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.quantization_config import DrotConfig
from drot.cli import app as cli
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core.errors import UserError
from drot.evaluation.speed import measure_speed
from drot.evaluation.variants import DENSE, ROTATED, SPARSE, model_variants
from drot.model.families import linears_of
from drot.sparse.fused import DeferredLinear, FusedLinear, FusedPart, fuse
from drot.sparse.linear import SparseLinear, is_packed, packed_linears

pytestmark = pytest.mark.slow

TOKENS = random_tokens(4, 40)
#: leaves dense: all of layer 0, k_proj of layer 1, down_proj of layer 2 (4:8)
MIXED = dict(keep=("layers.0.*", "layers.1.self_attn.k_proj"), sparsity_of={"layers.2.mlp.down_proj": "4:8"})
LAYER_0 = [name for name, *_ in linears_of(small_model("llama").config) if name.startswith("layers.0.")]
DENSE_LINEARS = [*LAYER_0, "layers.1.self_attn.k_proj", "layers.2.mlp.down_proj"]


def prune(family, out, format="packed", rotation=(("mode", "none"),), dtype=torch.bfloat16, **pruning):
    recipe = Recipe(
        rotation=RotationConfig(**dict(rotation)),
        pruning=PruningConfig(method="wanda", **(pruning or MIXED)),
        calibration=CalibrationConfig(seqlen=40),
    )
    model = small_model(family, dtype=dtype)
    return drot.prune(model, recipe, calibration=TOKENS, device="cpu", out=out, format=format)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A dense and a packed checkpoint of the same mixed model. Tests must not change them."""
    folder = tmp_path_factory.mktemp("mixed")
    for format in ("dense", "packed"):
        prune("llama-biased", folder / format, format)
    return folder


@pytest.fixture
def packed(checkpoints, tmp_path):
    """A packed checkpoint that a test may damage."""
    return shutil.copytree(checkpoints / "packed", tmp_path / "packed")


def test_only_the_2to4_linears_are_packed(checkpoints):
    config = json.loads((checkpoints / "packed" / "config.json").read_text())["quantization_config"]
    assert config == {"quant_method": "drot", "packed": True, "dense_linears": DENSE_LINEARS}
    dense, packed = (saved_tensors(checkpoints / format) for format in ("dense", "packed"))
    for name in DENSE_LINEARS:
        assert torch.equal(packed[f"model.{name}.weight"], dense[f"model.{name}.weight"])
    assert sum(name.endswith(".positions") for name in packed) == 21 - len(DENSE_LINEARS)
    assert {name for name in packed if "_proj.weight" in name} == {f"model.{n}.weight" for n in DENSE_LINEARS}
    assert read_manifest(checkpoints / "packed").format == "packed"


def test_opens_fuses_and_saves_again(checkpoints, tmp_path):
    loaded, info = AutoModelForCausalLM.from_pretrained(checkpoints / "packed", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    dense = drot.load(checkpoints / "dense", device="cpu")
    fused = drot.load(checkpoints / "packed", device="cpu")
    for model in (loaded, fused):
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, atol=0.1, rtol=0.02)
    layers = fused.model.layers
    assert type(layers[0].self_attn.q_proj) is type(layers[0].mlp.down_proj) is nn.Linear
    # k_proj of layer 1 is dense, so its q, k and v stay apart, and its gate and up become one
    assert type(layers[1].self_attn.q_proj) is type(layers[1].self_attn.v_proj) is SparseLinear
    assert type(layers[1].self_attn.k_proj) is nn.Linear
    assert isinstance(layers[1].mlp.gate_proj, FusedLinear) and isinstance(layers[1].mlp.up_proj, FusedPart)
    assert isinstance(layers[2].self_attn.q_proj, FusedLinear)
    expected = saved_tensors(checkpoints / "packed")
    for name, model in (("loaded", loaded), ("fused", fused)):
        model.save_pretrained(tmp_path / name)
        again = saved_tensors(tmp_path / name)
        assert again.keys() == expected.keys() and all(
            torch.equal(again[key], expected[key]) for key in again
        )
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert config["dense_linears"] == DENSE_LINEARS
    generated = [
        model.generate(TOKENS[:, :8], max_new_tokens=5, do_sample=False, pad_token_id=0)
        for model in (loaded, fused)
    ]
    assert torch.equal(*generated)
    compiled = torch.compile(fused, fullgraph=True, backend="eager")
    assert torch.equal(compiled(TOKENS).logits, fused(TOKENS).logits)
    logits = loaded(TOKENS).logits
    plain = loaded.dequantize()
    assert not is_packed(plain) and not hasattr(plain.config, "quantization_config")
    torch.testing.assert_close(plain(TOKENS).logits, logits, atol=0.1, rtol=0.02)


def test_a_packed_model_without_dense_linears_has_no_such_key(tmp_path):
    prune("llama", tmp_path / "packed", sparsity="2:4")
    drot.load(tmp_path / "packed", device="cpu").save_pretrained(tmp_path / "again")
    for name in ("packed", "again"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "dense_linears" not in config["quantization_config"]


@pytest.mark.parametrize(("family", "boundary"), [("llama-biased", "input"), ("granite-biased", "residual")])
def test_with_rotations(family, boundary, tmp_path):
    """A down_proj that is packed is fused with the rotation beside it, a dense down_proj is not."""
    rotation = dict(steps=2, hessians="dense", boundary=boundary)
    settings = dict(rotation=rotation, dtype=torch.float32)
    dense = prune(family, tmp_path / "dense", "dense", **settings).model
    prune(family, tmp_path / "packed", **settings)
    packed = drot.load(tmp_path / "packed", device="cpu")
    torch.testing.assert_close(packed(TOKENS).logits, dense(TOKENS).logits, atol=1e-4, rtol=1e-4)
    downs = [type(layer.mlp.down_proj) for layer in packed.model.layers]
    assert downs == [nn.Linear, DeferredLinear if boundary == "residual" else SparseLinear, nn.Linear]
    variants = model_variants(packed)
    assert set(variants) == {DENSE, SPARSE, ROTATED}
    assert torch.equal(variants[ROTATED](TOKENS).logits, packed(TOKENS).logits)
    variants[SPARSE](TOKENS), variants[DENSE](TOKENS)
    assert not is_packed(variants[DENSE])


def test_convert_there_and_back(checkpoints, tmp_path, capsys):
    for source, format in (("packed", "dense"), ("dense", "packed")):
        out = tmp_path / format
        assert cli.run(["convert", str(checkpoints / source), "--out", str(out), "--format", format]) == 0
        got, expected = saved_tensors(out), saved_tensors(checkpoints / format)
        assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)
        configs = [
            json.loads((folder / format / "config.json").read_text()) for folder in (tmp_path, checkpoints)
        ]
        assert configs[0].get("quantization_config") == configs[1].get("quantization_config")
        manifest = read_manifest(out)
        own = {"files", "digest", "format", "stock_architecture"}
        original = read_manifest(checkpoints / source)
        assert manifest.model_dump(exclude=own) == original.model_dump(exclude=own)
        assert (manifest.format, manifest.stock_architecture) == (format, format == "dense")
    capsys.readouterr()
    assert cli.run(["info", str(tmp_path / "packed")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "wanda 2:4, layers.2.mlp.down_proj=4:8, layers.0.* dense, layers.1.self_attn.k_proj dense" in shown
    assert "a model that needs drot (packed 2:4 weights)" in shown


def test_convert_refuses_what_is_not_2to4(checkpoints, tmp_path):
    """Without a manifest, as for a model of another tool, every linear must be 2:4."""
    other = shutil.copytree(checkpoints / "dense", tmp_path / "other")
    (other / "drot.json").unlink()
    with pytest.raises(UserError, match="layer 0, q_proj: the weight must hold at most 2 non-zeros"):
        convert(other, tmp_path / "out", "packed")
    prune("llama", tmp_path / "none", "dense", sparsity="2:4", sparsity_of={"*": "4:8"})
    with pytest.raises(UserError, match='`format="packed"` needs a linear with the sparsity 2:4'):
        convert(tmp_path / "none", tmp_path / "out", "packed")
    assert not (tmp_path / "out").exists()


def test_prune_refuses_packed_without_a_2to4_linear(tmp_path):
    small_model("llama").config.save_pretrained(tmp_path / "config-only")
    for pruning, message in (
        (dict(sparsity_of={"*": "4:8"}), "needs a linear with the sparsity 2:4"),
        (dict(keep=("*",)), "needs a linear with the sparsity 2:4; .* none of the 21 linears"),
        (dict(sparsity="4:8", sparsity_of={"o_proj": "0.5"}), 'needs `sparsity="2:4"`; got 4:8, 0.5'),
    ):
        recipe = Recipe(pruning=PruningConfig(**pruning))
        with pytest.raises(UserError, match=message):
            drot.prune(tmp_path / "config-only", recipe, calibration=TOKENS, format="packed")


def test_packed_needs_only_the_2to4_linears_to_fit(tmp_path):
    """down_proj has 44 inputs, no multiple of 8: it may stay dense."""
    model = small_model("llama", intermediate_size=44)
    recipe = Recipe(rotation=RotationConfig(mode="none"), pruning=PruningConfig(keep=("down_proj",)))
    result = drot.prune(
        model, recipe, calibration=TOKENS, device="cpu", format="packed", out=tmp_path / "out"
    )
    fuse(result.model)  # as from_pretrained does
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS).logits, result.model(TOKENS).logits
    )


def test_bench_of_a_mixed_checkpoint(checkpoints):
    """A dense checkpoint is packed as its manifest says."""
    for format in ("dense", "packed"):
        figures = measure_speed(checkpoints / format, tokens=[4], repeats=1, device="cpu")
        assert figures["variants"]["model"] == [DENSE, SPARSE]
        sizes = {row["variant"]: row["weight_bytes"] for row in figures["rows"] if row["what"] == "model"}
        loaded = drot.load(checkpoints / "packed", device="cpu")
        assert sizes[SPARSE] == sum(parameter.nbytes for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "layers.0.mlp.up_proj",
            "dense_linears: Input should be a valid list, got 'layers.0.mlp.up_proj'",
        ),
        ([3], "dense_linears.0: Input should be a valid string, got 3"),
        (
            ["layers.9.mlp.up_proj"],
            "dense_linears has 'layers.9.mlp.up_proj', which is no linear of this model",
        ),
        (DENSE_LINEARS[:-1], "model.layers.2.mlp.down_proj.values is missing from the checkpoint"),
        ([*DENSE_LINEARS, "layers.1.mlp.up_proj"], "model.layers.1.mlp.up_proj.weight is missing"),
    ],
)
def test_a_faulty_list_of_dense_linears(packed, value, message):
    file = packed / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["dense_linears"] = value
    file.write_text(json.dumps(config))
    for opening in (AutoModelForCausalLM.from_pretrained, drot.load):
        with pytest.raises(UserError, match=message) as caught:
            opening(packed)
        assert "\n" not in str(caught.value)


def test_dense_linears_need_packed():
    with pytest.raises(UserError, match="dense_linears needs packed: true"):
        DrotConfig(dense_linears=["layers.0.mlp.up_proj"])
    assert len(list(packed_linears(small_model("llama")))) == 0
