"""Makes the tasks that come with drot known to lm_eval, whichever program asks it for a task.

lm_eval has neither an entry point nor an environment variable for the folders in which it looks for tasks, so
its TaskManager gets one folder more. `import drot` brings this module in (drot/core/import_hook.py).
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

#: Folder with the tasks that come with drot, in lm_eval's format.
OWN_TASKS = Path(__file__).parent / "own_tasks"


def _with_own_tasks(init: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` of a TaskManager that knows OWN_TASKS too, beside lm_eval's own tasks."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def started(*arguments: Any, **options: Any) -> None:
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        values = given.arguments
        if values["include_defaults"]:
            paths = values["include_path"] or []
            values["include_path"] = [str(OWN_TASKS), *([paths] if isinstance(paths, str | Path) else paths)]
        init(*given.args, **given.kwargs)

    return started


TaskManager.__init__ = _with_own_tasks(TaskManager.__init__)
