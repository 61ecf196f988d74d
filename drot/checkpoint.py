"""Checkpoints: an ordinary Hugging Face folder plus `drot.json`, and the state of an unfinished run."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from drot.errors import UserError
from drot.sparse.fused import fuse
from drot.sparse.packed import compress_model, is_packed

MANIFEST = "drot.json"


def check_output(out: Path) -> None:
    """Raises UserError where `out` exists and holds something that saving would overwrite."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: name another --out or remove it")


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes `data` whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def save_checkpoint(model: PreTrainedModel, tokenizer: Any, manifest: dict[str, Any], out: Path) -> None:
    """Writes model, tokenizer and manifest (unless it is empty) beside `out` and renames the folder at the
    end, so that `out` either is not there or is complete."""
    part = out.with_name(out.name + ".part")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    if tokenizer is not None:
        tokenizer.save_pretrained(part)
    if manifest:
        write_json(part / MANIFEST, manifest)
    if out.exists():
        out.rmdir()  # empty, or check_output would have refused it
    os.replace(part, out)


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises UserError where there is none or it is broken."""
    file = Path(path) / MANIFEST
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} holds no {MANIFEST}: it is not a checkpoint of drot prune") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not valid JSON (line {error.lineno}): was it cut off?") from None


def load_model(path: str | Path, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """A causal language model from a hub name or folder, on the CPU, in eval mode.

    Raises UserError in one line where there is no such model or dtype.
    """
    from transformers import AutoModelForCausalLM

    if isinstance(dtype, str) and dtype != "auto":
        dtype = parse_dtype(dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    except UserError:  # of drot.hf, which says what to do
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"cannot load a causal language model from {str(path)!r} (a hub name or a local folder): {reason}"
        ) from error
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer beside a model. Raises UserError in one line where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot load a tokenizer from {str(path)!r}: {reason}") from error


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
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no GPU: use --device cpu")
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
    model = load_model(path, dtype)
    if is_packed(model):
        fuse(model)
    model = model.to(pick_device(device))  # type: ignore[arg-type]
    if compress:
        compress_model(model)
    return model


class RunState:
    """The finished layers of a run that is under way, in `<out>.partial`, so that it survives a crash.

    A layer is one safetensors file: its state dict, its rotation, and its record in the metadata.
    """

    def __init__(self, out: Path, identity: dict[str, Any], *, resume: bool) -> None:
        self.folder = out.with_name(out.name + ".partial")
        run = self.folder / "run.json"
        if self.folder.exists() and not resume:
            raise UserError(f"{self.folder} holds an unfinished run: continue it with --resume or remove it")
        if run.exists():
            before = json.loads(run.read_text(encoding="utf-8"))
            changed = [key for key in identity if before.get(key) != identity[key]]
            if changed:
                raise UserError(
                    f"cannot resume {self.folder}: {', '.join(changed)} differ from that run; "
                    "repeat its options or remove the folder"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(run, identity)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def save(self, name: str, tensors: dict[str, torch.Tensor], record: Any) -> None:
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
        shutil.rmtree(self.folder)
