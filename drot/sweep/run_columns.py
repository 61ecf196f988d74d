"""The columns of a sweep that come from the manifest of a run."""

import math
import statistics
from collections.abc import Iterable

from drot.manifest.manifest import Manifest


def run_columns(manifest: Manifest) -> dict[str, float | None]:
    """Heading → value. A value that the run did not record, or that is not finite, is None.

    zeros: share of zeros in the linears of the decoder layers.
    seconds: time of the run, without the loading of the model and the text.
    seconds_per_step: time of a training step of the rotation.
    entropy_before, entropy_after: entropy of a layer before and after its training, mean over the layers.
    removed_importance_before, removed_importance_after: share of the importance of a linear's weights that
        pruning in one shot removes, before and after the rotation, mean over the pruned linears.
    """
    shared = manifest.shared_rotation
    trained = [shared] if shared else [layer.rotation for layer in manifest.layers if layer.rotation]
    steps = sum(len(record.loss_curve) - 1 for record in trained)
    shots = [
        linear.one_shot
        for layer in manifest.layers
        for linear in layer.linears.values()
        if linear.sparsity > 0
    ]
    columns = {
        "zeros": manifest.sparsity,
        "seconds": manifest.seconds.total - manifest.seconds.phases.get("load", 0.0),
        "seconds_per_step": manifest.seconds.phases["rotate"] / steps if steps else None,
        "entropy_before": _mean(record.entropy_before for record in trained),
        "entropy_after": _mean(record.entropy_after for record in trained),
        "removed_importance_before": _mean(shot.before.removed_importance for shot in shots),
        "removed_importance_after": _mean(shot.after.removed_importance for shot in shots),
    }
    return {
        name: None if value is None or not math.isfinite(value) else value for name, value in columns.items()
    }


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
