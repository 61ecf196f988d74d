"""Models that read images too: their language model is pruned, and the rest is kept byte for byte."""

import json
import shutil

import pytest
import torch
from runs import TOKENS, interrupted, one_shot, prune, saved_bytes, saved_tensors
from safetensors.torch import load_file, save_file
from small_checkpoints import change_json
from small_models import (
    letter_tokenizer,
    random_text,
    random_tokens,
    relative_error,
    save_small_model,
    small_model,
)
from small_multimodal import (
    AVAILABLE,
    KINDS,
    MULTIMODAL_MODELS,
    hold_experts_together,
    image_and_text,
    rotations_of,
    save_small_multimodal,
    small_multimodal,
)
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5ForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.opening import load_config
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.evaluation.perplexity import perplexity
from drot.model.families import FAMILIES
from drot.model.multimodal import PROJECTORS, language_config

pytestmark = pytest.mark.slow

#: a run that rotates and removes no weight
NOTHING = dict(sparsity=0.0, method="wanda", objective="entropy")


def opened(folder):
    """A function from inputs to the logits of the model in `folder`, as transformers opens it."""
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    model.eval().requires_grad_(False)
    return lambda inputs: model(**inputs).logits


def logits(folder, inputs):
    return opened(folder)(inputs)


def beside(tensors):
    """The names of the tensors that are no part of the language model."""
    parts = "visual", "vision", "audio", "projector", "connector"
    return {name for name in tensors if any(part in name for part in parts)}


def raw(folder):
    """Name → dtype, shape and bytes of each tensor."""
    return {name: (each.dtype, each.shape, each.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, each in saved_tensors(folder).items()}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "mode", "tied"),
    [
        *((each, "shared", True) for each in AVAILABLE),
        *((each, "layer", False) for each in KINDS),
        ("mistral3", "none", False),
        ("qwen3_vl", "none", False),
        ("qwen3_vl", "layer", True),
    ],
)
def test_a_rotated_model_reads_an_image_as_before(model_type, tied, mode, tmp_path):
    """The logits behind an image stay: the projector writes in the rotated basis."""
    source = save_small_multimodal(tmp_path / "source", model_type, tie_word_embeddings=tied)
    inputs = image_and_text(model_type)
    before_it = opened(source)
    expected = before_it(inputs)
    other = inputs | {"pixel_values": -inputs["pixel_values"]}
    assert relative_error(before_it(other), expected) > 0.03  # the image counts
    result = prune(source, one_shot(mode, **rotations_of(model_type), **NOTHING), out=tmp_path / "out")
    assert relative_error(logits(tmp_path / "out", inputs), expected) < 1e-5
    assert result.manifest.stock_architecture == (mode != "layer")
    loaded, tokens = drot.load(tmp_path / "out", device="cpu"), random_tokens(2, 30, vocab=90)
    assert loaded.config.model_type in FAMILIES
    assert relative_error(loaded(tokens).logits, before_it({"input_ids": tokens})) < 1e-5

    before, after = raw(source), raw(tmp_path / "out")
    changed = {name for name in beside(before) if before[name] != after[name]}
    writes = {name for name in before if any(part in name for part in PROJECTORS)}
    writes |= {name for name in before if "deepstack_merger_list" in name and "linear_fc2" in name}
    rotates = mode != "none" and FAMILIES[MULTIMODAL_MODELS[model_type][0].partition("-")[0]].rotates_stream
    assert changed == (writes if rotates else set())
    config = json.loads((source / "config.json").read_text())
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found["vision_config"] == config["vision_config"]
    assert found["model_type"] == (model_type.partition("-")[0] if mode != "layer" else "drot")
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 28}\n'


@pytest.mark.parametrize("model_type", [name for name in ("qwen2_5_vl", "qwen3_vl") if name in AVAILABLE])
def test_a_longer_context_is_that_of_the_whole_model(model_type, tmp_path):
    """Its rotary frequencies are scaled by YaRN, and the language model alone scales them too."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    source = save_small_multimodal(tmp_path / "source", model_type, rope_parameters=rope)
    loaded, tokens = drot.load(source, device="cpu"), random_tokens(2, 30, vocab=90)
    expected = logits(source, {"input_ids": tokens})
    assert relative_error(loaded(tokens).logits, expected) < 1e-5
    plain = save_small_multimodal(tmp_path / "plain", model_type)
    assert relative_error(logits(plain, {"input_ids": tokens}), expected) > 0.01


@pytest.mark.parametrize("multimodal", [True, False])
def test_experts_lie_together_or_each_by_itself_as_in_the_source(multimodal, tmp_path):
    """Qwen3.5 MoE is published with the experts of a layer in one tensor, others with each by itself."""
    model_type = "qwen3_5_moe" if multimodal else "qwen3_moe"
    folders = [tmp_path / "apart", tmp_path / "together"]
    for folder in folders:
        model = (
            small_multimodal(model_type) if multimodal else small_model(model_type, moe_intermediate_size=16)
        )
        model.save_pretrained(folder)
        letter_tokenizer().save_pretrained(folder)
    hold_experts_together(folders[1], model)
    for folder in folders:
        prune(folder, one_shot("layer"), out=tmp_path / f"{folder.name}-pruned")
        convert(tmp_path / f"{folder.name}-pruned", tmp_path / f"{folder.name}-packed", "packed")
        names = {name for name in saved_tensors(tmp_path / f"{folder.name}-pruned") if ".experts." in name}
        wanted = {name for name in saved_tensors(folder) if ".experts." in name}
        assert names - wanted == {name for name in names if "down_rotation" in name} and wanted <= names
    tokens = random_tokens(1, 20, vocab=90)
    for made in ("pruned", "packed"):
        found = [drot.load(tmp_path / f"{folder.name}-{made}", device="cpu") for folder in folders]
        assert torch.equal(found[0](tokens).logits, found[1](tokens).logits)
    if multimodal:  # dense experts with R3 wait for the numbers of their tokens, packed ones do not
        for made, holds in (("pruned", False), ("packed", True)):
            whole = AutoModelForImageTextToText.from_pretrained(tmp_path / f"apart-{made}")
            assert whole.hf_quantizer.is_compileable == holds
    else:  # transformers opens both forms
        found = [AutoModelForCausalLM.from_pretrained(tmp_path / f"{one.name}-pruned") for one in folders]
        assert torch.equal(found[0](tokens).logits, found[1](tokens).logits)


def test_forms_of_experts_that_transformers_does_not_read_are_refused(tmp_path):
    """It opens the experts of a Qwen3-VL only together, and those of a Qwen3 only as [experts, out, in]."""
    source = save_small_multimodal(tmp_path / "vl", "qwen3_vl_moe")
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        of_all, prefix = tensors.pop(name).mT, name.rpartition(".")[0]
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for number, own in enumerate(of_all):
            rows = own.chunk(len(parts))
            tensors |= {
                f"{prefix}.{number}.{part}.weight": each.contiguous()
                for part, each in zip(parts, rows, strict=True)
            }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="must hold the experts of a layer together"):
        drot.load(source, device="cpu")
    text = save_small_model(small_model("qwen3_moe"), tmp_path / "text")
    hold_experts_together(text, small_model("qwen3_moe"), swapped=True)
    with pytest.raises(UserError, match=r"gate_up_proj must be \[4, 48, 32\] by the model's config"):
        drot.load(text, device="cpu")


@pytest.mark.parametrize("changed", ["half of a layer", "a layer"])
def test_files_that_mix_the_forms_of_experts_are_refused(changed, tmp_path):
    folders = [tmp_path / "apart", tmp_path / "together"]
    for folder in folders:
        save_small_model(small_model("qwen3_moe"), folder)
    hold_experts_together(folders[1], small_model("qwen3_moe"))
    apart, together = (load_file(folder / "model.safetensors") for folder in folders)
    part = "layers.1.mlp.experts." + ("gate_up_proj" if changed == "half of a layer" else "")
    taken = {name: each for name, each in together.items() if part in name}
    gone = ("gate_proj", "up_proj") if changed == "half of a layer" else ("proj",)
    left = {
        name: each
        for name, each in apart.items()
        if not ("layers.1.mlp.experts." in name and any(f"{one}." in name for one in gone))
    }
    save_file(left | taken, folders[0] / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="must hold the experts of a layer together, or each by itself"):
        drot.load(folders[0], device="cpu")


def test_a_saved_base_model_may_hold_experts_together(tmp_path):
    """Its names have no prefix."""
    model = small_model("qwen3_moe")
    folder = save_small_model(model, tmp_path / "model")
    hold_experts_together(folder, model)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    tokens = random_tokens(1, 20)
    assert relative_error(drot.load(folder, device="cpu")(tokens).logits, model(tokens).logits) < 1e-6


@pytest.mark.parametrize("format", ["dense", "packed"])
@pytest.mark.parametrize("family", ["granitemoeshared", "qwen3_moe"])
def test_zeros_are_counted_where_experts_lie_together(family, format, tmp_path):
    """transformers saves a model with R3 so, whatever form the experts had."""
    sizes = {"intermediate_size": 32, "shared_intermediate_size": 48} if "granite" in family else {}
    source = save_small_model(
        small_model(family, **sizes or {"moe_intermediate_size": 16}), tmp_path / "dense"
    )
    keep = ("*.self_attn.*",) if family == "qwen3_moe" else ("*.experts.2.*", "*.self_attn.*")
    chosen = one_shot("layer", keep=keep)
    before = prune(source, chosen, out=tmp_path / "out", format=format).manifest
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if format == "packed":
        model.dequantize()
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        weight[0, :2] = 0
    model.save_pretrained(tmp_path / "saved")
    after = read_manifest(tmp_path / "saved")
    for index, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
        for role, linear in old.linears.items():
            more = 2 / weight.numel() if (index, role) == (1, "q_proj") else 0
            assert new.linears[role].sparsity == pytest.approx(linear.sparsity + more)


@pytest.mark.parametrize("boundary", ["input", "residual"])
def test_images_behind_layers_come_in_the_basis_of_their_place(boundary, tmp_path):
    source, inputs = save_small_multimodal(tmp_path / "source", "qwen3_vl"), image_and_text("qwen3_vl")
    prune(source, one_shot(boundary=boundary, **NOTHING), out=tmp_path / "out")
    assert relative_error(logits(tmp_path / "out", inputs), logits(source, inputs)) < 1e-5


@pytest.mark.parametrize("model_type", KINDS)
def test_pruned_and_packed(model_type, tmp_path):
    """The dense and the packed checkpoint compute the same behind an image; half of the weights are zero."""
    source, inputs = save_small_multimodal(tmp_path / "source", model_type), image_and_text(model_type)
    result = prune(source, one_shot("layer", **rotations_of(model_type)), out=tmp_path / "dense")
    assert result.manifest.sparsity == pytest.approx(0.5, abs=0.01)
    assert sum(float((each == 0).sum()) for each in saved_tensors(tmp_path / "dense").values()) > 0
    convert(tmp_path / "dense", tmp_path / "packed", "packed")
    convert(tmp_path / "packed", tmp_path / "again", "dense")
    packed = opened(tmp_path / "packed")
    assert relative_error(packed(inputs), logits(tmp_path / "dense", inputs)) < 1e-5
    assert raw(tmp_path / "again") == raw(tmp_path / "dense")
    tokens = random_tokens(1, 20, vocab=90)
    loaded = [drot.load(tmp_path / name, device="cpu")(tokens).logits for name in ("dense", "packed")]
    assert relative_error(*loaded) < 1e-5
    assert relative_error(packed({"input_ids": tokens}), loaded[0]) < 1e-5
    card = (tmp_path / "packed" / "README.md").read_text()
    assert "from transformers import AutoModelForImageTextToText, AutoProcessor\n" in card
    assert "pipeline_tag: image-text-to-text\n" in card and "AutoModelForCausalLM" not in card


@pytest.mark.skipif("apertus1p5" not in AVAILABLE, reason="needs a newer transformers")
def test_a_model_may_read_tokens_that_it_does_not_predict(tmp_path):
    """Those of images have no row in the head of Apertus 1.5."""
    source = save_small_multimodal(tmp_path / "source", "apertus1p5", output_vocab_size=90)
    tokens, inputs = TOKENS % 90, image_and_text("apertus1p5")
    chosen = one_shot("layer", **rotations_of("apertus1p5"), **NOTHING)
    prune(source, chosen, out=tmp_path / "out", calibration=tokens)
    assert relative_error(logits(tmp_path / "out", inputs), logits(source, inputs)) < 1e-5
    before, after = (
        perplexity(drot.load(folder), tokens.flatten(), seqlen=40) for folder in (source, tmp_path / "out")
    )
    assert after == pytest.approx(before, rel=1e-5)
    with pytest.raises(UserError, match=r"must be in \[0, 90\), the model's vocabulary, got 0 to 95"):
        prune(source, chosen, out=tmp_path / "other", calibration=TOKENS)
    with pytest.raises(UserError, match="must be below 90, the model's vocabulary; got 95"):
        perplexity(drot.load(source), TOKENS.flatten(), seqlen=40)


def test_a_class_for_text_alone_is_refused(tmp_path):
    """transformers takes the language model of some types alone, by other names than those of the files."""
    source = save_small_multimodal(tmp_path / "source", "qwen3_5")
    prune(source, one_shot("layer"), out=tmp_path / "out")
    for opening in (AutoModelForCausalLM, Qwen3_5ForCausalLM):
        with pytest.raises(UserError, match="use AutoModelForImageTextToText, or drot.load"):
            opening.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("model_type", ["llava", "smolvlm"])
def test_a_saved_base_model_is_read(model_type, tmp_path):
    """Its names begin with `language_model.` or `text_model.`, and its head is tied."""
    source = save_small_multimodal(tmp_path / "source", model_type, tie_word_embeddings=True)
    base, inputs = tmp_path / "base", image_and_text(model_type)
    shutil.copytree(source, base)
    AutoModelForImageTextToText.from_pretrained(source).model.save_pretrained(base)
    prune(base, one_shot("shared", **NOTHING), out=tmp_path / "out")
    assert relative_error(logits(tmp_path / "out", inputs), logits(source, inputs)) < 1e-5


def test_what_is_copied_is_not_told_as_rounded(tmp_path, caplog):
    source = save_small_multimodal(tmp_path / "source", "mistral3")
    tensors = load_file(source / "model.safetensors")
    tensors = {name: each if "vision" in name else each.bfloat16() for name, each in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    change_json(source / "config.json", dtype="bfloat16")
    prune(source, one_shot("none"), out=tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "packed", "packed")
    assert not [line for line in caplog.messages if "rounded" in line]
    kept = next(name for name in tensors if "vision" in name)
    assert saved_tensors(tmp_path / "packed")[kept].dtype == torch.float32


def test_tensors_for_multi_token_prediction_are_left_out(tmp_path, caplog):
    """They read the embedding and the stream, which R1 rotates. Qwen3.5 is published with them."""
    model_type = "qwen3_5"
    source = save_small_multimodal(tmp_path / "source", model_type, mtp_num_hidden_layers=1)
    held = load_file(source / "model.safetensors")
    more = {"mtp.fc.weight": torch.ones(32, 64), "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 32)}
    save_file(held | more, source / "model.safetensors", {"format": "pt"})
    prune(source, one_shot("shared", **NOTHING), out=tmp_path / "out")
    assert "holds 2 tensors for multi-token prediction" in caplog.text
    # the head, which R1 makes another matrix than the embedding
    assert saved_tensors(tmp_path / "out").keys() == held.keys() | {"lm_head.weight"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 0
    inputs = image_and_text(model_type)
    (source / "model.safetensors").unlink()
    save_file(held, source / "model.safetensors", {"format": "pt"})
    assert relative_error(logits(tmp_path / "out", inputs), logits(source, inputs)) < 1e-5


def test_bfloat16_is_kept_byte_for_byte(tmp_path):
    """Computed in fp32, saved in bf16: a NaN of the vision tower, which no product would keep, stays too."""
    source = save_small_multimodal(tmp_path / "source", "gemma3")
    tensors = {name: each.bfloat16() for name, each in load_file(source / "model.safetensors").items()}
    name = next(name for name in tensors if "vision" in name)
    tensors[name].view(-1)[0] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    change_json(source / "config.json", dtype="bfloat16")
    result = prune(source, one_shot("shared"), out=tmp_path / "out")
    before, after = raw(source), raw(tmp_path / "out")
    assert result.manifest.dtype == "bfloat16" and before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} and not [
        name for name in beside(before) if before[name] != after[name]
    ]


def test_a_projector_that_nothing_rotates_is_never_read(tmp_path):
    """Computed in fp32 and saved in bf16, as a model in bf16 is on a CPU."""
    source = save_small_multimodal(tmp_path / "source", "mistral3")
    prune(source, one_shot("none"), out=tmp_path / "out", save_dtype="bfloat16")
    before, after = raw(source), raw(tmp_path / "out")
    assert all(before[name] == after[name] for name in beside(before))
    assert {str(dtype) for name, (dtype, _, _) in after.items() if name not in beside(after)} == {
        "torch.bfloat16"
    }


def test_old_names_and_shards_are_read(tmp_path):
    """Files of other versions of transformers: the same model under other names gives the same bytes."""
    source = save_small_multimodal(tmp_path / "source", "mistral3")
    held = load_file(source / "model.safetensors")
    if any(name.startswith("model.language_model.model.") for name in held):
        pytest.skip("the installed transformers, as 5.4, has a naming of its own")
    old = any(name.startswith("language_model.") for name in held)
    renamed = {}
    for name, tensor in held.items():
        if old and name.startswith("language_model.model."):
            name = "model.language_model." + name.removeprefix("language_model.model.")
        elif old and name.startswith("language_model."):
            name = name.removeprefix("language_model.")
        elif old:
            name = f"model.{name}"
        renamed[name] = tensor
    assert renamed.keys() != held.keys()
    other = save_small_multimodal(tmp_path / "other", "mistral3")
    (other / "model.safetensors").unlink()
    names, weight_map = sorted(renamed), {}
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file(
            {name: renamed[name] for name in chosen}, other / f"model-{part}.safetensors", {"format": "pt"}
        )
        weight_map |= dict.fromkeys(chosen, f"model-{part}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    inputs = image_and_text("mistral3")
    for folder in (source, other):
        prune(folder, one_shot("shared"), out=tmp_path / f"{folder.name}-pruned")
    first, second = (logits(tmp_path / f"{folder.name}-pruned", inputs) for folder in (source, other))
    assert torch.equal(first, second)
    assert saved_tensors(tmp_path / "other-pruned").keys() >= renamed.keys() - {"lm_head.weight"}


def test_a_run_is_resumed_to_the_same_bytes(tmp_path):
    source = save_small_multimodal(tmp_path / "source", "mistral3")
    prune(source, out=tmp_path / "whole")
    interrupted(source, out=tmp_path / "out")
    prune(source, out=tmp_path / "out", resume=True)
    assert saved_bytes(tmp_path / "out") == saved_bytes(tmp_path / "whole")
    assert prune(source, out=tmp_path / "out", resume=True).finished_before


def test_the_commands(tmp_path, capsys):
    """prune, info, eval, convert and chat's loader know the checkpoint; finetune and export refuse it."""
    source, out, text = (
        save_small_multimodal(tmp_path / "source", "mistral3"),
        tmp_path / "out",
        tmp_path / "text.txt",
    )
    text.write_text(random_text(2000))
    quick = ["--quality", "fast", "--steps", "2", "--seqlen", "40", "--nsamples", "4", "--device", "cpu"]
    command = ["prune", str(source), "--out", str(out), "--calibration", str(text), *quick]
    assert cli.run([*command, "--dry-run"]) == 0 and not out.exists()
    assert cli.run(command) == 0
    capsys.readouterr()
    assert cli.run(["info", str(source)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "model type mistral3 language model of type ministral3; the rest is kept as it is" in shown
    assert "supported yes" in shown
    assert cli.run(["info", str(out)]) == 0 and cli.run(["info", str(out), "--verify"]) == 0
    evaluate = ["--ppl", str(text), "--seqlen", "40", "--device", "cpu", "--json"]
    capsys.readouterr()
    assert cli.run(["eval", str(out), *evaluate, "--against", str(source)]) == 0
    assert "perplexity" in capsys.readouterr().out
    for refused in (["finetune", str(out), "--out"], ["export", str(out), "--out"]):
        assert cli.run([*refused, str(tmp_path / "none")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is a model that reads images too" in line and not (tmp_path / "none").exists()


def test_what_cannot_be_had_is_refused(tmp_path):
    source, out = save_small_multimodal(tmp_path / "source", "mistral3"), tmp_path / "out"
    prune(source, one_shot("layer"), out=out)
    opened = AutoModelForImageTextToText.from_pretrained(out)
    with pytest.raises(UserError, match="saves no loaded model that reads images too"):
        opened.save_pretrained(tmp_path / "saved")
    tensors = load_file(source / "model.safetensors")
    left = {name: each for name, each in tensors.items() if "linear_2" not in name}
    save_file(left, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="writes images into the residual stream, got 0"):
        prune(source, one_shot("shared"), out=tmp_path / "none")
    save_file({"a": torch.ones(1)}, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lack embed_tokens.weight of the language model"):
        prune(source, one_shot("shared"), out=tmp_path / "none")
    change_json(source / "config.json", text_config={"hidden_size": 0})
    with pytest.raises(UserError, match="text_config.*hidden_size"):
        load_config(source)


def test_a_model_of_text_that_transformers_opens_only_with_images(tmp_path):
    """AutoModelForCausalLM does not know the language model of Mistral Small 4 by itself."""
    source = save_small_model(small_model("mistral4", moe_intermediate_size=48), tmp_path / "source")
    for mode in ("layer", "shared"):
        prune(source, one_shot(mode), out=tmp_path / mode)
        tokens = random_tokens(1, 20)
        found = AutoModelForCausalLM.from_pretrained(tmp_path / mode)(tokens).logits
        assert torch.equal(found, drot.load(tmp_path / mode, device="cpu")(tokens).logits)


def test_entries_that_glm_4_would_have_other_defaults_for():
    config = small_multimodal("glm4v").config
    for entry in ("head_dim", "partial_rotary_factor"):
        vars(config.text_config).pop(entry, None)
        config.text_config.rope_parameters.pop(entry, None)
    found = language_config(config)
    assert found.head_dim == 32 // 4 and found.rope_parameters["partial_rotary_factor"] == 1.0
