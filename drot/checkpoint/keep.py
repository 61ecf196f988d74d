"""`save_pretrained` and `push_to_hub` of a loaded checkpoint, which also write its drot.json and its card.

transformers' methods write the weights and the config, and nothing of what else is in the folder.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

from drot.core.errors import UserError
from drot.machine.devices import dtype_name
from drot.manifest.card import CARD, save_card
from drot.manifest.integrity import folder_records
from drot.manifest.manifest import MANIFEST, read_any_manifest, write_manifest
from drot.sparse.quantization_config import format_of

#: attribute of a loaded model: the manifest, and the text of the card
ATTRIBUTE = "drot_files"


def keep_files(model: Any, path: str | Path) -> None:
    """Lets `model`, which was loaded from `path`, write drot.json and README.md wherever it is saved.

    Nothing is done for a model without drot.json.
    """
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        found = cached_file(
            str(path),
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return None if found is None else Path(found)

    file = find(MANIFEST)
    if file is None:
        return
    try:
        manifest = read_any_manifest(file.parent)
    except UserError:  # the commands that need the manifest say so
        return
    text = find(CARD)
    setattr(model, ATTRIBUTE, (manifest, "" if text is None else text.read_text(encoding="utf-8")))
    # Bound methods of the instance: in a deep copy of the model they are bound to the copy. A model that was
    # pickled has transformers' methods again.
    model.save_pretrained = MethodType(save_pretrained, model)
    model.push_to_hub = MethodType(push_to_hub, model)


def save_pretrained(
    self: Any, save_directory: Any, *args: Any, push_to_hub: bool = False, **kwargs: Any
) -> None:
    """`save_pretrained` of transformers, which also writes drot.json and README.md.

    The entries of drot.json on format and dtype describe the model as it is now. All other entries, such as
    the figures of each layer, are those of the loaded checkpoint.
    """
    hub = {}
    if push_to_hub:
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    type(self).save_pretrained(self, save_directory, *args, **kwargs)
    if kwargs.get("is_main_process", True):
        _write_files(self, Path(save_directory))
        if push_to_hub:
            _upload(Path(save_directory), hub.pop("repo_id", Path(save_directory).name), **hub)


#: arguments of `save_pretrained` that are for the upload
HUB_ARGUMENTS = ("repo_id", "token", "commit_message", "create_pr", "revision", "private")


def push_to_hub(
    self: Any, repo_id: str, *, tags: Sequence[str] = (), max_shard_size: int | str = "50GB", **hub: Any
) -> Any:
    """`push_to_hub` of transformers, which also uploads drot.json and README.md.

    Args:
        repo_id: the name of the repository, which is created if it does not exist.
        tags: further tags of the card.
        max_shard_size: the largest size of a file with weights.
        hub: further arguments of transformers' method: `commit_message`, `private`, `token`, `revision`,
            `create_pr`.
    """
    with tempfile.TemporaryDirectory() as folder:
        self.save_pretrained(folder, max_shard_size=max_shard_size)
        _write_files(self, Path(folder), name=repo_id, tags=tags)
        return _upload(Path(folder), repo_id, **hub)


def _write_files(model: Any, folder: Path, name: str = "", tags: Sequence[str] = ()) -> None:
    """Writes the card and drot.json of `model`, which was saved to `folder`."""
    kept, before = getattr(model, ATTRIBUTE)
    manifest = kept.model_copy()
    manifest.format, manifest.stock_architecture = format_of(model)
    manifest.dtype = dtype_name(model.dtype)
    if not (folder / CARD).exists() and before:
        (folder / CARD).write_text(before, encoding="utf-8")
    save_card(folder, manifest, name, tags)
    manifest.files = folder_records(folder)
    write_manifest(folder, manifest)


def _upload(folder: Path, repo_id: str, *, private: bool | None = None, **arguments: Any) -> Any:
    from huggingface_hub import HfApi

    api = HfApi(token=arguments.pop("token", None))
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    arguments.setdefault("commit_message", "Upload model")
    return api.upload_folder(repo_id=repo_id, folder_path=folder, **arguments)
