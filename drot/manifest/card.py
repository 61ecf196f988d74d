"""The model card of a checkpoint, README.md, which the Hugging Face hub shows and reads.

The card is made from drot.json. Text that a user writes above or below drot's part of the card stays when the
card is written again, and so do entries of the metadata that drot does not write.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drot.core.files import new_file
from drot.manifest.manifest import MANIFEST, read_manifest, update_manifest

CARD = "README.md"
#: what surrounds drot's part of the card
BEGIN, END = "<!-- drot: begin -->", "<!-- drot: end -->"
#: the form of a name on the hub, as in meta-llama/Llama-3.1-8B
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: entries of the metadata that are taken from the card of the base model
LICENSE = ("license", "license_name", "license_link")
#: seconds to wait for the card of the base model
PATIENCE = 3.0


def write_card(folder: str | Path) -> None:
    """Writes README.md for the checkpoint in `folder` from its drot.json, or brings it up to date.

    Raises UserError if the manifest is missing or broken, and if nothing can be written.
    """
    folder = Path(folder)
    save_card(folder, read_manifest(folder, recipe_needed=False))
    update_manifest(folder, lambda manifest: manifest, [CARD])


def save_card(folder: Path, manifest: dict[str, Any], name: str = "", tags: Sequence[str] = ()) -> None:
    """Writes README.md for `manifest` to `folder`. The hash of the file is not recorded.

    Args:
        folder: the folder of the checkpoint. A card that is there is brought up to date.
        manifest: the content of drot.json.
        name: the name of the model; "" is the name of the folder.
        tags: further tags.
    """
    file = folder / CARD
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    with new_file(file) as part:
        part.write_text(card(manifest, name or folder.resolve().name, before, tags), encoding="utf-8")


def card(manifest: dict[str, Any], name: str, before: str = "", tags: Sequence[str] = ()) -> str:
    """The text of a card.

    manifest: the content of drot.json.
    name: the name of the model.
    before: the card that is brought up to date; "" makes a new card.
    tags: further tags.
    """
    from huggingface_hub import ModelCard, ModelCardData

    old = ModelCard(before, ignore_metadata_errors=True) if before.startswith("---") else None
    kept = old.data.to_dict() if old is not None else {}
    if "license" not in kept:
        kept |= license_of(str(base)) if (base := manifest.get("base_model")) else {}
    adapter = bool(manifest.get("finetune")) and manifest["finetune"][-1]["settings"].get("keep_adapter")
    new: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys([*(kept.get("tags") or []), *_tags(manifest), *tags])),
    }
    if on_hub := base_name(manifest):
        new["base_model"] = on_hub
    kept.pop("model-index", None)
    if results := _results(manifest):
        new |= {"eval_results": results, "model_name": name}
    data = ModelCardData(**(kept | new))
    text = f"{BEGIN}\n\n{_body(manifest, name)}\n{END}"
    found = before if old is None else old.text
    if BEGIN in found and END in found:
        text = found[: found.index(BEGIN)] + text + found[found.index(END) + len(END) :]
    elif found.strip():
        text = f"{text}\n\n{found.strip()}\n"
    return f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n"


def base_name(manifest: dict[str, Any]) -> str | None:
    """The base model's name on the hub; None for a local folder, whose path is nobody's business."""
    base = str(manifest.get("base_model") or "")
    return base if HUB_NAME.fullmatch(base) and not Path(base).exists() else None


def license_of(model: str) -> dict[str, Any]:
    """The license in the card of `model`, a hub name or a folder; {} if there is none or no network."""
    from huggingface_hub import ModelCard, hf_hub_download

    file: Path | str = Path(model) / CARD
    try:
        if not Path(file).exists():
            if not HUB_NAME.fullmatch(model) or Path(model).exists():
                return {}
            file = hf_hub_download(model, CARD, etag_timeout=PATIENCE)
        data = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no such file, a gated model, a card that is no YAML: no license is known
        return {}
    return {key: data[key] for key in LICENSE if data.get(key)}


def _tags(manifest: dict[str, Any]) -> list[str]:
    tags = ["drot", "pruned", "sparse"]
    if "recipe" in manifest:
        pruning = manifest["recipe"]["pruning"]
        tags += [pruning["method"], str(pruning["sparsity"])]
        if manifest["recipe"]["rotation"]["mode"] != "none":
            tags.append("denoiserotator")
    return tags


def _results(manifest: dict[str, Any]) -> list[Any]:
    """The recorded evaluations for the metadata. A figure that is not finite is left out."""
    from huggingface_hub import EvalResult

    results: list[tuple[str, str, Any, dict[str, Any] | None]] = []
    for entry in manifest.get("evaluations", []):
        for source, value in entry.get("perplexity", {}).items():
            results.append(("perplexity", Path(source).name, value, {"windows": entry.get("seqlen")}))
        for task, value in entry.get("tasks", {}).items():
            results.append(("accuracy", task, value, None))
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset,
            dataset_name=dataset,
            metric_type=metric,
            metric_value=value,
            metric_args=arguments,
        )
        for metric, dataset, value, arguments in results
        if isinstance(value, int | float)
    ]


def _body(manifest: dict[str, Any], name: str) -> str:
    base = str(manifest.get("base_model") or "a model that was loaded in Python")
    shown = base if base_name(manifest) else Path(base).name
    parts = [
        f"# {name}\n",
        f"{shown}, with {manifest['sparsity']:.1%} of the weights of its decoder layers' linears set to zero "
        f"by drot ([DenoiseRotator](https://arxiv.org/abs/2505.23049)).\n",
        "## Load it\n",
        _loading(manifest, name),
        *_figures(manifest),
        "## How it was made\n",
        *_making(manifest, base if base_name(manifest) else shown),
    ]
    return "\n".join(parts)


def _loading(manifest: dict[str, Any], name: str) -> str:
    stock = manifest.get("stock_architecture", False)
    first = "" if stock else "import drot  # without drot the model cannot be opened\n"
    return (
        f"```python\n{first}from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _figures(manifest: dict[str, Any]) -> list[str]:
    """The section with the recorded evaluations; empty if there are none."""
    rows = []
    for entry in manifest.get("evaluations", []):
        what = f"{entry.get('dtype')}, {str(entry.get('date')).partition('T')[0]}"
        for source, value in entry.get("perplexity", {}).items():
            shown = "not finite" if value is None else f"{value:.3f}"
            measure = f"perplexity on {Path(source).name}, windows of {entry.get('seqlen')} tokens"
            rows.append((measure, shown, what))
        for source, figures in entry.get("agreement", {}).items():
            measure = f"next tokens as {Path(str(entry.get('against'))).name} on {Path(source).name}"
            rows.append((measure, f"{figures['equal_tokens']:.1%}", what))
        for task, value in entry.get("tasks", {}).items():
            rows.append((f"accuracy in {task}", "not finite" if value is None else f"{value:.2%}", what))
    if not rows:
        return []
    lines = [f"| {_cell(measure)} | {value} | {_cell(what)} |" for measure, value, what in rows]
    return ["## Figures\n", "| measure | value | measured |\n|---|---|---|", *lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _making(manifest: dict[str, Any], base: str) -> list[str]:
    parts = []
    if "recipe" in manifest:
        import yaml

        recipe = yaml.safe_dump(manifest["recipe"], sort_keys=False, allow_unicode=True).strip()
        rotations = " --rotations FILE" if manifest.get("rotations_file") else ""
        calibration = manifest["calibration"]
        shape = " × ".join(map(str, calibration["shape"]))
        parts += [
            f"```\ndrot prune {base} --recipe {MANIFEST}{rotations} --out FOLDER\n```\n",
            f"repeats the run with its recipe, which {MANIFEST} holds:\n",
            f"```yaml\n{recipe}\n```\n",
            f"Calibration: {shape} tokens, SHA-256 {calibration['sha256']}.\n",
        ]
    else:
        parts.append("The model was pruned by another program and fine-tuned by drot.\n")
    for record in manifest.get("finetune", []):
        text = record["text"]
        parts.append(
            f"Fine-tuned ({record['method']}) in {record['steps']} steps on {Path(text['source']).name}; "
            f"held-out perplexity {record['held_out']['perplexity_before']:.3f} → "
            f"{record['held_out']['perplexity_after']:.3f}.\n"
        )
    versions = manifest.get("versions") or (manifest.get("finetune") or [{}])[-1].get("versions", {})
    listed = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    parts.append(
        f"Weights: {manifest.get('format', 'dense')}, {manifest.get('dtype')}. Made with {listed}.\n"
    )
    return parts
