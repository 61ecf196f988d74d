"""Files that somebody else wrote: whatever they hold, drot succeeds or raises UserError.

DROT_FUZZ_CASES is the number of cases of each test. With 200 and more the cases are drawn anew each time:
`DROT_FUZZ_CASES=200 .venv/bin/pytest tests/checkpoint/test_fuzz.py` runs 1000 cases.
"""

import contextlib
import io
import json
import math
import os
import shutil
import struct
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_manifests import made_finetuning, write_card
from safetensors.torch import load_file, save_file
from small_checkpoints import save_small
from small_models import random_text, random_tokens

import drot
from drot.checkpoint.manifest import Manifest, read_any_manifest, update_manifest
from drot.checkpoint.records import FinetuneRecord
from drot.checkpoint.tables import facts, layers_table, times_table
from drot.cli import app as cli
from drot.config import PruningConfig, Recipe, RecoveryConfig, RotationConfig
from drot.core.errors import UserError
from drot.evaluation.evaluate import evaluate
from drot.reporting.write import report

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("DROT_FUZZ_CASES", "12"))
fuzzed = settings(
    max_examples=CASES,
    deadline=timedelta(seconds=30),  # a case that hangs fails
    derandomize=CASES < 200,
    database=None,
    suppress_health_check=list(HealthCheck),
)
#: for a test that takes ten times as long
fuzzed_slowly = settings(fuzzed, max_examples=max(1, CASES // 10))
TOKENS = random_tokens(2, 8)
QUICK = Recipe(rotation=RotationConfig(mode="none"), pruning=PruningConfig(method="magnitude"))

#: values that a number, a name or a list in a JSON file may be replaced by
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 130),
    st.sampled_from([10**9, 2**31, 2**63, -(2**63), 10**400]),
    st.floats(width=64),
    st.sampled_from([math.nan, math.inf, 1e308, 1e-320, 0.5]),
    st.text(max_size=12),
    st.sampled_from(["\x1b[31m", "[/b]", "../x", "/etc/passwd", "drot", "llama", "qwen3", "dynamic", "yarn"]),
    st.lists(st.integers(-3, 10) | st.text(max_size=3), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers() | st.none(), max_size=3),
    st.integers(50, 3000).map(lambda depth: "DEEP" * depth),
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """The container and the key of every value in JSON data."""
    found: list[tuple[Any, Any]] = []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += [(data, key), *places(value)]
    return found


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[float, str, Any, str]]:
    """One to three edits of JSON data: a place, what to do there, a value, and a new key."""
    actions = st.sampled_from(["replace", "replace", "remove", "add"])
    edit = st.tuples(st.floats(0, 0.999), actions, VALUES, st.text(max_size=8) | st.just("layers"))
    return draw(st.lists(edit, min_size=1, max_size=3))


def edited(data: Any, changes: list[tuple[float, str, Any, str]]) -> str:
    """JSON text of the data after the edits."""
    data = json.loads(json.dumps(data))
    for place, action, value, key in changes:
        choice = places(data)
        if not choice:
            break
        container, at = choice[int(place * len(choice))]
        if action == "remove":
            del container[at]
        elif action == "add" and isinstance(container, dict):
            container[key] = value
        else:
            container[at] = value
    text = json.dumps(data)
    depth = text.count("DEEP")
    return text.replace('"' + "DEEP" * depth + '"', "[" * depth + "]" * depth) if depth else text


def survives(action: Any, *arguments: Any, **options: Any) -> None:
    """Calls the function: a UserError of one line is as good as success."""
    message = ""
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            action(*arguments, **options)
        except UserError as error:
            message = str(error)
    assert "\n" not in message and len(message) < 2000


def open_and_use(folder: Path) -> None:
    """Without the hashes in drot.json, which would stop every changed file."""
    model = drot.load(folder, device="cpu", verify=False)
    with torch.no_grad():
        model(TOKENS % model.config.vocab_size)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("fuzz") / "dense", num_hidden_layers=2)


@pytest.fixture(scope="module")
def packed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fuzz") / "packed"
    recipe = Recipe(rotation=RotationConfig(steps=1), pruning=PruningConfig(method="magnitude", solve="none"))
    drot.prune(dense, recipe, calibration=TOKENS, out=out, device="cpu", format="packed")
    return out


@pytest.fixture(scope="module")
def recorded(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose manifest has all that a manifest may hold: a rotation shared by the layers, a
    recovery, an evaluation against the original, and a fine-tuning."""
    folder = tmp_path_factory.mktemp("fuzz")
    recipe = Recipe(rotation=RotationConfig(mode="shared", steps=2), recovery=RecoveryConfig(recover="block"))
    out = folder / "recorded"
    drot.prune(dense, recipe, calibration=TOKENS, out=out, device="cpu")
    (folder / "text.txt").write_text(random_text(100))
    evaluate([str(out)], ppl=[str(folder / "text.txt")], against=str(dense), seqlen=16, device="cpu")
    record = FinetuneRecord.model_validate(made_finetuning())
    update_manifest(out, lambda manifest: manifest.finetune.append(record))
    return out


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz-case") / "model"


def fresh(source: Path, room: Path) -> Path:
    shutil.rmtree(room, ignore_errors=True)
    shutil.copytree(source, room)
    return room


@fuzzed
@given(changes=edits())
def test_config_json(dense: Path, room: Path, changes: Any) -> None:
    file = fresh(dense, room) / "config.json"
    file.write_text(edited(json.loads(file.read_text()), changes))
    survives(open_and_use, room)
    survives(drot.prune, room, QUICK, calibration=TOKENS, device="cpu")


@fuzzed
@given(changes=edits())
def test_quantization_config(packed: Path, room: Path, changes: Any) -> None:
    file = fresh(packed, room) / "config.json"
    config = json.loads(file.read_text())
    entry = {"quantization_config": config["quantization_config"] | {"dense_linears": []}}
    # of two entries with the same key, the last counts
    file.write_text(f"{json.dumps(config)[:-1]}, {edited(entry, changes)[1:]}")
    survives(open_and_use, room)


@fuzzed
@given(changes=edits(), cut=st.none() | st.floats(0, 1))
def test_drot_json(recorded: Path, room: Path, changes: Any, cut: float | None) -> None:
    file = fresh(recorded, room) / "drot.json"
    text = edited(json.loads(file.read_text()), changes)
    file.write_text(text if cut is None else text[: int(cut * len(text))])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(["info", str(room)])
    shown = out.getvalue() + err.getvalue()
    assert status in (0, 2), shown
    assert shown.replace("\n", "").isprintable(), shown
    assert (status == 2) == (out.getvalue() == ""), shown
    survives(Recipe.from_file, room)
    survives(write_card, room)


@pytest.mark.parametrize("value", ["removed", [3]])
def test_every_entry_of_drot_json(recorded: Path, room: Path, value: Any) -> None:
    """Without one of its entries, or with another value there: of entries with one name, the first."""
    file = fresh(recorded, room) / "drot.json"
    original = json.loads(file.read_text())
    seen = set()
    for number, (_, name) in enumerate(places(original)):
        if name in seen:
            continue
        seen.add(name)
        changed = json.loads(json.dumps(original))
        container, key = places(changed)[number]
        if value == "removed":
            del container[key]
        else:
            container[key] = value
        file.write_text(json.dumps(changed))
        survives(shown_by_info, room)


def shown_by_info(folder: Path) -> None:
    """All that `drot info` prints of a manifest, and the card."""
    manifest = read_any_manifest(folder)
    assert dict(facts(manifest))
    if isinstance(manifest, Manifest):
        assert [table(manifest).cells for table in (layers_table, times_table)]
    write_card(folder)


@fuzzed_slowly
@given(changes=edits())
def test_reports_of_drot_json(recorded: Path, room: Path, changes: Any) -> None:
    file = fresh(recorded, room) / "drot.json"
    file.write_text(edited(json.loads(file.read_text()), changes))
    survives(report, room, linears=["layers.0.self_attn.q_proj"])


@fuzzed
@given(changes=edits(), length=st.none() | st.integers(0, 2**64 - 1), cut=st.none() | st.floats(0, 1))
def test_safetensors_headers(
    dense: Path, room: Path, changes: Any, length: int | None, cut: float | None
) -> None:
    file = fresh(dense, room) / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = edited(json.loads(content[8 : 8 + size]), changes).encode("utf-8", "surrogatepass")
    content = struct.pack("<Q", len(header) if length is None else length) + header + content[8 + size :]
    file.write_bytes(content if cut is None else content[: int(cut * len(content))])
    survives(open_and_use, room)


@fuzzed
@given(
    which=st.floats(0, 0.999),
    data=st.binary(min_size=1, max_size=64),
    start=st.floats(0, 0.999),
)
def test_packed_tensors(packed: Path, room: Path, which: float, data: bytes, start: float) -> None:
    """Other bytes in one tensor: values may become NaN, and positions may be out of order."""
    file = fresh(packed, room) / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[int(which * len(tensors))]
    raw = tensors[name].view(torch.uint8).flatten()
    at = int(start * raw.numel())
    count = min(len(data), raw.numel() - at)
    raw[at : at + count] = torch.frombuffer(bytearray(data[:count]), dtype=torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    survives(open_and_use, room)
