"""Loading, evaluation, generation and conversion on the test device, and the memory of a run there."""

import copy
import gc
import json

import pytest
import torch
from device import Graph, host_waits, limited
from runs import one_shot, prune, recipe
from small_models import random_text, random_tokens, relative_error, save_small_model, small_model
from torch.nn.attention import SDPBackend, sdpa_kernel

import drot
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.machine.transfer import on_device
from drot.model.decoder import DecoderModel
from drot.model.experts import ReplacedExperts
from drot.ops import nm_mask
from drot.sparse.packed import pack_model

ON = torch.device("second:1")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A dense model, and its pruned checkpoints in both formats, pruned on a CPU."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save_small_model(small_model("llama"), folder / "original")
    options = dict(tokenizer=None, dtype="float32")
    for format in ("dense", "packed"):
        chosen = recipe(sparsity="2:4", boundary="residual", hessians="dense", quality="fast")
        prune(folder / "original", chosen, out=folder / format, format=format, **options)
    return folder


@pytest.mark.parametrize("format", ["dense", "packed"])
def test_a_checkpoint_computes_and_generates_as_on_the_cpu(folders, format):
    tokens = random_tokens(2, 12)
    on_cpu, model = (drot.load(folders / format, device=device) for device in ("cpu", ON))
    assert {tensor.device for tensor in model.state_dict().values()} == {ON}
    with sdpa_kernel(SDPBackend.MATH):
        assert relative_error(model(tokens.to(ON)).logits.cpu(), on_cpu(tokens).logits) < 1e-6
        written, expected = (
            m.generate(tokens.to(m.device), do_sample=False, max_new_tokens=8).cpu() for m in (model, on_cpu)
        )
    assert torch.equal(written, expected)


@torch.no_grad()
def test_a_graph_holds_the_experts_of_a_packed_mixture():
    """The host waits for nothing, and a replay sends the tokens to the experts that it finds then."""
    model = small_model("qwen3_moe", hidden_size=64, moe_intermediate_size=64, dtype=torch.bfloat16)
    for layer in DecoderModel(model).layers:
        for linear in layer.linears.values():
            linear.weight.masked_fill_(nm_mask(linear.weight.abs().contiguous(), 2, 4), 0)
        for part in layer.expect_down_rotation(16):
            part.weight.copy_(torch.linalg.qr(torch.randn(part.weight.shape))[0])
    pack_model(model)
    on_cpu = model.model.layers[0].mlp.experts
    experts = copy.deepcopy(on_cpu).to(ON)
    assert isinstance(experts, ReplacedExperts) and not experts.waits
    x, weights = torch.randn(6, 64, dtype=torch.bfloat16), torch.rand(6, 2, dtype=torch.bfloat16)
    routes = [torch.rand(6, experts.num_experts).argsort(-1)[:, :2].contiguous() for _ in range(2)]
    chosen, moved = routes[0].to(ON), (x.to(ON), weights.to(ON))
    with host_waits() as waits:
        experts(moved[0], chosen, moved[1])
    assert waits == []
    captured, gpu = Graph(), torch.get_device_module(ON)
    with gpu.device(ON), gpu.graph(captured, stream=torch.Stream(ON)):
        result = experts(moved[0], chosen, moved[1])
    for route in (routes[1], routes[0]):
        chosen.copy_(route)
        captured.replay()
        assert relative_error(result.cpu(), on_cpu(x, route, weights)) < 1e-2


@pytest.mark.parametrize("options", [[], ["--stream"], ["--against"]], ids=str)
def test_eval_gives_the_cpus_perplexity(folders, options, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(random_text(300))
    if options == ["--against"]:
        options = ["--against", str(folders / "original")]
    figures = []
    for device in ("second", "cpu"):
        command = [
            "eval",
            str(folders / "packed"),
            "--ppl",
            str(text),
            "--seqlen",
            "40",
            "--dtype",
            "float32",
        ]
        assert cli.run([*command, "--device", device, "--json", *options]) == 0
        figures.append(json.loads(capsys.readouterr().out)["perplexity"][str(text)])
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)


def test_convert_of_what_was_pruned_on_the_device(folders, tmp_path):
    chosen = recipe(sparsity="2:4", quality="fast")
    prune(folders / "original", chosen, out=tmp_path / "dense", device="second", dtype="float32")
    command = ["convert", str(tmp_path / "dense"), "--out", str(tmp_path / "packed"), "--format", "packed"]
    assert cli.run(command) == 0
    tokens = random_tokens(1, 12).to(ON)
    dense, packed = (drot.load(tmp_path / name, device=ON) for name in ("dense", "packed"))
    assert relative_error(packed(tokens).logits.cpu(), dense(tokens).logits.cpu()) < 1e-5


def test_a_layer_keeps_its_memory_until_the_work_has_read_it(monkeypatch):
    """Also a tensor that is replaced while the next layer is on its way."""
    recorded: list[tuple[int, torch.Stream]] = []
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor.data_ptr(), stream))
    )
    worker = torch.get_device_module(ON).current_stream(ON)
    for layer in on_device(DecoderModel(small_model("llama")).layers, ON, torch.device("cpu")):
        assert {tensor.data_ptr() for tensor in layer.tensors()} == {place for place, _ in recorded}
        assert {stream for _, stream in recorded} == {worker}
        recorded.clear()


def test_too_little_memory_for_a_shared_rotation_is_told():
    """While the objectives of the layers are made, too: what is enough for a few layers is not for 24."""
    model = small_model("llama", num_hidden_layers=24)
    gc.collect()
    chosen = one_shot("shared", steps=2, layers_per_step=1)
    peaks = prune(copy.deepcopy(model), chosen, device="second:0").manifest.peak_memory
    with (
        limited(0, max(peak.gpu for peak in peaks.values())),
        pytest.raises(
            UserError, match="24 layers do not fit in the memory of second:0 at once: use `layers_"
        ),
    ):
        prune(model, chosen.replace(layers_per_step=0), device="second:0")
