"""The questions of the task drot_continuation: which of four lines continues a piece of Python source?

The source is drot's held-out text, on which the embedded model was not trained. A wrong answer is a line from
another place of the same text, with the same indentation and nearly the same length, so that only its content
tells it from the right answer. The questions are the same on every machine: they follow from the text, SEED
and this file. A change of any of them needs a new `version` in drot_continuation.yaml.

The standard error of an accuracy is 2 %. So the task tells a badly pruned model from its original, and not
two good ones: for those there is `drot.evaluation.agreement`.
"""

import random
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parents[2] / "reporting" / "assets" / "python-heldout.txt"
QUESTIONS = 500
SEED = 0
#: lines before the right answer that the model reads
CONTEXT_LINES = 12
#: characters of an answer without its indentation: a shorter line, such as `else:`, is found in many places
SHORTEST, LONGEST = 12, 72
#: largest difference in length between a wrong answer and the right answer, as a share of the latter
LENGTH_TOLERANCE = 0.25
CHOICES = 4


def questions(text: str, *, count: int, seed: int) -> list[dict[str, Any]]:
    """Questions {context, choices, answer} in the order of the text. `answer`: index of the right choice.

    A choice begins with a line break, which ends the last line of the context.

    Args:
        text: Python source.
        count: largest number of questions; fewer are returned for a text with fewer places.
        seed: seed of the places, the wrong answers and the order of the choices.
    """
    lines = text.split("\n")
    candidates: dict[int, list[str]] = {}
    for line in sorted({line for line in lines if _usable(line)}):
        candidates.setdefault(_indentation(line), []).append(line)
    rng = random.Random(seed)
    # Random.random() alone gives the same numbers in every version of Python
    places = [i for i in range(CONTEXT_LINES, len(lines)) if _usable(lines[i]) and lines[i - 1].strip()]
    shuffled = sorted(places, key=lambda _: rng.random())
    found: dict[int, dict[str, Any]] = {}
    for place in shuffled:
        if len(found) == count:
            break
        right, context = lines[place], lines[place - CONTEXT_LINES : place]
        alike = [line for line in candidates[_indentation(right)] if _as_long(line, right)]
        others = [line for line in alike if line != right and line not in context]
        wrong = sorted(others, key=lambda _: rng.random())[: CHOICES - 1]
        if len(wrong) < CHOICES - 1:
            continue
        choices = sorted([right, *wrong], key=lambda _: rng.random())
        found[place] = {
            "context": "\n".join(context),
            "choices": [f"\n{line}" for line in choices],
            "answer": choices.index(right),
        }
    return [found[place] for place in sorted(found)]


def _usable(line: str) -> bool:
    return SHORTEST <= len(line.strip()) <= LONGEST


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _as_long(line: str, right: str) -> bool:
    """Whether the length of `line` is nearly that of `right`, both without indentation."""
    length = len(right.strip())
    return abs(len(line.strip()) - length) <= LENGTH_TOLERANCE * length


def dataset(**metadata: Any) -> dict[str, Any]:
    """The data of lm_eval's task: split `test` → its questions. lm_eval passes the task's metadata."""
    import datasets

    rows = questions(TEXT.read_text(encoding="utf-8"), count=QUESTIONS, seed=SEED)
    return {"test": datasets.Dataset.from_list(rows)}
