"""Progress on stderr: a bar if stderr is a terminal, otherwise lines; or JSON; and lines in a log."""

import contextlib
import dataclasses
import json
import math
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from drot.cli.log import Form
from drot.cli.safe_text import SafeConsole
from drot.core.events import PHASES, ProgressEvent, silent
from drot.core.events import Progress as ProgressCallback

#: After so many seconds without a line, or this share of the time since the start if that is more, the next
#: event of a phase with many events prints a line.
MOST_SILENCE, SILENT_SHARE = 10.0, 0.1
#: least seconds between two JSON lines of a phase with many events
JSON_SILENCE = 0.5


@contextlib.contextmanager
def working() -> Iterator[ProgressCallback]:
    """The callback for the progress of a block, in the form of --progress.

    What libraries print on stdout goes to stderr, and transformers shows no progress bars.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    console = SafeConsole(stderr=True)
    with contextlib.redirect_stdout(sys.stderr):
        if Form.chosen == "none":
            yield silent
        elif Form.chosen == "json":
            yield LineProgress(console, as_json=True)
        elif console.is_terminal:
            columns = BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("left")
            with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as shown:
                yield BarProgress(shown)
        else:
            yield LineProgress(console)


def words(event: ProgressEvent) -> str:
    """What an event says, as in `layer 3 (4 of 8): recovering, epoch 2 of 20, held-out error 0.1`.

    A layer has its number, as in the names of tensors, and its place, which counts from 1.
    """
    phase = PHASES[event.phase]
    text = f"{event.name}: {phase.doing}" if event.name else phase.doing
    if phase.unit == "character":
        return text + _characters(event.steps if event.phase == "tokenize" else event.step)
    if phase.layers and event.layers:
        text = f"layer {event.layer} ({event.layer + 1} of {event.layers}): {text}"
    if phase.unit and event.steps:
        text += f", {phase.unit} {event.step} of {event.steps}"
    if event.loss is not None:
        text += f", {'held-out error' if event.phase == 'recover' else 'loss'} {event.loss:.4g}"
    return text


def _characters(count: int) -> str:
    """A number of characters in brackets, from 0.1 million on in millions; nothing for 0."""
    if not count:
        return ""
    return f" ({count / 1e6:.1f} million characters)" if count >= 1e5 else f" ({count} characters)"


class BarProgress:
    """A bar for the current phase, or for each of the phases that go through the layers together."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        #: phase → its bar
        self.tasks: dict[str, TaskID] = {}

    def __call__(self, event: ProgressEvent) -> None:
        text, layers = words(event), PHASES[event.phase].layers
        if event.phase == "sweep":  # the bars below belong to the cell
            self.bars.console.print(text, markup=False)
            return
        for phase in [name for name in self.tasks if not (layers and PHASES[name].layers)]:
            if phase != event.phase:
                self.bars.remove_task(self.tasks.pop(phase))
        total, completed = event.steps, float(event.step)
        if layers and event.layers:
            total, completed = event.layers, event.layer + (event.step / event.steps if event.steps else 0)
        elif event.phase == "tokenize":  # it reports its beginning only, so its end is not known
            total = 0
        if event.phase not in self.tasks:
            self.tasks[event.phase] = self.bars.add_task(text, total=total or None)
        self.bars.update(self.tasks[event.phase], completed=completed, description=text)


class LineProgress:
    """A line for each event; of a phase with many events, at its last step and after a silence only.

    as_json: as a JSON object, and after a shorter silence. `seconds` are those since the start. The other
        entries are the fields of the ProgressEvent; loss is null if there is none or it is not finite.
    """

    def __init__(self, console: Console, *, as_json: bool = False) -> None:
        self.console, self.as_json = console, as_json
        self.started = time.perf_counter()
        self.printed = -math.inf if as_json else self.started
        self.lock = threading.Lock()  # layers that train in parallel report from several threads

    def __call__(self, event: ProgressEvent) -> None:
        with self.lock:
            now = time.perf_counter()
            seconds = now - self.started
            silence = JSON_SILENCE if self.as_json else max(MOST_SILENCE, SILENT_SHARE * seconds)
            ends = event.step == event.steps > 0
            if PHASES[event.phase].often and not ends and now - self.printed < silence:
                return
            self.printed = now
            text = _json(event, seconds) if self.as_json else f"{words(event)} ({seconds:.0f} s)"
            self.console.print(text, markup=False, soft_wrap=True)


def _json(event: ProgressEvent, seconds: float) -> str:
    finite = event.loss is not None and math.isfinite(event.loss)
    entries = dataclasses.asdict(event) | {"loss": event.loss if finite else None}
    return json.dumps({"seconds": round(seconds, 3)} | entries)
