"""A packed model computes what the same model with dense weights computes."""

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from runs import named_linears
from small_models import WITHOUT_EXPERTS, random_tokens, small_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import drot
from drot.checkpoint.hf_model import as_drot_model
from drot.checkpoint.quantization_config import drot_config_of_modules
from drot.core.errors import UserError
from drot.evaluation.variants import DENSE, ROTATED, SPARSE, model_variants
from drot.model.boundary import rotation_place
from drot.model.decoder import DecoderModel
from drot.model.rotation import Boundary
from drot.ops import nm_mask
from drot.sparse.fused import DeferredLinear, fuse, unfuse
from drot.sparse.linear import SparseLinear, is_packed, packed_linears
from drot.sparse.packed import check_packed, compress_model, pack_model, unpack_model

#: largest relative error of the logits; dense and packed models add up in different orders
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@torch.no_grad()
def pruned_model(family, dtype=torch.float32, rotated=True, **changes):
    """A small dense model with 2:4 weights and, unless `rotated` is False, random rotations of the inputs."""
    model = small_model(family, dtype=dtype, **changes)
    for linear in named_linears(model).values():
        linear.weight.masked_fill_(nm_mask(linear.weight.abs(), 2, 4), 0)
    if rotated:
        d = model.config.hidden_size
        bases = [torch.linalg.qr(torch.randn(d, d))[0] for _ in model.model.layers]
        for layer, before, after in zip(DecoderModel(model).layers[1:], bases, bases[1:], strict=False):
            layer.hold(Boundary("input", before, after))
    return model


def rotate_beside_mlp(model, index):
    """Gives a layer a random rotation of the residual beside its MLP."""
    q, eye = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0], torch.eye(32, dtype=torch.float64)
    DecoderModel(model).layers[index].hold(Boundary("residual", eye, q))


def packed_copy(model, fused=False):
    packed = copy.deepcopy(model)
    pack_model(packed)
    as_drot_model(packed)
    if fused:
        fuse(packed)
    return packed


def close(got, expected, dtype):
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm()) < TOLERANCE[dtype]


def ragged_batch(device="cpu"):
    """Four prompts of 3 to 12 tokens, padded on the left, as `generate` requires."""
    ids, mask = random_tokens(4, 12), torch.ones(4, 12, dtype=torch.long)
    for row, missing in enumerate((0, 9, 4, 1)):
        mask[row, :missing] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@pytest.mark.parametrize(
    ("family", "dtype", "fused"),
    [
        *((family, torch.float32, True) for family in WITHOUT_EXPERTS),
        *((family, torch.bfloat16, False) for family in ("llama-biased", "phi3", "gemma2")),
        *(("llama-biased", torch.float16, fused) for fused in (False, True)),
    ],
    ids=str,
)
def test_logits_of_a_ragged_batch(family, dtype, fused, device):
    dense = pruned_model(family, dtype).to(device)
    packed = packed_copy(dense, fused)
    batch = ragged_batch(device)
    real = batch["attention_mask"].bool()
    got, expected = packed(**batch).logits, dense(**batch).logits
    assert got.dtype == dtype
    assert close(got[real], expected[real], dtype)


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize(
    ("family", "cache"),
    [("llama", None), ("mistral", "static"), ("granite", "static"), ("phi3-longrope", None)],
)
def test_generate(family, cache, fused, device):
    """Greedy tokens of a ragged batch, with a growing and with a static key-value cache."""
    dense = pruned_model(family).to(device)
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    tokens = [
        model.generate(**ragged_batch(device), **options, cache_implementation=cache)
        for model in (dense, packed_copy(dense, fused))
    ]
    assert tokens[0].shape == (4, 20)
    assert torch.equal(*tokens)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.slow
def test_compiles_as_one_graph(family, device):
    packed = packed_copy(pruned_model(family, num_hidden_layers=1).to(device), fused=family != "qwen3")
    tokens = random_tokens(2, 12).to(device)
    backend = "inductor" if family == "llama" else "aot_eager"  # inductor is slow, so one family uses it
    compiled = torch.compile(packed, fullgraph=True, backend=backend)
    assert close(compiled(tokens, use_cache=False).logits, packed(tokens).logits, torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.parametrize("compress", [False, True])
@torch.no_grad()
def test_as_a_cuda_graph(compress, tokens):
    """The graph is captured before any algorithm of a product is measured, and replayed on another input."""
    sizes = dict(hidden_size=64, intermediate_size=128, head_dim=16)
    packed = packed_copy(pruned_model("llama", torch.bfloat16, **sizes).to("cuda"), fused=True)
    if compress:
        compress_model(packed)
    hidden = torch.randn(1, tokens, 64, dtype=torch.bfloat16, device="cuda")
    layer = packed.base_model
    layer(inputs_embeds=torch.randn_like(hidden[:, :1]), use_cache=False)  # libraries load at the first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # cuDNN's attention takes memory at the first call with a number of tokens
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]), torch.cuda.graph(graph):
        out = layer(inputs_embeds=hidden, use_cache=False).last_hidden_state
    hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    torch.cuda.synchronize()
    assert close(out, layer(inputs_embeds=hidden, use_cache=False).last_hidden_state, torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_packing_and_back_loses_nothing(family, dtype):
    model = pruned_model(family, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    size = sum(linear.weight.nbytes for linear in named_linears(model).values())
    pack_model(model)
    assert is_packed(model)
    assert drot_config_of_modules(model).to_dict() == {
        "quant_method": "drot",
        "boundary": "input",
        "packed": True,
    }
    share = {torch.float32: 17 / 32}.get(dtype, 9 / 16)
    held = sum(linear.values.nbytes + linear.positions.nbytes for _, linear in packed_linears(model))
    assert held == share * size
    assert not any(parameter.requires_grad for parameter in model.parameters())
    unpack_model(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    again = {name: tensor.clone() for name, tensor in after.items()}
    pack_model(model)
    unpack_model(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(bits(tensor), bits(again[name]))  # including the sign of each zero


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def test_a_model_without_rotations_is_stock_again():
    model = pruned_model("llama", rotated=False)
    pack_model(model)
    unpack_model(model)
    assert drot_config_of_modules(model) is None


@pytest.mark.parametrize("family", ["llama-biased", "qwen3"])
def test_a_fused_model_saves_and_copies_as_separate_linears(family, tmp_path):
    """The state dict and the files are those of the separate linears, and `unfuse` undoes `fuse`."""
    packed = packed_copy(pruned_model(family, torch.bfloat16))
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    fused = copy.deepcopy(packed)
    fuse(fused)
    fuse(fused)  # a second time changes nothing
    attention, mlp = fused.model.layers[0].self_attn, fused.model.layers[0].mlp
    assert (attention.q_proj.sizes, mlp.gate_proj.sizes) == ([64, 32, 32], [48, 48])
    assert sum(p.nbytes for p in fused.parameters()) == sum(p.nbytes for p in packed.parameters())

    def same(state):
        assert list(state) == list(before)
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())

    same(fused.state_dict())
    fused.save_pretrained(tmp_path / "saved")
    loaded = drot.load(tmp_path / "saved", device="cpu")
    same(loaded.state_dict())
    tokens = random_tokens(2, 9)
    twin = copy.deepcopy(fused)
    del fused.model.layers[0].self_attn.q_proj  # the copy does not refer to it
    assert torch.equal(twin(tokens).logits, loaded(tokens).logits)
    assert close(twin.to(torch.float32)(tokens).logits, packed(tokens).logits, torch.bfloat16)
    unfuse(loaded)
    same(loaded.state_dict())
    assert torch.equal(loaded(tokens).logits, packed(tokens).logits)
    unpack_model(twin)
    assert not is_packed(twin)


@pytest.mark.parametrize("family", ["granite-biased", "phi3"])
@pytest.mark.slow
def test_a_rotation_beside_the_mlp_is_fused_with_down_proj(family, tmp_path):
    """Logits and files are those of the separate modules, and `unfuse` undoes `fuse`."""
    dense = pruned_model(family, torch.float32, rotated=False)
    for index in range(2):
        rotate_beside_mlp(dense, index)
    packed = packed_copy(dense)
    before = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    tokens = random_tokens(2, 9)
    fused = copy.deepcopy(packed)
    fuse(fused)
    fuse(fused)
    assert [type(layer.mlp.down_proj) for layer in fused.model.layers] == [DeferredLinear] * 2 + [
        SparseLinear
    ]
    rotation = copy.deepcopy(fused.model.layers[0].residual_rotation)
    for module in (rotation, rotation.double()):
        assert module.q.T.is_contiguous(), "the rotation is read fastest by columns"
    assert close(fused(tokens).logits, dense(tokens).logits, torch.float32)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    assert close(compiled(tokens, use_cache=False).logits, dense(tokens).logits, torch.float32)
    fused.save_pretrained(tmp_path / "saved")
    loaded = drot.load(tmp_path / "saved", device="cpu")
    assert isinstance(loaded.model.layers[0].mlp.down_proj, DeferredLinear)
    assert torch.equal(loaded(tokens).logits, fused(tokens).logits)
    variants = model_variants(loaded)
    assert torch.equal(variants[ROTATED](tokens).logits, fused(tokens).logits)
    assert not any(rotation_place(layer) for layer in variants[SPARSE].model.layers)
    variants[SPARSE](tokens), variants[DENSE](tokens)
    unfuse(loaded)
    for model in (fused, loaded):
        state = model.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert torch.equal(loaded(tokens).logits, packed(tokens).logits)


@pytest.mark.slow
def test_pickled_models(tmp_path):
    """A process that has not imported drot loads models that torch.save wrote: dense, packed and fused."""
    on_input, on_residual = (
        pruned_model("llama", rotated=place == "input") for place in ("input", "residual")
    )
    rotate_beside_mlp(on_residual, 0)
    models = [
        model
        for dense in (on_input, on_residual)
        for model in (dense, packed_copy(dense), packed_copy(dense, True))
    ]
    tokens = random_tokens(2, 9)
    for number, model in enumerate(models):
        torch.save(model, tmp_path / f"{number}.pt")
    torch.save(tokens, tmp_path / "tokens.pt")
    script = (
        "import sys, torch\n"
        "folder, count = sys.argv[1], int(sys.argv[2])\n"
        "models = [torch.load(f'{folder}/{i}.pt', weights_only=False) for i in range(count)]\n"
        "tokens = torch.load(f'{folder}/tokens.pt')\n"
        "torch.save([model(tokens).logits for model in models], f'{folder}/logits.pt')"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path), str(len(models))]
    subprocess.run(command, check=True)
    for model, logits in zip(models, torch.load(tmp_path / "logits.pt"), strict=True):
        assert torch.equal(logits, model(tokens).logits)


@pytest.mark.parametrize("place", ["input", "residual"])
def test_a_fused_model_loads_what_it_saves(place):
    """Its state dict has the names of the separate modules, as checkpoint files do."""
    one, other = (pruned_model("llama-biased", rotated=place == "input") for _ in range(2))
    for number, model in enumerate((one, other)):
        for parameter in model.parameters():
            parameter.mul_(1 + number)
        if place == "residual":
            rotate_beside_mlp(model, 0)
    one, other, tokens = packed_copy(one, True), packed_copy(other), random_tokens(2, 9)
    assert not close(one(tokens).logits, other(tokens).logits, torch.float32)
    one.load_state_dict(other.state_dict())
    assert close(one(tokens).logits, other(tokens).logits, torch.float32)
    state = one.state_dict()
    del state["model.layers.1.mlp.up_proj.values"]
    state["model.layers.1.mlp.gate_proj.weight"] = torch.zeros(1)
    state["model.layers.0.self_attn.k_proj.values"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError) as caught:
        one.load_state_dict(state)
    for part in (
        'Missing key(s) in state_dict: "model.layers.1.mlp.up_proj.values"',
        "gate_proj.weight",
        "size mismatch for model.layers.0.self_attn.k_proj.values: copying a param with shape "
        "torch.Size([3, 3]) from checkpoint, the shape in current model is torch.Size([32, 16])",
    ):
        assert part in str(caught.value)


def test_autocast():
    """Under autocast, the product is computed in the dtype of the weight."""
    dense = pruned_model("llama")
    packed, tokens = packed_copy(dense, fused=True), random_tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert close(packed(tokens).logits, dense(tokens).logits, torch.bfloat16)
    with pytest.raises(ValueError, match="x must have the dtype of values"):
        packed.model.layers[0].mlp.up_proj(torch.randn(1, 32).bfloat16())


def test_autocast_of_a_fused_rotation():
    """Also where dense linears, whose results are in the dtype of autocast, precede down_proj."""
    dense = pruned_model("llama", rotated=False)
    rotate_beside_mlp(dense, 0)
    tokens = random_tokens(2, 9)
    for left in ((), ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")):
        packed = copy.deepcopy(dense)
        pack_model(packed, left)
        fuse(packed)
        assert isinstance(packed.model.layers[0].mlp.down_proj, DeferredLinear)
        with torch.autocast("cpu", torch.bfloat16):
            assert close(packed(tokens).logits, dense(tokens).logits, torch.bfloat16)


def test_a_part_of_a_fused_product_under_autocast():
    """It is computed alone where another thread has replaced the product that it is a part of."""
    fused = packed_copy(pruned_model("llama"), fused=True).model.layers[0].mlp
    x = torch.randn(1, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        fused.gate_proj(x)
        together = fused.up_proj(x)
        fused.gate_proj.pending = (None, ())
        assert close(fused.up_proj(x), together, torch.float32)


def test_threads_share_a_fused_model():
    """Each thread gets the logits of its own tokens."""
    model = packed_copy(pruned_model("llama"), fused=True)
    tokens = [random_tokens(1, 6 + 3 * i, seed=i) for i in range(4)]
    expected = [model(ids).logits for ids in tokens]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with torch.no_grad(), ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda ids: [model(ids).logits for _ in range(25)], tokens))
    finally:
        sys.setswitchinterval(interval)
    for repetitions, logits in zip(got, expected, strict=True):
        assert all(close(repeated, logits, torch.float32) for repeated in repetitions)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.pending == (None, ())


def test_what_cannot_be_packed():
    model = pruned_model("llama")
    layer = model.model.layers[1]
    layer.self_attn.o_proj.weight[5, :3] = 1.0
    with pytest.raises(
        UserError, match="^layer 1, o_proj: the weight must hold at most 2 non-zeros .* row 5 has more"
    ):
        pack_model(model)
    for changes, message in (
        (
            dict(intermediate_size=44),
            'layer 0, down_proj: .* multiple of 8 inputs, got 44: use `format="dense"`',
        ),
        (dict(dtype=torch.float64), "layer 0, q_proj: .* got float64: choose another `dtype`"),
    ):
        with pytest.raises(UserError, match=message):
            pack_model(small_model("llama", **changes))


@pytest.mark.parametrize("byte", [0b01_00_00_00, 0b01_00_00_01, 0b00_00_01_00, 0b10_11_01_00])
def test_positions_out_of_order(byte):
    """Two positions that are equal or out of order, in the first and in the second group of a byte."""
    model = packed_copy(pruned_model("llama"))
    check_packed(model)
    model.model.layers[2].mlp.up_proj.positions.data[7, 1] = byte
    with pytest.raises(UserError, match="^model.layers.2.mlp.up_proj.positions: .* out of order in row 7"):
        check_packed(model)


def test_linear_as_a_module():
    weight = torch.randn(24, 16)
    linear = nn.Linear(16, 24)
    linear.weight.data = weight.masked_fill(nm_mask(weight.abs(), 2, 4), 0)
    packed = SparseLinear.from_linear(linear)
    sizes = "in_features=16, out_features=24, bias=True"
    assert repr(packed) == f"SparseLinear({sizes}, 2:4; to train: dequantize())"
    assert list(packed.state_dict()) == ["values", "positions", "bias"]
    assert packed.to(torch.bfloat16).positions.dtype == torch.uint8
    x = torch.randn(2, 3, 16)
    packed = SparseLinear.from_linear(linear)
    torch.testing.assert_close(packed(x), linear(x))
    assert torch.equal(packed.to_linear().weight, linear.weight)
    empty = SparseLinear.like(nn.Linear(16, 24, device="meta", dtype=torch.float16))
    empty_shapes = {name: (p.shape, p.dtype, p.device.type) for name, p in empty.named_parameters()}
    assert empty_shapes == {
        "values": ((24, 8), torch.float16, "meta"),
        "positions": ((24, 2), torch.uint8, "meta"),
        "bias": ((24,), torch.float16, "meta"),
    }


def test_the_compressed_form(device):
    """A GPU keeps it beside the packed form, it moves with the weight, and it gives the same products."""
    torch.manual_seed(0)
    linear = nn.Linear(128, 256, dtype=torch.bfloat16, device=device)
    linear.weight.data.masked_fill_(nm_mask(linear.weight.abs(), 2, 4), 0)
    packed = SparseLinear.from_linear(linear)
    x = torch.randn(64, 128, dtype=torch.bfloat16, device=device)
    before = packed(x)
    packed.compress()
    assert device == "cuda" or packed.compressed is None
    assert close(packed(x), before, torch.bfloat16)
    assert list(packed.state_dict()) == ["values", "positions", "bias"]
    assert packed.to("cpu").compressed is None
    assert close(packed(x.cpu()), before.cpu(), torch.bfloat16)
    assert device == "cpu" or packed.to(device).compressed is not None
    twice = {
        name: tensor if name == "positions" else 2 * tensor for name, tensor in packed.state_dict().items()
    }
    packed.load_state_dict(twice)
    assert close(packed(x), 2 * before, torch.bfloat16)
    packed.drop_compressed()
    assert packed.to("cpu").to(device).compressed is None
