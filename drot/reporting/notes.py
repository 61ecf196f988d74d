"""The words of a report: what to look at, and what is unusual by stated rules."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from drot.manifest.tables import short
from drot.reporting.evaluations import Measured
from drot.reporting.reading import ONE_SHOT_ERROR, REMOVED_IMPORTANCE, Figure, Run, final_error

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
#: a perplexity that is larger than the dense model's by more than this share has lost much
LARGE_RISE = 0.1
#: most names in one line
MOST_NAMES = 4


def summary(run: Run, measured: Sequence[Measured]) -> list[str]:
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
        sentences.append(f"As written, the output error of a linear is {written:.4f} on average.")
    return [*sentences, *map(_perplexity, measured), _cost(run)]


def _cost(run: Run) -> str:
    """The time and the memory of the run."""
    peaks = list(run.manifest.peak_memory.values())
    kinds = {"of memory": [peak.process for peak in peaks], "on the GPU": [peak.gpu or 0 for peak in peaks]}
    largest = [f"{max(found) / 2**30:.1f} GiB {kind}" for kind, found in kinds.items() if any(found)]
    took = f"The run took {run.manifest.seconds.total:.0f} s"
    return f"{took} and at most {' and '.join(largest)}." if largest else f"{took}."


def _perplexity(entry: Measured) -> str:
    where = f"The perplexity on {entry.text} (windows of {entry.seqlen})"
    if entry.perplexity is None:
        return f"{where} is not finite."
    sentence = f"{where} is {entry.perplexity:.3f}"
    if entry.dense is not None:
        sentence += f", {entry.perplexity - entry.dense:+.3f} against the dense model's {entry.dense:.3f}"
    if entry.share is not None:
        sentence += (
            f"; pruned without the rotation, the model has {entry.unrotated:.3f}, and "
            f"{entry.share:.0%} of the gap is closed"
        )
    return sentence + "."


def verdict(run: Run, measured: Sequence[Measured], lines: Sequence[str]) -> str:
    """What stands above the `lines` of `unusual`, or in their place."""
    if lines:
        return "Look at:"
    if any(entry.dense is not None for entry in measured):
        return "Nothing is unusual: none of the rules below applies."
    model = short(run.manifest.base_model)
    return (
        "None of the rules below applies. But no evaluation compares the model with the dense original: "
        f"measure one with drot eval {run.name} --against {model or 'ORIGINAL'}."
    )


# ---- what is unusual ---------------------------------------------------------------------------------

Rule = Callable[[Run, Sequence[Measured]], Iterator[str]]
#: the rule in words → a function that yields a sentence for each case
RULES: dict[str, Rule] = {}


def rule(words: str) -> Callable[[Rule], Rule]:
    """Adds a function to RULES."""

    def add(function: Rule) -> Rule:
        RULES[words] = function
        return function

    return add


def unusual(run: Run, measured: Sequence[Measured]) -> list[str]:
    """A sentence for each case of a rule in RULES."""
    return [line for function in RULES.values() for line in function(run, measured)]


@rule(
    f"The output error of a layer is more than {NEIGHBOUR_FACTOR:g} times the median of the {NEIGHBOURS} "
    "layers on each side."
)
def _lost_much(run: Run, _: Sequence[Measured]) -> Iterator[str]:
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


@rule("The pruned importance of a linear is not smaller after the rotation than before.")
def _not_concentrated(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    if names := _not_lowered(run, *REMOVED_IMPORTANCE):
        yield (
            f"The rotation did not lower the pruned importance of {_count(names, 'linear')}: "
            f"{_named(names)}. "
            "A layer's linears share one rotation, which may help some at the cost of others."
        )


@rule("The one-shot output error of a linear is not smaller after the rotation than before.")
def _error_rose(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    if names := _not_lowered(run, *ONE_SHOT_ERROR):
        yield f"The rotation raised the one-shot output error of {_count(names, 'linear')}: {_named(names)}."


def _not_lowered(run: Run, before: Figure, after: Figure) -> list[str]:
    """The linears of which the rotation did not lower a figure."""
    return [
        f"layer {layer} {role}" for (layer, role), share in run.ratios(before, after).items() if share >= 1
    ]


@rule("A Hessian could be inverted only with more damping than the recipe names.")
def _damping_rose(run: Run, _: Sequence[Measured]) -> Iterator[str]:
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
            f"{_count(list(raised), 'Hessian')}: {_named(list(raised))}. More calibration tokens may help."
        )


@rule(
    "A training took all its steps, and the last tenth of them lowered the loss by more than "
    f"{STILL_FALLING:.0%}."
)
def _still_falling(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    steps, names = run.recipe.rotation.steps or 0, []
    for name, record in run.trainings.items():
        curve = record.loss_curve
        last = curve[-1 - max(1, len(curve) // 10)] if len(curve) > 1 else 0
        if len(curve) > steps and last > 0 and (last - curve[-1]) / last > STILL_FALLING:
            names.append(name)
    if names:
        yield (
            f"The training took all its {steps} steps and the loss still fell in "
            f"{_count(names, 'training')}: {_named(names)}. No training stopped early; more steps may help."
        )


@rule("The best step of a training lies in the first four fifths of its steps.")
def _best_was_early(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    steps = {name: len(record.loss_curve) - 1 for name, record in run.trainings.items()}
    names = [
        f"{name} (step {record.best_step} of {steps[name]})"
        for name, record in run.trainings.items()
        if record.best_step < 0.8 * steps[name]
    ]
    if names:
        yield f"The loss was lowest long before the last step: {_named(names)}. A smaller rate may help."


@rule("The recovery of a layer kept the weights as pruned, or was best at its last epoch.")
def _no_recovery(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    best = {f"layer {r.layer}": r.recovery.best_epoch for r in run.manifest.layers if r.recovery}
    if idle := [layer for layer, epoch in best.items() if epoch == 0]:
        yield (
            f"The recovery did not help {_count(idle, 'layer')}, which stayed as pruned: {_named(idle)}. "
            "A smaller rate or more calibration text may help."
        )
    if late := [layer for layer, epoch in best.items() if epoch == run.recipe.recovery.recover_epochs]:
        yield f"The recovery was best at its last epoch in {_named(late)}: more epochs may help."


@rule(f"A linear has more zeros than the recipe asks for, by {MORE_ZEROS:.1%} of its weights or more.")
def _more_zeros(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    pruning = run.recipe.pruning
    names = [
        f"layer {layer} {role} ({linear.sparsity:.1%})"
        for layer, role, linear in run.pruned()
        if linear.sparsity > pruning.sparsity.ratio + MORE_ZEROS
    ]
    if names and not pruning.mixed:
        yield (
            f"{_count(names, 'linear')} have more zeros than {pruning.sparsity} asks for: {_named(names)}. "
            "Inputs that are always 0, or zeros of the dense model, are the usual cause."
        )


@rule(
    "The rotated dense model differs from the original by more than "
    f"{LARGE_INVARIANCE_ERROR:g} of its logits."
)
def _invariance(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    value = run.manifest.relative_logit_error
    if value is not None and value > LARGE_INVARIANCE_ERROR:
        yield f"The rotated dense model differs from the original by {value:.1e} of its logits."


@rule("The layers took longer than the whole run.")
def _resumed(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    if sum(layer.seconds for layer in run.manifest.layers) > 1.02 * run.manifest.seconds.total:
        yield (
            "The run was interrupted and continued: its layers took longer than the total. The times and the "
            "memory by phase are those of its last part."
        )


@rule("Fine-tuning raised the perplexity on held-out text.")
def _finetuning_hurt(run: Run, _: Sequence[Measured]) -> Iterator[str]:
    for record in run.manifest.finetune:
        before, after = record.held_out.perplexity_before, record.held_out.perplexity_after
        if after > before:
            yield f"Fine-tuning raised the perplexity on held-out text from {before:.3f} to {after:.3f}."


@rule("The perplexity is worse than without the rotation.")
def _worse(_: Run, measured: Sequence[Measured]) -> Iterator[str]:
    for entry in measured:
        if entry.share is not None and entry.share < 0:
            yield f"On {entry.text}, the perplexity is worse than without the rotation."


@rule("The pruned model has a lower perplexity than the dense one.")
def _better_than_dense(_: Run, measured: Sequence[Measured]) -> Iterator[str]:
    for entry in measured:
        if entry.rise is not None and entry.rise < 0:
            yield (
                f"On {entry.text}, the pruned model is better than the dense one, {entry.perplexity:.3f} "
                f"against {entry.dense:.3f}. That says little about the pruning: the text is like the "
                "calibration text, or its windows are too long for the model. Measure on another text, or "
                "with a smaller --seqlen."
            )


@rule(f"The perplexity is more than {LARGE_RISE:.0%} above the dense model's.")
def _rose(run: Run, measured: Sequence[Measured]) -> Iterator[str]:
    untried = {
        "a rotation": not run.rotated,
        "--quality best": run.rotated and run.recipe.recovery.recover == "none",
        "a milder --sparsity": True,
        "drot finetune": not run.manifest.finetune,
    }
    helps = ", ".join(name for name, applies in untried.items() if applies)
    for entry in measured:
        if entry.rise is not None and entry.rise > LARGE_RISE:
            yield (
                f"On {entry.text}, the perplexity rose by {entry.rise:.0%}, from {entry.dense:.3f} to "
                f"{entry.perplexity:.3f}. These may help: {helps}, and calibration text of this kind."
            )


def _count(names: list[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' if len(names) != 1 else ''}"


def _named(names: list[str]) -> str:
    """The first of `names`, and how many others there are."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
