"""HF's side of parity reads a checkpoint as HF's own from_pretrained does, and so does the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM

from evals.references.hf_states import load
from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import load_stage
from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.models.qwen3_5.spec import parse_config, stage_params
from rocm_serve.parallel.layout import shape_at
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import hf_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("head", ["of its own", "equal", "none"])
def test_a_checkpoint_that_says_tied(head: str, tmp_path: Path) -> None:
    hf_model(moe=False, seed=3).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(tmp_path / "model.safetensors")
    own = tensors.pop(HEAD)
    if head != "none":
        tensors[HEAD] = own if head == "of its own" else tensors[EMBEDDING].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = own if head == "of its own" else tensors[EMBEDDING]

    theirs = Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read = load(tmp_path)
    for model in (theirs, read):
        assert torch.equal(model.get_output_embeddings().weight, expected)
        assert torch.equal(model.get_input_embeddings().weight, tensors[EMBEDDING])

    coord = Mesh(1, 1).coord(0)
    with CheckpointReader(tmp_path) as reader:
        facts = parse_config(*reader.config())
        params = stage_params(facts, coord, formats=stage_catalogue(reader, facts, coord, mtp=False), mtp=False)
        into = {name: torch.empty(shape_at(param, coord.place)) for name, param in params.items()}
        load_stage(reader, facts, coord, params, into)
    assert torch.equal(into[HEAD], expected) and torch.equal(into[EMBEDDING], tensors[EMBEDDING])
