"""Token ids to text, bit by bit: a character leaves when its last byte is there."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rocm_serve.tokens.tokenizer import Tokenizer

_LONGEST_CHAR_BYTES = 4


class Detokenizer:
    """Incremental decoder of one token sequence.

    The deltas and the flush, joined, equal the decode of all bytes at once. An unfinished character is kept back, so
    U+FFFD comes only for bytes that no later byte can mend, or from `flush`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._pieces: Sequence[bytes] = tokenizer.pieces(skip_special_tokens)
        self._raw_pieces: Sequence[bytes] = tokenizer.pieces(False)
        self._rest = b""

    def prime(self, prompt: Sequence[int]) -> None:
        """Take over a character that the prompt has begun; the first delta then completes it."""
        tail = b""
        for token in reversed(prompt):
            tail = self._raw_pieces[token] + tail
            if len(tail) >= _LONGEST_CHAR_BYTES:
                break
        self._rest = _unfinished(tail)

    def feed_prompt(self, token: int) -> str:
        """Return what one prompt token adds. Special tokens of a prompt stay: an echo shows what was sent."""
        return self._push(self._raw_pieces[token])

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens complete."""
        pieces = self._pieces
        if len(tokens) == 1:
            return self._push(pieces[tokens[0]])
        return self._push(b"".join([pieces[token] for token in tokens]))

    def flush(self) -> str:
        """Return the kept bytes as U+FFFD; the sequence is over."""
        text = self._rest.decode("utf-8", "replace")
        self._rest = b""
        return text

    def _push(self, piece: bytes) -> str:
        data = self._rest + piece if self._rest else piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text


def _unfinished(tail: bytes) -> bytes:
    """Return the last bytes of `tail` that begin a character without ending it."""
    for length in range(min(_LONGEST_CHAR_BYTES - 1, len(tail)), 0, -1):
        part = tail[-length:]
        if part[0] < 0xC0:
            continue
        _, used = codecs.utf_8_decode(part, "replace", False)
        return part[used:]
    return b""
