"""A skeleton whose weights are read from files, against the model that transformers loads."""

import copy

import pytest
import torch
from runs import prune, recipe, saved_bytes
from safetensors.torch import load_file, save_file
from small_checkpoints import change_json
from small_models import FAMILIES, random_text, save_small_model, small_model
from transformers import AutoModelForCausalLM

from drot.checkpoint.load import load_model
from drot.checkpoint.offload import DiskWeights, open_skeleton
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel

pytestmark = pytest.mark.slow


def read(folder, dtype="auto"):
    """The skeleton of a model, and its state dict as it is read."""
    skeleton, weights, _ = open_skeleton(folder, dtype)
    parts = DecoderModel(skeleton, weights=weights).parts_of_state()
    return skeleton, {name: tensor.clone() for part in parts for name, tensor in part.items()}


def assert_as_loaded(folder, dtype="auto"):
    loaded = load_model(folder, dtype)
    skeleton, found = read(folder, dtype)
    expected = loaded.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    tied, expected_tied = (
        model.lm_head.weight is model.get_input_embeddings().weight for model in (skeleton, loaded)
    )
    assert tied == expected_tied
    return loaded, skeleton


def replace_tensors(folder, change):
    """Writes `change` of the tensors of a small model in place of them."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, "auto") for family in FAMILIES), ("glm4_moe", "float32"), ("deepseek_v32", "float16")],
)
def test_a_skeleton_reads_what_transformers_loads(family, dtype, tmp_path):
    """Weights, buffers that no file holds, and the configs."""
    folder = save_small_model(small_model(family, dtype=torch.bfloat16), tmp_path)
    loaded, skeleton = assert_as_loaded(folder, dtype)
    assert all(parameter.is_meta for parameter in skeleton.parameters())
    buffers, stored = dict(skeleton.named_buffers()), loaded.state_dict().keys()
    assert buffers.keys() == dict(loaded.named_buffers()).keys()
    for name, buffer in loaded.named_buffers():
        if name in stored:
            assert buffers[name].is_meta  # it is read with its layer
            continue
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name
    assert skeleton.config.to_dict() == loaded.config.to_dict()
    assert skeleton.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert type(skeleton) is type(loaded) and not skeleton.training


def test_a_dense_layer_of_kimi_has_its_published_names(tmp_path):
    """transformers writes it as it writes experts."""
    folder = save_small_model(
        small_model("kimi_linear", mlp_layer_types=["dense", "sparse", "sparse"]), tmp_path
    )
    written, published = ("layers.0.block_sparse_moe.", "layers.0.mlp.")
    replace_tensors(folder, lambda old: {name.replace(written, published): old[name] for name in old})
    assert_as_loaded(folder)


def test_several_files(tmp_path):
    small_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_as_loaded(tmp_path)


def test_a_layer_is_dropped_and_read_again(tmp_path):
    skeleton, weights, _ = open_skeleton(save_small_model(small_model("qwen3_moe"), tmp_path))
    layer = DecoderModel(skeleton, weights=weights).layers[1]
    seen = []
    for _ in range(2):
        layer.to(torch.device("cpu"))
        seen.append(copy.deepcopy(layer.module.state_dict()))
        layer.to(torch.device("meta"))
        assert all(parameter.is_meta for parameter in layer.module.parameters())
    assert all(torch.equal(tensor, seen[1][name]) for name, tensor in seen[0].items())


def test_a_base_model_has_names_without_prefix(tmp_path):
    folder = save_small_model(small_model("llama"), tmp_path)
    replace_tensors(folder, lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()})
    assert_as_loaded(folder)


@pytest.mark.parametrize("same", [True, False])
def test_a_head_next_to_a_tied_embedding(tmp_path, same):
    folder = save_small_model(small_model("llama"), tmp_path)
    head = lambda tensors: tensors["model.embed_tokens.weight"] * (1 if same else 2)  # noqa: E731
    replace_tensors(folder, lambda tensors: tensors | {"lm_head.weight": head(tensors)})
    _, skeleton = assert_as_loaded(folder)
    assert (skeleton.lm_head.weight is skeleton.model.embed_tokens.weight) == same


def test_a_config_without_dtype(tmp_path):
    folder = save_small_model(small_model("llama", dtype=torch.bfloat16), tmp_path)
    change_json(folder / "config.json", dtype=None)
    (folder / "generation_config.json").unlink()
    loaded, skeleton = assert_as_loaded(folder)
    assert skeleton.generation_config.to_dict() == loaded.generation_config.to_dict()
    assert open_skeleton(folder)[2] == torch.bfloat16


def test_a_missing_head_is_refused(tmp_path):
    folder = save_small_model(small_model("mistral"), tmp_path)
    replace_tensors(folder, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    with pytest.raises(UserError, match=r"lacks 1 tensor .* the first is lm_head\.weight"):
        open_skeleton(folder)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_not_finite_is_refused_when_it_is_read(tmp_path, name):
    folder = save_small_model(small_model("llama"), tmp_path)
    replace_tensors(folder, lambda tensors: tensors | {name: tensors[name].clone().fill_(float("nan"))})
    with pytest.raises(UserError, match=f"{name} must hold finite numbers"):
        read(folder)


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path):
    folder, name = save_small_model(small_model("llama"), tmp_path), "model.norm.weight"
    replace_tensors(folder, lambda tensors: tensors | {name: tensors[name] + 1e6})
    read(folder)
    with pytest.raises(UserError, match='another `dtype` than "float16"'):
        read(folder, "float16")


def test_a_file_that_is_cut_off_meanwhile_is_refused(tmp_path):
    folder = save_small_model(small_model("llama"), tmp_path)
    skeleton, weights, _ = open_skeleton(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match="was changed while drot read it"):
        list(DecoderModel(skeleton, weights=weights).parts_of_state())


@pytest.fixture
def most_layers(monkeypatch):
    """How many layers were in memory at a time. Nothing may load a whole model."""
    layers, most, real = [], [0], DiskWeights.read_layer

    def read(weights, layer, device):
        layers.append(layer.module)
        real(weights, layer, device)
        held = {id(each) for each in layers if not next(each.parameters()).is_meta}
        most[0] = max(most[0], len(held))

    monkeypatch.setattr(DiskWeights, "read_layer", read)
    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **options: pytest.fail("loaded")
    )
    return most


def test_two_layers_are_in_memory(tmp_path, most_layers, capsys):
    """In the commands that make a checkpoint from another, and in a streamed evaluation of what they made."""
    dense = save_small_model(small_model("llama", num_hidden_layers=5, head_dim=16), tmp_path / "dense")
    names = ("pruned", "packed", "again.drot", "again", "text.txt")
    pruned, packed, artifact, again, text = (str(tmp_path / name) for name in names)
    prune(str(dense), recipe(mode="layer", boundary="residual"), out=tmp_path / "pruned")
    (tmp_path / "text.txt").write_text(random_text(100))
    for command in (
        ["convert", pruned, "--out", packed, "--format", "packed"],
        ["export", packed, "--out", artifact, "--model", str(dense)],
        ["apply", artifact, "--out", again, "--model", str(dense)],
        ["eval", packed, "--against", str(dense), "--ppl", text, "--seqlen", "16", "--stream"],
    ):
        most_layers[0] = 0
        assert cli.run([*command]) == 0, capsys.readouterr().err
        assert most_layers == [2], command[0]
    assert saved_bytes(tmp_path / "again") == saved_bytes(tmp_path / "packed")


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_skeleton_of_a_checkpoint_that_drot_wrote(tmp_path, format):
    """With boundary rotations and R3, and with packed weights beside dense ones."""
    chosen = recipe(mode="layer", keep=("*.o_proj",))
    prune(small_model("llama", head_dim=16), chosen, out=tmp_path / "out", format=format)
    assert_as_loaded(tmp_path / "out")


def test_packed_positions_are_checked_when_they_are_read(tmp_path):
    prune(small_model("llama", head_dim=16), recipe(mode="none"), out=tmp_path / "out", format="packed")
    (tmp_path / "out" / "drot.json").unlink()
    file, name = next((tmp_path / "out").glob("model-00002*")), "model.layers.1.mlp.up_proj.positions"
    tensors = load_file(file)
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.positions: two positions .* out of order"):
        read(tmp_path / "out")
