"""The tasks `own`: multiple-choice questions made from a text. Which of four pieces of it comes next?

A question is CONTEXT tokens of the text and four answers of ANSWER tokens: those that follow, and three that
lie near by, so that the subject does not give the right answer away. The model's choice is the answer that
it gives the highest probability. The questions follow from the token ids alone, and need neither lm_eval nor
a network.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from drot.core.errors import UserError
from drot.core.events import Progress, ProgressEvent, silent
from drot.evaluation.predictions import Predictions
from drot.evaluation.tasks import Score

#: the name of the tasks, one for each text
OWN_TASK = "own"
QUESTIONS, CHOICES = 400, 4
CONTEXT, ANSWER = 40, 8
#: tokens of a question with one answer
LENGTH = CONTEXT + ANSWER
#: the largest distance in tokens of a wrong answer from the right answer
NEAR = 1024
#: the shortest text: the first question then has places for wrong answers behind it
SHORTEST = LENGTH + CHOICES * ANSWER


def task_names(tasks: Collection[str], texts: Iterable[str]) -> list[str]:
    """The names of the tasks that `own` stands for in `tasks`: one for each text."""
    return [f"{OWN_TASK}:{source}" for source in texts if OWN_TASK in tasks]


def check_length(tokens: Tensor) -> None:
    """Raises UserError for a text with fewer than SHORTEST tokens."""
    if len(tokens) < SHORTEST:
        raise UserError(
            f"the tasks `{OWN_TASK}` need a text of at least {SHORTEST} tokens, got {len(tokens)}"
        )


def questions(tokens: Tensor, count: int = QUESTIONS, seed: int = 0) -> Tensor:
    """Token ids [at most count, CHOICES, LENGTH] of questions on the text `tokens` [n]; the first is right.

    A wrong answer differs from the right answer, lies within NEAR tokens of it, and shares no token with the
    question's own part of the text. A place without three of these is left out. Raises UserError for a text
    with fewer than SHORTEST tokens.
    """
    check_length(tokens)
    generator = torch.Generator().manual_seed(seed)
    windows = tokens.unfold(0, ANSWER, 1)
    found: list[Tensor] = []
    for place in (torch.randperm(len(tokens) - LENGTH + 1, generator=generator) + CONTEXT).tolist():
        if len(found) == count:
            break
        first, last = max(0, place - NEAR), min(len(windows) - 1, place + NEAR)
        outside = [*range(first, place - LENGTH + 1), *range(place + ANSWER, last + 1)]
        near = windows[outside]
        near = near[(near != windows[place]).any(dim=1)].unique(dim=0)
        if len(near) < CHOICES - 1:
            continue
        wrong = near[torch.randperm(len(near), generator=generator)[: CHOICES - 1]]
        answers = torch.cat([windows[place][None], wrong])
        context = tokens[place - CONTEXT : place].expand(CHOICES, CONTEXT)
        found.append(torch.cat([context, answers], dim=1))
    if not found:
        raise UserError(f"the tasks `{OWN_TASK}` need a text that does not repeat itself: name another")
    return torch.stack(found)


def score(predictions: Predictions, progress: Progress = silent) -> Score:
    """The accuracy of a model in questions [n, CHOICES, LENGTH], whose windows [n · CHOICES, LENGTH] it saw.

    An answer that is exactly as probable as the right answer counts as another choice.
    """
    found = []
    for batch in predictions.batches():
        logits = predictions.logits(batch)[:, CONTEXT - 1 : -1]
        answers = predictions.windows[batch, CONTEXT:, None].to(logits.device)
        logarithms = logits.float().log_softmax(-1).gather(-1, answers)
        found.append(logarithms.double().sum((1, 2)).cpu())
        progress(ProgressEvent(phase="evaluate", step=batch.stop, steps=len(predictions.windows)))
    likelihoods = torch.cat(found).reshape(-1, CHOICES)
    right = (likelihoods[:, :1] > likelihoods[:, 1:]).all(dim=1).double()
    accuracy = float(right.mean())
    stderr = (accuracy * (1 - accuracy) / len(right)) ** 0.5
    return Score(accuracy=accuracy, stderr=stderr, metric="acc", fewshot=0)
