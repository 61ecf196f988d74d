"""Layers that share an R1: they are trained together, and no matrix lies between them."""

import itertools

import pytest
import torch
from runs import assert_patterns, interrupted, one_shot, prune, saved_bytes
from safetensors.torch import load_file
from small_models import random_tokens, save_small_model, small_model
from transformers import AutoModelForCausalLM

import drot
from drot.checkpoint.resume import RunState
from drot.core.errors import UserError
from drot.model.boundary import rotation_place

pytestmark = pytest.mark.slow

SHARING = one_shot(layers_per_rotation=2)


def five_layers(**changes):
    return small_model("llama", num_hidden_layers=5, **changes)


@pytest.mark.parametrize(
    ("format", "places"),
    [
        ("dense", [None, None, "input", None, "input"]),
        ("packed", [None, "residual", None, "residual", None]),
    ],
)
def test_a_layer_holds_a_matrix_only_where_r1_changes(format, places, tmp_path):
    options = dict(out=tmp_path / "out", save_rotations_to=tmp_path / "rotations")
    result = prune(five_layers(head_dim=16), SHARING, format=format, **options)
    if format == "dense":
        assert_patterns(result.model, SHARING.pruning)
    tokens = random_tokens(2, 30, seed=5)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert [rotation_place(layer) for layer in loaded.model.layers] == places
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)
    loaded.save_pretrained(tmp_path / "again")
    again = drot.load(tmp_path / "again", device="cpu")
    torch.testing.assert_close(again(tokens).logits, result.model(tokens).logits)
    r1s = [load_file(tmp_path / "rotations")[f"layers.{index}.r1"] for index in range(5)]
    same = [torch.equal(*pair) for pair in itertools.pairwise(r1s)]
    assert same == [True, False, True, False]
    # the rotations of a file are used as they are
    given = prune(five_layers(head_dim=16), SHARING, format=format, rotations=tmp_path / "rotations")
    assert [rotation_place(layer) for layer in given.model.model.layers] == places


@pytest.mark.parametrize("boundary", ["input", "residual"])
def test_the_loss_is_that_of_the_layers_together(boundary):
    """At R1 = 1 it is the sum of the losses of layers that have an R1 of their own."""

    def losses(**fields):
        chosen = one_shot(hessians="dense", boundary=boundary, steps=0, **fields)
        return [layer.rotation.loss_before for layer in prune(five_layers(), chosen).manifest.layers]

    alone, together = losses(), losses(layers_per_rotation=2)
    assert together[0] == together[1] == pytest.approx(alone[0] + alone[1])
    assert together[2] == together[3] == pytest.approx(alone[2] + alone[3])
    assert together[4] == pytest.approx(alone[4])


def test_the_training_is_that_of_a_shared_rotation():
    """Of a model that has the first two layers alone, whose R1 all of its layers share."""
    model, first = five_layers(), small_model("llama", num_hidden_layers=2)
    first.load_state_dict(model.state_dict(), strict=False)
    shared = prune(first, one_shot("shared", down_rotation=16, steps=5)).manifest.shared_rotation
    part = prune(model, SHARING).manifest.layers[0].rotation
    assert part.loss_before == pytest.approx(shared.loss_before)
    assert part.loss_after == pytest.approx(shared.loss_after, rel=1e-4)
    assert part.loss_after < 0.95 * part.loss_before


@pytest.mark.parametrize("at", [("rotate", 2), ("prune", 1), "half of the second R1 is missing"])
def test_a_run_goes_on(at, tmp_path, monkeypatch):
    model = str(save_small_model(five_layers(), tmp_path / "model"))
    prune(model, SHARING, out=tmp_path / "whole")
    half = isinstance(at, str)
    interrupted(model, SHARING, at=("prune", 1) if half else at, out=tmp_path / "out")
    if half:
        real, trained = RunState.load, []

        def load(self, name):
            return None if name == "rotation_00003" and not trained else real(self, name)

        def see(event):
            if event.phase == "rotate":
                trained.append(event.layer)

        monkeypatch.setattr(RunState, "load", load)
        prune(model, SHARING, out=tmp_path / "out", resume=True, progress=see)
        assert set(trained) == {2}
    else:
        prune(model, SHARING, out=tmp_path / "out", resume=True)
    assert saved_bytes(tmp_path / "out") == saved_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("llama", dict(mode="shared", down_rotation="none"), 'must be 1 with `mode="shared"`'),
        ("llama", dict(mode="none", down_rotation="none"), 'must be 1 with `mode="none"`'),
        ("llama", dict(layers_per_rotation=3), "below the number of layers, 3; got 3: .*shared"),
        ("llama", dict(hessians="sequential"), '`hessians="sequential"`: use `hessians="dense"`'),
        ("gemma2", {}, "must be 1 for a model of type 'gemma2'"),
    ],
)
def test_what_has_no_sense_is_refused(family, fields, match):
    with pytest.raises(UserError, match=match):
        prune(small_model(family), SHARING.replace(**fields))


def test_rotations_of_each_layer_are_refused(tmp_path):
    prune(None, one_shot(), save_rotations_to=tmp_path / "rotations")
    with pytest.raises(UserError, match="another R1 in layer 1 than in layer 0"):
        prune(None, SHARING, rotations=tmp_path / "rotations")
