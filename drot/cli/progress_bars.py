"""Progress on stderr: a bar if stderr is a terminal, otherwise lines."""

import contextlib
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drot.cli.safe_text import SafeConsole
from drot.core.events import PHASES, ProgressEvent
from drot.core.events import Progress as ProgressCallback

#: the share of a layer's part of the bar that belongs to its training; the rest belongs to its pruning
TRAINING_SHARE = 0.9
#: After so many seconds without a line, or this share of the time since the start if that is more, the next
#: event of a phase with many events prints a line.
MOST_SILENCE, SILENT_SHARE = 10.0, 0.1


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
    columns = BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("left")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        yield BarProgress(bars, shared=shared, label=label)


def words(event: ProgressEvent, label: str = "loss") -> str:
    """What an event says, as in `layer 3 (4 of 8): recovering, epoch 2 of 20, held-out error 0.1`.

    A layer has its number, as in the names of tensors, and its place, which counts from 1.
    """
    phase = PHASES[event.phase]
    text = phase.doing
    if phase.unit == "character":
        return text + _characters(event.steps if event.phase == "tokenize" else event.step)
    if phase.layers and event.layers:
        text = f"{_layer_name(event)}: {text}"
    if phase.unit and event.steps:
        text += f", {phase.unit} {event.step} of {event.steps}"
    if event.loss is not None:
        text += f", {'held-out error' if event.phase == 'recover' else label} {event.loss:.4g}"
    return text


def _layer_name(event: ProgressEvent) -> str:
    return f"layer {event.layer} ({event.layer + 1} of {event.layers})"


def _characters(count: int) -> str:
    """A number of characters in brackets, from 0.1 million on in millions; nothing for 0."""
    if not count:
        return ""
    return f" ({count / 1e6:.1f} million characters)" if count >= 1e5 else f" ({count} characters)"


class BarProgress:
    """A bar that starts again for each pass over the layers, the windows of an evaluation or the cases."""

    def __init__(self, bars: Progress, *, shared: bool = False, label: str = "loss") -> None:
        self.bars, self.shared, self.label = bars, shared, label
        self.task = bars.add_task("starting", total=None)
        #: the phase of the current pass, or "layers", and its total; and the completed part of the total
        self.current: tuple[str, int] = "", 0
        self.completed = 0.0

    def __call__(self, event: ProgressEvent) -> None:
        text = words(event, self.label)
        if event.phase == "sweep":  # the bar below belongs to the cell
            self.bars.console.print(text, markup=False)
            return
        trains = event.phase == "rotate"
        by_layers = PHASES[event.phase].layers and not (trains and self.shared)
        if by_layers:
            current, completed = ("layers", event.layers), float(event.layer)
            if trains and event.steps:
                completed += TRAINING_SHARE * event.step / event.steps
        else:  # a tokenisation reports its beginning only, so its end is not known
            current = event.phase, 0 if event.phase == "tokenize" else event.steps
            completed = event.step
        # the training of a layer starts no pass: where layers train in parallel, a later one may be ahead
        back = completed < int(self.completed) and not (trains and by_layers)
        if current != self.current or back:
            self.bars.remove_task(self.task)
            self.task = self.bars.add_task(text, total=current[1] or None)
            self.current, self.completed = current, 0.0
        self.completed = max(self.completed, completed)
        self.bars.update(self.task, completed=self.completed, description=text)


class LineProgress:
    """A line for each training and for each event of the other phases.

    A phase with many events has a line at its last step and after a long silence only.
    """

    def __init__(self, console: Console, *, shared: bool = False, label: str = "loss") -> None:
        self.console, self.shared, self.label = console, shared, label
        self.started = self.printed = time.perf_counter()
        #: the first and the last event of the current training
        self.training: list[ProgressEvent] = []
        self.lock = threading.Lock()  # layers that train in parallel report from several threads

    def __call__(self, event: ProgressEvent) -> None:
        with self.lock:
            if event.phase != "rotate":
                self._end_training()  # a training that stopped early reports no event of the last step
                if not PHASES[event.phase].often or event.step == event.steps > 0 or self._silent_for_long():
                    self._line(words(event, self.label))
                return
            if self.training and event.layer != self.training[-1].layer:
                self._end_training()
            self.training = [*self.training[:1], event]
            if event.step == event.steps:
                self._end_training()

    def close(self) -> None:
        """Prints the line of a training that is not printed yet."""
        with self.lock:
            self._end_training()

    def _end_training(self) -> None:
        """Prints the line of the current training, if there is one."""
        if not self.training:
            return
        first, last = self.training[0], self.training[-1]
        before = f"{first.loss:.4g} -> " if first is not last and first.loss is not None else ""
        change = "" if last.loss is None else f"{self.label} {before}{last.loss:.4g} "
        layers = "all layers" if self.shared else _layer_name(last)
        self._line(f"{layers}: rotated, {change}in {last.step} step{'' if last.step == 1 else 's'}")
        self.training = []

    def _silent_for_long(self) -> bool:
        now = time.perf_counter()
        return now - self.printed >= max(MOST_SILENCE, SILENT_SHARE * (now - self.started))

    def _line(self, text: str) -> None:
        """Prints `text` with the seconds since the start."""
        self.printed = time.perf_counter()
        seconds = self.printed - self.started
        self.console.print(f"{text} ({seconds:.0f} s)", markup=False, soft_wrap=True)
