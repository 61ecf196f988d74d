"""Mixtures of experts: the Hessian of each expert from its own tokens, and the whole life of such a model."""

import json

import pytest
import torch
from runs import TOKENS, assert_patterns, assert_same_weights, interrupted, one_shot, prune, saved_tensors
from safetensors.torch import save_file
from small_models import MIXTURES, random_tokens, relative_error, save_small_model, small_model
from transformers import AutoConfig, AutoModelForCausalLM

import drot
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.config import Recipe
from drot.model.decoder import DecoderModel
from drot.pipeline.dry_run import run_needs

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FAMILIES = ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "qwen2_moe"]
#: with those whose first layer has no experts; the norms of Qwen3-Next multiply by 1 + their weight
ALL = [*FAMILIES, "qwen3_next", "deepseek_v3"]
OPTIONS = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
MODES = {
    "none": one_shot("none"),
    "shared": one_shot("shared", steps=2),
    "layer": one_shot(steps=2, down_rotation="auto"),
    "residual": one_shot(steps=2, down_rotation="auto", boundary="residual", hessians="dense"),
}


# ---- Hessians ----------------------------------------------------------------------------------------


def routed(model, index, expert):
    """The inputs of gate and up, and of down, of an expert of layer `index`, by definition."""
    layer, seen = model.model.layers[index], {}
    handle = layer.post_attention_layernorm.register_forward_hook(lambda m, a, out: seen.update(x=out))
    model(TOKENS)
    handle.remove()
    x, experts = seen["x"].flatten(0, 1), layer.mlp.experts
    if model.config.model_type == "gpt_oss":
        chosen = (x @ layer.mlp.router.weight.T + layer.mlp.router.bias).topk(2).indices
        x = x[(chosen == expert).any(-1)]
        both = x @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        limit = experts.limit  # transformers 5.4 does not read the configured limit
        gate, up = both[:, 0::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        return x, gate * torch.sigmoid(1.702 * gate) * (up + 1)
    if "glm" in model.config.model_type:  # of two groups of two experts the one with the larger sum
        chosen = (x @ layer.mlp.gate.weight.T).sigmoid() + layer.mlp.gate.e_score_correction_bias
        chosen = torch.stack([chosen[:, :2].sum(-1), chosen[:, 2:].sum(-1)]).argmax(0)[:, None] * 2
        chosen = torch.cat([chosen, chosen + 1], -1)
    else:
        chosen = (x @ layer.mlp.gate.weight.T).topk(2).indices
    x = x[(chosen == expert).any(-1)]
    gate, up = (x @ experts.gate_up_proj[expert].T).chunk(2, -1)
    return x, torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hessian_of_an_expert_is_that_of_its_tokens(family):
    model = small_model(family)
    handle = DecoderModel(model)
    stream = CalibrationStream.embed(handle, TOKENS, CPU)
    stream.advance(handle.layers[0])
    stream.advance(handle.layers[1])
    layer = handle.layers[2]
    found = stream.hessians(layer, layer.groups)
    folded = stream.hessians(layer, layer.groups, folded=True)
    scale = layer.module.post_attention_layernorm.weight
    for expert in range(3):
        for group, x in zip((f"mlp.{expert}", f"down.{expert}"), routed(model, 2, expert), strict=True):
            assert 0 < len(x) < TOKENS.numel()
            wanted = 2 / len(TOKENS) * x.T @ x  # in the scale of all inputs: of the sequences
            torch.testing.assert_close(found[group], wanted, rtol=1e-4, atol=1e-4)
            x = x / scale if group.startswith("mlp") else x
            wanted = 2 / len(TOKENS) * x.T @ x
            torch.testing.assert_close(folded[group], wanted, rtol=1e-4, atol=1e-4)


def test_all_tokens_on_demand():
    """With `route_all` every expert is calibrated on the inputs of all."""
    model = small_model("mixtral")
    handle = DecoderModel(model, route_all=True)
    stream = CalibrationStream.embed(handle, TOKENS, CPU)
    hessians = stream.hessians(handle.layers[0], handle.layers[0].groups)
    assert torch.equal(hessians["mlp.0"], hessians["mlp.2"])
    result = prune(model, one_shot("none", route_all=True))
    tokens = {linear.tokens for linear in result.manifest.layers[1].linears.values()}
    assert tokens == {None, TOKENS.numel()}


def test_the_manifest_counts_the_tokens_of_each_expert():
    result = prune(small_model("qwen3_moe"), MODES["none"])
    for layer in result.manifest.layers:
        for role in ("gate_proj", "up_proj", "down_proj"):
            seen = [layer.linears[f"experts.{expert}.{role}"].tokens for expert in range(4)]
            assert sum(seen) == 2 * TOKENS.numel() and min(seen) > 0
        assert layer.linears["q_proj"].tokens is None


def test_an_expert_with_too_few_tokens_is_named(caplog):
    """An expert that the router never chooses is pruned by magnitude: its Hessian says nothing."""
    model = small_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    model.model.layers[1].mlp.gate.weight[0] = 0  # the other two are drawn with both signs
    model.model.layers[1].post_attention_layernorm.register_forward_hook(lambda m, a, out: out.abs())
    model.model.layers[1].mlp.gate.weight[1:].abs_()
    weight = experts.down_proj[0].clone()
    result = prune(model, one_shot("none", method="sparsegpt"))
    assert result.manifest.layers[1].linears["experts.0.up_proj"].tokens == 0
    message = next(record.getMessage() for record in caplog.records if "layer 1" in record.getMessage())
    assert (
        "2 inputs of experts have fewer calibration tokens than channels, the fewest mlp.0 with 0" in message
    )
    assert "more `nsamples`, or `route_all`" in message
    pruned = DecoderModel(model).layers[1].linears["experts.0.down_proj"].weight
    order = weight.abs().unflatten(1, (-1, 4)).argsort(-1)
    expected = torch.zeros_like(weight).unflatten(1, (-1, 4)).scatter(-1, order[..., :2], 1).flatten(1).bool()
    assert torch.equal(pruned == 0, expected)


# ---- the life of a model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen3_moe", "none"),
        ("mixtral", "layer"),
        ("glm4_moe", "shared"),
        ("gpt_oss", "residual"),
        ("qwen3_next", "layer"),
        ("deepseek_v3", "shared"),
    ],
)
def test_from_the_dense_model_to_the_report(family, mode, tmp_path, capsys):
    chosen, tokens, out = MODES[mode], random_tokens(2, 30, seed=5), tmp_path / "out"
    interrupted(small_model(family), chosen, out=out)
    result = prune(small_model(family), chosen, out=out, resume=True)
    assert_same_weights(result.model, prune(small_model(family), chosen).model)
    assert_patterns(result.model, chosen.pruning)
    # `auto`, where it finds a block of at least 16 that divides the inputs of every down_proj
    expected = {"mixtral": 48, "gpt_oss": 48}.get(family, "none")
    assert result.manifest.recipe.rotation.down_rotation == expected
    assert result.manifest.stock_architecture == (mode in ("none", "shared"))
    if mode != "none":
        assert result.manifest.relative_logit_error < 1e-5
    for opened in (drot.load(out, device="cpu"), AutoModelForCausalLM.from_pretrained(out)):
        assert torch.equal(opened(tokens).logits, result.model(tokens).logits)
        assert opened.generate(tokens, **OPTIONS).shape == (2, 35)
    opened.save_pretrained(tmp_path / "again")
    again = drot.load(tmp_path / "again", device="cpu")
    assert_same_weights(again, result.model)
    assert cli.run(["info", str(out), "--verify"]) == 0


@pytest.mark.parametrize(
    ("family", "place"), [(family, ("residual", "input")[i % 2]) for i, family in enumerate(ALL)]
)
def test_without_sparsity_the_outputs_do_not_change(family, place):
    """The router reads what R1 rotates, so it is rotated too; it is never pruned."""
    model, tokens = small_model(family), random_tokens(2, 30, seed=5)
    logits, text = model(tokens).logits, model.generate(tokens, **OPTIONS)
    gate = getattr(model.model.layers[1].mlp, "router" if family == "gpt_oss" else "gate")
    router = gate.weight.clone()
    chosen = one_shot(
        sparsity=0.0, method="wanda", objective="entropy", steps=20, down_rotation="auto", boundary=place,
        hessians="dense",
    )  # fmt: skip
    result = prune(model, chosen)
    assert relative_error(result.model(tokens).logits, logits) < 1e-5
    assert torch.equal(result.model.generate(tokens, **OPTIONS), text)
    assert relative_error(gate.weight, router) > 0.1


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss"])
def test_the_rotation_and_the_solvers_lower_the_error(family):
    """On the calibration text: the rotation, and the solvers on top of it, each by a good part.

    Sums of two models: which experts a token meets makes the error of one model jump.
    """
    recipes = (
        MODES["none"],
        MODES["layer"].replace(steps=40),
        Recipe().replace(steps=40, block_size=16, seqlen=40).with_quality("best").replace(recover="block"),
    )
    errors = [0.0, 0.0, 0.0]
    for seed in (1, 2):
        dense = small_model(family, seed)(TOKENS).logits
        for at, chosen in enumerate(recipes):
            logits = prune(small_model(family, seed), chosen).model(TOKENS).logits
            errors[at] += relative_error(logits, dense)
    assert errors[1] < 0.9 * errors[0] and errors[2] < 0.9 * errors[1]


def test_patterns_find_the_linears_of_experts():
    keep = ("layers.0.mlp.experts.1.*", "layers.*.experts.2.down_proj")
    chosen = one_shot("none", method="wanda", keep=keep, sparsity_of={"up_proj": "1:4"})
    assert_patterns(prune(small_model("qwen3_moe"), chosen).model, chosen.pruning)


def test_the_zeros_are_counted_again(tmp_path):
    prune(small_model("qwen3_moe"), MODES["none"], out=tmp_path / "out")
    model = drot.load(tmp_path / "out", device="cpu")
    model.model.layers[1].mlp.experts.down_proj.data[2] = 0
    model.save_pretrained(tmp_path / "again")
    shares = {
        name: linear.sparsity for name, linear in read_manifest(tmp_path / "again").layers[1].linears.items()
    }
    assert shares.pop("experts.2.down_proj") == 1 and set(shares.values()) == {0.5}


def test_a_layer_of_qwen3_30b_a3b_needs_at_most_30_gb(tmp_path):
    """The count of `--dry-run` for a run with the default recipe in fp32 on a CPU."""
    sizes = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, vocab_size=151_936)
    heads = dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128)
    experts = dict(num_experts=128, num_experts_per_tok=8)
    config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    needs = run_needs(tmp_path, Recipe(), device="cpu", dtype="float32")
    assert 15e9 < needs.main_memory + needs.device_memory < 30e9


# ---- what it cannot have -----------------------------------------------------------------------------


def test_what_a_mixture_cannot_have_is_refused_in_one_line(tmp_path, capsys):
    folder = save_small_model(small_model("mixtral"), tmp_path / "model")
    out = ["--out", str(tmp_path / "out")]
    text = tmp_path / "text.txt"
    text.write_text("a b c d " * 200)
    short = ["--calibration", str(text), "--nsamples", "2", "--seqlen", "8"]
    for arguments, message in (
        (
            ["prune", str(folder), *out, *short, "--down-rotation", "10"],
            "--down-rotation must divide the intermediate size 48; got 10: use 8 or 12",
        ),
        (["finetune", str(folder), *out], "drot does not fine-tune a mixture of experts"),
    ):
        assert cli.run(arguments) == 2, arguments
        (*_, line) = capsys.readouterr().err.splitlines()
        assert message in line
        assert not (tmp_path / "out").exists()
    assert cli.run(["info", str(folder)]) == 0
    assert "rotations R1, R2, R3 " in " ".join(capsys.readouterr().out.split()) + " "


def test_a_dense_layer_among_experts_is_pruned_too(tmp_path):
    """Qwen3 MoE names such layers in two ways; the estimate counts each layer by what it has."""
    model = small_model("qwen3_moe", mlp_only_layers=[1])
    layers = DecoderModel(model).layers
    assert [len(layer.linears) for layer in layers] == [16, 7, 16]
    assert [len(layer.groups) for layer in layers] == [10, 4, 10]
    result = prune(model, MODES["layer"], out=tmp_path / "out")
    assert_patterns(result.model, MODES["layer"].pruning)
    assert result.manifest.layers[1].linears["down_proj"].sparsity == 0.5
    assert torch.equal(drot.load(tmp_path / "out", device="cpu")(TOKENS).logits, result.model(TOKENS).logits)
    other = DecoderModel(small_model("qwen3_moe", decoder_sparse_step=2))
    assert [layer.family.experts is None for layer in other.layers] == [True, False, True]


def test_the_zeros_of_interleaved_experts_are_counted_again(tmp_path):
    prune(small_model("gpt_oss"), MODES["none"], out=tmp_path / "out")
    model = drot.load(tmp_path / "out", device="cpu")
    model.model.layers[1].mlp.experts.gate_up_proj.data[2, :, 1::2] = 0
    model.save_pretrained(tmp_path / "again")
    shares = {
        name: linear.sparsity for name, linear in read_manifest(tmp_path / "again").layers[1].linears.items()
    }
    assert shares.pop("experts.2.up_proj") == 1 and set(shares.values()) == {0.5}


def test_dry_run_and_sensitivity(tmp_path, capsys):
    """The estimate counts the tokens that an expert reads; the table shows the worst expert."""
    folder = save_small_model(small_model("qwen3_moe"), tmp_path / "model")
    (tmp_path / "text.txt").write_text("a b c d " * 400)
    short = ["--calibration", str(tmp_path / "text.txt"), "--nsamples", "4", "--seqlen", "40", "--json"]
    assert cli.run(["prune", str(folder), "--dry-run", *short]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.run(["prune", str(folder), "--sensitivity", "--rotation", "none", *short]) == 0
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert len(errors) == 3 * (4 + 4 * 3) and errors["layers.2.mlp.experts.3.up_proj"]["2:4"] > 0


def test_layers_for_multi_token_prediction_are_left_out(tmp_path, caplog):
    """GLM-4.5 is published with such layers behind the last decoder layer."""
    model, folder = small_model("glm4_moe"), tmp_path / "model"
    model.config.num_nextn_predict_layers = 1
    save_small_model(model, folder)
    tensors = saved_tensors(folder)
    last = {name: tensor for name, tensor in tensors.items() if "layers.2." in name}
    more = {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in last.items()}
    (name,) = folder.glob("*.safetensors")
    save_file(tensors | more, name, {"format": "pt"})
    loaded = drot.load(folder, device="cpu")
    assert f"holds {len(more)} tensors for multi-token prediction" in caplog.text
    assert loaded.config.num_nextn_predict_layers == 0
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    result = prune(loaded, MODES["none"], out=tmp_path / "out")
    assert torch.equal(drot.load(tmp_path / "out", device="cpu")(TOKENS).logits, result.model(TOKENS).logits)


def test_tensors_for_multi_token_prediction_beside_the_layers_are_left_out(tmp_path, caplog):
    """ERNIE 4.5 is published with such tensors, whose names begin with `model.mtp_`."""
    model, folder = small_model("ernie4_5_moe"), tmp_path / "model"
    save_small_model(model, folder)
    more = {
        "model.mtp_block.0.mlp.up_proj.weight": torch.ones(4, 4),
        "model.mtp_emb_norm.0.weight": torch.ones(4),
    }
    (name,) = folder.glob("*.safetensors")
    save_file(saved_tensors(folder) | more, name, {"format": "pt"})
    loaded = drot.load(folder, device="cpu")
    assert "holds 2 tensors for multi-token prediction" in caplog.text
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_files_are_those_of_transformers(family, tmp_path):
    """Engines read each expert by its own name, as in the published checkpoints."""
    stock = small_model(family)
    stock.save_pretrained(tmp_path / "stock")
    chosen = one_shot("none", sparsity=0.0, method="magnitude")
    prune(stock, chosen, out=tmp_path / "out")
    assert_same_weights(saved_tensors(tmp_path / "out"), saved_tensors(tmp_path / "stock"))


def test_an_expert_whose_tokens_all_count_nothing_keeps_half_of_its_weights():
    """The loss does not depend on the last token in the last layer: its weight is 0."""
    chosen = one_shot("none", token_weights="gradient")
    found = [
        linear
        for seed in range(3)
        for layer in prune(
            small_model("qwen3_moe", seed=seed), chosen, calibration=random_tokens(2, 2, seed=seed)
        ).manifest.layers
        for linear in layer.linears.values()
    ]
    assert {linear.sparsity for linear in found} == {0.5}
    assert min(linear.output_error for linear in found) > 0


def test_the_sensitivity_of_experts_without_tokens_is_that_of_independent_inputs():
    errors = drot.sensitivity(
        small_model("olmoe"), one_shot("none"), calibration=random_tokens(2, 3), device="cpu"
    ).errors
    experts = [error for name, error in errors.items() if ".experts." in name]
    assert experts and all(error["2:4"] > 0 for error in experts)
