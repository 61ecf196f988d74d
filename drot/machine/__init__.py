"""The machine: devices, versions, memory, products and copies on them."""

import torch  # here, since the import of torch imports drot.ops, which needs modules of this folder whole
