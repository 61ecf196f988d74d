"""The manifest of a checkpoint, drot.json: its typed class, and how it is read, written and updated."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from drot.checkpoint.integrity import Files, folder_records, is_loaded
from drot.checkpoint.records import (
    DistillationRecord,
    EvaluationRecord,
    FinetuneRecord,
    LayerRecord,
    Machine,
    MemoryPeak,
    PlaceOfStates,
    RotationsFileRecord,
    Seconds,
    Share,
    SharedRotationRecord,
    StoredRecipe,
    TokensRecord,
    Versions,
)
from drot.config.recipe_file import MANIFEST
from drot.core.checks import is_a, shortened
from drot.core.errors import UserError
from drot.core.files import write_json
from drot.core.hashes import DIGEST, digest_fits, with_digest
from drot.core.hub import HUB_NAME
from drot.core.reading import Entries, check_schema, read_json

logger = logging.getLogger("drot")

FORMAT_VERSION: Literal[1] = 1


class CheckpointManifest(Entries):
    """drot.json of any checkpoint that drot wrote. Entries that drot does not know are kept.

    A model that drot pruned has a Manifest. A model that another program pruned and drot fine-tuned has the
    entries of this class only.

    base_model: hub name or folder of the dense model; empty for a model that was made in Python.
    sparsity: the share of zeros in the decoder layers' linears.
    dtype: of the weights.
    stock_architecture: whether the model opens without drot.
    saved_again: whether another program has saved other weights since drot wrote them. Sparsities are those
        of these weights; the other figures of the layers are not.
    files: path → hash of every other file of the folder; empty for a model that was not written.
    digest: SHA-256 of all other entries; empty for a manifest that was not written.
    """

    format_version: Literal[1]
    base_model: str
    sparsity: Share
    dtype: str
    format: Literal["dense", "packed"]
    stock_architecture: bool
    saved_again: bool = False
    finetune: list[FinetuneRecord] = Field(default_factory=list)
    evaluations: list[EvaluationRecord] = Field(default_factory=list)
    files: Files = Field(default_factory=dict)
    digest: str = ""

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter for peft, and the sparse weights lie in another."""
        return bool(self.finetune) and self.finetune[-1].settings.keep_adapter

    def dense_model(self, named: str | Path | None) -> str:
        """The dense model: `named`, or the one that the manifest names.

        Raises UserError if neither is, and if the manifest names a folder that is not there.
        """
        if not (model := named or self.base_model):
            raise UserError("drot.json names no model: name the dense model as `model`")
        if not named and not HUB_NAME.fullmatch(self.base_model) and not os.path.exists(self.base_model):
            raise UserError(
                f"there is no {self.base_model}, which drot.json names: name the dense model as `model`"
            )
        return str(model)

    def to_dict(self) -> dict[str, Any]:
        """The content of the file, in plain JSON types."""
        return self.model_dump(by_alias=True, exclude_defaults=True)


class Manifest(CheckpointManifest):
    """drot.json of a model that drot pruned.

    What was asked: recipe.
    What was done:
        calibration: the calibration tokens. positions: the largest number of tokens that the model reads;
            None if it has no limit.
        layers: of each decoder layer in turn.
        shared_rotation: the training of `mode="shared"`.
        distillation: the training of the kept weights of all layers together; None without it.
        rotations_left_out: those of R1, R2 and R3 that the model's family has no place for.
        rotations_file: the file of rotations that the run used.
        untied_lm_head: whether lm_head was tied to the embedding in the dense model.
    What came out, beyond the entries of CheckpointManifest:
        relative_logit_error: of the rotated dense model; None for a model that is not rotated.
    With what:
        machine: the machine of the run. other_machines: those of the interrupted runs that it continued, each
            with its versions.
        compute_dtype: the dtype of the computation.
        identity: the values that must be equal for the run to be resumed (pipeline/identity.py).
        peak_memory: by phase.
        hidden_states: where the hidden states of the calibration lay.
        dense_states_on_device: whether the hidden states of the dense model lay on the device, and not in
            main memory; None for a run without them.
    """

    recipe: StoredRecipe
    calibration: TokensRecord
    positions: int | None
    layers: Annotated[list[LayerRecord], Field(min_length=1)]
    shared_rotation: SharedRotationRecord | None
    rotations_left_out: list[Literal["r1", "r2", "r3"]] = Field(default_factory=list)
    rotations_file: RotationsFileRecord | None
    untied_lm_head: bool
    relative_logit_error: float | None
    versions: Versions
    device: str
    machine: Machine
    other_machines: list[Machine] = Field(default_factory=list)
    compute_dtype: str
    identity: dict[str, Any] | None = None
    seconds: Seconds
    peak_memory: dict[str, MemoryPeak]
    hidden_states: PlaceOfStates = "main memory"
    dense_states_on_device: bool | None = None
    distillation: DistillationRecord | None = None


# ---- reading -----------------------------------------------------------------------------------------


def read_manifest(folder: Path | str) -> Manifest:
    """The manifest of a model that drot pruned.

    Raises UserError as `read_any_manifest` does, and for a model that another program pruned.
    """
    manifest = read_any_manifest(folder)
    if not isinstance(manifest, Manifest):
        raise UserError(
            f"{folder} was pruned by another program and fine-tuned by drot: name a folder that drot prune "
            "wrote"
        )
    return manifest


def find_manifest(folder: Path | str) -> CheckpointManifest | None:
    """As `read_any_manifest`; None for a model without drot.json."""
    return read_any_manifest(folder) if os.path.exists(Path(folder) / MANIFEST) else None


def read_any_manifest(folder: Path | str) -> CheckpointManifest:
    """The manifest of a checkpoint: a Manifest, or a CheckpointManifest if another program pruned the model.

    Raises UserError if drot.json is missing, or lacks an entry, or holds a wrong one. Logs a warning if its
    digest does not fit its content.
    """
    is_a("folder", folder, str, Path)
    file = Path(folder) / MANIFEST
    if not os.path.exists(file):
        for run in (str(folder), f"{folder}.partial"):
            if Path(run).suffix == ".partial" and os.path.isdir(run):
                raise UserError(
                    f"{run} is a run that has not ended: continue it with its command and `resume=True`"
                )
        reason = "does not exist"
        if os.path.exists(folder):
            reason = f"holds no {MANIFEST}" if Path(folder).is_dir() else "is a file"
        raise UserError(f"{folder} {reason}: name a folder that drot prune wrote")
    data = read_json(file)
    if (version := data.get("format_version")) != FORMAT_VERSION:
        raise UserError(
            f"{file} must be of format_version {FORMAT_VERSION}, got {shortened(version)}: "
            "use the version of drot that wrote it"
        )
    pruned_elsewhere = "recipe" not in data and "finetune" in data
    manifest = check_schema(CheckpointManifest if pruned_elsewhere else Manifest, data, str(file))
    if not digest_fits(data):
        logger.warning("%s was edited or damaged: its content does not fit its %s", file, DIGEST)
    return manifest


# ---- writing -----------------------------------------------------------------------------------------


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    """Writes drot.json, and gives the manifest the digest of its content. Raises WriteError."""
    data = with_digest(manifest.to_dict())
    write_json(folder / MANIFEST, data)
    manifest.digest = data[DIGEST]


def update_manifest(
    folder: Path | str, change: Callable[[CheckpointManifest], None], rewritten: Iterable[str] = ()
) -> CheckpointManifest:
    """Changes the manifest of a checkpoint and returns it. The digest is made anew.

    Programs that update the same manifest wait for each other. Raises UserError for a manifest that is broken
    or whose digest does not fit, because a new digest would hide the damage.

    folder: the checkpoint.
    change: sets entries of the manifest.
    rewritten: names of files that the caller has written into the folder, whose hashes are recorded.
    """
    folder = Path(folder)
    with _turn(folder):
        manifest = read_any_manifest(folder)
        if not digest_fits(read_json(folder / MANIFEST)):
            raise UserError(f"{folder / MANIFEST} was edited or damaged: it is not updated; copy it again")
        change(manifest)
        manifest.files = manifest.files | folder_records(folder, rewritten)
        write_manifest(folder, manifest)
    return manifest


def accept_files(folder: Path | str) -> CheckpointManifest:
    """Records the hashes of all files of a checkpoint (`files_in`) as they are now; returns the manifest.

    For a checkpoint that was changed on purpose. Evaluations of other weights, or by another config.json, are
    dropped, and a warning says so. Raises UserError if it holds no readable manifest, or lacks a file with
    weights that its index names.
    """
    from drot.checkpoint.source import INDEX, weight_files  # it imports torch

    folder = Path(folder)
    with _turn(folder):
        if (folder / INDEX).exists():
            weight_files(folder)
        manifest = read_any_manifest(folder)
        before, manifest.files = manifest.files, folder_records(folder)
        differing = {name for name, record in manifest.files.items() if before.get(name) != record}
        differing |= before.keys() - manifest.files.keys()
        of_model = sorted(filter(is_loaded, differing))
        if of_model and manifest.evaluations:
            logger.warning("%s changed: the evaluations in drot.json were dropped", ", ".join(of_model))
            manifest.evaluations = []
        write_manifest(folder, manifest)
    return manifest


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
