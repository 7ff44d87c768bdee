"""Why a stage's steps are not captured: ops that walk the batch on the host, collectives that meet there."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.executor.graphs import lost_by_reference, prompt_refusal, refusal
from rocm_serve.ops.bind import OPS, Binding
from rocm_serve.parallel.comm import Comm, GlooComm, NcclComm, SoloComm, ThreadComm
from rocm_serve.parallel.exchange.all_gather import AllGatherExchange
from rocm_serve.parallel.exchange.contract import ExchangeSpec, ExpertExchange
from rocm_serve.parallel.exchange.local import LocalExchange
from rocm_serve.parallel.exchange.make import make_exchange
from rocm_serve.parallel.exchange.mori import MoriExchange

BY_TRITON = [Binding(op, "triton", ()) for op in OPS]


def exchange(name: str) -> ExpertExchange:
    spec = ExchangeSpec(name, 1, 4, 2, 8, capacity=9, dtype=torch.float32)
    return make_exchange(spec, SoloComm(), row_multiple=1)


def bound(**providers: str) -> list[Binding]:
    return [Binding(line.op, providers.get(line.op, "triton"), ()) for line in BY_TRITON]


def test_ops_by_kernels_and_collectives_of_gpus_can_be_captured() -> None:
    assert refusal(BY_TRITON, SoloComm(), [exchange("local"), exchange("all_gather")]) is None
    assert NcclComm.graph_refusal is None


@pytest.mark.parametrize("op", ["linear", "rms_norm", "attention_prefill", "log_sum_exp", "gdn_step"])
def test_a_reference_that_reads_no_host_copy_or_does_not_decode_is_no_reason(op: str) -> None:
    assert refusal(bound(**{op: "reference"}), SoloComm(), []) is None


@pytest.mark.parametrize(
    "op", ["attention_decode", "gdn_decode", "causal_conv", "kv_write", "moe_experts", "draw_token"]
)
def test_a_reference_that_walks_the_batch_is_a_reason_in_one_layer_too(op: str) -> None:
    said = "by reference reads the batch on the host"
    assert refusal(bound(**{op: "reference"}), SoloComm(), []) == f"{op} {said}"
    layer = f"layers.3.{op}"
    assert refusal([*BY_TRITON, Binding(layer, "reference", ())], SoloComm(), []) == f"{layer} {said}"


@pytest.mark.parametrize(
    ("kind", "why"),
    [(GlooComm, "gloo's collectives run on the host"), (ThreadComm, "simulated ranks meet on the host")],
)
def test_collectives_of_the_host_are_a_reason(kind: type[Comm], why: str) -> None:
    comm = kind.__new__(kind)
    assert refusal(BY_TRITON, comm, []) == why


def test_exchanges_that_ask_the_host_are_a_reason() -> None:
    found = refusal(BY_TRITON, SoloComm(), [exchange("local"), exchange("torch")])
    assert found is not None and found.startswith("the exchange torch has the host count")
    assert MoriExchange.graph_refusal is not None
    assert LocalExchange.graph_refusal is None and AllGatherExchange.graph_refusal is None


@pytest.mark.parametrize("op", OPS)
def test_what_a_reference_costs_is_what_is_refused(op: str) -> None:
    lost = lost_by_reference(op)
    steps = refusal(bound(**{op: "reference"}), SoloComm(), []) is not None
    assert ("no step is captured" in (lost or "")) == steps
    assert (lost is not None) == (steps or prompt_refusal(bound(**{op: "reference"})) is not None)


@pytest.mark.parametrize("op", ["attention_prefill", "gdn_chunk", "causal_conv", "moe_experts"])
def test_prompts_by_others_than_triton_are_not_captured_in_one_layer_too(op: str) -> None:
    assert prompt_refusal(BY_TRITON) is None
    for line in (Binding(f"layers.3.{op}", "reference", ()), Binding(f"layers.3.{op}", "aiter", ())):
        said = prompt_refusal([*BY_TRITON, line])
        assert said == f"layers.3.{op}: only those by triton ask the host for nothing"


def test_an_op_that_is_new_is_a_reason_until_somebody_has_looked_at_its_reference() -> None:
    assert refusal([Binding("new_op", "reference", ())], SoloComm(), []) is not None
