from __future__ import annotations

import pytest
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models

from rocm_serve.messages import EffectiveLimits
from rocm_serve.server.choices import Checker
from rocm_serve.server.errors import ApiError
from rocm_serve.tokens.tokenizer import Tokenizer
from tests.server.http import TOKENIZER, make_info

LIMITS = EffectiveLimits(40, 4, 512, 16, 10, 4)


def test_ids_that_fall_in_a_gap_of_the_vocabulary_are_refused() -> None:
    bpe = BpeTokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    bpe.decoder = decoders.ByteLevel()
    checker = Checker(Tokenizer(bpe, TOKENIZER.files), make_info(vocab_used=4), LIMITS)
    checker.check_ids((0, 3, 0), "prompt")
    with pytest.raises(ApiError, match="token id 2 is not in the vocabulary"):
        checker.check_ids((0, 2), "prompt")


def test_ids_past_the_rows_of_the_model_are_refused_even_if_the_tokenizer_knows_them() -> None:
    checker = Checker(TOKENIZER, make_info(vocab_used=100), LIMITS)
    checker.check_ids(tuple(range(100)), "prompt")
    for bad in (100, -1, 10**30):
        with pytest.raises(ApiError, match=f"token id {bad} is not in the vocabulary \\(0 to 99\\)"):
            checker.check_ids((5, bad), "prompt")
