"""Prunes a random LLaMA that is read layer by layer, and prints by how many megabytes the process grew.

    PYTHONPATH=tests python tests/pipeline/streamed.py --megabytes 3000 --hidden 1536 --mode layer

The model is made in a folder that is removed afterwards. `--mode none` takes seconds, `layer` minutes.
"""

import argparse
import resource
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_models import letter_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import drot
from drot.config import Recipe
from drot.core.files import write_json

TOKENS = torch.randint(0, 90, (2, 32), generator=torch.Generator().manual_seed(0))


def write_model(folder: Path, megabytes: int, hidden: int) -> None:
    """Writes a random LLaMA in bf16, a file a layer, with as many layers as `megabytes` hold."""
    inner = hidden * 11 // 4
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=inner, num_attention_heads=hidden // 64,
        num_hidden_layers=megabytes * 10**6 // (2 * (4 * hidden**2 + 3 * hidden * inner)),
        num_key_value_heads=hidden // 64, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    parts: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        parts.setdefault(name.split(".")[2] if ".layers." in name else "ends", {})[name] = shape
    map_of_files = {}
    for part, names in parts.items():
        tensors = {
            name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
            for name, shape in names.items()
        }
        folder.mkdir(exist_ok=True)
        file = f"model-{part}.safetensors"
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / file)
        map_of_files |= dict.fromkeys(names, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": map_of_files})
    config.save_pretrained(folder)


def resident_peak() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=3000)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--mode", default="none")
    given = parser.parse_args()
    recipe = Recipe().replace(mode=given.mode, steps=2, solve="none", target="self", seqlen=32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "dense", given.megabytes, given.hidden)
        letter_tokenizer().save_pretrained(folder / "dense")
        before = resident_peak()
        drot.prune(
            str(folder / "dense"),
            recipe,
            out=folder / "out",
            calibration=TOKENS,
            device="cpu",
        )
    print(f"grew by {(resident_peak() - before) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
