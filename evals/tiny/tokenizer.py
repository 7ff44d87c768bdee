"""The tokenizer of the checkpoint: the project's own pipeline and added tokens, with merges learnt on the problems."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from evals.tiny.documents import chat_text, shot_of
from evals.tiny.generator import TRAIN_MIX, problems
from rocm_serve.checkpoint.synthetic_configs import SpecialIds
from rocm_serve.checkpoint.synthetic_corpus import corpus
from rocm_serve.checkpoint.synthetic_tokenizer import ADDED_TOKENS, write_tokenizer

PROBLEMS = 30_000


def learn(path: Path, rows: int, max_position: int) -> SpecialIds:
    """Write tokenizer.json and its companions to `path`: some of the `rows` of the embedding stay without a token."""
    ids = write_tokenizer(path, rows=rows, max_position=max_position)
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    learnt = Tokenizer(models.BPE())
    learnt.normalizer, learnt.pre_tokenizer = plain.normalizer, plain.pre_tokenizer
    learnt.post_processor, learnt.decoder = plain.post_processor, plain.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=plain.get_vocab_size(with_added_tokens=False),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    learnt.train_from_iterator(texts(), trainer)
    learnt.add_tokens([AddedToken(name, normalized=False, special=special) for name, special in ADDED_TOKENS.items()])
    assert learnt.token_to_id("<|endoftext|>") == ids.endoftext, "as many ordinary tokens as the project's own"
    learnt.save(str(path / "tokenizer.json"), pretty=True)
    return ids


def texts() -> Iterator[str]:
    """Yield problems in the format of training, and a little of the project's own text for everything else."""
    rng = random.Random("tokenizer")
    for problem in itertools.islice(problems(rng, "train", 18, TRAIN_MIX), PROBLEMS):
        yield shot_of(problem.question, problem.answer)
    yield chat_text(problem)[0]
    yield from itertools.islice(corpus(), 400)
