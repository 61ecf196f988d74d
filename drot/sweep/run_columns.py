"""The columns of a sweep that come from the manifest of a run."""

import math
import statistics
from typing import Any


def run_columns(manifest: dict[str, Any]) -> dict[str, float | None]:
    """Heading → value. A value that the run did not record, or that is not finite, is None.

    zeros: share of zeros in the linears of the decoder layers.
    seconds: time of the run, without the loading of the model and the text.
    seconds_per_step: time of a training step of the rotation.
    entropy_before, entropy_after: entropy of a layer before and after its training, mean over the layers.
    removed_importance_before, removed_importance_after: share of the importance of a linear's weights that
        pruning in one shot removes, before and after the rotation, mean over the pruned linears.
    """
    shared = manifest.get("shared_rotation")
    trained = (
        [shared] if shared else [layer["rotation"] for layer in manifest["layers"] if "rotation" in layer]
    )
    trained = [record for record in trained if "loss_curve" in record]
    steps = sum(len(record["loss_curve"]) - 1 for record in trained)
    linears = [
        linear["one_shot"]
        for layer in manifest["layers"]
        for linear in layer["linears"].values()
        if linear["sparsity"] > 0
    ]
    columns = {
        "zeros": manifest["sparsity"],
        "seconds": manifest["seconds"]["total"] - manifest["seconds"].get("load", 0.0),
        "seconds_per_step": manifest["seconds"]["rotate"] / steps if steps else None,
        "entropy_before": _mean([record.get("entropy_before") for record in trained]),
        "entropy_after": _mean([record.get("entropy_after") for record in trained]),
    }
    for basis in ("before", "after"):
        shares = [shot[basis]["removed_importance"] for shot in linears if basis in shot]
        columns[f"removed_importance_{basis}"] = _mean(shares)
    return {
        name: None if value is None or not math.isfinite(value) else value for name, value in columns.items()
    }


def _mean(values: list[float | None]) -> float | None:
    """The mean of the values that are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
