"""Output on stdout: the console, single lines, and the table of a manifest."""

from pathlib import Path
from typing import Any

from rich.table import Table

from drot.checkpoint.size import size_text, weight_bytes
from drot.cli.safe_text import SafeConsole

#: columns of the table of layers; the table omits a column that has no figure in any row
COLUMNS = ("layer", "loss", "entropy", "sparsity", "output error", "recovery", "seconds")

#: what a rotation of the residual gives and costs; benchmarks/README.md has the measurement
BOUNDARY_COST = "part of down_proj's product; costs about 0.1 of perplexity more than --boundary input"


def output() -> SafeConsole:
    """A console that prints to the current stdout; 100 columns wide if stdout is not a terminal."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width=100)


def print_line(line: str) -> None:
    """Prints one line on stdout, without breaking it."""
    output().print(line, soft_wrap=True)


def saved_line(source: str, out: Path) -> str:
    """Says where a checkpoint was saved, and how many bytes its weights and those of its source have."""
    before, after = weight_bytes(source), weight_bytes(out)
    if after is None:
        return f"Saved to {out}"
    if before is None:  # a model on the hub
        return f"Saved to {out}: {size_text(after)}"
    return f"Saved to {out}: {size_text(before)} -> {size_text(after)}, {after / before:.2f} of the bytes"


def print_manifest(manifest: dict[str, Any]) -> None:
    """Prints a few lines about the run, and a table with a row for each layer."""
    if "recipe" not in manifest:
        _print_pruned_elsewhere(manifest)
        return
    recipe = manifest["recipe"]
    pruning, rotation = recipe["pruning"], recipe["rotation"]
    console = output()
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row("model", str(manifest.get("base_model", "")))
    average = pruning.get("damping_average", "mean")  # the only one before drot recorded it
    share = f", damping {pruning['damping']:g} of the {average}"
    damping = share if pruning["method"] == "sparsegpt" else ""
    # older manifests have neither sparsity_of nor keep
    patterns = [*pruning.get("sparsity_of", ()), *(f"{pattern} dense" for pattern in pruning.get("keep", ()))]
    mixed = "".join(f", {pattern}" for pattern in patterns)
    facts.add_row("pruning", f"{pruning['method']} {pruning['sparsity']}{mixed}{damping}")
    facts.add_row("kept weights", _kept_weights_line(recipe))
    facts.add_row("rotation", _rotation_line(rotation, manifest.get("rotations_file")))
    if rotation.get("boundary") == "residual" and manifest.get("format") == "packed":
        facts.add_row("boundary", BOUNDARY_COST)
    if trained := manifest.get("shared_rotation"):
        facts.add_row(
            "shared training", _shared_line(trained, len(manifest["layers"]), rotation["objective"])
        )
    facts.add_row("calibration", _calibration_line(manifest))
    facts.add_row("sparsity", f"{manifest['sparsity']:.2%} of the decoder layers' linear weights")
    if manifest["relative_logit_error"] is not None:
        facts.add_row("invariance", f"relative logit error {manifest['relative_logit_error']:.1e}")
    for record in manifest.get("finetune", []):
        facts.add_row("fine-tuning", finetune_line(record))
    for entry in manifest.get("evaluations", []):
        facts.add_row("evaluation", evaluation_line(entry))
    facts.add_row("opens as", f"{_opens_as(manifest)}, {_dtype_line(manifest)}")
    if manifest.get("untied_lm_head"):
        facts.add_row("lm_head", "untied from the embedding, as it now contains the final norm's weight")
    facts.add_row("took", f"{manifest['seconds']['total']:.1f} s on {manifest['device']}")
    console.print(facts)
    rows = [_layer_cells(layer) for layer in manifest["layers"]]
    table = Table(title="Layers", title_justify="left")
    shown = [heading for heading in COLUMNS if any(row[heading] != "-" for row in rows)]
    if rotation["objective"] == "entropy" and "entropy" in shown:
        shown.remove("loss")  # the loss is the entropy
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    console.print(table)
    if (times := times_table(manifest)) is not None:
        console.print(times)


def times_table(manifest: dict[str, Any]) -> Table | None:
    """Where the time of a run went: a row for each phase, the longest first.

    The column `of peak` is the time that the work of a phase would take at the rates that `drot info
    --measure` found on the machine before the run, as a share of the time that it took. None for a manifest
    of an older version, which has no work.
    """
    seconds, work, peaks = manifest["seconds"], manifest.get("work"), manifest.get("peaks")
    if work is None:
        return None
    total = seconds["total"]
    phases = {phase: value for phase, value in seconds.items() if phase != "total" and value > 0}
    rest = max(0.0, total - sum(phases.values()))
    table = Table(title="Time", title_justify="left")
    for heading in ("phase", "seconds", "share", "rate", *(["of peak"] if peaks else [])):
        table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
    rows = sorted(phases.items(), key=lambda item: -item[1])
    for phase, value in [*rows, ("other", rest), ("total", total)]:
        done = work.get(phase, {})
        cells = [phase, f"{value:.1f}", f"{value / total:.1%}" if total else "-", rate_text(done, value)]
        if peaks:
            ideal = at_peak(done, peaks) if done and value else None
            cells.append("-" if ideal is None else f"{ideal / value:.1%}")
        table.add_row(*cells)
    if not peaks:
        table.caption = "drot info --measure measures the machine; later runs show their share of its peak"
        table.caption_justify = "left"
    return table


def rate_text(work: dict[str, float], seconds: float) -> str:
    """The rate of a phase, as in 12.5 GFLOP/s and 0.8 GB/s; "-" for a phase whose work is not counted."""
    if not any(work.values()) or not seconds:
        return "-"
    flops = sum(amount for unit, amount in work.items() if unit != "bytes")
    rate, unit = (flops, "FLOP/s") if flops else (work.get("bytes", 0.0), "B/s")
    return scaled(rate / seconds, unit)


def scaled(value: float, unit: str) -> str:
    """A value with three digits and a prefix, as in 12.5 GFLOP/s."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def at_peak(work: dict[str, float], peaks: dict[str, float]) -> float | None:
    """The seconds that work would take at the peak rates; None for work in fp64, whose rate is not measured.

    float16 has the rate of bfloat16.
    """
    rates = {**peaks, "float16": peaks["bfloat16"], "bytes": peaks["copy"]}
    if not work.keys() <= rates.keys():
        return None
    return sum(amount / rates[unit] for unit, amount in work.items())


def _print_pruned_elsewhere(manifest: dict[str, Any]) -> None:
    """Prints the manifest of a model that drot has fine-tuned but not pruned."""
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row("model", str(manifest["base_model"]))
    facts.add_row("pruning", "by another program")
    facts.add_row("sparsity", f"{manifest['sparsity']:.2%} of the decoder layers' linear weights")
    for record in manifest["finetune"]:
        facts.add_row("fine-tuning", finetune_line(record))
    for entry in manifest.get("evaluations", []):
        facts.add_row("evaluation", evaluation_line(entry))
    facts.add_row("opens as", f"{_opens_as(manifest)}, {manifest['finetune'][-1]['dtype']}")
    output().print(facts)


def finetune_line(record: dict[str, Any]) -> str:
    """The settings and the figures of a fine-tuning."""
    settings, text, held_out = record["settings"], record["text"], record["held_out"]
    kind = f"LoRA r {settings.get('rank')}" if record["method"] == "lora" else "all kept weights"
    perplexity = _change(held_out["perplexity_before"], held_out["perplexity_after"])
    return (
        f"{kind}, lr {settings['lr']:g}, {record['steps']} steps, {text['shape'][0]} x {text['shape'][1]} "
        f"tokens of {text['source']}; held-out perplexity {perplexity}; {record['seconds']:.0f} s"
    )


def evaluation_line(entry: dict[str, Any]) -> str:
    """The figures of an evaluation that `drot eval` recorded."""
    parts = [
        f"perplexity {_number(value)} on {Path(source).name} (windows of {entry['seqlen']})"
        for source, value in entry["perplexity"].items()
    ]
    original = Path(entry["against"] or "").name
    parts += [
        f"{figures['equal_tokens']:.1%} of next tokens as {original} on {Path(source).name}"
        for source, figures in entry["agreement"].items()
    ]
    parts += [
        f"{task} {'not finite' if accuracy is None else f'{accuracy:.1%}'}"
        for task, accuracy in entry["tasks"].items()
    ]
    return f"{'; '.join(parts)}; {entry['dtype']}, {entry['date'].partition('T')[0]}"


def _number(value: float | None) -> str:
    """A figure of a manifest, where null stands for a figure that is not finite."""
    return "not finite" if value is None else f"{value:.3f}"


def _opens_as(manifest: dict[str, Any]) -> str:
    """Whether the checkpoint needs drot to be opened, and what for."""
    for record in manifest.get("finetune", [])[-1:]:
        if record["settings"].get("keep_adapter"):
            return f"an adapter for peft on top of {record['from']}"
    if manifest.get("stock_architecture", True):
        return "stock architecture"
    packed = ["packed 2:4 weights"] if manifest.get("format") == "packed" else []
    mode = manifest["recipe"]["rotation"]["mode"] if "recipe" in manifest else "none"
    rotated = ["boundary rotations"] if mode == "layer" else []
    return f"a model that needs drot ({', '.join(packed + rotated)})"


def _kept_weights_line(recipe: dict[str, Any]) -> str:
    """How the kept weights are computed and recovered. Manifests of older versions do not have the keys."""
    pruning, recovery = recipe["pruning"], recipe.get("recovery") or {}
    solver = pruning.get("solve", "none")
    parts = [f"as {pruning['method']} leaves them" if solver == "none" else f"solved by {solver}"]
    if pruning.get("target") == "dense":
        parts.append(f"target dense, weight {pruning['target_weight']:g}")
    if recovery.get("recover") == "block":
        epochs, lr = recovery["recover_epochs"], recovery["recover_lr"]
        parts.append(f"recovered by block, up to {epochs} epochs, lr {lr:g}")
    return ", ".join(parts)


def _calibration_line(manifest: dict[str, Any]) -> str:
    """The calibration text and the sequences that were cut from it."""
    settings, (nsamples, seqlen) = manifest["recipe"]["calibration"], manifest["calibration"]["shape"]
    if nsamples == 0:
        return "none: magnitude pruning without a rotation needs no text"
    # older manifests do not have the key
    whole = " (all that the model reads)" if seqlen == manifest.get("positions") else ""
    return f"{settings['source']}, {nsamples} x {seqlen} tokens{whole}, seed {settings['seed']}"


def _dtype_line(manifest: dict[str, Any]) -> str:
    """The dtype of the weights, and the dtype of the computation if that was another."""
    computed = manifest.get("compute_dtype", manifest["dtype"])  # older manifests do not have the key
    return manifest["dtype"] + ("" if computed == manifest["dtype"] else f" (computed in {computed})")


def _rotation_line(rotation: dict[str, Any], file: dict[str, Any] | None) -> str:
    """The rotation settings of a recipe; `file`: the rotation file of the run, if there is one."""
    if rotation["mode"] == "none":
        return "none"
    kind = rotation["mode"] if rotation["blocks"] == 1 else f"{rotation['mode']}, blocks {rotation['blocks']}"
    # older manifests have down_basis in place of boundary, and the oldest have neither
    if rotation.get("boundary") == "residual" or rotation.get("down_basis") == "next":
        kind += ", boundary on the residual"
    if file is not None:
        return f"{kind}, from {file['file']}"
    training = f"{rotation['steps']} steps of {rotation['optimizer']}, lr {rotation['lr']:g}"
    hessians = ", dense Hessians" if rotation["hessians"] == "dense" else ""
    return f"{kind}, objective {rotation['objective']}, {training}{hessians}"


def _shared_line(trained: dict[str, Any], layers: int, objective: str) -> str:
    """The figures of the only training of `mode="shared"`, as means over the layers."""
    loss = _change(trained["loss_before"] / layers, trained["loss_after"] / layers)
    entropy = _change(trained["entropy_before"], trained["entropy_after"])
    steps = len(trained["loss_curve"]) - 1
    shown = f"entropy {entropy}" if objective == "entropy" else f"loss {loss}, entropy {entropy}"
    return f"{steps} steps, {shown} a layer"


def _layer_cells(layer: dict[str, Any]) -> dict[str, str]:
    """Heading → text of a layer's row; "-" if there is no figure. Means over the linears of the layer."""
    trained, linears = layer.get("rotation", {}), layer["linears"].values()
    errors = [linear["output_error"] for linear in linears if linear["output_error"] is not None]
    recovery = layer.get("recovery", {})
    cells = {
        "layer": str(layer["layer"]),
        "loss": _change(trained.get("loss_before"), trained.get("loss_after")),
        "entropy": _change(trained.get("entropy_before"), trained.get("entropy_after")),
        "sparsity": f"{sum(linear['sparsity'] for linear in linears) / len(linears):.1%}",
        "output error": f"{sum(errors) / len(errors):.4f}" if errors else "-",
        "recovery": _change(recovery.get("error_before"), recovery.get("error_after")),
        "seconds": f"{layer['seconds']:.1f}",
    }
    return {heading: cells[heading] for heading in COLUMNS}


def _change(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{_short(before)} -> {_short(after)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
