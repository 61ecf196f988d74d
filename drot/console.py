"""What a person sees: progress on stderr, tables on stdout."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

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
def progress_bar(*, shared: bool = False, label: str = "loss") -> Iterator[ProgressCallback]:
    """A callback for ProgressEvents: a bar where stderr is a terminal, else lines.

    shared: one training serves all layers. label: what a training's loss is, `entropy` for that objective.
    """
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        lines = LineProgress(console, shared=shared, label=label)
        yield lines
        lines.close()
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
        yield BarProgress(bars, shared=shared, label=label)


class BarProgress:
    """One bar per pass over the layers or over the windows of an evaluation."""

    def __init__(self, bars: Progress, *, shared: bool = False, label: str = "loss") -> None:
        self.bars, self.shared, self.label = bars, shared, label
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
        loss = "" if event.loss is None else f"  {self.label} {event.loss:.4g}"
        if event.phase == "evaluate":
            return event.step, event.steps, f"window {event.step}/{event.steps}"
        if event.phase == "measure":
            return event.step, event.steps, f"case {event.step}/{event.steps}"
        if event.phase == "rotate" and self.shared:
            return event.step, event.steps, f"step {event.step}/{event.steps}{loss}"
        where = f"layer {event.layer + 1}/{event.layers}" if event.layers else ""
        behind = self.completed if self.total == event.layers else 0.0
        if event.phase == "rotate":
            detail = f"{where}  step {event.step}/{event.steps}{loss}"
            # of layers that train side by side one may end behind the next
            return max(event.layer + TRAINING_SHARE * share, behind), event.layers, detail
        trained = event.phase == "prune" and self.layer == event.layer
        return max(event.layer, behind if trained else 0.0), event.layers, where


class LineProgress:
    """A plain line for every training, every layer that is pruned and every evaluation."""

    def __init__(self, console: Console, *, shared: bool = False, label: str = "loss") -> None:
        self.console, self.shared, self.label = console, shared, label
        self.started = time.perf_counter()
        self.first: ProgressEvent | None = None  # of the training that is under way
        self.last: ProgressEvent | None = None
        self.lock = threading.Lock()  # layers may train side by side

    def __call__(self, event: ProgressEvent) -> None:
        with self.lock:
            another = self.last is not None and event.layer != self.last.layer
            if event.phase != "rotate" or another:
                self._end_training()  # one that settled early has no last step
            if event.phase == "rotate":
                self.first, self.last = self.first or event, event
                if event.step == event.steps:
                    self._end_training()
            elif event.phase == "prune":
                self._line(f"layer {event.layer + 1}/{event.layers}: pruning")
            elif event.phase == "evaluate" and event.step == event.steps:
                self._line(f"evaluated {event.steps} windows")
            elif event.phase == "measure":
                self._line(f"measured case {event.step} of {event.steps}")
            elif event.phase == "save":
                self._line("saving")

    def close(self) -> None:
        """Says what was not said yet."""
        with self.lock:
            self._end_training()

    def _end_training(self) -> None:
        first, last = self.first, self.last
        self.first = self.last = None
        if first is None or last is None:
            return
        which = "all layers" if self.shared else f"layer {last.layer + 1}/{last.layers}"
        change = ""
        if last.loss is not None:
            # with layers side by side only the end of each is told
            before = f"{first.loss:.4g} -> " if first is not last and first.loss is not None else ""
            change = f"{self.label} {before}{last.loss:.4g} "
        self._line(f"{which}: rotated, {change}in {last.step} steps")

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
    damping = f", damping {pruning['damping']:g}" if pruning["method"] == "sparsegpt" else ""
    facts.add_row("pruning", f"{pruning['method']} {pruning['sparsity']}{damping}")
    facts.add_row("rotation", _rotation_line(rotation, manifest.get("rotations_file")))
    if trained := manifest.get("shared_rotation"):
        facts.add_row(
            "shared training", _shared_line(trained, len(manifest["layers"]), rotation["objective"])
        )
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
    if rotation["objective"] == "entropy" and "entropy" in shown:
        shown.remove("loss")  # the same figure
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
    kind = rotation["mode"] if rotation["blocks"] == 1 else f"{rotation['mode']}, blocks {rotation['blocks']}"
    if rotation.get("down_basis") == "next":  # older manifests do not say
        kind += ", down_proj in the next basis"
    if file is not None:
        return f"{kind}, from {file['file']}"
    how = f"{rotation['steps']} steps of {rotation['optimizer']}, lr {rotation['lr']:g}"
    hessians = ", dense Hessians" if rotation["hessians"] == "dense" else ""
    return f"{kind}, objective {rotation['objective']}, {how}{hessians}"


def _shared_line(trained: dict[str, Any], layers: int, objective: str) -> str:
    """The one training of `shared`, as means over the layers."""
    loss = _change(trained["loss_before"] / layers, trained["loss_after"] / layers)
    entropy = _change(trained["entropy_before"], trained["entropy_after"])
    steps = len(trained["loss_curve"]) - 1
    shown = f"entropy {entropy}" if objective == "entropy" else f"loss {loss}, entropy {entropy}"
    return f"{steps} steps, {shown} a layer"


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
