"""Zero-shot accuracy through lm_eval, with the metric that the pruning literature reports."""

from typing import Any

from transformers import PreTrainedModel

from drot.errors import UserError

#: where answers differ in length the likelihood is normalised by it; every other task reports `acc`
LENGTH_NORMALISED = ("piqa", "hellaswag", "arc_easy", "arc_challenge")


def zero_shot(model: PreTrainedModel, tokenizer: Any, tasks: list[str]) -> dict[str, float]:
    """task → accuracy in [0, 1], without examples in the prompt.

    acc_norm for LENGTH_NORMALISED, acc for the rest (winogrande, boolq, ...).
    Raises UserError, in one line, without lm_eval, for an unknown task, and without a network.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("--tasks needs the package lm_eval: pip install 'lm_eval[hf]'") from None
    manager = TaskManager()
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise UserError(f"lm_eval knows no task {', '.join(unknown)}; `lm_eval ls tasks` lists them")
    try:
        outcome = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer),
            tasks=tasks,
            num_fewshot=0,
            task_manager=manager,
        )
    except (OSError, ValueError, RuntimeError) as error:
        if not _is_download(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot fetch the data of {', '.join(tasks)} from the hub ({reason}); "
            "zero-shot tasks need a network or a filled datasets cache"
        ) from error
    return {task: accuracy(task, outcome["results"][task]) for task in tasks}


def accuracy(task: str, results: dict[str, Any]) -> float:
    """The metric of `task` among lm_eval's `metric,filter` keys."""
    metric = "acc_norm" if task in LENGTH_NORMALISED else "acc"
    for key, value in results.items():
        if key.partition(",")[0] == metric:
            return float(value)
    raise UserError(f"{task} reports no {metric}; it has {', '.join(results)}: use lm_eval itself for it")


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
