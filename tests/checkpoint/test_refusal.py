"""A checkpoint that needs drot is opened right or not at all: without drot, damaged, and in training."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
import torch
from runs import prune, recipe
from safetensors.torch import load_file, save_file
from small_models import random_tokens, small_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

import drot
from drot.checkpoint.hf_model import DrotModel, as_drot_model
from drot.cli import app as cli
from drot.config import BoundaryPlace
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.model.rotation import Bases, Boundary
from drot.reporting.demo import HELD_OUT, MODEL
from drot.sparse.fused import fuse
from drot.sparse.linear import is_packed
from drot.sparse.packed import pack_model

TOKENS = random_tokens(2, 12)
ROTATION, R3 = "model.layers.1.residual_rotation.weight", "model.layers.1.mlp.down_rotation.weight"


def orthogonal(*size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(*size, size[-1], dtype=torch.float64))[0]


@torch.no_grad()
def a_model(kind: str, family: str = "llama", place: BoundaryPlace = "input", **options):
    """A small model: rotated, packed, with R3 as `down`, several of them as `rotated packed`, or stock."""
    model = small_model(family, **options)
    layers = DecoderModel(model).layers
    if "rotated" in kind:
        for layer in layers:
            if Bases(place, len(layers)).holds(layer.index):
                layer.hold(Boundary(place, orthogonal(32), orthogonal(32)))
    if "down" in kind:
        for layer in layers:
            (r3,) = layer.expect_down_rotation(16)
            r3.weight.copy_(orthogonal(3, 16))
    if "packed" in kind:
        for layer in layers:
            for linear in layer.linears.values():
                linear.weight.mul_(torch.tensor([1, 0, 0, 1]).repeat(linear.weight.shape[1] // 4))
        pack_model(model)
    as_drot_model(model)
    return model


KINDS = ["rotated", "down", "packed", "rotated packed", "rotated down packed"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind → the folder and the logits of a model. Tests must not change them."""
    torch.manual_seed(0)
    made = {}
    for kind in [*KINDS, "stock"]:
        model, folder = a_model(kind), tmp_path_factory.mktemp(kind.replace(" ", "-"))
        model.save_pretrained(folder)
        made[kind] = folder, model(TOKENS).logits
    return made


@pytest.fixture(params=KINDS)
def checkpoint(request, folders, tmp_path):
    """A folder that a test may change, and the logits of its model."""
    folder, logits = folders[request.param]
    copied = tmp_path / "checkpoint"
    copied.mkdir()
    for file in folder.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied, logits


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def rewrite(folder, change):
    """Applies `change` to the dict of tensors of a checkpoint, and writes the tensors back."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# ---- without drot ------------------------------------------------------------------------------------

WITHOUT_DROT = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel, pipeline

def as_pipeline(folder):
    return pipeline("text-generation", model=folder)

openings = [
    AutoConfig.from_pretrained, AutoModel.from_pretrained, AutoModelForCausalLM.from_pretrained,
    LlamaModel.from_pretrained, LlamaForCausalLM.from_pretrained, as_pipeline,
]
for folder in sys.argv[4:]:
    for opening in openings:
        try:
            opening(folder)
        except ValueError as error:
            assert "model type `drot`" in str(error) or "import drot and open it with" in str(error), error
        else:
            raise AssertionError(f"{opening} opened {folder}")
for opening in openings[:-1]:  # the last needs a tokenizer
    opening(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
torch.save(model(torch.load(sys.argv[3])).logits.detach(), sys.argv[3])
assert "drot" not in sys.modules
print("stock opens, the rest does not")

import drot
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
print(all("drot" in m for m in (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING, CONFIG_MAPPING)))
"""


@pytest.mark.slow
def test_transformers_without_drot_opens_stock_models_alone(folders, tmp_path):
    """One process, since it takes seconds to import transformers.

    A model pruned with a shared rotation computes the same logits there. Afterwards `import drot` registers
    drot's classes with the transformers that is there.
    """
    result = prune(small_model("qwen2"), recipe("shared"), out=tmp_path / "out")
    assert result.manifest.stock_architecture
    assert "quantization_config" not in config_of(tmp_path / "out")
    tokens, file = random_tokens(2, 30, seed=5), tmp_path / "tokens.pt"
    torch.save(tokens, file)
    stock, *others = (str(folders[kind][0]) for kind in ("stock", "rotated", "rotated down packed"))
    command = [sys.executable, "-P", "-c", WITHOUT_DROT, stock, str(tmp_path / "out"), str(file), *others]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "stock opens, the rest does not\nTrue\n", done.stderr
    assert torch.equal(torch.load(file), result.model(tokens).logits)


def test_engines_find_no_family_of_theirs(checkpoint):
    """Engines and converters choose their code by these two entries, some by a part of their values."""
    config = config_of(checkpoint[0])
    assert (config["model_type"], config["architectures"]) == ("drot", ["DrotForCausalLM"])
    names = AutoModelForCausalLM._model_mapping._model_mapping
    assert "drot" not in names and "DrotForCausalLM" not in names.values()


@pytest.mark.parametrize("place", ["input", "residual"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_of_the_family_lacks_tensors(kind, family, place):
    """A program that reads no config.json takes the tensors by the family's names."""
    stored, names = a_model(kind, family, place).state_dict().keys(), small_model(family).state_dict().keys()
    lacking = {name.split(".")[2] for name in names - stored if ".layers." in name}
    assert lacking == {"rotated": {"0", "1"} if place == "residual" else {"1", "2"}}.get(
        kind, {"0", "1", "2"}
    )


def test_a_stock_checkpoint_stays_stock(folders, tmp_path):
    folder, _ = folders["stock"]
    small_model("llama").save_pretrained(tmp_path)
    assert (folder / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()
    assert config_of(folder)["model_type"] == "llama"


# ---- with drot ---------------------------------------------------------------------------------------


def opens_right(folder, logits):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM) and type(model.config) is LlamaConfig
    assert isinstance(model, DrotModel) and type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.model_type, model.config.architectures) == ("llama", ["LlamaForCausalLM"])
    torch.testing.assert_close(model(TOKENS).logits, logits)
    torch.testing.assert_close(drot.load(folder, device="cpu")(TOKENS).logits, logits)
    return model


def test_round_trip(checkpoint, tmp_path):
    folder, logits = checkpoint
    model = opens_right(folder, logits)
    model.save_pretrained(tmp_path / "again")
    assert config_of(folder) == config_of(tmp_path / "again")
    opens_right(tmp_path / "again", logits)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.save_pretrained(tmp_path / "twin")
        opens_right(tmp_path / "twin", logits)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "phi3"])
@pytest.mark.parametrize("place", ["input", "residual"])
def test_every_family(family, place, tmp_path):
    model = a_model("rotated down packed", family, place)
    model.save_pretrained(tmp_path)
    assert config_of(tmp_path)["base_model_type"] == family
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.config.model_type == family
    torch.testing.assert_close(opened(TOKENS).logits, model(TOKENS).logits)


def test_a_family_class_names_what_to_do(checkpoint):
    with pytest.raises(
        ValueError, match=r"import drot and open it with AutoModelForCausalLM\.from_pretrained"
    ):
        LlamaForCausalLM.from_pretrained(checkpoint[0])


def test_the_tokenizer_is_that_of_the_family(checkpoint):
    """transformers chooses the tokenizer's class by `model_type` too."""
    folder, _ = checkpoint
    for file in MODEL.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    ours, stock = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(MODEL)
    text = HELD_OUT.read_text(encoding="utf-8")[:500]
    assert type(ours) is type(stock) and ours(text)["input_ids"] == stock(text)["input_ids"]


@pytest.mark.parametrize("family", [None, "gpt2", 3, ["llama"]])
def test_an_unknown_family(family, checkpoint):
    folder, _ = checkpoint
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"base_model_type": family}))
    with pytest.raises(UserError, match="config.json: base_model_type must be one of llama, .* got"):
        AutoConfig.from_pretrained(folder)


# ---- damaged -----------------------------------------------------------------------------------------


def refusal(folder):
    with pytest.raises(UserError) as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda q: q.mul_(1.05),
        lambda q: q[..., 3, :].zero_(),
        lambda q: q.copy_(torch.eye(q.shape[-1]) + 0.1),
        lambda q: q[..., 5, 7].fill_(torch.nan),
        lambda q: q[..., 5, 7].fill_(torch.inf),
    ],
    ids=["scaled", "row", "other", "nan", "inf"],
)
@pytest.mark.parametrize(("name", "dtype"), [(ROTATION, torch.float32), (R3, torch.bfloat16)], ids=str)
def test_a_damaged_rotation_is_named(name, damage, dtype, tmp_path):
    a_model("rotated down", dtype=dtype).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: damage(tensors[name]))
    assert refusal(tmp_path).startswith(f"{name} must be orthogonal, got ‖QᵀQx - x‖ / ‖x‖ = ")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (8, r"model\.layers\.0\.mlp\.down_rotation\.weight must be \[6, 8, 8\] .* got \[3, 16, 16\]"),
        (7, r"`down_rotation` must divide the intermediate size 48; got 7: use 6 or 8"),
        (1, r"config\.json: quantization_config: down_rotation: .* got 1"),
        (True, r"config\.json: quantization_config: down_rotation: .* got True"),
        (None, r"layers\.0\.post_attention_layernorm\.weight is missing from the checkpoint"),
    ],
)
def test_another_size_of_the_blocks_of_r3_is_named(value, message, tmp_path):
    """None leaves the entry out: the file of the weights then lacks the norms."""
    a_model("rotated down").save_pretrained(tmp_path)
    config = config_of(tmp_path)
    config["quantization_config"]["down_rotation"] = value
    if value is None:
        del config["quantization_config"]["down_rotation"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        drot.load(tmp_path, device="cpu")


def test_a_rotation_of_another_shape_is_named(tmp_path):
    a_model("rotated").save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({ROTATION: torch.eye(31)}))
    assert refusal(tmp_path).startswith(f"{ROTATION} must be [32, 32] by the model's config, got [31, 31]")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("opened", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_tolerance_fits_the_dtype_of_the_file(stored, opened, tmp_path):
    """A rotation that was rounded to bf16 is no more orthogonal when it is opened in fp32."""
    a_model("rotated down", dtype=stored).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=opened)


@pytest.mark.parametrize("size", [2, 16, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_stays_far_below_the_tolerance(size, dtype):
    """Against the full product in fp64, whose spectral norm bounds every probe."""
    from drot.model.boundary import orthogonality_tolerance

    q = orthogonal(size).to(dtype)
    deviation = q.double().T @ q.double() - torch.eye(size, dtype=torch.float64)
    assert float(torch.linalg.matrix_norm(deviation, 2)) < 0.8 * orthogonality_tolerance(q)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_packed_value_that_is_not_finite_is_named(value, tmp_path):
    a_model("packed").save_pretrained(tmp_path)
    name = "model.layers.2.mlp.down_proj.values"
    rewrite(tmp_path, lambda tensors: tensors[name][3, 4].fill_(value))
    assert refusal(tmp_path).startswith(f"{name} must be finite, got NaN or infinity")


# ---- dense again, and training -----------------------------------------------------------------------


def test_dequantize_of_a_rotated_dense_model_changes_nothing(folders, tmp_path):
    folder, logits = folders["rotated"]
    model = AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        assert model.dequantize() is model
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == torch.bfloat16 and model.hf_quantizer.is_trainable
    model = AutoModelForCausalLM.from_pretrained(folder).dequantize()
    model.save_pretrained(tmp_path)
    opens_right(tmp_path, logits)


@pytest.mark.parametrize("opening", [AutoModelForCausalLM.from_pretrained, drot.load])
def test_dequantize_keeps_the_rotations_of_a_packed_model(opening, folders, tmp_path):
    folder, logits = folders["rotated down packed"]
    opening(folder).dequantize().save_pretrained(tmp_path)
    assert not is_packed(opens_right(tmp_path, logits))


def test_dequantize_makes_a_packed_model_stock(folders, tmp_path):
    folder, logits = folders["packed"]
    AutoModelForCausalLM.from_pretrained(folder).dequantize().save_pretrained(tmp_path)
    assert config_of(tmp_path)["model_type"] == "llama" and "transformers_weights" not in config_of(tmp_path)
    torch.testing.assert_close(LlamaForCausalLM.from_pretrained(tmp_path)(TOKENS).logits, logits)


@pytest.mark.parametrize("kind", ["packed", "rotated packed", "rotated down packed"])
def test_training_of_a_packed_model_names_dequantize(kind, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Trainer makes a folder there
    model = AutoModelForCausalLM.from_pretrained(folders[kind][0])
    fuse(model)  # as drot.load does
    message = r"packed weights cannot be trained: call dequantize\(\) of the model first"
    before = [module.training for module in model.modules()]
    with pytest.raises(UserError, match=message):
        model.train()
    assert [module.training for module in model.modules()] == before
    pytest.importorskip("accelerate")  # which Trainer needs
    with pytest.raises(UserError, match=message):
        Trainer(model=model)
    model.dequantize().train()
    Trainer(model=model)
    model(TOKENS, labels=TOKENS).loss.backward()
    for linear in DecoderModel(model).layers[0].linears.values():
        assert float(linear.weight.grad.abs().sum()) > 0
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert not [name for name in trained if name.endswith("_rotation.weight")]


def test_peft(folders):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    packed = AutoModelForCausalLM.from_pretrained(folders["packed"][0])
    with pytest.raises(ValueError, match=r"to train: dequantize\(\)"):
        peft.get_peft_model(packed, settings)
    folder, logits = folders["down"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    # without target_modules, peft looks up the family's
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=True))
    torch.testing.assert_close(adapted(TOKENS).logits, logits)
    adapted.train()(TOKENS, labels=TOKENS).loss.backward()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.grad is not None]
    assert trained and all("lora" in name for name in trained)


# ---- a loss that is not finite -----------------------------------------------------------------------


@pytest.mark.slow
def test_eval_of_a_model_without_a_finite_loss_fails(tmp_path, capsys):
    model = drot.load(MODEL, device="cpu")
    model.model.norm.weight[0] = 1e38  # finite, as a checkpoint's weights must be; the logits overflow
    model.lm_head.weight.mul_(1e3)
    model.save_pretrained(tmp_path)
    for file in MODEL.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = tmp_path / "text.txt"
    text.write_text(HELD_OUT.read_text(encoding="utf-8")[:2000], encoding="utf-8")
    for options in ([], ["--json"]):
        command = ["eval", str(tmp_path), "--ppl", str(text), "--seqlen", "64", "--device", "cpu", *options]
        assert cli.run(command) == 1
        captured = capsys.readouterr()
        message = captured.err.splitlines()[-1]  # behind the lines of the progress
        assert captured.out == "" and message.startswith(f"drot: {tmp_path}: the model's loss on the text is")
