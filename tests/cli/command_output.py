"""Helpers for tests of the command line: a manifest as `drot prune` writes it, and the line of an error."""

from drot.config import resolve


def manifest(recipe, **changes):
    """The manifest of a run of `recipe` with one layer. changes: entries to replace."""
    layer = {
        "layer": 0,
        "linears": {"q": {"sparsity": 0.5, "output_error": 0.25, "damping": 0.01}},
        "seconds": 1.5,
        "rotation": {
            "loss_before": 0.4,
            "loss_after": 0.2,
            "entropy_before": 900.0,
            "entropy_after": 800.0,
        },
    }
    return {
        "recipe": resolve(recipe).to_dict(),
        "base_model": "someone/some-model",
        "rotations_file": None,
        "calibration": {"sha256": "0", "shape": [2, 8]},
        "sparsity": 0.5,
        "relative_logit_error": 1e-6,
        "stock_architecture": False,
        "dtype": "float32",
        "device": "cpu",
        "seconds": {"total": 2.0},
        "layers": [layer],
    } | changes


def one_line(text):
    """`text`, which must be the one line of an error message of drot."""
    assert text.count("\n") == 1 and text.startswith("drot: "), text
    return text
