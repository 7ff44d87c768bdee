"""Text <-> token ids of a byte-level BPE checkpoint, with the exact bytes behind every id."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as BpeTokenizer

from rocm_serve.checkpoint.reader import naming, read_object
from rocm_serve.errors import UserError

LONG_TEXT_CHARS = 8_000  # a longer text takes more than some 10 ms, and is worth a thread
_HEAD_CHARS = 8  # for each token of a limit: few texts have so many characters a token
_NFC_SHRINKS = 4  # no canonical composition makes a text more than 3.5 times shorter in UTF-8


def byte_of_char() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to the byte that it stands for.

    Source: GPT-2's byte alphabet. Printable Latin-1 stands for itself; the other 68 bytes, in order, are 256, 257, ...
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in own}
    shifted = [byte for byte in range(256) if byte not in set(own)]
    table.update({chr(256 + place): byte for place, byte in enumerate(shifted)})
    return table


@dataclass(frozen=True)
class TokenizerFiles:
    """What tokenizer_config.json and its neighbours say. Strings are absent (None), never empty."""

    tokenizer_class: str
    eos_token: str | None
    bos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int | None
    chat_template: str | None


class Tokenizer:
    """A checkpoint's tokenizer. Never adds a BOS by itself; special tokens written in a text become their ids.

    `vocab_used` is one more than the highest id that has a meaning; rows of lm_head above it are padding.
    """

    def __init__(self, bpe: BpeTokenizer, files: TokenizerFiles) -> None:
        if bpe.decoder is None or not _is_byte_level(json.loads(bpe.decoder.__getstate__())):
            raise UserError("tokenizer.json has no ByteLevel decoder; only byte-level BPE tokenizers are supported")
        self._bpe = bpe
        self.files = files
        added = bpe.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self._pieces = _pieces(bpe.get_vocab(with_added_tokens=True), {i: t.content for i, t in added.items()})
        self.vocab_used = len(self._pieces)
        self.has_gaps = None in self._pieces  # ids below `vocab_used` without a meaning
        self._longest = max((len(piece) for piece in self._pieces if piece), default=1)
        self._visible = [
            b"" if piece is None or token_id in self.special_ids else piece
            for token_id, piece in enumerate(self._pieces)
        ]
        self._all = [b"" if piece is None else piece for piece in self._pieces]

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of a model directory.

        Errors: UserError when tokenizer.json is missing, unreadable, or not byte-level BPE.
        """
        path = Path(directory) / "tokenizer.json"
        with naming(path):
            is_there = path.is_file()
        if not is_there:
            raise UserError(f"{path} does not exist; a fast tokenizer (tokenizer.json) is needed")
        try:
            bpe = BpeTokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises bare Exception for every fault of the file
            raise UserError(f"{path} cannot be read: {error}") from error
        return cls(bpe, read_tokenizer_files(Path(directory)))

    @property
    def eos_token(self) -> str | None:
        return self.files.eos_token

    @property
    def chat_template(self) -> str | None:
        return self.files.chat_template

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of `text`. `add_special_tokens` runs the tokenizer's own post-processor (Qwen's adds none)."""
        if len(text) > LONG_TEXT_CHARS:  # slower for short texts, but it lets go of the GIL: other threads go on
            (encoding,) = self._bpe.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = self._bpe.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def encode_within(self, text: str, limit: int, add_special_tokens: bool = False) -> list[int] | None:
        """Return the ids of `text`; None for a long text whose beginning alone has clearly more than `limit` tokens.

        The beginning of a text has the tokens that it has in the whole, but for the last word, which the cut may split.
        """
        head = _HEAD_CHARS * limit
        if len(text) > 2 * head and len(self.encode(text[:head])) > limit + limit // 4 + 64:
            return None
        return self.encode(text, add_special_tokens)

    def max_bytes(self, num_tokens: int) -> int:
        """Return a size in UTF-8 above which no text has as few as `num_tokens` tokens, normalised (NFC) or not."""
        return num_tokens * self._longest * _NFC_SHRINKS

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Added tokens that are not special (`<think>`, `<tool_call>`) stay under `skip_special_tokens`.
        """
        return self.bytes_of(ids, skip_special_tokens).decode("utf-8", "replace")

    def bytes_of(self, ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of `ids` joined. An id without a meaning has none. Errors: IndexError past `vocab_used`."""
        table = self._visible if skip_special_tokens else self._all
        return b"".join([table[token_id] for token_id in ids])

    def pieces(self, skip_special_tokens: bool) -> Sequence[bytes]:
        """Return the bytes of every id, as a table for tight loops."""
        return self._visible if skip_special_tokens else self._all

    def knows(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_used and self._pieces[token_id] is not None

    def id_of(self, token: str) -> int | None:
        found: int | None = self._bpe.token_to_id(token)
        return found

    def token_string(self, token_id: int) -> str:
        """Return one token as text; `bytes:\\xe2\\x80` (OpenAI's spelling) when it is not UTF-8 by itself."""
        piece = self._all[token_id] if 0 <= token_id < self.vocab_used else b""
        if not piece:
            return f"token_id:{token_id}"
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Read tokenizer_config.json and chat_template.jinja (which wins over the field of the same name)."""
    config = read_object(directory / "tokenizer_config.json") or {}
    limit = config.get("model_max_length")
    return TokenizerFiles(
        tokenizer_class=str(config.get("tokenizer_class", "PreTrainedTokenizerFast")),
        eos_token=_token_text(config.get("eos_token")),
        bos_token=_token_text(config.get("bos_token")),
        pad_token=_token_text(config.get("pad_token")),
        unk_token=_token_text(config.get("unk_token")),
        model_max_length=limit if isinstance(limit, int) else None,
        chat_template=_template_text(directory, config.get("chat_template")),
    )


def _token_text(value: object) -> str | None:
    """A token is written as a string or as an AddedToken object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _template_text(directory: Path, field: object) -> str | None:
    path = directory / "chat_template.jinja"
    try:
        with naming(path):
            if path.exists():
                return path.read_text(encoding="utf-8") or None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read as UTF-8: {error}") from error
    if isinstance(field, list):  # several named templates: [{"name": "default", "template": "..."}, ...]
        named = {entry.get("name"): entry.get("template") for entry in field if isinstance(entry, dict)}
        field = named.get("default")
    return field if isinstance(field, str) and field else None


def _is_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(part) for part in decoder.get("decoders", []))
    return decoder.get("type") == "ByteLevel"


def _pieces(vocab: dict[str, int], added: dict[int, str]) -> list[bytes | None]:
    alphabet = byte_of_char()
    pieces: list[bytes | None] = [None] * (max([*vocab.values(), *added], default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id in added:
            continue
        try:
            pieces[token_id] = bytes([alphabet[char] for char in token])
        except KeyError as error:
            raise UserError(f"token {token_id} of tokenizer.json is not written in the byte alphabet") from error
    for token_id, content in added.items():
        pieces[token_id] = content.encode("utf-8")
    return pieces
