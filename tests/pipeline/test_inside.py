"""R1 inside of the layers, of families with a norm behind attention and MLP, whose stream cannot rotate."""

import copy
import pickle

import pytest
import torch
from runs import (
    TOKENS,
    assert_opens,
    assert_patterns,
    assert_same_weights,
    interrupted,
    one_shot,
    prune,
    recipe,
    saved_tensors,
)
from small_models import INSIDE, random_tokens, relative_error, save_small_model, small_model

import drot
from drot.checkpoint.disk_space import weight_file_bytes
from drot.checkpoint.rotations import open_rotations
from drot.config import Sparsity, resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.boundary import RotatedLayer, remove_boundary_rotation, remove_down_rotation, rotation_place
from drot.model.decoder import DecoderModel
from drot.pipeline import training
from drot.pipeline.context import RunContext
from drot.pipeline.disk import disk_needs
from drot.pipeline.sizes import sizes_of
from drot.rotation.importance import layer_metrics
from drot.rotation.objective import LayerObjective

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
NOTHING = dict(sparsity=0.0, method="wanda", objective="entropy", steps=20)


@pytest.mark.parametrize(
    ("family", "hessians"), [*((family, "sequential") for family in INSIDE), ("gemma2-biased", "dense")]
)
def test_without_sparsity_the_outputs_do_not_change(family, hessians):
    """R1 is far from the identity. Embedding, lm_head and every norm are those of the dense model."""
    model, tokens = small_model(family), random_tokens(2, 30, seed=5)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    before, logits, text = copy.deepcopy(model), model(tokens).logits, model.generate(tokens, **options)
    result = prune(model, recipe(**NOTHING, hessians=hessians))
    assert relative_error(result.model(tokens).logits, logits) < 1e-5
    assert torch.equal(result.model.generate(tokens, **options), text)
    manifest = result.manifest
    assert manifest.recipe.rotation.boundary == "inside" and manifest.relative_logit_error < 1e-5
    assert not manifest.stock_architecture and not manifest.untied_lm_head
    tied = before.lm_head.weight is before.model.embed_tokens.weight
    assert (result.model.lm_head.weight is result.model.model.embed_tokens.weight) is tied
    held = {name.replace("rotated_", ""): tensor for name, tensor in result.model.state_dict().items()}
    for name, tensor in before.state_dict().items():
        if name.endswith("norm.weight") or not name.startswith("model.layers."):
            assert torch.equal(held[name], tensor), name
    for layer in result.model.model.layers:
        assert rotation_place(layer) == "inside"
        assert relative_error(layer.residual_rotation.weight, torch.eye(32)) > 0.3


@pytest.mark.parametrize("family", ["glm4", "olmo2", "gemma2"])
def test_the_matrices_act_where_the_declaration_says(family, tmp_path):
    """W R1 for what attention and MLP read, o_proj with R2 alone, down_proj with R3 alone."""
    model, file = small_model(family), tmp_path / "rotations.safetensors"
    original = DecoderModel(copy.deepcopy(model))
    dense = original.layers[1]
    rotated = DecoderModel(prune(model, recipe(**NOTHING), save_rotations_to=file).model).layers[1]
    found, _ = open_rotations(file, original)
    rotation = found[1]
    values = torch.block_diag(*rotation.r2)
    queries = torch.block_diag(*rotation.r2.repeat_interleave(dense.heads.group, 0))
    right = {"o_proj": queries, "down_proj": torch.block_diag(*rotation.r3)}
    for name, linear in dense.linears.items():
        expected = linear.weight.double() @ right.get(name, rotation.r1)
        if name == "v_proj":
            expected = values.T @ expected
        torch.testing.assert_close(rotated.linears[name].weight.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["olmo2-biased", "gemma2"])
def test_stock_has_no_module_of_drot(family, tmp_path):
    """R2 alone; light has R3 too. A run that is cut off and resumed has the same weights."""
    model, tokens = small_model(family), random_tokens(2, 30)
    kinds, logits = {type(each) for each in model.model.modules()}, model(tokens).logits
    stock = prune(small_model(family), recipe("shared", **NOTHING))
    assert stock.manifest.stock_architecture
    assert {type(each) for each in stock.model.model.modules()} == kinds
    assert relative_error(stock.model(tokens).logits, logits) < 1e-5
    before, after = (DecoderModel(each).layers[0].linears for each in (model, stock.model))
    changed = {name for name in before if not torch.allclose(before[name].weight, after[name].weight)}
    assert changed == {"v_proj", "o_proj"}
    light = recipe("shared", down_rotation=16, steps=3)
    interrupted(small_model(family), light, out=tmp_path / "out")
    resumed = prune(small_model(family), light, out=tmp_path / "out", resume=True)
    assert_same_weights(resumed.model, prune(small_model(family), light).model)
    held = resumed.model.state_dict()
    assert any("down_rotation" in name for name in held) and not any("residual" in name for name in held)
    assert resumed.manifest.shared_rotation.loss_after < resumed.manifest.shared_rotation.loss_before


@pytest.mark.parametrize(
    ("family", "save_dtype"), [("glm4", "auto"), ("olmo2-biased", "bfloat16"), ("gemma2", "bfloat16")]
)
def test_a_checkpoint_is_the_model_in_memory(family, save_dtype, tmp_path):
    result = prune(small_model(family), one_shot(), out=tmp_path / "out", save_dtype=save_dtype)
    assert_patterns(result.model, one_shot().pruning)
    assert_opens(tmp_path / "out", result.model, tmp_path / "again")


def test_copies_pickles_and_removal():
    model, tokens = prune(small_model("gemma2"), one_shot()).model, random_tokens(2, 12)
    expected = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens).logits, expected)
        assert type(other.model.layers[0]).__name__ == "Gemma2DecoderLayer"
        names = other.state_dict().keys()
        assert "model.layers.0.rotated_input_layernorm.weight" in names
        assert "model.layers.0.input_layernorm.weight" not in names  # a stock model lacks a tensor
    for layer in model.model.layers:
        remove_down_rotation(layer)
        remove_boundary_rotation(layer)
        assert not isinstance(layer, RotatedLayer)
    assert model.state_dict().keys() == small_model("gemma2").state_dict().keys()


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "olmo2",
            dict(boundary="residual", hessians="dense"),
            "must be auto or inside .* 'olmo2', .* cannot rotate",
        ),
        ("olmo2", dict(boundary="input"), "must be auto or inside"),
        ("llama", dict(boundary="inside"), "must be auto or input or residual .* 'llama', .* rotates; got"),
        ("olmo2", dict(mode="shared", boundary="inside", down_rotation="none"), "must be auto or input"),
    ],
)
def test_a_boundary_that_the_family_cannot_have_is_refused(family, fields, message, tmp_path):
    small_model(family).config.save_pretrained(tmp_path / "config-only")
    with pytest.raises(UserError, match=message) as caught:
        prune(tmp_path / "config-only", recipe().replace(**fields))
    assert "\n" not in str(caught.value)


def test_without_r1_the_objective_holds_what_r2_and_r3_act_on():
    model = small_model("gemma2")
    chosen = resolve(recipe("shared", down_rotation=16), down_width=48, rotates_stream=False)
    run = RunContext(model, chosen, TOKENS, CPU, silent)
    for _, objective, _ in training._objectives(run, None):
        rotated = {linear.name for stack in objective._stacks for linear in stack.linears}
        assert rotated == {"v_proj", "o_proj"} and len(objective.left_rotated) == 1
    (rotation, *_), _ = training.train_shared(run, None)
    assert torch.equal(rotation.r1, torch.eye(32, dtype=torch.float64))
    assert relative_error(rotation.r2, torch.eye(12).expand(2, 12, 12)) > 0.1


@pytest.mark.parametrize("kind", ["entropy", "pruned"])
def test_the_gradient_is_that_of_the_loss(kind):
    """Of R1, R2 and R3, against differences of the loss in fp64."""
    layer, generator = DecoderModel(small_model("olmo2")).layers[0], torch.Generator().manual_seed(0)
    hessians = {}
    for group in layer.groups:
        x = torch.randn(200, layer.shape_of(group.linears[0])[1], generator=generator, dtype=torch.float64)
        hessians[group.name] = x.T @ x
    metrics, _ = layer_metrics("wanda", hessians, layer.groups, layer.heads, damping=0.1, down_block=16)
    weights = layer.folded_weights(torch.float64)
    objective = LayerObjective(
        weights,
        metrics,
        layer.groups,
        layer.heads,
        objective=kind,
        sparsity=Sparsity.parse("2:4"),
        product_dtype=torch.float64,
        down_block=16,
    )
    at = [
        torch.linalg.qr(torch.randn(matrix.shape, generator=generator, dtype=torch.float64))[0]
        for matrix in objective.identity()
    ]
    _, *gradients = objective.value_and_grad(*at)
    for index, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        values = [
            float(objective.value(*(m + step * direction if i == index else m for i, m in enumerate(at))))
            for step in (1e-6, -1e-6)
        ]
        slope = float((gradient * direction).sum())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-4)


def test_the_estimate_of_the_disk(tmp_path):
    for mode in ("layer", "shared"):
        out = tmp_path / mode
        result = prune(small_model("gemma2"), one_shot(mode), out=out)
        estimated, _ = disk_needs(
            sizes_of(DecoderModel(small_model("gemma2")), *TOKENS.shape),
            result.manifest.recipe,
            torch.float32,
        )
        assert 0 <= weight_file_bytes(out) - estimated < 8000  # the headers


def test_an_artifact_makes_the_checkpoint_again(tmp_path):
    dense = save_small_model(small_model("gemma2", head_dim=8), tmp_path / "dense")
    out, artifact = tmp_path / "out", tmp_path / "file.drot"
    prune(dense, one_shot(), out=out)
    drot.export_artifact(out, artifact, model=dense)
    drot.apply_artifact(artifact, tmp_path / "applied", model=dense)
    assert_same_weights(saved_tensors(tmp_path / "applied"), saved_tensors(out))


def test_recovery_trains_the_norms_behind_the_blocks():
    chosen = recipe(recover="block", recover_epochs=2, recover_lr=1e-2, token_weights="equal")
    dense, result = small_model("olmo2"), prune(small_model("olmo2"), chosen)
    assert result.manifest.layers[0].recovery.error_after < result.manifest.layers[0].recovery.error_before
    name = "post_attention_layernorm"
    after = getattr(result.model.model.layers[0], name).weight
    assert not torch.equal(after, getattr(dense.model.layers[0], name).weight)
    assert_patterns(result.model, chosen.pruning)
