"""Checkpoints: an ordinary Hugging Face folder plus `drot.json`, and the state of an unfinished run."""

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from drot.errors import UserError
from drot.sparse.fused import fuse
from drot.sparse.packed import compress_model, is_packed

MANIFEST = "drot.json"
#: of the manifest
FORMAT_VERSION = 1
#: what every manifest has, and its readers rely on
MANIFEST_KEYS = ("versions", "recipe", "calibration", "sparsity", "seconds", "layers", "base_model")
logger = logging.getLogger("drot")


def check_output(out: Path) -> None:
    """Raises UserError where `out` exists and holds something that saving would overwrite, or where
    nothing can be written beside it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: name another --out or remove it")
    if out.is_symlink() or os.path.ismount(out):  # a folder is renamed to it in the end
        raise UserError(f"{out} is a link or a mount point: name a folder inside it ({out}/NAME)")
    if out.resolve() == Path.cwd():
        raise UserError(
            f"--out must be a folder of its own, got the current one: name one inside it ({out}/NAME)"
        )
    check_writable(out)


def check_writable(file: Path) -> None:
    """Makes the folder that `file` is to lie in. Raises UserError where nothing can be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}: {file.parent}") from None


def partial_folder(out: Path) -> Path:
    """Where the finished layers of an unfinished run to `out` lie."""
    return out.with_name(out.name + ".partial")


def check_unfinished(out: Path, *, resume: bool) -> None:
    """Raises UserError where a run to `out` was cut off and is not to be resumed; notes where there is
    none to resume."""
    folder = partial_folder(out)
    if folder.exists() and not resume:
        raise UserError(f"{folder} holds an unfinished run: continue it with --resume or remove it")
    if resume and not folder.exists():
        logger.warning("%s is not there: nothing to resume, the run starts at the first layer", folder)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def save_checkpoint(model: PreTrainedModel, tokenizer: Any, manifest: dict[str, Any], out: Path) -> None:
    """Writes model, tokenizer and manifest (unless it is empty) beside `out` and renames the folder at the
    end, so that `out` either is not there or is complete. UserError where the disk does not take it."""
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name + ".", suffix=".part") as beside:
            part = Path(beside) / out.name  # made by mkdir: the one around it is for our eyes only
            part.mkdir()
            model.save_pretrained(part)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
            if manifest:
                write_json(part / MANIFEST, manifest)
            if out.exists():
                out.rmdir()  # empty, or check_output would have refused it
            os.replace(part, out)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {error}") from error


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises UserError where there is none or it is broken."""
    file = Path(path) / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path} holds no {MANIFEST}: it is not a checkpoint of drot prune") from None
    except ValueError as error:  # no JSON, or not UTF-8
        raise UserError(f"{file} is not valid JSON ({error}): was it cut off?") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{file} must be of format_version {FORMAT_VERSION}, got {version}: another drot wrote it"
        )
    if missing := [key for key in MANIFEST_KEYS if key not in manifest]:
        raise UserError(f"{file} lacks {', '.join(missing)}: was it edited?")
    return manifest


def load_config(path: str | Path) -> Any:
    """The config of a hub name or folder. Raises UserError in one line where there is none."""
    from transformers import AutoConfig

    with _one_line(f"cannot load a causal language model from {str(path)!r} (a hub name or a local folder)"):
        return AutoConfig.from_pretrained(path)


def load_model(path: str | Path, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """A causal language model from a hub name or folder, on the CPU, in eval mode.

    Raises UserError in one line where there is no such model or dtype, or where its files are cut off,
    lack a tensor (transformers would draw that one at random) or hold one of a layer that the model does
    not have (transformers would leave it out).
    """
    from transformers import AutoModelForCausalLM

    if isinstance(dtype, str) and dtype != "auto":
        dtype = parse_dtype(dtype)
    with _one_line(f"cannot load a causal language model from {str(path)!r} (a hub name or a local folder)"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{path} lacks {len(missing)} tensors of a {type(model).__name__}, the first is {missing[0]}: "
            "the checkpoint is incomplete or of another architecture"
        )
    unused = sorted(key for key in report["unexpected_keys"] if ".layers." in key)
    if unused := [key for key in unused if not key.endswith(".inv_freq")]:  # which old files hold
        raise UserError(
            f"{path} holds {len(unused)} tensors that its config.json has no place for, the first is "
            f"{unused[0]}: was that file edited, or is it of another model?"
        )
    return model.eval().requires_grad_(False)


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder holds files of one, without which transformers would make one up; a hub name has."""
    return not Path(path).is_dir() or any(Path(path).glob("*token*")) or any(Path(path).glob("vocab*"))


def wider_dtypes(folder: str | Path, dtype: torch.dtype) -> list[str]:
    """Floating dtypes of a folder's safetensors files, in their names, that `dtype` cannot hold."""
    found = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            found |= {handle.get_slice(key).get_dtype() for key in handle.keys()}  # noqa: SIM118
    known = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return sorted(name for name in found & known.keys() if torch.promote_types(known[name], dtype) != dtype)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer beside a model. Raises UserError in one line where there is none."""
    from transformers import AutoTokenizer

    with _one_line(f"cannot load a tokenizer from {str(path)!r}"):
        return AutoTokenizer.from_pretrained(path)


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turns what transformers and safetensors raise for a bad folder into one line: `what`, and why."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError):  # the first of drot.hf, which says what to do
        raise
    except Exception as error:  # a faulty config.json meets all kinds of code
        lines = str(error).strip().splitlines()
        raise UserError(f"{what}: {lines[0] if lines else type(error).__name__}") from error


def parse_dtype(name: str) -> torch.dtype:
    """`float32`, `bfloat16` or `float16`; UserError otherwise."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise UserError(f"dtype must be auto or one of {', '.join(known)}; got {name!r}")
    return known[name]


def pick_device(name: str | torch.device) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device must be auto, cpu or cuda[:N]; got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda[:N]; got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no GPU: use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} GPUs")
    return device


def pick_devices(names: str | torch.device) -> list[torch.device]:
    """One device, or several separated by commas."""
    if isinstance(names, torch.device):
        return [pick_device(names)]
    devices = [pick_device(name.strip()) for name in names.split(",")]
    if len({device.type for device in devices}) > 1:
        raise UserError(f"devices must all be GPUs, or the CPU; got {names!r}")
    return devices


def load(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str = "auto",
    compress: bool = False,
) -> PreTrainedModel:
    """A model that `drot prune` saved (or any other), on `device`, in eval mode; a packed one is fused.

    compress: packed weights also in the layout of the GPU's library, for speed with many tokens at once
        (prefill, perplexity) at the price of about as much memory again; without effect elsewhere.
    """
    where = pick_device(device)
    model = load_model(path, dtype)
    if is_packed(model):
        fuse(model)
    model = model.to(where)  # type: ignore[arg-type]
    if compress:
        compress_model(model)
    return model


class RunState:
    """The finished layers of a run that is under way, in `<out>.partial`, so that it survives a crash.

    A layer is one safetensors file: its state dict, its rotation, and its record in the metadata. The
    folder is made with the first of them. Raises UserError where it belongs to another run.
    """

    def __init__(self, out: Path, identity: dict[str, Any]) -> None:
        self.folder = partial_folder(out)
        self._lock = threading.Lock()
        self.identity = json.loads(json.dumps(identity))  # as it will be read: tuples are lists there
        run = self.folder / "run.json"
        if not run.exists():
            return
        try:
            before = json.loads(run.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(
                f"cannot resume {self.folder}: its run.json is broken; remove the folder"
            ) from None
        changed = [key for key in self.identity if before.get(key) != self.identity[key]]
        if changed:
            raise UserError(
                f"cannot resume {self.folder}: {', '.join(changed)} differ from that run; "
                "repeat its options or remove the folder"
            )

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, torch.Tensor], record: Any) -> None:
        """Writes a part, whole or not at all; may be called by several threads."""
        with self._lock:
            if not (self.folder / "run.json").exists():
                self.folder.mkdir(exist_ok=True)
                write_json(self.folder / "run.json", self.identity)
        file = self._file(name)
        part = file.with_suffix(".part")
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, part, metadata={"record": json.dumps(record)})
        os.replace(part, file)

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        """Tensors and record, or None where that part is not done yet."""
        file = self._file(name)
        if not file.exists():
            return None
        with safe_open(file, framework="pt") as handle:
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
            return tensors, json.loads(handle.metadata()["record"])

    def discard(self) -> None:
        """Called when the checkpoint is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
