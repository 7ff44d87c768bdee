"""The tokenizer of a synthetic checkpoint: byte-level BPE of the Qwen3.5 form with its added tokens. No torch."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from rocm_serve.checkpoint.synthetic_configs import SpecialIds
from rocm_serve.checkpoint.synthetic_corpus import corpus

# Qwen3.5: marks belong to letter runs, digits are split one by one.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In the published order. Those marked False survive `skip_special_tokens`: the parsers of answers need them.
ADDED_TOKENS: dict[str, bool] = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|object_ref_start|>": True,
    "<|object_ref_end|>": True,
    "<|box_start|>": True,
    "<|box_end|>": True,
    "<|quad_start|>": True,
    "<|quad_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|vision_pad|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<|fim_prefix|>": False,
    "<|fim_middle|>": False,
    "<|fim_suffix|>": False,
    "<|fim_pad|>": False,
    "<|repo_name|>": False,
    "<|file_sep|>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
    "<|audio_start|>": True,
    "<|audio_end|>": True,
    "<tts_pad>": True,
    "<tts_text_bos>": True,
    "<tts_text_eod>": True,
    "<tts_text_bos_single>": True,
    "<|audio_pad|>": True,
}

_UNUSED_ROWS = 31  # the published matrices are larger than the vocabulary, too


def write_tokenizer(path: Path, *, rows: int, max_position: int) -> SpecialIds:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return the ids that configs name.

    Some of the `rows` of the embedding stay without a token.
    """
    tokenizer = train(rows - len(ADDED_TOKENS) - _UNUSED_ROWS)
    tokenizer.save(str(path / "tokenizer.json"), pretty=True)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    ids = {name: vocabulary[name] for name in ADDED_TOKENS}
    config = _tokenizer_config(ids, max_position)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (path / "tokenizer_config.json").write_text(text, encoding="utf-8")
    template = resources.files("rocm_serve.checkpoint").joinpath("synthetic_template.jinja")
    (path / "chat_template.jinja").write_text(template.read_text(encoding="utf-8"), encoding="utf-8")
    return SpecialIds(
        endoftext=ids["<|endoftext|>"],
        im_end=ids["<|im_end|>"],
        image=ids["<|image_pad|>"],
        video=ids["<|video_pad|>"],
        vision_start=ids["<|vision_start|>"],
        vision_end=ids["<|vision_end|>"],
    )


def train(ordinary: int) -> Tokenizer:
    """Train `ordinary` byte-level BPE tokens and put the added tokens behind them."""
    tokenizer = Tokenizer(models.BPE(fuse_unk=False, byte_fallback=False, ignore_merges=False))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ordinary,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    assert tokenizer.get_vocab_size() == ordinary, "the corpus is too small for this vocabulary"
    tokenizer.add_tokens(
        [AddedToken(name, normalized=False, special=special) for name, special in ADDED_TOKENS.items()]
    )
    return tokenizer


def _tokenizer_config(ids: dict[str, int], max_position: int) -> dict[str, object]:
    added = {
        str(ids[name]): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for name, special in ADDED_TOKENS.items()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": max_position,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is, for every model type
        "unk_token": None,
    }
