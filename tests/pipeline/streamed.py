"""Prunes a random LLaMA from its files under a hard limit of memory, packs the result and computes its loss,
and compares the bytes with those of a free run. `--alone` leaves the free run out. With `--mode layer` it
saves the rotations too.

    PYTHONPATH=tests python tests/pipeline/streamed.py --megabytes 3000 --hidden 2048 --limit 1200

Each run is a process of its own. The limit is the kernel's RLIMIT_DATA, the memory that the process may have
for data, set to what the process has after its imports and `--limit` megabytes. With `--limit 0`, or on a
system other than Linux, nothing is limited.

The model is made in a folder that is removed afterwards. `--mode none` takes minutes, `layer` longer.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_models import letter_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import drot
from drot.checkpoint.convert import convert
from drot.config import Recipe
from drot.core.files import write_json
from drot.core.hashes import FileRecord, file_record
from drot.evaluation.evaluate import evaluate

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
    letter_tokenizer().save_pretrained(folder)


def hashes(folder: Path) -> list[FileRecord]:
    """The hashes of the files with the weights of a checkpoint."""
    return [file_record(file) for file in sorted(folder.glob("model*.safetensors"))]


def status(name: str) -> int:
    """A figure of this process in bytes, such as VmData."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def run(folder: Path, out: Path, mode: str, limit: int) -> None:
    """Does all steps in this process, with at most `limit` megabytes above those that it has now."""
    resident, data = status("VmHWM"), status("VmData")
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit * 10**6,) * 2)
    recipe = Recipe().replace(mode=mode, steps=2, solve="none", target="self", seqlen=32)
    packed, text = out / "packed", out.with_suffix(".txt")
    text.write_text("abc " * 64)
    rotations = None if mode == "none" else out / "rotations.safetensors"
    steps = {
        "prune": lambda: drot.prune(
            str(folder),
            recipe,
            out=out / "dense",
            save_rotations_to=rotations,
            calibration=TOKENS,
            device="cpu",
        ),
        "convert": lambda: convert(out / "dense", packed, "packed"),
        "eval": lambda: evaluate([packed], ppl=[text], seqlen=32, device="cpu", stream=True),
    }
    for name, step in steps.items():
        step()
        print(f"{name}: grew by {(status('VmHWM') - resident) / 1e6:.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=3000)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--mode", default="none")
    parser.add_argument("--limit", type=int, default=1200)
    parser.add_argument("--alone", action="store_true", help="no free run")
    parser.add_argument("--run", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        run(*given.run, given.mode, given.limit)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "dense", given.megabytes, given.hidden)
        print(f"{sum(each.bytes for each in hashes(folder / 'dense')) / 1e6:.0f} MB of weights", flush=True)
        runs = {"limited": given.limit} if given.alone else {"limited": given.limit, "free": 0}
        for out, limit in runs.items():
            command = [sys.executable, __file__, "--mode", given.mode, "--limit", str(limit)]
            started = time.perf_counter()
            subprocess.run([*command, "--run", folder / "dense", folder / out], check=True)
            seconds = time.perf_counter() - started
            print(f"{out}: {limit or 'no'} MB at most, {seconds:.0f} s", flush=True)
        found = [[hashes(folder / out / part) for part in ("dense", "packed")] for out in runs]
        same = found[0] == found[-1]
    if not given.alone:
        print("the bytes are the same" if same else "the bytes DIFFER")
    sys.exit(not same)


if __name__ == "__main__":
    main()
