"""Helpers for tests of packed checkpoints on disk. conftest.py has the checkpoints."""

import json

from runs import saved_tensors
from safetensors.torch import save_file

from drot.checkpoint.manifest import accept_files
from drot.cli import app as cli
from drot.reporting.demo import HELD_OUT

#: options of a quick `drot prune`, with which both formats have their rotations in the same place
PRUNE = [
    *("--method", "magnitude", "--hessians", "sequential", "--solve", "none", "--target", "self"),
    *("--token-weights", "equal", "--device", "cpu", "--dtype", "bfloat16"),
    *("--calibration", str(HELD_OUT), "--nsamples", "2", "--seqlen", "32"),
]
#: the linear whose tensors the tests look at or damage
UP = "model.layers.3.mlp.up_proj"


def refused(capsys, *arguments):
    """The error message of a command line that must fail as a mistake of the user.

    Lines of progress may stand before the message.
    """
    capsys.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    *progress, message = captured.err.splitlines()
    assert captured.out == "" and not any(line.startswith("drot: ") for line in progress), captured
    return message + "\n"


def rewrite(folder, change):
    """Applies `change` to the dict of all tensors of a checkpoint, and records the new files."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    # copies, because the loaded tensors are mapped from the files, which are overwritten below
    tensors = {name: tensor.clone() for name, tensor in saved_tensors(folder).items()}
    change(tensors)
    places = {name: places.get(name, places["model.norm.weight"]) for name in tensors}
    for file in set(places.values()):
        own = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    accept_files(folder)
