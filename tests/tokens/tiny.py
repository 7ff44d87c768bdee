"""A small byte-level BPE of the same build as Qwen's, trained in the test."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BpeTokenizer

from rocm_serve.tokens.tokenizer import Tokenizer, byte_of_char, read_tokenizer_files

CORPUS = [
    "Question: how many eggs are left? Answer: there are 12 eggs left in the basket.",
    "The quick brown fox jumps over the lazy dog, and then the dog jumps over the fox.",
    "naïve café 你好世界 🙂🙃 \n\n\tdef f(x):\n    return x + 1\n",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TWIN = "你"  # an added token that reads like the ordinary one
LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    "{{ raise_exception('reasoning_effort must be low or high, not ' ~ reasoning_effort) }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def build_bpe() -> BpeTokenizer:
    bpe = BpeTokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LETTERS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(byte_of_char()), show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    bpe.add_tokens([AddedToken(text, special=False, normalized=False) for text in [*PLAIN, TWIN]])
    return bpe


def write_tokenizer(directory: Path) -> Path:
    build_bpe().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": 262144,
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        write_tokenizer(Path(name))
        return Tokenizer(build_bpe(), read_tokenizer_files(Path(name)))
