"""Weights in FP8 and MXFP4, in which some models are published: they are made dense while they are read.

| format | models | the numbers of a weight in the files | its scales |
|---|---|---|---|
| FP8 | DeepSeek, MiniMax, Mistral | e4m3, [..., out, in] | of each block of a matrix, or of a whole matrix |
| MXFP4 | gpt-oss | e2m1, two in a byte, [experts, out, in/32, 16] | of 32 inputs |

A number times its scale is computed in fp32, and rounded once to the dtype of the model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from drot.checkpoint.pieces import PieceReader
from drot.checkpoint.source import CONFIG, DENSE_DTYPES, Header, read_config
from drot.core.errors import UserError
from drot.core.reading import check_schema

#: `quant_method` of the models that are read so
READABLE = ("fp8", "mxfp4")
#: the ends of the names of scales in FP8, and of what computes with activations in FP8 alone
OF_FP8, OF_ACTIVATIONS = "_scale_inv", "activation_scale"
#: the ends of the names of numbers and scales in MXFP4
NUMBERS, SCALES = "_blocks", "_scales"
#: the inputs that share a scale in MXFP4
GROUP = 32
#: the numbers of e2m1, by their four bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: the numbers that are made dense at the same time, but for a row or an expert that has more
AT_ONCE = 2**22
#: the dtypes in safetensors files of scales that are powers of two, 2^(byte - 127)
POWERS = ("U8", "F8_E8M0")


class Keys(BaseModel):
    """What drot reads of the `quantization_config` of such a model.

    weight_block_size: the rows and columns that share a scale; None where a whole matrix does.
    """

    weight_block_size: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] | None = None


@dataclass(frozen=True)
class Quantised(Header, ABC):
    """What the files say of a weight in FP8 or MXFP4. Its shape is that of the dense weight.

    dtype: the dtype in which a dense weight of such a model would lie in the files.
    start: the position of its numbers in the file. scales: the header of its scales.
    format: the name by which users know the format.
    """

    format: ClassVar[str]
    scales: Header

    @property
    @abstractmethod
    def unit(self) -> int:
        """The numbers of a row, or of an expert, which are made dense together."""

    @abstractmethod
    def units(self, reader: PieceReader, first: int, count: int, device: torch.device) -> Tensor:
        """The dense numbers of `count` units from unit `first` on, in fp32 and in their order."""

    def read(self, reader: PieceReader, target: Tensor, first: int) -> None:
        """Reads the dense numbers from number `first` on into a contiguous tensor on any device.

        Raises UserError as the reader.
        """
        flat, unit = target.view(-1), self.unit
        stop, step = -(-(first + len(flat)) // unit), max(1, AT_ONCE // unit)
        for at in range(first // unit, stop, step):
            dense = self.units(reader, at, min(step, stop - at), target.device).reshape(-1)
            skipped = max(0, first - at * unit)
            part = flat[max(0, at * unit - first) :][: len(dense) - skipped]
            part.copy_(dense[skipped:][: len(part)])

    def _bytes(self, reader: PieceReader, first: int, count: int, device: torch.device) -> Tensor:
        """`count` bytes of the numbers, from byte `first` on."""
        found = torch.empty(count, dtype=torch.uint8, device=device)
        reader.read(found, self.file, self.start + first, torch.uint8)
        return found

    def _scales(self, reader: PieceReader, first: int, count: int, device: torch.device) -> Tensor:
        """`count` scales in fp32, from scale `first` on."""
        dtype = torch.uint8 if self.scales.dtype in POWERS else DENSE_DTYPES[self.scales.dtype]
        found = torch.empty(count, device=device)
        reader.read(found, self.scales.file, self.scales.start + first * dtype.itemsize, dtype)
        return (found - 127).exp2() if dtype == torch.uint8 else found


@dataclass(frozen=True)
class Fp8(Quantised):
    """A weight in FP8. block: the rows and columns of a matrix that share a scale."""

    format: ClassVar[str] = "FP8"
    block: tuple[int, int]

    @property
    def unit(self) -> int:
        return self.shape[-1]

    def units(self, reader: PieceReader, first: int, count: int, device: torch.device) -> Tensor:
        numbers = self._bytes(reader, first * self.unit, count * self.unit, device)
        scales = self._scales(reader, 0, math.prod(self.scales.shape), device)
        rows, below = self.shape[-2], -(-self.shape[-2] // self.block[0])
        row = torch.arange(
            first, first + count, device=device
        )  # of all matrices, which lie one below the other
        of_rows = scales.view(-1, -(-self.unit // self.block[1]))[
            row // rows * below + row % rows // self.block[0]
        ]
        of_numbers = of_rows.repeat_interleave(self.block[1], 1)[:, : self.unit]
        return numbers.view(torch.float8_e4m3fn).float().view(count, self.unit) * of_numbers


@dataclass(frozen=True)
class Mxfp4(Quantised):
    """The weights of experts in MXFP4; the dense ones are [experts, in, out]."""

    format: ClassVar[str] = "MXFP4"

    @property
    def unit(self) -> int:
        return math.prod(self.shape[1:])

    def units(self, reader: PieceReader, first: int, count: int, device: torch.device) -> Tensor:
        _, inputs, outputs = self.shape
        numbers = self._bytes(reader, first * self.unit // 2, count * self.unit // 2, device)
        groups = self.unit // GROUP
        scales = self._scales(reader, first * groups, count * groups, device)
        of_bits = torch.tensor(E2M1, device=device)
        pairs = torch.stack((of_bits[(numbers & 15).int()], of_bits[(numbers >> 4).int()]), -1)
        return (pairs.view(-1, GROUP) * scales.unsqueeze(1)).view(count, outputs, inputs).mT


def is_quantised(folder: Path) -> bool:
    """Whether config.json in `folder` says that the weights are in FP8 or MXFP4."""
    return (read_config(folder).get("quantization_config") or {}).get("quant_method") in READABLE


def dense_headers(headers: dict[str, Header], folder: Path) -> dict[str, Header]:
    """`headers` with those of dense weights in place of those of numbers and scales in FP8 and MXFP4.

    Raises UserError for numbers and scales that do not fit each other.

    headers: of the files of the model in `folder`. They stay as they are if config.json names no such format.
    """
    if not is_quantised(folder):
        return headers
    entry = read_config(folder)["quantization_config"]
    block = check_schema(Keys, entry, f"{folder / CONFIG}: quantization_config").weight_block_size
    found = {name: header for name, header in headers.items() if not name.endswith(OF_ACTIVATIONS)}
    for name, header in headers.items():
        if header.dtype == "F8_E4M3" and (scales := found.pop(name + OF_FP8, None)) is not None:
            found[name] = _fp8(name, header, scales, block)
        own = name.removesuffix(NUMBERS)
        if own != name and header.dtype == "U8" and (scales := found.pop(own + SCALES, None)) is not None:
            del found[name]
            found[own] = _mxfp4(own, header, scales)
    return found


def formats_of(headers: Mapping[str, Header]) -> set[str]:
    """The formats of the quantised weights among dense ones, by the names that users know."""
    return {header.format for header in headers.values() if isinstance(header, Quantised)}


def _fp8(name: str, numbers: Header, scales: Header, block: tuple[int, int] | None) -> Fp8:
    *matrices, rows, columns = numbers.shape if len(numbers.shape) > 1 else (0, 0)
    per_row, per_column = scales.shape[-2:] if len(scales.shape) > 1 else (1, 1)
    rows_of, columns_of = block or (max(1, rows), max(1, columns))
    if per_row == 2 and rows_of >= rows and rows % 2 == 0:
        rows_of = rows // 2  # gate and up in one weight have a scale each
    fits = (-(-rows // rows_of), -(-columns // columns_of)) == (per_row, per_column)
    fits &= math.prod(scales.shape) == math.prod(matrices) * per_row * per_column
    if not fits or scales.dtype not in (*DENSE_DTYPES, *POWERS):
        raise UserError(_misfit(name, numbers, scales, f"in blocks of {rows_of} × {columns_of}"))
    return Fp8(numbers.file, numbers.shape, "BF16", numbers.start, scales, (rows_of, columns_of))


def _mxfp4(name: str, numbers: Header, scales: Header) -> Mxfp4:
    fits = len(numbers.shape) == 4 and numbers.shape[:-1] == scales.shape and scales.dtype in POWERS
    if not fits or numbers.shape[-1] * 2 != GROUP:
        raise UserError(_misfit(name, numbers, scales, f"of {GROUP} inputs each"))
    experts, outputs, groups, _ = numbers.shape
    return Mxfp4(numbers.file, [experts, groups * GROUP, outputs], "BF16", numbers.start, scales)


def _misfit(name: str, numbers: Header, scales: Header, how: str) -> str:
    return (
        f"{name} has numbers {numbers.shape} and {scales.dtype} scales {scales.shape}, which must be {how}: "
        f"{CONFIG} is of another model, or the files are; copy the model again"
    )
