"""/metrics: the engine's own counters, read when scraped, and latencies as the HTTP side sees them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
}
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
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, getattr(stats, _COUNTER_FIELDS.get(name, name)))
        steps = CounterMetricFamily(_PREFIX + "steps", "Engine steps by what they held", labels=["kind"])
        for kind in ("prefill", "decode", "mixed"):
            steps.add_metric([kind], getattr(stats, f"{kind}_steps"))
        yield steps


class Metrics:
    """Its own registry, so several apps in one process do not mix."""

    def __init__(self, client: EngineClientProtocol, gate: Gate) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client, gate))
        self.requests = Counter(
            _PREFIX + "requests", "Answers by how they ended", ["finish_reason"], registry=self._registry
        )
        self._first = self._histogram("time_to_first_token_seconds", "Submission to first token", _FIRST_TOKEN_S)
        self._between = self._histogram("inter_token_seconds", "Between two tokens of an answer", _BETWEEN_TOKENS_S)
        self._whole = self._histogram("request_seconds", "Submission to last token", _WHOLE_S)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=tuple(buckets), registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def timer(self) -> AnswerTimer:
        return AnswerTimer(self._first, self._between, self._whole, self.requests)


class AnswerTimer:
    """Clock of one answer, from its submission."""

    def __init__(self, first: Histogram, between: Histogram, whole: Histogram, requests: Counter) -> None:
        self._first, self._between, self._whole, self._requests = first, between, whole, requests
        self._start = time.perf_counter()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """Note that `count` tokens came at once; they share the time since the last ones."""
        now = time.perf_counter()
        if self._last is None:
            self._first.observe(now - self._start)
            count -= 1
            self._last = now
        for _ in range(count):
            self._between.observe((now - self._last) / count)
        self._last = now

    def finished(self, reason: str) -> None:
        """Note the end: stop, length, abort or error."""
        self._requests.labels(reason).inc()
        if reason in ("stop", "length"):
            self._whole.observe(time.perf_counter() - self._start)
