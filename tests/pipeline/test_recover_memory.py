"""The memory of a block recovery of a layer with LLaMA-3-70B's shapes, counted on tensors without storage."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drot.model.decoder import DecoderModel
from drot.pipeline import kept_weights
from drot.pipeline.kept_weights import TRAINED_BYTES, KeptWeights
from drot.pipeline.recover import _relative_error

CONFIG = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    num_hidden_layers=1,
    vocab_size=1,
    attn_implementation="sdpa",
)
NSAMPLES, SEQLEN, BATCH = 128, 2048, 4


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of the tracker


@pytest.fixture(autouse=True)
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def half(values):
    return values.view(-1)[::2]


def take_half(parameter, values):
    """As `take_kept`, with the memory of its mask."""
    kept = parameter.detach() != 0
    return half(values).clone() if kept.numel() else values


def test_a_70b_layer_recovers_within_30_gb(monkeypatch):
    """Counts the layer, its training and the calibration inputs, and what two steps allocate through torch.

    The targets are in main memory. The internal memory of kernels and libraries is not counted.
    """
    # each reads values, of which such tensors have none
    monkeypatch.setattr(kept_weights, "_root_mean_square", lambda values: 1.0)
    monkeypatch.setattr(kept_weights, "take_kept", take_half)
    monkeypatch.setattr(kept_weights, "put_kept", lambda parameter, values: half(parameter).copy_(values))

    with FakeTensorMode(), MemTracker() as tracker:
        layer = DecoderModel(LlamaForCausalLM(CONFIG).eval()).layers[0]
        inputs = torch.empty(NSAMPLES, SEQLEN, CONFIG.hidden_size, dtype=torch.bfloat16)
        position_ids = torch.arange(SEQLEN)[None]
        embeddings = LlamaRotaryEmbedding(CONFIG)(inputs[:1], position_ids)
        targets = torch.empty(BATCH, SEQLEN, CONFIG.hidden_size, dtype=torch.bfloat16)
        training = KeptWeights([layer])
        best = training.state()
        with training.running():
            for _ in range(2):  # the moments exist after the first step
                tracker.reset_mod_stats()
                kwargs = dict(position_embeddings=embeddings, position_ids=position_ids)
                output = layer(inputs[:BATCH], kwargs)
                _relative_error(output, targets).backward()
    weights = sum(parameter.numel() for parameter in layer.module.parameters())
    assert sum(tensor.nbytes for tensor in best) == 2 * weights
    trained = TRAINED_BYTES // 2 * weights  # of 2:4
    stored = 2 * 2 * weights + trained + inputs.numel() * 2  # the docstring of recover_layer
    (peak,) = (sum(kinds.values()) / 2 for kinds in tracker.get_tracker_snapshot("peak").values())
    print(f"{peak / 1e9:.1f} GB, of which {stored / 1e9:.1f} are stored")
    assert stored < peak < 30e9
