"""The memory of a whole run on one layer with LLaMA-3-70B's shapes, counted on a layer 32 times as narrow."""

import weakref

import pytest
import torch
from small_models import small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import drot
from drot.calibration import cholesky, hessian, layer_pass, stream
from drot.config import Recipe
from drot.pipeline import importance, invariance
from drot.pruning import shifted_inverse, solve

#: Every size of the layer and every number of tokens is that of a 70B model divided by NARROWER, and so every
#: tensor has its bytes divided by the square.
NARROWER = 32
HIDDEN, INNER, SEQLEN = 8192 // NARROWER, 28672 // NARROWER, 2048 // NARROWER


class Peak(TorchDispatchMode):
    """The largest number of bytes that the tensors that torch makes inside the context take at one time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def free(self, key):
        self.now -= self.sizes.pop(key)


@pytest.mark.slow
@pytest.mark.parametrize(("quality", "limit"), [("fast", 33e9), ("balanced", 40e9)])
def test_a_70b_layer_is_pruned_within_the_memory_of_a_gpu(quality, limit, monkeypatch):
    """With the batches, blocks and panels of a GPU, and the inputs of down_proj computed twice, as where they
    do not fit. The layer itself and the next layer, which is on its way, lie beside what is counted. The
    hidden states of the dense model, what is kept of its layer, and the weights of the outputs lie in main
    memory. The memory inside of kernels and libraries is not counted."""
    monkeypatch.setattr(stream, "TOKENS_PER_BATCH", {"cpu": 8192 // NARROWER})
    monkeypatch.setattr(hessian, "PANEL_COLUMNS", {"cpu": 2048 // NARROWER})
    monkeypatch.setattr(layer_pass, "KEPT_SHARE", 0)
    monkeypatch.setattr(importance, "CHUNK", importance.CHUNK // NARROWER**2)
    monkeypatch.setattr(cholesky, "CPU_BLOCK", cholesky.GPU_BLOCK // NARROWER)
    monkeypatch.setattr(solve, "products_on", lambda device: torch.bfloat16)
    monkeypatch.setattr(shifted_inverse, "ROWS", shifted_inverse.ROWS // NARROWER)
    monkeypatch.setattr(invariance, "CHECKED_TOKENS", invariance.CHECKED_TOKENS // NARROWER)
    monkeypatch.setattr(cholesky, "WHOLE", cholesky.WHOLE // NARROWER)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1, head_dim=8)
    model = small_model("llama", **sizes, num_attention_heads=HIDDEN // 8, num_key_value_heads=4)
    model = model.to(torch.bfloat16)
    layer = sum(parameter.nbytes for parameter in model.model.layers.parameters())
    recipe = Recipe().with_quality(quality).replace(steps=2, product_dtype="bfloat16")
    tokens = torch.randint(0, model.config.vocab_size, (128, SEQLEN))
    with Peak() as memory, torch.no_grad():
        drot.prune(model, recipe, calibration=tokens, device="cpu", dtype="bfloat16")
    states = 2 * tokens.numel() * HIDDEN
    assert 4 * INNER**2 + 2 * states < memory.peak  # H of down_proj, the stream and what is kept of the layer
    outputs = sum(len(parameter) for parameter in model.model.layers.parameters() if parameter.dim() == 2)
    in_main_memory = 4 * outputs + (0 if quality == "fast" else 2 * states)
    assert (memory.peak - in_main_memory + 2 * layer) * NARROWER**2 < limit
