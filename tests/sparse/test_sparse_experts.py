"""Mixtures with packed experts compute what they compute with dense ones, and keep their weights."""

import copy

import pytest
import torch
from runs import (
    TOKENS,
    assert_same_weights,
    interrupted,
    named_linears,
    one_shot,
    prune,
    saved_bytes,
    saved_tensors,
)
from small_models import MIXTURES, random_tokens, relative_error, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.checkpoint.disk_space import weight_file_bytes
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.quantization_config import drot_config_of_modules
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.evaluation.speed import measure_speed
from drot.model.decoder import DecoderModel
from drot.ops import nm_mask
from drot.pipeline.disk import disk_needs
from drot.pipeline.sizes import sizes_of
from drot.sparse.experts import SparseExperts
from drot.sparse.fused import DeferredLinear, fuse
from drot.sparse.linear import is_packed, packed_weights
from drot.sparse.packed import check_packed, pack_model, unpack_model

pytestmark = pytest.mark.slow

#: those that between them have biases, interleaved experts, other names in files, shared experts behind a
#: gate, and layers without experts
KINDS = ["gpt_oss", "mixtral", "qwen3_next", "deepseek_v3"]
OPTIONS = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
#: largest relative error of the logits; dense and packed products add up in different orders
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@torch.no_grad()
def pruned_model(family, **changes):
    """A small model with 2:4 weights."""
    model = small_model(family, **changes)
    for linear in named_linears(model).values():
        linear.weight.masked_fill_(nm_mask(linear.weight.abs().contiguous(), 2, 4), 0)
    return model


def packed_copy(model):
    packed = copy.deepcopy(model)
    pack_model(packed)
    return packed


def stacks(model):
    """Name → module of the packed experts."""
    return {name: each for name, each in packed_weights(model) if isinstance(each, SparseExperts)}


@pytest.mark.parametrize("family", MIXTURES)
def test_packing_and_back(family):
    """Logits are those of the dense form, both tensors of experts are packed, and nothing is lost."""
    dense, tokens = pruned_model(family), random_tokens(2, 30, seed=5)
    packed = packed_copy(dense)
    layers = [layer for layer in DecoderModel(dense).layers if layer.family.experts is not None]
    assert layers and len(stacks(packed)) == 2 * len(layers)
    assert all(values.requires_grad is False for values in packed.parameters())
    for fused in (False, True):
        if fused:
            fuse(packed)
        assert relative_error(packed(tokens).logits, dense(tokens).logits) < TOLERANCE[torch.float32]
    assert torch.equal(packed.generate(tokens, **OPTIONS), dense.generate(tokens, **OPTIONS))
    assert drot_config_of_modules(packed).to_dict() == {"quant_method": "drot", "packed": True}
    again = copy.deepcopy(packed)
    unpack_model(again)
    assert not is_packed(again) and drot_config_of_modules(again) is None
    assert_same_weights(again, dense)
    assert torch.equal(again(tokens).logits, dense(tokens).logits)
    for one, other in zip(again.modules(), dense.modules(), strict=True):
        assert type(one) is type(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_other_dtypes(family, dtype):
    """Of one layer's experts: where rounding sends a token to another expert, the logits jump."""
    dense = pruned_model(family, dtype=dtype)
    packed = packed_copy(dense)
    x, weights = torch.randn(40, 32, dtype=dtype), torch.rand(40, 2, dtype=dtype)
    chosen = torch.rand(40, 3).argsort(-1)[:, :2]
    got, expected = (model.model.layers[1].mlp.experts(x, chosen, weights) for model in (packed, dense))
    assert got.dtype == dtype
    assert relative_error(got, expected) < TOLERANCE[dtype]
    held = sum(each.values.nbytes + each.positions.nbytes for each in stacks(packed).values())
    linears = named_linears(dense).values()
    assert held == 9 / 16 * sum(linear.weight.nbytes for linear in linears if linear.spec.expert is not None)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_a_conversion_keeps_the_dtypes_of_the_files(family, tmp_path, caplog):
    """transformers opens the router of DeepSeek-V3 in fp32, and its bias is fp32 in the files too."""
    chosen, dense = one_shot("none", method="magnitude"), tmp_path / "dense"
    prune(small_model(family, dtype=torch.bfloat16), chosen, out=dense)
    convert(dense, tmp_path / "packed", "packed")
    convert(tmp_path / "packed", tmp_path / "again", "dense")
    assert saved_bytes(tmp_path / "again") == saved_bytes(dense)
    dtypes = {tensor.dtype for tensor in saved_tensors(dense).values()}
    assert (torch.float32 in dtypes) == (family == "deepseek_v3")
    assert "rounded" not in caplog.text


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiles_as_one_graph(family, device):
    """Also with a token that goes to other experts than the one before."""
    packed = packed_copy(pruned_model(family, num_hidden_layers=1).to(device))
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (0, 1):
            tokens = random_tokens(2, 5, seed=seed).to(device)
            got = compiled(tokens, use_cache=False).logits
            assert relative_error(got, packed(tokens).logits) < TOLERANCE[torch.float32]


def test_autocast():
    dense, tokens = pruned_model("gpt_oss"), random_tokens(2, 9)
    packed = packed_copy(dense)
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(packed(tokens).logits, dense(tokens).logits) < TOLERANCE[torch.bfloat16]


def test_an_expert_without_tokens():
    """One token reaches two of four experts."""
    dense = pruned_model("qwen3_moe")
    one = random_tokens(1, 1)
    assert relative_error(packed_copy(dense)(one).logits, dense(one).logits) < TOLERANCE[torch.float32]


#: mixtures whose files name and shape experts, routers and shared experts in different ways
STORED = [
    "qwen3_moe",
    "mixtral",
    "qwen3_next",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "ernie4_5_moe",
    "hy_v3",
]


@pytest.mark.parametrize("family", STORED)
def test_the_files_of_a_packed_mixture(family, tmp_path):
    """A cut-off run goes on; the checkpoint opens, is saved again, and is converted there and back."""
    chosen, tokens, out = one_shot("none", method="wanda"), random_tokens(2, 30, seed=5), tmp_path / "out"
    interrupted(small_model(family), chosen, out=out, format="packed")
    result = prune(small_model(family), chosen, out=out, format="packed", resume=True)
    straight, dense = tmp_path / "straight", tmp_path / "dense"
    prune(small_model(family), chosen, out=straight, format="packed")
    assert saved_bytes(out) == saved_bytes(straight)
    expected = prune(small_model(family), chosen, out=dense).model
    assert result.manifest.format == "packed" and not result.manifest.stock_architecture
    assert cli.run(["info", str(out), "--verify"]) == 0
    opened, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any(each.values.requires_grad for each in stacks(opened).values())
    for model in (drot.load(out, device="cpu"), opened):
        assert relative_error(model(tokens).logits, expected(tokens).logits) < TOLERANCE[torch.float32]
        assert torch.equal(model.generate(tokens, **OPTIONS), expected.generate(tokens, **OPTIONS))
    opened.save_pretrained(tmp_path / "again")
    assert_same_weights(saved_tensors(tmp_path / "again"), saved_tensors(out))
    shares = [
        {name: linear.sparsity for name, linear in layer.linears.items()}
        for layer in read_manifest(tmp_path / "again").layers
    ]
    assert {share for layer in shares for share in layer.values()} == {0.5}
    convert(out, tmp_path / "from packed", "dense")
    assert saved_bytes(tmp_path / "from packed") == saved_bytes(dense)
    convert(tmp_path / "from packed", tmp_path / "to packed", "packed")
    assert saved_bytes(tmp_path / "to packed") == saved_bytes(out)
    assert_same_weights(opened.dequantize(), AutoModelForCausalLM.from_pretrained(dense))
    sizes = sizes_of(DecoderModel(small_model(family)), *TOKENS.shape)
    estimated, _ = disk_needs(sizes, result.manifest.recipe, torch.float32)
    assert 0 <= weight_file_bytes(out) - estimated < 12_000  # the headers


@pytest.mark.parametrize("family", KINDS)
def test_rotations_of_the_residual(family, tmp_path):
    """They are not merged with the down_proj of a shared expert, but with that of a layer without experts."""
    chosen = one_shot(steps=2, boundary="residual", down_rotation="auto", hessians="dense")
    dense = prune(small_model(family), chosen, out=tmp_path / "dense").model
    prune(small_model(family), chosen, out=tmp_path / "packed", format="packed")
    packed = drot.load(tmp_path / "packed", device="cpu")
    assert relative_error(packed(TOKENS).logits, dense(TOKENS).logits) < TOLERANCE[torch.float32]
    merged = [
        any(isinstance(each, DeferredLinear) for each in layer.modules()) for layer in packed.model.layers
    ]
    assert merged == [family in ("qwen3_next", "deepseek_v3"), False, False]
    convert(tmp_path / "packed", tmp_path / "again", "dense")
    assert saved_bytes(tmp_path / "again") == saved_bytes(tmp_path / "dense")


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_a_tensor_of_experts_with_a_dense_linear_stays_dense(family, tmp_path):
    """The other tensor is packed. The files, with the dense one, are those that transformers writes."""
    chosen, out = one_shot("none", method="wanda", keep=("layers.1.mlp.experts.2.up_proj",)), tmp_path / "out"
    expected = prune(small_model(family), chosen, out=tmp_path / "dense").model
    prune(small_model(family), chosen, out=out, format="packed")
    opened = AutoModelForCausalLM.from_pretrained(out)
    names = [name for name in stacks(opened) if ".1." in name]
    assert names == ["model.layers.1.mlp.experts.packed_down_proj"]
    count = opened.model.layers[1].mlp.experts.num_experts
    both = [f"layers.1.mlp.experts.{e}.{part}_proj" for e in range(count) for part in ("gate", "up")]
    assert opened.config.quantization_config.dense_linears == both
    assert relative_error(opened(TOKENS).logits, expected(TOKENS).logits) < TOLERANCE[torch.float32]
    opened.save_pretrained(tmp_path / "again")
    assert_same_weights(saved_tensors(tmp_path / "again"), saved_tensors(out))
    shares = {n: linear.sparsity for n, linear in read_manifest(tmp_path / "again").layers[1].linears.items()}
    assert shares.pop("experts.2.up_proj") == 0 and set(shares.values()) == {0.5}
    convert(out, tmp_path / "back", "dense")
    assert saved_bytes(tmp_path / "back") == saved_bytes(tmp_path / "dense")
    unpack_model(opened)
    assert_same_weights(opened, expected)


def test_the_zeros_of_packed_experts_are_counted_again(tmp_path):
    """Of interleaved experts, whose rows of gate and up alternate."""
    prune(small_model("gpt_oss"), one_shot("none"), out=tmp_path / "out", format="packed")
    model = drot.load(tmp_path / "out", device="cpu")
    model.model.layers[1].mlp.experts.packed_gate_up_proj.values.data[2, 1::2] = 0
    model.save_pretrained(tmp_path / "again")
    shares = {n: linear.sparsity for n, linear in read_manifest(tmp_path / "again").layers[1].linears.items()}
    assert shares.pop("experts.2.up_proj") == 1 and set(shares.values()) == {0.5}


def test_pickle(tmp_path):
    packed = packed_copy(pruned_model("mixtral"))
    torch.save(packed, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(TOKENS).logits, packed(TOKENS).logits)


def test_what_cannot_be_packed():
    model = pruned_model("gpt_oss")
    model.model.layers[1].mlp.experts.down_proj[2, :3, 5] = 1.0
    message = "^layer 1, down_proj: expert 2: the weight must hold at most 2 non-zeros .* row 5 has more"
    with pytest.raises(UserError, match=message):
        pack_model(model)
    message = "layer 0, down_proj: the packed format needs a multiple of 8 inputs, got 20"
    with pytest.raises(UserError, match=message):
        pack_model(pruned_model("qwen3_moe", moe_intermediate_size=20))


def test_damaged_experts():
    model = packed_copy(pruned_model("mixtral"))
    check_packed(model)
    experts = model.model.layers[2].mlp.experts
    experts.packed_down_proj.positions.data[1, 7, 0] = 0b01_00_01_01
    name = "^model.layers.2.mlp.experts.packed_down_proj"
    with pytest.raises(UserError, match=rf"{name}.positions: .* out of order in row 7 of expert 1"):
        check_packed(model)
    experts.packed_down_proj.values.data[0, 0, 0] = torch.inf
    with pytest.raises(UserError, match=rf"{name}.values must be finite"):
        check_packed(model)
    with pytest.raises(UserError, match="packed weights cannot be trained"):
        model.train()


def test_the_module_shows_its_sizes():
    packed = SparseExperts.like(torch.empty(4, 24, 16, device="meta"))
    assert (
        repr(packed)
        == "SparseExperts(experts=4, in_features=16, out_features=24, 2:4; to train: dequantize())"
    )
    shapes = {name: (p.shape, p.dtype, p.device.type) for name, p in packed.named_parameters()}
    assert shapes == {
        "values": ((4, 24, 8), torch.float32, "meta"),
        "positions": ((4, 24, 2), torch.uint8, "meta"),
    }


def test_bench_of_a_packed_mixture(tmp_path):
    prune(small_model("qwen3_moe"), one_shot("none"), out=tmp_path / "packed", format="packed")
    save_small_model(drot.load(tmp_path / "packed", device="cpu"), tmp_path / "named")
    figures = measure_speed(tmp_path / "named", tokens=[4], repeats=1, device="cpu")
    sizes = {row["variant"]: row["weight_bytes"] for row in figures["rows"] if row["what"] == "model"}
    assert sizes["2:4"] < sizes["dense"]
