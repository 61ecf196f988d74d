"""Accuracy in the tasks of lm_eval, with the metric that the literature on pruning reports for each task."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from drot.checkpoint.records import TaskRecord
from drot.core.checks import is_a
from drot.core.errors import UserError, quoted
from drot.core.hub import quick_hub

logger = logging.getLogger("drot")

#: Name of a suite → its tasks. `paper`: the five zero-shot tasks of DenoiseRotator (section 4).
SUITES = {
    "paper": ("piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge"),
    "reasoning": ("gsm8k", "mmlu"),
}
#: The tasks that come with drot (own_tasks), which need no network.
OWN_TASKS = ("drot_continuation",)
#: Suites of which the mean accuracy is given.
AVERAGED = ("paper",)
#: Tasks with solved examples in the prompt, and the number of examples; every other task has none. Five is
#: the default of lm_eval's gsm8k, and the number with which MMLU is reported.
FEWSHOT = {"gsm8k": 5, "mmlu": 5}
#: Task → its metric, where that is not `acc`. `acc_norm` divides the likelihood of an answer by its length,
#: for tasks whose answers differ in length. `strict-match` accepts an answer in the form of the examples.
METRICS = {
    **dict.fromkeys(("piqa", "hellaswag", "arc_easy", "arc_challenge", "drot_continuation"), "acc_norm"),
    "gsm8k": "exact_match,strict-match",
}


@dataclass(frozen=True)
class Tasks:
    """lm_eval's TaskManager, and name → lm_eval's task with its data; of a group of tasks, its name."""

    manager: Any
    tasks: dict[str, Any]


class Score(TaskRecord):
    """The accuracy of a model in a task.

    accuracy: in [0, 1]. stderr: its standard error by lm_eval; None if lm_eval gives none.
    metric: name of lm_eval's metric, with its filter if that is not `none`.
    """

    accuracy: float


def expand(names: Sequence[str]) -> list[str]:
    """The tasks `names`, each once. The tasks of a suite replace its name."""
    return list(dict.fromkeys(task for name in names for task in SUITES.get(name, (name,))))


def load_tasks(names: Sequence[str]) -> Tasks:
    """Loads the tasks `names` and their data for `run_tasks`; the name of a suite stands for its tasks.

    Raises UserError if lm_eval is not installed, and for a task that lm_eval does not have, that cannot be
    loaded, as without a network, or that does not report its metric.
    """
    try:
        import lm_eval  # noqa: F401
        from lm_eval.api.task import Task
        from lm_eval.models import huggingface  # noqa: F401  (fails if lm_eval[hf] is installed in part)
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError:
        raise UserError(
            "`tasks` needs the package lm_eval, which is not installed: pip install 'lm_eval[hf]'"
        ) from None
    names, manager = expand(names), TaskManager()
    known = set(manager.all_subtasks) | set(manager.all_groups)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"lm_eval has no task {', '.join(unknown)}: list its tasks with: lm_eval ls tasks")
    tasks = {}
    for name in names:
        try:
            # get_task_dict is deprecated, but its successor TaskManager.load is not in lm_eval 0.4.11
            with _errors_only(), nullcontext() if name in OWN_TASKS else quick_hub():
                loaded = get_task_dict([name], manager)
        except Exception as error:  # a task is code and data of many authors, so any exception may come
            raise UserError(
                f"cannot load lm_eval's task {name} ({quoted(error)}): it may need a network, a filled "
                "datasets cache or a package; without them leave it out of `tasks`"
            ) from error
        task = loaded.get(name)
        tasks[name] = task if isinstance(task, Task) else name
        metrics = task.aggregation() if isinstance(task, Task) else _metrics_of_groups(loaded)
        if metric_of(name).partition(",")[0] not in metrics:
            raise _no_accuracy(name, metrics)
    return Tasks(manager, tasks)


@dataclass(frozen=True)
class TaskOptions:
    """How lm_eval runs the tasks.

    limit: the questions of each task; None is all of them.
    batch_size: the questions that the model reads at a time.
    num_fewshot: solved examples in the prompt; None is the number of FEWSHOT.
    """

    limit: int | None = None
    batch_size: int = 1
    num_fewshot: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("batch_size", 1), ("num_fewshot", 0)):
            value = getattr(self, name)
            is_a(name, value, int, or_none=name != "batch_size")
            if value is not None and value < least:
                raise UserError(f"`{name}` must be a whole number of at least {least}; got {value}")


def run_tasks(
    model: PreTrainedModel, tokenizer: Any, prepared: Tasks, options: TaskOptions = TaskOptions()
) -> dict[str, Score]:
    """Task → the score of `model`."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    with _errors_only():
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size)
    asked = options.num_fewshot
    scores: dict[str, Score] = {}
    examples = {name: FEWSHOT.get(name, 0) if asked is None else asked for name in prepared.tasks}
    for fewshot in sorted(set(examples.values())):
        names = [name for name in prepared.tasks if examples[name] == fewshot]
        with _errors_only():
            outcome = lm_eval.simple_evaluate(
                model=wrapped,
                tasks=[prepared.tasks[name] for name in names],
                num_fewshot=fewshot,
                limit=options.limit,
                task_manager=prepared.manager,
            )
        # tasks that say a number of examples themselves keep it
        used = {name: outcome["n-shot"].get(name, fewshot) for name in names}
        if asked is not None and (others := [name for name in names if used[name] != asked]):
            logger.warning("%s keeps its own number of examples, not %d", ", ".join(others), asked)
        scores |= {name: score(name, outcome["results"][name], used[name]) for name in names}
    return {name: scores[name] for name in prepared.tasks}


def averages(names: Sequence[str], accuracies: dict[str, float]) -> dict[str, float]:
    """Suite → mean accuracy of its tasks, for the suites of AVERAGED in `names`."""
    return {
        name: sum(accuracies[task] for task in SUITES[name]) / len(SUITES[name])
        for name in AVERAGED
        if name in names
    }


def _metrics_of_groups(loaded: dict[Any, Any]) -> list[str]:
    """The metrics that the groups of tasks among the keys of lm_eval's dict report."""
    groups = [key.config or {} for key in loaded if not isinstance(key, str)]
    found = [one for group in groups for one in group.get("aggregate_metric_list") or ()]
    return [one["metric"] if isinstance(one, dict) else one.metric for one in found]


def metric_of(task: str) -> str:
    return METRICS.get(task, "acc")


def score(task: str, results: dict[str, Any], fewshot: int) -> Score:
    """The score of `task` in lm_eval's `results`, whose keys are `metric,filter`."""
    wanted = metric_of(task)
    for key, value in results.items():
        name, _, filter_name = key.partition(",")
        if wanted in (key, name):
            stderr = results.get(f"{name}_stderr,{filter_name}")
            number = float(stderr) if isinstance(stderr, int | float) else None
            return Score(accuracy=float(value), stderr=number, metric=wanted, fewshot=fewshot)
    raise _no_accuracy(task, results)


@contextmanager
def _errors_only() -> Iterator[None]:
    """A block without the warnings of lm_eval, which are about how drot calls it and not about the model.

    If stderr is no terminal, its progress bars are left out, which would be hundreds of lines, and so is what
    git says when lm_eval asks it for the version of the current folder.
    """
    from lm_eval import evaluator
    from tqdm import tqdm

    logger, bar = logging.getLogger("lm_eval"), tqdm.__init__

    def without_bar(self: Any, *args: Any, **options: Any) -> None:
        bar(self, *args, **(options | {"disable": True}))

    level = logger.level
    logger.setLevel(logging.ERROR)
    silent_bar = bar if sys.stderr.isatty() else without_bar
    try:
        with (
            mock.patch.object(tqdm, "__init__", silent_bar),
            mock.patch.object(evaluator, "get_git_commit_hash", return_value=None),
        ):
            yield
    finally:
        logger.setLevel(level)


def _no_accuracy(task: str, metrics: Iterable[str]) -> UserError:
    return UserError(
        f"{task} must report {metric_of(task)}, but it reports {', '.join(metrics)}: evaluate it with "
        "lm_eval itself"
    )
