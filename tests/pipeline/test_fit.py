"""`drot prune --fit`: the settings that a run gives up to fit into the memory of a device."""

import contextlib

import pytest
from small_checkpoints import save_small
from torch import nn

from drot.checkpoint.opening import load_config
from drot.cli import app as cli
from drot.config import Recipe, resolve
from drot.core.errors import UserError
from drot.pipeline import dry_run
from drot.pipeline.dry_run import USED_SHARE, fitted, run_needs
from drot.pipeline.sizes import without_weights

SIZES = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=12, head_dim=32)
HEADS = dict(num_attention_heads=8, num_key_value_heads=8)
#: with the product dtype of a GPU, since products in float32 take more memory than the recovery
BEST = Recipe().replace(product_dtype="bfloat16").with_quality("best").replace(recover="block")
APART = {"distill_epochs": 0}
UNSOLVED = {"solve": "none", "target": "self"}
IN_STEPS = {"layers_per_step": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_small(tmp_path_factory.mktemp("model"), **SIZES, **HEADS)


def memory_of(model, recipe, *, on_gpu=False) -> int:
    """The bytes of a device in which the run of a recipe just fits."""
    needs = run_needs(model, recipe, device="cpu")
    of_device = max(needs.device_memory, needs.distillation)
    return -int(-(of_device if on_gpu else needs.main_memory + of_device) // USED_SHARE)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        (Recipe(), {}),
        (Recipe(), UNSOLVED),
        (BEST, APART),
        (BEST, APART | {"recover": "none"}),
        (BEST, APART | {"recover": "none"} | UNSOLVED),
        (Recipe().with_quality("fast").replace(mode="shared"), {}),
    ],
)
def test_a_run_gives_up_no_more_than_it_needs(model, asked, chosen):
    """Of the settings that fit, those that change least: with one byte less, others are chosen."""
    memory = memory_of(model, asked.replace(**chosen))
    found = fitted(model, asked, memory, device="cpu")
    assert found.changes == chosen and found.recipe == asked.replace(**chosen)
    assert found.needed <= USED_SHARE * memory and (found.needed < found.asked) == bool(chosen)
    for less in fitted_or_none(model, asked, memory - 2):
        assert less not in ({}, chosen)


def test_weighted_outputs_keep_the_weights_of_the_tokens(model):
    """They need them, also where no solver asks for them."""
    asked = Recipe().replace(output_weights="gradient")
    changes = UNSOLVED | {"token_weights": "gradient"}
    found = fitted(model, asked, memory_of(model, asked.replace(**changes)), device="cpu")
    assert found.changes == changes


def test_a_shared_rotation_trains_a_few_layers_in_a_step_on_a_gpu_alone(model, monkeypatch):
    """On a CPU the other layers lie in the same memory."""
    asked = Recipe().with_quality("fast").replace(mode="shared")
    on_cpu = memory_of(model, asked) - 2
    for found in fitted_or_none(model, asked, on_cpu):
        assert "layers_per_step" not in found
    monkeypatch.setattr(dry_run, "is_gpu", lambda device: True)
    on_gpu = memory_of(model, asked.replace(**IN_STEPS), on_gpu=True)
    chosen = fitted(model, asked, on_gpu, device="cpu")
    assert chosen.changes == IN_STEPS and chosen.needed < chosen.asked


def fitted_or_none(model, asked, memory):
    with contextlib.suppress(UserError):
        yield fitted(model, asked, memory, device="cpu").changes


def test_fields_of_the_command_line_stay(model):
    memory = memory_of(model, Recipe().replace(**UNSOLVED))
    with pytest.raises(UserError, match="but this run needs about .* MB: name more memory"):
        fitted(model, Recipe(), memory, fixed={"solve"}, device="cpu")


@pytest.mark.parametrize(
    ("fixed", "last"),
    [
        ("", APART | {"recover": "none"} | UNSOLVED),
        ("recover", APART | UNSOLVED),
        ("distill_epochs", {"recover": "none"} | UNSOLVED),
        ("solve", APART | {"recover": "none"}),
    ],
)
def test_a_field_that_stays_keeps_no_other_from_changing(fixed, last):
    *_, found = dry_run._lower(resolve(BEST), {fixed}, {}, offloads=False)
    assert found == last


def test_the_command_line_says_what_it_chose(model, capsys):
    size = f"{memory_of(model, Recipe().replace(**UNSOLVED))}B"
    assert cli.run(["prune", str(model), "--dry-run", "--device", "cpu", "--fit", size]) == 0
    told = capsys.readouterr()
    assert told.err.startswith(f"drot: --fit {size} chose --solve none --target self: about ")
    assert "solve: none" in told.out
    assert cli.run(["prune", str(model), "--dry-run", "--device", "cpu", "--fit", "1GB"]) == 0
    assert capsys.readouterr().err.startswith("drot: --fit 1GB changed nothing")


@pytest.mark.parametrize("size", ["24", "much", "-1GB"])
def test_a_size_that_is_none_is_refused(size, model, capsys):
    assert cli.run(["prune", str(model), "--dry-run", "--fit", size]) == 2
    assert "--fit must be a size of at least 1 MB, as in 24GB" in capsys.readouterr().err


def test_the_other_ranks_need_no_text(model, monkeypatch):
    chosen = Recipe().replace(source="missing.txt")
    with pytest.raises(UserError, match=r"missing\.txt"):
        fitted(model, chosen, 2**40, device="cpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fitted(model, chosen, 2**40, device="cpu").changes == {}


def test_all_ranks_choose_alike(model, tmp_path, monkeypatch):
    """Also where the text is shorter than asked, which the first rank alone could know."""
    (tmp_path / "short.txt").write_text("A short text. " * 200)
    chosen = BEST.replace(source=str(tmp_path / "short.txt"), nsamples=400, seqlen=32)
    found = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        found.append(fitted(model, chosen, 2**40, device="cpu", gpus=2).asked)
    assert found[0] == found[1]
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    assert (
        run_needs(model, chosen, device="cpu").tokens < run_needs(model, chosen, device="cpu", gpus=2).tokens
    )


def test_a_dry_run_counts_the_layers_that_share_a_rotation(model):
    """Together on the device, they are what takes the most memory of a narrow model of many layers."""
    shared = Recipe().with_quality("fast").replace(mode="shared")
    few, all_ = (run_needs(model, r, device="cpu") for r in (shared.replace(**IN_STEPS), shared))
    layer = without_weights(load_config(model)).model.layers[0]
    weights = 4 * sum(linear.weight.numel() for linear in layer.modules() if isinstance(linear, nn.Linear))
    assert all_.device_memory > 12 * weights > few.device_memory
