"""The machine: devices, versions, memory, products and copies on them."""
