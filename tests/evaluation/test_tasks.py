"""Accuracy by lm_eval: on local tasks, and the messages for tasks that cannot be evaluated."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import letter_tokenizer, random_tokens, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import drot
from drot import PruningConfig, Recipe, RotationConfig
from drot.cli import app as cli
from drot.core.errors import UserError
from drot.evaluation.own_tasks import continuation
from drot.evaluation.tasks import TaskOptions, averages, expand, load_tasks, run_tasks, score
from drot.reporting.demo import MODEL

pytestmark = pytest.mark.slow  # lm_eval alone takes ten seconds to import


def task_manager(**options):
    """lm_eval's TaskManager. The test is skipped where lm_eval is not installed."""
    return pytest.importorskip("lm_eval.tasks").TaskManager(**options)


@pytest.fixture
def use_manager(monkeypatch):
    """A function that lets drot take the TaskManager that it is given."""
    return lambda manager: monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: manager)


@pytest.fixture
def know(use_manager, tmp_path):
    """A function that lets lm_eval know some tasks alone: name of a file → its text. They ask `rows`."""

    def write(rows, *folders, **tasks):
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        for name, text in tasks.items():
            (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(tmp_path / "data.jsonl")))
        folders = [str(folder) for folder in (tmp_path, *folders)]
        use_manager(task_manager(include_path=folders, include_defaults=False))

    return write


#: the folder of drot_continuation
OWN = Path(continuation.__file__).parent
#: one question of TASK
ROW = {"question": "import", "choices": ["self", "self self"], "answer": 0}
LETTERS = "group: letters\ntask: [two_letters]\naggregate_metric_list: [{metric: acc}]\n"
TASK = """
task: two_letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: FILE
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""


def test_limit_batch_size_and_examples(know, monkeypatch, capfd):
    """What lm_eval is asked; and off a terminal neither its bars nor what git says are seen."""
    know([], OWN)
    import lm_eval

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    asked, real = [], lm_eval.simple_evaluate
    monkeypatch.setattr(
        lm_eval, "simple_evaluate", lambda **options: asked.append(options) or real(**options)
    )
    monkeypatch.chdir("/")  # no git repository
    capfd.readouterr()
    prepared = load_tasks(["drot_continuation"])
    found = run_tasks(model, tokenizer, prepared, TaskOptions(limit=3, batch_size=2, num_fewshot=0))
    (options,) = asked
    assert (options["limit"], options["num_fewshot"], options["model"].batch_size) == (3, 0, 2)
    assert found["drot_continuation"].accuracy * 3 == pytest.approx(
        round(found["drot_continuation"].accuracy * 3)
    )
    told = capfd.readouterr().err
    assert "fatal" not in told and "it/s" not in told


def test_the_recorded_number_of_examples_is_the_one_that_was_used(know, caplog):
    """A task that says a number itself keeps it, whatever was asked."""
    rows = [{"question": "import", "choices": ["self", "x"], "answer": i % 2} for i in range(4)]
    know(rows, task=TASK + "num_fewshot: 0\n")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found = run_tasks(model, tokenizer, load_tasks(["two_letters"]), TaskOptions(num_fewshot=2))
    assert found["two_letters"].fewshot == 0
    assert "two_letters keeps its own number of examples, not 2" in caplog.text


@pytest.mark.parametrize("options", [{"limit": 0}, {"batch_size": 0}, {"num_fewshot": -1}, {"limit": True}])
def test_task_options_that_mean_nothing(options):
    with pytest.raises(UserError, match=f"`{next(iter(options))}` must be"):
        TaskOptions(**options)


def test_lm_evals_own_command_line_under_drot_run(know, tmp_path, monkeypatch, capsys):
    """A rotated, packed checkpoint by `lm_eval --model hf`, on a local task and on drot's own.

    Without lm_eval's other tasks, whose index takes seconds to read; `manager` reads it.
    """
    pytest.importorskip("lm_eval")
    recipe = Recipe(rotation=RotationConfig(steps=1), pruning=PruningConfig(method="magnitude"))
    drot.prune(
        MODEL,
        recipe.replace(solve="none", target="self"),
        calibration=random_tokens(2, 16),
        device="cpu",
        out=tmp_path / "pruned",
        format="packed",
    )
    rows = [{"question": "import", "choices": ["self", "x"], "answer": i % 2} for i in range(4)]
    know(rows, OWN, two_letters=TASK)
    monkeypatch.setattr(sys, "argv", ["drot"])
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # which lm_eval sets
    line = (
        f"run -- lm_eval run --model hf --device cpu --limit 4 "
        f"--model_args pretrained={tmp_path}/pruned,dtype=float32 --tasks two_letters,drot_continuation"
    )
    assert cli.run(line.split()) == 0
    shown = capsys.readouterr().out.splitlines()
    rows_printed = [line.split("|")[1].strip() for line in shown if line.startswith("|")]
    assert {"two_letters", "drot_continuation"} <= set(rows_printed)


def test_accuracy_of_a_local_task(know, caplog):
    """The accuracy is the share of questions for which the model's logits make the right answer likelier."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(False)
    questions = ["import", "def f(x):\n    return", "class A:\n    def", "for i in", "if not", "raise"]
    rows = [{"question": q, "choices": ["self", "x"], "answer": i % 2} for i, q in enumerate(questions)]
    know(rows, two_letters=TASK)

    def score(question, choice):
        context = tokenizer(question).input_ids
        ids = torch.tensor(tokenizer(question + " " + choice).input_ids)
        assert ids[: len(context)].tolist() == context
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
        return sum(float(log_p[i - 1, ids[i]]) for i in range(len(context), len(ids)))

    right = [score(r["question"], "self") > score(r["question"], "x") for r in rows]
    expected = sum(r == (i % 2 == 0) for i, r in enumerate(right)) / len(rows)

    tasks = load_tasks(["two_letters", "two_letters"])
    scores = run_tasks(model, tokenizer, tasks)
    assert list(scores) == ["two_letters"]
    found = scores["two_letters"]
    assert (found.accuracy, found.metric, found.fewshot) == (pytest.approx(expected), "acc", 0)
    spread = (expected * (1 - expected) / (len(rows) - 1)) ** 0.5
    assert found.stderr == pytest.approx(spread)
    # lm_eval's warnings are about its own arguments, which the user did not give
    assert [record for record in caplog.records if record.name.startswith("lm_eval")] == []
    assert logging.getLogger("lm_eval").level != logging.ERROR


def test_accuracy_of_a_group(know):
    """A group of tasks is evaluated by its name."""
    know([ROW], two_letters=TASK, letters=LETTERS)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tasks = load_tasks(["letters"])
    scores = run_tasks(model, AutoTokenizer.from_pretrained(MODEL), tasks)
    assert {name: found.accuracy for name, found in scores.items()} == {"letters": 1.0}


def test_a_group_without_accuracy_is_refused_before_the_work(know):
    know([ROW], two_letters=TASK, letters=LETTERS.replace("acc", "exact_match"))
    with pytest.raises(UserError, match="letters must report acc, but it reports exact_match"):
        load_tasks(["letters"])


@pytest.fixture(scope="module")
def manager():
    # made once, because it takes seconds to read its index
    return task_manager()


@pytest.mark.parametrize("name", ["no_such_task", "ai2_arc"])
def test_unknown_task(manager, use_manager, name):
    """A tag, such as ai2_arc, is refused too, because lm_eval reports nothing under its name."""
    use_manager(manager)
    with pytest.raises(UserError, match=f"lm_eval has no task {name}: list its tasks with: lm_eval ls tasks"):
        load_tasks([name])


def test_without_lm_eval(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'lm_eval\[hf\]'"):
        load_tasks(["piqa"])


def test_a_task_that_cannot_be_loaded(manager, use_manager, monkeypatch):
    def get_task_dict(names, manager):
        raise RuntimeError("could not load")

    use_manager(manager)
    monkeypatch.setattr("lm_eval.tasks.get_task_dict", get_task_dict)
    with pytest.raises(UserError, match=r"cannot load lm_eval's task piqa \(could not load\): it may need"):
        load_tasks(["piqa"])


def test_a_task_without_accuracy_is_refused_before_it_runs(know):
    know([ROW], two_letters=TASK.replace("metric: acc", "metric: brier_score"))
    with pytest.raises(UserError, match="two_letters must report acc, but it reports brier_score"):
        load_tasks(["two_letters"])


def test_metric_of_the_literature():
    results = {"acc,none": 0.25, "acc_stderr,none": 0.01, "acc_norm,none": 0.5, "acc_norm_stderr,none": "N/A"}
    assert vars(score("piqa", results, 0)) == dict(accuracy=0.5, stderr=None, metric="acc_norm", fewshot=0)
    assert vars(score("winogrande", results, 0)) == dict(accuracy=0.25, stderr=0.01, metric="acc", fewshot=0)
    with pytest.raises(UserError, match="boolq must report acc, but it reports f1"):
        score("boolq", {"f1,none": 0.1}, 0)
    results = {"exact_match,flexible-extract": 0.5, "exact_match,strict-match": 0.25}
    assert score("gsm8k", results, 5).accuracy == 0.25


def test_suites():
    """The five tasks of the paper's section 4, and their average."""
    five = ["piqa", "winogrande", "hellaswag", "arc_easy", "arc_challenge"]
    assert expand(["paper", "boolq", "piqa"]) == [*five, "boolq"]
    assert expand(["reasoning"]) == ["gsm8k", "mmlu"]
    accuracies = dict(zip(five, (0.1, 0.2, 0.3, 0.4, 0.6), strict=True)) | {"boolq": 0.9}
    assert averages(["paper", "boolq"], accuracies) == {"paper": pytest.approx(0.32)}
    assert averages(five, accuracies) == {}


def test_the_suites_are_known_to_lm_eval(manager):
    known = set(manager.all_subtasks) | set(manager.all_groups)
    assert known.issuperset(expand(["paper", "reasoning", "drot_continuation"]))


GSM8K = """
task: gsm8k
dataset_path: json
dataset_kwargs:
  data_files:
    test: FILE
test_split: test
fewshot_split: test
output_type: generate_until
doc_to_text: "{{question}} ="
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 3}
metric_list:
  - metric: exact_match
filter_list:
  - name: flexible-extract
    filter: [{function: take_first}]
  - name: strict-match
    filter: [{function: take_first}]
"""


def test_reasoning_has_five_examples_in_the_prompt(know, monkeypatch):
    """gsm8k generates its answer and mmlu is a group of tasks; a third task has no examples."""
    import lm_eval

    rows = [{"question": f"x{i}", "answer": f"y{i}", "choices": ["a", "b"]} for i in range(8)]
    two = TASK.replace("{{answer}}", "0").replace("test_split: test", "test_split: test\nfewshot_split: test")
    know(
        rows,
        gsm8k=GSM8K,
        two=two,
        sub=two.replace("two_letters", "mmlu_sub"),
        mmlu=LETTERS.replace("two_letters", "mmlu_sub").replace("letters", "mmlu"),
    )
    examples, evaluate = {}, lm_eval.simple_evaluate

    def spy(**options):
        outcome = evaluate(**options)
        for name, samples in outcome["samples"].items():
            prompts = [sample["arguments"][0][0] for sample in samples]
            examples[name] = {len(re.findall(r"x\d", prompt)) - 1 for prompt in prompts}
        return outcome

    monkeypatch.setattr(lm_eval, "simple_evaluate", spy)
    model = small_model("llama", max_position_embeddings=512)
    scores = run_tasks(model, letter_tokenizer(), load_tasks(["two_letters", "gsm8k", "mmlu"]))
    assert {name: found.fewshot for name, found in scores.items()} == dict(two_letters=0, gsm8k=5, mmlu=5)
    assert scores["gsm8k"].metric == "exact_match,strict-match"
    assert examples == dict(two_letters={0}, gsm8k={5}, mmlu_sub={5})
    assert all(0 <= found.accuracy <= 1 for found in scores.values())


# ---- drot_continuation: which line of Python source comes next? -----------------------------------------


def test_the_right_answer_continues_the_text():
    """The right answer stands behind its context, the wrong ones elsewhere with the same indentation."""
    text = continuation.TEXT.read_text(encoding="utf-8")
    made = continuation.questions(text, count=40, seed=3)
    assert len(made) == 40
    for question in made:
        right = question["choices"][question["answer"]]
        assert question["context"] + right + "\n" in text
        assert len(set(question["choices"])) == 4
        indentation = len(right) - len(right.lstrip())
        for wrong in set(question["choices"]) - {right}:
            assert wrong + "\n" in text and question["context"] + wrong not in text
            assert len(wrong) - len(wrong.lstrip()) == indentation
            assert abs(len(wrong.strip()) - len(right.strip())) <= 0.25 * len(right.strip())
    assert continuation.questions(text, count=40, seed=3) == made
    assert continuation.questions(text, count=40, seed=4) != made


def test_the_place_of_the_right_answer_tells_nothing():
    rows = continuation.dataset()["test"]
    assert len(rows) == continuation.QUESTIONS
    for place in range(4):
        share = rows["answer"][:].count(place) / len(rows)
        assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(rows)) ** 0.5


def test_the_questions_are_the_same_in_every_process():
    """They do not depend on the order of a set, which changes with the seed of Python's hashes."""
    code = f"""
import hashlib, json, runpy
task = runpy.run_path({continuation.__file__!r})
made = task["questions"](task["TEXT"].read_text(encoding="utf-8"), count=30, seed=0)
print(hashlib.sha256(json.dumps(made).encode()).hexdigest())
"""
    digests = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_continuation_is_a_task_of_lm_eval(know):
    """The accuracy on some questions is the share with the largest log-likelihood for each character."""
    know([], OWN)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).requires_grad_(False)
    tasks = load_tasks(["drot_continuation"])
    found = run_tasks(model, tokenizer, tasks, TaskOptions(limit=8))["drot_continuation"]

    def likelihood(context, choice):
        start = len(tokenizer(context).input_ids)
        ids = torch.tensor(tokenizer(context + choice).input_ids)
        log_p = model(ids[None]).logits[0].double().log_softmax(-1)
        return sum(float(log_p[i - 1, ids[i]]) for i in range(start, len(ids))) / len(choice)

    right = 0
    for question in continuation.dataset()["test"].select(range(8)):
        values = [likelihood(question["context"], choice) for choice in question["choices"]]
        right += values.index(max(values)) == question["answer"]
    assert found.accuracy == pytest.approx(right / 8) and found.metric == "acc_norm"
