"""A finished layer as a part that `checkpoint/resume.py` saves: its tensors, and the way back."""

from typing import Any

from torch import Tensor, nn

from drot.model.boundary import ROTATION_MODULE, add_boundary_rotation
from drot.model.rotate import LayerRotation
from drot.pipeline.context import RunContext

#: names of R1 and R2 in the part of a layer, and the prefix of its figures' names
R1, R2, FIGURE_PREFIX = "drot.r1", "drot.r2", "drot.figures."


def layer_tensors(
    layer: nn.Module, rotation: LayerRotation | None, figures: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a finished layer: its state dict, its rotation and its figures.

    layer: the decoder layer, rotated and pruned.
    rotation: its rotation; None for a layer that is not rotated.
    figures: name → tensor of a plot.
    """
    tensors = dict(layer.state_dict())
    tensors |= {FIGURE_PREFIX + name: values for name, values in figures.items()}
    if rotation is not None:
        tensors |= {R1: rotation.r1, R2: rotation.r2}
    return tensors


def restore_layer(
    run: RunContext, layer: nn.Module, saved: tuple[dict[str, Tensor], dict[str, Any]]
) -> tuple[LayerRotation | None, dict[str, Any], dict[str, Tensor]]:
    """Loads a finished layer into the dense `layer`. Returns its rotation, its record and its figures.

    saved: the tensors of `layer_tensors`, which are taken out of their dict, and the record.
    """
    tensors, record = saved
    figures = {
        name.removeprefix(FIGURE_PREFIX): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(FIGURE_PREFIX)
    }
    rotation = None
    if run.rotates:
        rotation = LayerRotation(tensors.pop(R1), tensors.pop(R2))
    if f"{ROTATION_MODULE}.weight" in tensors:
        hidden = run.model.config.hidden_size
        add_boundary_rotation(
            layer, run.arch, "residual", hidden, dtype=next(layer.parameters()).dtype, device=run.device
        )
    layer.load_state_dict(tensors)
    return rotation, record, figures
