"""How much calibration text a run reads: sequences as long as the model reads, or no text at all."""

import pytest
import torch
from runs import one_shot, prune
from small_checkpoints import save_small
from small_models import small_model

import drot
from drot.config import resolve
from drot.core.errors import UserError
from drot.evaluation.evaluate import evaluate
from drot.pipeline import tokens


def recipe(mode="none", method="wanda", **fields):
    return one_shot(mode, method=method, **{"steps": 2, "seqlen": None} | fields)


def text_file(folder):
    path = folder / "text.txt"
    path.write_text("def main(argument):\n    return argument + 1\n\n" * 400)
    return str(path)


def test_sequences_are_as_long_as_the_model_reads(tmp_path):
    """The default of 2048 tokens would be refused for a model of 128 positions."""
    model = save_small(tmp_path / "model")
    chosen = recipe(source=text_file(tmp_path), nsamples=2)
    manifest = drot.prune(model, chosen, device="cpu").manifest
    assert manifest.calibration.shape == [2, 128] and manifest.positions == 128
    assert manifest.recipe.calibration.seqlen == 128


def test_mistakes_in_the_text_are_found_before_the_model_is_loaded(tmp_path, monkeypatch):
    """And too long sequences before the text is read."""
    model, events = save_small(tmp_path / "model"), []
    too_long = recipe(source=text_file(tmp_path), seqlen=129)
    missing = recipe(source=str(tmp_path / "nothing.txt"))
    for chosen, message in ((too_long, "`seqlen` must be at most 128"), (missing, "is no such name")):
        with pytest.raises(UserError, match=message):
            drot.prune(model, chosen, device="cpu", progress=events.append)
    assert events == []


def test_eval_takes_windows_that_the_model_reads(tmp_path):
    model = save_small(tmp_path / "model")
    (figures,) = evaluate([str(model)], ppl=[text_file(tmp_path)], device="cpu")
    assert figures["seqlen"] == 128


def test_magnitude_without_a_rotation_reads_no_text(tmp_path, monkeypatch):
    model = save_small(tmp_path / "model")

    def refuse(*args, **options):
        raise AssertionError("a text is read")

    monkeypatch.setattr(tokens, "load_calibration", refuse)
    result = drot.prune(model, recipe(method="magnitude"), device="cpu", out=tmp_path / "out")
    assert result.manifest.calibration.shape[0] == 0
    for layer in result.manifest.layers:
        assert {linear.output_error for linear in layer.linears.values()} == {None}
    weight = small_model("llama").model.layers[0].mlp.up_proj.weight
    kept = weight.abs().reshape(-1, 4).argsort(-1)[:, 2:]
    expected = torch.zeros(len(kept), 4).scatter_(1, kept, 1).bool().reshape(weight.shape)
    pruned = result.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(pruned, weight * expected)
    for other in (recipe(), recipe("layer", "magnitude"), recipe(method="magnitude", solve="pcg")):
        with pytest.raises(AssertionError, match="a text is read"):
            drot.prune(model, other, device="cpu")
    with pytest.raises(AssertionError, match="a text is read"):
        drot.sensitivity(model, recipe(method="magnitude"), device="cpu")


def test_magnitude_without_a_rotation_reads_a_text_that_is_named():
    """For the output errors."""
    result = prune(chosen=recipe(method="magnitude"))
    assert all(linear.output_error > 0 for linear in result.manifest.layers[0].linears.values())
    assert not resolve(recipe(method="magnitude")).reads_calibration
    assert resolve(recipe(method="magnitude", source="some.txt")).reads_calibration
