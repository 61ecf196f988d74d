"""What `drot prune` says at its end: why the checkpoint is larger than the model, and what to do next."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from drot.checkpoint.added import added_bytes
from drot.checkpoint.size import size_text, weight_bytes
from drot.manifest.manifest import Manifest

HEAD = "lm_head, which a rotation unties from the embedding"
ROTATIONS = "rotations that the model applies while it runs"


def growth(model: str, out: Path, manifest: Manifest) -> Iterator[str]:
    """Sentences on a checkpoint that is larger than `model`: what was added, and what avoids it."""
    before, after = weight_bytes(model), weight_bytes(out)
    head, rotations = added_bytes(out, untied=manifest.untied_lm_head)
    if before is None or after is None or after <= before or not head + rotations:
        return
    added = [f"{name} ({size_text(size)})" for name, size in ((HEAD, head), (ROTATIONS, rotations)) if size]
    yield f"It is larger by {' and by '.join(added)}."
    if rotations:
        yield "--rotation stock adds no such rotations."
    if manifest.format == "dense":
        yield "A dense checkpoint stores its zeros like other weights; a packed one does not store them."


def next_commands(model: str, out: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """The commands that judge the checkpoint, and the one that makes it smaller; and what each is for."""
    folder, packed = shlex.quote(str(out)), shlex.quote(f"{out}-packed")
    yield f"drot eval {folder} --against {shlex.quote(model)}", "what the pruning cost, on wikitext2"
    yield f"drot report {folder}", "charts of the run, and what is unusual"
    if manifest.format == "dense" and str(manifest.recipe.pruning.sparsity) == "2:4":
        yield f"drot convert {folder} --out {packed} --format packed", "2:4 weights in 9/16 of bf16's bytes"
