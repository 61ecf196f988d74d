"""The whole life of a model of each kind of family: pruned, cut off and resumed, converted, opened, shown."""

import json
import sys

import pytest
import torch
from runs import TOKENS, assert_patterns, assert_same_weights, interrupted, one_shot, prune, saved_tensors
from small_checkpoints import change_json
from small_models import random_rotations, random_tokens, rotate_model, save_small_model, small_model
from together import on_ranks
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.disk_space import weight_file_bytes
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.tables import facts
from drot.cli import app as cli
from drot.model.decoder import DecoderModel
from drot.model.rotation import LayerRotation
from drot.pipeline.disk import disk_needs
from drot.pipeline.sizes import sizes_of
from drot.sparse.linear import is_packed

pytestmark = pytest.mark.slow

OPTIONS = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama-biased", "layer"),
        ("phi3", "none"),
        ("glm4", "none"),
        ("gemma2", "layer"),
        ("gemma4_unified_text", "layer"),
        ("apertus", "layer"),
        ("phi3", "layer"),  # with a report, which imports matplotlib
    ],
)
def test_from_the_dense_model_to_the_report(family, mode, tmp_path, capsys):
    def model():
        return small_model(family, head_dim=8, num_hidden_layers=2)

    down = {"down_rotation": "none"} if family == "apertus" else {}  # its MLP has no gate
    chosen, tokens = one_shot(mode, steps=2, **down), random_tokens(2, 30, seed=5)
    out, packed, again = (tmp_path / name for name in ("out", "packed", "again"))
    interrupted(model(), chosen, out=out)
    result = prune(model(), chosen, out=out, resume=True)
    assert_same_weights(result.model, prune(model(), chosen).model)
    assert_patterns(result.model, chosen.pruning)
    assert result.manifest.stock_architecture == (mode == "none")
    if mode == "layer":
        assert result.manifest.relative_logit_error < 1e-5
        assert all(layer.rotation.loss_after < layer.rotation.loss_before for layer in result.manifest.layers)
    loaded = drot.load(out, device="cpu")
    logits, text = loaded(tokens).logits, loaded.generate(tokens, **OPTIONS)
    assert torch.equal(logits, result.model(tokens).logits)
    convert(out, packed, "packed")
    opened = drot.load(packed, device="cpu")
    assert is_packed(opened)
    torch.testing.assert_close(opened(tokens).logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(opened.generate(tokens, **OPTIONS), text)
    convert(packed, again, "dense")
    assert_same_weights(drot.load(again, device="cpu"), loaded)
    assert cli.run(["info", str(out), "--verify"]) == 0
    if (family, mode) == ("phi3", "layer"):
        report = ["report", str(out), "--out", str(tmp_path / "report.html"), "--linears", "*.v_proj"]
        assert cli.run(report) == 0
        assert "v_proj" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("family", ["exaone", "kolibri1", "mixtral", "nemotron_h"])
def test_a_loaded_model_is_saved_under_the_names_of_published_files(family, tmp_path):
    """Which are others than those of transformers' modules, also in front of a rotation."""
    out, again = tmp_path / "out", tmp_path / "again"
    down = {"down_rotation": "none"} if family == "nemotron_h" else {}
    prune(small_model(family), one_shot("layer", steps=2, **down), out=out)
    loaded, tokens = drot.load(out, device="cpu"), random_tokens(2, 30, seed=5)
    loaded.save_pretrained(again)
    assert saved_tensors(again).keys() == saved_tensors(out).keys()
    assert torch.equal(drot.load(again, device="cpu")(tokens).logits, loaded(tokens).logits)


def test_a_checkpoint_names_the_class_of_its_tensors(tmp_path):
    """transformers opens EXAONE as a LLaMA, whose files have other names; and no code is copied."""
    source = save_small_model(small_model("exaone"), tmp_path / "source")
    code = {"AutoConfig": "configuration_exaone.ExaoneConfig"}
    change_json(source / "config.json", architectures=["ExaoneForCausalLM"], auto_map=code)
    prune(source, one_shot("shared", down_rotation="none"), out=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["ExaoneForCausalLM"] and "auto_map" not in written
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    loaded = drot.load(tmp_path / "out", device="cpu")
    assert torch.equal(opened(TOKENS).logits, loaded(TOKENS).logits)


# ---- a fused module, of which one slice is not 2:4 ---------------------------------------------------


def test_a_fused_module_with_a_dense_slice_stays_dense(tmp_path):
    """The whole module is stored dense, the disk is estimated so, and config.json names its slices."""
    chosen, out = one_shot("none", method="wanda", keep=("*.k_proj",)), tmp_path / "out"
    result = prune(small_model("phi3"), chosen, out=out, format="packed")
    named = json.loads((out / "config.json").read_text())["quantization_config"]["dense_linears"]
    slices = [f"layers.{i}.self_attn.{name}" for i in range(3) for name in ("q_proj", "k_proj", "v_proj")]
    assert named == slices
    opened, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    # the opened model is fused, whose norms round differently
    torch.testing.assert_close(opened(TOKENS).logits, result.model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    sizes = sizes_of(DecoderModel(small_model("phi3")), *TOKENS.shape)
    estimated, _ = disk_needs(sizes, result.manifest.recipe, torch.float32)
    assert 0 <= weight_file_bytes(out) - estimated < 6000  # the headers
    shares = {name: linear.sparsity for name, linear in read_manifest(out).layers[1].linears.items()}
    assert (shares["q_proj"], shares["k_proj"], shares["gate_proj"]) == (0.5, 0, 0.5)


def test_the_zeros_of_each_slice_are_counted_again(tmp_path):
    """When another program saves the model: in the files, dense and packed."""
    for format in ("dense", "packed"):
        folder, again = tmp_path / format, tmp_path / f"{format} again"
        prune(small_model("phi3"), one_shot("none", method="wanda"), out=folder, format=format)
        model = drot.load(folder, device="cpu")
        fused = model.model.layers[1].self_attn.qkv_proj
        weight = fused.weight if format == "dense" else fused.values
        weight.data[32:48] = 0 if format == "packed" else 1  # k_proj
        model.save_pretrained(again)
        shares = {
            (layer.layer, name): linear.sparsity
            for layer in read_manifest(again).layers
            for name, linear in layer.linears.items()
        }
        assert shares.pop((1, "k_proj")) == (1 if format == "packed" else 0)
        assert len(shares) == 20 and set(shares.values()) == {0.5}


# ---- what a layer does beside adding -----------------------------------------------------------------


@pytest.mark.parametrize(("family", "entry"), [("seed_oss", "residual_dropout"), ("phi3", "resid_pdrop")])
def test_dropout_is_that_of_the_stock_layer(family, entry):
    """In training a layer that holds rotations draws the same numbers. The rotations are the identity here:
    no dropout commutes with another."""
    settings = {entry: 0.5, "attention_dropout": 0.0}
    dense, rotated = small_model(family, **settings), small_model(family, **settings)
    shapes = [rotation.matrices for rotation in random_rotations(rotated, down_block=16)]
    unit = [
        LayerRotation(**{name: torch.eye(q.shape[-1]).expand_as(q).double() for name, q in matrices.items()})
        for matrices in shapes
    ]
    rotate_model(rotated, unit, "residual")
    logits = []
    for model in (dense, rotated):
        torch.manual_seed(3)
        logits.append(model.train()(TOKENS[:2]).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(dense.eval()(TOKENS[:2]).logits, logits[0], atol=0.1)


# ---- packages whose kernels transformers takes in place of torch's functions -------------------------

#: fla asserts this dtype too
FLA = """
def chunk_gated_delta_rule(q, k, v, g, beta, **others):
    assert q.dtype.itemsize == 2, "only 16 bits"
    return v, None
"""


def asserted_by_fla(folder):
    """What the kernels of the package in `folder` say after a run, in a process that finds it there."""
    sys.path.insert(0, str(folder))
    from transformers.models.qwen3_next import modeling_qwen3_next as code

    before = code.torch_chunk_gated_delta_rule
    model = small_model("qwen3_next")
    prune(model, one_shot(token_weights="equal", down_rotation="none"))
    assert code.torch_chunk_gated_delta_rule is before
    try:
        model(model.dummy_inputs["input_ids"])
    except AssertionError as error:
        return str(error)
    return ""


def test_layers_in_fp32_do_without_the_kernels_of_fla(tmp_path):
    """The check of the rotation computes each layer in fp32, also where the model has 16 bits."""
    (tmp_path / "fla" / "ops").mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (tmp_path / "fla" / "ops" / "__init__.py").touch()
    (tmp_path / "fla" / "ops" / "gated_delta_rule.py").write_text(FLA)
    (told,) = on_ranks(1, asserted_by_fla, tmp_path)
    if told == "":
        pytest.skip("the installed transformers does not take the function from fla")
    assert told == "only 16 bits", told


# ---- what a family has no place for ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "mode", "lacking"),
    [
        ("llama", "layer", []),
        ("llama", "shared", []),
        ("qwen3_next", "layer", ["r2"]),
        ("opt", "layer", ["r3"]),
        ("opt", "shared", []),
        ("arcee", "layer", ["r3"]),
        ("gemma2", "layer", []),
        ("gemma2", "shared", ["r1"]),
        ("qwen3_next", "none", []),
    ],
)
def test_a_rotation_that_is_left_out_is_told_and_recorded(family, mode, lacking, caplog):
    chosen = one_shot(mode, down_rotation="auto")
    result = prune(small_model(family), chosen)
    assert result.manifest.rotations_left_out == lacking
    told = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    names = " and ".join(lacking).upper()
    assert told == [f"{names} left out: a model of type {family} has no place for it"] * bool(lacking)
    assert dict(facts(result.manifest)).get("left out", "").startswith(names)


@pytest.mark.parametrize(
    ("family", "mode", "changes", "warned"),
    [
        ("gemma", "shared", {}, True),
        ("gemma", "none", {}, False),
        ("gemma", "layer", {}, False),  # refused by every engine
        ("gemma", "shared", dict(tie_word_embeddings=False), False),
        ("cohere", "shared", {}, True),
        ("lfm2", "shared", {}, True),
        ("llama", "shared", dict(tie_word_embeddings=True), False),
    ],
)
def test_a_family_whose_head_engines_tie_is_told(family, mode, changes, warned, caplog):
    model = small_model(family, **changes)
    prune(model, one_shot(mode, objective="entropy", steps=1))
    assert ("take the embedding of a model" in caplog.text) == warned
