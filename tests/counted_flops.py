"""The floating-point operations of matrix products."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def _product(total: torch.Size, a: torch.Size, b: torch.Size, **options: Any) -> int:
    return 2 * a[0] * a[1] * b[1]


def counted_flops(work: Callable[[], Any]) -> int:
    """The operations of the products in work(), 2 · m · n · k each. torch does not count `addmm_`."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _product}) as counter:
        work()
    return counter.get_total_flops()
