"""The sampler against an independent model: numpy, float64, plain-integer random numbers, written here from the
documented order of operations.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from rocm_serve.executor import sampler
from rocm_serve.executor.sample_rows import SampleRow, SamplingFailed, TokenCounts
from rocm_serve.ops.sampling.cases import CASES
from rocm_serve.parallel.comm import Comm, CountingComm, SoloComm, run_ranks
from tests.executor.sampler_model import (
    DEVICES,
    GREEDY_FIELDS,
    OUTPUT,
    PROMPT,
    SAMPLED_FIELDS,
    USED,
    V,
    distribution,
    make,
    normal,
    predicted,
    row,
    sample,
    shard,
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", [*GREEDY_FIELDS, *SAMPLED_FIELDS])
def test_every_field_gives_the_predicted_token(name: str, tp: int, device: str) -> None:
    """100 rows of each field; none may differ except where the prediction itself wins by less than 1e-4."""
    fields = {"temperature": 0.0} | GREEDY_FIELDS[name] if name in GREEDY_FIELDS else SAMPLED_FIELDS[name]
    logits = normal(100, seed=tp)
    logits[:, [*PROMPT, *OUTPUT]] += 6.0
    seeds = random.Random(name)
    rows = [row(9 + i, PROMPT, OUTPUT, seed=seeds.getrandbits(64), choice=i % 3, **fields) for i in range(100)]
    expected = [predicted(x, r) for x, r in zip(logits.numpy(), rows, strict=True)]
    tokens = [s.token for s in sample(logits, rows, tp, device=device)]
    assert all(got == want for got, (want, gap) in zip(tokens, expected, strict=True) if gap > 1e-4)
    assert sum(gap > 1e-4 for _, gap in expected) >= 98
    if name not in ("nothing", "plain", "bias on padding", "min_tokens reached"):
        plain = [row(r.position, seed=r.params.seed, choice=r.params.choice, temperature=0.0) for r in rows]
        if name in SAMPLED_FIELDS:
            plain = [row(r.position, seed=r.params.seed, choice=r.params.choice) for r in rows]
        assert tokens != [s.token for s in sample(logits, plain, tp)], f"{name} changed nothing in 100 rows"


PROBABILITIES = np.array([0.4, 0.25, 0.12, 0.08, 0.06, 0.04, 0.03, 0.02])


def log_probabilities(vocab: int) -> torch.Tensor:
    """Put PROBABILITIES on ids 10, 30, 50, ... (over several shards), next to nothing elsewhere."""
    x = np.full(vocab, -60.0)
    x[10 : 10 + 20 * 8 : 20] = np.log(PROBABILITIES)
    return torch.tensor(x, dtype=torch.float32)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"top_k": 1}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 2000, "top_p": 0.999}, 8),
        ({"top_p": 0.0}, 1),
        ({"top_p": 0.39}, 1),
        ({"top_p": 0.41}, 2),
        ({"top_p": 0.649}, 2),
        ({"top_p": 0.651}, 3),
        ({"top_p": 0.999}, 8),
        ({"min_p": 0.31}, 1 + 1),
        ({"min_p": 0.29}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.83}, 2),
        ({"top_k": 3, "top_p": 0.85}, 3),
        ({"top_k": 6, "top_p": 0.9, "min_p": 0.19}, 4),
        ({"temperature": 0.5, "min_p": 0.31}, 2),
        ({"temperature": 2.0, "min_p": 0.31}, 6),
        ({"temperature": 2.0, "top_k": 4, "min_p": 0.31}, 4),
    ],
)
def test_support_is_exactly_the_ids_that_the_filters_keep(fields: dict[str, object], size: int, tp: int) -> None:
    logits = log_probabilities(V).repeat(640, 1)
    rows = [row(i, seed=11, **fields) for i in range(640)]
    expected = {int(i) for i in distribution(logits[0].numpy(), rows[0]).nonzero()[0]}
    assert len(expected) == size, "the prediction is what one counts by hand"
    assert {s.token for s in sample(logits, rows, tp)} == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ties_at_a_boundary_keep_the_lowest_ids(tp: int, device: str) -> None:
    logits = torch.zeros(640, V)
    for fields, size in (({"top_k": 5}, 5), ({"top_k": 100}, 100), ({"top_p": 5.5 / USED}, 6), ({"min_p": 1.0}, USED)):
        seen = {s.token for s in sample(logits, [row(i, **fields) for i in range(640)], tp, device=device)}
        assert seen <= set(range(size))
        assert size > 10 or seen == set(range(size))
        assert len(seen) > size * 0.9
    tied = CASES["tied"](torch.Generator().manual_seed(1), 40, V)
    greedy = sample(tied, [row(temperature=0.0)] * 40, tp, device=device)
    top_1 = sample(tied, [row(top_k=1, seed=s) for s in range(40)], tp, device=device)
    first = np.argmax(tied.numpy()[:, :USED], -1).tolist()
    assert [s.token for s in greedy] == [s.token for s in top_1] == first


def chi_square_deviation(tokens: Sequence[int], probabilities: np.ndarray) -> float:
    """Standard deviations of chi-square above its mean; ids expected fewer than five times are one cell."""
    counts = np.bincount(tokens, minlength=probabilities.size).astype(float)
    expected = probabilities * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    used = expected > 0
    assert counts[~used].sum() == 0
    degrees = used.sum() - 1
    return float((((counts - expected)[used] ** 2 / expected[used]).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6}, {"temperature": 3.0, "top_p": 0.8}, {"top_k": 20, "min_p": 0.02}]
)
@pytest.mark.parametrize("along", ["seed", "position", "choice"])
def test_draws_follow_the_distribution_along_every_key(fields: dict[str, object], along: str) -> None:
    count = 6400
    logits = normal(1, seed=8)
    key: Callable[[int], dict[str, int]] = {
        "seed": lambda i: {"seed": 2**64 - 1 - i},
        "position": lambda i: {"position": i, "seed": 5},
        "choice": lambda i: {"choice": i, "seed": 5},
    }[along]
    rows = [row(**key(i), **fields) for i in range(count)]  # type: ignore[arg-type]
    tokens = [s.token for s in make().sample(logits.repeat(count, 1), rows)]
    assert abs(chi_square_deviation(tokens, distribution(logits[0].numpy(), rows[0]))) < 4.5


def test_filters_that_remove_nothing_draw_the_same_tokens() -> None:
    logits = normal(64)
    plain = sample(logits, [row(seed=i) for i in range(64)])
    for fields in ({"top_k": V}, {"top_k": 5000}, {"top_p": 1.0 - 1e-15}, {"min_p": 1e-30}):
        assert sample(logits, [row(seed=i, **fields) for i in range(64)]) == plain


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1e5, 1e30])
@pytest.mark.parametrize("fields", [{}, {"top_k": 7}, {"top_p": 0.99}])
def test_extreme_temperatures_sample_used_ids(temperature: float, fields: dict[str, object]) -> None:
    logits = normal(64)
    tokens = [s.token for s in sample(logits, [row(seed=i, temperature=temperature, **fields) for i in range(64)])]
    assert all(0 <= token < USED for token in tokens)
    if temperature < 1:
        assert sum(a == b for a, b in zip(tokens, logits[:, :USED].argmax(-1).tolist(), strict=True)) >= 63
    else:
        assert len(set(tokens)) > 20


def mixed_rows(count: int) -> list[SampleRow]:
    kinds = [{"temperature": 0.0}, *SAMPLED_FIELDS.values()]
    return [
        row(5 + i, PROMPT, OUTPUT, seed=i, logprobs=(None, 0, 2, 7)[i % 4], **kinds[i % len(kinds)])
        for i in range(count)
    ]


@pytest.mark.parametrize("case", ["normal", "tied", "peaked"])
def test_bits_of_a_row_do_not_depend_on_its_batch(case: str) -> None:
    """Alone, in another order, among others, before padding rows: the same token and the same bits of log-probs."""
    logits = CASES[case](torch.Generator().manual_seed(4), 70, V)
    rows = mixed_rows(70)
    together = make().sample(logits, rows)
    order = random.Random(1).sample(range(70), 70)
    shuffled = make().sample(logits[order], [rows[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(70)] == together
    assert [make().sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(70)] == together
    assert make().sample(torch.cat([logits[:9], logits[:23] * float("nan")]), rows[:9]) == together[:9]


@pytest.mark.parametrize("at_once", [1, 7, 1000])
@pytest.mark.parametrize("tp", [1, 2])
def test_filtered_rows_draw_the_same_however_many_are_drawn_at_one_time(
    monkeypatch: pytest.MonkeyPatch, at_once: int, tp: int
) -> None:
    """What `DRAWN_ROWS` says changes no token, of whole rows and of candidates, and bounds the rows that are drawn."""
    fields = ({"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.95}, {"top_p": 0.8, "presence_penalty": 0.5})
    rows = [row(5 + i, PROMPT, OUTPUT, seed=i, **fields[i % 4]) for i in range(150)]
    logits, drawn = normal(150), []
    expected = sample(logits, rows, tp)
    assert len({found.token for found in expected}) > 50
    kept_prefix = sampler.reference.kept_prefix

    def kept(values_RW: torch.Tensor, *wishes: torch.Tensor) -> torch.Tensor:
        drawn.append(values_RW.shape)
        return kept_prefix(values_RW, *wishes)

    monkeypatch.setattr(sampler.reference, "kept_prefix", kept)
    monkeypatch.setattr(sampler, "DRAWN_ROWS", at_once)
    assert sample(logits, rows, tp) == expected
    whole = max(shape[0] for shape in drawn if shape[1] == V)
    assert whole == min(at_once, 113), "150 rows, of which 37 or 38 have candidates"
    assert all(shape[0] * 40 <= max(1, at_once) * V for shape in drawn)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads: int) -> None:
    logits, rows = normal(40, 9600), mixed_rows(40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = make(9600, 9000).sample(logits, rows)
        torch.set_num_threads(threads)
        assert make(9600, 9000).sample(logits, rows) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", [2, 4])
def test_shards_change_no_token_and_log_probs_by_rounding_only(case: str, tp: int) -> None:
    logits = CASES[case](torch.Generator().manual_seed(tp), 66, V)
    rows = mixed_rows(66)
    for one, many in zip(sample(logits, rows), sample(logits, rows, tp), strict=True):
        assert one.token == many.token
        assert (one.logprob is None) == (many.logprob is None)
        if one.logprob and many.logprob:
            assert one.logprob.top_ids == many.logprob.top_ids
            assert many.logprob.logprob == pytest.approx(one.logprob.logprob, abs=2e-6)
            assert many.logprob.top_logprobs == pytest.approx(one.logprob.top_logprobs, abs=2e-6)


def test_a_shard_of_padding_only_offers_nothing() -> None:
    logits = normal(33)
    logits[:, 90:] += 50.0
    rows = [replace(r, params=r.params) for r in mixed_rows(33)]
    result = sample(logits, rows, tp=4, used=90)
    assert all(s.token < 90 for s in result)
    assert all(token < 90 for s in result if s.logprob for token in s.logprob.top_ids)
    assert result == sample(logits, rows, tp=4, used=90)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": 2}])
def test_bad_logits_are_an_error_that_names_the_row_on_every_rank(bad: float, fields: dict[str, object]) -> None:
    logits = normal(40)
    logits[37, 100] = bad
    rows = [row(1000 + i, **fields) for i in range(40)]

    def body(comm: Comm) -> str:
        with pytest.raises(SamplingFailed) as caught:
            make(comm=comm).sample(shard(logits, comm), rows)
        return str(caught.value)

    messages = run_ranks(2, body)
    assert messages[0] == messages[1]
    assert "row 37 (token 1037 of its sequence)" in messages[0] and "row 36" not in messages[0]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_mask_over_every_id_is_an_error(fields: dict[str, object]) -> None:
    with pytest.raises(SamplingFailed, match="every token is masked: row 0"):
        make().sample(normal(1), [row(min_tokens=1, eos_token_ids=tuple(range(USED)), **fields)])


def test_no_rows_make_no_collective() -> None:
    comm = CountingComm(SoloComm())
    assert make(comm=comm).sample(normal(32), []) == []
    assert make(comm=comm).prompt_logprobs(lambda x: x, normal(0), [], []) == []
    assert not comm.calls


def test_only_filtered_rows_move_more_than_a_few_numbers() -> None:
    """Bytes sent per rank: 24 a row; candidates for top_k; whole rows for top_p alone."""

    def sent(fields: dict[str, object]) -> int:
        def body(comm: Comm) -> int:
            counting = CountingComm(comm)
            make(comm=counting).sample(shard(normal(32), comm), [row(**fields)] * 32)
            return counting.bytes["all_gather"]

        first, second = run_ranks(2, body)
        assert first == second
        return first

    assert sent({"temperature": 0.0, "presence_penalty": 1.0}) == sent({}) == 32 * 24
    assert sent({"top_k": 20, "top_p": 0.9}) == 32 * (24 + 20 * 16)
    assert sent({"top_p": 0.9}) == 32 * (24 + 4 * V // 2)


def test_kept_counts_give_what_fresh_counts_give() -> None:
    logits, generator = normal(12, seed=6), random.Random(2)
    prompt = [generator.randrange(USED) for _ in range(30)]
    output: list[int] = []
    kept = TokenCounts(prompt)
    for i in range(12):
        fresh = row(30 + i, prompt, output, seed=i, repetition_penalty=1.3, frequency_penalty=0.4)
        (a,) = make().sample(logits[i : i + 1], [fresh])
        (b,) = make().sample(logits[i : i + 1], [replace(fresh, counts=kept)])
        assert a == b
        output.append(a.token)
    assert kept.output(output) == Counter(output)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_up_to_64_bits_draw_their_own_tokens(seed: int) -> None:
    logits = torch.zeros(64, V)
    tokens = [s.token for s in make().sample(logits, [row(i, seed=seed) for i in range(64)])]
    other = [s.token for s in make().sample(logits, [row(i, seed=seed ^ 1) for i in range(64)])]
    assert len(set(tokens)) > 40 and sum(a == b for a, b in zip(tokens, other, strict=True)) < 6


@pytest.mark.slow
def test_the_real_vocabulary_once(capsys: pytest.CaptureFixture[str]) -> None:
    vocab, used, count = 248320, 248077, 32
    logits = normal(count, vocab)
    logits[:, used:] += 100.0
    for fields in ({"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.95}, {"logprobs": 5}):
        rows = [row(i, seed=2**64 - 1, **fields) for i in range(count)]
        sampler = make(vocab, used)
        start = time.perf_counter()
        result = sampler.sample(logits, rows)
        with capsys.disabled():
            print(f"\n{count} rows x {vocab} ids, {fields}: {(time.perf_counter() - start) * 1e3:.0f} ms")
        assert all(s.token < used for s in result)
        assert [s.token for s in sample(logits[:3], rows[:3], tp=2, used=used)] == [s.token for s in result[:3]]
        for i in range(3):
            if (found := result[i].logprob) is not None:
                assert found.logprob == pytest.approx(
                    torch.log_softmax(logits[i].double(), -1)[found.token].item(), abs=1e-5
                )
