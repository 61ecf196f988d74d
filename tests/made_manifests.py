"""Manifests made for a test, with every entry that `drot prune` writes."""

from pathlib import Path
from typing import Any

from drot.checkpoint.card import CARD, save_card
from drot.checkpoint.manifest import Manifest, update_manifest
from drot.config import FinetuneConfig, Recipe, ResolvedRecipe, resolve

MACHINE = {"processor": "x86_64", "gpu": None}
TRAINED = {
    "loss_before": 1.0,
    "loss_after": 0.2,
    "best_step": 20,
    "seconds": 1.0,
    "orthogonality_error": 1e-12,
    "loss_curve": [1.0 - 0.1 * min(step, 8) for step in range(21)],
    "entropy_curve": [[0, 900.0], [20, 800.0]],
    "entropy_before": 900.0,
    "entropy_after": 800.0,
    "nsamples": 2,
}


def made_layer(index: int, recipe: ResolvedRecipe, roles: tuple[str, ...]) -> dict[str, Any]:
    """The record of a layer in which nothing is unusual."""
    damping = recipe.pruning.damping
    linear = {
        "sparsity": 0.5,
        "output_error": 0.01,
        "damping": damping,
        "one_shot": {
            "before": {"removed_importance": 0.12, "output_error": 0.05},
            "after": {"removed_importance": 0.03, "output_error": 0.02},
        },
        "admm_iterations": 10,
    }
    layer: dict[str, Any] = {"layer": index, "linears": dict.fromkeys(roles, linear), "seconds": 1.0}
    if recipe.rotation.mode == "layer":
        layer["rotation"] = TRAINED | {"damping": {"attention": damping}, "invariance_error": 1e-7}
    if recipe.recovery.recover == "block":
        layer["recovery"] = {
            "error_before": 0.2,
            "error_after": 0.1,
            "best_epoch": 3,
        }
    return layer


def made_manifest(
    recipe: Recipe | None = None, layers: int = 1, roles: tuple[str, ...] = ("q_proj",), **changes: Any
) -> Manifest:
    """The manifest of a run of `recipe`. changes: entries to replace, in plain JSON types."""
    resolved = resolve(recipe or Recipe())
    shared = TRAINED | {"damping": [{"attention": resolved.pruning.damping}] * layers}
    entries = {
        "format_version": 1,
        "base_model": "someone/some-model",
        "sparsity": 0.5,
        "dtype": "float32",
        "format": "dense",
        "stock_architecture": False,
        "recipe": resolved,
        "calibration": {"sha256": "0", "shape": [2, 8]},
        "positions": 64,
        "layers": [made_layer(index, resolved, roles) for index in range(layers)],
        "shared_rotation": shared if resolved.rotation.mode == "shared" else None,
        "rotations_file": None,
        "untied_lm_head": False,
        "relative_logit_error": 1e-7,
        "versions": {"drot": "0", "torch": "2"},
        "device": "cpu",
        "machine": MACHINE,
        "compute_dtype": "float32",
        "seconds": {"load": 1.0, "rotate": 6.0, "recover": 0.0, "total": 10.0},
        "peak_memory": {"rotate": {"process": 2**30}},
        "hidden_states": "file",
        "dense_states_on_device": True,
    }
    if resolved.recovery.distill_epochs:
        entries["distillation"] = {
            "kl_before": 0.2,
            "kl_after": 0.15,
            "trained": True,
        }
    assert changes.keys() <= Manifest.model_fields.keys()
    return Manifest.model_validate(entries | changes)


def made_evaluation(perplexity: dict[str, float | None], **changes: Any) -> dict[str, Any]:
    """An entry of `evaluations`. perplexity: name of a text → perplexity."""
    text = {"split": None, "tokens": 1024, "windows": 2, "sha256": "0"}
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "versions": {"drot": "0"},
        "seqlen": 512,
        "dtype": "float32",
        "machine": "a machine",
        "streamed": False,
        "texts": dict.fromkeys(perplexity, text),
        "perplexity": perplexity,
        "against": None,
        "agreement": {},
        "tasks": {},
        "task_details": {},
        "averages": {},
    } | changes


def made_agreement(dense_perplexity: float = 5.0) -> dict[str, Any]:
    """An entry of `agreement` of an evaluation."""
    return {
        "equal_tokens": 0.9,
        "kl": {"mean": 0.05, "p99": 0.5},
        "positions": [{"first": 0, "last": 511, "equal_tokens": 0.9, "kl": 0.05}],
        "dense_perplexity": dense_perplexity,
        "perplexity_difference": 2.0,
    }


def made_finetuning(before: float = 9.0, after: float = 8.0, **changes: Any) -> dict[str, Any]:
    """An entry of `finetune`. before, after: held-out perplexities."""
    tokens = {"sha256": "0", "shape": [4, 8]}
    return {
        "from": "some/folder",
        "settings": FinetuneConfig(lr=1e-4, warmup_steps=0, held_out=2),
        "text": tokens,
        "steps": 4,
        "processes": 1,
        "loss_curve": [[1, 2.5]],
        "held_out": tokens
        | {
            "loss_before": 2.2,
            "loss_after": 2.1,
            "perplexity_before": before,
            "perplexity_after": after,
        },
        "dtype": "float32",
        "device": "cpu",
        "machine": MACHINE,
        "versions": {"drot": "0"},
        "seconds": 1.0,
    } | changes


def write_card(folder: Path) -> None:
    """Brings the card of a checkpoint up to date, as `drot eval` does after its figures are recorded."""
    update_manifest(folder, lambda manifest: save_card(folder, manifest), [CARD])
