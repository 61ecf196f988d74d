"""The inputs of a layer's linears from a pass that resumes, against forward passes from the layer's start."""

import pytest
import torch
from small_models import WITHOUT_EXPERTS, layer_outputs, place_in, random_tokens, small_model

from drot.calibration import layer_pass as passes
from drot.calibration import stream as streams
from drot.calibration.layer_pass import LayerPass
from drot.calibration.stream import CalibrationStream
from drot.model.boundary import add_boundary_rotation
from drot.model.decoder import DecoderModel

LENGTH = 12


@pytest.fixture(autouse=True)
def several_batches(monkeypatch):
    monkeypatch.setattr(streams, "TOKENS_PER_BATCH", {"cpu": 2 * LENGTH})


def layer_and_stream(family, place=None, dtype=torch.float32):
    """Layer 1 of a small model, with a rotation at `place`, and its inputs in three batches."""
    model = DecoderModel(small_model(family, dtype=dtype))
    stream = CalibrationStream.embed(model, random_tokens(5, LENGTH), torch.device("cpu"))
    layer = model.layers[1]
    if (place := place_in(model, place)) is not None:
        rotation = add_boundary_rotation(layer.module, layer.family, place, 32, dtype=dtype, device="cpu")
        rotation.weight.copy_(torch.linalg.qr(torch.randn(32, 32))[0])
    return layer, stream


def outputs(layer, stream):
    return [layer.module(stream.batch(batch), **stream.arguments(layer, batch)) for batch in stream.batches()]


def from_the_start(layer, stream, group):
    """The inputs of a group and the residual stream behind its linear, from whole forward passes."""
    seen, middle = [], []
    handles = [
        layer.linears_of(group)[0].module.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    ]
    if layer.family.parallel:  # no module reads the stream behind the attention
        (norm,), attention = layer.norms, layer.module.self_attn
        handles += [
            norm.register_forward_pre_hook(lambda m, args: middle.append(args[0])),
            attention.register_forward_hook(lambda m, args, out: middle.append(middle.pop() + out[0])),
        ]
    else:
        norm = getattr(layer.module, "post_attention_layernorm", layer.norms[-1:] and layer.norms[-1])
        handles.append(norm.register_forward_pre_hook(lambda m, args: middle.append(args[0])))
    found = outputs(layer, stream)
    for handle in handles:
        handle.remove()
    return torch.cat(seen), torch.cat(middle if group is layer.attention_end else found)


@torch.no_grad()
def halve(layer, group):
    for linear in layer.linears_of(group):
        linear.weight.mul_(torch.rand_like(linear.weight, dtype=torch.float32) > 0.5)


#: every family in every place, in one of two dtypes
FAMILIES = [*WITHOUT_EXPERTS, "glm4_moe", "nemotron_h", "nemotron_h-dense"]
PLACES = [
    (family, place, (torch.float32, torch.bfloat16)[(i + j) % 2])
    for i, family in enumerate(FAMILIES)
    for j, place in enumerate((None, "input", "residual"))
]


@pytest.mark.parametrize(("family", "place", "dtype"), PLACES, ids=str)
def test_inputs_and_output_of_a_layer_that_is_pruned_on_the_way(family, place, dtype):
    """The same bytes as from the start, after every pruned group."""
    layer, stream = layer_and_stream(family, place, dtype)
    before = stream.hidden_states.clone()
    layer_pass = LayerPass(layer, stream)
    for group in (group for group in layer.groups if group.expert is None):
        x, written = from_the_start(layer, stream, group)
        found = list(layer_pass.inputs(group, outputs=True))
        assert len(found) == 3
        assert torch.equal(torch.cat([inputs for inputs, _ in found]), x)
        if layer.adds(group):
            assert torch.equal(torch.cat([output for _, output in found]), written)
        else:
            assert all(output is None for _, output in found)
        halve(layer, group)
    assert torch.equal(stream.hidden_states, before)
    expected = layer_outputs(stream, layer)
    layer_pass.advance()
    assert torch.equal(stream.hidden_states, expected)


@pytest.mark.parametrize(
    "names", [[], ["o"], ["mlp"], ["down"], ["attention", "down"], ["o", "down"]], ids=str
)
@pytest.mark.parametrize("kept_share", [0, 1])
def test_any_groups_may_be_left_out(names, kept_share, monkeypatch):
    monkeypatch.setattr(passes, "KEPT_SHARE", kept_share)
    layer, stream = layer_and_stream("llama")
    layer_pass = LayerPass(layer, stream)
    for group in (group for group in layer.groups if group.name in names):
        x, _ = from_the_start(layer, stream, group)
        rows = x.flatten(0, 1).double()
        found = layer_pass.hessian(group)
        torch.testing.assert_close(found.double(), 2 / 5 * rows.T @ rows, rtol=1e-4, atol=1e-4)
        halve(layer, group)
    expected = layer_outputs(stream, layer)
    layer_pass.advance()
    assert torch.equal(stream.hidden_states, expected)


@pytest.mark.parametrize(("reserve", "computed"), [(0, 1), (2**60, 2)])
def test_inputs_are_kept_where_the_pruning_has_room_beside_them(reserve, computed):
    layer, stream = layer_and_stream("llama")
    layer_pass, calls = LayerPass(layer, stream, reserve=reserve), []
    layer.linears["up_proj"].module.register_forward_hook(lambda *args: calls.append(len(args[2])))
    for group in layer.groups:
        layer_pass.hessian(group)
    calls.clear()
    layer_pass.hessian(layer.groups[-1])
    layer_pass.advance()
    assert sum(calls) == computed * len(stream.hidden_states)


@pytest.mark.parametrize("family", ["glm4", "olmo2", "gemma2"])
def test_a_fixed_layer_with_norms_behind_its_blocks(family):
    """The inputs and the output are those of whole passes, though no outputs are added as they are."""
    layer, stream = layer_and_stream(family, "inside")
    expected = layer_outputs(stream, layer)
    layer_pass = LayerPass(layer, stream, fixed=True)
    for group in layer.groups:
        x, _ = from_the_start(layer, stream, group)
        found = list(layer_pass.inputs(group, outputs=True))
        assert torch.equal(torch.cat([inputs for inputs, _ in found]), x)
    layer_pass.advance()
    assert torch.equal(stream.hidden_states, expected)


@pytest.mark.parametrize("names", [["attention", "o", "mlp", "down"], ["down"], ["o"]], ids=str)
def test_a_fixed_layer_computes_its_last_linear_once(names):
    """The outputs of the last linear, which are those of the layer, are kept."""
    layer, stream = layer_and_stream("qwen3")
    expected, calls = layer_outputs(stream, layer), []
    layer.linears["down_proj"].module.register_forward_hook(lambda *args: calls.append(args))
    layer_pass = LayerPass(layer, stream, fixed=True)
    for group in (group for group in layer.groups if group.name in names):
        list(layer_pass.inputs(group, outputs=True))
    layer_pass.advance()
    assert torch.equal(stream.hidden_states, expected)
    assert len(calls) == 3  # batches


def test_a_layer_computes_as_before_after_an_error():
    layer, stream = layer_and_stream("qwen3")
    expected = layer_outputs(stream, layer)
    layer_pass = LayerPass(layer, stream)
    _, o, _, down = layer.groups
    list(layer_pass.inputs(o))
    stream.layer_kwargs[1] = {}  # no position embeddings
    handle = layer.module.mlp.gate_proj.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(layer_pass.inputs(down))
    handle.remove()
    stream = layer_and_stream("qwen3")[1]
    assert torch.equal(layer_outputs(stream, layer), expected)
    assert "forward" not in layer.module.self_attn.__dict__


def test_one_tensor_is_kept_beside_the_stream(monkeypatch):
    """With heads · head_dim equal to d, the inputs and the outputs of o_proj and the output of the layer
    share it."""
    layer, stream = layer_and_stream("llama-biased")  # 4 heads of 16, d is 32: the widths differ
    made = []
    real = torch.empty
    monkeypatch.setattr(
        passes.torch, "empty", lambda *args, **options: made.append(args) or real(*args, **options)
    )
    layer_pass = LayerPass(layer, stream)
    for group in layer.groups:
        list(layer_pass.inputs(group))
    layer_pass.advance()
    assert [shape[-1] for (shape,) in made if isinstance(shape, tuple)] == [64, 32]


@pytest.mark.parametrize("family", ["opt", "qwen2_moe"])
def test_the_statistics_do_not_depend_on_the_batches(family, monkeypatch):
    """Modules that get tokens without a dimension of sequences: the MLP of OPT, and shared experts."""
    found = []
    for sequences in (1, 4):
        monkeypatch.setattr(streams, "TOKENS_PER_BATCH", {"cpu": sequences * LENGTH})
        layer, stream = layer_and_stream(family)
        _, dense = layer_and_stream(family)
        dense.hidden_states = dense.hidden_states + 0.1
        groups = [group for group in layer.groups if group.expert is None]
        run, of_dense = LayerPass(layer, stream), LayerPass(layer, dense, fixed=True)
        for group in groups:
            statistics = passes.target_statistics(run, of_dense, group)
            change = statistics.output_change if layer.adds(group) else statistics.input_change
            found.append((group.name, statistics.hessian, change))
    count = len(found) // 2
    for (name, hessian, change), (_, *others) in zip(found[:count], found[count:], strict=True):
        torch.testing.assert_close([hessian, change], others, rtol=1e-4, atol=1e-5, msg=name)


def test_layers_share_the_masks_of_a_device():
    model = DecoderModel(small_model("gemma3_text"))
    tokens = random_tokens(1, 16)
    _, kwargs = model.record(tokens, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    moved = CalibrationStream.embed(model, tokens, torch.device("meta")).layer_kwargs

    def masks(of_layers):
        return len({id(each["attention_mask"]) for each in of_layers if each["attention_mask"] is not None})

    assert masks(moved) == masks(kwargs) < len(kwargs)
