"""Zero-shot accuracy through lm_eval: on a task that lies here, and what is said when something lacks."""

import json
import sys

import pytest
import torch
from small_models import small_model

from drot.demo import MODEL
from drot.errors import UserError
from drot.evaluation.zeroshot import accuracy, zero_shot

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

TASK = """
task: two_letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def test_accuracy_of_a_local_task(tmp_path, monkeypatch):
    """Equal to the share of the questions whose likelier answer, by the model's own logits, is right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(False)
    questions = ["import", "def f(x):\n    return", "class A:\n    def", "for i in", "if not", "raise"]
    rows = [{"question": q, "choices": ["self", "x"], "answer": i % 2} for i, q in enumerate(questions)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "two_letters.yaml").write_text(TASK.format(file=data))

    def score(question, choice):
        context = tokenizer(question).input_ids
        ids = torch.tensor(tokenizer(question + " " + choice).input_ids)
        assert ids[: len(context)].tolist() == context
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
        return sum(float(log_p[i - 1, ids[i]]) for i in range(len(context), len(ids)))

    right = [score(r["question"], "self") > score(r["question"], "x") for r in rows]
    expected = sum(r == (i % 2 == 0) for i, r in enumerate(right)) / len(rows)

    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    assert zero_shot(model, tokenizer, ["two_letters"]) == {"two_letters": pytest.approx(expected)}


@pytest.fixture(scope="module")
def manager():
    return TaskManager()  # its index takes seconds to read


def test_unknown_task(manager, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    with pytest.raises(UserError, match="lm_eval knows no task no_such_task; `lm_eval ls tasks` lists them"):
        zero_shot(small_model("llama"), None, ["no_such_task"])


def test_without_lm_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'lm_eval\[hf\]'"):
        zero_shot(small_model("llama"), None, ["piqa"])


def test_without_a_network(manager, monkeypatch):
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)

    def simple_evaluate(**options):
        raise RuntimeError("could not load") from ConnectionError("refused")

    monkeypatch.setattr(lm_eval, "simple_evaluate", simple_evaluate)
    monkeypatch.setattr("lm_eval.models.huggingface.HFLM", lambda **options: None)
    with pytest.raises(UserError, match=r"cannot fetch the data of piqa from the hub \(could not load\)"):
        zero_shot(small_model("llama"), None, ["piqa"])


def test_metric_of_the_literature():
    results = {"acc,none": 0.25, "acc_norm,none": 0.5}
    assert accuracy("piqa", results) == 0.5
    assert accuracy("winogrande", results) == 0.25
    with pytest.raises(UserError, match="reports no acc"):
        accuracy("boolq", {"f1,none": 0.1})
