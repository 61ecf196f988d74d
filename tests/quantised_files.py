"""Small models whose files hold weights in FP8 and MXFP4, as some models are published."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: the numbers of e2m1 by sign, exponent and mantissa (OCP Microscaling Formats, 5.3.3)
E2M1 = [
    (-1) ** sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))
    for sign in (0, 1)
    for exponent in range(4)
    for mantissa in (0, 1)
]


def in_blocks(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale in fp64 of each number of a weight, by the block in which the number lies."""
    rows, columns = (torch.arange(size) // of for size, of in zip(shape[-2:], block, strict=True))
    return scales.double()[..., rows[:, None], columns]


def in_fp8(weight: Tensor, block: tuple[int, int], *, power: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A weight [..., out, in] in FP8: its numbers, its scales in blocks, and what they stand for in fp64.

    power: whether the scales are powers of two, as bytes.
    """
    rows, columns = (-(-size // of) for size, of in zip(weight.shape[-2:], block, strict=True))
    scales = torch.rand(*weight.shape[:-2], rows, columns) * 1e-3 + 1e-3
    if power:
        exponents = torch.randint(-11, -8, scales.shape)
        stored, scales = (exponents + 127).to(torch.uint8), 2.0 ** exponents.double()
    else:
        stored = scales
    of_numbers = in_blocks(scales, block, weight.shape)
    numbers = (weight.double() / of_numbers).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    return numbers, stored, numbers.double() * of_numbers


def in_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights [experts, in, out] of experts in MXFP4: numbers, scales and the dense weights."""
    experts, inputs, outputs = weight.shape
    codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32))
    exponents = torch.randint(-6, -2, (experts, outputs, inputs // 32))
    dense = torch.tensor(E2M1, dtype=torch.float64)[codes] * 2.0 ** exponents.double().unsqueeze(-1)
    numbers = (codes[..., 1::2] * 16 + codes[..., 0::2]).to(torch.uint8)
    return numbers, (exponents + 127).to(torch.uint8), dense.reshape(experts, outputs, inputs).mT.contiguous()


def quantise_files(
    folder: Path,
    block: tuple[int, int] | None = (16, 16),
    *,
    power: bool = False,
    activations: bool = False,
    images: bool = True,
    compressed: bool = False,
) -> dict[str, Tensor]:
    """Rewrites the linears in the files of a small model in FP8, and returns what they stand for in fp64.

    block: of the scales; None for one scale of each matrix. images: also the linears that read images.
    compressed: as compressed-tensors names things; None for `block` is then one scale of each row. Those of
    gpt-oss are its experts alone, in MXFP4.
    """
    torch.manual_seed(0)
    config = json.loads((folder / "config.json").read_text())
    tensors, dense = load_file(folder / "model.safetensors"), {}
    method = "mxfp4" if config["model_type"] == "gpt_oss" else "fp8"
    for name, weight in list(tensors.items()):
        of_experts = ".experts." in name and weight.dim() == 3
        beside = any(part in name for part in ("vision_tower", "projector", "visual."))
        linear = weight.dim() == 2 and ((".layers." in name and name.endswith("proj.weight")) or beside)
        if not (of_experts or linear) or (beside and not images):
            continue
        if method == "mxfp4":
            if of_experts:
                del tensors[name]
                tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dense[name] = in_mxfp4(weight)
            continue
        rows = 1 if compressed else weight.shape[-2] // 2 if "gate_up" in name else weight.shape[-2]
        own = block or (rows, weight.shape[-1])
        tensors[name], scales, dense[name] = in_fp8(weight, own, power=power)
        if compressed:
            tensors[f"{name}_scale"] = scales
        else:
            tensors[f"{name}_scale_inv"] = scales.squeeze() if block is None and scales.dim() == 2 else scales
        if activations:
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{of}": torch.tensor(0.5) for of in ("activation_scale", "k_scale")}
    entry: dict[str, Any] = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if compressed:
        entry |= {"quant_method": "compressed-tensors", "format": "float-quantized"}
        entry["config_groups"] = {"group_0": {"weights": {"block_structure": block and list(block)}}}
    elif method == "fp8":
        entry |= {"fmt": "e4m3", "activation_scheme": "static" if activations else "dynamic"}
        entry |= {"weight_block_size": block and list(block)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return dense
