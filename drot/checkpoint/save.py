"""Writing of checkpoints. A folder is complete or does not exist."""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from drot.checkpoint.card import CARD, save_card
from drot.checkpoint.integrity import check_file, folder_records, is_loaded
from drot.checkpoint.manifest import CheckpointManifest, write_manifest
from drot.checkpoint.opening import quiet_transformers
from drot.checkpoint.resume import OWN_TEXT
from drot.checkpoint.shards import save_in_shards
from drot.core.checks import shortened
from drot.core.errors import UserError, quoted
from drot.core.files import WriteError, check_writable, finish_folder, new_folder, writing
from drot.core.hashes import FileRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: the class of the manifest of a checkpoint; None for a model that drot neither pruned nor fine-tuned
AnyManifest = TypeVar("AnyManifest", bound=CheckpointManifest | None)


def check_output(out: Path, *, dry_run: bool = False) -> None:
    """Raises UserError if `out` holds files already, and as `check_writable` does."""
    check_writable(out, dry_run=dry_run)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: name another `out` or remove it")
    if out.is_symlink() or os.path.ismount(out):  # save_checkpoint could not rename a folder to it
        raise UserError(f"{out} is a link or a mount point: name a folder inside it ({out}/NAME)")
    if out.resolve() == Path.cwd():
        raise UserError(
            f"`out` must not be the current folder, got {out}: name a folder inside it ({out}/NAME)"
        )


def check_saves(model: "PreTrainedModel", tokenizer: Any) -> None:
    """Raises UserError if the small files that a run writes at its end cannot be written, with the reason.

    transformers loads settings that it does not save, as an `output_attentions` of true in config.json.

    tokenizer: None is not written.
    """
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UserError(
            f"`tokenizer` must have a save_pretrained, which writes it to `out`; got {shortened(tokenizer)}"
        )
    temporary = Path(tempfile.gettempdir())
    parts = {"config": model.config, "generation config": model.generation_config, "tokenizer": tokenizer}
    for name, part in parts.items():
        try:
            with (
                quiet_transformers(),
                writing(temporary),
                tempfile.TemporaryDirectory(dir=temporary) as folder,
            ):
                if part is not None:
                    part.save_pretrained(folder)
        except WriteError:  # a full disk of temporary files says nothing about that of `out`
            return
        except Exception as error:
            raise UserError(
                f"transformers does not save the {name} of the model: {quoted(error)}; change it"
            ) from error


def save_checkpoint(
    model: "PreTrainedModel",
    tokenizer: Any,
    manifest: AnyManifest,
    out: Path,
    *,
    scratch: Path | None = None,
    write_layers: Callable[[Path], Mapping[Path, FileRecord]] | None = None,
    write_more: Callable[[Path], None] | None = None,
    finish: Callable[[AnyManifest], None] | None = None,
) -> AnyManifest:
    """Writes the model, the tokenizer and the manifest to `out`, which is complete if it exists.

    Returns the manifest as it was written, with the hashes of all files. Raises WriteError if writing fails,
    as on a full disk.

    tokenizer: None writes no tokenizer.
    manifest: None writes no manifest.
    out: a folder that is new or empty.
    scratch: a folder for the temporary folder, as in `new_folder`.
    write_layers: None lets the model write its weights in its own way, as an adapter does. Otherwise each
        layer gets a shard of its own. The function is called first, with the new folder. It returns the
        shards of all layers with their hashes, which it wrote there (`save_layers`) or which are written
        already, on the disk of `out`.
    write_more: writes further files into the folder that it is called with.
    finish: sets the last entries of the manifest, when all else is written and synced.
    """
    if hasattr(model, "drot_files"):
        model.drot_files = None  # type: ignore[assignment]  # `manifest` replaces the loaded one
    with new_folder(out, scratch) as part:
        hashes: Mapping[str, FileRecord] = {}
        if write_layers is None:
            with quiet_transformers():  # peft reads the config of the model as one of another class
                model.save_pretrained(part)
            (part / CARD).unlink(missing_ok=True)  # a form by peft, with the path of the model
        else:
            hashes = save_in_shards(model, part, write_layers(part))
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        if write_more is not None:
            write_more(part)
        if manifest is not None:
            save_card(part, manifest)
            manifest.files = folder_records(part, known=hashes)
            if finish is not None:
                finish_folder(part)
                finish(manifest)
            write_manifest(part, manifest)
    return manifest


def copy_files(checkpoint: Path, folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Copies those of `files` that `checkpoint` holds. Raises UserError for a file with another record."""
    for name, record in files.items():
        if (checkpoint / name).exists():
            check_file(checkpoint / name, record)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint / name, folder / name)


def files_beside(manifest: CheckpointManifest | None) -> dict[str, FileRecord]:
    """What a run left beside the weights: the text that the model wrote, and the rotations."""
    files = {} if manifest is None else manifest.files
    return {
        name: record
        for name, record in files.items()
        if name == OWN_TEXT or (name.endswith(".safetensors") and not is_loaded(name))
    }
