"""R3 of a mixture: each expert, and the MLP that reads all tokens, has its own blocks."""

import json

import pytest
import torch
from runs import (
    TOKENS,
    assert_patterns,
    assert_same_weights,
    interrupted,
    one_shot,
    prune,
    saved_tensors,
)
from small_models import (
    MIXTURES,
    random_rotations,
    random_tokens,
    relative_error,
    rotate_model,
    small_model,
)
from transformers import AutoModelForCausalLM

import drot
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.convert import convert
from drot.checkpoint.disk_space import weight_file_bytes
from drot.config import resolve
from drot.core.errors import UserError
from drot.model.boundary import down_rotations, remove_down_rotation
from drot.model.decoder import DecoderModel
from drot.model.experts import ReplacedExperts
from drot.model.families import FAMILIES
from drot.model.layer import DecoderLayer
from drot.pipeline.disk import disk_needs
from drot.pipeline.objective import layer_objective
from drot.pipeline.sizes import sizes_of
from drot.rotation.objective import LayerObjective

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
#: mixtures whose experts have a gate
WITH_R3 = [family for family in MIXTURES if FAMILIES[family.partition("-")[0]].takes("r3")]
OPTIONS = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)


def with_r3(**fields):
    return one_shot(**{"steps": 3, "down_rotation": 8} | fields)


def blocks_of(model) -> list[list[torch.Tensor]]:
    """For each layer the weights of the parts of its R3."""
    return [[part.weight for part in down_rotations(layer)] for layer in model.model.layers]


def downs(layer: DecoderLayer) -> list[tuple[str, int]]:
    """Name and inputs of each down_proj of a layer, in their order."""
    return [(linear.name, linear.weight.shape[1]) for linear in layer.downs]


# ---- the function ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["input", "residual"])
@pytest.mark.parametrize("family", WITH_R3)
def test_random_blocks_change_no_logits(family, place):
    """Nor the text that is generated with a cache; without R3 the logits are others."""
    model, tokens = small_model(family), random_tokens(2, 30, seed=5)
    logits, text = model(tokens).logits, model.generate(tokens, **OPTIONS)
    rotate_model(model, random_rotations(model, down_block=8), place)
    assert relative_error(model(tokens).logits, logits) < 1e-5
    assert torch.equal(model.generate(tokens, **OPTIONS), text)
    for layer, parts in zip(DecoderModel(model).layers, blocks_of(model), strict=True):
        assert sum(map(len, parts)) * 8 == sum(width for _, width in downs(layer)) == layer.down_inputs()
    for layer in model.model.layers:
        remove_down_rotation(layer)
    assert relative_error(model(tokens).logits, logits) > 1e-2


def test_each_linear_takes_its_own_blocks():
    """By definition: W R3 with R3 = blockdiag of the blocks, in the order of the linears."""
    model = small_model("qwen2_moe")
    layer = DecoderModel(model).layers[1]
    before = layer.folded_weights(torch.float64)
    rotation = random_rotations(model, down_block=8)[1]
    layer.rotate(rotation)
    start = 0
    for name, width in downs(layer):
        r3 = torch.block_diag(*rotation.r3[start : start + width // 8])
        expected = rotation.r1.T @ before[name] @ r3
        torch.testing.assert_close(layer.linears[name].weight.double(), expected, rtol=0, atol=1e-6)
        start += width // 8
    assert [width for _, width in downs(layer)] == [24] * 4 + [40] and start == len(rotation.r3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_hessian_of_an_expert_is_that_of_its_rotated_input(family):
    """R3ᵀ H R3, of the very tokens that the router sends to it."""

    def hessians(down_block):
        model = small_model(family)
        rotation = random_rotations(model, down_block=8)
        rotate_model(model, rotation if down_block else random_rotations(model), "input")
        layer = (handle := DecoderModel(model)).layers[0]
        return CalibrationStream.embed(handle, TOKENS, CPU).hessians(layer, layer.groups), rotation[0].r3

    (found, r3), (plain, _) = hessians(8), hessians(None)
    for expert in range(4):
        count = len(plain[f"down.{expert}"]) // 8
        r3_of = torch.block_diag(*r3[expert * count : (expert + 1) * count])
        expected = r3_of.T @ plain[f"down.{expert}"].double() @ r3_of
        torch.testing.assert_close(found[f"down.{expert}"].double(), expected, rtol=1e-3, atol=1e-4)


# ---- the objective -----------------------------------------------------------------------------------


def objective_of(**fields) -> tuple[LayerObjective, dict, dict]:
    """The objective of a layer with shared experts, its folded weights, and the Hessians of its inputs."""
    model = DecoderModel(small_model("qwen2_moe"))
    chosen = with_r3(product_dtype="float32", **fields)
    resolved = resolve(chosen, device="cpu", positions=128)
    stream = CalibrationStream.embed(model, TOKENS, CPU)
    layer = model.layers[0]
    hessians = stream.copy().hessians(layer, layer.groups, folded=True)
    objective, _ = layer_objective(layer, stream, resolved)
    return objective, layer.folded_weights(torch.float64), hessians


@pytest.mark.parametrize("method", ["wanda", "magnitude"])
def test_the_loss_of_each_expert_is_that_by_definition(method):
    """Of the down_proj that are pruned: out · (lost scores at R) / (scores at R = 1), and its gradients.

    The reference is autograd through the definition in fp64, of each linear by itself.
    """
    keep = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "*.experts.2.*")
    objective, weights, hessians = objective_of(method=method, keep=keep)
    generator = torch.Generator().manual_seed(0)
    r1, r2, r3 = (
        torch.linalg.qr(torch.randn(eye.shape, generator=generator, dtype=torch.float64)).Q
        for eye in objective.identity()
    )
    r1.requires_grad_(), r3.requires_grad_()
    pruned = [f"experts.{expert}.down_proj" for expert in (0, 1, 3)] + ["shared_expert.down_proj"]
    total, start = 0, 0
    for name in pruned:
        weight = weights[name]
        expert = name.split(".")[1]
        group = f"down.{expert}" if name.startswith("experts") else "shared_down"
        count = weight.shape[1] // 8
        rotation = torch.block_diag(*r3[start : start + count])
        start += count
        m = torch.eye(weight.shape[1]).double() if method == "magnitude" else hessians[group].double()
        scores = (r1[0].T @ weight @ rotation).square() * (rotation.T @ m @ rotation).diagonal()
        lost = scores.unflatten(1, (-1, 4)).sort(-1).values[..., :2].sum()
        total = total + len(weight) * lost / (weight.square() * m.diagonal()).sum()
    assert start == len(r3)
    total.backward()
    loss, g1, g2, g3 = objective.value_and_grad(*(matrix.detach().float() for matrix in (r1, r2, r3)))
    # a turn of an orthogonal matrix: the part of a gradient that a step sees
    for found, matrix in ((g1, r1), (g3, r3)):
        turn, expected = (matrix.detach().mT @ each.double() for each in (found, matrix.grad))
        expected = expected - expected.mT
        assert float((turn - turn.mT - expected).norm()) < 1e-4 * float(expected.norm())
    assert float(loss) == pytest.approx(float(total.detach()), rel=1e-5) and not g2.any()


@pytest.mark.parametrize(
    "fields", [{}, {"objective": "entropy"}, {"sparsity": "0.5"}, {"reference_compat": True}]
)
def test_the_parts_of_ranks_add_up(fields):
    """Each rank has some of the experts, with their blocks."""
    objective, *_ = objective_of(method="sparsegpt", **fields)
    generator = torch.Generator().manual_seed(0)
    matrices = [
        torch.linalg.qr(torch.randn(eye.shape, generator=generator)).Q for eye in objective.identity()
    ]

    class Ranks:
        size = 3

        def __init__(self, rank):
            self.rank = rank

    whole = objective.value_and_grad(*matrices)
    parts = [objective.share(Ranks(rank)).value_and_grad(*matrices) for rank in range(3)]
    for expected, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(found), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


# ---- the life of a model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt_oss", {"boundary": "residual", "hessians": "dense"}),
        ("mixtral", {"mode": "shared"}),
        ("qwen3_next", {"mode": "shared", "quality": "best", "recover": "block", "recover_epochs": 1}),
        ("deepseek_v3", {"boundary": "input"}),
    ],
    ids=["gpt_oss", "mixtral", "qwen3_next", "deepseek_v3"],
)
def test_a_saved_model_opens_as_it_was(family, fields, tmp_path):
    """Dense, packed and converted both ways, by drot and by transformers, and after a resumed run."""
    chosen, tokens, dense = with_r3(**fields), random_tokens(2, 30, seed=5), tmp_path / "dense"
    interrupted(small_model(family), chosen, out=dense)
    result = prune(small_model(family), chosen, out=dense, resume=True)
    assert result.manifest.relative_logit_error < 1e-5 and not result.manifest.stock_architecture
    assert_same_weights(result.model, prune(small_model(family), chosen).model)
    assert_patterns(result.model, chosen.pruning)
    entry = json.loads((dense / "config.json").read_text())["quantization_config"]
    assert entry["down_rotation"] == 8
    loaded, info = AutoModelForCausalLM.from_pretrained(dense, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits = result.model(tokens).logits
    for opened in (loaded, drot.load(dense, device="cpu")):
        assert torch.equal(opened(tokens).logits, logits)
        assert opened.generate(tokens, **OPTIONS).shape == (2, 35)
    assert not loaded.hf_quantizer.is_compileable  # dense experts wait for the numbers of their tokens
    loaded.save_pretrained(tmp_path / "again")
    assert_same_weights(drot.load(tmp_path / "again", device="cpu"), result.model)
    packed = dict(out=tmp_path / "packed", format="packed")
    interrupted(small_model(family), chosen, **packed)
    prune(small_model(family), chosen, **packed, resume=True)
    convert(dense, tmp_path / "converted", "packed")
    assert_same_weights(saved_tensors(tmp_path / "converted"), saved_tensors(tmp_path / "packed"))
    convert(tmp_path / "packed", tmp_path / "back", "dense")
    assert_same_weights(saved_tensors(tmp_path / "back"), saved_tensors(dense))
    of_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    for opened in (of_transformers, drot.load(tmp_path / "packed", device="cpu")):
        assert relative_error(opened(tokens).logits, logits) < 1e-5
        for found, expected in zip(blocks_of(opened), blocks_of(result.model), strict=True):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_tokens(family):
    """As from an engine without a request."""
    model = prune(small_model(family), with_r3()).model
    experts = next(module for module in model.modules() if isinstance(module, ReplacedExperts))
    x, of_no_token = torch.zeros(0, model.config.hidden_size), torch.zeros(0, 2)
    assert experts(x, of_no_token.long(), of_no_token).shape == x.shape


def test_the_tensors_of_a_checkpoint(tmp_path):
    """Under the name of the experts in the files. Their bytes are those that `--dry-run` says."""
    result = prune(small_model("mixtral"), with_r3(), out=tmp_path / "out")
    tensors = saved_tensors(tmp_path / "out")
    name = "model.layers.1.block_sparse_moe.experts.down_rotation.weight"
    assert torch.equal(tensors[name], blocks_of(result.model)[1][0])
    assert tensors[name].shape == (3 * 48 // 8, 8, 8)
    assert "model.layers.1.rotated_post_attention_layernorm.weight" in tensors
    model = small_model("mixtral")
    resolved = resolve(with_r3(), device="cpu", positions=128)
    needed, _ = disk_needs(sizes_of(DecoderModel(model), *TOKENS.shape), resolved, torch.float32)
    assert weight_file_bytes(tmp_path / "out") - 10_000 < needed <= weight_file_bytes(tmp_path / "out")


def test_the_importance_of_each_down_proj_falls():
    """With R3, and in each layer together further than R1 alone makes it fall."""
    found, plain = (
        prune(small_model("deepseek_v3"), with_r3(steps=40, down_rotation=down, route_all=True)).manifest
        for down in (24, "none")
    )
    for with_blocks, without in zip(found.layers, plain.layers, strict=True):
        names = [name for name in with_blocks.linears if name.endswith("down_proj")]
        of_r3, of_r1 = ([layer.linears[name].one_shot for name in names] for layer in (with_blocks, without))
        for of_linear in of_r3:
            assert of_linear.after.removed_importance < 0.8 * of_linear.before.removed_importance
            assert of_linear.after.output_error < of_linear.before.output_error
        lost, lost_without = (sum(one.after.removed_importance for one in each) for each in (of_r3, of_r1))
        assert lost < 0.8 * lost_without and len(names) in (1, 5)


@pytest.mark.parametrize("boundary", ["input", "residual"])
def test_a_dense_down_proj_has_the_identity(boundary):
    """An expert that is kept dense takes no blocks of the training, and the next has its own."""
    keep = ("layers.*.experts.1.down_proj", "layers.2.*.shared_experts.down_proj")
    chosen = with_r3(steps=20, keep=keep, boundary=boundary, hessians="dense", route_all=True)
    result = prune(small_model("glm4_moe"), chosen)
    eye = torch.eye(8).repeat(3, 1, 1)
    for index, parts in enumerate(blocks_of(result.model)[1:], 1):
        of_experts = parts[0].unflatten(0, (4, 3))
        assert [torch.allclose(each, eye, atol=1e-4) for each in of_experts] == [False, True, False, False]
        assert torch.allclose(parts[1], torch.eye(8), atol=1e-4) == (index == 2)
    kept = result.manifest
    for name, linear in kept.layers[1].linears.items():
        if name.endswith("down_proj") and name != "experts.1.down_proj":
            assert linear.one_shot.after.removed_importance < linear.one_shot.before.removed_importance
    assert kept.layers[1].linears["experts.1.down_proj"].sparsity == 0


def test_rotations_of_a_file_bring_their_r3(tmp_path):
    """The layers hold different numbers of blocks."""
    file = tmp_path / "rotations.safetensors"
    trained = prune(small_model("glm4_moe"), with_r3(), save_rotations_to=file)
    used = prune(small_model("glm4_moe"), with_r3(down_rotation="auto", sparsity="4:8"), rotations=file)
    for found, expected in zip(blocks_of(used.model), blocks_of(trained.model), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"layers.1.r3 must be \[12, 8, 8\] for this model, got \[18, 8, 8\]"):
        prune(small_model("glm4_moe", moe_intermediate_size=16), with_r3(), rotations=file)


def test_without_a_rotation_there_is_no_r3():
    result = prune(small_model("mixtral"), with_r3(mode="none"))
    assert result.manifest.recipe.rotation.down_rotation == "none" and result.manifest.stock_architecture
    assert not any(map(down_rotations, result.model.model.layers))


def test_blocks_must_divide_the_inputs_of_every_down_proj():
    with pytest.raises(UserError, match="must divide the intermediate sizes 48 and 24; got 16: use 12 or 24"):
        prune(small_model("glm4_moe", n_shared_experts=1), with_r3(down_rotation=16))
