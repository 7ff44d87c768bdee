"""Layouts that serve side by side, asked in turn: every point of each, beside its floor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from evals.bench_gpu import pair_floor, pair_steps
from evals.bench_gpu.pair_floor import LAYOUTS, Least
from evals.bench_gpu.pair_records import (
    AgreementRecord,
    PairRecord,
    Timeline,
    agreement_line,
    first_line,
    pair_line,
)
from evals.bench_gpu.pair_run import Measuring
from evals.bench_gpu.pair_world import TAIL_STEPS, WARM_UP_STEPS, Stretch, World, serving
from rocm_serve.config.schema import ServeConfig
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config
from rocm_serve.platform.facts import Platform
from rocm_serve.platform.probe import probe
from rocm_serve.trace import StepTrace
from rocm_serve.tuning.shapes import config_of

FIRST_REQUESTS = 10
_FIRST_BATCHES = 3  # that come before prompts
_DRAWN_PLANS = 12
_COMPARED = 8  # prompts


class Layouts:
    """Layouts of one run that have been started. One that fails is left alone, with whatever is still in it."""

    def __init__(self, run: Measuring, held: ExitStack) -> None:
        self._run, self._held = run, held
        self._worlds: dict[str, World] = {}

    def start(self, names: Sequence[str], model: Path) -> None:
        """Start them all at once; return when they may be asked."""
        facts = parse_config(config_of(self._run.dims), None)
        platform = probe("cpu" if self._run.device.type == "cpu" else "auto")
        for name in names:
            self._run.attempt(f"{name}: start", lambda: self._start(name, model, facts, platform))  # noqa: B023
        self.each("ready", _ready)

    def _start(self, name: str, model: Path, facts: ModelFacts, platform: Platform) -> None:
        self._worlds[name] = self._held.enter_context(serving(_config(self._run, name, model), facts, platform))

    def each(self, what: str, measure: Callable[[Measuring, str, World], object]) -> None:
        """Do it with one layout after the other."""
        for name, world in list(self._worlds.items()):
            if not self._run.attempt(f"{name} {what}", lambda: measure(self._run, name, world)):  # noqa: B023
                del self._worlds[name]

    def warm_up(self) -> None:
        """Compute some prompts on all of them at once: kernels that nobody has compiled are compiled now."""
        a = self._run.arguments

        def several(world: World) -> None:
            world.prefill(2 * max(1, a.chunk // a.ctx), a.ctx)
            world.prefill(2, a.prompt)

        with ThreadPoolExecutor() as pool:
            found = {name: pool.submit(several, world) for name, world in self._worlds.items()}
        self.each("warming up", lambda run, name, world: found[name].result())


def measure_layouts(run: Measuring, names: Sequence[str], model: Path) -> None:
    """Start these layouts and take every point of each. `model`: a folder with the shape's configuration."""
    a = run.arguments
    with ExitStack() as held:
        layouts = Layouts(run, held)
        layouts.start(names, model)
        layouts.each("first requests", _first)
        layouts.warm_up()
        run.say("all are warm")
        compare(run, layouts)
        for batch in a.batch[:_FIRST_BATCHES]:
            layouts.each(f"decode B {batch}", partial(measure_decode, batch))
        for batch in a.prefill:
            layouts.each(f"prefill B {batch}", partial(measure_prefill, batch))
        for batch in a.batch[_FIRST_BATCHES:]:
            layouts.each(f"decode B {batch}", partial(measure_decode, batch))
        layouts.each("end", lambda run, name, world: world.end())


def compare(run: Measuring, layouts: Layouts) -> None:
    """Have every layout score the same prompts, one by one and all at once."""
    random = np.random.default_rng(run.arguments.seed)
    prompts = random.integers(0, run.dims.vocabulary, (_COMPARED, run.arguments.ctx // 2)).tolist()

    new: dict[tuple[str, bool], list[float]] = {}

    def score(run: Measuring, name: str, world: World) -> None:
        for company in (False, True):
            new[name, company] = world.scores(prompts, company=company)

    layouts.each("agreement", score)
    run.of_tp1 = new.get(("tp1", False), run.of_tp1)
    for (name, company), scores in new.items():
        if run.of_tp1:
            apart = [abs(a - b) for a, b in zip(scores, run.of_tp1, strict=True)]
            found = AgreementRecord(name, company, len(apart), sum(apart) / len(apart), max(apart))
            run.run.agreement.append(found)
            run.say(agreement_line(found))


def measure_decode(batch: int, run: Measuring, name: str, world: World) -> None:
    a = run.arguments
    stretch = world.decode(batch, a.ctx, a.steps)
    trace = pair_steps.committed_between(world.steps(), stretch.began_ns, stretch.ended_ns)
    spread = pair_steps.advances_ms(trace, batch)
    least = pair_floor.decode(run.dims, LAYOUTS[name], batch, stretch.context, run.ceilings)
    _found(run, name, "decode", batch, stretch, trace, spread, batch / spread.median * 1e3, least, world)


def measure_prefill(batch: int, run: Measuring, name: str, world: World) -> None:
    a = run.arguments
    stretch = world.prefill(batch, a.prompt)
    trace = pair_steps.committed_between(world.steps(), stretch.began_ns, stretch.ended_ns)
    took = (trace[-1].committed_ns - trace[0].submitted_ns) / 1e6
    least = pair_floor.prefill(run.dims, LAYOUTS[name], batch, a.prompt, a.chunk, run.ceilings)
    spread = pair_steps.Spread(took, took, took)
    _found(run, name, "prefill", batch, stretch, trace, spread, batch * a.prompt / took * 1e3, least, world)


def _found(
    run: Measuring,
    name: str,
    part: str,
    batch: int,
    stretch: Stretch,
    trace: Sequence[StepTrace],
    spread: pair_steps.Spread,
    tokens_s: float,
    least: Least,
    world: World,
) -> None:
    seqs, stamps = range(trace[0].seq, trace[-1].seq + 1), world.stamps()
    floor_ms = least.seconds(run.run.link_bytes_s) * 1e3
    alone = [(run.run.alone_us(one.what, one.nbytes), one.count) for one in least.messages]
    known = [(us, count) for us, count in alone if us is not None]
    record = PairRecord(
        layout=name,
        part=part,
        batch=batch,
        context=stretch.context,
        chunk=run.arguments.chunk,
        steps=len(trace),
        in_flight=max(step.in_flight for step in trace),
        ms=spread.median,
        low=spread.low,
        high=spread.high,
        tokens_s=tokens_s,
        floor_ms=floor_ms,
        messages_ms=sum(us * count for us, count in known) / 1e3 if known and len(known) == len(alone) else None,
        ratio=floor_ms / spread.median,
        at_work=pair_steps.at_work(stamps, seqs),
    )
    run.run.points.append(record)
    if len(stamps) > 1:
        middle = seqs[max(0, len(seqs) - _DRAWN_PLANS) // 2 :][:_DRAWN_PLANS]
        if len(middle) > pair_floor.RANKS:  # fewer only fill and empty the stages
            run.run.timelines.append(Timeline(name, part, batch, pair_steps.bars(stamps, middle)))
    run.say(pair_line(record))


def _config(run: Measuring, name: str, model: Path) -> ServeConfig:
    a, layout = run.arguments, LAYOUTS[name]
    plans = -(-max(a.batch) * a.ctx // a.chunk)  # the first requests decode while the last ones' prompts are computed
    decoded = a.ctx + plans + 2 * (WARM_UP_STEPS + a.steps + TAIL_STEPS) + 64
    return ServeConfig(
        model=str(model),
        served_model_name=name,
        tp=layout.tp,
        pp=layout.pp,
        plan_ahead="on" if layout.ahead else "auto",
        device="cpu" if run.device.type == "cpu" else "auto",
        max_running_requests=max(a.batch),
        chunked_prefill_size=a.chunk,
        max_model_len=max(decoded, a.prompt + 64),
        max_total_tokens=max(max(a.batch) * (decoded + 16), (max(a.prefill, default=1) + 1) * (a.prompt + 64)),
        mem_fraction=a.mem_fraction,
        load_format="dummy",
        op=a.op,
        enforce_eager=a.eager,
        seed=a.seed,
    )


def _ready(run: Measuring, name: str, world: World) -> None:
    limits = world.ready()
    run.run.limits[name] = {
        "graph_max_batch": f"{limits.graph_max_batch} ({limits.reasons['graph_max_batch']})",
        "num_pages": f"{limits.num_pages} ({limits.reasons['num_pages']})",
        "num_slots": f"{limits.num_slots} ({limits.reasons['num_slots']})",
    }
    run.say(f"{name}: ready; " + "; ".join(f"{key} {value}" for key, value in run.run.limits[name].items()))


def _first(run: Measuring, name: str, world: World) -> None:
    record = msgspec.structs.replace(world.first(FIRST_REQUESTS), layout=name)
    run.run.first.append(record)
    run.say(first_line(record))
