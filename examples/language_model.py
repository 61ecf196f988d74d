"""Takes the language model out of a checkpoint that reads images too, and puts it back when it is pruned.

    python examples/language_model.py mistralai/Ministral-3-8B-Base-2512 text
    drot prune text --rotation stock --save-rotations-to rotations.safetensors --out pruned
    python examples/language_model.py mistralai/Ministral-3-8B-Base-2512 whole \\
        --pruned pruned --rotations rotations.safetensors

What is put back must be a stock checkpoint: --rotation none or stock, in the format dense. Every other tensor
and file is copied byte for byte, with one exception. If R1 rotates the residual stream, the last linear of
the projector, which writes images into the stream, takes R1 too. Gemma 3 has no such R1.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from drot.checkpoint.manifest import read_manifest
from drot.core.errors import UserError
from drot.model.families import FAMILIES

#: what the names of the language model's tensors begin with, in old and in new files → in its own files
PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
    "model.": "model.",  # Qwen2.5-VL, whose other names begin with visual.
}
#: the linears that write into the residual stream, by the ends of their names
PROJECTORS = ("multi_modal_projector.linear_2.", "visual.merger.mlp.2.", "visual.merger.linear_fc2.")
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model, as a causal language model that transformers knows.

    That of Qwen2.5-VL is a Qwen2 for text: its three positions of a token are then the same.
    """
    text = config.get_text_config()
    if text.model_type != "qwen2_5_vl_text":
        return text
    entries = {name: value for name, value in text.to_dict().items() if name != "model_type"}
    rope = dict(text.rope_parameters)
    rope.pop("mrope_section", None)
    return Qwen2Config(**entries | {"rope_parameters": rope | {"rope_type": "default"}})


def language_model(whole: PreTrainedModel) -> PreTrainedModel:
    """The language model of `whole`, with the same weights, as a model of its own type."""
    config = text_config(whole.config)
    config.tie_word_embeddings = whole.lm_head.weight is whole.get_input_embeddings().weight
    model = AutoModelForCausalLM.from_config(config, dtype=whole.dtype)
    getattr(model, model.base_model_prefix).load_state_dict(
        whole.model.language_model.state_dict(), assign=True
    )
    model.lm_head.load_state_dict(whole.lm_head.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = whole.generation_config
    return model.eval()


def stream_rotation(pruned: Path, rotations: Path | None) -> torch.Tensor | None:
    """R1 [d, d] of a pruned language model; None if its residual stream is not rotated.

    Raises UserError for a model that is not stock, and for one without the file of its rotations.
    """
    manifest = read_manifest(pruned)
    if not manifest.stock_architecture:
        raise UserError(f"{pruned} must be stock, to be put back: prune with --rotation none or stock")
    family = FAMILIES[json.loads((pruned / CONFIG).read_text(encoding="utf-8"))["model_type"]]
    if manifest.recipe.rotation.mode == "none" or not family.rotates_stream:
        return None
    if rotations is None:
        raise UserError(f"{pruned} has a rotated residual stream: name the file of its --rotations")
    with safe_open(rotations, framework="pt") as handle:
        return handle.get_tensor("layers.0.r1").double()


def own_name(name: str, known: set[str]) -> str | None:
    """The name in the files of the language model of a tensor of the whole model; None for other tensors."""
    found = (new + name.removeprefix(old) for old, new in PREFIXES.items() if name.startswith(old))
    return next((each for each in found if each in known), None)


@torch.no_grad()
def put_back(source: Path, pruned: Path, out: Path, rotations: Path | None = None) -> None:
    """Writes the model in `source`, with the language model in `pruned`, to the new folder `out`."""
    r1 = stream_rotation(pruned, rotations)
    parts = [load_file(file) for file in sorted(pruned.glob("model*.safetensors"))]
    own = {name: tensor for part in parts for name, tensor in part.items()}
    left, files = set(own), sorted(source.glob("model*.safetensors"))
    out.mkdir(parents=True)
    for file in files:
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if (text := own_name(name, left)) is not None:
                tensors[name] = own[text].to(tensor.dtype)
                left.remove(text)
            elif r1 is not None and any(part in name for part in PROJECTORS):
                turned = r1.T @ tensor.double() if tensor.dim() == 2 else tensor.double() @ r1
                tensors[name] = turned.to(tensor.dtype)
        if file == files[-1] and left == {"lm_head.weight"}:  # a rotation has untied it from the embedding
            old = any(name.startswith("language_model.") for name in tensors)
            tensors["language_model.lm_head.weight" if old else "lm_head.weight"] = own[left.pop()]
        save_file(tensors, out / file.name, {"format": "pt"})
    if left:
        raise UserError(f"{source} lacks {len(left)} tensors of {pruned}, the first is {min(left)}")
    for file in source.iterdir():
        if file.is_file() and file not in files and file.name != CONFIG:
            shutil.copyfile(file, out / file.name)
    config = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    if "lm_head.weight" in own:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if (index := out / INDEX).exists():
        entries = json.loads(index.read_text(encoding="utf-8"))
        for file in files:
            with safe_open(out / file.name, framework="pt") as handle:
                entries["weight_map"] |= dict.fromkeys(handle.keys(), file.name)
        index.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a name on the Hugging Face hub, or a local folder")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--pruned", type=Path, help="the pruned language model, which is put back")
    parser.add_argument("--rotations", type=Path, help="the file of its rotations")
    options = parser.parse_args()
    if options.pruned is not None:
        folder = Path(options.model)
        source = folder if folder.is_dir() else Path(snapshot_download(options.model))
        put_back(source, options.pruned, options.out, options.rotations)
        return
    whole = AutoModelForImageTextToText.from_pretrained(options.model, dtype="auto")
    language_model(whole).save_pretrained(options.out)
    AutoTokenizer.from_pretrained(options.model).save_pretrained(options.out)


if __name__ == "__main__":
    main()
