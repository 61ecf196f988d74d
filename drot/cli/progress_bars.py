"""Progress on stderr: a bar if stderr is a terminal, otherwise lines."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from drot.cli.safe_text import SafeConsole
from drot.core.events import Progress as ProgressCallback
from drot.core.events import ProgressEvent

#: the share of a layer's part of the bar that belongs to its training; the rest belongs to its pruning
TRAINING_SHARE = 0.9
#: phase of a ProgressEvent → what is happening, in words
PHASES = {
    "read": "reading",
    "tokenize": "tokenising",
    "load": "loading",
    "check": "checking",
    "calibrate": "calibrating",
    "rotate": "rotating",
    "prune": "pruning",
    "recover": "recovering",
    "sensitivity": "measuring",
    "finetune": "fine-tuning",
    "evaluate": "evaluating",
    "stream": "evaluating",
    "measure": "measuring",
    "draw": "drawing",
    "export": "exporting",
    "apply": "applying",
    "save": "saving",
}
#: phase → what was done with a layer, in words
DONE = {"export": "exported", "apply": "made again"}
#: seconds without a line, after which an evaluation that goes on prints one
MOST_SILENCE = 10.0


@contextlib.contextmanager
def progress_bar(*, shared: bool = False, label: str = "loss") -> Iterator[ProgressCallback]:
    """The callback for ProgressEvents: a BarProgress if stderr is a terminal, otherwise a LineProgress.

    shared: whether all layers have one training, as with `mode="shared"`.
    label: the name of the training's loss, such as `entropy`.
    """
    console = SafeConsole(stderr=True)
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
        TimeLeftColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield BarProgress(bars, shared=shared, label=label)


class TimeLeftColumn(ProgressColumn):
    """The estimated time left of the bar's pass; - while it is not known, and when the pass has ended."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        left = None if task.finished else task.time_remaining
        return Text("-" if left is None else str(timedelta(seconds=math.ceil(left))))


def layer_name(event: ProgressEvent) -> str:
    """The layer of an event: its number, as in the names of tensors, and its place, which counts from 1."""
    return f"layer {event.layer} ({event.layer + 1} of {event.layers})"


class BarProgress:
    """A bar that starts again for each pass over the layers, the windows of an evaluation or the cases."""

    def __init__(self, bars: Progress, *, shared: bool = False, label: str = "loss") -> None:
        self.bars, self.shared, self.label = bars, shared, label
        self.task = bars.add_task("start", total=None, detail="")
        self.completed, self.total, self.layer = 0.0, 0.0, 0

    def __call__(self, event: ProgressEvent) -> None:
        if event.phase == "sweep":  # the bar below is of the cell
            self.bars.console.print(_cell_line(event), markup=False)
            return
        completed, total, detail = self._position(event)
        if completed < self.completed or total != self.total:  # another pass
            self.bars.remove_task(self.task)
            self.task = self.bars.add_task(PHASES[event.phase], total=total or None, detail=detail)
        self.bars.update(self.task, completed=completed, description=PHASES[event.phase], detail=detail)
        self.completed, self.total, self.layer = completed, total, event.layer

    def _position(self, event: ProgressEvent) -> tuple[float, float, str]:
        """The completed part of the bar, the total, and the text next to the bar."""
        share = event.step / event.steps if event.steps else 0.0
        loss = "" if event.loss is None else f"  {self.label} {event.loss:.4g}"
        if event.phase in ("read", "tokenize"):
            return _position_in_text(event)
        if event.phase == "evaluate":
            return event.step, event.steps, f"window {event.step}/{event.steps}"
        if event.phase == "measure":
            return event.step, event.steps, f"case {event.step}/{event.steps}"
        if event.phase == "draw":
            return event.step, event.steps, f"linear {event.step}/{event.steps}"
        if event.phase == "finetune" or (event.phase == "rotate" and self.shared):
            return event.step, event.steps, f"step {event.step}/{event.steps}{loss}"
        layer = layer_name(event) if event.layers else ""
        reached = self.completed if self.total == event.layers else 0.0
        if event.phase == "rotate":
            detail = f"{layer}  step {event.step}/{event.steps}{loss}"
            # the bar never goes back, although of layers that train in parallel a later one may be ahead
            return max(event.layer + TRAINING_SHARE * share, reached), event.layers, detail
        same_layer = event.phase in ("prune", "recover") and self.layer == event.layer
        if event.phase == "recover":
            layer += f"  epoch {event.step}/{event.steps}  held-out error {event.loss:.4g}"
        return max(event.layer, reached if same_layer else 0.0), event.layers, layer


class LineProgress:
    """One line for each training, pruned layer, evaluation, tenth of a fine-tuning and measured case.

    A long evaluation has a line at the end of its batches too, if MOST_SILENCE has passed without a line.
    """

    def __init__(self, console: Console, *, shared: bool = False, label: str = "loss") -> None:
        self.console, self.shared, self.label = console, shared, label
        self.started = self.printed = time.perf_counter()
        #: the first and the last event of the current training
        self.first: ProgressEvent | None = None
        self.last: ProgressEvent | None = None
        self.lock = threading.Lock()  # layers that train in parallel report from several threads

    def __call__(self, event: ProgressEvent) -> None:
        with self.lock:
            other_layer = self.last is not None and event.layer != self.last.layer
            if event.phase != "rotate" or other_layer:
                self._end_training()  # a training that stopped early reports no event of the last step
            if event.phase == "rotate":
                self.first, self.last = self.first or event, event
                if event.step == event.steps:
                    self._end_training()
            elif event.phase == "prune":
                self._line(f"{layer_name(event)}: pruning")
            elif event.phase == "recover":
                self._line(
                    f"{layer_name(event)}: recovery, epoch {event.step} of {event.steps}, "
                    f"held-out error {event.loss:.4g}"
                )
            elif event.phase == "sweep":
                self._line(_cell_line(event))
            elif event.phase == "stream":
                self._line(f"{layer_name(event)}: streamed")
            elif event.phase == "sensitivity":
                self._line(f"{layer_name(event)}: output errors")
            elif event.phase == "finetune" and event.step in _tenths(event.steps):
                loss = "" if event.loss is None else f", {self.label} {event.loss:.4g}"
                self._line(f"fine-tuning step {event.step}/{event.steps}{loss}")
            elif event.phase == "evaluate":
                if event.step == event.steps:
                    self._line(f"evaluated {event.steps} windows")
                elif time.perf_counter() - self.printed >= MOST_SILENCE:
                    self._line(f"evaluated {event.step} of {event.steps} windows")
            elif event.phase == "measure":
                self._line(f"measured case {event.step} of {event.steps}")
            elif event.phase in ("read", "tokenize"):
                count = event.steps if event.phase == "tokenize" else event.step
                self._line(f"{PHASES[event.phase]} the text{_characters(count)}")
            elif event.phase in ("load", "save"):
                self._line(f"{PHASES[event.phase]} the model")
            elif event.phase in ("export", "apply"):
                self._line(f"{layer_name(event)}: {DONE[event.phase]}")

    def close(self) -> None:
        """Prints the line of a training that is not printed yet."""
        with self.lock:
            self._end_training()

    def _end_training(self) -> None:
        """Prints the line of the current training, if there is one."""
        first, last = self.first, self.last
        self.first = self.last = None
        if first is None or last is None:
            return
        layers = "all layers" if self.shared else layer_name(last)
        change = ""
        if last.loss is not None:
            # layers that train in parallel report their last step only
            before = f"{first.loss:.4g} -> " if first is not last and first.loss is not None else ""
            change = f"{self.label} {before}{last.loss:.4g} "
        self._line(f"{layers}: rotated, {change}in {last.step} step{'' if last.step == 1 else 's'}")

    def _line(self, text: str) -> None:
        """Prints `text` with the seconds since the start."""
        self.printed = time.perf_counter()
        seconds = self.printed - self.started
        self.console.print(f"{text} ({seconds:.0f} s)", markup=False, soft_wrap=True)


def _cell_line(event: ProgressEvent) -> str:
    """The line that says which cell of a sweep begins."""
    return f"cell {event.step} of {event.steps}"


def _position_in_text(event: ProgressEvent) -> tuple[float, float, str]:
    """As `BarProgress._position`. The bar of a tokenisation, which reports its beginning only, has no end."""
    if event.phase == "tokenize":
        return 0, 0, _characters(event.steps)
    return event.step, event.steps, _characters(event.step)


def _characters(count: int) -> str:
    """A number of characters in brackets, from 0.1 million on in millions; nothing for 0."""
    if not count:
        return ""
    return f" ({count / 1e6:.1f} million characters)" if count >= 1e5 else f" ({count} characters)"


def _tenths(steps: int) -> set[int]:
    """The steps at which a tenth, two tenths and so on of all steps are done."""
    return {math.ceil(steps * tenth / 10) for tenth in range(1, 11)}
