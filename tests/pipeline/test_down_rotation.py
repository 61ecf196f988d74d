"""R3, the rotation of down_proj's input in blocks, in the whole life of a model."""

import json

import pytest
import torch
from runs import TOKENS, assert_patterns, prune, recipe
from small_models import random_tokens, relative_error, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.convert import convert
from drot.config import FinetuneConfig, Recipe, resolve
from drot.core.errors import UserError
from drot.evaluation.variants import SHAPES, shape_config
from drot.model.block_rotation import BlockRotation
from drot.model.boundary import down_rotations
from drot.model.decoder import DecoderModel

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FULL, LIGHT = recipe(), recipe("shared", down_rotation=16)
POINTS = {"full": FULL, "light": LIGHT, "residual": recipe(boundary="residual", hessians="dense")}
NOTHING = dict(sparsity=0.0, method="wanda", objective="entropy", steps=20)


def blocks_of(model) -> list[torch.Tensor]:
    return [layer.mlp.down_rotation.weight for layer in model.model.layers]


@pytest.mark.parametrize(
    ("family", "point"),
    [*(("llama-biased", point) for point in POINTS), ("granite", "full"), ("phi3", "residual")],
)
def test_without_sparsity_the_outputs_do_not_change(family, point):
    """The logits, and the text that is generated with a KV cache and padding; R3 is not the identity.

    Biases, multipliers and fused modules; tests/model/test_rotation.py has every family.
    """
    model, tokens = small_model(family), random_tokens(2, 30, seed=5)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    logits, text = model(tokens).logits, model.generate(tokens, **options)
    result = prune(model, POINTS[point].replace(**NOTHING))
    assert relative_error(result.model(tokens).logits, logits) < 1e-5
    assert torch.equal(result.model.generate(tokens, **options), text)
    for r3 in blocks_of(result.model):
        assert r3.shape == (3, 16, 16) and float((r3 - torch.eye(16)).abs().max()) > 0.1
    assert not result.manifest.stock_architecture


def test_the_three_points():
    """stock has no module of drot, light has R3 alone, full has boundaries too."""
    stock, light, full = (prune(chosen=chosen) for chosen in (recipe("shared"), LIGHT, FULL))
    assert [result.manifest.stock_architecture for result in (stock, light, full)] == [True, False, False]
    kinds = [{type(module).__name__ for module in result.model.modules()} for result in (stock, light, full)]
    assert ["BlockRotation" in names for names in kinds] == [False, True, True]
    held = ["residual_rotation" in " ".join(result.model.state_dict()) for result in (stock, light, full)]
    assert held == [False, False, True]
    assert type(stock.model.model.layers[0]) is type(small_model("llama").model.layers[0])


@pytest.mark.parametrize(
    ("fields", "width", "size"),
    [
        (dict(), 14336, 64),
        (dict(), 704, 64),
        (dict(), 28672, 64),
        (dict(), None, 64),
        (dict(), 1000, 50),
        (dict(), 2 * 509, "none"),
        (dict(), 0, "none"),
        (dict(mode="shared"), 704, "none"),
        (dict(mode="shared", down_rotation=32), 704, 32),
        (dict(mode="none", down_rotation=32), 704, "none"),
        (dict(optimizer="paper"), 704, "none"),
        (dict(reference_compat=True), 704, "none"),
        (dict(optimizer="paper", down_rotation=88), 704, 88),
        (dict(down_rotation="none"), 704, "none"),
    ],
)
def test_auto_takes_a_divisor(fields, width, size):
    rotation = resolve(Recipe().replace(**fields), down_width=width).rotation
    assert rotation.down_rotation == size
    assert rotation.down_block == (None if size == "none" else size)


@pytest.mark.parametrize("name", SHAPES)
def test_the_default_takes_little_of_a_packed_layer(name):
    """In bf16: a weight of a packed linear takes 9/16 of 2 bytes."""
    with torch.device("meta"):
        model = DecoderModel(AutoModelForCausalLM.from_config(shape_config(name)))
    layer, width = model.layers[0], model.widths["mlp"]
    size = resolve(Recipe(), down_width=width).rotation.down_block
    packed = sum(linear.weight.numel() for linear in layer.linears.values()) * 2 * 9 / 16
    assert size == 64 and 2 * width * size <= 0.012 * packed


@pytest.mark.parametrize("value", [1, 0, -4, 1.5, True, "big", "16.0", None])
def test_a_value_that_is_no_size_is_refused(value):
    with pytest.raises(UserError, match="`down_rotation` must be auto, none, or the size of a block"):
        Recipe().replace(down_rotation=value)


def test_a_size_that_does_not_divide_is_refused_before_the_weights_are_read(tmp_path):
    small_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="must divide the intermediate size 48; got 10: use 8 or 12"):
        prune(tmp_path, recipe(down_rotation=10))


def test_down_is_pruned_in_the_basis_of_r3(tmp_path):
    """Its Hessian is that of a R3: its importance falls where that of a run without R3 does not."""
    with_r3, without = (prune(chosen=recipe(steps=60, down_rotation=down)).manifest for down in (16, "none"))
    for rotated, plain in zip(with_r3.layers, without.layers, strict=True):
        before, after = (
            rotated.linears["down_proj"].one_shot.__dict__[basis] for basis in ("before", "after")
        )
        assert after.removed_importance < 0.8 * before.removed_importance
        assert after.removed_importance < plain.linears["down_proj"].one_shot.after.removed_importance
        assert after.output_error < before.output_error


def test_the_hessian_of_down_is_that_of_its_rotated_input():
    result = prune(chosen=LIGHT.replace(**NOTHING))
    model = DecoderModel(result.model)
    stream = CalibrationStream.embed(model, TOKENS, CPU)
    layer, seen = model.layers[0], {}
    layer.module.mlp.gate_proj.register_forward_hook(lambda _, args, output: seen.update(gate=output))
    layer.module.mlp.up_proj.register_forward_hook(lambda _, args, output: seen.update(up=output))
    found = stream.hessians(layer, [layer.groups[-1]])["down"]
    stream.advance(layer)
    r3 = torch.block_diag(*blocks_of(result.model)[0].double())
    x = (torch.nn.functional.silu(seen["gate"]) * seen["up"]).flatten(0, 1).double() @ r3
    torch.testing.assert_close(found.double(), 2 / len(TOKENS) * x.T @ x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "format"),
    [(FULL, "packed"), (LIGHT, "dense"), (POINTS["residual"], "packed")],
    ids=["full", "light", "residual"],
)
def test_a_saved_model_opens_as_it_was(chosen, format, tmp_path):
    """By transformers and by drot, saved again, converted to the other format, and compiled to one graph."""
    tokens, out = random_tokens(2, 30, seed=5), tmp_path / "out"
    source = save_small_model(small_model("llama", head_dim=16), tmp_path / "model")
    result = prune(source, chosen, out=out, format=format)
    assert_patterns(result.model, chosen.pruning) if format == "dense" else None
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["down_rotation"] == 16 and config["model_type"] == "drot"
    logits = result.model(tokens).logits
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not [name for name, p in loaded.named_parameters() if p.requires_grad and "rotation" in name]
    assert torch.equal(loaded(tokens).logits, logits)
    ours = drot.load(out, device="cpu")
    torch.testing.assert_close(ours(tokens).logits, logits)
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    for model in (loaded, ours):
        texts = [model.generate(tokens, **options, cache_implementation=name) for name in (None, "static")]
        assert torch.equal(*texts)
    other = "packed" if format == "dense" else "dense"
    convert(out, tmp_path / "other", other)
    converted = drot.load(tmp_path / "other", device="cpu")
    torch.testing.assert_close(converted(tokens).logits, logits)
    assert all(torch.equal(a, b) for a, b in zip(blocks_of(converted), blocks_of(loaded), strict=True))


def test_rotations_of_a_file_bring_their_r3(tmp_path):
    """`auto` takes what the file holds; another value is refused in one line."""
    with_r3, without = tmp_path / "with.safetensors", tmp_path / "without.safetensors"
    trained = prune(chosen=FULL, save_rotations_to=with_r3)
    prune(chosen=FULL.replace(down_rotation="none"), save_rotations_to=without)
    used = prune(chosen=FULL.replace(down_rotation="auto", sparsity="4:8"), rotations=with_r3)
    for a, b in zip(blocks_of(used.model), blocks_of(trained.model), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    plain = prune(chosen=FULL.replace(down_rotation="auto"), rotations=without)
    assert plain.manifest.recipe.rotation.down_rotation == "none"
    assert not any(down_rotations(layer) for layer in plain.model.model.layers)
    for file, value, held in ((with_r3, 8, 16), (with_r3, "none", 16), (without, 16, "none")):
        with pytest.raises(UserError, match=f"`down_rotation` must be {held}, as in .* got {value}: leave"):
            prune(chosen=FULL.replace(down_rotation=value), rotations=file)


def test_a_dense_down_proj_has_the_identity(tmp_path):
    """Every layer holds an R3, unless no down_proj is pruned."""
    for chosen in (FULL, LIGHT, POINTS["residual"]):
        kept = ("layers.1.mlp.down_proj", "layers.2.mlp.down_proj")
        first, second, third = blocks_of(prune(chosen=chosen.replace(keep=kept)).model)
        eye = torch.eye(16).repeat(3, 1, 1)
        assert torch.equal(second, eye) and torch.equal(third, eye) and not torch.allclose(first, eye)
    result = prune(chosen=FULL.replace(keep=("down_proj",), down_rotation="auto"))
    assert not [module for module in result.model.modules() if isinstance(module, BlockRotation)]


def test_fine_tuning_leaves_r3_as_it_is(tmp_path):
    finetuning = pytest.importorskip("drot.finetuning.finetune")
    source = save_small_model(small_model("llama", vocab_size=96), tmp_path / "model")
    result = prune(source, LIGHT, out=tmp_path / "out")
    before = [r3.clone() for r3 in blocks_of(result.model)]
    tokens = random_tokens(12, 16, seed=3)
    config = FinetuneConfig(full=True, held_out=2, lr=0.01)
    tuned = finetuning.finetune(tmp_path / "out", config, out=tmp_path / "tuned", tokens=tokens, device="cpu")
    assert_patterns(tuned.model, LIGHT.pruning)
    for found, expected in zip(blocks_of(drot.load(tmp_path / "tuned", device="cpu")), before, strict=True):
        assert torch.equal(found, expected)
    assert not torch.equal(
        tuned.model.model.layers[0].mlp.down_proj.weight, result.model.model.layers[0].mlp.down_proj.weight
    )
