"""What a score was measured by. A number without its protocol means nothing, so a reference carries one, hashed."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Task = Literal["gsm8k", "gsm8k-synth"]
Filter = Literal["strict-match", "flexible-extract"]
FILTERS: tuple[Filter, ...] = ("strict-match", "flexible-extract")
GSM8K_STOPS = ("Question:", "</s>", "<|im_end|>")


class Protocol(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the questions are asked and the answers judged. Every field changes scores."""

    task: Task
    endpoint: Literal["/v1/completions"] = "/v1/completions"
    template: Literal["none"] = "none"  # a chat template; completions take the prompt as it is
    num_fewshot: int = 5
    max_gen_toks: int = 256
    stops: tuple[str, ...] = GSM8K_STOPS
    temperature: float = 0.0
    request_seed: int = 1234  # in every request
    fewshot_seed: int = 1234  # draws the shots
    filter: Filter = "strict-match"  # the one that is gated; the other is shown

    @property
    def sha256(self) -> str:
        """Hash of the fields in their order; a default is hashed like a value that was written."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def generation(self) -> dict[str, Any]:
        """Return the generation settings as lm-eval's task takes them."""
        return {
            "until": list(self.stops),
            "max_gen_toks": self.max_gen_toks,
            "temperature": self.temperature,
            "do_sample": False,
        }

    def on_the_wire(self) -> dict[str, Any]:
        """Return what every request body has to hold beside model and prompt."""
        return {
            "max_tokens": self.max_gen_toks,
            "temperature": self.temperature,
            "stop": list(self.stops),
            "seed": self.request_seed,
        }

    def sentence(self) -> str:
        """Say it in one line."""
        return (
            f"{self.task}, {self.num_fewshot}-shot (shots drawn by seed {self.fewshot_seed}), POST {self.endpoint},"
            f" no template, at most {self.max_gen_toks} tokens, stops {', '.join(map(repr, self.stops))},"
            f" temperature {self.temperature:g}, seed {self.request_seed}, judged by {self.filter}"
        )


def task_name(task: Task) -> str:
    """Return lm-eval's name of the task: its files and results carry it."""
    return task.replace("-", "_")
