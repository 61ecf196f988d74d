"""What a program has set in torch, and what an earlier run has left: a run is the same, or it is refused."""

import contextlib

import pytest
import runs
import torch
from runs import TOKENS, one_shot
from small_models import random_tokens, save_small_model, small_model

import drot
from drot.core.errors import UserError

pytestmark = pytest.mark.slow
RECIPE = one_shot("layer", steps=2)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("state", STATES)
def test_the_state_of_torch_changes_no_byte(state, tmp_path):
    """Neither of a run, nor of a measurement, nor of a model that is opened again."""
    chosen = RECIPE.replace(solve="admm", target="dense", recover="block", recover_epochs=1)
    chosen = chosen.replace(token_weights="gradient", output_weights="gradient")
    runs.prune(small_model("llama"), chosen, out=tmp_path / "expected")
    (tmp_path / "text.txt").write_text("a text of letters, which is long enough " * 4)
    save_small_model(small_model("llama"), tmp_path / "dense")
    expected = drot.load(tmp_path / "expected", device="cpu")(TOKENS).logits
    models = [small_model("llama") for _ in range(3)]

    def measured(model):
        options = dict(ppl=[str(tmp_path / "text.txt")], seqlen=32, device="cpu", record=False)
        (figures,) = drot.evaluate([str(tmp_path / "dense")], **options)
        errors = drot.sensitivity(model, RECIPE, calibration=TOKENS, device="cpu").errors
        return figures["perplexity"], errors

    before = measured(models[0])
    with STATES[state]():
        runs.prune(models[1], chosen, out=tmp_path / "out")
        loaded = drot.load(tmp_path / "out", device="cpu")
        assert measured(models[2]) == before
    assert runs.saved_bytes(tmp_path / "out") == runs.saved_bytes(tmp_path / "expected")
    assert torch.equal(loaded(TOKENS).logits, expected)


@pytest.mark.parametrize("mode", ["none", "layer", "shared"])
def test_a_model_that_a_failed_run_has_changed_is_refused(mode):
    """It would be pruned as the dense model, or rotated twice."""
    model = small_model("llama")
    runs.interrupted(model, one_shot(mode))
    for call in (runs.prune, lambda *given: drot.sensitivity(*given, calibration=TOKENS, device="cpu")):
        with pytest.raises(UserError, match="a run that failed may have changed a part of it: load it again"):
            call(model, one_shot(mode))


@pytest.mark.parametrize("hessians", ["sequential", "dense"])
def test_a_model_that_a_failed_run_has_not_changed_is_pruned(hessians):
    """The run ends in the training of the rotations, of the first layer or of all."""
    model, expected = small_model("llama"), runs.prune(small_model("llama"), RECIPE).model
    chosen = RECIPE.replace(hessians=hessians)
    runs.interrupted(model, chosen, at=("rotate",))
    runs.assert_same_weights(runs.prune(model, RECIPE).model.state_dict(), expected)


def test_a_run_draws_no_random_numbers_of_its_caller():
    model = small_model("llama")
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    runs.prune(model, RECIPE)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "call", [runs.prune, lambda *given, **more: drot.sensitivity(*given, calibration=TOKENS, **more)]
)
def test_float64_is_refused(call, tmp_path):
    folder = save_small_model(small_model("llama"), tmp_path / "dense")
    with pytest.raises(UserError, match="`dtype` must be auto or one of float32, .* got float64"):
        call(str(folder), RECIPE, dtype=torch.float64)
    with pytest.raises(UserError, match="the weights of `model` must be of dtype float32, .* got float64"):
        call(small_model("llama").double(), RECIPE)


def test_a_config_that_names_other_layers_is_refused():
    model = small_model("llama")
    model.model.layers = model.model.layers[:1]
    with pytest.raises(UserError, match="must have the 3 layers that num_hidden_layers of its config says"):
        runs.prune(model, RECIPE)
    model.config.num_hidden_layers = 1
    runs.prune(model, RECIPE)


def test_token_ids_of_bool_are_refused():
    with pytest.raises(UserError, match="must be integers of shape .* got bool"):
        runs.prune(small_model("llama"), RECIPE, calibration=random_tokens(2, 8) > 3)
