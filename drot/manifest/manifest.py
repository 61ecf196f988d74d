"""The manifest of a checkpoint, drot.json: the recipe, the machine, the versions and the figures."""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drot.config import PruningConfig, Recipe
from drot.core.checks import shortened
from drot.core.errors import UserError
from drot.core.files import write_json
from drot.core.reading import check_schema, read_json
from drot.machine.devices import dtype_name
from drot.machine.environment import device_name, machine, versions
from drot.manifest.integrity import DIGEST, MANIFEST, digest_fits, folder_records, with_digest
from drot.manifest.schema import FinetunedManifest, PrunedManifest
from drot.sparse.packed import dense_linears
from drot.text.source import calibration_hash

logger = logging.getLogger("drot")

FORMAT_VERSION = 1


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Writes drot.json with a digest of its own content; returns what was written, in plain JSON types.

    Raises WriteError if writing fails.
    """
    written: dict[str, Any] = json.loads(json.dumps(with_digest(manifest)))
    write_json(folder / MANIFEST, written)
    return written


def update_manifest(
    folder: Path | str, change: Callable[[dict[str, Any]], dict[str, Any]], rewritten: Iterable[str] = ()
) -> dict[str, Any]:
    """Replaces the manifest of a checkpoint by `change(manifest)` and returns it. The digest is made anew.

    Programs that update the same manifest wait for each other. Raises UserError for a manifest that is broken
    or whose digest does not fit, because a new digest would hide the damage.

    folder: the checkpoint.
    change: makes the new manifest from the old, as in `lambda old: old | {"evaluations": figures}`.
    rewritten: names of files that the caller has written into the folder, whose hashes are recorded.
    """
    folder = Path(folder)
    with _turn(folder):
        manifest = read_manifest(folder, recipe_needed=False)
        if not digest_fits(manifest):
            raise UserError(f"{folder / MANIFEST} was edited or damaged: it is not updated; copy it again")
        return _write_records(folder, change(manifest), rewritten)


def accept_files(folder: Path | str) -> dict[str, Any]:
    """Records the hashes of all files of a checkpoint as they are now; returns the manifest.

    For a checkpoint that was changed on purpose. Raises UserError if it holds no readable manifest.
    """
    folder = Path(folder)
    with _turn(folder):
        manifest = read_manifest(folder, recipe_needed=False) | {"files": {}}
        return _write_records(folder, manifest, None)


def _write_records(folder: Path, manifest: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    if "files" in manifest:  # a checkpoint of an older drot has no hashes
        manifest = manifest | {"files": manifest["files"] | folder_records(folder, names)}
    return write_manifest(folder, manifest)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Waits until no other program updates the manifest in `folder`, if the file system has locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        raise UserError(f"{folder} is not a readable folder: name a folder that drot prune wrote") from None
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_manifest(path: Path | str, *, recipe_needed: bool = True) -> dict[str, Any]:
    """The manifest in the checkpoint folder `path`, checked by its schema (drot/manifest/schema.py).

    Raises UserError if the manifest is missing or broken.

    Logs a warning if the digest of the manifest does not fit its content.

    recipe_needed: whether to refuse the manifest of a model that another program pruned and drot fine-tuned.
    """
    file = Path(path) / MANIFEST
    if not file.exists():
        raise UserError(f"{path} holds no {MANIFEST}: name a folder that drot prune wrote")
    manifest = read_json(file)
    if (version := manifest.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{file} must be of format_version {FORMAT_VERSION}, got {shortened(version)}: "
            "use the version of drot that wrote it"
        )
    elsewhere = "recipe" not in manifest and "finetune" in manifest
    check_schema(FinetunedManifest if elsewhere else PrunedManifest, manifest, str(file))
    if not digest_fits(manifest):
        logger.warning("%s was edited or damaged: its content does not fit its %s", file, DIGEST)
    if elsewhere and recipe_needed:
        raise UserError(f"{path} was pruned by another program and fine-tuned by drot: name its original")
    return manifest


def patterns_of(manifest: dict[str, Any]) -> PruningConfig:
    """The sparsity of every linear of the model that `manifest` belongs to.

    The other settings of the pruning are not those of the manifest. Manifests of older versions have neither
    `keep` nor `sparsity_of`.
    """
    pruning = manifest["recipe"]["pruning"]
    return PruningConfig(
        method="magnitude",  # with which any m goes
        sparsity=pruning["sparsity"],
        keep=pruning.get("keep", ()),
        sparsity_of=pruning.get("sparsity_of", ()),
    )


def dense_linears_of(path: Path | str, config: Any) -> list[str]:
    """The linears that the checkpoint `path` leaves dense when it is packed, by its manifest.

    It leaves none where the manifest names one sparsity for all linears, and without a manifest. Raises
    UserError if no linear is 2:4.
    """
    if not (Path(path) / MANIFEST).exists():
        return []
    pruning = patterns_of(read_manifest(path))
    return dense_linears(config, pruning) if pruning.mixed else []


def manifest(
    recipe: Recipe, tokens: Tensor, device: torch.device, dtype: torch.dtype, **figures: Any
) -> dict[str, Any]:
    """The manifest of a run in plain JSON types.

    Args:
        recipe: the settings of the run.
        tokens: the calibration tokens, of which the manifest records the shape and the SHA-256.
        device: the device that the run used.
        dtype: dtype of the saved weights.
        figures: further entries, such as the figures of each layer.
    """
    return {
        "format_version": FORMAT_VERSION,
        "versions": versions(),
        "device": device_name(device),
        "machine": machine(device),
        "dtype": dtype_name(dtype),
        "recipe": recipe.to_dict(),
        "calibration": {"sha256": calibration_hash(tokens), "shape": list(tokens.shape)},
        **figures,
    }
