"""The words of a report: what to look at, and what is unusual by stated rules."""

import math
import statistics
from collections.abc import Iterator, Sequence

from drot.checkpoint.card import on_hub
from drot.checkpoint.tables import change
from drot.core.checks import counted
from drot.reporting.runs import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Run, TextEvaluation, final_error

#: a layer is unusual if its output error is this many times the median of its neighbours
NEIGHBOUR_FACTOR = 2.0
#: layers on each side that are its neighbours
NEIGHBOURS = 2
#: a training stopped too soon if the last tenth of its steps lowered the loss by more than this share; a
#: training of the default recipe, whose angle falls linearly to 0, ends with about 0.01
STILL_FALLING = 0.02
#: a perplexity that is larger than the dense model's by more than this share has lost much
LARGE_RISE = 0.1
#: most names in one line
MOST_NAMES = 4


def summary(run: Run, measured: Sequence[TextEvaluation]) -> list[str]:
    """Sentences on what the run did and what it cost."""
    pruning = run.recipe.pruning
    removed = f"{run.manifest.sparsity:.1%} of the decoder layers' linear weights"
    sentences = [f"Pruning by {pruning.method} removed {removed} ({pruning.sparsity})."]
    before, after = map(run.mean, REMOVED_IMPORTANCE)
    if before is not None and after is not None:
        sentence = (
            f"The rotation {'lowered' if after < before else 'raised'} the share of the importance that the "
            f"mask removes from {before:.1%} to {after:.1%} (mean over the linears)"
        )
        first, second = map(run.mean, ONE_SHOT_ERROR)
        if first is not None and second is not None:
            sentence += f", and the output error of one-shot pruning changed from {first:.4f} to {second:.4f}"
        sentences.append(sentence + ".")
    written = run.mean(final_error)
    if written is not None:
        sentences.append(f"As pruned, the output error of a linear is {written:.4f} on average.")
    distilled = run.manifest.distillation
    if distilled is not None and distilled.trained:
        kl = change(distilled.kl_before, distilled.kl_after)
        sentences.append(
            "Then the kept weights of all layers were trained together; KL(dense ‖ pruned) on held-out "
            f"sequences: {kl}."
        )
    if run.manifest.finetune:
        sentences.append("Then the model was fine-tuned.")
    return [*sentences, *map(_perplexity, measured), _cost(run)]


def _cost(run: Run) -> str:
    """The time and the memory of the run."""
    peaks = list(run.manifest.peak_memory.values())
    kinds = {"of memory": [peak.process for peak in peaks], "on the GPU": [peak.gpu or 0 for peak in peaks]}
    largest = [f"{max(found) / 2**30:.1f} GiB {kind}" for kind, found in kinds.items() if any(found)]
    seconds, of_layers = run.manifest.seconds.total, sum(each.seconds for each in run.manifest.layers)
    since = f" since it was resumed, {of_layers:.0f} s for all layers," if of_layers > seconds else ""
    took = f"The run took {seconds:.0f} s{since}"
    return f"{took} and at most {' and '.join(largest)}." if largest else f"{took}."


def _perplexity(entry: TextEvaluation) -> str:
    where = f"The perplexity on {entry.text} (windows of {entry.seqlen})"
    if entry.perplexity is None:
        return f"{where} is not finite."
    sentence = f"{where} is {entry.perplexity:.3f}"
    if entry.dense is not None:
        sentence += f", {entry.perplexity - entry.dense:+.3f} against the dense model's {entry.dense:.3f}"
    if entry.share is not None:
        sentence += (
            f"; pruned by the method alone, the model has {entry.unrotated:.3f}, and the run closes "
            f"{entry.share:.0%} of the gap"
        )
    return sentence + "."


def verdict(run: Run, measured: Sequence[TextEvaluation], lines: Sequence[str]) -> str:
    """What stands above the `lines` of `unusual`, or in their place."""
    usual = "Look at:" if lines else "Nothing is unusual."
    if any(entry.dense is not None for entry in measured):
        return usual
    model = run.manifest.base_model
    return (
        "No evaluation compares the model with the dense original: measure one with drot eval "
        f"{run.name} --against {model if on_hub(model) else 'ORIGINAL'}. {usual}"
    )


# ---- what is unusual ---------------------------------------------------------------------------------


def unusual(run: Run, measured: Sequence[TextEvaluation]) -> list[str]:
    """A sentence for each case of one of the rules below."""
    rules = (
        _lost_much, _not_concentrated, _damping_rose, _still_falling, _no_recovery, _not_distilled,
    )  # fmt: skip
    return [*(line for rule in rules for line in rule(run)), *_perplexities(run, measured)]


def _lost_much(run: Run) -> Iterator[str]:
    errors = run.layer_means(final_error)
    order = sorted(errors)
    for index, layer in enumerate(order):
        others = order[max(0, index - NEIGHBOURS) : index] + order[index + 1 : index + 1 + NEIGHBOURS]
        usual = statistics.median(errors[other] for other in others) if others else math.inf
        if errors[layer] > NEIGHBOUR_FACTOR * usual:
            times = errors[layer] / usual if usual else math.inf
            yield (
                f"Layer {layer} lost much more than its neighbours: its output error, {errors[layer]:.4f}, "
                f"is {times:.1f} times their median. A milder sparsity for its linears, or keeping them "
                "dense, may help."
            )


def _not_concentrated(run: Run) -> Iterator[str]:
    ratios = run.ratios(*REMOVED_IMPORTANCE)
    if names := [f"layer {layer} {role}" for (layer, role), share in ratios.items() if share >= 1]:
        yield (
            f"The rotation did not lower the pruned importance of {counted(len(names), 'linear')}: "
            f"{_named(names)}. "
            "A layer's linears share one rotation, which may help some at the cost of others."
        )


def _damping_rose(run: Run) -> Iterator[str]:
    wanted = run.recipe.pruning.damping or 0.0
    found = {f"layer {layer} {role}": linear.damping for layer, role, linear in run.pruned()}
    shared = run.manifest.shared_rotation
    trained = enumerate(shared.damping) if shared else ((i, r.damping) for i, r in run.rotations.items())
    for layer, damping in trained:
        found |= {f"layer {layer} inputs of {group} (training)": value for group, value in damping.items()}
    raised = {name: value for name, value in found.items() if value is not None and value > wanted}
    if raised:
        yield (
            f"The damping had to rise from {wanted:g} up to {max(raised.values()):g} for "
            f"{counted(len(raised), 'Hessian')}: {_named(list(raised))}. More calibration tokens may help."
        )


def _still_falling(run: Run) -> Iterator[str]:
    steps, names = run.recipe.rotation.steps or 0, []
    for name, record in run.trainings.items():
        curve = record.loss_curve
        last = curve[-1 - max(1, len(curve) // 10)] if len(curve) > 1 else 0
        if len(curve) > steps and last > 0 and (last - curve[-1]) / last > STILL_FALLING:
            names.append(name)
    if names:
        yield (
            f"The training took all its {steps} steps and the loss still fell in "
            f"{counted(len(names), 'training')}: {_named(names)}. No training stopped early; more steps may "
            "help."
        )


def _no_recovery(run: Run) -> Iterator[str]:
    best = {f"layer {r.layer}": r.recovery.best_epoch for r in run.manifest.layers if r.recovery}
    if idle := [layer for layer, epoch in best.items() if epoch == 0]:
        yield (
            f"The recovery did not help {counted(len(idle), 'layer')}, which stayed as pruned: "
            f"{_named(idle)}. A smaller rate or more calibration text may help."
        )
    if late := [layer for layer, epoch in best.items() if epoch == run.recipe.recovery.recover_epochs]:
        yield f"The recovery was best at its last epoch in {_named(late)}: more epochs may help."


def _not_distilled(run: Run) -> Iterator[str]:
    record = run.manifest.distillation
    if record is not None and record.left_out:
        yield f"The layers were not trained together, because {record.left_out}."
    elif record is not None and not record.trained:
        yield (
            "The training of all layers together did not help, and the weights stayed as they were pruned. A "
            "smaller --distill-lr or more calibration text may help."
        )


def _perplexities(run: Run, measured: Sequence[TextEvaluation]) -> Iterator[str]:
    rotated = run.recipe.rotation.mode != "none"
    untried = {
        "a rotation": not rotated,
        "--quality best": rotated and not run.recipe.recovery.distill_epochs,
        "a milder --sparsity": True,
        "drot finetune": not run.manifest.finetune,
    }
    helps = ", ".join(name for name, applies in untried.items() if applies)
    for entry in measured:
        rise = entry.rise or 0.0
        if entry.share is not None and entry.share < 0:
            yield f"On {entry.text}, the perplexity is worse than by the method alone."
        if rise < 0:
            yield (
                f"On {entry.text}, the pruned model is better than the dense one, {entry.perplexity:.3f} "
                f"against {entry.dense:.3f}. That says little about the pruning: the text is like the "
                "calibration text, or its windows are too long for the model. Measure on another text, or "
                "with a smaller --seqlen."
            )
        if rise > LARGE_RISE:
            yield (
                f"On {entry.text}, the perplexity rose by {rise:.0%}, from {entry.dense:.3f} to "
                f"{entry.perplexity:.3f}. These may help: {helps}, and calibration text of this kind."
            )


def _named(names: list[str]) -> str:
    """The first of `names`, and how many others there are."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
