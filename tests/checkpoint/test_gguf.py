"""GGUF files: transformers makes their weights dense, and drot prunes them as those of any model."""

import json
import sys

import pytest
from runs import one_shot, prune
from small_models import random_text, random_tokens, relative_error, small_model

import drot
from drot.checkpoint.manifest import read_manifest
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.pipeline.dry_run import run_needs

pytestmark = pytest.mark.slow

#: name in a GGUF file → path in a decoder layer
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def save_gguf(file):
    """Writes a random Qwen2 in fp32, with a tokenizer of single characters, and returns it."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model = small_model("qwen2", tie_word_embeddings=False)
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["Ġ", *(chr(32 + i) for i in range(1, 95)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(94)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for index in range(config.num_hidden_layers):
        names |= {f"blk.{index}.{name}": f"model.layers.{index}.{path}" for name, path in LAYER.items()}
    own = {path: name for name, path in names.items()}
    for name, tensor in state.items():
        path, _, kind = name.rpartition(".")
        writer.add_tensor(f"{own[path]}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_a_gguf_file_is_the_model_that_it_was_made_from(tmp_path):
    """drot.load computes what the model computed, and a run gives what a run on the model gives."""
    file, tokens = tmp_path / "small.gguf", random_tokens(2, 30)
    model = save_gguf(file)
    expected = model(tokens).logits
    assert relative_error(drot.load(file, device="cpu")(tokens).logits, expected) < 1e-6
    loaded = drot.load(file, device="cpu")
    assert prune(loaded, one_shot("shared")).manifest.sparsity == 0.5  # its weights are dense
    result = prune(file, one_shot("shared"), out=tmp_path / "out")
    assert read_manifest(tmp_path / "out").base_model == str(file)
    other = prune(model, one_shot("shared"))
    assert result.manifest.sparsity == other.manifest.sparsity == 0.5
    pruned = drot.load(tmp_path / "out", device="cpu")
    assert relative_error(pruned(tokens).logits, other.model(tokens).logits) < 1e-5


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_dry_run_counts_all_layers_in_memory(dtype, size, tmp_path):
    """A folder with the same weights is read layer by layer."""
    model, chosen = save_gguf(tmp_path / "small.gguf"), one_shot("none", method="magnitude")
    model.save_pretrained(tmp_path / "folder")
    of_gguf, of_folder = (
        run_needs(tmp_path / name, chosen, device="cpu", dtype=dtype) for name in ("small.gguf", "folder")
    )
    weights = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    outside = weights - 3 * layer
    assert of_folder.states == 0 and of_folder.main_memory == size * max(layer, outside)
    assert of_gguf.main_memory == 4 * weights  # transformers makes them fp32 before they are cast
    assert of_gguf.device_memory == of_folder.device_memory


def test_the_option_of_prune(tmp_path, capsys):
    """With --gguf-file the command runs, resumes, evaluates against the file and is repeated; without, it
    says how to name the file."""
    folder, out, text = tmp_path / "model", tmp_path / "out", tmp_path / "text.txt"
    folder.mkdir()
    save_gguf(folder / "small.gguf")
    text.write_text(random_text(2000))
    quick = ["--quality", "fast", "--steps", "2", "--seqlen", "40", "--nsamples", "4", "--device", "cpu"]
    command = ["prune", str(folder), "--out", str(out), "--calibration", str(text), *quick]
    assert cli.run(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"add --gguf-file small.gguf to drot prune, or name {folder}/small.gguf" in line
    assert cli.run([*command, "--gguf-file", "other.gguf"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    named = [*command, "--gguf-file", "small.gguf"]
    assert cli.run([*named, "--dry-run"]) == 0
    assert cli.run(named) == 0 and cli.run([*named, "--resume"]) == 0
    assert json.loads((out / "drot.json").read_text())["base_model"] == f"{folder}/small.gguf"
    again = ["prune", "--recipe", str(out), "--out", str(tmp_path / "again"), "--device", "cpu"]
    assert cli.run(again) == 0
    assert (out / "model-00001-of-00004.safetensors").read_bytes() == (
        tmp_path / "again" / "model-00001-of-00004.safetensors"
    ).read_bytes()
    evaluate = ["--ppl", str(text), "--seqlen", "40", "--device", "cpu"]
    assert cli.run(["eval", str(out), *evaluate, "--against", f"{folder}/small.gguf"]) == 0
    capsys.readouterr()
    assert cli.run(["info", f"{folder}/small.gguf"]) == 0
    assert "supported yes, like Qwen2" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="cannot read layer by layer"):
        drot.export_artifact(out, tmp_path / "artifact")


def test_without_its_packages_and_damaged(tmp_path, monkeypatch):
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "gguf", None)
        with pytest.raises(UserError, match=r"small\.gguf is a GGUF file: pip install .*gguf"):
            drot.load(file)
    pytest.importorskip("gguf")
    with pytest.raises(UserError, match="cannot load a causal language model"):
        drot.load(file)
