"""Models that are published in FP8 and MXFP4 are read as the dense models that they stand for."""

import json
import math
import re
import shutil
from typing import Any

import pytest
import torch
from quantised_files import quantise_files
from runs import assert_same_weights, interrupted, one_shot, prune, saved_tensors
from safetensors.torch import load_file, save_file
from small_checkpoints import change_json
from small_models import random_tokens, save_small_model, small_model
from small_multimodal import save_small_multimodal
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

import drot
from drot.checkpoint import quantised
from drot.checkpoint.convert import convert
from drot.checkpoint.offload import open_skeleton
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.evaluation.evaluate import evaluate

TOKENS = random_tokens(2, 12)
#: model → how its files are quantised, and what its config has in place of that of the small model
FORMATS = {
    "deepseek_v3": (dict(), {}),  # 24 + 16 rows and other sizes end in the middle of a block
    "deepseek_v3-powers": (dict(power=True, block=(8, 4)), {}),
    "glm4_moe": (dict(compressed=True, block=None), {}),
    "glm4_moe-blocks": (dict(compressed=True, block=(20, 8)), {}),  # of 24 rows, the last block has 4
    "minimax_m2": (dict(block=(8, 4)), {}),
    "llama-biased": (dict(block=None, activations=True), {}),
    "qwen3_5_moe_text": (dict(block=None), {}),
    "gpt_oss": (dict(), dict(hidden_size=64, intermediate_size=96)),  # of which 32 inputs share a scale
}


@pytest.fixture(scope="module", params=FORMATS)
def published(request, tmp_path_factory):
    """The folder of a quantised model, that of the same model with dense weights, and these in fp64."""
    room = tmp_path_factory.mktemp("published")
    settings, changes = FORMATS[request.param]
    model = small_model(request.param.removesuffix("-powers").removesuffix("-blocks"), **changes).bfloat16()
    folder = save_small_model(model, room / "quantised")
    shutil.copytree(folder, room / "dense")
    weights = quantise_files(folder, **settings)
    stored = load_file(room / "dense" / "model.safetensors")
    dense = {name: weight.float() for name, weight in weights.items()}  # which is exact
    save_file(stored | dense, room / "dense" / "model.safetensors", {"format": "pt"})
    return folder, room / "dense", weights


def test_the_weights_are_the_numbers_times_the_scales(published):
    """In fp32, to which one product of fp32 is rounded once."""
    folder, _, weights = published
    _, reader, _ = open_skeleton(folder, "float32")
    assert weights
    for name, expected in weights.items():
        found = torch.empty(expected.shape)
        reader._read({name: found})
        assert torch.equal(found, expected.float())


def test_it_loads_as_the_dense_model(published):
    folder, dense, _ = published
    found, expected = drot.load(folder, device="cpu"), AutoModelForCausalLM.from_pretrained(dense)
    assert found.dtype == torch.bfloat16 and not hasattr(found.config, "quantization_config")
    tensors = found.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors[name], tensor), name
    assert torch.equal(found(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.slow
def test_transformers_makes_the_same_of_it(published):
    folder, _, _ = published
    config = json.loads((folder / "config.json").read_text())
    entry = config["quantization_config"]
    if entry.get("weight_block_size") == [16, 16] or entry["quant_method"] == "compressed-tensors":
        pytest.skip("transformers takes only sizes that blocks divide, or needs a package")
    settings = FineGrainedFP8Config if config["model_type"] != "gpt_oss" else Mxfp4Config
    try:
        expected = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings(dequantize=True))
    except ModuleNotFoundError as error:
        pytest.skip(f"this transformers needs {error.name}")
    found = drot.load(folder, device="cpu").state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
def test_it_is_pruned_as_the_dense_model(published, tmp_path):
    folder, dense, _ = published
    for name, source in (("found", folder), ("expected", dense)):
        prune(source, one_shot("shared"), out=tmp_path / name)
    assert_same_weights(*(saved_tensors(tmp_path / name) for name in ("found", "expected")))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("found", "expected")]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_parts_of_a_weight_are_those_of_the_whole(published, monkeypatch):
    """A run reads the ends of the weights of a large model, to know it again."""
    folder, _, weights = published
    _, reader, _ = open_skeleton(folder, "float32")
    monkeypatch.setattr(quantised, "AT_ONCE", 50)  # numbers of one to three rows
    for name, expected in weights.items():
        numbers = expected.numel()
        for first, count in ((0, 1), (numbers - 1, 1), (7, 90), (numbers // 2, numbers // 2), (0, numbers)):
            found = torch.empty(count)
            reader._read({name: found}, first)
            assert torch.equal(found, expected.flatten()[first : first + count].float())


# ---- one model, and what is refused -----------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """The files of a small LLaMA in FP8."""
    made = save_small_model(small_model("llama"), tmp_path / "model")
    quantise_files(made)
    return made


def test_it_says_what_it_does(folder, tmp_path, caplog, capsys):
    prune(folder, one_shot("none"), out=tmp_path / "out")
    (line,) = [message for message in caplog.messages if "FP8" in message]
    assert line == f"{folder} is in FP8: drot makes its weights dense while it reads them"
    assert cli.run(["info", str(folder)]) == 0
    assert "FP8: drot makes its weights dense while it reads them" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS).logits.isfinite().all()


@pytest.mark.slow
def test_an_interrupted_run_goes_on(folder, tmp_path):
    interrupted(folder, one_shot(), out=tmp_path / "again")
    prune(folder, one_shot(), out=tmp_path / "again", resume=True)
    prune(folder, one_shot(), out=tmp_path / "whole")
    assert_same_weights(saved_tensors(tmp_path / "again"), saved_tensors(tmp_path / "whole"))


@pytest.mark.slow
def test_the_pruned_model_is_compared_with_it(folder, tmp_path):
    prune(folder, one_shot(), out=tmp_path / "out")
    (tmp_path / "text.txt").write_text("a b c d " * 40)
    for stream in (True, False):
        (found,) = evaluate(
            [tmp_path / "out"], ppl=[tmp_path / "text.txt"], against=folder, stream=stream, device="cpu"
        )
        (agreement,) = found["agreement"].values()
        assert 0 < agreement["kl"]["mean"] < math.inf


def test_a_model_in_memory_is_named_by_its_folder():
    model = small_model("gpt_oss")
    model.config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(UserError, match=r"quantised \(MXFP4\): name its folder, or its name on the hub"):
        prune(model, one_shot("none"))


NAME = "model.layers.1.self_attn.q_proj.weight"
GROUPS = {str(size): {"weights": {"block_structure": [size, size]}} for size in (8, 16)}
MISFITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "other blocks": (dict(weight_block_size=[8, 8]), {}, r"scales .* or in blocks of \[8, 8\]"),
    "no blocks": (dict(weight_block_size=[8]), {}, "weight_block_size"),
    "an empty block": (dict(weight_block_size=[0, 8]), {}, "weight_block_size"),
    "no scales": ({}, {f"{NAME}_scale_inv": None}, f"{NAME} is in F8_E4M3 without a scale"),
    "a block beyond the weight": (dict(weight_block_size=[16, 10**12]), {}, "has numbers .* in blocks of"),
    "blocks of several sizes": (
        dict(quant_method="compressed-tensors", format="float-quantized", config_groups=GROUPS),
        {},
        r"must have blocks of one size, got \(16, 16\), \(8, 8\)",
    ),
    "a transform": (dict(transform_config={"config_groups": {}}), {}, "has a transform_config"),
    "no columns": (
        {},
        {NAME: torch.ones(32, 0).to(torch.float8_e4m3fn), f"{NAME}_scale_inv": torch.ones(2, 0)},
        "has numbers",
    ),
    "other scales": ({}, {f"{NAME}_scale_inv": torch.ones(0, 2)}, f"{NAME} has numbers "),
    "scales of integers": ({}, {f"{NAME}_scale_inv": torch.ones(3, 2, dtype=torch.int32)}, "and I32 scales"),
    "scales without a weight": ({}, {f"{NAME}s_scale_inv": torch.ones(2, 2)}, "does not have, the first is"),
    "a number that is not finite": (
        {}, {NAME: torch.full((48, 32), math.nan).to(torch.float8_e4m3fn)}, f"{NAME} must hold finite numbers"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_files_that_do_not_fit_are_refused(case, folder, tmp_path):
    entries, tensors, line = MISFITS[case]
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    change_json(folder / "config.json", quantization_config=config | entries)
    held = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=line):
        prune(folder, one_shot("none"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


BESIDE = re.compile("vision|visual|projector")
#: of those, the linears that R1 rotates
WRITES = re.compile(r"projector\.linear_2|merger\.linear_fc2|merger_list\.\d+\.linear_fc2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "images"), [("mistral3", False), ("mistral3", True), ("qwen3_vl_moe", True)]
)
def test_a_model_that_reads_images_too(model_type, images, tmp_path):
    """Those published by Mistral leave the part for images as it is; it becomes dense in any case."""
    folder = save_small_multimodal(tmp_path / "model", model_type, dtype="bfloat16")
    shutil.copytree(folder, tmp_path / "dense")
    weights = quantise_files(folder, images=images)
    assert any("projector" in name or "visual" in name for name in weights) == images
    config = json.loads((folder / "config.json").read_text())
    if images:  # the entry may stand in the config of the language model alone
        config["text_config"]["quantization_config"] = config.pop("quantization_config")
    else:
        config["text_config"]["quantization_config"] = config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    dense = {
        name: weight.to(
            torch.bfloat16 if "visi" in name or "visual" in name or "projector" in name else torch.float32
        )
        for name, weight in weights.items()
    }
    dense |= {name: weight.float() for name, weight in weights.items() if WRITES.search(name)}
    save_file(stored | dense, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    for name, source in (("found", folder), ("expected", tmp_path / "dense")):
        prune(source, one_shot(), out=tmp_path / name, save_dtype="float32")
    assert_same_weights(*(saved_tensors(tmp_path / name) for name in ("found", "expected")))
    config = json.loads((tmp_path / "found" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "drot"
    assert config["text_config"]["quantization_config"] == config["quantization_config"]


@pytest.mark.slow
@pytest.mark.parametrize("multimodal", [False, True])
def test_it_can_be_made_dense_without_pruning(multimodal, tmp_path):
    if multimodal:
        folder = save_small_multimodal(tmp_path / "model", "mistral3", dtype="bfloat16")
    else:
        folder = save_small_model(small_model("llama").bfloat16(), tmp_path / "model")
    weights = quantise_files(folder)
    assert convert(folder, tmp_path / "out", "dense") is None
    tensors = saved_tensors(tmp_path / "out")
    for name, weight in weights.items():
        assert torch.equal(tensors[name], weight.to(tensors[name].dtype))
    assert not any("scale" in name for name in tensors)
    assert drot.load(tmp_path / "out", device="cpu")(TOKENS).logits.isfinite().all()
    with pytest.raises(UserError, match="is dense already"):
        convert(tmp_path / "out", tmp_path / "again", "dense")
    with pytest.raises(UserError, match="at most 2 non-zeros"):
        convert(folder, tmp_path / "again", "packed")
