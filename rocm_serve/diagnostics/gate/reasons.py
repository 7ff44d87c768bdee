"""Why a server did not answer, in words. Pure."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error

_CHARS = 300  # of what a server said


def reason(error: Exception) -> str:
    """Say in a few words why a request brought no answer."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    if isinstance(error, urllib.error.URLError):
        return reason(error.reason) if isinstance(error.reason, Exception) else str(error.reason)
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "unknown host"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionError | http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "the connection was closed before the end of the answer"
    if isinstance(error, http.client.BadStatusLine):
        return "what answers does not speak HTTP"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def message_of(content: bytes) -> str:
    """Return the message of an OpenAI-style error, else the beginning of what was said."""
    text = content.decode(errors="replace")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    words = " ".join((message if isinstance(message, str) else text).split())[:_CHARS]
    return words.encode(errors="replace").decode() or "nothing"
