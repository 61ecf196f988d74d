"""Block recovery: what it trains, what it leaves alone, when it stops, and that a resumed run is the same."""

import math

import pytest
import torch
from runs import TOKENS, assert_patterns, assert_same_weights, prune
from runs import recipe as small_recipe
from small_models import layer_outputs, random_tokens, small_model
from torch.func import functional_call

import drot
from drot.calibration.stream import CalibrationStream
from drot.checkpoint.manifest import read_manifest
from drot.config import RecoveryConfig, Sparsity
from drot.core.errors import UserError
from drot.model.decoder import DecoderModel
from drot.pipeline import batches, kept_weights, recover
from drot.pipeline.recover import recover_layer
from drot.pruning import prune_magnitude

pytestmark = pytest.mark.slow


def pruned_layer(dtype=torch.float32, family="llama-biased", sparsity="2:4", scale=1):
    """A layer pruned by magnitude, the stream of its inputs, and the outputs of the dense layer."""
    model = DecoderModel(small_model(family, dtype=dtype))
    stream = CalibrationStream.embed(model, TOKENS, torch.device("cpu"))
    stream.hidden_states *= scale
    layer = model.layers[0]
    targets = CalibrationStream(layer_outputs(stream, layer), stream.layer_kwargs)
    for linear in layer.linears.values():
        linear.weight.copy_(prune_magnitude(linear.weight, Sparsity.parse(sparsity)).weight)
    return layer, stream, targets


def config(**changes):
    return RecoveryConfig(**{"recover": "block", "recover_epochs": 6, "recover_lr": 0.02} | changes)


@pytest.mark.parametrize("sparsity", ["2:4", "0.5"])
def test_kept_weights_and_norms_are_trained_and_nothing_else(sparsity):
    layer, stream, targets = pruned_layer(sparsity=sparsity)
    before = {name: value.clone() for name, value in layer.module.state_dict().items()}
    record = recover_layer(layer, stream, targets, config())
    assert record.error_after < 0.8 * record.error_before and record.best_epoch > 0
    for name, value in layer.module.state_dict().items():
        trained = name.endswith(("proj.weight", "layernorm.weight"))
        assert torch.equal(value, before[name]) == (not trained), name
        if trained:
            assert torch.equal(value == 0, before[name] == 0), name
    assert not any(
        parameter.requires_grad or parameter.grad is not None for parameter in layer.module.parameters()
    )


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
def test_a_norm_that_adds_its_weight_to_one_is_trained(family):
    """After a rotation its weight is 0, and the root mean square of what it multiplies by is 1."""
    layer, stream, targets = pruned_layer(family=family)
    norms = [norm.weight.zero_() for norm in layer.norms]
    assert recover_layer(layer, stream, targets, config()).best_epoch > 0
    assert all(bool((weight != 0).all()) for weight in norms)


def test_the_gradients_fit_fp16():
    """Those of the mean over all tokens do not where the hidden states are large."""
    layer, stream, targets = pruned_layer(torch.float16, scale=10_000)
    before = {name: linear.weight.clone() for name, linear in layer.linears.items()}
    recover_layer(layer, stream, targets, config(recover_lr=0.05))
    for name, linear in layer.linears.items():
        assert not torch.equal(linear.weight, before[name]), name


def test_the_error_is_that_of_the_held_out_sequences():
    layer, stream, targets = pruned_layer()
    record = recover_layer(layer, stream, targets, config())
    out = layer.module(stream.hidden_states[-1:], **stream.layer_kwargs[0]).double()
    wanted = targets.hidden_states[-1:].double()
    expected = ((out - wanted) ** 2).sum(-1) / (wanted**2).sum(-1)
    assert record.error_after == pytest.approx(float(expected.mean()), rel=1e-4)


def test_the_steps_are_those_of_adam_on_the_kept_weights():
    """Two epochs against an Adam on a vector of the kept weights only, in fp64."""
    layer, stream, targets = pruned_layer(torch.float64)
    chosen = config(recover_epochs=2, recover_lr=1e-3)
    kept = {
        name: value != 0 for name, value in layer.module.named_parameters() if name.endswith("proj.weight")
    }
    norms = [name for name, _ in layer.module.named_parameters() if name.endswith("layernorm.weight")]
    start = {name: value.detach().clone() for name, value in layer.module.named_parameters()}
    vectors = {name: start[name][mask].clone().requires_grad_() for name, mask in kept.items()}
    vectors |= {name: start[name].clone().requires_grad_() for name in norms}
    scales = {name: float(vector.detach().square().mean().sqrt()) for name, vector in vectors.items()}
    adam = torch.optim.Adam([{"params": [vector]} for vector in vectors.values()], betas=kept_weights.BETAS)
    generator = torch.Generator().manual_seed(0)
    step, steps = 0, 2 * math.ceil(7 / 4)
    for _ in range(2):
        for batch in torch.randperm(7, generator=generator).split(4):
            weights = {
                name: torch.zeros_like(start[name]).masked_scatter(kept[name], vector)
                if name in kept
                else vector
                for name, vector in vectors.items()
            }
            out = functional_call(
                layer.module, weights, (stream.hidden_states[batch],), stream.layer_kwargs[0]
            )
            wanted = targets.hidden_states[batch]
            loss = (((out - wanted) ** 2).sum(-1) / (wanted**2).sum(-1)).mean()
            adam.zero_grad()
            # Adam's eps counts against the gradients of the recovery, which are larger than those of the mean
            (loss * wanted.shape[-1] * math.sqrt(wanted.shape[1] * chosen.recover_batch)).backward()
            rise = max(1, round(batches.WARM_UP * steps))
            factor = min(1, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group, scale in zip(adam.param_groups, scales.values(), strict=True):
                group["lr"] = chosen.recover_lr * scale * factor
            adam.step()
            step += 1
    record = recover_layer(layer, stream, targets, chosen)
    assert record.best_epoch == 2
    for name, value in layer.module.named_parameters():
        if name in vectors:
            found = value[kept[name]] if name in kept else value
            torch.testing.assert_close(found, vectors[name].detach(), rtol=1e-7, atol=1e-9)


def test_a_caller_without_gradients_recovers_the_same():
    records = []
    for gradients in (True, False):
        layer, stream, targets = pruned_layer()
        with torch.set_grad_enabled(gradients):
            records.append(recover_layer(layer, stream, targets, config(recover_epochs=2)))
    assert records[0] == records[1]
    assert records[0].error_after < records[0].error_before


def test_bfloat16_weights_add_up_small_steps():
    """Steps that are smaller than the rounding of bf16 count, because they are added up in fp32."""
    small = config(recover_epochs=12, recover_lr=6e-4)
    layer, stream, targets = pruned_layer(torch.bfloat16)
    before = layer.linears["up_proj"].weight.clone()
    record = recover_layer(layer, stream, targets, small)
    after = layer.linears["up_proj"].weight
    assert after.dtype == torch.bfloat16 and torch.equal(after == 0, before == 0)
    # one step, 6e-4 of 0.17, is below half a unit in the last place of a weight of 0.1, which is 2.4e-4
    large = before.abs() > 0.1
    assert float((after != before)[large].float().mean()) > 0.2
    assert record.error_after < record.error_before


def test_a_recovery_that_does_not_help_changes_nothing():
    layer, stream, targets = pruned_layer()
    before = {name: value.clone() for name, value in layer.module.state_dict().items()}
    seen = []
    chosen = config(recover_lr=100.0, recover_epochs=20)
    record = recover_layer(layer, stream, targets, chosen, lambda *event: seen.append(event))
    assert record.best_epoch == 0 and record.error_after == record.error_before
    assert len(seen) == 1 + recover.PATIENCE
    assert all(torch.equal(value, before[name]) for name, value in layer.module.state_dict().items())


def test_a_rate_that_produces_nan_stops_with_one_line():
    layer, stream, targets = pruned_layer()
    with pytest.raises(UserError, match="layer 0: .* lower `recover_lr`$"):
        recover_layer(layer, stream, targets, config(recover_lr=1e30))


def test_progress_reports_each_epoch_and_the_record_the_best():
    layer, stream, targets = pruned_layer()
    seen = []
    record = recover_layer(layer, stream, targets, config(), lambda *event: seen.append(event))
    assert [event[:2] for event in seen] == [(epoch, 6) for epoch in range(7)]
    errors = [error for _, _, error in seen]
    assert (record.error_before, record.error_after) == (errors[0], min(errors))
    assert errors[record.best_epoch] == min(errors)


# ---- in a run ------------------------------------------------------------------------------------


def recipe(mode="layer", **fields):
    hessians = "dense" if mode == "layer" else "sequential"
    return small_recipe(
        mode, **dict(hessians=hessians, recover="block", recover_epochs=2, recover_lr=0.02) | fields
    )


@pytest.mark.parametrize(
    ("method", "mode", "sparsity"),
    [("magnitude", "none", "0.5"), ("wanda", "shared", "2:4"), ("sparsegpt", "layer", "0.5")],
)
def test_every_method_keeps_its_pattern_in_the_saved_checkpoint(method, mode, sparsity, tmp_path):
    chosen = recipe(mode, method=method, sparsity=sparsity, solve="admm", target="dense")
    result = prune(small_model("qwen2"), chosen, out=tmp_path / "out")
    loaded = drot.load(tmp_path / "out", device="cpu")
    assert_patterns(loaded, chosen.pruning)
    manifest = read_manifest(tmp_path / "out")
    assert manifest.sparsity == pytest.approx(0.5, abs=0.02)
    for layer in manifest.layers:
        assert layer.recovery.error_after <= layer.recovery.error_before
    assert manifest.seconds.phases["recover"] > 0
    tokens = random_tokens(2, 30, seed=5)
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)


def test_the_stream_of_targets_is_that_of_the_dense_model(monkeypatch):
    """The targets of a layer are the hidden states of the dense model, in the basis of its output."""
    seen = []

    def spy(layer, stream, targets, *rest):
        seen.append(targets.hidden_states.clone())
        return recover_layer(layer, stream, targets, *rest)

    monkeypatch.setattr("drot.pipeline.steps.recover_layer", spy)
    dense = small_model("llama")
    expected = dense(TOKENS, output_hidden_states=True).hidden_states
    prune(chosen=recipe())
    for index, targets in enumerate(seen[:-1]):  # the last hidden state is behind the final norm
        # rotations do not change the lengths and the products of the rows
        wanted = expected[index + 1].flatten(0, 1)[:50]
        found = targets.flatten(0, 1)[:50]
        torch.testing.assert_close(found @ found.T, wanted @ wanted.T, rtol=1e-4, atol=1e-4)
    assert len(seen) == 3


def test_one_sequence_is_too_few():
    with pytest.raises(UserError, match="at least 2 calibration sequences"):
        prune(chosen=recipe(), calibration=TOKENS[:1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("recover", "all"),
        ("recover_epochs", 0),
        ("recover_lr", 0.0),
        ("recover_lr", math.nan),
        ("recover_batch", 0),
    ],
)
def test_wrong_settings_are_refused(field, value):
    with pytest.raises(UserError, match=f"`{field}`"):
        RecoveryConfig(**{field: value})


@pytest.mark.parametrize("room", [0, 2**60])
def test_the_states_of_the_dense_model_lie_where_they_fit(room, monkeypatch):
    """On the device or in main memory, with the same result; the manifest says where."""
    offloaded, real = [], CalibrationStream.offloaded_copy
    monkeypatch.setattr("drot.pipeline.run.free_memory", lambda device: room)
    monkeypatch.setattr(
        CalibrationStream, "offloaded_copy", lambda stream: offloaded.append(stream) or real(stream)
    )
    found = prune(chosen=recipe(solve="none", target="dense"))
    assert found.manifest.dense_states_on_device == (room > 0) == (not offloaded)
    monkeypatch.undo()
    assert_same_weights(found.model, prune(chosen=recipe(solve="none", target="dense")).model)
    without = recipe(solve="none", target="self", recover="none")
    assert prune(chosen=without).manifest.dense_states_on_device is None
