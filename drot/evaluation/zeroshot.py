"""Zero-shot accuracy by lm_eval, with the metric that the literature on pruning reports for each task."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from drot.errors import UserError

#: tasks whose likelihoods are divided by the length of the answer, because their answers differ in length
LENGTH_NORMALISED = ("piqa", "hellaswag", "arc_easy", "arc_challenge")


@dataclass(frozen=True)
class Tasks:
    """The loaded tasks of an evaluation.

    manager: lm_eval's TaskManager.
    tasks: name → lm_eval's task with its data; for a group of tasks, name → the name itself.
    """

    manager: Any
    tasks: dict[str, Any]


def load_tasks(names: Sequence[str]) -> Tasks:
    """Loads the tasks `names` and their data for `zero_shot`.

    Raises UserError if lm_eval is not installed, and for a task that lm_eval does not have, that cannot be
    loaded, as without a network, or that does not report an accuracy.
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
    manager = TaskManager()
    known = set(manager.all_subtasks) | set(manager.all_groups)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"lm_eval has no task {', '.join(unknown)}: list its tasks with: lm_eval ls tasks")
    tasks = {}
    for name in names:
        try:
            # get_task_dict is deprecated, but its successor TaskManager.load is not in lm_eval 0.4.11
            task = get_task_dict([name], manager).get(name)
        except Exception as error:  # a task is code and data of many authors, so any exception may come
            advice = "zero-shot tasks need a network or a filled datasets cache"
            if not _is_download(error):
                advice = "leave it out of `tasks`, or install what it needs"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"cannot load lm_eval's task {name} ({reason}); {advice}") from error
        tasks[name] = task if isinstance(task, Task) else name
        if isinstance(task, Task) and metric_of(name) not in task.aggregation():
            raise _no_accuracy(name, task.aggregation())
    return Tasks(manager, tasks)


def zero_shot(model: PreTrainedModel, tokenizer: Any, prepared: Tasks) -> dict[str, float]:
    """Task → accuracy of `model` in [0, 1], without examples in the prompt."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    outcome = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer),
        tasks=list(prepared.tasks.values()),
        num_fewshot=0,
        task_manager=prepared.manager,
    )
    return {name: accuracy(name, outcome["results"][name]) for name in prepared.tasks}


def metric_of(task: str) -> str:
    """`acc_norm` for LENGTH_NORMALISED, `acc` for every other task (winogrande, boolq, ...)."""
    return "acc_norm" if task in LENGTH_NORMALISED else "acc"


def accuracy(task: str, results: dict[str, Any]) -> float:
    """The accuracy of `task` in lm_eval's `results`, whose keys are `metric,filter`."""
    for key, value in results.items():
        if key.partition(",")[0] == metric_of(task):
            return float(value)
    raise _no_accuracy(task, results)


def _no_accuracy(task: str, metrics: Iterable[str]) -> UserError:
    return UserError(
        f"{task} must report {metric_of(task)}, but it reports {', '.join(metrics)}: evaluate it with "
        "lm_eval itself"
    )


def _is_download(error: BaseException) -> bool:
    """Whether `error` or an exception that led to it is a missing file or a network error.

    Network errors are ConnectionError and the exceptions of requests, httpx, httpcore and huggingface_hub.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ConnectionError | FileNotFoundError):
            return True
        if type(link).__module__.partition(".")[0] in ("requests", "httpx", "httpcore", "huggingface_hub"):
            return True
        link = link.__cause__ or link.__context__
    return False
