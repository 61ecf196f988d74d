"""`drot eval`: what is refused before the weights are loaded, several models, and what is recorded."""

import gc
import json
import logging
import shutil
import sys
import weakref

import pytest
import torch
from runs import one_shot, prune
from small_models import random_text, random_tokens, save_small_model, small_model

import drot
from drot.checkpoint.manifest import read_manifest, update_manifest
from drot.checkpoint.tables import evaluation_figures
from drot.cli import app as cli
from drot.cli.evaluate import print_figures
from drot.config import CalibrationConfig, PruningConfig, Recipe, RotationConfig
from drot.core.errors import BrokenModelError, UserError
from drot.evaluation import evaluate as evaluation
from drot.evaluation import models as evaluated_models
from drot.evaluation.evaluate import evaluate
from drot.evaluation.models import loaded_bytes, open_model
from drot.evaluation.perplexity import load_eval_tokens, perplexity
from drot.evaluation.record import record
from drot.reporting.demo import HELD_OUT, MODEL
from drot.sparse.linear import packed_linears


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--seqlen 0",
            "--seqlen must be at least 2, since the first token of a window is not predicted; got 0",
        ),
        ("--seqlen 1", "--seqlen must be at least 2"),
        ("--seqlen 513", "--seqlen must be at most 512, the positions of this model; got 513"),
        ("--ppl short.txt", "tokens, but one window needs 64: lower --seqlen"),
        (
            "--ppl c4",
            "--ppl must be wikitext2, a dataset on the hub such as org/name:split, or a .txt, .json",
        ),
        ("--device gpu", "--device must be auto, cpu or cuda[:N]"),
        ("--dtype int8", "--dtype must be auto or one of"),
        (
            "--stream --tasks piqa",
            "--tasks of lm_eval need the whole model on the device: leave out --stream",
        ),
    ],
)
def test_mistakes_are_found_before_the_weights_are_read(monkeypatch, capsys, tmp_path, options, message):
    monkeypatch.setattr("drot.checkpoint.load.load_model", lambda *args: pytest.fail("the weights were read"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("import sys")
    seqlen = [] if "--seqlen" in options else ["--seqlen", "64"]
    assert cli.run(["eval", str(MODEL), "--ppl", str(HELD_OUT), *seqlen, *options.split()]) == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("drot: ") and message in error
    assert all("the text" in line for line in progress)


def test_an_unknown_task_is_found_before_the_weights_are_read(monkeypatch, capsys):
    """`load_tasks`, which refuses it, has its own tests; lm_eval alone takes ten seconds to import."""

    def refuse(names):
        raise UserError(f"lm_eval has no task {names[0]}")

    monkeypatch.setattr(evaluation, "load_tasks", refuse)
    monkeypatch.setattr("drot.checkpoint.load.load_model", lambda *args: pytest.fail("the weights were read"))
    arguments = ["--ppl", str(HELD_OUT), "--seqlen", "64", "--tasks", "no_such_task"]
    assert cli.run(["eval", str(MODEL), *arguments]) == 2
    assert "drot: lm_eval has no task no_such_task" in capsys.readouterr().err


def test_a_missing_model(capsys, tmp_path):
    assert cli.run(["eval", str(tmp_path / "nothing"), "--ppl", str(HELD_OUT)]) == 2
    error = capsys.readouterr().err
    assert "there is no such folder" in error and error.count("\n") == 1


# ---- small models ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A dense model, two models that were pruned from it (one rotated, one packed) and a text."""
    folder = tmp_path_factory.mktemp("models")
    dense = save_small_model(small_model("llama"), folder / "dense")
    tokens = random_tokens(8, 16)
    for name, mode, format in (("rotated", "layer", "dense"), ("packed", "none", "packed")):
        recipe = Recipe(
            rotation=RotationConfig(mode=mode, steps=3),
            pruning=PruningConfig(method="wanda"),
            calibration=CalibrationConfig(seqlen=16),
        )
        drot.prune(dense, recipe, out=folder / name, calibration=tokens, format=format, device="cpu")
    (folder / "text.txt").write_text(random_text(900))
    return folder


@pytest.fixture
def own(models, tmp_path):
    """A copy of the models that a test may change."""
    return shutil.copytree(models, tmp_path / "models")


def measure(folder, *names, **options):
    options = dict(ppl=[str(folder / "text.txt")], device="cpu", record=False) | options
    return evaluate([str(folder / name) for name in names], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(models=[]), "`models` must name one model at least"),
        (dict(ppl="a.txt"), "`ppl` must be a list or tuple"),
        (dict(tasks="own"), "`tasks` must be a list or tuple"),
        (dict(seqlen="512"), "`seqlen` must be an int"),
    ],
)
def test_wrong_arguments_from_python(options, message):
    with pytest.raises(UserError, match=message):
        drot.evaluate(**{"models": ["m"], "ppl": ["a.txt"]} | options)


def test_many_models_are_shown_in_several_tables(capsys):
    """Every figure stands whole."""
    text = {"split": None, "tokens": 9, "windows": 1, "sha256": "0"}
    common = dict(
        texts={"t": text}, agreement={}, task_details={}, averages={}, against=None, streamed=False,
        seqlen=8, dtype="float32", machine="cpu",
    )  # fmt: skip
    results = [common | {"model": f"model-{i}", "perplexity": {"t": 5000.125 + i}} for i in range(23)]
    print_figures(results)
    shown = capsys.readouterr().out
    assert all(f"{5000.125 + i:.3f}" in shown and f"model-{i}" in shown for i in range(23))


def test_windows_and_tokens_are_told(models):
    """128 positions are the most that the models read; 900 tokens are 7 windows of them."""
    (figures,) = measure(models, "rotated")
    assert figures["seqlen"] == 128 and figures["dtype"] == "float32" and not figures["streamed"]
    (text,) = figures["texts"].values()
    assert text["tokens"] == 900 and text["windows"] == 7 and text["split"] is None
    other = models / "other.txt"
    other.write_text(random_text(900, seed=1))
    (changed,) = measure(models, "rotated", ppl=[str(other)])[0]["texts"].values()
    assert len(text["sha256"]) == 64 and changed["sha256"] != text["sha256"]


def test_the_split_of_a_known_text(models, monkeypatch):
    monkeypatch.setattr(evaluation, "load_eval_tokens", lambda *args, **options: random_tokens(1, 300)[0])
    (figures,) = measure(models, "dense", ppl=["wikitext2"])
    assert figures["texts"]["wikitext2"]["split"] == "test"


def test_seqlen_is_2048_at_most(tmp_path):
    save_small_model(small_model("llama", max_position_embeddings=4096), tmp_path / "model")
    (tmp_path / "text.txt").write_text(random_text(2100))
    assert measure(tmp_path, "model")[0]["seqlen"] == 2048


def test_several_models_against_the_dense_one(models):
    results = measure(models, "rotated", "packed", against=str(models / "dense"))
    source = str(models / "text.txt")
    for name, figures in zip(("rotated", "packed"), results, strict=True):
        model = drot.load(models / name, device="cpu", dtype="float32")
        tokens = load_eval_tokens(source, drot.checkpoint.load.load_tokenizer(models / name))
        assert figures["model"] == str(models / name)
        expected = perplexity(model, tokens, seqlen=128)
        assert figures["perplexity"][source] == pytest.approx(expected, rel=1e-5)
        assert 0 < figures["agreement"][source]["equal_tokens"] < 1
    dense = [figures["agreement"][source]["dense_perplexity"] for figures in results]
    assert dense[0] == dense[1]
    assert dense[0] == pytest.approx(measure(models, "dense")[0]["perplexity"][source], rel=1e-6)


@pytest.mark.parametrize("against", [None, "dense"])
def test_streamed_figures_are_the_same(models, against):
    options = {} if against is None else {"against": str(models / against)}
    whole = measure(models, "rotated", "packed", **options)
    streamed = measure(models, "rotated", "packed", stream=True, **options)
    assert all(figures["streamed"] for figures in streamed)
    for a, b in zip(whole, streamed, strict=True):
        assert a["perplexity"] == pytest.approx(b["perplexity"], rel=1e-5)
        for source, figures in a["agreement"].items():
            assert figures["kl"] == pytest.approx(b["agreement"][source]["kl"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["dense", "packed"])
def test_weights_that_do_not_fit_are_streamed(models, name, monkeypatch, caplog):
    tensors = drot.load(models / name, device="cpu", dtype="float32").state_dict()
    size = sum(tensor.nbytes for key, tensor in tensors.items() if key != "lm_head.weight")  # it is tied
    assert loaded_bytes(models / name, "float32") == size
    for free, streamed in ((2 * size, False), (size, True)):
        caplog.clear()
        monkeypatch.setattr(evaluated_models, "available_memory", lambda free=free: free)
        assert measure(models, name)[0]["streamed"] is streamed
        assert ("do not fit on cpu" in caplog.text) is streamed


def test_tasks_are_refused_for_weights_that_do_not_fit(models, monkeypatch):
    monkeypatch.setattr(evaluation, "load_tasks", lambda names: None)
    monkeypatch.setattr(evaluated_models, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match="`tasks` need the whole of .* on cpu, where it does not fit"):
        measure(models, "dense", tasks=["piqa"])


def test_an_original_is_opened_once_in_each_form(models, monkeypatch):
    """Once the original is in memory, it is not counted with the weights that must fit."""
    needed, opened, streams = [], [], iter([True, True, False, False])

    def must_stream(names, *others):
        needed.append([name.rpartition("/")[2] for name in names])
        return next(streams)

    def open_one(name, dtype, *, streamed):
        opened.append((name.rpartition("/")[2], streamed))
        return open_model(name, dtype, streamed=streamed)

    monkeypatch.setattr(evaluation, "must_stream", must_stream)
    monkeypatch.setattr(evaluation, "open_model", open_one)
    names = ["rotated", "packed", "rotated", "packed"]
    figures = measure(models, *names, against=str(models / "dense"))
    assert [each["streamed"] for each in figures] == [True, True, False, False]
    assert needed == [["rotated", "dense"], ["packed", "dense"], ["rotated", "dense"], ["packed"]]
    assert opened == [
        ("dense", True), ("rotated", True), ("packed", True),
        ("dense", False), ("rotated", False), ("packed", False),
    ]  # fmt: skip


def test_bfloat16_is_computed_in_float32_on_a_cpu_unless_asked_for(tmp_path):
    save_small_model(small_model("llama", dtype=torch.bfloat16), tmp_path / "model")
    (tmp_path / "text.txt").write_text(random_text(300))
    (auto,), (asked,) = measure(tmp_path, "model"), measure(tmp_path, "model", dtype="bfloat16")
    assert (auto["dtype"], asked["dtype"]) == ("float32", "bfloat16")
    assert auto["perplexity"] != asked["perplexity"]


# ---- another model than the original --------------------------------------------------------------------


def test_another_vocabulary_is_refused(models, tmp_path):
    other = save_small_model(small_model("llama", vocab_size=128), tmp_path / "other")
    with pytest.raises(UserError, match=r"`against` must have the vocabulary of .*, 96 tokens; .* has 128"):
        measure(models, "rotated", against=str(other))


def test_another_tokenizer_is_refused(models, own):
    file = own / "dense" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match="`against` must have the tokenizer of"):
        measure(models, "rotated", against=str(own / "dense"))


def test_against_needs_a_text(models):
    with pytest.raises(UserError, match="`against` compares predictions on a text, got none"):
        measure(models, "rotated", against=str(models / "dense"), ppl=[])


@pytest.mark.parametrize("against", [None, "dense", "broken"])
def test_a_model_without_a_finite_loss_is_named(own, against):
    """With several models, and beside a sound original. What was measured before is recorded."""
    broken = small_model("llama")
    broken.model.norm.weight.fill_(3e38)  # finite, but not the logits
    save_small_model(broken, own / "broken")
    whose = {None: "the model", "dense": "the pruned model", "broken": "the dense original"}[against]
    names = ["rotated", "broken"] if against != "broken" else ["rotated"]
    message = f"{own / names[-1]}: {whose}'s loss on the text is nan"
    with pytest.raises(BrokenModelError, match=message):
        measure(own, *names, against=against and str(own / against), record=True)
    assert len(read_manifest(own / "rotated").evaluations) == (against != "broken")


def test_a_broken_model_is_gone_before_the_next_is_opened(own, monkeypatch):
    broken = small_model("llama")
    broken.model.norm.weight.fill_(3e38)
    save_small_model(broken, own / "broken")
    opened: list[weakref.ref] = []

    def open_and_count(*arguments, **options):
        gc.collect()
        assert all(model() is None for model in opened)
        found = open_model(*arguments, **options)
        opened.append(weakref.ref(found.model))
        return found

    monkeypatch.setattr(evaluation, "open_model", open_and_count)
    with pytest.raises(BrokenModelError):
        measure(own, "broken", "rotated")
    assert len(opened) == 2


@pytest.mark.parametrize("compresses", ["0", "1"])
def test_an_evaluation_on_a_gpu_compresses_what_has_room(compresses, tmp_path, monkeypatch):
    """A packed model keeps no compressed form while it is opened; afterwards as DROT_COMPRESS says."""
    monkeypatch.setenv("DROT_COMPRESS", compresses)
    prune(None, one_shot(), out=tmp_path / "packed", format="packed")
    opened = open_model(tmp_path / "packed", "float32", streamed=False)
    linears = [linear for _, linear in packed_linears(opened.model)]
    assert linears and not any(linear.keeps_compressed for linear in linears)
    evaluated_models.move_models([opened.model], "packed", torch.device("cpu"))
    assert {linear.keeps_compressed for linear in linears} == {compresses == "1"}


def test_the_figures_of_other_models_are_shown_beside_a_broken_one(own, capsys):
    broken = small_model("llama")
    broken.model.norm.weight.fill_(3e38)
    save_small_model(broken, own / "broken")
    models = [own / name for name in ("broken", "rotated")]
    assert cli.run(["eval", *map(str, models), "--ppl", str(own / "text.txt"), "--json"]) == 1
    told = capsys.readouterr()
    assert [figures["model"] for figures in json.loads(told.out)] == [str(own / "rotated")]
    assert f"{own / 'broken'}: the model's loss on the text is nan" in told.err


def test_a_loss_whose_perplexity_is_too_large_for_the_manifest(own):
    """It was written, and the manifest could not be read any more."""
    broken = small_model("llama")
    broken.lm_head.weight.mul_(3e4)
    save_small_model(broken, own / "broken")
    with pytest.raises(BrokenModelError, match="expected a number below 230"):
        measure(own, "broken")


def test_models_with_other_tokens_are_told_apart(capsys):
    text = {"split": None, "tokens": 9, "windows": 1, "sha256": "0"}
    common = dict(
        agreement={}, task_details={}, averages={}, against=None, streamed=False, seqlen=8, dtype="float32",
        machine="cpu", perplexity={"t": 5.0},
    )  # fmt: skip
    results = [common | {"model": name, "texts": {"t": text | {"sha256": name}}} for name in ("a", "b")]
    print_figures(results)
    shown = capsys.readouterr().out
    assert "b reads other tokens, so its perplexities cannot be compared with a's:" in " ".join(shown.split())
    print_figures([results[0], results[0] | {"model": "c"}])
    assert "other tokens" not in capsys.readouterr().out


# ---- the record in drot.json ----------------------------------------------------------------------------


def test_the_figures_are_recorded(own):
    (figures,) = measure(own, "rotated", record=True, against=str(own / "dense"))
    (entry,) = read_manifest(own / "rotated").evaluations
    assert entry.date[:2] == "20" and entry.versions["torch"] == torch.__version__
    written = entry.model_dump(exclude={"date", "versions"}, exclude_defaults=True)
    assert written | {"model": str(own / "rotated")} == json.loads(json.dumps(figures))
    drot.load(own / "rotated", device="cpu")


def test_a_repeated_measurement_replaces_its_entry(own):
    measure(own, "rotated", record=True)
    (entry,) = read_manifest(own / "rotated").evaluations
    earlier = entry.model_copy(update={"perplexity": {"earlier": 1.0}})
    update_manifest(own / "rotated", lambda manifest: setattr(manifest, "evaluations", [earlier]))
    measure(own, "rotated", record=True, seqlen=64)  # another measurement
    (figures,) = measure(own, "rotated", record=True)
    entries = read_manifest(own / "rotated").evaluations
    assert [entry.seqlen for entry in entries] == [64, 128]
    assert entries[1].perplexity == figures["perplexity"]


def test_few_shot_accuracies_do_not_replace_others(own):
    figures = {"tasks": {"arc_easy": 0.5}, "averages": {}, "seqlen": 128, "dtype": "float32", "texts": {}}
    figures |= {"perplexity": {}, "agreement": {}, "machine": "cpu", "against": None, "streamed": False}
    for fewshot, accuracy in ((0, 0.5), (25, 0.6), (0, 0.5)):
        details = {"arc_easy": {"metric": "acc", "fewshot": fewshot, "stderr": None}}
        record(own / "rotated", figures | {"tasks": {"arc_easy": accuracy}, "task_details": details})
    manifest = read_manifest(own / "rotated")
    assert [entry.tasks["arc_easy"] for entry in manifest.evaluations] == [0.6, 0.5]
    assert dict(evaluation_figures(manifest.evaluations[0])) == {
        "accuracy in arc_easy, 25 examples": "60.00%"
    }


def test_a_broken_manifest_is_found_before_the_work(own, monkeypatch, capsys):
    file = own / "rotated/drot.json"
    file.write_text(file.read_text().replace('"output_error"', '"0utput_error"'))
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda *args: pytest.fail("the work began"))
    assert cli.run(["eval", str(own / "rotated"), "--ppl", str(HELD_OUT)]) == 2
    told = capsys.readouterr()
    assert "lacks layers.0.linears" in told.err and told.out == ""


def test_infinity_is_recorded_as_null(own, monkeypatch):
    monkeypatch.setattr(evaluation, "perplexity_of", lambda *args, **options: float("inf"))
    measure(own, "rotated", record=True)
    assert list(read_manifest(own / "rotated").evaluations[0].perplexity.values()) == [None]


def test_what_is_not_recorded(own, monkeypatch, caplog):
    before = (own / "rotated" / "drot.json").read_bytes()
    measure(own, "rotated")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        measure(own, "dense", record=True)
        assert "dense are not recorded, because it has no drot.json" in caplog.text

        def read_only(*args):
            raise PermissionError(13, "Permission denied", "drot.json")

        monkeypatch.setattr("drot.evaluation.record.update_manifest", read_only)
        measure(own, "rotated", record=True)
        assert "rotated are not recorded: [Errno 13] Permission denied" in caplog.text
    assert (own / "rotated" / "drot.json").read_bytes() == before


def test_a_card_is_left_as_it_was_where_the_manifest_cannot_be_written(own, monkeypatch, caplog):
    def full(folder, manifest):
        raise OSError(28, "No space left on device")

    card = own / "rotated" / "README.md"
    before = card.read_bytes()
    with monkeypatch.context() as context:
        context.setattr("drot.checkpoint.manifest.write_manifest", full)
        measure(own, "rotated", record=True, seqlen=17)
    assert "No space left on device" in caplog.text
    assert card.read_bytes() == before


def test_with_a_limit_the_perplexity_is_recorded_and_no_task(own, caplog):
    (figures,) = measure(own, "rotated", record=True, tasks=["own"], limit=4)
    (entry,) = read_manifest(own / "rotated").evaluations
    assert figures["tasks"] and not entry.tasks
    assert entry.perplexity == figures["perplexity"]
    assert "figures of 4 questions of a task are not recorded" in caplog.text


def test_a_pruned_model_is_no_dense_original(own, caplog):
    measure(own, "rotated", against=own / "rotated")
    assert "rotated is no dense original: drot pruned it" in caplog.text


@pytest.mark.slow
def test_a_later_step_that_changes_the_weights_drops_the_record(own):
    pytest.importorskip("peft")
    from drot.config import FinetuneConfig

    measure(own, "rotated", record=True)
    tokens = random_tokens(40, 16)
    config = FinetuneConfig(full=True, epochs=1, batch_size=4)
    result = drot.finetune(own / "rotated", config, tokens=tokens, out=own / "tuned", device="cpu")
    assert not result.manifest.evaluations


# ---- the command line -----------------------------------------------------------------------------------


def run(capsys, *arguments):
    capsys.readouterr()
    assert cli.run(["eval", *map(str, arguments), "--device", "cpu"]) == 0
    return capsys.readouterr()


def test_one_model_on_the_command_line(own, capsys):
    text = own / "text.txt"
    told = run(capsys, own / "rotated", "--ppl", text, "--seqlen", 32)
    (figures,) = measure(own, "rotated", seqlen=32)
    shown = told.out.replace("\n", "")
    assert f"{figures['perplexity'][str(text)]:.3f}" in shown
    sha256 = figures["texts"][str(text)]["sha256"]
    assert f"900 tokens, 28 windows of 32, SHA-256 of the token ids {sha256}" in shown
    assert "computed in float32 on" in shown
    assert len(read_manifest(own / "rotated").evaluations) == 1
    assert cli.run(["info", str(own / "rotated")]) == 0
    assert "evaluation" in capsys.readouterr().out


def test_several_models_on_the_command_line(own, capsys):
    options = ["--ppl", own / "text.txt", "--against", own / "dense", "--no-record"]
    told = run(capsys, own / "rotated", own / "packed", *options)
    assert not read_manifest(own / "rotated").evaluations
    for word in ("rotated", "packed", "equal next tokens", "KL divergence, 99th percentile", "112 … 127"):
        assert word in told.out
    for name in ("rotated", "packed"):
        assert f"{name}: loading the model" in told.err and f"{name}: evaluating, window" in told.err
    both = json.loads(run(capsys, own / "rotated", own / "packed", "--json", *options).out)
    assert [figures["model"] for figures in both] == [str(own / "rotated"), str(own / "packed")]
    one = json.loads(run(capsys, own / "rotated", "--stream", "--json", *options).out)
    assert one["streamed"] and one.keys() == both[0].keys()


def test_without_lm_eval(models, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'lm_eval\[hf\]'"):
        measure(models, "dense", tasks=["paper"])
