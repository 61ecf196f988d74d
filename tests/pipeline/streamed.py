"""Prunes a random checkpoint in less memory than its weights take, and compares with a run on the loaded model.

    python tests/pipeline/streamed.py --megabytes 3000 --hidden 1536 --intermediate 4096 --limit 1200

The limit is RLIMIT_DATA: what the process may allocate beyond what the interpreter has with drot and torch.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import drot
from drot.checkpoint.load import load_model
from drot.config import Recipe

TOKENS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
RECIPE = Recipe().replace(mode="layer", steps=2, solve="none", target="self", seqlen=64, down_rotation=32)


def write_model(folder: Path, megabytes: int, hidden: int, intermediate: int) -> None:
    """Writes a random LLaMA in bf16, layer by layer, with as many layers as `megabytes` hold."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = 4 * hidden**2 + 3 * hidden * intermediate
    layers = megabytes * 10**6 // (2 * layer)
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, max_position_embeddings=128,
        dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    config.save_pretrained(folder)
    tensors = {name: tensor.bfloat16() for name, tensor in weights.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def prune_within(model: Path, out: Path, limit: int | None, *, loaded: bool = False) -> None:
    """Prunes in this process. limit: megabytes that it may allocate. loaded: whether it loads the model."""
    from drot.pipeline import prune  # noqa: F401  what the interpreter has

    if limit is not None:
        status = Path("/proc/self/status").read_text().split("VmData:")[1]
        allowed = int(status.split()[0]) * 1024 + limit * 10**6
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    options = dict(out=out, calibration=TOKENS, device="cpu")
    if loaded:
        drot.prune(load_model(model, "float32"), RECIPE, save_dtype="bfloat16", **options)
    else:
        drot.prune(str(model), RECIPE, tokenizer=lambda text: text, **options)


def in_a_process(model: Path, out: Path, limit: int | None, *, loaded: bool = False) -> bool:
    """Whether `prune_within` ends well in a process of its own."""
    command = [sys.executable, __file__, "--model", str(model), "--out", str(out)]
    command += [] if limit is None else ["--limit", str(limit)]
    done = subprocess.run(command + ["--loaded"] * loaded, capture_output=True, text=True)
    print(done.stderr[-1500:])
    return done.returncode == 0


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints have the same bytes in all files with weights, and there are any."""
    files, others = (sorted(folder.glob("model*.safetensors")) for folder in (one, other))
    names = [file.name for file in files]
    return len(names) > 1 and names == [file.name for file in others] and all(
        a.read_bytes() == b.read_bytes() for a, b in zip(files, others, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--loaded", action="store_true")
    parser.add_argument("--megabytes", type=int, default=3000)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=4096)
    given = parser.parse_args()
    if given.model is not None:
        prune_within(given.model, given.out, given.limit, loaded=given.loaded)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "dense", given.megabytes, given.hidden, given.intermediate)
        for out, limit in (("limited", given.limit), ("free", None)):
            print(f"{out}: {in_a_process(folder / 'dense', folder / out, limit)}")
        print(f"same bytes: {same_weights(folder / 'limited', folder / 'free')}")


if __name__ == "__main__":
    main()
