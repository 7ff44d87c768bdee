"""/metrics: the engine's own counters, read when scraped, and latencies as the HTTP side sees them."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rocm_serve.messages import Stats
from rocm_serve.server.info import EngineClientProtocol
from rocm_serve.server.limits import Gate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "rocm_serve_"
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

_GAUGES = {
    "running": "Requests in the running set",
    "waiting": "Requests that wait for a place",
    "peak_running": "Most requests that ran at once since the start",
    "pages_used": "KV pages in use",
    "pages_total": "KV pages there are",
    "slots_used": "State slots in use",
    "slots_total": "State slots there are",
}
_COUNTERS = {
    "preemptions": "Requests put back to the queue because pages ran out",
    "prompt_tokens": "Prompt rows computed, recomputed ones counted again",
    "generation_tokens": "Tokens made",
    "aborted_requests": "Requests ended by the client or the server before their end",
    "finished_requests": "Answers that came to their end, a stop string too",
    "decode_forwards": "Passes of one request through the model with output rows that brought tokens",
    "decode_tokens": "Tokens that these passes brought; divided by the passes, tokens per forward",
}
_DRAFT_COUNTERS = {  # only where drafts are made: a gate takes them for the sign of a drafter
    "draft_tokens": "Drafts verified",
    "accepted_draft_tokens": "Drafts that were the tokens drawn without them",
}
_REFUSALS = (429, 503)
_PROBES = ("/health", "/ready", "/ping")
_COUNTER_FIELDS = {"aborted_requests": "aborted", "finished_requests": "finished"}


class _EngineCollector(Collector):
    def __init__(self, client: EngineClientProtocol, gate: Gate) -> None:
        self._client = client
        self._gate = gate

    def collect(self) -> Iterator[Metric]:
        stats: Stats = self._client.stats
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, getattr(stats, name))
        yield GaugeMetricFamily(_PREFIX + "open", "Answers that clients wait for", self._gate.num_open)
        tasks = len(asyncio.all_tasks())
        yield GaugeMetricFamily(_PREFIX + "server_tasks", "Tasks on the server's event loop, this one too", tasks)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, getattr(stats, _COUNTER_FIELDS.get(name, name)))
        steps = CounterMetricFamily(_PREFIX + "steps", "Engine steps by what they held", labels=["kind"])
        for kind in ("prefill", "decode", "mixed"):
            steps.add_metric([kind], getattr(stats, f"{kind}_steps"))
        yield steps
        if stats.draft_tokens_by_position:
            yield from _drafting(stats)


def _drafting(stats: Stats) -> Iterator[Metric]:
    for name, text in _DRAFT_COUNTERS.items():
        yield CounterMetricFamily(_PREFIX + name, text, getattr(stats, name))
        places = CounterMetricFamily(
            f"{_PREFIX}{name}_by_position", f"{text}, by place after the token", labels=["position"]
        )
        for position, count in enumerate(getattr(stats, f"{name}_by_position"), 1):
            places.add_metric([str(position)], count)
        yield places
    prices = GaugeMetricFamily(
        _PREFIX + "decode_seconds_per_token",
        "Median time of a decoding step for each token it brings, with at most so many requests running",
        labels=["requests", "drafting"],
    )
    net = GaugeMetricFamily(
        _PREFIX + "draft_net_speed", "Tokens per second with drafts, as a multiple of without", labels=["requests"]
    )
    samples = GaugeMetricFamily(
        _PREFIX + "draft_net_speed_samples",
        "Decoding steps that the net speed rests on, the last ones measured",
        labels=["requests", "drafting"],
    )
    on = GaugeMetricFamily(_PREFIX + "drafting", "1 where steps draft with so many running", labels=["requests"])
    for speed in stats.draft_speeds:
        size = str(speed.requests)
        on.add_metric([size], speed.drafting)
        for way, price, steps in (("on", speed.on_s, speed.on_steps), ("off", speed.off_s, speed.off_steps)):
            samples.add_metric([size, way], steps)
            if price:
                prices.add_metric([size, way], price)
        if speed.net:
            net.add_metric([size], speed.net)
    yield from (prices, net, samples, on)


class Durations(Collector):
    """A histogram whose observation costs what a token may: no lock, no walk along the buckets.

    One thread observes; another may collect at any time, and may miss what is observed meanwhile.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count `count` durations of `seconds` each."""
        self._counts[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            self._name,
            self._text,
            buckets=list(zip(names, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )


class Metrics:
    """Its own registry, so several apps in one process do not mix."""

    def __init__(self, client: EngineClientProtocol, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client, gate))
        self.requests = Counter(
            _PREFIX + "requests", "Answers by how they ended", ["finish_reason"], registry=self._registry
        )
        self._errors = Counter(
            _PREFIX + "http_errors", "Requests answered with an error, by status", ["status"], registry=self._registry
        )
        for status in _REFUSALS:  # so that "none" can be told from "not counted"
            self._errors.labels(str(status))
        self._first = self._durations("time_to_first_token_seconds", "Submission to first token", _FIRST_TOKEN_S)
        self._between = self._durations("inter_token_seconds", "Between two tokens of an answer", _BETWEEN_TOKENS_S)
        self._whole = self._durations("request_seconds", "Submission to last token", _WHOLE_S)

    def _durations(self, name: str, text: str, bounds: Sequence[float]) -> Durations:
        durations = Durations(_PREFIX + name, text, bounds)
        self._registry.register(durations)
        return durations

    def error(self, path: str, status: int) -> None:
        """Count an error as answer; probes ask again and again, and are left out."""
        if path not in _PROBES:
            self._errors.labels(str(status)).inc()

    def render(self) -> bytes:
        """Return the page. Called on the event loop: its tasks are counted."""
        return generate_latest(self._registry)

    def timer(self) -> AnswerTimer:
        return AnswerTimer(self._first, self._between, self._whole, self.requests)


class AnswerTimer:
    """Clock of one answer, from its submission."""

    def __init__(self, first: Durations, between: Durations, whole: Durations, requests: Counter) -> None:
        self._first, self._between, self._whole, self._requests = first, between, whole, requests
        self._start = time.perf_counter()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """Note that `count` tokens came at once; they share the time since the last ones."""
        if not count:
            return
        now = time.perf_counter()
        if self._last is None:
            self._first.observe(now - self._start)
            count -= 1
            self._last = now
        if count:
            self._between.observe((now - self._last) / count, count)
        self._last = now

    def finished(self, reason: str) -> None:
        """Note the end: stop, length, abort or error."""
        self._requests.labels(reason).inc()
        if reason in ("stop", "length"):
            self._whole.observe(time.perf_counter() - self._start)
