from __future__ import annotations

from rocm_serve.server.logprobs import LOWEST, LogprobWriter, Scored, prompt_logprob_object
from rocm_serve.types import TokenLogprob
from tests.server.http import TOKENIZER, VOCAB
from tests.tokens.tiny import TWIN

ADDED = TOKENIZER.id_of(TWIN)
ORDINARY = next(i for i in range(VOCAB) if i != ADDED and TOKENIZER.bytes_of([i]) == TWIN.encode())


def top_of(entry: TokenLogprob, num_top: int = 3) -> dict[str, float]:
    writer = LogprobWriter(TOKENIZER, num_top)
    lists = writer.lists([Scored(entry.token, entry, 0)])
    top = writer.top(entry)
    assert lists["top_logprobs"] == [top] and lists["token_logprobs"] == [top[TOKENIZER.token_string(entry.token)]]
    return top


def test_two_ids_that_read_alike_stay_two_entries_so_the_maximum_stays_true() -> None:
    assert ADDED is not None
    top = top_of(TokenLogprob(ORDINARY, -2.0, (ADDED, ORDINARY, 65), (-0.5, -2.0, -3.0)))
    assert top == {TWIN: -2.0, f"token_id:{ADDED}": -0.5, TOKENIZER.token_string(65): -3.0}
    top = top_of(TokenLogprob(65, -3.0, (ADDED, ORDINARY), (-0.5, -2.0)))
    assert top == {TOKENIZER.token_string(65): -3.0, TWIN: -0.5, f"token_id:{ORDINARY}": -2.0}


def test_the_token_itself_is_there_besides_the_best_ones_asked_for() -> None:
    entry = TokenLogprob(70, -9.0, (65, 66, 67), (-1.0, -2.0, -3.0))
    assert len(top_of(entry, 2)) == 3 and len(top_of(entry, 0)) == 1
    assert len(top_of(TokenLogprob(65, -1.0, (65, 66), (-1.0, -2.0)), 2)) == 2


def test_minus_infinity_is_written_as_a_number() -> None:
    assert top_of(TokenLogprob(65, float("-inf"), (66,), (0.0,))) == {
        TOKENIZER.token_string(65): LOWEST,
        TOKENIZER.token_string(66): 0.0,
    }


def test_a_prompt_position_names_rank_and_token() -> None:
    entry = TokenLogprob(70, -9.0, (65, 66, 67), (-1.0, -2.0, -3.0))
    found = prompt_logprob_object(TOKENIZER, entry, 2)
    assert found["70"] == {"logprob": -9.0, "rank": None, "decoded_token": TOKENIZER.token_string(70)}
    assert found["66"]["rank"] == 2 and set(found) == {"70", "65", "66"}


def test_chat_entries_name_bytes_and_the_best_others() -> None:
    (entry,) = LogprobWriter(TOKENIZER, 2).chat_content([Scored(70, TokenLogprob(70, -9.0, (65, 66), (-1.0, -2.0)), 0)])
    assert entry["logprob"] == -9.0 and bytes(entry["bytes"]) == TOKENIZER.bytes_of([70])  # type: ignore[call-overload]
    top = entry["top_logprobs"]
    assert isinstance(top, list) and [one["token"] for one in top] == [TOKENIZER.token_string(i) for i in (65, 66)]
