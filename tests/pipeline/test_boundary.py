"""down_proj trained and pruned in the next layer's basis, the boundary rotation on the residual alone."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_models import FAMILIES, random_tokens, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.architectures import architecture_of, decoder_layers, head_shape, layer_linears
from drot.checkpoint.rotations import load_rotations
from drot.cli.tables import print_manifest
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig, Sparsity
from drot.errors import UserError
from drot.pipeline import dense_pass
from drot.pipeline.context import RunContext
from drot.progress import silent
from drot.surgery import invariance
from drot.surgery.invariance import InvarianceError, check_model
from drot.surgery.residual import BoundaryRotation, rotation_place
from drot.surgery.rotate import folded_weights, rotate_layer

CPU = torch.device("cpu")
TOKENS = random_tokens(8, 40)


def recipe(sparsity="2:4", method="sparsegpt", boundary="residual", hessians="dense", steps=5, **rotation):
    return Recipe(
        rotation=RotationConfig(boundary=boundary, hessians=hessians, steps=steps, **rotation),
        pruning=PruningConfig(method=method, sparsity=Sparsity.parse(sparsity), block_size=16),
        calibration=CalibrationConfig(seqlen=40),
    )


def prune(model, chosen=None, **options):
    options = dict(device="cpu") | options
    return drot.prune(model, chosen or recipe(), calibration=TOKENS, **options)


def assert_same_weights(one, other):
    state = other.state_dict()
    assert state.keys() == one.state_dict().keys()
    for key, value in one.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("family", FAMILIES)
def test_no_sparsity_leaves_the_function_as_it_was(family):
    """Logits, and what is generated behind a KV cache with padding, are the original's."""
    model, tokens = small_model(family), random_tokens(2, 30, seed=5)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    logits, text = model(tokens).logits, model.generate(tokens, **options)
    result = prune(model, recipe("0.0", "wanda", steps=20))
    assert float((result.model(tokens).logits - logits).norm() / logits.norm()) < 1e-5
    assert torch.equal(result.model.generate(tokens, **options), text)
    assert result.manifest["relative_logit_error"] < 1e-5
    assert result.manifest["stock_architecture"] is False


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_the_pattern_and_survives_saving(family, tmp_path):
    result = prune(small_model(family), out=tmp_path / "out")
    arch = architecture_of(result.model.config)
    for layer in result.model.model.layers:
        for linear in layer_linears(layer, arch).values():
            assert ((linear.weight.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
    tokens, options = random_tokens(2, 30, seed=5), dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert [rotation_place(layer) for layer in loaded.model.layers] == ["residual", "residual", None]
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)
    cached, plain = (loaded.generate(tokens, **options, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached, plain)
    loaded.save_pretrained(tmp_path / "again")
    again = drot.load(tmp_path / "again", device="cpu")
    assert torch.equal(again(tokens).logits, result.model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamo_makes_one_graph_of_it(family):
    model, tokens = prune(small_model(family), recipe(steps=0)).model, random_tokens(2, 30)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens).logits, model(tokens).logits)


class Wrapped(torch.nn.Module):
    """What an adapter puts in the place of a linear."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return self.base(x)


def test_the_rotation_may_be_wrapped():
    model = prune(small_model("llama")).model
    logits = model(TOKENS).logits
    for layer in model.model.layers[:-1]:
        layer.residual_rotation = Wrapped(layer.residual_rotation)
    assert torch.equal(model(TOKENS).logits, logits)


def test_down_takes_the_next_layers_rotation(tmp_path):
    """Its weight and bias to rounding, and the last layer's its own."""
    original, file = small_model("llama-biased"), tmp_path / "rotations.safetensors"
    arch, shape = architecture_of(original.config), head_shape(original.config)
    rotated = prune(
        small_model("llama-biased"), recipe("0.0", "wanda", steps=20), save_rotations_to=file
    ).model
    rotations, record = load_rotations(file, layers=3, hidden_size=32, shape=shape)
    assert record["recipe"]["rotation"]["boundary"] == "residual"
    for index, after in enumerate((1, 2, 2)):
        before, now = (model.model.layers[index].mlp.down_proj for model in (original, rotated))
        r1 = rotations[after].r1
        assert torch.allclose(now.weight.double(), r1.T @ before.weight.double(), atol=1e-5)
        assert torch.allclose(now.bias.double(), before.bias.double() @ r1, atol=1e-5)
        up = folded_weights(original.model.layers[index], arch)["up_proj"].double() @ rotations[index].r1
        assert torch.allclose(rotated.model.layers[index].mlp.up_proj.weight.double(), up, atol=1e-5)
    q = rotations[0].r1.T @ rotations[1].r1
    assert torch.allclose(rotated.model.layers[0].residual_rotation.weight.double(), q.T, atol=1e-5)


@pytest.mark.parametrize("objective", ["entropy", "pruned"])
def test_each_down_is_trained_with_the_layer_whose_rotation_it_takes(objective):
    """None in the first layer, two in the last; also where the layers before were done by another run."""
    model = small_model("llama")
    own = [layer.mlp.down_proj.weight for layer in model.model.layers]
    expected = {0: [], 1: [own[0]], 2: [own[1], own[2]]}
    context = RunContext(model, recipe(objective=objective), TOKENS, [CPU], silent)
    for done in ((), (0,), (1,), (0, 1), (0, 2)):
        found = {index: part.downs for index, part, _ in dense_pass._objectives(context, done)}
        assert found.keys() == {0, 1, 2} - set(done)
        for index, downs in found.items():
            assert len(downs) == len(expected[index])
            for down, weight in zip(downs, expected[index], strict=True):
                assert torch.equal(down.weight, weight)
                assert (down.metric.matrix is None) == (objective == "entropy")


def test_no_down_is_lost():
    """At R = I all layers together have the loss and the entropy that they have in their own bases."""
    places = ("input", "residual")
    own, after = (prune(small_model("qwen3"), recipe(boundary=place)).manifest for place in places)
    for figure in ("loss_before", "entropy_before"):
        sums = [sum(layer["rotation"][figure] for layer in run["layers"]) for run in (own, after)]
        assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    for layer in after["layers"]:
        assert layer["rotation"]["loss_after"] < layer["rotation"]["loss_before"]
    assert json.loads(json.dumps(after))["recipe"]["rotation"]["boundary"] == "residual"


@pytest.mark.parametrize("phase", ["prune", "rotate"])
def test_a_run_survives_a_crash(phase, tmp_path):
    """Cut off in the second layer, in either pass, resumed: the same weights as a run in one piece."""
    whole, out = prune(small_model("llama")).model, tmp_path / "out"

    def crash(event):
        if event.phase == phase and event.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(small_model("llama"), out=out, progress=crash)
    worked_on = []
    resumed = prune(
        small_model("llama"), out=out, resume=True, progress=lambda e: worked_on.append((e.phase, e.layer))
    )
    assert (phase, 0) not in worked_on and (phase, 1) in worked_on
    assert_same_weights(whole, resumed.model)
    saved = load_file(out / "model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in whole.state_dict().items())


def test_layers_trained_side_by_side_are_the_same():
    alone, together = (prune(small_model("llama"), device=device).model for device in ("cpu", "cpu,cpu,cpu"))
    assert_same_weights(alone, together)


def test_bfloat16_weights_stay_bfloat16(tmp_path):
    result = prune(small_model("llama", dtype=torch.bfloat16), out=tmp_path / "out")
    loaded = drot.load(tmp_path / "out", device="cpu")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    tokens = random_tokens(2, 30)
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_check_model_covers_the_placement(family):
    model = small_model(family)
    arch, shape = architecture_of(model.config), head_shape(model.config)
    error = check_model(model, arch, shape, random_tokens(1, 40), CPU, place="residual")
    assert 0 < error < 1e-5
    assert not any(rotation_place(layer) for layer in decoder_layers(model, arch))


def test_check_model_names_the_layer_whose_boundary_is_wrong(monkeypatch):
    model, seen = small_model("llama"), []

    def wrong(layer, arch, shape, rotation, boundary=None):
        seen.append(layer)
        if len(seen) == 2:
            boundary = BoundaryRotation("residual", rotation.r1, rotation.r1)
        rotate_layer(layer, arch, shape, rotation, boundary)

    monkeypatch.setattr(invariance, "rotate_layer", wrong)
    arch, shape = architecture_of(model.config), head_shape(model.config)
    with pytest.raises(InvarianceError, match="layer 1: "):
        check_model(model, arch, shape, random_tokens(1, 40), CPU, place="residual")


@pytest.mark.parametrize(("trained", "used"), [("input", "residual"), ("residual", "input")])
def test_rotations_are_reused_in_the_other_basis(trained, used, tmp_path):
    """From a file nothing has to be known in advance, so sequential Hessians are no obstacle."""
    file, model, tokens = tmp_path / "rotations.safetensors", small_model("llama"), random_tokens(2, 30)
    logits = model(tokens).logits
    prune(small_model("llama"), recipe(boundary=trained), save_rotations_to=file)
    chosen = recipe("0.0", "wanda", boundary=used, hessians="sequential", objective="entropy")
    result = prune(model, chosen, rotations=file)
    assert float((result.model(tokens).logits - logits).norm() / logits.norm()) < 1e-5
    with_ = result.manifest["rotations_file"]["trained_with"]["recipe"]["rotation"]["boundary"]
    assert (with_, result.manifest["recipe"]["rotation"]["boundary"]) == (trained, used)


@pytest.mark.parametrize(
    ("rotation", "message"),
    [
        (dict(mode="shared"), 'changes nothing with `mode="shared"`, where all layers share one basis'),
        (dict(mode="none"), 'changes nothing with `mode="none"`, where nothing is rotated'),
        (dict(hessians="sequential"), 'from a file; got `hessians="sequential"`'),
    ],
)
def test_what_it_cannot_go_with_is_refused_before_the_weights_are_read(rotation, message, tmp_path):
    model = small_model("llama")
    model.config.save_pretrained(tmp_path / "config-only")
    for what in (tmp_path / "config-only", model):
        with pytest.raises(UserError, match=message) as caught:
            prune(what, recipe(**rotation))
        assert "\n" not in str(caught.value)


def test_values_are_checked(tmp_path):
    with pytest.raises(UserError, match="`boundary` must be one of input, residual; got 'previous'"):
        recipe(boundary="previous")
    prune(small_model("llama"), out=tmp_path / "out")
    file = tmp_path / "out" / "config.json"
    file.write_text(file.read_text().replace('"next"', '"previous"'))
    with pytest.raises(UserError, match="down_basis must be own or next, got 'previous'"):
        drot.load(tmp_path / "out", device="cpu")


def test_the_table_says_it(capsys):
    manifest = prune(small_model("llama"), recipe(steps=0)).manifest
    print_manifest(manifest | {"base_model": "m"})
    shown = " ".join(capsys.readouterr().out.split())
    assert "layer, boundary on the residual, objective pruned" in shown
    del manifest["recipe"]["rotation"]["boundary"]  # as an older drot wrote it
    print_manifest(manifest)
    assert "layer, objective pruned" in " ".join(capsys.readouterr().out.split())
