"""The model card of a checkpoint, README.md, which the Hugging Face hub shows and reads.

The card is made from drot.json. Text that a user writes above or below drot's part of the card stays when the
card is written again, and so do entries of the metadata that drot does not write.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drot.checkpoint.integrity import CONFIG_FILE
from drot.checkpoint.manifest import CheckpointManifest, Manifest
from drot.checkpoint.opening import multimodal_type
from drot.checkpoint.tables import distinct_figures, finetune_line, measured, short_source, short_task
from drot.core.errors import quoted
from drot.core.files import new_file
from drot.core.hub import HUB_NAME
from drot.core.reading import read_bytes

logger = logging.getLogger("drot")

CARD = "README.md"
#: what surrounds drot's part of the card
BEGIN, END = "<!-- drot: begin -->", "<!-- drot: end -->"
#: entries of the metadata that are taken from the card of the base model
LICENSE = ("license", "license_name", "license_link")
#: what commands in the card call the dense model, and that of an adapter, where it is no model on the hub
MODEL, PRUNED_MODEL = "MODEL", "PRUNED_MODEL"
#: format in which figures of the metadata are compared
FIGURE = ".4f"
#: seconds to wait for the card of the base model
PATIENCE = 3.0


def save_card(folder: Path, manifest: CheckpointManifest, name: str = "", tags: Sequence[str] = ()) -> None:
    """Writes README.md for `manifest` to `folder`. The hash of the file is not recorded.

    A card whose metadata cannot be read is left as it is, and a warning says so.

    Args:
        folder: the folder of the checkpoint. A card that is there is brought up to date.
        manifest: the manifest of the checkpoint.
        name: the name of the model; "" is the name of the folder.
        tags: further tags.
    """
    file = folder / CARD
    try:
        before = read_card(file) if file.exists() else ""
        has_config = (folder / CONFIG_FILE).exists()  # an adapter has none
        images = has_config and multimodal_type(folder) is not None
        text = card(manifest, name or folder.resolve().name, before, tags, images=images)
    except Exception as error:  # huggingface_hub and PyYAML raise many classes for metadata of others
        if not file.exists():
            raise
        logger.warning("%s is not updated, correct it by hand: %s", file, quoted(error))
        return
    with new_file(file) as part:
        part.write_text(text, encoding="utf-8")


def read_card(file: Path) -> str:
    """The text of a card in UTF-8, or else in Latin-1, which any file is. Raises UserError as read_bytes."""
    content = read_bytes(file)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode("latin1")


def card(
    manifest: CheckpointManifest,
    name: str,
    before: str = "",
    tags: Sequence[str] = (),
    *,
    images: bool = False,
) -> str:
    """The text of a card.

    before: the card that is brought up to date; "" makes a new card.
    tags: further tags.
    images: whether the model reads images too.
    """
    from huggingface_hub import ModelCard, ModelCardData

    old = ModelCard(before, ignore_metadata_errors=True) if before.startswith("---") else None
    kept = old.data.to_dict() if old is not None else {}
    if "license" not in kept and manifest.base_model:
        kept |= license_of(manifest.base_model)
    base = manifest.finetune[-1].start if manifest.is_adapter else manifest.base_model
    new: dict[str, Any] = {
        "library_name": "peft" if manifest.is_adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if images else "text-generation",
        "tags": list(dict.fromkeys([*(kept.get("tags") or []), *_tags(manifest), *tags])),
    }
    if on_hub(base):
        new["base_model"] = base
    kept.pop("model-index", None)
    if results := list(_results(manifest)):
        new |= {"eval_results": results, "model_name": name}
    data = ModelCardData(**(kept | new))
    body = _body(manifest, name, images=images).replace("<!--", "<! --")  # a name in it may be that of END
    text = f"{BEGIN}\n\n{body}\n{END}"
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
    if manifest.is_adapter:
        return ["drot", "lora"]
    tags = ["drot", "pruned", "sparse"]
    if isinstance(manifest, Manifest):
        recipe = manifest.recipe
        tags += [recipe.pruning.method, str(recipe.pruning.sparsity)]
        tags += ["denoiserotator"] * (recipe.rotation.mode != "none")
    return tags


def _results(manifest: CheckpointManifest) -> Iterator[Any]:
    """The recorded evaluations for the metadata. A figure that is not finite is left out.

    Figures that are equal in the format FIGURE, of equal texts, windows and dtypes, are one result.
    """
    from huggingface_hub import EvalResult

    found: dict[Any, Any] = {}
    for entry in manifest.evaluations:
        window = {"window_length": entry.seqlen}
        figures = [
            *(("perplexity", Path(text).name, value, window) for text, value in entry.perplexity.items()),
            *(("accuracy", short_task(task), value, None) for task, value in entry.tasks.items()),
        ]
        for metric, dataset, value, arguments in figures:
            if value is not None:
                key = metric, dataset, format(value, FIGURE), entry.seqlen if arguments else None, entry.dtype
                found[key] = EvalResult(
                    task_type="text-generation",
                    dataset_type=dataset,
                    dataset_name=dataset,
                    metric_type=metric,
                    metric_value=value,
                    metric_args=arguments,
                )
    yield from found.values()


def _body(manifest: CheckpointManifest, name: str, *, images: bool) -> str:
    """drot's part of the card, from card.md."""
    import yaml

    base = manifest.base_model or "a model that was loaded in Python"
    pruned = manifest if isinstance(manifest, Manifest) else None
    recipe = yaml.safe_dump(_shown_recipe(pruned), sort_keys=False, allow_unicode=True) if pruned else ""
    versions = pruned.versions if pruned else manifest.finetune[-1].versions
    text: str = _template().render(
        name=name,
        base=base if on_hub(base) else Path(base).name,
        dense_model=_of_hub_or(manifest.base_model, MODEL),
        manifest=manifest,
        model_class="AutoModelForImageTextToText" if images else "AutoModelForCausalLM",
        reader="processor" if images else "tokenizer",
        reader_class="AutoProcessor" if images else "AutoTokenizer",
        pruned_model=_of_hub_or(manifest.finetune[-1].start, PRUNED_MODEL) if manifest.is_adapter else "",
        pruned=pruned,
        recipe=recipe,
        figures=[
            (_cell(measure), value, measured(entry))
            for entry, found in distinct_figures(manifest.evaluations)
            for measure, value in found
        ],
        finetunings=map(finetune_line, manifest.finetune),
        versions=", ".join(f"{package} {version}" for package, version in versions.items() if version),
    )
    return text


@functools.cache
def _template() -> Any:
    """The template card.md, which takes longer to compile than to fill in."""
    from jinja2 import StrictUndefined, Template

    text = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return Template(text, undefined=StrictUndefined, trim_blocks=True)


def _shown_recipe(manifest: Manifest) -> dict[str, Any]:
    """The entries of the recipe, with the calibration text by its file's name."""
    entries = manifest.recipe.to_dict()
    entries["calibration"]["source"] = short_source(entries["calibration"]["source"])
    return entries


def _of_hub_or(model: str, placeholder: str) -> str:
    """What a command in the card calls a model: a local folder is another one where the card is read."""
    return model if on_hub(model) else placeholder


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())
