"""Zero-shot accuracy by lm_eval: on a local task, and the messages for tasks that cannot be evaluated."""

import json
import sys

import pytest
import torch

from drot.demo.demo import MODEL
from drot.errors import UserError
from drot.evaluation.zeroshot import accuracy, load_tasks, zero_shot

pytestmark = pytest.mark.slow  # lm_eval alone takes ten seconds to import


def task_manager(**options):
    """lm_eval's TaskManager. The test is skipped where lm_eval is not installed."""
    return pytest.importorskip("lm_eval.tasks").TaskManager(**options)


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


@pytest.mark.slow
def test_accuracy_of_a_local_task(tmp_path, monkeypatch):
    """The accuracy is the share of questions for which the model's logits make the right answer likelier."""
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

    manager = task_manager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    tasks = load_tasks(["two_letters", "two_letters"])
    assert zero_shot(model, tokenizer, tasks) == {"two_letters": pytest.approx(expected)}


def test_accuracy_of_a_group(tmp_path, monkeypatch):
    """A group of tasks is evaluated by its name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "import", "choices": ["self", "self self"], "answer": 0}))
    (tmp_path / "two_letters.yaml").write_text(TASK.format(file=data))
    (tmp_path / "letters.yaml").write_text(
        "group: letters\ntask: [two_letters]\naggregate_metric_list: [{metric: acc}]\n"
    )
    manager = task_manager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tasks = load_tasks(["letters"])
    assert zero_shot(model, AutoTokenizer.from_pretrained(MODEL), tasks) == {"letters": 1.0}


@pytest.fixture(scope="module")
def manager():
    return task_manager()  # made once, because it takes seconds to read its index


@pytest.mark.parametrize("name", ["no_such_task", "ai2_arc"])
@pytest.mark.slow
def test_unknown_task(manager, monkeypatch, name):
    """A tag, such as ai2_arc, is refused too, because lm_eval reports nothing under its name."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    with pytest.raises(UserError, match=f"lm_eval has no task {name}: list its tasks with: lm_eval ls tasks"):
        load_tasks([name])


def test_without_lm_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'lm_eval\[hf\]'"):
        load_tasks(["piqa"])


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        (ConnectionError("refused"), "zero-shot tasks need a network or a filled datasets cache"),
        (ImportError("no module"), "leave it out of `tasks`"),
    ],
)
def test_a_task_that_cannot_be_loaded(manager, monkeypatch, cause, advice):
    def get_task_dict(names, manager):
        raise RuntimeError("could not load\nand more") from cause

    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    monkeypatch.setattr("lm_eval.tasks.get_task_dict", get_task_dict)
    with pytest.raises(UserError, match=r"cannot load lm_eval's task piqa \(could not load\); " + advice):
        load_tasks(["piqa"])


def test_a_task_without_accuracy_is_refused_before_it_runs(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "a", "choices": ["b", "c"], "answer": 0}))
    task = TASK.replace("metric: acc", "metric: brier_score")
    (tmp_path / "two_letters.yaml").write_text(task.format(file=data))
    manager = task_manager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: manager)
    with pytest.raises(UserError, match="two_letters must report acc, but it reports brier_score"):
        load_tasks(["two_letters"])


def test_metric_of_the_literature():
    results = {"acc,none": 0.25, "acc_norm,none": 0.5}
    assert accuracy("piqa", results) == 0.5
    assert accuracy("winogrande", results) == 0.25
    with pytest.raises(UserError, match="boolq must report acc, but it reports f1"):
        accuracy("boolq", {"f1,none": 0.1})
