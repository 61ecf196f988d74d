"""Weights in FP8 and MXFP4, in which some models are published: they are made dense while they are read.

| format | models | the numbers of a weight in the files | its scales |
|---|---|---|---|
| FP8 | DeepSeek, MiniMax, Mistral, GLM | e4m3, [..., out, in] | of each block or row of a matrix, or of all |
| MXFP4 | gpt-oss | e2m1, two in a byte, [experts, out, in/32, 16] | of 32 inputs |

A number times its scale is computed in fp32, and rounded once to the dtype of the model.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from drot.checkpoint.integrity import CONFIG_FILE
from drot.checkpoint.pieces import PieceReader
from drot.checkpoint.source import DENSE_DTYPES, Header, read_config
from drot.core.errors import UserError
from drot.core.reading import check_schema

#: the formats of `quant_method: compressed-tensors` that are FP8 too
COMPRESSED = ("float-quantized", "naive-quantized")
#: the ends of the names of scales in FP8; each is a factor, also where the name says inverse
OF_FP8 = ("_scale_inv", "_scale")
#: the ends of the names of scales of what is no weight: activations, and keys and values in a cache
IGNORED_ENDINGS = (
    "activation_scale",
    "input_scale",
    "output_scale",
    *(f".{of}_scale" for of in ("q", "k", "v", "kv")),
)
#: the ends of the names of numbers and scales in MXFP4
NUMBERS, SCALES = "_blocks", "_scales"
#: the inputs that share a scale in MXFP4
GROUP = 32
#: the numbers of e2m1 by their four bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: the numbers that are made dense at the same time, but for a row or an expert that has more
AT_ONCE = 2**24
#: the dtypes in safetensors files of scales that are powers of two, 2^(byte - 127)
POWERS = ("U8", "F8_E8M0")


Block = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


class WeightsOfGroup(BaseModel):
    """How compressed-tensors quantises the weights of a group of linears."""

    block_structure: Block | None = None


class WeightGroup(BaseModel):
    """A group of linears of compressed-tensors."""

    weights: WeightsOfGroup | None = None


class QuantisedKeys(BaseModel):
    """What drot reads of the `quantization_config` of such a model.

    weight_block_size: the rows and columns that share a scale, of `quant_method: fp8`; transformers takes the
        default too. None where a whole matrix shares one.
    config_groups: the same of compressed-tensors. transform_config: what acts on activations too.
    """

    weight_block_size: Block | None = (128, 128)
    config_groups: dict[str, WeightGroup] = Field(default_factory=dict)
    transform_config: dict[str, Any] | None = None

    def block(self, where: str) -> tuple[int, int] | None:
        """The rows and columns that share a scale. Raises UserError if there are several such blocks."""
        if self.transform_config:
            raise UserError(
                f"{where} has a transform_config, which drot does not apply: name the original model"
            )
        if not self.config_groups:
            return self.weight_block_size
        found = {of.weights.block_structure for of in self.config_groups.values() if of.weights is not None}
        if len(blocks := found - {None}) > 1:
            several = ", ".join(sorted(map(str, blocks)))
            raise UserError(f"{where} must have blocks of one size, got {several}: name the original")
        return next(iter(blocks), None)


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
    def read_scales(self, reader: PieceReader, units: range, device: torch.device) -> Tensor:
        """The scales of `units`, or all scales, as `dense` takes them."""

    @abstractmethod
    def dense(self, reader: PieceReader, units: range, scales: Tensor, start: int) -> Tensor:
        """The dense numbers of `units` in fp32, in their order. start: the first unit that was read."""

    def read(self, reader: PieceReader, target: Tensor, first: int) -> None:
        """Reads the dense numbers from number `first` on into a contiguous tensor on any device.

        Raises UserError as the reader.
        """
        flat, unit = target.view(-1), self.unit
        units = range(first // unit, -(-(first + len(flat)) // unit))
        scales = self.read_scales(reader, units, target.device)
        step = max(1, AT_ONCE // unit)
        for at in units[::step]:
            part = range(at, min(at + step, units.stop))
            numbers = self.dense(reader, part, scales, units.start).reshape(-1)
            skipped = max(0, first - at * unit)
            into = flat[max(0, at * unit - first) :][: len(numbers) - skipped]
            into.copy_(numbers[skipped:][: len(into)])


def _bytes(reader: PieceReader, header: Header, first: int, count: int, device: torch.device) -> Tensor:
    """`count` bytes of a tensor, from byte `first` on."""
    found = torch.empty(count, dtype=torch.uint8, device=device)
    reader.read(found, header.file, header.start + first, torch.uint8)
    return found


def _power(scales: Tensor) -> Tensor:
    """The powers of two that bytes stand for, in fp32."""
    return (scales.float() - 127).exp2()


@dataclass(frozen=True)
class Fp8(Quantised):
    """A weight in FP8. block: the rows and columns of a matrix that share a scale."""

    format: ClassVar[str] = "FP8"
    block: tuple[int, int]

    @property
    def unit(self) -> int:
        return self.shape[-1]

    def read_scales(self, reader: PieceReader, units: range, device: torch.device) -> Tensor:
        count = math.prod(self.scales.shape)
        if self.scales.dtype in POWERS:
            found = _power(_bytes(reader, self.scales, 0, count, device))
        else:
            found = torch.empty(count, dtype=torch.float32, device=device)
            reader.read(found, self.scales.file, self.scales.start, DENSE_DTYPES[self.scales.dtype])
        return found.view(-1, -(-self.unit // self.block[1]))  # a row for the rows of each block

    def dense(self, reader: PieceReader, units: range, scales: Tensor, start: int) -> Tensor:
        numbers = _bytes(reader, self, units.start * self.unit, len(units) * self.unit, scales.device)
        rows, below = self.shape[-2], -(-self.shape[-2] // self.block[0])
        row = torch.arange(units.start, units.stop, device=scales.device)  # matrices lie one below the other
        of_rows = scales[row // rows * below + row % rows // self.block[0]]
        of_numbers = of_rows.repeat_interleave(self.block[1], 1)[:, : self.unit]
        return numbers.view(torch.float8_e4m3fn).float().view(of_numbers.shape).mul_(of_numbers)


@dataclass(frozen=True)
class Mxfp4(Quantised):
    """The weights of experts in MXFP4; the dense ones are [experts, in, out]."""

    format: ClassVar[str] = "MXFP4"

    @property
    def unit(self) -> int:
        return math.prod(self.shape[1:])

    def read_scales(self, reader: PieceReader, units: range, device: torch.device) -> Tensor:
        groups = self.unit // GROUP
        found = _bytes(reader, self.scales, units.start * groups, len(units) * groups, device)
        return found.view(len(units), groups)

    def dense(self, reader: PieceReader, units: range, scales: Tensor, start: int) -> Tensor:
        _, inputs, outputs = self.shape
        numbers = _bytes(
            reader, self, units.start * self.unit // 2, len(units) * self.unit // 2, scales.device
        )
        own = _power(scales[units.start - start : units.stop - start])
        found = _pairs(scales.device)[numbers.int()].view(-1, GROUP).mul_(own.view(-1, 1))
        return found.view(len(units), outputs, inputs).mT


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """The two numbers of e2m1 of each byte, of which the lower half comes first."""
    return torch.tensor([(first, second) for second in E2M1 for first in E2M1], device=device)


def entry_of(config: dict[str, Any]) -> dict[str, Any]:
    """`quantization_config` in a config.json; {} if there is none.

    A model that reads images too may name it in the config of its language model alone.
    """
    text = config.get("text_config")
    own = text.get("quantization_config") if isinstance(text, dict) else None
    return config.get("quantization_config") or own or {}


def is_readable(entry: dict[str, Any]) -> bool:
    """Whether drot reads weights that are quantised as `entry`, a `quantization_config`, says."""
    method = entry.get("quant_method")
    compressed = method == "compressed-tensors" and entry.get("format") in COMPRESSED
    return compressed or method in ("fp8", "mxfp4")


def is_quantised(folder: Path) -> bool:
    """Whether drot makes the weights of the model in `folder` dense while it reads them."""
    return is_readable(entry_of(read_config(folder)))


def dense_headers(headers: dict[str, Header], folder: Path) -> dict[str, Header]:
    """`headers` with those of dense weights in place of those of numbers and scales in FP8 and MXFP4.

    Raises UserError for numbers and scales that do not fit each other, and for numbers without scales.

    headers: of the files of the model in `folder`. They stay as they are if it is not quantised so.
    """
    entry = entry_of(read_config(folder))
    if not is_readable(entry):
        return headers
    where = f"{folder / CONFIG_FILE}: quantization_config"
    block = check_schema(QuantisedKeys, entry, where).block(where)
    found = {name: header for name, header in headers.items() if not name.endswith(IGNORED_ENDINGS)}
    for name, header in headers.items():
        own = name.removesuffix(NUMBERS)
        if header.dtype.startswith("F8_") and header.dtype not in POWERS:
            scales = next((name + end for end in OF_FP8 if name + end in found), None)
            if scales is not None:
                found[name] = _fp8(name, header, found.pop(scales), block)
            elif not name.endswith(OF_FP8):
                raise UserError(
                    f"{name} is in {header.dtype} without a scale of a name that drot knows: name the model "
                    "that it was made from, in 16 or 32 bits"
                )
        elif own != name and header.dtype == "U8" and own + SCALES in found and own not in headers:
            del found[name]
            found[own] = _mxfp4(own, header, found.pop(own + SCALES))
    return found


def formats_of(headers: Mapping[str, Header]) -> set[str]:
    """The formats of the quantised weights among dense ones, by the names that users know."""
    return {header.format for header in headers.values() if isinstance(header, Quantised)}


def _fp8(name: str, numbers: Header, scales: Header, block: tuple[int, int] | None) -> Fp8:
    *matrices, rows, columns = numbers.shape if len(numbers.shape) > 1 else (0, 0)
    of_rows, of_columns = scales.shape[-2:] if len(scales.shape) > 1 else (1, 1)
    sizes = (
        _sharing(rows, of_rows, block and block[0], halves=bool(matrices)),
        _sharing(columns, of_columns, block and block[1]),
    )
    fits = numbers.dtype == "F8_E4M3" and scales.dtype in (*DENSE_DTYPES, *POWERS) and all(sizes)
    if not fits or math.prod(scales.shape) != math.prod(matrices) * of_rows * of_columns:
        how = "of the whole weight or of each row" + (f", or in blocks of {list(block)}" if block else "")
        raise UserError(_misfit(name, numbers, scales, how))
    return Fp8(numbers.file, numbers.shape, "BF16", numbers.start, scales, sizes)


def _sharing(size: int, count: int, block: int | None, *, halves: bool = False) -> int:
    """Of `size` rows or columns with `count` scales, those that share a scale; 0 if they do not fit.

    block: as config.json says. halves: whether gate and up, of experts, may have a scale each.
    """
    if not size or not count:
        return 0
    if count == 1:
        return size
    if block and -(-size // block) == count:
        return block
    if count == size:
        return 1
    return size // 2 if halves and count == 2 and size % 2 == 0 else 0


def _mxfp4(name: str, numbers: Header, scales: Header) -> Mxfp4:
    fits = len(numbers.shape) == 4 and numbers.shape[:-1] == scales.shape and scales.dtype in POWERS
    if not fits or numbers.shape[-1] * 2 != GROUP:
        raise UserError(_misfit(name, numbers, scales, f"of {GROUP} inputs each"))
    experts, outputs, groups, _ = numbers.shape
    return Mxfp4(numbers.file, [experts, groups * GROUP, outputs], "BF16", numbers.start, scales)


def _misfit(name: str, numbers: Header, scales: Header, how: str) -> str:
    return (
        f"{name} has numbers {numbers.shape} and {scales.dtype} scales {scales.shape}, which must be {how}: "
        f"{CONFIG_FILE} is of another model, or the files are; copy the model again"
    )
