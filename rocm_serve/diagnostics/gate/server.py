"""The server under test as it shows itself: who it is, since when, and its counters."""

from __future__ import annotations

import http.client
import math
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Container
from typing import Final
from urllib.parse import urlsplit

import msgspec

from rocm_serve.diagnostics.gate.reasons import reason
from rocm_serve.diagnostics.gate.verdict import Drafts
from rocm_serve.errors import UserError

POLL_S: Final = 5.0
_LAST_LOOK_S: Final = 2.0
_TIMEOUT_S: Final = 30.0  # a busy server answers late; late is not dead
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*(?:\{[^}]*\})?) (\S+)", re.MULTILINE)
_COUNTER = re.compile(r"^# TYPE ([A-Za-z_:][\w:]*) counter\b", re.MULTILINE)
_LEGAL_URL = "legal: http://HOST:PORT or https://HOST:PORT"
_PATHS = ("/completions", "/chat", "/models", "/health", "/metrics", "/v1")  # that people copy with a server's root
# As the recorder and lm-eval ask: past any proxy of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_START = "process_start_time_seconds"
# Counters of verified and of accepted drafts, each with the label it is read at: ours, vLLM's; last those that count
# drafts of all places together.
_DRAFTS = (
    ("rocm_serve_draft_tokens_by_position_total", 'position="1"'),
    ("vllm:spec_decode_num_drafts_total", ""),
    ("vllm:spec_decode_num_draft_tokens_total", ""),
)
_ACCEPTED = (
    ("rocm_serve_accepted_draft_tokens_by_position_total", 'position="1"'),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"'),
    ("vllm:spec_decode_num_accepted_tokens_total", ""),
)

Metrics = dict[str, float]


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What must stay the same during a run. `started` is None for a server that does not tell."""

    model: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None
    version: str | None = None
    started: str | None = None


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    owned_by: str | None = None
    created: int | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str | None = None


def base_of(url: str) -> str:
    """Return the root of a server's URL; `/v1/completions` and the like behind it are taken off. Errors: UserError."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise UserError(f"--base-url {url} is no URL of a server; {_LEGAL_URL}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UserError(f"--base-url {url}: {error}; {_LEGAL_URL}, port 1..65535") from None
    if not parts.hostname or port == 0 or "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(f"--base-url {url}: {_LEGAL_URL}, and nothing behind")
    root = url.rstrip("/")
    while end := next((path for path in _PATHS if root.endswith(path)), None):
        root = root.removesuffix(end).rstrip("/")
    return root


class NoAnswer(Exception):
    """A page that could not be fetched; says which, and why."""


class Server:
    """Asks a server about itself. `api_key` goes with every question, as lm-eval sends it."""

    def __init__(self, base_url: str, api_key: str = "") -> None:
        self.base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def ask(self, path: str) -> bytes:
        """Fetch a page. Errors: NoAnswer."""
        try:
            request = urllib.request.Request(self.base_url + path, headers=self._headers)
            with _OPENER.open(request, timeout=_TIMEOUT_S) as response:
                return bytes(response.read())
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise NoAnswer(f"GET {self.base_url}{path}: {reason(error)}") from None

    def get(self, path: str) -> bytes | None:
        """Fetch a page; None when there is no such page or no answer."""
        try:
            return self.ask(path)
        except NoAnswer:
            return None

    def metrics_page(self) -> str:
        """Return /metrics; empty when there is no such page."""
        return (self.get("/metrics") or b"").decode(errors="replace")

    def metrics(self) -> Metrics:
        """Return every sample of /metrics by its name with labels."""
        return parse_metrics(self.metrics_page())

    def identity(self, metrics: Metrics) -> Identity | None:
        """Ask who it is; None when it does not answer."""
        try:
            return self.known(metrics)
        except NoAnswer:
            return None

    def known(self, metrics: Metrics) -> Identity:
        """Ask who it is. Errors: NoAnswer."""
        page = self.ask("/v1/models")
        try:
            cards = msgspec.json.decode(page, type=_Models).data
        except (msgspec.DecodeError, ValueError, RecursionError):
            cards = []
        if not cards:
            raise NoAnswer(f"GET {self.base_url}/v1/models: this is no list of models")
        card = cards[0]
        started = None
        if card.owned_by == "rocm_serve":  # others make up `created` anew for every answer
            started = f"created {card.created}"
        elif _START in metrics:
            started = f"{_START} {metrics[_START]:g}"
        return Identity(
            model=card.id,
            root=card.root,
            owned_by=card.owned_by,
            max_model_len=card.max_model_len,
            version=self._version(),
            started=started,
        )

    def _version(self) -> str | None:
        try:
            return msgspec.json.decode(self.get("/version") or b"{}", type=_Version).version
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None


def parse_metrics(text: str) -> Metrics:
    """Read the samples of a page of metrics; values that are no finite number are left out."""
    found: Metrics = {}
    for name, value in _SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        if math.isfinite(number):
            found[name] = number
    return found


def counters_of(text: str) -> frozenset[str]:
    """Return what a page of metrics declares as counters; a name says nothing: gauges are called _total, too."""
    names = _COUNTER.findall(text)
    return frozenset([*names, *(f"{name}_total" for name in names)])  # OpenMetrics declares them without


def changes(before: Identity, after: Identity) -> list[str]:
    """List what differs between two identities, a sentence each. What either does not tell is no difference."""
    return [
        (
            f"the server was restarted during the run: its start was {old!r} and became {new!r}"
            if name == "started"
            else f"the server's {name} was {old!r} and became {new!r} during the run"
        )
        for name in before.__struct_fields__
        if None not in (old := getattr(before, name), new := getattr(after, name)) and old != new
    ]


def filled(known: Identity, new: Identity) -> Identity:
    """Return `new`, with what it does not tell as it was known: a server that is starting leaves things out."""
    untold = {name: getattr(known, name) for name in known.__struct_fields__ if getattr(new, name) is None}
    return msgspec.structs.replace(new, **untold)


def fallen(before: Metrics, after: Metrics, counters: Container[str]) -> str | None:
    """Name a counter that went down, which only a restart does, or None."""
    for name, value in before.items():
        if name.partition("{")[0] in counters and after.get(name, value) < value:
            return f"the counter {name} fell from {value:g} to {after[name]:g} during the run: the server was restarted"
    return None


def drafted(before: Metrics, after: Metrics) -> Drafts | None:
    """Return the drafts between two snapshots, first ones where they are counted; None: the server does not draft."""
    for counters in zip(_DRAFTS, _ACCEPTED, strict=True):
        if None not in [_sum(after, *one) for one in counters]:
            made, accepted = ((_sum(after, *one) or 0.0) - (_sum(before, *one) or 0.0) for one in counters)
            return Drafts(made, accepted, first=counters[0] is not _DRAFTS[-1])
    return None


def _sum(metrics: Metrics, name: str, label: str) -> float | None:
    """Add a counter up over its other labels; None when it is not there."""
    values = [value for sample, value in metrics.items() if sample.partition("{")[0] == name and label in sample]
    return sum(values) if values else None


class Watch:
    """A thread that asks the server who it is during a run and notes every change."""

    def __init__(self, server: Server, identity: Identity, metrics: Metrics) -> None:
        self.problems: list[str] = []
        self.metrics = metrics
        self.unanswered = 0  # polls; a busy server may miss some
        self._server, self._identity = server, identity
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gate-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_LAST_LOOK_S)  # a server that hangs must not hold up an interruption

    def look(self) -> None:
        """Ask once."""
        page = self._server.metrics_page()
        metrics = parse_metrics(page)
        identity = self._server.identity(metrics)
        if identity is None or self._server.get("/health") is None:
            self.unanswered += 1
            return
        found = changes(self._identity, identity)
        identity = filled(self._identity, identity)
        same = identity.started == self._identity.started  # else that is said already, and counters begin anew
        fell = fallen(self.metrics, metrics, counters_of(page)) if same else None
        for problem in [*found, *([fell] if fell else [])]:
            if problem not in self.problems:
                self.problems.append(problem)
        self._identity = identity
        self.metrics = metrics or self.metrics

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            self.look()
