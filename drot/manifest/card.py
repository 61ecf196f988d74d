"""The model card of a checkpoint, README.md, which the Hugging Face hub shows and reads.

The card is made from drot.json. Text that a user writes above or below drot's part of the card stays when the
card is written again, and so do entries of the metadata that drot does not write.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drot.core.files import new_file
from drot.core.hub import HUB_NAME
from drot.manifest.manifest import (
    MANIFEST,
    CheckpointManifest,
    Manifest,
    read_any_manifest,
    update_manifest,
)

CARD = "README.md"
#: what surrounds drot's part of the card
BEGIN, END = "<!-- drot: begin -->", "<!-- drot: end -->"
#: entries of the metadata that are taken from the card of the base model
LICENSE = ("license", "license_name", "license_link")
#: seconds to wait for the card of the base model
PATIENCE = 3.0


def write_card(folder: str | Path) -> None:
    """Writes README.md for the checkpoint in `folder` from its drot.json, or brings it up to date.

    Raises UserError if the manifest is missing or broken, and if nothing can be written.
    """
    folder = Path(folder)
    save_card(folder, read_any_manifest(folder))
    update_manifest(folder, lambda manifest: None, [CARD])


def save_card(folder: Path, manifest: CheckpointManifest, name: str = "", tags: Sequence[str] = ()) -> None:
    """Writes README.md for `manifest` to `folder`. The hash of the file is not recorded.

    Args:
        folder: the folder of the checkpoint. A card that is there is brought up to date.
        manifest: the manifest of the checkpoint.
        name: the name of the model; "" is the name of the folder.
        tags: further tags.
    """
    file = folder / CARD
    before = file.read_text(encoding="utf-8") if file.exists() else ""
    with new_file(file) as part:
        part.write_text(card(manifest, name or folder.resolve().name, before, tags), encoding="utf-8")


def card(manifest: CheckpointManifest, name: str, before: str = "", tags: Sequence[str] = ()) -> str:
    """The text of a card.

    before: the card that is brought up to date; "" makes a new card.
    tags: further tags.
    """
    from huggingface_hub import ModelCard, ModelCardData

    old = ModelCard(before, ignore_metadata_errors=True) if before.startswith("---") else None
    kept = old.data.to_dict() if old is not None else {}
    if "license" not in kept and manifest.base_model:
        kept |= license_of(manifest.base_model)
    adapter = bool(manifest.finetune) and manifest.finetune[-1].settings.keep_adapter
    new: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys([*(kept.get("tags") or []), *_tags(manifest), *tags])),
    }
    if on_hub(manifest.base_model):
        new["base_model"] = manifest.base_model
    kept.pop("model-index", None)
    if results := list(_results(manifest)):
        new |= {"eval_results": results, "model_name": name}
    data = ModelCardData(**(kept | new))
    text = f"{BEGIN}\n\n{_body(manifest, name)}\n{END}"
    found = before if old is None else old.text
    if BEGIN in found and END in found:
        text = found[: found.index(BEGIN)] + text + found[found.index(END) + len(END) :]
    elif found.strip():
        text = f"{text}\n\n{found.strip()}\n"
    return f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n"


def on_hub(model: str) -> bool:
    """Whether `model` is OWNER/MODEL on the hub, and not a local folder, whose path is nobody's business."""
    return "/" in model and HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


def license_of(model: str) -> dict[str, Any]:
    """The license in the card of `model`, a hub name or a folder; {} if there is none or no network."""
    from huggingface_hub import ModelCard, hf_hub_download

    file: Path | str = Path(model) / CARD
    try:
        if not Path(file).exists():
            if not on_hub(model):
                return {}
            file = hf_hub_download(model, CARD, etag_timeout=PATIENCE)
        data = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no network, no such file, a gated model, a card that is no YAML: no license is known
        return {}
    return {key: data[key] for key in LICENSE if data.get(key)}


def _tags(manifest: CheckpointManifest) -> list[str]:
    tags = ["drot", "pruned", "sparse"]
    if isinstance(manifest, Manifest):
        recipe = manifest.recipe
        tags += [recipe.pruning.method, str(recipe.pruning.sparsity)]
        tags += ["denoiserotator"] * (recipe.rotation.mode != "none")
    return tags


def _results(manifest: CheckpointManifest) -> Iterator[Any]:
    """The recorded evaluations for the metadata. A figure that is not finite is left out."""
    from huggingface_hub import EvalResult

    for entry in manifest.evaluations:
        windows = {"windows": entry.seqlen}
        figures = [
            *(("perplexity", Path(text).name, value, windows) for text, value in entry.perplexity.items()),
            *(("accuracy", task, value, None) for task, value in entry.tasks.items()),
        ]
        for metric, dataset, value, arguments in figures:
            if value is not None:
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type=dataset,
                    dataset_name=dataset,
                    metric_type=metric,
                    metric_value=value,
                    metric_args=arguments,
                )


def _body(manifest: CheckpointManifest, name: str) -> str:
    base = manifest.base_model or "a model that was loaded in Python"
    shown = base if on_hub(base) else Path(base).name
    parts = [
        f"# {name}\n",
        f"{shown}, with {manifest.sparsity:.1%} of the weights of its decoder layers' linears set to zero "
        f"by drot ([DenoiseRotator](https://arxiv.org/abs/2505.23049)).\n",
        "## Load it\n",
        _loading(manifest, name),
        *_figures(manifest),
        "## How it was made\n",
        *_making(manifest, shown),
    ]
    return "\n".join(parts)


def _loading(manifest: CheckpointManifest, name: str) -> str:
    first = "import drot  # without drot the model cannot be opened\n"
    return (
        f"```python\n{'' if manifest.stock_architecture else first}"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```\n'
    )


def _figures(manifest: CheckpointManifest) -> list[str]:
    """The section with the recorded evaluations; empty if there are none."""
    rows = []
    for entry in manifest.evaluations:
        what = f"{entry.dtype}, {entry.date.partition('T')[0]}"
        for text, value in entry.perplexity.items():
            measure = f"perplexity on {Path(text).name}, windows of {entry.seqlen} tokens"
            rows.append((measure, "not finite" if value is None else f"{value:.3f}", what))
        for text, agreement in entry.agreement.items():
            measure = f"next tokens as {Path(entry.against or '').name} on {Path(text).name}"
            rows.append((measure, f"{agreement.equal_tokens:.1%}", what))
        for task, value in entry.tasks.items():
            rows.append((f"accuracy in {task}", "not finite" if value is None else f"{value:.2%}", what))
    if not rows:
        return []
    lines = [f"| {_cell(measure)} | {value} | {_cell(what)} |" for measure, value, what in rows]
    return ["## Figures\n", "| measure | value | measured |\n|---|---|---|", *lines, ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _making(manifest: CheckpointManifest, base: str) -> list[str]:
    parts = []
    if isinstance(manifest, Manifest):
        import yaml

        recipe = yaml.safe_dump(manifest.recipe.to_dict(), sort_keys=False, allow_unicode=True).strip()
        rotations = " --rotations FILE" if manifest.rotations_file else ""
        shape = " × ".join(map(str, manifest.calibration.shape))
        parts += [
            f"```\ndrot prune {base} --recipe {MANIFEST}{rotations} --out FOLDER\n```\n",
            f"repeats the run with its recipe, which {MANIFEST} holds:\n",
            f"```yaml\n{recipe}\n```\n",
            f"Calibration: {shape} tokens, SHA-256 {manifest.calibration.sha256}.\n",
        ]
        versions = manifest.versions
    else:
        parts.append("The model was pruned by another program and fine-tuned by drot.\n")
        versions = manifest.finetune[-1].versions
    for record in manifest.finetune:
        perplexities = f"{record.held_out.perplexity_before:.3f} → {record.held_out.perplexity_after:.3f}"
        parts.append(
            f"Fine-tuned ({record.method}) in {record.steps} steps on {Path(record.text.source).name}; "
            f"held-out perplexity {perplexities}.\n"
        )
    listed = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    return [*parts, f"Weights: {manifest.format}, {manifest.dtype}. Made with {listed}.\n"]
