"""Boundary rotations on the residual, with which down_proj takes the R1 of the next layer."""

import pytest
import torch
from runs import TOKENS, assert_opens, assert_patterns, one_shot, prune, recipe
from small_models import random_tokens, relative_error, small_model

import drot
from drot.checkpoint.rotations import open_rotations
from drot.cli import app as cli
from drot.config import resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.boundary import rotation_place
from drot.model.decoder import DecoderModel
from drot.pipeline import training
from drot.pipeline.context import RunContext
from drot.sparse.fused import FusedRotation

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
RESIDUAL = dict(boundary="residual", hessians="dense")
CHOSEN = recipe(**RESIDUAL)


@pytest.mark.parametrize("family", ["llama-biased", "granite", "phi3"])
def test_a_model_keeps_the_pattern_and_survives_saving(family, tmp_path):
    result = prune(small_model(family), CHOSEN, out=tmp_path / "out")
    assert_patterns(result.model, CHOSEN.pruning)
    loaded = assert_opens(tmp_path / "out", result.model, tmp_path / "again")
    assert [rotation_place(layer) for layer in loaded.model.layers] == ["residual", "residual", None]


@pytest.mark.parametrize(
    ("model", "chosen", "format"),
    [
        (lambda: small_model("granite"), CHOSEN.replace(steps=0), "dense"),
        (lambda: small_model("gemma2"), one_shot(steps=0), "dense"),
        (lambda: small_model("llama", head_dim=16), recipe(steps=2), "packed"),
    ],
    ids=["residual", "inside", "packed"],
)
def test_dynamo_compiles_the_model_to_one_graph(model, chosen, format):
    model, tokens = prune(model(), chosen, format=format).model, random_tokens(2, 30)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens).logits, model(tokens).logits)


class Wrapped(torch.nn.Module):
    """A module that replaces a linear, as adapters do."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def test_the_rotation_may_be_wrapped():
    model = prune(chosen=CHOSEN).model
    logits = model(TOKENS).logits
    for layer in model.model.layers[:-1]:
        layer.residual_rotation = Wrapped(layer.residual_rotation)
    assert torch.equal(model(TOKENS).logits, logits)


def test_down_takes_the_next_layers_rotation(tmp_path):
    """Also its bias. The last down_proj takes the rotation of its own layer."""
    original, file = small_model("llama-biased"), tmp_path / "rotations.safetensors"
    dense = CHOSEN.replace(sparsity=0.0, method="wanda", objective="entropy", steps=20)
    rotated = prune(small_model("llama-biased"), dense, save_rotations_to=file).model
    handle = DecoderModel(original)
    rotations, record = open_rotations(file, handle)
    assert record["recipe"]["rotation"]["boundary"] == "residual"
    for index, r1_index in enumerate((1, 2, 2)):
        down, rotated_down = (model.model.layers[index].mlp.down_proj for model in (original, rotated))
        r1 = rotations[r1_index].r1
        r3 = torch.block_diag(*rotations[index].r3)
        assert not torch.allclose(r3, torch.eye(48, dtype=torch.float64), atol=1e-2)
        expected = r1.T @ down.weight.double() @ r3
        assert torch.allclose(rotated_down.weight.double(), expected, atol=1e-5)
        assert torch.allclose(rotated_down.bias.double(), down.bias.double() @ r1, atol=1e-5)
        up = handle.layers[index].folded_weights(torch.float64)["up_proj"] @ rotations[index].r1
        assert torch.allclose(rotated.model.layers[index].mlp.up_proj.weight.double(), up, atol=1e-5)
    q = rotations[0].r1.T @ rotations[1].r1
    assert torch.allclose(rotated.model.layers[0].residual_rotation.weight.double(), q.T, atol=1e-5)


@pytest.mark.parametrize("objective", ["entropy", "pruned"])
def test_each_down_is_trained_with_the_layer_whose_rotation_it_takes(objective):
    """None with the first layer and two with the last, also if an interrupted run has trained some layers."""
    model = small_model("llama")
    weights = [layer.mlp.down_proj.weight for layer in model.model.layers]
    expected = {0: [], 1: [weights[0]], 2: [weights[1], weights[2]]}
    context = RunContext(
        model, resolve(CHOSEN.replace(objective=objective), down_width=48), TOKENS, CPU, silent
    )
    for done in ((), (0,), (1,), (0, 1), (0, 2)):
        found = {index: part.left_rotated for index, part, _ in training._objectives(context, None, done)}
        assert found.keys() == {0, 1, 2} - set(done)
        for index, downs in found.items():
            assert len(downs) == len(expected[index])
            for down, weight in zip(downs, expected[index], strict=True):
                # for `pruned` it is multiplied by its factor
                factor = float((down.weight * weight).sum() / weight.square().sum())
                assert objective == "pruned" or factor == pytest.approx(1)
                torch.testing.assert_close(down.weight, factor * weight.detach())
                assert down.metric.matrix.shape == (3, 16, 16)


def test_every_down_is_trained():
    """At R = I the losses and the entropies of all layers have the same sum for both places."""
    places = ("input", "residual")
    on_input, on_residual = (
        prune(small_model("qwen3"), CHOSEN.replace(boundary=place)).manifest for place in places
    )
    for figure in ("loss_before", "entropy_before"):
        sums = [
            sum(getattr(layer.rotation, figure) for layer in run.layers) for run in (on_input, on_residual)
        ]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    for layer in on_residual.layers:
        assert layer.rotation.loss_after < layer.rotation.loss_before
    assert on_residual.recipe.rotation.boundary == "residual"


@pytest.mark.parametrize(("trained", "used"), [("input", "residual"), ("residual", "input")])
def test_rotations_are_reused_at_the_other_place(trained, used, tmp_path):
    """A file holds the rotations of all layers, so `residual` also works with sequential Hessians."""
    file, model, tokens = tmp_path / "rotations.safetensors", small_model("llama"), random_tokens(2, 30)
    logits = model(tokens).logits
    prune(chosen=CHOSEN.replace(boundary=trained), save_rotations_to=file)
    chosen = recipe(sparsity=0.0, method="wanda", boundary=used, hessians="sequential", objective="entropy")
    result = prune(model, chosen, rotations=file)
    assert relative_error(result.model(tokens).logits, logits) < 1e-5
    trained_with = result.manifest.rotations_file.trained_with["recipe"]["rotation"]["boundary"]
    assert (trained_with, result.manifest.recipe.rotation.boundary) == (trained, used)


def test_one_r1_for_all_layers_is_told(tmp_path, caplog):
    """Between the layers it would be multiplied by the identity."""
    file = tmp_path / "rotations.safetensors"
    shared = recipe("shared", down_rotation="none")
    prune(chosen=shared, save_rotations_to=file)
    prune(chosen=shared, rotations=file)
    assert "one R1 for all layers" not in caplog.text
    prune(chosen=recipe("layer", down_rotation="none"), rotations=file)
    assert 'the layers then multiply by an identity: use `mode="shared"`' in caplog.text


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        (dict(mode="shared"), 'must be auto or input with `mode="shared"`'),
        (dict(mode="none"), 'must be auto or input with `mode="none"`'),
        (dict(hessians="sequential"), 'got `hessians="sequential"`'),
    ],
)
def test_a_recipe_without_effect_is_refused_before_the_weights_are_read(rotation, message, tmp_path):
    model = small_model("llama")
    model.config.save_pretrained(tmp_path / "config-only")
    for source in (tmp_path / "config-only", model):
        with pytest.raises(UserError, match=message) as caught:
            prune(source, CHOSEN.replace(**rotation))
        assert "\n" not in str(caught.value)


def test_values_are_checked(tmp_path):
    with pytest.raises(UserError, match="`boundary`"):
        recipe(boundary="previous")
    prune(chosen=CHOSEN, out=tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"residual"', '"previous"'))
    with pytest.raises(UserError, match="boundary: .* got 'previous'"):
        drot.load(tmp_path / "out", device="cpu")


def test_a_packed_model_rotates_the_residual_by_default(tmp_path, capsys):
    """There the rotation is part of the product of down_proj. The manifest and the summary say so."""
    chosen = recipe(steps=2)
    out = tmp_path / "out"
    result = prune(small_model("llama", head_dim=16), chosen, out=out, format="packed")
    recorded = result.manifest.recipe.rotation
    assert (recorded.boundary, recorded.hessians) == ("residual", "dense")
    assert {rotation_place(layer) for layer in result.model.model.layers[:-1]} == {"residual"}
    fused = drot.load(out, device="cpu")
    assert sum(isinstance(module, FusedRotation) for module in fused.modules()) == 2
    assert cli.run(["info", str(out)]) == 0
    assert "part of the product of the last linear" in capsys.readouterr().out
    again = prune(small_model("llama", head_dim=16), chosen, out=out, format="packed", resume=True)
    assert again.finished_before
    dense = prune(small_model("llama", head_dim=16), chosen).manifest.recipe.rotation
    assert (dense.boundary, dense.hessians) == ("input", "sequential")
