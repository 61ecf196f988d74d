"""Zero-shot accuracy through lm_eval, with the metric that the pruning literature reports."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from drot.errors import UserError

#: where answers differ in length the likelihood is normalised by it; every other task reports `acc`
LENGTH_NORMALISED = ("piqa", "hellaswag", "arc_easy", "arc_challenge")


@dataclass(frozen=True)
class Tasks:
    """tasks: name → lm_eval's task with its data, or its own name where it is a group of tasks."""

    manager: Any
    tasks: dict[str, Any]


def load_tasks(names: Sequence[str]) -> Tasks:
    """What `zero_shot` evaluates, fetched before there is a model.

    Raises UserError, in one line, without lm_eval, for a task that is unknown, cannot
    be loaded (no network, say) or reports another metric than an accuracy.
    """
    try:
        import lm_eval  # noqa: F401
        from lm_eval.api.task import Task
        from lm_eval.models import huggingface  # noqa: F401  (a part that is missing must show now)
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError:
        raise UserError("`tasks` needs the package lm_eval: pip install 'lm_eval[hf]'") from None
    manager = TaskManager()
    known = set(manager.all_subtasks) | set(manager.all_groups)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"lm_eval knows no task {', '.join(unknown)}; lm_eval ls tasks lists them")
    tasks = {}
    for name in names:
        try:
            # TaskManager.load, which is to replace it, is not in lm_eval 0.4.11
            task = get_task_dict([name], manager).get(name)
        except Exception as error:  # tasks are files of many hands: they fail in many ways
            advice = "zero-shot tasks need a network or a filled datasets cache"
            if not _is_download(error):
                advice = "leave it out of `tasks`, or mend what it asks for"
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"cannot load lm_eval's task {name} ({reason}); {advice}") from error
        tasks[name] = task if isinstance(task, Task) else name
        if isinstance(task, Task) and metric_of(name) not in task.aggregation():
            raise _no_accuracy(name, task.aggregation())
    return Tasks(manager, tasks)


def zero_shot(model: PreTrainedModel, tokenizer: Any, prepared: Tasks) -> dict[str, float]:
    """task → accuracy in [0, 1], without examples in the prompt."""
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
    """acc_norm for LENGTH_NORMALISED, acc for the rest (winogrande, boolq, ...)."""
    return "acc_norm" if task in LENGTH_NORMALISED else "acc"


def accuracy(task: str, results: dict[str, Any]) -> float:
    """The metric of `task` among lm_eval's `metric,filter` keys."""
    for key, value in results.items():
        if key.partition(",")[0] == metric_of(task):
            return float(value)
    raise _no_accuracy(task, results)


def _no_accuracy(task: str, metrics: Iterable[str]) -> UserError:
    return UserError(
        f"{task} reports no {metric_of(task)}; it has {', '.join(metrics)}: use lm_eval itself for it"
    )


def _is_download(error: BaseException) -> bool:
    """Whether the chain of causes leads to the network: a missing file, or requests', httpx's or
    huggingface_hub's own errors."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ConnectionError | FileNotFoundError):
            return True
        if type(link).__module__.partition(".")[0] in ("requests", "httpx", "httpcore", "huggingface_hub"):
            return True
        link = link.__cause__ or link.__context__
    return False
