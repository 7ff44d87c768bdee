"""Each sampling field over HTTP: its effect is predicted from HF's raw logits and compared with what came.

Where the outcome is decided, the tokens must be the predicted ones; where it is random, they must lie in the predicted
support and be spread as predicted (chi-square over seeds, choices and positions). Every case is also shown to reject:
the same tokens judged without a field, or with it applied in a known wrong way, must fail.

A dense model: its answers hang on no router's near tie. All requests are sent at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.tokens.tokenizer import Tokenizer
from tests.e2e import hf
from tests.e2e.harness import Scored, Server
from tests.e2e.sampling_law import Drawn, Law, judge
from tests.e2e.talk import all_at_once
from tests.server.http import Json

FEW = (40, 133, 359, 620, 777, 1010, 1321, 1777)
PROMPT = [71, 1204, 333, 71, 905, *FEW[:4]]
SEEDS = (11, 2**63 + 5)
CHOICES = 4
LENGTH = 24
ONLY_FEW = dict.fromkeys(FEW, 18.0)  # nothing else comes up, so tokens repeat and penalties bite
SHOWN: dict[str, Any] = {"logprobs": 5, "return_tokens_as_token_ids": True}


@dataclass(frozen=True)
class Case:
    """A law, what is sent for it (its own fields unless given), and wrong laws that the same answer must reject.

    The law without each of `dropped` is wrong too: all its fields unless given, but for temperature 0, without which
    no outcome is certain.
    """

    law: Law
    sent: Mapping[str, object] | None = None
    wrong: Sequence[Law] = ()
    dropped: Sequence[str] | None = None

    @property
    def greedy(self) -> bool:
        return self.law.temperature == 0

    def bodies(self) -> list[dict[str, Any]]:
        wishes = dict(self.law.wishes() if self.sent is None else self.sent)
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "ignore_eos": True, **SHOWN, **wishes}
        return [body] if self.greedy else [body | {"seed": seed, "n": CHOICES} for seed in SEEDS]

    def rejected(self) -> list[Law]:
        plain = Law()
        names = self.dropped
        if names is None:
            names = [name for name in self.law.wishes() if name != "temperature" or not self.greedy]
        without = [replace(self.law, **{name: getattr(plain, name)}) for name in names]
        return [*without, *self.wrong]


GREEDY = Law(temperature=0.0)
PRESENCE = Law(temperature=0.0, logit_bias=ONLY_FEW, presence_penalty=1.5)
FREQUENCY = Law(temperature=0.0, logit_bias=ONLY_FEW, frequency_penalty=0.7)
REPETITION = Law(temperature=0.0, logit_bias=ONLY_FEW, repetition_penalty=1.15)
K_THEN_P = Law(temperature=1.5, top_k=8, top_p=0.6)
P_THEN_MIN = Law(top_p=0.4, min_p=0.3)  # top_p would cut more from what min_p leaves
PENALTIES_THEN_MIN = Law(
    temperature=1.7,
    min_p=0.4,
    presence_penalty=-1.0,
    frequency_penalty=0.6,
    repetition_penalty=1.1,
    logit_bias=ONLY_FEW,
)
CASES = {
    "nothing": Case(Law(), wrong=[Law(temperature=0.75), Law(temperature=1.5), Law(top_p=0.95), Law(top_k=200)]),
    "temperature below one": Case(Law(temperature=0.5)),
    "temperature above one": Case(Law(temperature=1.6)),
    "temperature zero": Case(GREEDY, wrong=[Law()]),
    "temperature near zero": Case(GREEDY, {"temperature": 2e-5, "seed": 3}),
    "top_k": Case(Law(top_k=6), wrong=[Law(top_k=5)]),
    "top_k one": Case(GREEDY, {"top_k": 1, "seed": 3}),
    "top_p": Case(Law(top_p=0.4), wrong=[Law(top_p=0.3)]),
    "top_p near zero": Case(GREEDY, {"top_p": 1e-9, "seed": 3}),
    "min_p": Case(Law(min_p=0.3), wrong=[Law(min_p=0.4)]),
    "min_p one": Case(GREEDY, {"min_p": 1, "seed": 3}),
    "logit_bias": Case(Law(logit_bias={**dict.fromkeys(FEW[:4], 7.0), **dict.fromkeys(FEW[4:], 5.5)})),
    "presence_penalty": Case(
        PRESENCE,
        wrong=[
            replace(PRESENCE, presence_penalty=0.0, frequency_penalty=1.5),
            replace(PRESENCE, output_holds_prompt=True),
        ],
    ),
    "frequency_penalty": Case(
        FREQUENCY,
        wrong=[
            replace(FREQUENCY, frequency_penalty=0.0, presence_penalty=0.7),
            replace(FREQUENCY, output_holds_prompt=True),
        ],
    ),
    "repetition_penalty": Case(REPETITION, wrong=[replace(REPETITION, repetition_spares_prompt=True)]),
    "top_k, then top_p": Case(
        K_THEN_P,
        wrong=[
            replace(K_THEN_P, order=("temperature", "top_p", "top_k")),
            replace(K_THEN_P, order=("top_k", "top_p", "temperature")),
        ],
    ),
    "top_p, then min_p": Case(P_THEN_MIN, wrong=[replace(P_THEN_MIN, order=("min_p", "top_p"))], dropped=["min_p"]),
    "penalties, then min_p": Case(
        PENALTIES_THEN_MIN, wrong=[replace(PENALTIES_THEN_MIN, order=("min_p", "temperature"))]
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompt and the wrong laws are chosen for its weights."""
    return make_checkpoint(tmp_path_factory.mktemp("sampling") / "dense", "dense", "bf16", seed=7, layers=4)


@pytest.fixture(scope="module")
def reference(model: Path) -> hf.Reference:
    return hf.load(model)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_dir(model)


@pytest.fixture(scope="module")
def greedy(reference: hf.Reference) -> list[int]:
    """HF's greedy answer to PROMPT."""
    decoded = reference.greedy(PROMPT, LENGTH)
    assert min(decoded.gaps) > hf.NEAR_TIE, "two right answers would differ: choose another prompt"
    return decoded.tokens


@pytest.fixture(scope="module")
def best_two(reference: hf.Reference) -> tuple[int, int, float]:
    """HF's best and second best token after PROMPT, and how far apart their logits are."""
    best = reference.logits(PROMPT)[-1, : reference.vocab_used].topk(2)
    first, second = best.indices.tolist()
    return first, second, float(best.values[0] - best.values[1])


@pytest.fixture(scope="module")
def stop(greedy: list[int], tokenizer: Tokenizer) -> tuple[str, int]:
    """Two characters of HF's greedy text on either side of a token's border, and how many tokens complete them."""
    text = tokenizer.decode(greedy, skip_special_tokens=True)
    for count in range(3, LENGTH):
        border = len(tokenizer.decode(greedy[:count], skip_special_tokens=True))
        pair = text[border - 1 : border + 1]
        if "\ufffd" not in pair and text.index(pair) == border - 1:
            return pair, count + 1
    raise AssertionError("no border of two whole characters: choose another prompt")


@pytest.fixture(scope="module")
def ends(model: Path) -> list[int]:
    ids: list[int] = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert len(ids) == 2
    return ids


@pytest.fixture(scope="module")
def answers(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    greedy: list[int],
    best_two: tuple[int, int, float],
    stop: tuple[str, int],
    ends: list[int],
) -> Iterator[dict[str, list[Future[Json]]]]:
    """The answers to every request of this file, by name."""
    bodies = {name: case.bodies() for name, case in CASES.items()} | known_bodies(greedy, best_two, stop[0], ends)
    with Server(model, tmp_path_factory.mktemp("fields"), ["--max-model-len", "256"]) as server:
        asked = [(name, body) for name, of_name in bodies.items() for body in of_name]
        found: dict[str, list[Future[Json]]] = {name: [] for name in bodies}
        for (name, _), answer in zip(asked, all_at_once(server, [body for _, body in asked]), strict=True):
            found[name].append(answer)
        yield found


def drawn_by(reference: hf.Reference, answers: Sequence[Future[Json]]) -> list[Drawn]:
    """Read the choices, and check on the way that the log-probs shown are those of the raw logits."""
    found = []
    for choice in (choice for answer in answers for choice in answer.result()["choices"]):
        scored = Scored.read(choice)
        logits = reference.logits(PROMPT + scored.tokens[:-1])[len(PROMPT) - 1 :]
        log_probs = logits.log_softmax(-1)
        for row, token, own, top in zip(log_probs, scored.tokens, scored.logprobs, scored.top, strict=True):
            assert own is not None and top is not None and top[token] == own
            assert max(top.values()) == pytest.approx(row[: reference.vocab_used].max().item(), abs=1e-4)
            assert all(value == pytest.approx(row[i].item(), abs=1e-4) for i, value in top.items())
        found.append(Drawn(PROMPT, scored.tokens, logits[:, : reference.vocab_used].numpy()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_tokens_follow_the_law_of_the_fields_and_no_other(
    name: str, reference: hf.Reference, answers: dict[str, list[Future[Json]]]
) -> None:
    case = CASES[name]
    drawn = drawn_by(reference, answers[name])
    assert [len(one.output) for one in drawn] == [LENGTH] * (1 if case.greedy else CHOICES * len(SEEDS))
    verdict = judge(case.law, drawn)
    assert verdict.agrees, verdict
    for wrong in case.rejected():
        assert judge(wrong, drawn).rejects, f"these tokens do not tell {wrong} from the truth"


# What ends an answer, what a bias decides, what a seed means: outcomes that are known beforehand


def known_bodies(
    greedy: Sequence[int], best_two: tuple[int, int, float], stop: str, ends: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    plain: dict[str, Any] = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, **SHOWN}
    first, second = ({str(end): 100} for end in ends)
    _, runner_up, gap = best_two
    return {
        "either eos": [plain | {"logit_bias": first}, plain | {"logit_bias": second}],
        "eos and min_tokens": [plain | {"logit_bias": first, "min_tokens": 5}],
        "eos ignored": [plain | {"logit_bias": first, "max_tokens": 4, "ignore_eos": True}],
        "bias at the gap": [
            plain | {"logit_bias": {str(runner_up): gap + more}, "max_tokens": 1} for more in (-0.01, 0.01)
        ],
        "stop": [plain | {"stop": stop}, plain | {"stop": ["never\n\n", stop], "include_stop_str_in_output": True}],
        "stop id": [plain | {"stop_token_ids": [greedy[4], ends[0]]}],
        "stop id and min_tokens": [plain | {"stop_token_ids": [greedy[4]], "min_tokens": 8, "max_tokens": 12}],
        "again": [
            plain | {"temperature": 1, "ignore_eos": True, "seed": SEEDS[0], "n": 2, "max_tokens": 8},
            plain | {"temperature": 1, "ignore_eos": True, "seed": SEEDS[1] - 2**64, "n": 1, "max_tokens": 8},
        ],
    }


def only_choice(answer: Future[Json]) -> tuple[Json, list[int]]:
    (choice,) = answer.result()["choices"]
    return choice, Scored.read(choice).tokens


def test_either_eos_ends_the_answer_and_shows_no_text(answers: dict[str, list[Future[Json]]], ends: list[int]) -> None:
    for answer, end in zip(answers["either eos"], ends, strict=True):
        choice, tokens = only_choice(answer)
        assert (choice["text"], choice["finish_reason"], tokens) == ("", "stop", [end])
        assert answer.result()["usage"]["completion_tokens"] == 1


def test_min_tokens_bars_every_end_until_so_many_are_out(
    reference: hf.Reference, answers: dict[str, list[Future[Json]]], ends: list[int], greedy: list[int]
) -> None:
    (eos,) = drawn_by(reference, answers["eos and min_tokens"])
    law = Law(temperature=0, logit_bias={ends[0]: 100}, min_tokens=5, ends=tuple(ends))
    assert len(eos.output) == 6 and eos.output[-1] == ends[0]
    assert judge(law, [eos]).agrees and judge(replace(law, min_tokens=0), [eos]).rejects
    (stop,) = drawn_by(reference, answers["stop id and min_tokens"])
    law = Law(temperature=0, min_tokens=8, ends=(greedy[4], *ends))
    assert judge(law, [stop]).agrees and judge(replace(law, min_tokens=0), [stop]).rejects
    assert greedy[4] not in stop.output[:8] and len(stop.output) >= 8


def test_ignore_eos_goes_on_past_it(answers: dict[str, list[Future[Json]]], ends: list[int]) -> None:
    choice, tokens = only_choice(answers["eos ignored"][0])
    assert (choice["finish_reason"], tokens) == ("length", [ends[0]] * 4)


def test_a_stop_id_ends_the_answer_where_it_first_comes(
    answers: dict[str, list[Future[Json]]], greedy: list[int], tokenizer: Tokenizer
) -> None:
    place = greedy.index(greedy[4])
    choice, tokens = only_choice(answers["stop id"][0])
    assert tokens == greedy[: place + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", greedy[4])
    assert choice["text"] == tokenizer.decode(greedy[:place], skip_special_tokens=True)


def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
    answers: dict[str, list[Future[Json]]], greedy: list[int], stop: tuple[str, int], tokenizer: Tokenizer
) -> None:
    text, used = stop
    before = tokenizer.decode(greedy, skip_special_tokens=True).split(text)[0]
    for answer, shown in zip(answers["stop"], (before, before + text), strict=True):
        choice, tokens = only_choice(answer)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (shown, "stop", text)
        assert tokens == greedy[:used]


def test_a_bias_decides_exactly_where_it_closes_the_gap(
    answers: dict[str, list[Future[Json]]], best_two: tuple[int, int, float]
) -> None:
    below, above = (only_choice(answer)[1] for answer in answers["bias at the gap"])
    assert (below, above) == ([best_two[0]], [best_two[1]])


def test_a_seed_means_the_same_tokens_whatever_n_is_and_seeds_wrap_at_64_bits(
    answers: dict[str, list[Future[Json]]],
) -> None:
    of_seed = [[Scored.read(choice).tokens for choice in answer.result()["choices"]] for answer in answers["nothing"]]
    assert len({tuple(tokens) for choices in of_seed for tokens in choices}) == len(SEEDS) * CHOICES
    for seed, answer in enumerate(answers["again"]):
        for place, choice in enumerate(answer.result()["choices"]):
            assert Scored.read(choice).tokens == of_seed[seed][place][:8]
