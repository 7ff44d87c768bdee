"""What is static about a model on one rank, as providers and their probe see it. Imports no torch.

`Provider.accepts` is given these by name, in a mapping. Sizes are this rank's own: heads and widths after
tensor-parallel cutting, experts as expert parallelism shares them out.
"""

from __future__ import annotations

import msgspec


class LinearShape(msgspec.Struct, frozen=True, order=True):
    """One weight [rows, columns] of a linear layer on this rank."""

    rows: int
    columns: int
    fp8: bool


class OpFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The static facts of one rank's model."""

    arch: str = ""
    compute_units: int = 0  # CUs or SMs of the GPU
    dtype: str  # of the rows: "float32", "bfloat16"
    kv_dtype: str  # of the pages: "float32", "bfloat16", "fp8_e4m3"
    fp8_dialect: str  # "fn", "fnuz", "none"
    activation: str  # of FP8 products: "bf16", "fp8_1x128"
    tp: int
    hidden_size: int
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    page_size: int
    key_heads: int  # of Gated DeltaNet, as the next five
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate_activation: str
    num_experts: int  # that the router chooses from; 0 in dense models, as the next six
    local_experts: int  # expert slots of this rank, whose weights it holds
    top_k: int
    renormalise: bool
    expert_width: int
    expert_fp8: bool
    fp8_dispatch: bool = False  # experts get rows that were quantised before they were sent
    mlp_width: int  # of the dense MLP or the shared expert
    linears: tuple[LinearShape, ...]  # every shape once
    vocab: int = 0  # ids of this rank's logits; 0 where there is no head
    max_rows: int  # of one step
    max_running: int
    max_model_len: int
    draft_tokens: int = 0  # most drafts of a sequence in a step: recurrent states are then kept after some of its rows

    def mapping(self) -> dict[str, object]:
        """Return them by name, for `Provider.accepts`."""
        return msgspec.structs.asdict(self)
