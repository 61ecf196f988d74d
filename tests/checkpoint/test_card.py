"""The model card, and a loaded checkpoint that is saved and uploaded with all its files."""

import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from made_manifests import made_agreement, made_evaluation, made_finetuning, made_manifest, write_card
from small_models import random_tokens, small_model
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import drot
from drot.checkpoint import card as cards
from drot.checkpoint.card import card
from drot.checkpoint.convert import convert
from drot.checkpoint.manifest import read_manifest, update_manifest
from drot.checkpoint.records import EvaluationRecord
from drot.checkpoint.tables import facts
from drot.checkpoint.verify import verify_folder
from drot.cli import app as cli
from drot.config import FinetuneConfig, PruningConfig, Recipe, RotationConfig
from drot.evaluation.record import record

pytestmark = pytest.mark.slow

EVALUATION = made_evaluation(
    {"some/where/wiki.txt": 5.25, "other.txt": None},
    seqlen=64,
    against="someone/dense",
    agreement={"some/where/wiki.txt": made_agreement()},
    tasks={"piqa": 0.75, "own:/some/where/wiki.txt": 0.5},
)


#: figures of `evaluate` for one model, without its name
FIGURES = {
    key: value for key, value in made_evaluation({"wiki.txt": 5.5}).items() if key not in ("date", "versions")
}


def pruned(path, mode="layer", format="dense", **entries):
    """A checkpoint below `path`; `entries` are added to its manifest."""
    drot.prune(
        small_model("llama"),
        Recipe(
            rotation=RotationConfig(mode=mode, steps=3),
            pruning=PruningConfig(method="wanda", solve="none", target="self"),
        ),
        out=path / "pruned",
        calibration=random_tokens(2, 16),
        format=format,
        device="cpu",
    )
    change(path / "pruned", **entries)
    return path / "pruned"


def change(folder, base_model=None, evaluations=None):
    def set_entries(manifest):
        manifest.base_model = base_model or manifest.base_model
        manifest.evaluations = [EvaluationRecord.model_validate(entry) for entry in evaluations or ()]

    update_manifest(folder, set_entries)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **options):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)


def test_the_card_of_a_pruned_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the model has no name: the card in the current folder is not its card
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    folder = pruned(tmp_path)
    written = ModelCard.load(folder / "README.md")
    data = written.data.to_dict()
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "text-generation"
    assert {"drot", "pruned", "wanda", "2:4", "denoiserotator"} <= set(data["tags"])
    assert "base_model" not in data and "license" not in data and "model-index" not in data
    assert "import drot" in written.text and "50.0% of the weights" in written.text
    recipe = yaml.safe_load(written.text.split("```yaml\n")[1].split("```")[0])
    assert recipe == json.loads((folder / "drot.json").read_text())["recipe"]


def test_a_stock_checkpoint_needs_no_import(tmp_path):
    text = (pruned(tmp_path, mode="none") / "README.md").read_text()
    assert "import drot" not in text and "denoiserotator" not in text.split("# ")[0]


def test_figures_and_base_model(tmp_path):
    folder = pruned(tmp_path, base_model="someone/dense", evaluations=[EVALUATION])
    write_card(folder)
    written = ModelCard.load(folder / "README.md")
    assert written.data.base_model == "someone/dense"
    found = {(r.metric_type, r.dataset_name, r.metric_value) for r in written.data.eval_results}
    assert found == {
        ("perplexity", "wiki.txt", 5.25),
        ("accuracy", "piqa", 0.75),
        ("accuracy", "own:wiki.txt", 0.5),
    }
    for line in (
        "| perplexity on wiki.txt, windows of 64 tokens | 5.250 | float32, 2026-01-02 |",
        "| perplexity on other.txt, windows of 64 tokens | not finite | float32, 2026-01-02 |",
        "| next tokens equal to those of someone/dense on wiki.txt | 90.0% | float32, 2026-01-02 |",
        "| accuracy in piqa | 75.00% | float32, 2026-01-02 |",
        "| accuracy in own:wiki.txt | 50.00% | float32, 2026-01-02 |",
        "drot prune someone/dense --recipe drot.json --out FOLDER",
    ):
        assert line in written.text
    assert "some/where" not in written.text


def test_the_card_of_an_adapter_names_its_model_on_the_hub():
    settings = FinetuneConfig(lr=1e-4, warmup_steps=0, held_out=2, keep_adapter=True)
    changes = {"from": "someone/pruned", "settings": settings}
    text = card(made_manifest(finetune=[made_finetuning(**changes)]), "mine")
    assert ModelCard(text).data.base_model == "someone/pruned"
    assert 'pruned = AutoModelForCausalLM.from_pretrained("someone/pruned")' in text
    assert "The pruned model is someone/some-model, with 50.0%" in text


def test_a_perplexity_that_was_measured_twice_is_there_once():
    """By drot eval, and again by drot compare, which also compares the predictions."""
    text, dense = "some/where/wiki.txt", {"against": "someone/dense"}
    compared = made_evaluation({text: 5.25}, **dense, agreement={text: made_agreement()})
    others = [made_evaluation({text: 5.25}, **entry) for entry in ({"dtype": "bfloat16"}, {"seqlen": 64})]
    evaluations = [made_evaluation({text: 5.25}, tasks={"piqa": 0.75}), *others, compared]
    manifest = made_manifest(evaluations=[*evaluations, made_evaluation({text: 5.5}, dtype="bfloat16")])
    written = ModelCard(card(manifest, "name"))
    results = [(r.metric_type, r.metric_value, r.metric_args) for r in written.data.eval_results]
    windows = {"window_length": 512}
    assert sorted(results, key=str) == [
        ("accuracy", 0.75, None),
        *[("perplexity", 5.25, windows)] * 2,  # in two dtypes
        ("perplexity", 5.25, {"window_length": 64}),
        ("perplexity", 5.5, windows),
    ]
    figure = "perplexity on wiki.txt, windows of 512 tokens"
    assert written.text.count(f"| {figure} | 5.250 | float32,") == 1
    assert written.text.count(f"| {figure} |") == 3
    lines = [value for name, value in facts(manifest) if name == "evaluation"]
    assert len(lines) == 5 and sum(f"{figure} 5.250" in line for line in lines) == 2
    assert lines[0] == "accuracy in piqa 75.00%; float32, 2026-01-02"
    manifest.evaluations[0].tasks = {}
    assert len([name for name, _ in facts(manifest) if name == "evaluation"]) == 4


@pytest.mark.parametrize("base_model", ["/home/me/models/tiny", ""])
def test_commands_and_recipe_hold_no_local_paths(base_model):
    recipe = Recipe().replace(source="/home/me/texts/code.txt,/home/me/prose.txt=2")
    text = card(made_manifest(recipe, base_model=base_model), "name")
    assert (
        "drot prune MODEL --recipe drot.json --out FOLDER" in text
        and "of MODEL, the dense model, with" in text
    )
    assert "source: code.txt,prose.txt=2" in text and "/home/me" not in text
    assert "MODEL" not in card(made_manifest(recipe), "name")


def test_the_license_is_that_of_the_base_model(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: gated\n---\n# Base\n")
    folder = pruned(tmp_path, base_model=str(base))
    (folder / "README.md").unlink()
    write_card(folder)
    text = (folder / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert (data["license"], data["license_name"]) == ("other", "gated")
    assert str(tmp_path) not in text and "base_model" not in data  # a path is no name on the hub
    (base / "README.md").unlink()
    write_card(folder)  # the license stays, also when its source is gone
    assert ModelCard((folder / "README.md").read_text()).data.license == "other"


@pytest.mark.parametrize("content", ["---\n: [\n---\n", "no metadata", "---\n- a\n---\n"])
def test_a_base_model_with_a_strange_card(tmp_path, content):
    (tmp_path / "README.md").write_text(content)
    assert cards.license_of(str(tmp_path)) == {}
    assert cards.license_of("someone/unreachable") == {}


def test_what_a_user_wrote_stays(tmp_path):
    folder = pruned(tmp_path)
    file = folder / "README.md"
    text = file.read_text().replace("---\n", "---\nlanguage: en\n", 1)
    file.write_text(text.replace(cards.BEGIN, "My words above.\n\n" + cards.BEGIN) + "\nMy words below.\n")
    change(folder, evaluations=[EVALUATION])
    write_card(folder)
    once = file.read_text()
    assert "My words above." in once and "My words below." in once and "5.250" in once
    assert ModelCard(once).data.to_dict()["language"] == "en" and once.count(cards.BEGIN) == 1
    write_card(folder)
    assert file.read_text() == once
    assert not verify_folder(folder).damaged
    file.write_text("A card without drot's part.\n")
    write_card(folder)
    assert "A card without drot's part." in file.read_text() and "5.250" in file.read_text()


def test_hostile_names_stay_in_their_cells():
    evaluations = [made_evaluation({"a|b\n# c": 1.0})]
    text = card(made_manifest(base_model="x/y\n---\nlicense: mit", evaluations=evaluations), "name")
    assert "| perplexity on a\\|b # c, windows" in text and "license" not in ModelCard(text).data.to_dict()


@pytest.mark.parametrize(
    "metadata",
    ["tags: [", "tags: 3", "1: 2\ntrue: x", "a: &a [*a]\n<<: 3", "model-index: 5", "license: [\x80"],
)
def test_metadata_that_cannot_be_read_is_a_warning(tmp_path, metadata, caplog):
    folder = pruned(tmp_path)
    broken = f"---\n{metadata}\n---\nMy words.\n"
    (folder / "README.md").write_text(broken)
    record(str(folder), FIGURES | {"model": str(folder)})
    assert len(read_manifest(folder).evaluations) == 1 and not verify_folder(folder).damaged
    text = (folder / "README.md").read_text()
    assert "My words." in text
    if text == broken:
        assert any("README.md is not updated, correct it by hand" in message for message in caplog.messages)
    drot.load(folder, device="cpu").save_pretrained(tmp_path / "again")
    assert len(read_manifest(tmp_path / "again").evaluations) == 1


def test_a_card_in_latin1_stays_and_the_model_opens(tmp_path):
    folder = pruned(tmp_path)
    (folder / "README.md").write_bytes("Mein schönes Modell.\n".encode("latin1"))
    drot.load(folder, device="cpu").save_pretrained(tmp_path / "again")
    record(str(folder), FIGURES | {"model": str(folder)})
    for each in (folder, tmp_path / "again"):
        assert "Mein schönes Modell." in (each / "README.md").read_text()


def test_a_text_with_the_name_of_a_mark_leaves_the_card_whole(tmp_path):
    folder = pruned(tmp_path)
    file = folder / "README.md"
    file.write_text(file.read_text() + "\nMy words below.\n")
    change(folder, evaluations=[made_evaluation({cards.END + ".txt": 3.5, cards.BEGIN: 4.5})])
    write_card(folder)
    once = file.read_text()
    write_card(folder)
    assert file.read_text() == once and once.count("My words below.") == 1
    text = ModelCard(once).text  # without the metadata, in which a name may be anything
    assert text.count(cards.BEGIN) == text.count(cards.END) == 1 and "3.500" in text and "4.500" in text


def test_evaluations_at_the_same_time_are_all_recorded(tmp_path, caplog):
    folder = pruned(tmp_path)
    start = threading.Barrier(8)

    def measure(seqlen):
        start.wait()
        record(str(folder), FIGURES | {"model": str(folder), "seqlen": seqlen})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(measure, range(8, 16)))
    assert {entry.seqlen for entry in read_manifest(folder).evaluations} == set(range(8, 16))
    assert not verify_folder(folder).damaged and not caplog.messages
    assert all(f"windows of {seqlen} tokens" in (folder / "README.md").read_text() for seqlen in range(8, 16))


@pytest.mark.parametrize(
    ("mode", "format"), [("layer", "dense"), ("layer", "packed"), ("none", "dense"), ("none", "packed")]
)
def test_a_loaded_model_is_saved_with_all_its_files(tmp_path, mode, format, capsys):
    folder, again = pruned(tmp_path, mode, format), tmp_path / "again"
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMy words.\n")
    drot.load(folder, device="cpu").save_pretrained(again)
    first, second = (json.loads((path / "drot.json").read_text()) for path in (folder, again))
    for key in ("recipe", "layers", "format", "stock_architecture", "sparsity"):
        assert first[key] == second[key]
    assert "My words." in (again / "README.md").read_text()
    tokens = random_tokens(1, 8)
    assert torch.equal(
        drot.load(again, device="cpu")(tokens).logits, drot.load(folder, device="cpu")(tokens).logits
    )
    assert not verify_folder(again).damaged and not verify_folder(again).unknown
    assert cli.run(["info", str(again)]) == 0
    assert "50.00%" in capsys.readouterr().out


def test_auto_model_keeps_them_too(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(pruned(tmp_path))
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "drot.json").exists() and (tmp_path / "again" / "README.md").exists()


def test_the_manifest_says_what_is_saved(tmp_path):
    folder = pruned(tmp_path, format="packed")
    model = drot.load(folder, device="cpu")
    model.dequantize()
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "drot.json").read_text())["format"] == "dense"
    convert(folder, tmp_path / "converted", "dense")
    assert "Weights: dense, float32" in (tmp_path / "converted" / "README.md").read_text()


def test_a_copy_saves_the_copy(tmp_path):
    model = drot.load(pruned(tmp_path, mode="none"), device="cpu")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.fill_(7)
    other.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "drot.json").exists()
    assert float(drot.load(tmp_path / "copy", device="cpu").model.norm.weight[0]) == 7
    pickle.loads(pickle.dumps(model)).save_pretrained(tmp_path / "pickled")
    assert (tmp_path / "pickled" / "drot.json").exists()


def test_a_model_of_another_program_is_left_alone(tmp_path):
    small_model("llama").save_pretrained(tmp_path / "dense")
    model = drot.load(tmp_path / "dense", device="cpu")
    assert model.save_pretrained.__func__ is LlamaForCausalLM.save_pretrained
    model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "drot.json").exists()


@pytest.fixture
def hub(monkeypatch):
    """The uploads: arguments, and name → content of the files. Nothing leaves the machine."""
    seen = []

    def create(self, repo_id, **options):
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload(self, *, folder_path, allow_patterns, **options):
        files = (path for path in folder_path.rglob("*") if path.is_file())
        found = {str(path.relative_to(folder_path)): path.read_bytes() for path in files}
        names = huggingface_hub.utils.filter_repo_objects(found, allow_patterns=allow_patterns)
        seen.append((options, {name: found[name] for name in names}))

    def branch(self, repo_id, *, branch, exist_ok):
        seen.append((branch, {}))

    monkeypatch.setattr(huggingface_hub.HfApi, "create_branch", branch)
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    return seen


def test_an_upload_holds_what_was_saved_and_nothing_else(tmp_path, hub):
    """As that of transformers; a revision that the hub does not have becomes a branch."""
    folder = tmp_path / "again"
    (folder / "checkpoint-5").mkdir(parents=True)
    (folder / "secret.env").write_text("TOKEN=1")
    (folder / "checkpoint-5" / "optimizer.pt").write_text("of a training")
    model = drot.load(pruned(tmp_path), device="cpu")
    for _ in range(2):  # the second time all files are there before
        model.save_pretrained(folder, push_to_hub=True, repo_id="me/mine", revision="v2")
    for (name, _), (options, files) in zip(hub[::2], hub[1::2], strict=True):
        assert name == options["revision"] == "v2"
        assert {"drot.json", "README.md", "config.json", "model.safetensors"} <= files.keys()
        assert not {"secret.env", "checkpoint-5/optimizer.pt"} & files.keys()


def test_uploads_hold_all_files(tmp_path, hub):
    model = drot.load(pruned(tmp_path), device="cpu")
    model.push_to_hub("me/mine", tags=["tiny"], commit_message="new", private=True)
    model.save_pretrained(tmp_path / "again", push_to_hub=True, repo_id="me/second")
    for (options, files), name in zip(hub, ("me/mine", "me/second"), strict=True):
        assert options["repo_id"] == name
        assert {"drot.json", "README.md", "config.json", "model.safetensors"} <= files.keys()
        assert json.loads(files["drot.json"])["recipe"]["pruning"]["method"] == "wanda"
    (options, files), _ = hub
    assert options["commit_message"] == "new"
    text = files["README.md"].decode()
    assert "tiny" in ModelCard(text).data.tags and '"me/mine"' in text
