"""`drot prune --sensitivity`: its tables, its advice, and the options that it refuses."""

import json

import pytest
from command_output import one_line

from drot.cli import app as cli
from drot.cli.sensitivity import _table, advice
from drot.config import PruningConfig, Recipe
from drot.core.events import ProgressEvent
from drot.pipeline.sensitivity import SensitivityResult


def result_of(errors, **pruning):
    return SensitivityResult(Recipe(pruning=PruningConfig(**pruning)), errors, {"base_model": "m"})


@pytest.fixture
def sensitivity(monkeypatch):
    """The arguments of drot.sensitivity, which is replaced by a function with figures for two linears."""
    seen = []
    errors = {
        f"layers.{i}.mlp.{r}": {"2:4": 0.12 if i else 0.02, "0.5": 0.01, "6:12": None if i else 0.3}
        for i in range(2)
        for r in ("up_proj", "down_proj")
    }

    def measure(model, recipe, **options):
        seen.append((model, recipe, options))
        print("a library prints to stdout")
        options["progress"](ProgressEvent(phase="sensitivity", layer=0, layers=2))
        return result_of(errors, sparsity_of=recipe.pruning.sparsity_of, keep=recipe.pruning.keep)

    monkeypatch.setattr("drot.pipeline.sensitivity.sensitivity", measure)
    return seen


def test_sensitivity(sensitivity, calls, capsys):
    arguments = ["prune", "m", "--sensitivity", "--keep", "layers.1.mlp.up_proj", "--device", "cpu"]
    assert cli.run([*arguments, "--rotations", "r.st"]) == 0
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    for text in ("Output error at 2:4", "Output error at 0.5", "Output error at 6:12", "0.1200*", "0.0700"):
        assert text in out
    assert "Largest output error with this recipe: layers.1.mlp.down_proj 0.1200 (2:4), layers.0.mlp" in out
    assert (
        '--keep layers.1.mlp.down_proj, or give it another sparsity: --sparsity-of "layers.1.mlp.down' in out
    )
    assert max(map(len, captured.out.splitlines()[:-1])) <= 100
    assert (
        "a library prints to stdout" in captured.err
        and "layer 0 (1 of 2): measuring output errors" in captured.err
    )
    ((model, recipe, options),) = sensitivity
    assert (model, recipe.pruning.keep, str(options["rotations"])) == ("m", ("layers.1.mlp.up_proj",), "r.st")
    assert cli.run([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["errors"]["layers.1.mlp.up_proj"] == {"2:4": 0.12, "0.5": 0.01, "6:12": None}
    assert data["recipe"]["pruning"]["keep"] == ["layers.1.mlp.up_proj"] and data["base_model"] == "m"
    assert not calls


def test_layers_with_other_linears():
    """A convolution in one layer, an attention in the next: gaps, and means over the layers that have it."""
    rows = {"layers.0.conv.in_proj": {"2:4": 0.1}, "layers.1.self_attn.q_proj": {"2:4": 0.2}}
    rows |= {f"layers.{i}.mlp.up_proj": {"2:4": 0.1 + 0.2 * i} for i in range(2)}
    table = _table(result_of(rows), "2:4")
    assert table.headings == ["layer", "in_proj", "up_proj", "q_proj"]
    assert table.cells == [
        ["0", "0.1000", "0.1000", "-"], ["1", "-", "0.3000*", "0.2000"], [],
        ["mean", "0.1000", "0.2000", "0.2000"],
    ]  # fmt: skip


def test_the_advice_of_the_sensitivity_table():
    assert (
        advice(result_of({"layers.0.mlp.up_proj": {"2:4": 0.5}}, keep="*"))
        == "The recipe keeps all linears dense."
    )
    only = advice(result_of({"layers.0.mlp.up_proj": {"2:4": 0.5}}))
    assert only.endswith("Keep the first dense: --keep layers.0.mlp.up_proj.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--out is missing: name the folder to write, or use --sensitivity"),
        ("--sensitivity --out o --resume", "--out, --resume have no effect with --sensitivity"),
        ("--sensitivity --format packed", "--format has no effect with --sensitivity"),
        ("--sensitivity --save-rotations f", "--save-rotations has no effect with --sensitivity"),
        ("--sensitivity --rotation none --steps 5", "--steps has no effect with --rotation none"),
    ],
)
def test_sensitivity_writes_no_model(sensitivity, calls, capsys, options, message):
    assert cli.run(["prune", "m", *options.split()]) == 2
    assert message in one_line(capsys.readouterr().err)
    assert not calls and not sensitivity
