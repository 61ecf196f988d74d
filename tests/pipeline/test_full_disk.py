"""A disk that is full at any file: one line, nothing half-written, and the run can be resumed."""

import errno
import os
import resource

import pytest
import runs
from small_models import small_model

from drot.checkpoint.integrity import folder_records
from drot.core import files
from drot.core.errors import UserError
from drot.core.files import WriteError, writing

SEQUENTIAL, DENSE = (
    runs.one_shot(steps=1, method="wanda", hessians=hessians) for hessians in ("sequential", "dense")
)


def prune(out, recipe=SEQUENTIAL, run=runs.prune, **options):
    model = small_model("llama", head_dim=16, num_hidden_layers=2, vocab_size=1000)
    return run(model, recipe, out=out, **options)


def check_full(error, folder):
    """The message is one line, and nothing is half-written."""
    assert "cannot write " in str(error) and "\n" not in str(error)
    assert not (folder / "out").exists() and not list(folder.rglob("*.part"))
    assert not (folder / "out.lock").exists()
    partial = folder / "out.partial"
    assert not partial.exists() or (partial / "run.json").exists()
    assert ("continue with `resume=True`" in str(error)) == partial.exists()


#: what a run writes, parts.json beside the parts that come next: each can meet a full disk
WRITTEN = ["run.json"]
PARTS = [
    "rotation_00000",
    "rotation_00001",
    "layer_00000",
    "layer_00000_run",
    "layer_00001",
    "layer_00001_run",
]
WRITTEN += [name for part in PARTS for name in (f"{part}.safetensors", "parts.json")]
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
SYNCED = ["README.md", "config.json", "drot-figures.npz", "generation_config.json"]
SYNCED += [*SHARDS, "model.safetensors.index.json"]
WRITTEN += ["r.safetensors", "README.md", *SYNCED]  # drot.json has the time that this took
WRITTEN += ["drot.json", *sorted([*SYNCED, "drot.json"])]


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_file(tmp_path, monkeypatch):
    """A file cannot be written, for each of them. Then there is room, and the run is resumed."""
    names, full_at = [], None

    def sync(path):  # not the real one, which waits for the disk
        if not path.is_dir():
            names.append(name := path.name.removesuffix(".part"))
            if (name, names.count(name)) == full_at:
                raise OSError(errno.ENOSPC, "No space left on device")

    def run(folder, **options):
        names.clear()
        prune(folder / "out", DENSE, save_rotations_to=folder / "r.safetensors", **options)
        saved = ["config.json", "model.safetensors.index.json", *SHARDS]
        return folder_records(folder, ["r.safetensors", *(f"out/{name}" for name in saved)])

    monkeypatch.setattr(files, "sync", sync)
    expected = run(tmp_path / "whole")
    assert sorted(names) == sorted(WRITTEN)
    assert [name for name in names if name != "parts.json"] == [n for n in WRITTEN if n != "parts.json"]
    for index, name in enumerate(WRITTEN):
        folder, full_at = tmp_path / str(index), (name, WRITTEN[: index + 1].count(name))
        with pytest.raises(UserError, match="No space left on device") as caught:
            run(folder)
        check_full(caught.value, folder)
        full_at = None
        assert run(folder, resume=(folder / "out.partial").exists()) == expected


def test_a_disk_that_is_really_full(tmp_path):
    """The kernel refuses every byte beyond a limit, which libraries meet in the middle of a file."""
    prune(tmp_path / "whole")
    expected = folder_records(tmp_path / "whole", SHARDS)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    named = []
    largest = (tmp_path / "whole" / SHARDS[-1]).stat().st_size
    for number, limit in enumerate((1000, 6000, largest - 1)):
        folder = tmp_path / str(number)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(UserError, match="File too large") as caught:
                prune(folder / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_full(caught.value, folder)
        named.append(str(caught.value).split(":")[0].rpartition("/")[2])
        prune(folder / "out", resume=(folder / "out.partial").exists())
        assert folder_records(folder / "out", SHARDS) == expected
    assert named == ["run.json", "layer_00000.safetensors", "out"]


def test_a_tokenizer_that_meets_a_full_disk(tmp_path):
    """The package tokenizers raises a plain Exception."""

    class Tokenizer:
        def save_pretrained(self, folder):
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(UserError, match="out: No space left on device .* continue with `resume=True`"):
        prune(tmp_path / "out", tokenizer=Tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    with pytest.raises(RuntimeError), writing(tmp_path):
        raise RuntimeError("a fault of drot is none of the disk, os error 28 or not")
    with pytest.raises(WriteError, match="cannot write .*: Input/output error"), writing(tmp_path):
        raise OSError(errno.EIO, "Input/output error")


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        prune(tmp_path / "out", save_rotations_to=tmp_path / "r.safetensors")
        prune(tmp_path / "cut", run=runs.interrupted)
    finally:
        os.umask(before)
    written = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert {"layer_00000.safetensors", "r.safetensors", "drot.json", *SHARDS} <= written.keys()
    assert set(written.values()) == {0o640}
