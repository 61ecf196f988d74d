"""`drot.prune` on the test device gives the CPU's bytes, or its figures where a GPU computes in another way.

An op with tensors on two devices raises an error there, as on a GPU.
"""

import pytest
import torch
from quantised_files import quantise_files
from runs import assert_patterns, assert_same_weights, interrupted, prune, recipe
from small_models import relative_error, save_small_model, small_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import drot
from drot.checkpoint.offload import open_skeleton
from drot.model.decoder import DecoderModel

#: the name of one device, and of two
ONE, OTHER = "second", "second:1"


@pytest.fixture(autouse=True)
def plain_attention():
    """The attention of the device: a CPU would take one kernel for it."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def lies_at(model: nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in model.state_dict().values()}


#: of what a run does after the rotation, all but the solver, whose products are bf16 on a GPU, and recovery
EXACT = dict(solve="none", target="dense")


@pytest.mark.parametrize("settings", [dict(mode="none"), dict(optimizer="paper", steps=12)], ids=str)
def test_the_cpus_bytes(settings):
    """Where no training and no solver takes bf16, as both do on a GPU."""
    chosen = recipe(product_dtype="float32", **EXACT, **settings)
    found, expected = prune(None, chosen, device=ONE), prune(None, chosen)
    assert lies_at(found.model) == {torch.device("cpu")}
    assert_same_weights(found.model, expected.model)
    for layer, on_cpu in zip(found.manifest.layers, expected.manifest.layers, strict=True):
        assert layer.linears == on_cpu.linears


@pytest.mark.parametrize(
    ("quality", "settings"),
    [
        ("fast", dict(objective="entropy", blocks=2)),
        ("fast", dict(mode="shared", layers_per_step=1)),
        ("balanced", dict(method="wanda", sparsity="4:8", blocks=2)),
        ("best", dict(hessians="dense", boundary="residual", recover="block")),
    ],
    ids=str,
)
def test_the_cpus_figures(quality, settings):
    chosen = recipe(quality=quality, **dict(sparsity="2:4", steps=12) | settings)
    result, on_cpu = prune(None, chosen, device=ONE), prune(None, chosen).manifest
    assert_patterns(result.model, chosen.pruning)
    found = result.manifest
    assert found.relative_logit_error < 1e-5
    pairs = [(found.shared_rotation, on_cpu.shared_rotation)]
    pairs += [(a.rotation, b.rotation) for a, b in zip(found.layers, on_cpu.layers, strict=True)]
    for record, expected in pairs:
        if record is not None:  # from step to step bf16 leads the training elsewhere
            assert record.loss_curve[0] == pytest.approx(expected.loss_curve[0], rel=0.03)
            assert record.loss_after == pytest.approx(expected.loss_after, rel=0.1)


def test_the_recovery_of_the_cpu():
    """Adam takes all its parameters at once on a GPU, and rounds in another way.

    Where two scores are equal but for rounding, another weight goes, and the layers from there on differ.
    """
    chosen = recipe("none", solve="none", recover="block", sparsity="2:4")
    found, expected = (prune(None, chosen, device=device).model.state_dict() for device in (ONE, "cpu"))
    same = 0
    for layer in range(3):
        names = [name for name in found if f"layers.{layer}." in name]
        if not all(torch.equal(found[name].cpu() == 0, expected[name].cpu() == 0) for name in names):
            break
        assert max(relative_error(found[name], expected[name]) for name in names) < 1e-4
        same += 1
    assert same >= 1


def test_given_rotations_give_the_cpus_bytes(tmp_path):
    chosen, file = recipe(**EXACT), tmp_path / "rotations.safetensors"
    prune(None, chosen, save_rotations_to=file)
    found, expected = (prune(None, chosen, rotations=file, device=device) for device in (ONE, "cpu"))
    assert_same_weights(found.model, expected.model)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_weights_in_fp8_and_mxfp4_become_dense_on_the_device(family, tmp_path):
    """A PieceReader brings the numbers to the device, where their scales multiply them."""
    folder = save_small_model(small_model(family, hidden_size=64, intermediate_size=96), tmp_path / "model")
    quantise_files(folder)
    model, weights, _ = open_skeleton(folder)
    expected = drot.load(folder, device="cpu").state_dict()
    for layer in DecoderModel(model, weights=weights).layers:
        weights.read_layer(layer, torch.device(ONE))
        for name, tensor in layer.module.state_dict().items():
            assert tensor.device.type == ONE
            assert torch.equal(tensor.cpu(), expected[layer.prefix + name])


def test_the_other_device_gives_the_same_bytes(tmp_path):
    chosen, files = recipe(hessians="dense", steps=12), [tmp_path / f"{i}.safetensors" for i in range(2)]
    runs = [
        prune(None, chosen, device=device, save_rotations_to=file)
        for device, file in zip((ONE, OTHER), files, strict=True)
    ]
    assert_same_weights(runs[1].model, runs[0].model)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_model_on_the_device_stays_there(tmp_path):
    chosen = recipe(quality="best", recover="block", sparsity="2:4")
    model = small_model("llama", dtype=torch.bfloat16).to("second:1")
    result = prune(model, chosen, device="second:1", format="packed", out=tmp_path / "out")
    assert lies_at(result.model) == {torch.device("second:1")}
    assert_patterns(result.model.dequantize(), chosen.pruning)


def test_resumes_where_it_was_cut_off(tmp_path):
    chosen, out = recipe(quality="best", recover="block", hessians="dense"), tmp_path / "out"
    interrupted(None, chosen, device=ONE, out=out, at=("prune", 1))
    resumed = prune(None, chosen, device=ONE, out=out, resume=True)
    assert_same_weights(resumed.model, prune(None, chosen, device=ONE).model)
