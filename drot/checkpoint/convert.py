"""Conversion of a 2:4 checkpoint between the formats packed and dense, one layer in memory at a time."""

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from drot.checkpoint.hf_model import as_drot_model
from drot.checkpoint.importance import load_importance_maps, save_importance_maps
from drot.checkpoint.load import has_tokenizer, load_tokenizer, logger, warn_of_rounding
from drot.checkpoint.manifest import CheckpointManifest, find_manifest
from drot.checkpoint.offload import open_skeleton
from drot.checkpoint.opening import load_config
from drot.checkpoint.quantised import is_quantised
from drot.checkpoint.quantization_config import dense_linears_of, format_of
from drot.checkpoint.save import check_output, copy_files, files_beside, save_checkpoint
from drot.checkpoint.shards import save_layers
from drot.checkpoint.source import model_folder
from drot.core.checks import is_a
from drot.core.errors import UserError
from drot.core.hashes import FileRecord
from drot.core.lock import locked
from drot.model.decoder import DecoderModel
from drot.sparse.linear import is_packed
from drot.sparse.packed import check_format, check_packable, pack_layer, unpack_layer


def convert(path: str | Path, out: str | Path, format: str) -> CheckpointManifest | None:
    """Writes the checkpoint `path` to the folder `out` in `format`, packed or dense.

    A layer is read from its file when its turn comes, and dropped when it is written. A model in FP8 or
    MXFP4, of the families that drot prunes, becomes dense too. Returns the manifest;
    None for a model that drot did not prune. Raises UserError for an unknown format, for the format that the
    checkpoint has already, for a weight that is not 2:4, and for files that do not fit their hashes in the
    manifest. A linear to which the manifest gives another sparsity stays dense.
    """
    check_format(format)
    is_a("out", out, str, Path)
    check_output(out := Path(out))
    with locked(out):
        return _convert(path, out, format)


def _convert(path: str | Path, out: Path, format: str) -> CheckpointManifest | None:
    load_config(path)  # refuses what is no model, before a file in it is looked for
    folder = model_folder(path)
    manifest = find_manifest(folder)
    tokenizer = None
    if has_tokenizer(folder):
        tokenizer = load_tokenizer(path)
    else:  # a model that was pruned from Python with token ids has none
        logger.warning("%s holds no tokenizer, so %s will hold none", path, out)
    maps = {} if manifest is None else load_importance_maps(folder)
    model, weights, _ = open_skeleton(path)
    weights.narrow(model)
    warn_of_rounding(folder, model)
    quantised = format == "dense" and is_quantised(folder)
    if is_packed(model) == (format == "packed") and not quantised:
        raise UserError(f"{path} is {format} already: name the other `format`")
    change = unpack_layer
    if format == "packed":
        dense = dense_linears_of(path, model.config)
        check_packable(model, dense)
        change = partial(pack_layer, dense=dense)
    decoder = DecoderModel(model, weights=weights)
    with contextlib.ExitStack() as ends:

        def write_layers(new: Path) -> Mapping[Path, FileRecord]:
            written = save_layers(decoder.loaded_layers(), new, change)
            as_drot_model(model)
            if manifest is not None:
                manifest.format, manifest.stock_architecture = format_of(model)
            ends.enter_context(decoder.in_memory(*decoder.ends))
            return written

        def write_more(new: Path) -> None:
            save_importance_maps(new, maps)
            copy_files(folder, new, files_beside(manifest))

        return save_checkpoint(
            model,
            tokenizer,
            manifest,
            out,
            write_layers=write_layers,
            write_more=write_more,
        )
