"""TP 1/2/4 x PP 1/2 as processes over HTTP: each against HF under the noise rule, stages bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.e2e.harness import Scored, Server, score
from tests.e2e.hf import Reference
from tests.e2e.test_hf_parity import check_prompts, prompt_of

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

LENGTHS = (1, 3, 63, 64, 65, 130)
NEW_TOKENS = 6


@pytest.mark.timeout(900)
def test_every_topology_equals_hf_and_stages_change_no_bit(
    server_of: Callable[..., Server], reference_of: Callable[[str], Reference]
) -> None:
    reference = reference_of("text-fp8")
    prompts = [prompt_of(reference, length, seed=length) for length in LENGTHS]
    answers: dict[tuple[int, int], list[Scored]] = {}
    for tp, pp in product((1, 2, 4), (1, 2)):
        with server_of("text-fp8", "--dtype", "float32", "--tp", tp, "--pp", pp) as server:
            print(f"tp {tp} x pp {pp}: ", end="")
            check_prompts(server, reference, LENGTHS)
            answers[tp, pp] = score(server, prompts, max_tokens=NEW_TOKENS)
    for tp in (1, 2, 4):
        assert answers[tp, 1] == answers[tp, 2], f"tp {tp}: two stages give other bits than one"
    for tp in (2, 4):
        assert [a.tokens for a in answers[tp, 1]] == [a.tokens for a in answers[1, 1]], f"tp {tp}: other tokens"
