"""Helpers for tests of packed checkpoints on disk. conftest.py has the checkpoints."""

from safetensors.torch import load_file, save_file

from drot.cli import app as cli
from drot.demo.demo import HELD_OUT
from drot.manifest.manifest import accept_files

#: options of a quick `drot prune`, with which both formats have their rotations in the same place
PRUNE = [
    *("--method", "magnitude", "--hessians", "sequential", "--device", "cpu", "--dtype", "bfloat16"),
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


def tensors_of(folder):
    """Name → tensor, from all safetensors files of a checkpoint."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def rewrite(folder, change):
    """Applies `change` to the dict of tensors of a checkpoint in one file, and records the new file."""
    file = folder / "model.safetensors"
    # copies, because the loaded tensors are mapped from the file, which is overwritten below
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    accept_files(folder)
