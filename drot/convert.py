"""`drot convert`: the same weights in another layout."""

from pathlib import Path
from typing import Any

from drot import checkpoint
from drot.errors import UserError
from drot.sparse.packed import check_layout, describe_layout, is_packed, pack_model, unpack_model


def convert_checkpoint(path: str | Path, out: Path, layout: str) -> dict[str, Any]:
    """Writes the checkpoint `path` to `out` with its pruned linears packed or dense.

    Returns its manifest, {} where it was not pruned by drot. Raises UserError for a layout that does not
    exist or is the checkpoint's own, and, naming layer, linear and row, for a weight that is not 2:4.
    """
    check_layout(layout)
    checkpoint.check_output(out)
    manifest = checkpoint.read_manifest(path) if (Path(path) / checkpoint.MANIFEST).exists() else {}
    tokenizer = None
    if checkpoint.has_tokenizer(path):
        tokenizer = checkpoint.load_tokenizer(path)
    else:  # a model that was pruned from Python with token ids has none
        checkpoint.logger.warning("%s holds no tokenizer; none is written", path)
    model = checkpoint.load_model(path)
    if wider := checkpoint.wider_dtypes(path, model.dtype):
        checkpoint.logger.warning(
            "%s holds tensors of %s, which its config.json says to open as %s: so they are written",
            path, ", ".join(wider), str(model.dtype).removeprefix("torch."),
        )  # fmt: skip
    if is_packed(model) == (layout == "packed"):
        raise UserError(f"{path} is {layout} already")
    if layout == "packed":
        pack_model(model)
    else:
        unpack_model(model)
    if manifest:
        manifest |= describe_layout(model)
    checkpoint.save_checkpoint(model, tokenizer, manifest, out)
    return manifest
