"""The finished parts of an unfinished run, with which `resume=True` continues an interrupted run."""

import contextlib
import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Json, RootModel
from safetensors import safe_open

from drot.checkpoint.shards import save_shard
from drot.core.errors import UserError
from drot.core.files import beside, new_file, write_json, writing
from drot.core.hashes import DIGEST, FileRecord, damage, digest_fits, file_record, with_digest
from drot.core.reading import check_schema, leaves, read_json
from drot.machine.ranks import ALONE, Ranks
from drot.machine.transfer import background_thread, copied_home, in_main_memory

logger = logging.getLogger("drot")

#: the identity of the run, in the folder of its parts
IDENTITY = "run.json"
#: the text that the model wrote for the calibration, in that folder and in the checkpoint
OWN_TEXT = "own_text.jsonl"
#: part -> its entry (`PartEntry`)
JOURNAL = "parts.json"
#: the beginning of the names of the parts of layers
LAYER_PART = "layer_"
#: the part with the record of a training of all layers, and the beginning of the names of its layers
DISTILLED = "distilled"
#: files that are hashed at the same time: rank 0 saves the rotations together that all ranks have trained
HASHERS = 4


class PartEntry(FileRecord):
    """The entry of a part in the journal, with the hash and the size of its file.

    machine: that computed it; None if that is not known. record: what the part holds beside tensors, as JSON.
    """

    machine: dict[str, Any] | None
    record: Json[Any]


class Journal(RootModel[dict[str, PartEntry]]):
    """The content of parts.json without its digest."""


def partial_folder(out: Path) -> Path:
    """The folder of the finished layers of an unfinished run that writes to `out`."""
    return beside(out, ".partial")


def check_unfinished(out: Path, *, resume: bool) -> None:
    """Raises UserError if there is an unfinished run to `out` that is not, or cannot be, resumed.

    Logs a warning if `resume` is True and there is no unfinished run.
    """
    folder = partial_folder(out)
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, and would keep its files for ever: remove it")
    unfinished = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if unfinished and not resume:
        raise UserError(f"{folder} holds an unfinished run: continue it with `resume=True` or remove it")
    if resume and not unfinished:
        logger.warning("%s holds no unfinished run: the run starts at the first layer", folder)
    _read_identity(folder)


def check_begun(out: Path, known: dict[str, Any]) -> None:
    """Raises UserError if an unfinished run that writes to `out` differs in an entry of its identity."""
    folder = partial_folder(out)
    if (before := _read_identity(folder)) is not None:
        _check_same_run(folder, {key: before.get(key) for key in known}, known)


def _check_same_run(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    if changed := identity_differences(before, now, "the unfinished run"):
        raise UserError(
            f"cannot resume {folder}: {changed}; repeat the settings of the unfinished run or remove "
            "the folder"
        )


def finished_layers(out: Path) -> int:
    """How many layers of the unfinished run that writes to `out` are finished."""
    parts = read_parts(partial_folder(out)) or {}
    return sum(part.removeprefix(LAYER_PART).isdigit() for part in parts)


def _read_identity(folder: Path) -> dict[str, Any] | None:
    """The identity of the unfinished run in `folder`; None if there is no unfinished run.

    Raises UserError if run.json is damaged, or lost while there are parts.
    """
    if not (folder / IDENTITY).exists():
        # a run that is killed while it writes run.json leaves a .part file alone, or with the text before it
        if folder.exists() and (
            not folder.is_dir() or any(f.suffix != ".part" and f.name != OWN_TEXT for f in folder.iterdir())
        ):
            raise UserError(
                f"cannot resume {folder}: its {IDENTITY} is missing, which says to which run the parts "
                "belong; copy it back or remove the folder"
            )
        return None
    identity = read_journal(folder / IDENTITY)
    if identity is None:
        raise UserError(
            f"cannot resume {folder}: its {IDENTITY} is broken; copy it back or remove the folder"
        )
    return identity


def read_journal(file: Path) -> dict[str, Any] | None:
    """The content of run.json or parts.json without its digest; None if it is missing or damaged."""
    try:
        data = read_json(file)
    except UserError:
        return None
    if not digest_fits(data):
        return None
    return {key: value for key, value in data.items() if key != DIGEST}


def read_parts(folder: Path) -> dict[str, Any] | None:
    """The journal of the unfinished run in `folder`: part -> its entry; None as `read_journal`.

    Raises UserError for an entry that is not one of a part, though the digest fits.
    """
    parts = read_journal(file := folder / JOURNAL)
    if parts is not None:
        check_schema(Journal, parts, str(file))
    return parts


#: fields of an identity that hold a hash → what the hash is of
IN_WORDS = {
    "calibration": "SHA-256 of the calibration tokens",
    "distillation": "SHA-256 of the tokens of the training of all layers",
    "weights.sha256": "SHA-256 of the model's weights",
    "rotations": "SHA-256 of the file of rotations",
}


def identity_differences(before: dict[str, Any], now: dict[str, Any], where: str, here: str = "now") -> str:
    """Names each field that differs in two identities, with both values; empty if no field differs.

    where: what `before` belongs to, as in 'the unfinished run'. here: what `now` belongs to.
    """
    old, new = dict(leaves(before)), dict(leaves(json.loads(json.dumps(now))))
    changed = [key for key in {**old, **new} if old.get(key, "no value") != new.get(key, "no value")]
    if any(key.startswith("recipe.calibration.") for key in changed):  # other tokens follow from that
        changed = [key for key in changed if key not in ("calibration", "distillation")]
    return ", ".join(
        f"{IN_WORDS.get(key, key.removeprefix('recipe.'))}: {old.get(key, 'no value')} in {where}, "
        f"{new.get(key, 'no value')} {here}"
        for key in changed
    )


class RunState:
    """The finished parts of a run, which are saved in `<out>.partial` so that the run survives a crash.

    A part, such as a pruned layer, is one safetensors file with its tensors, whose bytes depend on nothing
    else. The folder is created with the first part. Its run.json holds the identity of the run, and its
    parts.json the hashes and the records of the parts.

    Inside the context `saving`, `save_later` writes parts in a thread while the run goes on. Other threads
    hash them and enter them in the journal, in their order, and another reads the part of `read_ahead`.

    A part that does not fit its hashes is computed again. The parts after it are kept if the new tensors
    equal the lost ones, as they do on the same machine with the same number of threads; otherwise they are
    computed again too.

    Of several ranks, rank 0 alone reads and writes files, so `out` need not be a shared folder. The others
    get from it what is loaded, and its exceptions. What they would save is left out.

    out: the folder of the finished run.
    identity: the values that must be equal for the run to be resumed. Raises UserError if they are not.
    machine: what the bytes of the parts depend on beside `identity`, from `machine()`. It is stored with each
        part.
    ranks: those that share the run; each makes its RunState at the same time.

    Attributes:
        disk: a folder on the disk of `out`, or, on a machine that does not have it, for temporary files.
        other_machines: the machines that computed other parts of the run; a warning names what differs.
    """

    def __init__(
        self,
        out: Path,
        identity: dict[str, Any],
        machine: dict[str, Any] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.folder = partial_folder(out)
        self.disk = out.parent if out.parent.is_dir() else Path(tempfile.gettempdir())
        self.identity = identity
        self._ranks = ranks
        self._lock = threading.Lock()
        self._writer: ThreadPoolExecutor | None = None
        self._hashers: ThreadPoolExecutor | None = None
        self._journal: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._written: Future[list[Future[None]]] | None = None
        self._hashed: list[Future[None]] = []
        self._coming: set[str] = set()  # parts of `save_later`; the journal may hold their files of before
        self._ahead: dict[str, Future[Any]] = {}
        self._parts: dict[str, Any] = {}
        self._machine = json.loads(json.dumps(machine))  # as it is read from the journal
        self.other_machines: list[dict[str, Any]] = []
        ranks.on_first(self._find_parts)

    def _find_parts(self) -> None:
        """Reads the journal of an unfinished run."""
        before = _read_identity(self.folder)
        if before is None:
            return
        _check_same_run(self.folder, before, self.identity)
        for temporary in self.folder.glob("*.part"):  # of a process that was killed while it wrote
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink()
        parts = read_parts(self.folder)
        if parts is None and any(self.folder.glob("*.safetensors")):
            logger.warning(
                "%s is missing or damaged: the parts of the unfinished run cannot be checked and are "
                "computed again", self.folder / JOURNAL,
            )  # fmt: skip
        self._parts = parts or {}
        for other in (entry["machine"] for entry in self._parts.values()):
            if None in (other, self._machine) or other in (self._machine, *self.other_machines):
                continue
            self.other_machines.append(other)
            logger.warning(
                "parts of the unfinished run were computed elsewhere (%s): the bytes of the result may "
                "differ from those of a run on one machine",
                identity_differences(other, self._machine, "those parts"),
            )

    def file(self, name: str) -> Path:
        """The file of the part `name`."""
        return self.folder / f"{name}.safetensors"

    def record(self, name: str) -> FileRecord:
        """The hash of the file of a finished part, taken when it was written."""
        entry = self._parts[name]
        return FileRecord(sha256=entry["sha256"], bytes=entry["bytes"])

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context for `save_later` and `read_ahead`.

        All parts are written when it ends, also after an error.
        """
        if not self._ranks.first:
            yield
            return
        with (
            ThreadPoolExecutor(HASHERS, "drot-hash") as self._hashers,
            ThreadPoolExecutor(1, "drot-journal") as self._journal,
            background_thread("drot-save") as self._writer,
            background_thread("drot-read") as self._reader,
        ):
            try:
                yield
            except BaseException:
                with contextlib.suppress(Exception):  # the caller's error came first
                    self.wait()
                raise
            self.wait()

    def save_later(self, parts: Mapping[str, tuple[Mapping[str, torch.Tensor], Any]]) -> None:
        """As `save` for each name → (tensors, record) of `parts`, in threads, when those before are written.

        The parts before are hashed meanwhile. Tensors on a GPU are copied in a thread. No tensor may change
        before the context ends. Raises the WriteError of the parts before.
        """
        if not self._ranks.first:
            return
        assert self._writer is not None, "`save_later` needs the context `saving`"
        last = self._end_of_writing()
        self._end_of_hashing()
        self._hashed = last
        with self._lock:
            self._coming = self._coming | set(parts)
        coming = [(name, copied_home(tensors), record) for name, (tensors, record) in parts.items()]

        def write_all() -> list[Future[None]]:
            hashed = []
            for name, copies, record in coming:
                self._write(name, copies())
                assert self._hashers is not None and self._journal is not None
                of_file = self._hashers.submit(file_record, self.file(name))
                hashed.append(self._journal.submit(self._enter, name, of_file.result, record))
            return hashed

        self._written = self._writer.submit(write_all)

    def wait(self) -> None:
        """Waits until all parts of `save_later` are saved. Raises the WriteError of one that is not."""
        self._hashed += self._end_of_writing()
        self._end_of_hashing()

    def _end_of_writing(self) -> list[Future[None]]:
        """Waits until the last parts are written; returns what hashes them."""
        written, self._written = self._written, None
        return [] if written is None else written.result()

    def _end_of_hashing(self) -> None:
        hashed, self._hashed = self._hashed, []
        for each in hashed:
            each.result()

    def save(self, name: str, tensors: dict[str, torch.Tensor], record: Any) -> None:
        """Writes the part `name`. Several threads may call it at the same time.

        Raises WriteError if writing fails; the parts before it are kept.
        """
        if self._ranks.first:
            self._write(name, tensors)
            self._enter(name, partial(file_record, self.file(name)), record)

    def _write(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self._begin()
        with new_file(self.file(name)) as part:
            save_shard(tensors, part)

    def _enter(self, name: str, hashed: Callable[[], FileRecord], record: Any) -> None:
        """Enters the part `name` in the journal. hashed: gives the hash and the size of its file."""
        entry = {**hashed().model_dump(), "machine": self._machine}
        entry["record"] = json.dumps(record)
        with self._lock:
            parts = self._parts | {name: entry}
            if name in self._parts and self._parts[name]["sha256"] != entry["sha256"]:
                later = [other for other in self._parts if _depends(other, name)]
                parts = {other: parts[other] for other in parts if other not in later}
                if later:
                    logger.warning(
                        "%s was computed again with another result, as on another machine: %s, which came "
                        "after it, are computed again too", name, ", ".join(later),
                    )  # fmt: skip
            write_json(self.folder / JOURNAL, with_digest(parts))
            self._parts = parts
            self._coming = self._coming - {name}

    def _begin(self) -> None:
        """Creates the folder and run.json before the first part."""
        with self._lock:
            if (self.folder / IDENTITY).exists():
                return
            with writing(self.folder):
                self.folder.mkdir(exist_ok=True)
            try:
                write_json(self.folder / IDENTITY, with_digest(self.identity))
            except BaseException:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
                raise

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        """The tensors and the record of the part `name`; None if it is not finished, or damaged.

        All ranks call it.
        """

        def found() -> tuple[dict[str, torch.Tensor], Any] | None:
            if name not in self._parts:
                return None  # a file without an entry was cut off between the writing of the two
            self.wait()  # a part that was computed again may have made this one useless
            return self._read(name)

        return self._ranks.on_first(found)

    def _read(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        if (entry := self._parts.get(name)) is None:
            return None
        file = self.file(name)
        problem = damage(file, self.record(name))
        if problem is not None:
            logger.warning("%s %s: it is computed again", file, problem)
            return None
        with safe_open(file, framework="pt") as handle:
            return {key: handle.get_tensor(key) for key in handle.keys()}, json.loads(entry["record"])  # noqa: SIM118

    def loaded(self, name: str, device: torch.device) -> dict[str, torch.Tensor]:
        """As `loaded_alone`, on the device of the ranks, or in main memory; all ranks call it."""
        found = self._ranks.on_rank(0, lambda: self.loaded_alone(name), device)
        return {key: tensor.to(device) for key, tensor in found.items()}

    def loaded_alone(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of the part `name`, which this run has written or loaded before, on rank 0 alone.

        It waits for parts that are written only if this is one of them.

        Raises UserError if the file was lost or damaged since then.
        """
        if name not in self._parts or name in self._coming:
            self.wait()
        ahead = self._ahead.pop(name, None)
        if (found := ahead.result() if ahead else self._read(name)) is None:
            raise UserError(
                f"{self.file(name)} was lost or damaged while the run went on: repeat the run with `resume`"
            )
        return found[0]

    def read_ahead(self, name: str, device: torch.device) -> None:
        """Reads the part `name` in a thread, for `loaded`, if it is written. One part is kept at a time.

        device: where the caller needs the tensors. They lie in main memory, pinned for a GPU.
        """
        if not self._ranks.first:
            return
        assert self._reader is not None, "`read_ahead` needs the context `saving`"

        def read() -> tuple[dict[str, torch.Tensor], Any] | None:
            if (found := self._read(name)) is None:
                return None
            tensors, record = found
            return {key: in_main_memory(tensor, device) for key, tensor in tensors.items()}, record

        if name in self._parts and name not in self._coming and name not in self._ahead:
            self._ahead = {name: self._reader.submit(read)}

    def discard(self) -> None:
        """Deletes the folder. Called after the checkpoint was written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _depends(part: str, earlier: str) -> bool:
    """Whether `part` was computed from `earlier`: a layer needs all rotations and all layers before it.

    The layers of a training of all layers need all other parts, and its record needs its layers.
    """
    if earlier.startswith(DISTILLED):
        return part == DISTILLED and earlier != DISTILLED
    if part.startswith(DISTILLED):
        return True
    return part.startswith(LAYER_PART) and (not earlier.startswith(LAYER_PART) or earlier < part)
