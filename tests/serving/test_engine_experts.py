"""What the plugins for vLLM and SGLang do without an engine: experts divided among ranks, dtypes."""

import pytest
import torch
from engines import HEADS, R3, rotated, save
from runs import saved_tensors
from small_models import small_model
from torch import nn
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.quantization_config import drot_config_of
from drot.core.errors import UserError
from drot.model.experts import ReplacedExperts
from drot.model.families import family_of
from drot.serving.engine_experts import expert_op
from drot.serving.engine_models import expect_held, graphs_hold_experts, keep_in_fp32, keep_own_share

#: name → family, its further sizes, mode, fields of the recipe, format
MIXTURES = {
    "packed": rotated("qwen3_moe"),
    "biases": rotated("gpt_oss"),
    "dense": (*rotated("mixtral")[:4], "dense"),
    "swapped": (*rotated("gpt_oss")[:4], "dense"),
    "kept": ("mixtral", HEADS, "layer", R3 | {"keep": ["layers.1.*.down_proj"]}, "packed"),
}
LAYER = 1
FOUND = {}
OP = expert_op("test", FOUND.__getitem__)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    for name, chosen in MIXTURES.items():
        save(folder / name, *chosen)
    return folder


@pytest.mark.parametrize(
    ("name", "holds"),
    [("packed", True), ("biases", False), ("dense", False), ("swapped", False), ("kept", False)],
)
def test_which_experts_a_cuda_graph_holds(checkpoints, name, holds):
    """The config of a checkpoint says what its model does. R3 of gpt-oss follows an activation of its own."""
    model = drot.load(checkpoints / name, device="cpu", dtype="bfloat16")
    experts = [module for module in model.modules() if isinstance(module, ReplacedExperts)]
    assert experts and all(not module.waits for module in experts) == holds
    assert model.hf_quantizer.is_compileable == holds
    assert graphs_hold_experts(model.config, torch.bfloat16) == holds
    assert not graphs_hold_experts(model.config, torch.float32)


def divided(config, rank, ranks):
    """The experts of LAYER on one rank, uninitialised."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expect_held(model, drot_config_of(config))
    options = dict(missing=nn.Identity, rank=rank, ranks=ranks, add=lambda output: output, op=OP)
    found = keep_own_share(model.model.layers, config, **options)
    name, experts = list(found.items())[LAYER]
    experts.key = name
    FOUND[name] = experts
    return experts


def tensors_of(checkpoint, config):
    """The tensors of the experts of LAYER by their names below the experts."""
    family = family_of(config)
    prefix = f"model.layers.{LAYER}." + family.name_in_files(f"{family.experts}.")
    found = saved_tensors(checkpoint).items()
    return {name.removeprefix(prefix): each for name, each in found if name.startswith(prefix)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_outputs_of_the_ranks_add_up(checkpoints, name, ranks):
    model = drot.load(checkpoints / name, device="cpu")
    tensors = tensors_of(checkpoints / name, model.config)
    whole, random = model.model.layers[LAYER].mlp.experts, torch.Generator().manual_seed(0)
    x = torch.randn(7, model.config.hidden_size, generator=random)
    weights, chosen = torch.rand(7, whole.num_experts, generator=random).topk(2)
    outputs = []
    for rank in range(ranks):
        experts = divided(model.config, rank, ranks)
        list(experts.load_weights(tensors.items()))
        assert sorted(experts.stored_names()) == sorted(tensors)
        experts.check_loaded()
        outputs.append(experts(x, chosen, weights))
        compiled = torch.compile(experts, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, chosen, weights), outputs[-1])
    torch.testing.assert_close(sum(outputs), whole(x, chosen, weights), atol=1e-5, rtol=1e-5)


def test_experts_that_cannot_be_divided_are_refused(checkpoints):
    config = drot.load(checkpoints / "packed", device="cpu").config
    with pytest.raises(UserError, match="cannot be divided among 3 tensor-parallel ranks"):
        divided(config, 0, 3)
    with pytest.raises(UserError, match="blocks of down_rotation, of 64 columns each, cannot be divided"):
        divided(config, 0, 4)


@pytest.mark.parametrize("tensor", ["0.gate_proj.weight", "gate_up_proj"])
def test_a_tensor_of_another_checkpoint_is_refused(checkpoints, tensor):
    experts = divided(drot.load(checkpoints / "packed", device="cpu").config, 0, 1)
    with pytest.raises(UserError, match=f"model.layers.1.mlp.experts has no tensor {tensor}"):
        list(experts.load_weights([(tensor, torch.zeros(1))]))


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "exaone_moe", "dots1"])
def test_tensors_have_the_dtypes_of_drot(tmp_path, family):
    save(tmp_path / "saved", family, {}, "none", {}, "dense")
    expected = drot.load(tmp_path / "saved", device="cpu", dtype="bfloat16")
    model = small_model(family)
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.data = tensor.data.bfloat16()
    torch.set_default_dtype(torch.bfloat16)
    try:
        keep_in_fp32(model)
    finally:
        torch.set_default_dtype(torch.float32)
    dtypes = {name: tensor.dtype for name, tensor in expected.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
    assert torch.float32 in dtypes.values()
