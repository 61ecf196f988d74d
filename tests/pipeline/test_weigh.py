"""The weights of the calibration tokens, against a backward pass of the whole model by autograd."""

import pytest
import torch
from runs import TOKENS, interrupted, prune, recipe, saved_bytes
from small_models import save_small_model, small_model

import drot
from drot.calibration.stream import TOKENS_PER_BATCH, CalibrationStream
from drot.calibration.token_weights import TokenWeights, key_of
from drot.config import Recipe, resolve
from drot.core.errors import UserError
from drot.core.events import silent
from drot.model.family import InputGroup
from drot.pipeline import weigh
from drot.pipeline.context import RunContext
from drot.pipeline.states import embed
from drot.pipeline.weigh import weigh_tokens

CPU = torch.device("cpu")


def context_of(family, **sizes):
    """A context in fp64, which mixtures of transformers do not compute."""
    model = small_model(family, **sizes)
    model = model if family in ("qwen3_moe", "qwen3_next") else model.double()
    return RunContext(model, resolve(recipe(), down_width=48), TOKENS, CPU, silent)


def go_back(run, hooks):
    """A backward pass of transformers' own loss, which `hooks` see."""
    model = run.model.model.requires_grad_(True)
    logits = model(run.tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, run.tokens[:, 1:].flatten(), reduction="sum").backward()
    for hook in hooks:
        hook.remove()
    model.requires_grad_(False)


def expected(run):
    """The weights by their definition: the gradients of transformers' own loss, in one backward pass."""
    squares, hooks, widths = {}, [], {}
    for layer in run.model.layers:
        for group in layer.groups:
            if group.expert is not None:
                continue
            key = key_of(layer, group)
            widths[key] = sum(linear.weight.shape[0] for linear in layer.linears_of(group))
            for module in {linears[0].module for linears in layer.modules_of(group)}:

                def see(module, args, output, key=key):
                    output.register_hook(lambda g: squares.setdefault(key, []).append(g.square().sum(-1)))

                hooks.append(module.register_forward_hook(see))
    go_back(run, hooks)
    roots = {key: (sum(found).view(run.tokens.shape) / widths[key]).sqrt() for key, found in squares.items()}
    return {key: root / root.mean() for key, root in roots.items()}


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "gemma2", "opt", "qwen3_next", "glm4", "gemma4_text-lends"]
)
@pytest.mark.parametrize("room", [9, 0])
def test_the_weights_are_those_of_one_backward_pass(family, room, monkeypatch):
    """Also where the inputs of some layers are kept, and the others are computed again."""
    check_weights(context_of(family), room, monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gemma4_text-lends"])
def test_the_weights_in_several_batches(family, monkeypatch):
    monkeypatch.setitem(TOKENS_PER_BATCH, "cpu", 3 * TOKENS.shape[1])
    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        check_weights(context_of(family), 9, monkeypatch)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe", "opt", "gemma4_text-lends"])
def test_the_weights_of_outputs_are_those_of_one_backward_pass(family):
    """Also of the slices of a module. Experts have none."""
    run = context_of(family)
    found = weigh_tokens(run, None)
    wanted, hooks = {}, []
    for layer in run.model.layers:
        for linear in layer.linears.values():
            if linear.spec.expert is None:
                rows = slice(None) if linear.spec.part is None else linear.rows

                def see(module, args, output, key=f"{layer.index}.{linear.name}", rows=rows):
                    def add(gradient):
                        squares = gradient[..., rows].double().square().flatten(0, -2).sum(0)
                        wanted[key] = wanted.get(key, 0) + squares

                    output.register_hook(add)

                hooks.append(linear.module.register_forward_hook(see))
    go_back(run, hooks)
    mean = torch.cat([*wanted.values()]).mean()
    assert found.outputs.keys() == wanted.keys()
    for key, sums in wanted.items():
        torch.testing.assert_close(found.outputs[key].double(), sums / mean, rtol=1e-3, atol=1e-6)
    assert found.of_outputs(run.model.layers[0]).keys() <= run.model.layers[0].linears.keys()


@pytest.mark.parametrize("room", [4, 5])
def test_the_inputs_of_the_last_layers_are_kept(room, monkeypatch):
    """Of six layers those of the last two or three, and of the first of the others."""
    assert weigh.kept_layers(6, room) == (8 - room, 3)
    check_weights(context_of("llama", num_hidden_layers=6), room, monkeypatch)


def check_weights(run, room, monkeypatch):
    """room: how many inputs of layers have room in main memory."""
    one = embed(run, run.tokens, None).hidden_states.nbytes
    monkeypatch.setattr(weigh, "available_memory", lambda: one * room)
    monkeypatch.setattr(weigh, "KEPT_SHARE", 1.0)
    found = weigh_tokens(run, None).tensors
    wanted = expected(run)
    assert wanted.keys() <= found.keys()
    for key, weights in wanted.items():
        torch.testing.assert_close(found[key].double(), weights.detach().double(), rtol=1e-3, atol=1e-4)
        assert weights.std() > 0.05


@pytest.mark.parametrize(("on_gpu", "room"), [(False, 7), (True, 4)])
def test_pinned_inputs_take_a_power_of_two(on_gpu, room, monkeypatch):
    run = context_of("llama", num_hidden_layers=6)
    stream = embed(run, run.tokens, None)
    stream.hidden_states = torch.empty(5 * 2**18, dtype=torch.uint8)  # 1.25 MiB, pinned 2
    stream.empty = torch.empty
    monkeypatch.setattr(weigh, "is_gpu", lambda device: on_gpu)
    monkeypatch.setattr(weigh, "available_memory", lambda: 2 * 9 * 2**20)
    assert weigh._keeper(run, stream, None)[1] == room


def test_experts_have_the_weights_of_the_outputs_of_their_layer():
    run = context_of("qwen3_moe")
    found = weigh_tokens(run, None).tensors
    outputs = []
    last = run.model.layers[-1]

    def see(module, args, output):
        (output[0] if isinstance(output, tuple) else output).register_hook(outputs.append)

    go_back(run, [last.module.register_forward_hook(see)])
    root = outputs[0].square().mean(-1).sqrt()
    group = next(group for group in last.groups if group.expert is not None)
    weights = found[key_of(last, group)].double()
    torch.testing.assert_close(weights, (root / root.mean()).double(), rtol=1e-3, atol=1e-4)


def weighted_run(family):
    """A context whose weights are known, and its stream."""
    run = context_of(family)
    run.model.model.float()
    generator = torch.Generator().manual_seed(0)
    keys = {key_of(layer, group) for layer in run.model.layers for group in layer.groups}
    run.token_weights = TokenWeights(
        {key: (torch.rand(TOKENS.shape, generator=generator) + 0.1).half() for key in sorted(keys)}
    )
    return run, embed(run, run.tokens, None)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_hessian_counts_a_token_as_often_as_its_weight_says(family):
    """A sequence with a weight of 2 counts as if it were there twice, also in an expert."""
    run, stream = weighted_run(family)
    keys = run.token_weights.tensors
    twice = torch.ones(TOKENS.shape)
    twice[3] = 2.0
    run.token_weights = TokenWeights(dict.fromkeys(keys, twice.half()))
    stream = embed(run, run.tokens, None)
    layer = run.model.layers[0]
    found = stream.hessians(layer, layer.groups)
    more = torch.cat([TOKENS, TOKENS[3:4]])
    run.token_weights = None
    repeated = CalibrationStream.embed(run.model, more, CPU)
    wanted = repeated.hessians(layer, layer.groups)
    scale = len(more) / len(TOKENS)
    for group in layer.groups:
        torch.testing.assert_close(found[group.name], wanted[group.name] * scale, rtol=1e-4, atol=1e-5)


def test_each_input_group_has_its_own_weights():
    run, stream = weighted_run("llama")
    layer, seen = run.model.layers[0], {}

    def read(group: InputGroup):
        return lambda module, args: seen.setdefault(group.name, []).append(args[0].flatten(0, 1))

    hooks = [layer.linears_of(g)[0].module.register_forward_pre_hook(read(g)) for g in layer.groups]
    layer(stream.hidden_states, stream.layer_kwargs[0])
    for hook in hooks:
        hook.remove()
    found = stream.hessians(layer, layer.groups)
    for group in layer.groups:
        x, w = torch.cat(seen[group.name]).double(), run.token_weights.of(layer, group).double().view(-1, 1)
        wanted = 2 / len(TOKENS) * x.T @ (w * x)
        torch.testing.assert_close(found[group.name].double(), wanted, rtol=1e-4, atol=1e-5)


def test_weights_are_the_default_where_weights_are_solved_for():
    def of(**fields):
        return resolve(Recipe().replace(**fields)).pruning.token_weights

    assert of() == of(solve="pcg") == of(mode="none", solve="admm") == "gradient"
    assert of(solve="none") == of(mode="none") == of(optimizer="paper") == of(solve="sparsegpt") == "equal"
    assert of(token_weights="equal") == "equal" and of(solve="none", token_weights="gradient") == "gradient"


def test_outputs_have_weights_where_tokens_have():
    def of(**fields):
        return resolve(Recipe().replace(**fields)).rotation.output_weights

    assert of() == of(mode="shared") == of(solve="none", token_weights="gradient") == "gradient"
    assert of(token_weights="equal") == of(mode="none") == of(objective="entropy") == "equal"
    assert of(optimizer="paper") == of(output_weights="equal") == "equal"
    with pytest.raises(UserError, match="`output_weights` gradient needs `token_weights` gradient"):
        of(solve="none", output_weights="gradient")


def test_a_run_weights_its_tokens_and_resumes_with_the_same_weights(tmp_path):
    source = save_small_model(small_model("llama"), tmp_path / "model")
    whole = prune(source, recipe(), out=tmp_path / "whole")
    equal = prune(source, recipe(token_weights="equal"), out=tmp_path / "equal")
    assert whole.manifest.recipe.pruning.token_weights == "gradient"
    assert saved_bytes(tmp_path / "whole") != saved_bytes(tmp_path / "equal")
    assert "weigh" in whole.manifest.seconds.phases and not equal.manifest.seconds.phases["weigh"]
    interrupted(source, recipe(), out=tmp_path / "again", at=("prune", 1))
    events = []
    prune(source, recipe(), out=tmp_path / "again", resume=True, progress=lambda e: events.append(e.phase))
    assert saved_bytes(tmp_path / "again") == saved_bytes(tmp_path / "whole")
    assert "weigh" not in events  # they were saved


def test_a_gradient_that_is_not_finite_is_refused(monkeypatch):
    gradients = weigh.layer_gradients

    def infinite(*args):
        before, squares, sums = gradients(*args)
        return before, {key: value / 0 for key, value in squares.items()}, sums

    monkeypatch.setattr(weigh, "layer_gradients", infinite)
    with pytest.raises(UserError, match="the gradients that weight the calibration tokens must be finite"):
        prune(chosen=recipe(), device="cpu")


def test_outputs_on_which_the_loss_does_not_depend_have_equal_weights():
    run = context_of("llama")
    run.model.model.model.layers[1].self_attn.o_proj.weight.zero_()  # so that no value matters
    found = weigh_tokens(run, None).tensors
    layer = run.model.layers[1]
    value = next(group for group in layer.groups if group is not layer.attention_end)
    assert (found[key_of(layer, value)] == 1).all()


@pytest.mark.parametrize("count", [1, 2, 3, 8, 30, 80])
@pytest.mark.parametrize("room", [0, 5, 12, 18, 40, 79, 80, 200])
def test_what_is_kept_has_room(count, room):
    """In the forward pass, and while the inputs between two that are kept are computed again."""
    first, step = weigh.kept_layers(count, room)
    kept = [index for index in range(count) if index >= first or index % step == 0]
    before = [index for index in kept if index < first]
    assert kept[0] == 0 and (first == 0 if room >= count else first > 0)
    if room >= -(-count // step) + step:
        assert len(kept) <= room and len(before) + step <= room


def test_outputs_that_float16_cannot_hold_are_not_damaged_weights():
    model = small_model("llama")
    with torch.no_grad():
        for linear in (model.model.layers[1].mlp.down_proj, model.model.layers[1].mlp.up_proj):
            linear.weight.mul_(1000)
    with pytest.raises(UserError, match=r'layer 1: .* too large for float16: use `dtype="bfloat16"`'):
        prune(model.half(), recipe())


def test_inference_mode():
    model = small_model("llama")
    with torch.inference_mode():
        assert drot.sensitivity(model, recipe(steps=1), calibration=TOKENS, device="cpu").errors
        assert prune(model, recipe(steps=2)).manifest.layers
        made = small_model("llama")
    with pytest.raises(UserError, match=r"made within torch.inference_mode\(\): load the model outside"):
        prune(made, recipe())
