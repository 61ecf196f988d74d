"""The words of a report: what to look at, and what is unusual by stated rules."""

import math
import statistics
from collections.abc import Callable, Iterator

from drot.manifest.importance import FIGURES
from drot.report.evaluations import Measured
from drot.report.reading import Run, final_error, layer_means, mean, one_shot

#: a layer is unusual if its output error is this many times the median of its neighbours
NEIGHBOUR_FACTOR = 2.0
#: layers on each side that are its neighbours
NEIGHBOURS = 2
#: a training stopped too soon if the last tenth of its steps lowered the loss by more than this share; a
#: training of the default recipe, whose angle falls linearly to 0, ends with about 0.01
STILL_FALLING = 0.02
#: a linear has more zeros than the recipe says if its share of zeros is larger by more than this
MORE_ZEROS = 0.005
#: an invariance error above this share of what drot refuses (1e-4) is worth a look
LARGE_INVARIANCE_ERROR = 1e-5
#: method → its name in a sentence
METHODS = {"sparsegpt": "SparseGPT", "wanda": "Wanda", "magnitude": "Magnitude pruning"}
#: most names in one line
MOST_NAMES = 4


def summary(run: Run, measured: list[Measured]) -> list[str]:
    """Sentences on what the run did and what it cost."""
    pruning = run.recipe["pruning"]
    removed = f"{run.manifest['sparsity']:.1%} of the decoder layers' linear weights"
    what = f"{METHODS[pruning['method']]} removed {removed}"
    sentences = [f"{what} ({pruning['sparsity']})."]
    importance = [mean(run, one_shot(basis, "removed_importance")) for basis in ("before", "after")]
    errors = [mean(run, one_shot(basis, "output_error")) for basis in ("before", "after")]
    if importance[0] is not None and importance[1] is not None:
        changed = "lowered" if importance[1] < importance[0] else "raised"
        sentences.append(
            f"The rotation {changed} the share of the importance that the mask removes from "
            f"{importance[0]:.1%} to {importance[1]:.1%} (mean over the linears)"
        )
        if errors[0] is not None and errors[1] is not None:
            sentences[-1] += (
                f", and the output error of one-shot pruning changed from {errors[0]:.4f} to {errors[1]:.4f}"
            )
        sentences[-1] += "."
    written = mean(run, final_error)
    if written is not None:
        sentences.append(f"As written, the output error of a linear is {written:.4f} on average.")
    for entry in measured:
        where = f"The perplexity on {entry.text} (windows of {entry.seqlen})"
        if entry.perplexity is None:
            sentences.append(f"{where} is not finite.")
            continue
        sentence = f"{where} is {entry.perplexity:.3f}"
        if entry.dense is not None:
            sentence += f", {entry.perplexity - entry.dense:+.3f} against the dense model's {entry.dense:.3f}"
        if entry.share is not None:
            sentence += (
                f"; pruned without the rotation, the model has {entry.unrotated:.3f}, and "
                f"{entry.share:.0%} of that gap is closed"
            )
        sentences.append(sentence + ".")
    return sentences


def unusual(run: Run, measured: list[Measured]) -> list[str]:
    """A sentence for each rule in RULES that applies."""
    found = [line for _, rule in RULES for line in rule(run)]
    for entry in measured:
        if entry.share is not None and entry.share < 0:
            found.append(f"On {entry.text}, the perplexity is worse than without the rotation.")
    return found


def _lost_much(run: Run) -> Iterator[str]:
    errors = layer_means(run, final_error)
    order = sorted(errors)
    for place, layer in enumerate(order):
        near = [
            errors[order[other]]
            for other in range(max(0, place - NEIGHBOURS), min(len(order), place + NEIGHBOURS + 1))
            if other != place
        ]
        if near and errors[layer] > NEIGHBOUR_FACTOR * statistics.median(near):
            times = errors[layer] / statistics.median(near) if statistics.median(near) else math.inf
            yield (
                f"Layer {layer} lost much more than its neighbours: its output error, {errors[layer]:.4f}, "
                f"is {times:.1f} times their median. A milder sparsity for its linears, or keeping them "
                "dense, may help."
            )


def _not_concentrated(run: Run) -> Iterator[str]:
    names = [
        f"layer {layer} {role}"
        for layer, role, linear in run.pruned()
        if _larger(linear, "removed_importance")
    ]
    if names:
        yield (
            f"The rotation did not lower the pruned importance of {_count(names, 'linear')}: "
            f"{_named(names)}. "
            "A layer's linears share one rotation, which may help some at the cost of others."
        )


def _error_rose(run: Run) -> Iterator[str]:
    names = [
        f"layer {layer} {role}" for layer, role, linear in run.pruned() if _larger(linear, "output_error")
    ]
    if names:
        yield f"The rotation raised the one-shot output error of {_count(names, 'linear')}: {_named(names)}."


def _larger(linear: dict, key: str) -> bool:
    before, after = (one_shot(basis, key)(linear) for basis in ("before", "after"))
    return before is not None and after is not None and after >= before > 0


def _damping_rose(run: Run) -> Iterator[str]:
    wanted = run.recipe["pruning"]["damping"]
    raised = {
        f"layer {layer} {role}": linear["damping"]
        for layer, role, linear in run.pruned()
        if linear.get("damping") is not None and linear["damping"] > wanted
    }
    for layer in run.layers:
        for group, value in (layer.get("rotation", {}).get("damping") or {}).items():
            if value > wanted:
                raised[f"layer {layer['layer']} inputs of {group} (training)"] = value
    if raised:
        yield (
            f"The damping had to rise from {wanted:g} up to {max(raised.values()):g} for "
            f"{_count(list(raised), 'Hessian')}: {_named(list(raised))}. More calibration tokens may help."
        )


def _still_falling(run: Run) -> Iterator[str]:
    rotation = run.recipe["rotation"]
    names = []
    trainings = [(f"layer {layer}", record) for layer, record in run.trainings()]
    if shared := run.manifest.get("shared_rotation"):
        trainings = [("all layers", shared)]
    for name, record in trainings:
        curve = record["loss_curve"]
        last = curve[-1 - max(1, len(curve) // 10)] if len(curve) > 1 else 0
        if len(curve) > rotation["steps"] and last > 0 and (last - curve[-1]) / last > STILL_FALLING:
            names.append(name)
    if names:
        yield (
            f"The training took all its {rotation['steps']} steps and the loss still fell in "
            f"{_count(names, 'training')}: {_named(names)}. No training stopped early; more steps may help."
        )


def _best_was_early(run: Run) -> Iterator[str]:
    names = [
        f"layer {layer} (step {record['best_step']} of {len(record['loss_curve']) - 1})"
        for layer, record in run.trainings()
        if len(record["loss_curve"]) > 1 and record["best_step"] < 0.8 * (len(record["loss_curve"]) - 1)
    ]
    if names:
        yield f"The loss was lowest long before the last step: {_named(names)}. A smaller rate may help."


def _no_recovery(run: Run) -> Iterator[str]:
    records = [(layer["layer"], layer["recovery"]) for layer in run.layers if layer.get("recovery")]
    idle = [f"layer {layer}" for layer, record in records if record["best_epoch"] == 0]
    if idle:
        yield (
            f"The recovery did not help {_count(idle, 'layer')}, which stayed as pruned: {_named(idle)}. "
            "A smaller rate or more calibration text may help."
        )
    epochs = run.recipe.get("recovery", {}).get("recover_epochs")
    late = [f"layer {layer}" for layer, record in records if record["best_epoch"] == epochs]
    if late:
        yield f"The recovery was best at its last epoch in {_named(late)}: more epochs may help."


def _more_zeros(run: Run) -> Iterator[str]:
    pruning = run.recipe["pruning"]
    if pruning.get("sparsity_of") or pruning.get("keep"):
        return
    text = pruning["sparsity"]
    ratio = 1 - int(text.split(":")[0]) / int(text.split(":")[1]) if ":" in text else float(text)
    names = [
        f"layer {layer} {role} ({linear['sparsity']:.1%})"
        for layer, role, linear in run.pruned()
        if linear["sparsity"] > ratio + MORE_ZEROS
    ]
    if names:
        yield (
            f"{_count(names, 'linear')} have more zeros than {text} asks for: {_named(names)}. Inputs that "
            "are always 0, or zeros of the dense model, are the usual cause."
        )


def _invariance(run: Run) -> Iterator[str]:
    value = run.manifest.get("relative_logit_error")
    if value is not None and value > LARGE_INVARIANCE_ERROR:
        yield f"The rotated dense model differs from the original by {value:.1e} of its logits."


def _resumed(run: Run) -> Iterator[str]:
    seconds = sum(layer.get("seconds", 0.0) for layer in run.layers)
    if seconds > 1.02 * run.manifest["seconds"]["total"]:
        yield (
            "The run was interrupted and continued: its layers took longer than the total. The times and the "
            "memory by phase are those of its last part."
        )


def _finetuning_hurt(run: Run) -> Iterator[str]:
    for record in run.manifest.get("finetune", []):
        held_out = record["held_out"]
        before, after = held_out["perplexity_before"], held_out["perplexity_after"]
        if before is not None and after is not None and after > before:
            yield f"Fine-tuning raised the perplexity on held-out text from {before:.3f} to {after:.3f}."


def _old(run: Run) -> Iterator[str]:
    if any(True for _ in run.pruned()) and not run.linears:
        yield f"The run has no {FIGURES}, so the importance of its linears is left out."


#: (rule in words, function of the run that yields a sentence for each case)
RULES: tuple[tuple[str, Callable[[Run], Iterator[str]]], ...] = (
    (
        f"The output error of a layer is more than {NEIGHBOUR_FACTOR:g} times the median of the {NEIGHBOURS} "
        "layers on each side.",
        _lost_much,
    ),
    ("The pruned importance of a linear is not smaller after the rotation than before.", _not_concentrated),
    ("The one-shot output error of a linear is not smaller after the rotation than before.", _error_rose),
    ("A Hessian could be inverted only with more damping than the recipe names.", _damping_rose),
    (
        f"A training took all its steps, and the last tenth of them lowered the loss by more than "
        f"{STILL_FALLING:.0%}.",
        _still_falling,
    ),
    ("The best step of a training lies in the first four fifths of its steps.", _best_was_early),
    ("The recovery of a layer kept the weights as pruned, or was best at its last epoch.", _no_recovery),
    (
        f"A linear has more zeros than the recipe asks for, by {MORE_ZEROS:.1%} of its weights or more.",
        _more_zeros,
    ),
    (
        "The rotated dense model differs from the original by more than "
        f"{LARGE_INVARIANCE_ERROR:g} of its logits.",
        _invariance,
    ),
    ("The layers took longer than the whole run.", _resumed),
    ("Fine-tuning raised the perplexity on held-out text.", _finetuning_hurt),
    ("The file with the importance of the linears is missing.", _old),
)
#: the rules in words; the last is part of `unusual`
RULES_IN_WORDS = (*(words for words, _ in RULES), "The perplexity is worse than without the rotation.")


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' if len(names) != 1 else ''}"


def _named(names: list[str]) -> str:
    """The first of `names`, and how many others there are."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
