"""The declaration that those of other families are changes of."""

from drot.model.family import Family, InputGroup, LinearSpec

#: Pre-norm attention with grouped queries, then a pre-norm gated MLP. The norms of each head in Qwen3, and
#: the factor of the queries by their position in Ministral 3, act on the outputs of q_proj and k_proj, which
#: are not rotated.
LLAMA = Family(
    models="LLaMA 1–3",
    attention="self_attn",
    mlp="mlp",
    untouched=("self_attn.q_norm", "self_attn.k_norm"),
    groups=(
        InputGroup(
            name="attention",
            norm="input_layernorm",
            linears=(
                LinearSpec("self_attn.q_proj", ("query", "hidden"), input="r1"),
                LinearSpec("self_attn.k_proj", ("kv", "hidden"), input="r1"),
                LinearSpec("self_attn.v_proj", ("kv", "hidden"), input="r1", output="r2"),
            ),
        ),
        InputGroup(
            name="o",
            linears=(LinearSpec("self_attn.o_proj", ("hidden", "query"), input="r2", output="r1"),),
        ),
        InputGroup(
            name="mlp",
            norm="post_attention_layernorm",
            linears=(
                LinearSpec("mlp.gate_proj", ("mlp", "hidden"), input="r1"),
                LinearSpec("mlp.up_proj", ("mlp", "hidden"), input="r1"),
            ),
        ),
        InputGroup(
            name="down",
            linears=(LinearSpec("mlp.down_proj", ("hidden", "mlp"), input="r3", output="r1"),),
        ),
    ),
)
