"""A gate from its first look at the server to the verdict: one run of lm-eval, or two where the score asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocm_serve.diagnostics.gate import folder as folders
from rocm_serve.diagnostics.gate import lm_eval, statistics, tasks
from rocm_serve.diagnostics.gate.lm_eval import Client, Finished, Harness
from rocm_serve.diagnostics.gate.protocol import Protocol, Task, task_name
from rocm_serve.diagnostics.gate.recorder import Recorder
from rocm_serve.diagnostics.gate.reference import Reference
from rocm_serve.diagnostics.gate.samples import Sample, read_samples
from rocm_serve.diagnostics.gate.server import Identity, Metrics, NoAnswer, Server, Watch, base_of, drafted
from rocm_serve.diagnostics.gate.verdict import Run, Verdict, judge
from rocm_serve.errors import UserError

RERUN: Final = "rerun"
DATA: Final = "data"  # of the synthetic task, made in the folder of results
API_KEY: Final = "OPENAI_API_KEY"  # where lm-eval looks for it
_SAME: Final = 1e-9
Progress = Callable[[int, int, int], None]  # answers there are, answers wanted, answers that came in this session


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked for."""

    base_url: str
    reference: Reference
    out: Path
    task: Task | None = None
    data: Path | None = None
    limit: int | None = None
    client: Client = Client()
    python: str = ""
    alpha: float = statistics.ALPHA
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Gated:
    """A gate that came to its end."""

    folder: Path
    harness: Harness
    begun: folders.Begun
    reference: Reference
    runs: list[Run]
    finished: list[Finished]
    verdict: Verdict
    notes: list[str]


@dataclass(slots=True)
class Gate:
    """A gate whose wishes were checked. Nothing has been asked of the model yet."""

    wish: Wish
    environ: Mapping[str, str]
    harness: Harness
    data: Path
    questions: int
    folder: Path
    begun: folders.Begun
    notes: list[str]

    @property
    def protocol(self) -> Protocol:
        return self.wish.reference.header.protocol

    def run(self, progress: Progress, say: Callable[[str], None]) -> Gated:
        """Ask all questions, again if the first score is close below the floor, and judge."""
        finished, run = self._ask(self.folder, progress)
        if finished.table:
            say(finished.table)
        reference, alpha = self.wish.reference, self.wish.alpha
        verdict = judge(run, reference, alpha=alpha)
        runs, ended = [run], [finished]
        if verdict.wants_rerun:
            say(f"{verdict.failed[0]}: close enough for one rerun; both runs are judged together")
            finished, run = self._ask(self.folder / RERUN, progress)
            say(finished.table)
            runs.append(run)
            ended.append(finished)
            verdict = judge(runs[0], reference, alpha=alpha, second=run)
        notes = [*self.notes, *verdict.notes]
        return Gated(self.folder, self.harness, self.begun, reference, runs, ended, verdict, notes)

    def _ask(self, folder: Path, progress: Progress) -> tuple[Finished, Run]:
        """Run lm-eval once, through the recorder and under the watch."""
        protocol, begun, client = self.protocol, self.begun, self.wish.client
        server = Server(begun.base_url, self.environ.get(API_KEY, ""))
        name = task_name(protocol.task)
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
        text = tasks.task_file(protocol.task, self.harness.tasks, self.data)
        (folder / "tasks" / f"{name}.yaml").write_text(text, encoding="utf-8")
        with (
            Recorder(begun.base_url, protocol, folder / folders.JOURNAL, client.timeout_s) as recorder,
            Watch(server, begun.identity, begun.metrics) as watch,
        ):
            limit = None if self.wish.limit is None else self.questions
            argv = lm_eval.command(self.harness, protocol, begun.identity.model, recorder.url, client, folder, limit)

            def tick() -> None:
                if recorder.failed is not None:
                    raise recorder.failed
                progress(len(recorder.journal.answers), self.questions, recorder.new)

            finished = lm_eval.run(argv, name, folder, self.environ, tick)
            tick()
            watch.look()
        if watch.unanswered:
            self.notes.append(f"the server left {watch.unanswered} of the watch's questions without an answer in time")
        if recorder.errors:
            what = ", ".join(f"{kind}: {count}" for kind, count in sorted(recorder.errors.items()))
            self.notes.append(f"requests that brought no answer: {what}; last: {recorder.last_error}")
        samples, problems = ([], []) if finished.samples is None else read_samples(finished.samples)
        cause = recorder.cause() if finished.code != 0 else None
        problems += [cause] if cause else []
        problems += run_problems(finished, samples, protocol)
        problems += watch.problems
        problems += [f"{sentence} ({count} times)" for sentence, count in sorted(recorder.departures.items())]
        return finished, Run(
            expected=self.questions,
            samples=samples,
            problems=problems,
            answers=recorder.answers(),
            drafts=drafted(begun.metrics, watch.metrics),
        )


@contextmanager
def prepared(wish: Wish, environ: Mapping[str, str]) -> Iterator[Gate]:
    """Check everything that can be wrong before a question is asked; hold the folder of results until the end.

    Errors: UserError.
    """
    reference = wish.reference
    protocol = reference.header.protocol
    if wish.task is not None and wish.task != protocol.task:
        raise UserError(f"--task {wish.task}: the reference {reference.header.name!r} is of {protocol.task}")
    base_url = base_of(wish.base_url)
    folders.check_out(wish.out)
    if wish.data is None:
        folders.check_out(wish.out / DATA)
    harness = lm_eval.find_harness(wish.python, environ)
    with ExitStack() as stack:
        held = None if wish.data is not None else stack.enter_context(folders.held(wish.out))
        data = wish.data or tasks.make_data(protocol.task, wish.out / DATA, environ)
        there, hashes = tasks.check_data(protocol.task, data)
        _check_hashes(data, hashes, reference)
        questions = _how_many(wish.limit, there, reference)
        identity, metrics = identify(Server(base_url, environ.get(API_KEY, "")))
        begun = folders.Begun(
            protocol_sha256=protocol.sha256,
            data_sha256=hashes,
            questions=questions,
            base_url=base_url,
            identity=identity,
            metrics=metrics,
            at=folders.now(),
        )
        held = held or stack.enter_context(folders.held(wish.out))
        folder, begun, notes = folders.open_run(wish.out, begun, fresh=wish.fresh)
        held.says(folder.name)
        notes += _doubts(identity, reference, harness)
        yield Gate(wish, environ, harness, data, questions, folder, begun, notes)


def _doubts(identity: Identity, reference: Reference, harness: Harness) -> Iterator[str]:
    """Yield what makes this run say less than it could."""
    if identity.started is None:
        yield "this server does not tell when it started: a restart shows only where a counter falls"
    stated = reference.header.provenance.get("lm_eval")
    if stated not in (None, harness.version):
        yield f"the reference was asked with lm-eval {stated}, this run with {harness.version}"


def identify(server: Server) -> tuple[Identity, Metrics]:
    """Ask the server who it is and whether it takes questions. Errors: UserError."""
    where = f"--base-url {server.base_url}"
    try:
        server.known({})
        metrics = server.metrics()
        identity = server.known(metrics)
    except NoAnswer as why:
        raise UserError(f"{where}: {why}; is this the root of a server that is up? {API_KEY} is sent if set") from None
    try:
        server.ask("/health")
    except NoAnswer as why:
        raise UserError(f"{where}: the server is not healthy: {why}") from None
    try:
        if identity.owned_by == "rocm_serve":
            server.ask("/ready")
    except NoAnswer as why:
        raise UserError(f"{where}: the server is not ready yet: {why}") from None
    return identity, metrics


def run_problems(finished: Finished, samples: list[Sample], protocol: Protocol) -> list[str]:
    """List what was wrong with lm-eval's run itself: it failed, or its table is not what its samples say."""
    name, gated = task_name(protocol.task), protocol.filter
    if finished.code != 0:
        return [f"lm-eval ended with exit code {finished.code}: {_last_line(finished.tail)}"]
    if finished.results is None or finished.samples is None:
        return ["lm-eval wrote no results or no samples that can be read"]
    said = finished.results.results.get(name, {}).get(f"exact_match,{gated}")
    share = sum(one.verdicts[gated] for one in samples) / len(samples) if samples else 0.0
    if not isinstance(said, int | float) or abs(said - share) > _SAME:
        return [f"lm-eval's table says {said} for {gated}, its samples say {share}"]
    return []


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _check_hashes(data: Path, hashes: Mapping[str, str], reference: Reference) -> None:
    """Refuse data the reference was not made with. Errors: UserError."""
    for name, wanted in reference.header.data_sha256.items():
        if hashes.get(name) != wanted:
            raise UserError(
                f"--data {data}: {name} has sha256 {hashes.get(name)}, the reference was made with {wanted}"
            )


def _how_many(limit: int | None, there: int, reference: Reference) -> int:
    """Return the number of questions to ask. Errors: UserError."""
    most = there if reference.floor_only else min(there, len(reference.questions))
    if limit is None:
        if most < there:
            raise UserError(f"the reference has {most} questions and the data have {there}: legal: --limit 1..{most}")
        return there
    if not 1 <= limit <= most:
        raise UserError(f"--limit {limit}: legal: 1..{most}")
    return limit
