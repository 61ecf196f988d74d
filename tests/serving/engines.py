"""What the tests of the plugins for vLLM and SGLang share: small checkpoints, and ranks in processes."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from runs import TOKENS as CALIBRATION
from runs import one_shot, prune
from safetensors.torch import load_file, save_file
from small_families import FAMILIES as SETTINGS
from small_models import small_model

from drot.model.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
#: sizes whose halves the kernels take; four blocks of R3 with 64 columns
SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
HEADS = {"head_dim": 32}
R3 = {"down_rotation": 64}
#: sizes of families whose heads share a latent vector, or whose norms cannot be divided among two ranks
LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 64) | {"num_key_value_heads": 4}
LATENT |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32)
OWN_SIZES = {"youtu": LATENT, "minicpm3": LATENT, "cohere": HEADS | {"use_qk_norm": False}}
GEMMA4 = {"head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 2}
OWN_SIZES |= {"gemma4_text": GEMMA4 | {"hidden_size_per_layer_input": 64}, "gemma4_unified_text": GEMMA4}
SCALED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
SCALED |= {"original_max_position_embeddings": 8}  # beyond them, the queries are scaled
OWN_SIZES["ministral3"] = HEADS | {"rope_parameters": SCALED}
OWN_SIZES["opt"] = {"num_key_value_heads": 4, "ffn_dim": 256}
OWN_SIZES["qwen3_5_text"] = HEADS | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
OWN_SIZES["mistral4"] = LATENT
#: those that vLLM's kernels of latent attention take
KEPT_LATENT = LATENT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
OWN_SIZES |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), KEPT_LATENT)
OWN_SIZES["gemma4_text-experts"] = GEMMA4
#: the widths of experts, and of the MLPs beside them, which follow from other sizes in some families
WIDTHS = ("moe_intermediate_size", "prefix_dense_intermediate_size")
WIDTHS += ("shared_expert_intermediate_size", "shared_intermediate_size")


def mixture_config(**keys):
    """The config of a small mixture. keys: of its quantization_config."""
    config = small_model("qwen3_moe").config
    config.quantization_config = {"quant_method": "drot", **keys}
    return config


def rotated(family):
    """What `save` takes for a packed model of `family` with all rotations that the family takes."""
    sizes = OWN_SIZES.get(family, HEADS) | {
        key: 128 for key in WIDTHS if isinstance(SETTINGS[family].get(key), int)
    }
    fields = R3 if FAMILIES[family.partition("-")[0]].down_modules else {}
    return family, sizes, "layer", fields, "packed"


def _save_renamed(folder, rename):
    for file in folder.glob("model*.safetensors"):
        tensors = {new: t.clone() for name, t in load_file(file).items() if (new := rename(name))}
        save_file(tensors, file, metadata={"format": "pt"})


def without_norm_prefix(folder):
    """Renames a norm of a checkpoint, so that its layer says not that it rotates."""
    rotated, stock = (f"model.layers.0.{p}input_layernorm.weight" for p in ("rotated_", ""))
    _save_renamed(folder, lambda name: stock if name == rotated else name)


def without_tensor(folder, missing):
    """Leaves a tensor out of a checkpoint."""
    _save_renamed(folder, lambda name: None if name == missing else name)


def save(folder, family, sizes, mode, fields, format):
    """Prunes a small model of `family` to 2:4 and saves it in `folder`."""
    fields = {"sparsity": "2:4", "down_rotation": "none", "nsamples": len(CALIBRATION)} | fields
    fields = {key: value for key, value in fields.items() if mode != "none" or key != "down_rotation"}
    prune(small_model(family, **SIZES | sizes), one_shot(mode, **fields), out=folder, format=format)


def entry_points(group):
    """The entry points of pyproject.toml by which an engine finds its plugin."""
    project = ROOT / "pyproject.toml"
    if not project.exists():
        pytest.skip("needs the checkout")
    return tomllib.loads(project.read_text())["project"]["entry-points"][group]


def run_ranks(script, folder, ranks, models, *path):
    """The results of each rank that `script` computes: by the name of the checkpoint, a dict or a message.

    path: further folders from which the ranks import.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path)))}
    processes = []
    for rank in range(ranks):
        arguments = [str(rank), str(ranks), str(folder / f"meeting{ranks}"), str(folder / f"{ranks}-{rank}")]
        command = [sys.executable, str(Path(__file__).parent / script), *arguments, *map(str, models)]
        log = (folder / f"log{ranks}-{rank}").open("w")
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=1200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = [(folder / f"log{ranks}-{rank}").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, logs[0][-4000:]
    return [torch.load(folder / f"{ranks}-{rank}") for rank in range(ranks)]
