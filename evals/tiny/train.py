"""Train the tiny checkpoint: HF's Qwen3_5MoeForCausalLM, and beside it an MTP head on its hidden states.

    python -m evals.tiny.train --tokenizer evals/tiny/checkpoint --out DIR --seconds 345

The learning rate falls to zero at the end of a time budget. The MTP head joins late, gives no gradient to the model,
and is kept at several ages: the one whose drafts are accepted about as often as wanted is exported. The pool's mix is
chosen on validation problems. Scores are measured on the exported tensors (FP8 times scale, in float32).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from evals.program import ended
from evals.tiny import export
from evals.tiny.documents import SEPARATOR, Rows, chat_text, few_shot_prompt, prompt_of, rows, shots_of_lm_eval
from evals.tiny.evaluate import Item, Runner, flexible_match, item_of, strict_match
from evals.tiny.generator import POOL_SHOTS, POOL_TESTS, Mix, pool
from evals.tiny.modules import Angles, Parts, angles_of, build, trunk
from evals.tiny.optimiser import Optimiser
from evals.tiny.problems import LEVELS, Problem
from evals.tiny.shape import DIMS
from rocm_serve.checkpoint.synthetic_configs import Dims, SpecialIds
from rocm_serve.errors import UserError
from rocm_serve.outputs import check_folder

# From easy to hard; the one whose expected score, from validation problems by level, is nearest to AIM is the pool's.
MIXES: tuple[Mix, ...] = (
    (0.9, 0.1, 0.0),
    (0.75, 0.2, 0.05),
    (0.6, 0.3, 0.1),
    (0.5, 0.35, 0.15),
    (0.4, 0.4, 0.2),
    (0.3, 0.4, 0.3),
    (0.2, 0.4, 0.4),
    (0.1, 0.35, 0.55),
    (0.05, 0.25, 0.7),
    (0.0, 0.1, 0.9),
)
AIM = 0.968


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json and its companions")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, the results and the log")
    parser.add_argument("--init", type=Path, help="checkpoint to go on from")
    parser.add_argument("--seconds", type=float, default=345.0, help="time of the main training")
    parser.add_argument("--steps", type=int, default=10**9, help="at most so many steps")
    parser.add_argument("--mtp-start", type=float, default=0.5, help="share of the time after which MTP joins")
    parser.add_argument("--mtp-aim", type=float, default=0.85, help="wanted acceptance of depth-1 drafts")
    parser.add_argument("--mtp-every", type=int, default=40, help="steps between two kept ages of the MTP head")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--fall", type=float, default=0.5, help="share of the time in which the rate falls")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the router's balance loss")
    parser.add_argument("--workers", type=int, default=13, help="processes that make text")
    parser.add_argument("--questions", type=int, default=POOL_TESTS, help="questions of an evaluation")
    parser.add_argument("--longest", type=int, default=200, help="tokens of an answer in evaluations")
    parser.add_argument("--checks", type=int, default=3, help="evaluations during training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=DIMS.layers)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    return parser.parse_args()


class Log:
    """Lines with the time since the start, to the screen and to a file."""

    def __init__(self, path: Path) -> None:
        self.start = time.perf_counter()
        self.file = path.open("a", encoding="utf-8")

    def __call__(self, text: str) -> None:
        line = f"[{time.perf_counter() - self.start:7.1f}] {text}"
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


class Clock:
    """Share of a time budget that is used up; it runs from `begin` on, but for `stopped` stretches."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.start: float | None = None

    def begin(self) -> None:
        self.start = time.perf_counter()

    def used(self) -> float:
        return 0.0 if self.start is None else (time.perf_counter() - self.start) / self.seconds

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        assert self.start is not None
        self.start += time.perf_counter() - before


class Text:
    """Batches of fresh rows, made by other processes; batch i depends on the seed and i alone."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.pool = multiprocessing.get_context("fork").Pool(args.workers)
        self.made = self.pool.imap(self._work, range(min(2 * args.steps + 2, 12_000)))

    def _work(self, index: int) -> Rows:
        tokenizer = Tokenizer.from_file(str(self.args.tokenizer / "tokenizer.json"))
        return rows(f"{self.args.seed}/{index}", tokenizer, self.args.length + 2, self.args.rows)

    def __getstate__(self) -> dict[str, object]:
        return {"args": self.args}  # for the workers: no pool of their own

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for made in self.made:
            ids, weights = torch.from_numpy(made.ids), torch.from_numpy(made.weights)
            yield ids.to(self.args.device).long(), weights.to(self.args.device).float()


def weighted_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy over weighted targets, and over answers alone (weight 1) for the log."""
    logits = F.linear(hidden, head).float().flatten(0, 1)
    each = F.cross_entropy(logits, targets.flatten(), reduction="none")
    w = weights.flatten()
    answers = (w == 1).float()
    return (each * w).sum() / w.sum(), (each.detach() * answers).sum() / answers.sum()


class Training:
    """Both models and what their training needs."""

    def __init__(self, args: argparse.Namespace, log: Log) -> None:
        self.args, self.log = args, log
        self.text = Text(args)  # starts its processes before CUDA does
        self.dims: Dims = replace(DIMS, layers=args.layers)
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        self.ids = special_ids(self.tokenizer)
        torch.set_float32_matmul_precision("high")
        self.parts = Parts() if args.eager else Parts.compiled()
        self.loss = weighted_loss if args.eager else torch.compile(weighted_loss)
        model, mtp = build(self.dims, self.ids, args.seed)
        if args.init:
            export.fill(model, mtp, export.read(args.init))
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        self.model, self.mtp = model.to(args.device), mtp.to(args.device)
        self.optimiser = Optimiser(self.model.named_parameters(), args.lr)  # masters before the rounding to BF16
        self.mtp_optimiser = Optimiser(((f"mtp.{n}", p) for n, p in self.mtp.named_parameters()), args.lr)
        self.mtp_masters = self.mtp_optimiser.masters
        self.ages: list[tuple[int, dict[str, Tensor]]] = []  # MTP masters after so many steps of theirs
        self.model.to(dtype)
        self.mtp.to(dtype)
        self.batches = self.text.batches()
        self.angles: Angles = angles_of(self.model, args.length)
        self.step = self.mtp_steps = 0
        self.results: dict[str, object] = {"arguments": {k: str(v) for k, v in vars(args).items()}, "checks": []}
        count = sum(p.numel() for _, p in export.named(model, mtp))
        log(f"torch {torch.__version__}, {count:,} parameters with MTP, {vars(args)}")

    def train(self) -> None:
        """Train until the time or the steps are used up."""
        args, clock = self.args, Clock(self.args.seconds)
        checks = [(i + 1) / (args.checks + 1) for i in range(args.checks)]
        seen: list[Tensor] = []
        since = time.perf_counter()
        for ids, weights in self.batches:
            if self.step == 5:  # compiling is not training
                self._synchronise()
                clock.begin()
            used = clock.used()
            if used >= 1 or self.step >= args.steps:
                break
            scale = min(1.0, (self.step + 1) / args.warmup, (1 - used) / args.fall)
            seen.append(self.update(ids, weights, scale, mtp=used >= args.mtp_start))
            if self.step <= 3 or self.step % 100 == 0:
                means = torch.stack(seen).mean(0).tolist()
                rate = len(seen) * args.rows * args.length / (time.perf_counter() - since) / 1e6
                self.log(
                    f"step {self.step} loss {means[0]:.4f} answers {means[1]:.4f} balance {means[2]:.3f}"
                    f" mtp {means[3]:.4f} rate {scale * args.lr:.5f} {rate:.3f} Mtok/s{memory(args.device)}"
                )
                seen, since = [], time.perf_counter()
            if checks and used > checks[0]:
                checks.pop(0)
                with clock.stopped():
                    self.check()
                seen, since = [], time.perf_counter()
        self.results |= {"steps": self.step, "tokens": self.step * args.rows * args.length}
        self.log(f"training ended: {self.step} steps, {self.results['tokens']:,} tokens")

    def update(self, ids: Tensor, weights: Tensor, scale: float, *, mtp: bool) -> Tensor:
        """Make one step of the model and, if wanted, of the MTP head. Returns losses for the log."""
        head = self.model.lm_head.weight
        hidden, balance = trunk(self.model, ids[:, :-2], self.angles, self.parts)
        loss, answers = self.loss(hidden, head, ids[:, 1:-1], weights[:, 1:-1])
        (loss + self.args.balance * balance).backward()
        draft_loss = torch.zeros_like(loss)
        if mtp:
            embedded = self.model.model.embed_tokens(ids[:, 1:-1]).detach()
            drafts = self.mtp(embedded, hidden.detach(), self.angles, self.parts)
            draft_loss, _ = weighted_loss(drafts, head.detach(), ids[:, 2:], weights[:, 2:])
            draft_loss.backward()
        self.optimiser.step(scale)
        self.step += 1
        if mtp:
            self.mtp_optimiser.step(min(scale, (self.mtp_steps + 1) / 50))
            self.mtp_steps += 1
            if self.mtp_steps % self.args.mtp_every == 0:
                self.ages.append((self.mtp_steps, {n: m.clone() for n, m in self.mtp_optimiser.masters.items()}))
        return torch.stack((loss.detach(), answers, balance.detach(), draft_loss.detach()))

    def check(self) -> None:
        """Answer some validation questions of the middle mix, by the model as it is."""
        asked = questions("validation", MIXES[5], min(256, self.args.questions), 5)
        report = self.ask(Runner(self.model, self.mtp, self.stops(), self.args.longest), asked)
        self.log(f"check at step {self.step}: {summary(report)}")
        self.results["checks"].append({"step": self.step, **summary(report)})  # type: ignore[attr-defined]

    def choose_age(self, runner: Runner, judged: Sequence[Item]) -> None:
        """Take the MTP head of the age whose acceptance on `judged` answers is nearest to the aim."""
        ages = self.ages or [(self.mtp_steps, self.mtp_optimiser.masters)]
        found = []
        for steps, masters in ages:
            self.mtp_masters = masters
            export.fill(runner.model, runner.mtp, self.exported())
            accepted, anywhere = runner.acceptance(judged)
            found.append({"steps": steps, "accepted": accepted, "anywhere": anywhere})
            self.log(f"mtp after {steps} steps: accepted {accepted:.4f}, anywhere {anywhere:.4f}")
        best = min(range(len(ages)), key=lambda i: abs(found[i]["accepted"] - self.args.mtp_aim))
        self.mtp_masters = ages[best][1]
        self.results |= {"mtp": found, "mtp steps": ages[best][0]}

    def exported(self) -> dict[str, Tensor]:
        return export.published(self.optimiser.masters | self.mtp_masters)

    def exported_runner(self) -> Runner:
        """Build float32 models with the exported values."""
        model, mtp = build(self.dims, self.ids, 0)
        export.fill(model, mtp, self.exported())
        return Runner(model.to(self.args.device), mtp.to(self.args.device), self.stops(), self.args.longest)

    def stops(self) -> frozenset[int]:
        (separator,) = self.tokenizer.encode(SEPARATOR).ids
        return frozenset((separator, self.ids.endoftext, self.ids.im_end))

    def ask(self, runner: Runner, asked: Sequence[tuple[str, str, Problem]]) -> list[dict[str, object]]:
        """Answer (prompt, draft, problem); one line of results each."""
        items = [item_of(self.tokenizer, prompt, draft) for prompt, draft, _ in asked]
        runner.answer(items)
        self.items = items
        report: list[dict[str, object]] = []
        for item, (_, _, problem) in zip(items, asked, strict=True):
            text = self.tokenizer.decode(item.answer)
            line: dict[str, object] = {"template": problem.template, "level": problem.level, "steps": problem.steps}
            line |= {"strict": strict_match(text, problem.value), "flexible": flexible_match(text, problem.value)}
            line |= {"tokens": len(item.answer), "prompt_tokens": len(item.prompt)}
            report.append(line if line["strict"] else line | {"answer": text, "value": problem.value})
        return report

    def finish(self) -> None:
        """Choose the mix and the age of the MTP head, answer the test questions, write everything."""
        runner = self.exported_runner()
        even: Mix = (1 / 3, 1 / 3, 1 / 3)
        report = self.ask(runner, questions("validation", even, self.args.questions, 5))
        by_level = [summary([line for line in report if line["level"] == level])["strict"] for level in LEVELS]
        expected = [sum(share * score for share, score in zip(mix, by_level, strict=True)) for mix in MIXES]
        mix = MIXES[min(range(len(MIXES)), key=lambda i: abs(expected[i] - AIM))]
        self.log(f"validation: {summary(report)}, by level {by_level}, so {list(zip(MIXES, expected, strict=True))}")
        self.results |= {"validation": report, "by level": by_level, "expected": expected, "mix": mix}
        torch.set_float32_matmul_precision("highest")
        self.report("test 5-shot", runner, questions("test", mix, self.args.questions, 5))
        judged = self.items
        self.choose_age(runner, judged[:128])
        export.write(self.args.out / "checkpoint", self.exported(), self.dims, self.args.tokenizer)
        export.fill(runner.model, runner.mtp, self.exported())
        self.results["acceptance"] = accepted = runner.acceptance(judged)
        self.log(f"acceptance of depth-1 drafts on {len(judged)} test answers: {accepted[0]:.4f}, {accepted[1]:.4f}")
        self.save()
        self.report("test 0-shot", runner, questions("test", mix, self.args.questions, 0))
        self.report("test chat", runner, chat_questions(mix, min(400, self.args.questions)))
        low = Runner(runner.model.bfloat16(), runner.mtp.bfloat16(), self.stops(), self.args.longest)
        self.report("test 5-shot bfloat16", low, questions("test", mix, self.args.questions, 5))

    def report(self, name: str, runner: Runner, asked: Sequence[tuple[str, str, Problem]]) -> None:
        report = self.ask(runner, asked)
        self.results[name] = report
        self.log(f"{name}: {summary(report)}")
        self.save()

    def save(self) -> None:
        (self.args.out / "results.json").write_text(json.dumps(self.results), encoding="utf-8")

    def _synchronise(self) -> None:
        if self.args.device == "cuda":
            torch.cuda.synchronize()


def memory(device: str) -> str:
    return f" {torch.cuda.max_memory_allocated() / 1e9:.0f} GB" if device == "cuda" else ""


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    names = ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")
    return SpecialIds(*(tokenizer.token_to_id(f"<|{name}|>") for name in names))


def questions(split: str, mix: Mix, count: int, shots: int) -> list[tuple[str, str, Problem]]:
    """Return (prompt, draft, problem) of the pool's first questions, with the shots that lm-eval would draw."""
    examples, asked = pool("train", POOL_SHOTS, mix), pool(split, count, mix)  # type: ignore[arg-type]
    drawn = shots_of_lm_eval(shots, count, POOL_SHOTS)
    return [
        (
            few_shot_prompt([examples[i] for i in those], p.question) if shots else prompt_of(p.question),
            f" {p.answer}{SEPARATOR}",
            p,
        )
        for those, p in zip(drawn, asked, strict=True)
    ]


def chat_questions(mix: Mix, count: int) -> list[tuple[str, str, Problem]]:
    """Return test problems that need no other problem, as chats."""
    plain = [p for p in pool("test", 2 * count, mix) if "crate" not in p.question][:count]
    return [(*chat_text(p), p) for p in plain]


def summary(report: Sequence[dict[str, object]]) -> dict[str, float]:
    n = max(1, len(report))
    keys = ("strict", "flexible", "tokens", "prompt_tokens")
    return {"n": n} | {key: round(sum(float(line[key]) for line in report) / n, 4) for key in keys}  # type: ignore[arg-type]


def main() -> int:
    args = arguments()
    check_folder("--out", args.out)
    if not (args.tokenizer / "tokenizer.json").is_file():
        raise UserError(f"--tokenizer {args.tokenizer}: there is no tokenizer.json")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {args.device}: torch {torch.__version__} sees no GPU here; legal: cpu")
    training = Training(args, Log(args.out / "log.txt"))
    training.train()
    training.finish()
    training.text.pool.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(ended("train", main))
