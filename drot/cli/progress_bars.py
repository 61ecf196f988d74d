"""Progress on stderr: a bar where stderr is a terminal, lines where it is not."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drot.progress import Progress as ProgressCallback
from drot.progress import ProgressEvent

#: share of a layer's bar that its training takes
TRAINING_SHARE = 0.9


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
