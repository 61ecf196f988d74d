"""The plugin for SGLang. SGLang loads and computes in processes of their own (sglang_rank.py), on a CPU."""

import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from engines import (
    CALIBRATION,
    HEADS,
    R3,
    ROOT,
    SIZES,
    entry_points,
    mixture_config,
    rotated,
    run_ranks,
    save,
    without_norm_prefix,
)
from runs import one_shot, prune, saved_tensors
from safetensors.torch import load_file, save_file
from small_families import FAMILIES as SETTINGS
from small_multimodal import save_small_multimodal

import drot
from drot.core.errors import UserError
from drot.ops import unpack24_ref
from drot.serving import sglang as plugin

#: name → family, its further sizes, mode, fields of the recipe, format; the architecture in SGLang
SERVED = {
    "plain": (("llama", HEADS, "none", {}, "packed"), "LlamaForCausalLM"),
    "stock": (("mistral", HEADS, "shared", {}, "packed"), "MistralForCausalLM"),
    "biases": (("qwen2", {}, "none", {}, "packed"), "Qwen2ForCausalLM"),
    "mixed": (("qwen3", HEADS, "none", {"keep": ["layers.1.mlp.down_proj"]}, "packed"), "Qwen3ForCausalLM"),
    "tied": (("llama", HEADS | {"tie_word_embeddings": True}, "none", {}, "packed"), "LlamaForCausalLM"),
}
#: those that SGLang computes by models of transformers
ROTATED = {
    "residual": ("llama", HEADS, "layer", R3 | {"boundary": "residual"}, "packed"),
    "input": ("mistral", HEADS | {"sliding_window": None}, "layer", R3 | {"boundary": "input"}, "packed"),
    "light": ("qwen2", {}, "shared", R3, "packed"),
    "dense": ("qwen3", HEADS, "layer", R3 | {"boundary": "residual"}, "dense"),
    "tied to the embedding": ("smollm3", HEADS | {"tie_word_embeddings": True}, "none", {}, "packed"),
    "kept": ("smollm3", HEADS, "layer", R3 | {"keep": ["layers.1.mlp.up_proj"]}, "packed"),
    "kept of a module": ("glm", HEADS, "layer", R3 | {"keep": ["layers.1.mlp.gate_proj"]}, "packed"),
    "biases of ernie": ("ernie4_5", HEADS | {"use_bias": True}, "layer", R3, "packed"),
} | {family: rotated(family) for family in plugin.FAMILIES_OF_TRANSFORMERS}
ROTATED |= {family: rotated(family) for family in plugin.MIXTURES}
WHOLE = {"layer_types": ["full_attention"] * 3}
for family, (_, sizes, *fields) in ROTATED.items():  # without windows, which some models of a family have
    if family in ("exaone4", "ministral3", "mixtral", "dots1"):
        ROTATED[family] = (family, sizes | WHOLE | {"sliding_window": None}, *fields)
    elif "layer_types" in SETTINGS.get(family, ()):
        ROTATED[family] = (family, sizes | WHOLE, *fields)
ROTATED |= {f"{family}, dense": (*ROTATED[family][:4], "dense") for family in ("mixtral", "granitemoe")}
#: a model that reads images too, whose language model is served
MULTIMODAL = "mistral3"
#: families of which two ranks are refused by SGLang, since transformers has no plan for them
ONE_RANK = (
    *("hunyuan_v1_dense", "opt", "hunyuan_v1_moe"),
    *("granitemoe", "granitemoe, dense", "granitemoeshared"),
)
NARROW = HEADS | {"moe_intermediate_size": 96}
#: the same, and what the message of the refusal has
REFUSED = {
    "window": (("mistral", HEADS | {"sliding_window": 4}, "layer", R3, "packed"), "a sliding window"),
    "convolutions": (("lfm2_moe", {}, "none", {}, "packed"), "has the families llama, mistral,"),
    "narrow experts": (("qwen3_moe", NARROW, "none", {}, "packed"), "multiple of 64"),
    "part": (("llama", HEADS, "none", {"keep": ["layers.1.self_attn.q_proj"]}, "packed"), "keep all or none"),
    "narrow": (("llama", {"intermediate_size": 224, "head_dim": 32}, "none", {}, "packed"), "multiple of 64"),
    "gemma2": (("gemma2", HEADS, "none", {}, "packed"), "has the families llama, mistral, qwen2, qwen3"),
}
#: refused by two ranks only
STRADDLES = ("llama", HEADS, "layer", {"down_rotation": 256, "boundary": "residual"}, "packed")
#: tensors that are removed from copies of `plain`
LACKING = ("model.layers.1.self_attn.k_proj.values", "model.layers.0.mlp.down_proj.positions")
#: tensors that are removed from copies of `residual`
LACKING_ROTATED = ("model.layers.0.mlp.down_rotation.weight", "model.norm.weight")
STACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name, (chosen, _) in (SERVED | REFUSED).items():
        save(folder / name, *chosen)
    for name, chosen in ROTATED.items():
        save(folder / name, *chosen)
    source = save_small_multimodal(
        folder / "sources" / MULTIMODAL, MULTIMODAL, **SIZES | HEADS, sliding_window=None
    )
    chosen = one_shot("layer", **R3, sparsity="2:4", nsamples=len(CALIBRATION))
    prune(source, chosen, out=folder / MULTIMODAL, format="packed")
    save(folder / "straddles", *STRADDLES)
    save(folder / "unnamed", *ROTATED["residual"])
    without_norm_prefix(folder / "unnamed")
    for tensor in (*LACKING, *LACKING_ROTATED):
        save(folder / tensor, *(SERVED["plain"][0] if tensor in LACKING else ROTATED["residual"]))
        for file in (folder / tensor).glob("model*.safetensors"):
            tensors = {name: t.clone() for name, t in load_file(file).items() if name != tensor}
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """Number of ranks → the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    installed = folder / "site" / "drot-0.dist-info"  # what pip would install of drot, for SGLang's search
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: drot\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in entry_points("sglang.srt.plugins").items()]
    (installed / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *lines]))
    names = (*SERVED, *ROTATED, MULTIMODAL, *REFUSED, "straddles", "unnamed", *LACKING, *LACKING_ROTATED)
    models = [checkpoints / name for name in names]
    path = (installed.parent,)
    return {ranks: run_ranks("sglang_rank.py", folder, ranks, models, *path) for ranks in (1, 2)}


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [*SERVED, *ROTATED, MULTIMODAL])
def test_sglang_computes_the_logits_of_drot(checkpoints, results, name, ranks):
    if (name, ranks) in itertools.product(ONE_RANK, [2]):
        assert "does not support tensor parallel" in results[ranks][0][name]
        return
    model = drot.load(checkpoints / name, device="cpu")
    expected = model(torch.arange(3, 17)[None]).logits[0, -1]
    for found in results[ranks]:
        found = found[name]
        assert isinstance(found, dict), found
        architecture = plugin.OF_TRANSFORMERS if name not in SERVED else SERVED[name][1]
        assert (found["architecture"], found["quantization"]) == (architecture, "drot")
        torch.testing.assert_close(found["logits"], expected, atol=1e-4, rtol=1e-4)


def dense_weight(stored, linear):
    """The weight [out, in] of a linear of a checkpoint whose tensors are `stored`."""
    if f"{linear}.weight" in stored:
        return stored[f"{linear}.weight"]
    return unpack24_ref(stored[f"{linear}.values"], stored[f"{linear}.positions"])


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SERVED)
def test_each_linear_computes_the_dense_product(checkpoints, results, name, ranks):
    stored = saved_tensors(checkpoints / name)
    for rank, found in enumerate(results[ranks]):
        products = found[name]["products"]
        assert len(products) == 4 * 3  # three layers
        for linear, (x, y) in products.items():
            path, _, last = linear.rpartition(".")
            axis = 0 if last in STACKED else 1
            parts = [dense_weight(stored, f"{path}.{part}") for part in STACKED.get(last, (last,))]
            weight = torch.cat([part.chunk(ranks, axis)[rank] for part in parts])
            torch.testing.assert_close(y, x @ weight.T, atol=1e-5, rtol=1e-5)


@needs_sglang
@pytest.mark.slow
def test_only_packed_linears_have_no_dense_weight(results):
    names = results[2][0]["mixed"]["names"]
    assert [n for n in names if n.endswith("_proj.weight")] == ["model.layers.1.mlp.down_proj.weight"]
    assert "model.layers.0.mlp.down_proj.values" in names


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plugin_does_not_serve_is_refused(results, name):
    message = results[2][0][name]
    assert REFUSED[name][1] in message and "\n" not in message


@needs_sglang
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tensor", [*LACKING, *LACKING_ROTATED])
def test_a_missing_tensor_is_refused(results, tensor, ranks):
    """SGLang itself does not look for missing tensors."""
    for found in results[ranks]:
        message = found[tensor]
        lacks = "1 tensor, the first is " if tensor in LACKING_ROTATED else ""
        assert f"the checkpoint lacks {lacks}{tensor}" in message and "\n" not in message


@needs_sglang
@pytest.mark.slow
def test_a_norm_of_another_name_is_refused(results):
    message = results[1][0]["unnamed"]
    assert "the checkpoint lacks 1 tensor" in message or "No module or parameter named" in message


@needs_sglang
@pytest.mark.slow
def test_a_rank_has_the_whole_q_and_its_blocks_of_r3(checkpoints, results):
    stored = saved_tensors(checkpoints / "residual")
    blocks = stored["model.layers.0.mlp.down_rotation.weight"]
    assert len(blocks) == 4
    for rank, found in enumerate(results[2]):
        held = found["residual"]["rotations"]
        assert torch.equal(held["model.layers.0.mlp.down_rotation.weight"], blocks[2 * rank : 2 * rank + 2])
        q = "model.layers.0.residual_rotation.weight"
        assert torch.equal(held[q], stored[q])


@needs_sglang
@pytest.mark.slow
def test_a_block_that_would_straddle_two_ranks_is_refused(results):
    assert isinstance(results[1][0]["straddles"], dict)
    message = results[2][0]["straddles"]
    assert "cannot be divided among 2 tensor-parallel ranks" in message and "\n" not in message


@needs_sglang
@pytest.mark.slow
def test_graphs_of_experts_are_refused():
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from drot.serving.sglang_transformers import refuse_graphs

    packed, dense = mixture_config(packed=True), mixture_config(down_rotation=16)
    graphs = CudaGraphConfig(decode=PhaseConfig(backend="full"))
    refuse_graphs(None, dense, torch.bfloat16)
    refuse_graphs(CudaGraphConfig(decode=PhaseConfig(), prefill=PhaseConfig()), dense, torch.bfloat16)
    refuse_graphs(graphs, packed, torch.bfloat16)
    for config, dtype in ((dense, torch.bfloat16), (packed, torch.float32)):
        with pytest.raises(UserError, match="without CUDA graphs"):
            refuse_graphs(graphs, config, dtype)


@needs_sglang
@pytest.mark.slow
def test_several_pipeline_ranks_are_refused():
    from drot.serving.sglang_transformers import DrotTransformersForCausalLM

    model = SimpleNamespace(pp_group=SimpleNamespace(world_size=2))
    with pytest.raises(UserError, match="takes one pipeline-parallel rank, got 2"):
        DrotTransformersForCausalLM.pipeline_parallel(model)


@needs_sglang
@pytest.mark.slow
def test_sglang_without_the_plugin_refuses(checkpoints):
    code = f"""
from sglang.srt.configs.model_config import ModelConfig
for name in ("sys", "drot"):
    __import__(name)
    try:
        ModelConfig(model_path={str(checkpoints / "plain")!r})
    except ValueError as error:
        print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "model type `drot`" in done.stdout and "Unknown quantization method: drot" in done.stdout, done
