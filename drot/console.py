"""What a person sees: progress on stderr, tables on stdout."""

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from drot.progress import Progress as ProgressCallback
from drot.progress import ProgressEvent

if TYPE_CHECKING:
    from drot.demo import DemoResult

#: of the table of layers; one without a figure is left out
COLUMNS = ("layer", "loss", "entropy", "sparsity", "output error", "seconds")
#: share of a layer's bar that its training takes
TRAINING_SHARE = 0.9


def output() -> Console:
    """stdout as it is now; a width for files that no narrow terminal decides."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=100)


def say(line: str) -> None:
    output().print(line, markup=False, soft_wrap=True)


# ---- progress ----------------------------------------------------------------------------------


@contextlib.contextmanager
def progress_bar(*, shared: bool = False) -> Iterator[ProgressCallback]:
    """A callback for ProgressEvents: a bar where stderr is a terminal, else a line per layer.

    shared: one training serves all layers, so its bar counts steps alone.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield LineProgress(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield BarProgress(bars, shared=shared)


class BarProgress:
    """One bar per pass over the layers or over the windows of an evaluation."""

    def __init__(self, bars: Progress, *, shared: bool = False) -> None:
        self.bars, self.shared = bars, shared
        self.task = bars.add_task("start", total=None, detail="")
        self.completed, self.total, self.layer = 0.0, 0.0, 0

    def __call__(self, event: ProgressEvent) -> None:
        completed, total, detail = self._position(event)
        if completed < self.completed or total != self.total:  # another pass
            self.bars.reset(self.task, total=total or None)
        self.bars.update(self.task, completed=completed, description=event.phase, detail=detail)
        self.completed, self.total, self.layer = completed, total, event.layer

    def _position(self, event: ProgressEvent) -> tuple[float, float, str]:
        share = event.step / event.steps if event.steps else 0.0
        loss = "" if event.loss is None else f"  loss {event.loss:.4g}"
        if event.phase == "evaluate":
            return event.step, event.steps, f"window {event.step}/{event.steps}"
        if event.phase == "measure":
            return event.step, event.steps, f"case {event.step}/{event.steps}"
        if event.phase == "rotate" and self.shared:
            return event.step, event.steps, f"step {event.step}/{event.steps}{loss}"
        where = f"layer {event.layer + 1}/{event.layers}" if event.layers else ""
        if event.phase == "rotate":
            detail = f"{where}  step {event.step}/{event.steps}{loss}"
            return event.layer + TRAINING_SHARE * share, event.layers, detail
        trained = event.phase == "prune" and self.layer == event.layer
        behind = self.completed if trained and self.total == event.layers else 0.0
        return max(event.layer, behind), event.layers, where


class LineProgress:
    """A plain line for every layer that is pruned, every training and every evaluation."""

    def __init__(self, console: Console) -> None:
        self.console, self.started = console, time.perf_counter()
        self.trained = ""
        self.first_loss: float | None = None

    def __call__(self, event: ProgressEvent) -> None:
        if event.phase == "rotate" and event.loss is not None:
            if self.first_loss is None:
                self.first_loss = event.loss
            self.trained = f"loss {self.first_loss:.4g} -> {event.loss:.4g} in {event.step} steps, "
        elif event.phase == "calibrate":
            self.first_loss = None
        elif event.phase == "prune":
            self._line(f"layer {event.layer + 1}/{event.layers}: {self.trained}pruning")
            self.trained, self.first_loss = "", None
        elif event.phase == "evaluate" and event.step == event.steps:
            self._line(f"evaluated {event.steps} windows")
        elif event.phase == "measure":
            self._line(f"measured case {event.step} of {event.steps}")
        elif event.phase == "save":
            self._line("saving")

    def _line(self, text: str) -> None:
        seconds = time.perf_counter() - self.started
        self.console.print(f"{text} ({seconds:.0f} s)", markup=False, soft_wrap=True)


# ---- tables ------------------------------------------------------------------------------------


def print_manifest(manifest: dict[str, Any]) -> None:
    """The recipe in a few lines, and a row for every layer."""
    recipe = manifest["recipe"]
    pruning, rotation, calibration = recipe["pruning"], recipe["rotation"], recipe["calibration"]
    console = output()
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_row("model", str(manifest.get("base_model", "")))
    facts.add_row("pruning", f"{pruning['method']} {pruning['sparsity']}, damping {pruning['damping']:g}")
    facts.add_row("rotation", _rotation_line(rotation, manifest.get("rotations_file")))
    shape = "{} x {}".format(*manifest["calibration"]["shape"])
    facts.add_row("calibration", f"{calibration['source']}, {shape} tokens, seed {calibration['seed']}")
    facts.add_row("sparsity", f"{manifest['sparsity']:.2%} of the decoder layers' linear weights")
    if manifest["relative_logit_error"] is not None:
        facts.add_row("invariance", f"relative logit error {manifest['relative_logit_error']:.1e}")
    facts.add_row("opens as", f"{_opens_as(manifest)}, {manifest['dtype']}")
    facts.add_row("took", f"{manifest['seconds']['total']:.1f} s on {manifest['device']}")
    console.print(facts)
    rows = [_layer_cells(layer) for layer in manifest["layers"]]
    table = Table(title="Layers", title_justify="left")
    shown = [heading for heading in COLUMNS if any(row[heading] != "-" for row in rows)]
    for heading in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[heading] for heading in shown))
    console.print(table)


def _opens_as(manifest: dict[str, Any]) -> str:
    if manifest["stock_architecture"]:
        return "stock architecture"
    packed = ["packed 2:4 weights"] if manifest.get("format") == "packed" else []
    rotated = ["residual rotations"] if manifest["recipe"]["rotation"]["mode"] == "layer" else []
    return f"{', '.join(packed + rotated)}; needs drot"


def _rotation_line(rotation: dict[str, Any], file: dict[str, Any] | None) -> str:
    if rotation["mode"] == "none":
        return "none"
    blocks = "" if rotation["blocks"] == 1 else f", blocks {rotation['blocks']}"
    if file is not None:
        return f"{rotation['mode']}{blocks}, from {file['file']}"
    how = f"{rotation['steps']} steps of {rotation['optimizer']}, lr {rotation['lr']:g}"
    return f"{rotation['mode']}{blocks}, objective {rotation['objective']}, {how}"


def _layer_cells(layer: dict[str, Any]) -> dict[str, str]:
    """heading → text; "-" where there is no figure. Sparsity and error are means over the linears."""
    trained, linears = layer.get("rotation", {}), layer["linears"].values()
    errors = [linear["output_error"] for linear in linears if linear["output_error"] is not None]
    cells = {
        "layer": str(layer["layer"]),
        "loss": _change(trained.get("loss_before"), trained.get("loss_after")),
        "entropy": _change(trained.get("entropy_before"), trained.get("entropy_after")),
        "sparsity": f"{sum(linear['sparsity'] for linear in linears) / len(linears):.1%}",
        "output error": f"{sum(errors) / len(errors):.4f}" if errors else "-",
        "seconds": f"{layer['seconds']:.1f}",
    }
    return {heading: cells[heading] for heading in COLUMNS}


def _change(before: float | None, after: float | None) -> str:
    return "-" if before is None or after is None else f"{_short(before)} -> {_short(after)}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def print_figures(figures: dict[str, Any]) -> None:
    """Perplexities and accuracies of `drot eval`."""
    table = Table("measure", title=str(figures["model"]), title_justify="left")
    table.add_column("value", justify="right")
    for source, value in figures["perplexity"].items():
        table.add_row(f"perplexity on {source}, windows of {figures['seqlen']}", f"{value:.3f}")
    for task, accuracy in figures["tasks"].items():
        table.add_row(task, f"{accuracy:.2%}")
    output().print(table)


def print_speed(data: dict[str, Any]) -> None:
    """`drot bench`: a row for every variant of every case, and what was left out."""
    title = f"{data['model']}, {data['dtype']}, {data['machine']}, medians of {data['repeats']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("case", "weights", "ms", "tokens/s", "bound", "MiB", "against dense"):
        is_text = heading in ("case", "weights", "against dense")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in data["rows"]:
        variants = data["variants"][row["what"]]
        table.add_row(
            f"{row['what']} {row['phase']} {row['size']}" if row["variant"] == variants[0] else "",
            row["variant"],
            _three_digits(row["milliseconds"]),
            _three_digits(row["tokens_per_second"]),
            _bound(row),
            _three_digits(row["weight_bytes"] / 2**20),
            "" if row["speedup"] is None else f"{row['speedup']:.2f} x, {row['verdict']}",
            end_section=row["variant"] == variants[-1],
        )
    output().print(table)
    if data["left_out"]:
        say(f"Left out to end in time (--tokens, --batch, --minutes): {', '.join(data['left_out'])}")


def _bound(row: dict[str, Any]) -> str:
    if row["phase"] == "decode":
        return f"{_three_digits(row['bound'] / 1e9)} GB/s"
    scale, unit = (1e12, "TFLOP/s") if row["bound"] >= 1e12 else (1e9, "GFLOP/s")
    return f"{_three_digits(row['bound'] / scale)} {unit}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def print_environment(data: dict[str, Any]) -> None:
    """`drot info`: one line a fact."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in data.items():
        if value is not None and (fact := _fact(value)):
            table.add_row(key.replace("_", " "), fact)
    output().print(table)


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_fact(fact)}" for key, fact in value.items() if fact not in (None, []))
    if isinstance(value, list):
        return "; ".join(map(_fact, value)) or "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def print_demo(result: "DemoResult") -> None:
    """The demo's table and a sentence that says what it means."""
    table = Table(title="tiny-llama on held-out Python source", title_justify="left")
    table.add_column("model")
    for heading in ("perplexity", "gap closed", "sparsity", "seconds"):
        table.add_column(heading, justify="right")
    best = result.rows[-1]
    for row in result.rows:
        table.add_row(
            row.name,
            f"{row.perplexity:.3f}",
            "-" if row.gap_closed is None else f"{row.gap_closed:.0%}",
            f"{row.sparsity:.0%}",
            "-" if row.seconds is None else f"{row.seconds:.1f}",
            style="bold green" if row is best and result.rotation_helped else "",
        )
    console = output()
    console.print(table)
    console.print(result.sentence, markup=False)
