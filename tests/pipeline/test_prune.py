"""`drot.prune` from end to end on small random models, without the quality of the pruned models."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from runs import (
    assert_opens,
    assert_patterns,
    assert_same_weights,
    interrupted,
    named_linears,
    one_shot,
    prune,
    recipe,
    saved_tensors,
)
from safetensors.torch import load_file, save_file
from small_models import WITHOUT_EXPERTS, random_tokens, relative_error, save_small_model, small_model

import drot
from drot.checkpoint.card import card
from drot.checkpoint.manifest import read_manifest
from drot.checkpoint.resume import RunState
from drot.core.errors import UserError
from drot.pipeline import layer as pipeline_layer
from drot.pipeline.invariance import InvarianceError, ModelCheck

#: every family, and the other modes where a norm, a slice or a tied head could differ
FAMILIES = [
    *((family, "layer") for family in WITHOUT_EXPERTS if "-" not in family),
    *(("llama-biased", "none"), ("phi3", "none"), ("qwen2", "shared"), ("gemma2", "shared")),
]


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
@pytest.mark.slow
def test_every_family_keeps_the_pattern_and_survives_saving(family, mode, tmp_path):
    result = prune(small_model(family), recipe(mode), out=tmp_path / "out")
    assert_patterns(result.model, recipe().pruning)
    assert result.manifest.sparsity == pytest.approx(0.5, abs=0.01)
    tokens = random_tokens(2, 30, seed=5)
    loaded = drot.load(tmp_path / "out", device="cpu")
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)
    assert read_manifest(tmp_path / "out").to_dict() == result.manifest.to_dict()
    assert not list(tmp_path.glob("*.part*"))


@pytest.mark.parametrize(
    ("method", "sparsity"),
    [("magnitude", "2:4"), ("wanda", "1:4"), ("wanda", "0.5"), ("sparsegpt", "4:8"), ("sparsegpt", "0.5")],
)
def test_methods_and_sparsities(method, sparsity):
    chosen = recipe(method=method, sparsity=sparsity)
    result = prune(chosen=chosen)
    assert_patterns(result.model, chosen.pruning)
    for layer in result.manifest.layers:
        assert len(layer.linears) == 7
        assert layer.rotation.loss_after < layer.rotation.loss_before
        assert layer.rotation.invariance_error < 1e-5
    assert result.manifest.relative_logit_error < 1e-5
    json.dumps(result.manifest.to_dict())


def test_without_sparsity_the_logits_do_not_change():
    """With a ratio of 0 the model is only rotated."""
    model = small_model("qwen3-biased")
    tokens = random_tokens(2, 30, seed=5)
    before = model(tokens).logits
    chosen = recipe(method="wanda", sparsity=0.0, steps=20, objective="entropy")
    assert relative_error(prune(model, chosen).model(tokens).logits, before) < 1e-5


@pytest.mark.parametrize("hessians", ["sequential", "dense"])
def test_a_run_survives_a_crash(hessians, tmp_path):
    """A run that crashes in the second layer and is resumed gives the weights of an uninterrupted run."""
    chosen, out = recipe(hessians=hessians), tmp_path / "out"
    whole = prune(chosen=chosen).model
    interrupted(chosen=chosen, out=out)
    assert not out.exists()
    with pytest.raises(UserError, match="holds an unfinished run: .*`resume=True`"):
        prune(chosen=chosen, out=out)
    with pytest.raises(UserError, match="cannot resume .*: rotation.steps: 5 in the unfinished run, 6 now"):
        prune(chosen=chosen.replace(steps=6), out=out, resume=True)
    worked_on = []
    prune(chosen=chosen, out=out, resume=True, progress=lambda e: worked_on.append((e.phase, e.layer)))
    assert ("prune", 0) not in worked_on
    assert {("prune", 1), ("prune", 2)} <= set(worked_on)
    assert_same_weights(saved_tensors(out), whole)
    assert not list(tmp_path.glob("*.partial"))


def test_rotations_that_were_trained_before_a_crash_are_kept(tmp_path):
    """With Hessians of the dense model, all rotations are trained before anything is pruned."""
    chosen, out = recipe(hessians="dense", steps=8), tmp_path / "out"
    whole = prune(chosen=chosen)

    def crash(event):
        if event.phase == "rotate" and event.layer == 1:
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        prune(chosen=chosen, progress=crash, out=out)
    assert (tmp_path / "out.partial" / "rotation_00000.safetensors").exists()
    trained = []
    result = prune(
        chosen=chosen,
        progress=lambda e: e.phase == "rotate" and trained.append(e.layer),
        out=out,
        resume=True,
    )
    assert 0 not in trained and 1 in trained
    assert_same_weights(result.model, whole.model)


def test_layer_rotations_load_with_from_pretrained_and_save_again(tmp_path):
    result = prune(out=tmp_path / "out")
    assert_opens(tmp_path / "out", result.model, tmp_path / "again")
    names = saved_tensors(tmp_path / "out").keys()
    assert sum("residual_rotation" in name for name in names) == 2  # three layers, two boundaries


def test_bfloat16_weights_stay_bfloat16(tmp_path):
    result = prune(small_model("llama", dtype=torch.bfloat16), out=tmp_path / "out")
    loaded = drot.load(tmp_path / "out", device="cpu")
    assert loaded.dtype == torch.bfloat16
    tokens = random_tokens(2, 30)
    assert torch.equal(loaded(tokens).logits, result.model(tokens).logits)


def test_mistakes_raise_user_errors(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (dict(out=tmp_path / "full"), "exists and is not an empty folder"),
        (dict(resume=True), "`resume` needs `out`"),
        (dict(out=Path.cwd().parent / Path.cwd().name), "exists and is not an empty folder|of its own"),
        (dict(out=tmp_path / "full" / "file" / "out"), "cannot write .*file/out: "),
        (
            dict(save_rotations_to=tmp_path / "full" / "file" / "r.safetensors"),
            "cannot write .*r.safetensors: ",
        ),
        (dict(chosen=recipe("none"), save_rotations_to=tmp_path / "r"), "`save_rotations_to` needs `mode="),
        (dict(save_rotations_to=tmp_path / "full" / "file"), "file exists: name another `save_rotations_to`"),
        (dict(save_rotations_to=tmp_path / "full"), "full exists: name another `save_rotations_to`"),
    ]
    for options, message in cases:
        with pytest.raises(UserError, match=message):
            prune(**options)
    for device in ("gpu", "meta", "mps"):
        with pytest.raises(UserError, match="`device` must be auto, cpu or cuda"):
            prune(device=device)
    with pytest.raises(UserError, match="torch finds"):
        prune(device="cuda:99")
    with pytest.raises(UserError, match="no such folder"):
        prune(tmp_path / "nothing")
    with pytest.raises(UserError, match="needs `tokenizer`"):
        prune(calibration=None)
    rotated = prune().model
    with pytest.raises(UserError, match="already rotated by drot"):
        prune(rotated)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (recipe(sparsity="5:20", block_size=20), "needs dimensions that are multiples of 20"),
        (recipe(sparsity="2:32", block_size=32), "needs dimensions that are multiples of 32"),
        (recipe(blocks=3), "`blocks` must divide"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_before_the_weights_are_read(chosen, message, tmp_path):
    """The model is a folder that holds only a config, or a loaded model."""
    model = small_model("llama", head_dim=16)
    model.config.save_pretrained(tmp_path / "config-only")
    for source in (tmp_path / "config-only", model):
        with pytest.raises(UserError, match=message):
            prune(source, chosen)


def test_what_transformers_does_not_save_is_refused_before_the_first_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline_layer, "prune_layer", None)
    model, out = small_model("llama"), tmp_path / "out"
    with pytest.raises(UserError, match="`tokenizer` must have a save_pretrained.* got <function"):
        prune(model, one_shot("none"), out=out, tokenizer=lambda text: {"input_ids": [1]})

    def refuse(folder):
        raise ValueError("a setting that is loaded and not saved")

    monkeypatch.setattr(model.config, "save_pretrained", refuse)
    with pytest.raises(UserError, match="does not save the config of the model: .*loaded and not saved"):
        prune(model, one_shot("none"), out=out)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_recorded_as_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_small_model(small_model("llama"), Path("models") / "llama")
    result = prune("models/llama", one_shot("none"), out=tmp_path / "out")
    assert result.manifest.base_model == "./models/llama"
    monkeypatch.chdir(tmp_path / "models")
    assert "base_model" not in card(result.manifest, "out")
    with pytest.raises(UserError, match="there is no ./models/llama, which drot.json names"):
        result.manifest.dense_model(None)


def test_an_incomplete_checkpoint_is_refused(tmp_path):
    """transformers would load it with random values for missing tensors."""
    whole = tmp_path / "whole"
    small_model("llama").save_pretrained(whole)
    file = whole / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}  # file is overwritten
    missing = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="model.layers.1.mlp.up_proj.weight is missing"):
        drot.load(whole)
    tensors["model.layers.1.mlp.up_proj.weight"] = missing[:, :8].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"up_proj.weight must be \[48, 32\]") as caught:
        drot.load(whole)
    assert "\n" not in str(caught.value)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match="is not a complete safetensors file"):
        drot.load(whole)


def test_an_unfinished_run_resumes_only_with_the_same_rotations(tmp_path):
    file, out = tmp_path / "rotations.safetensors", tmp_path / "out"
    chosen = recipe("shared")
    prune(chosen=chosen, save_rotations_to=file)
    interrupted(chosen=chosen, rotations=file, out=out)
    with pytest.raises(UserError, match="cannot resume .*: SHA-256 of the file of rotations: "):
        prune(chosen=chosen, out=out, resume=True)
    resumed = prune(chosen=chosen, rotations=file, out=out, resume=True)
    assert_same_weights(resumed.model, prune(chosen=chosen, rotations=file).model)


def test_a_run_that_stops_before_its_first_layer_leaves_nothing(tmp_path, caplog):
    out = tmp_path / "out"

    def crash(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(out=out, progress=crash)
    assert not list(tmp_path.iterdir())
    prune(chosen=recipe(blocks=2), out=out, resume=True)
    assert "holds no unfinished run: the run starts at the first layer" in caplog.text
    (tmp_path / "torn.partial").mkdir()
    (tmp_path / "torn.partial" / "run.json").write_text('{"model": ')
    with pytest.raises(UserError, match="its run.json is broken"):
        prune(out=tmp_path / "torn", resume=True)


def test_saving_leaves_other_folders_alone(tmp_path):
    """A folder with the name of a temporary folder stays, and `out` has the usual permissions."""
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").touch()
    (tmp_path / "plain").mkdir()
    prune(chosen=recipe("none"), out=tmp_path / "out")
    assert (tmp_path / "out.part" / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.part", "plain"]
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_threads_save_parts_of_a_run_at_the_same_time(tmp_path):
    tensors = {"x": torch.ones(2)}
    for attempt in range(20):
        state = RunState(tmp_path / f"out{attempt}", {"model": "m"})
        barrier = threading.Barrier(4)

        def save(number, state=state, barrier=barrier):
            barrier.wait()
            state.save(f"part{number}", tensors, {"number": number})

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(save, range(4)))
        assert [state.load(f"part{number}")[1]["number"] for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content", [b"{", b"\xe9", b"[]", b'{"format_version": 1}', b'{"format_version": 99}']
)
def test_the_message_for_a_broken_manifest_is_one_line(content, tmp_path):
    (tmp_path / "drot.json").write_bytes(content)
    with pytest.raises(
        UserError,
        match="drot.json (is not valid JSON|must be of format_version 1|must hold a JSON object|lacks)",
    ) as e:
        read_manifest(tmp_path)
    assert "\n" not in str(e.value)


def test_tokens_must_fit_the_model():
    for tokens, message in (
        (torch.full((2, 10), 96), r"must be in \[0, 96\)"),
        (random_tokens(2, 200), "`seqlen` must be at most 128"),
        (torch.rand(2, 10), "must be integers of shape"),
    ):
        with pytest.raises(UserError, match=message):
            prune(calibration=tokens)


@pytest.mark.parametrize("mode", ["layer", "shared"])
def test_rotations_are_reused_for_another_sparsity(mode, tmp_path):
    """Rotations that were trained at 2:4 are used at 4:8. They are rounded, because the file is fp32.

    In one shot: ADMM's masks have near ties, which the rounding may turn.
    """
    file = tmp_path / "rotations.safetensors"
    chosen = recipe(mode, hessians="dense", quality="fast")
    first = prune(chosen=chosen, save_rotations_to=file)
    events = []
    again = prune(
        chosen=chosen.replace(sparsity="4:8"),
        rotations=file,
        progress=lambda event: events.append(event.phase),
    )
    assert "rotate" not in events
    assert again.manifest.rotations_file.file == "rotations.safetensors"
    assert again.manifest.rotations_file.trained_with["recipe"]["pruning"]["sparsity"] == "2:4"
    same = prune(chosen=chosen, rotations=file)
    models = (named_linears(result.model).values() for result in (first, same))
    equal = torch.cat([((a.weight == 0) == (b.weight == 0)).flatten() for a, b in zip(*models)])
    assert float(equal.float().mean()) > 0.99
    with pytest.raises(UserError, match="holds 3 layers"):
        prune(small_model("llama", num_hidden_layers=2), recipe(mode), rotations=file)
    with pytest.raises(UserError, match="`rotations` need `mode="):
        prune(chosen=recipe("none"), rotations=file)
    if mode == "layer":
        with pytest.raises(UserError, match="holds a different R1 for each layer"):
            prune(chosen=recipe("shared"), rotations=file)


def test_an_error_in_the_pruning_names_the_layer(monkeypatch):
    left = iter(range(7 + 5))  # the pruning of gate_proj in layer 1 fails

    def fails(*args, **options):
        if next(left) == 7 + 4:
            raise UserError("hessian must be finite")
        return prune_once(*args, **options)

    prune_once = pipeline_layer.prune_once
    monkeypatch.setattr(pipeline_layer, "prune_once", fails)
    with pytest.raises(UserError, match="layer 1, gate_proj: hessian must be finite"):
        prune(chosen=recipe("none"))


def test_a_model_that_computes_nan_is_refused_before_the_run(tmp_path):
    """Also without rotations, whose check would find it."""
    for mode in ("none", "layer"):
        model = small_model("llama")
        model.model.layers[1].mlp.gate_proj.weight[0, 0] = torch.nan
        with pytest.raises(UserError, match="layer 1: .* got nan"):
            prune(model, recipe(mode), out=tmp_path / "out")
        assert not list(tmp_path.glob("*out*"))


def test_nothing_is_written_when_the_rotation_is_wrong(monkeypatch, tmp_path):
    def wrong(*args, **kwargs):
        raise InvarianceError("layer 2: ...")

    monkeypatch.setattr(ModelCheck, "pass_through", wrong)
    with pytest.raises(InvarianceError):
        prune(out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_without_experts_routes_nothing():
    with pytest.raises(UserError, match="`route_all` has no effect on a model of type 'llama'"):
        prune(small_model("llama"), recipe("none", route_all=True))
