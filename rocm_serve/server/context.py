"""What every route works with, made once per app."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rocm_serve.server.choices import Checker
from rocm_serve.server.info import EngineClientProtocol, ServerInfo
from rocm_serve.server.limits import Gate
from rocm_serve.server.metrics import Metrics
from rocm_serve.server.runner import Runner
from rocm_serve.tokens.template import ChatTemplate
from rocm_serve.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class Context:
    client: EngineClientProtocol
    tokenizer: Tokenizer
    info: ServerInfo
    template: ChatTemplate | None
    gate: Gate
    metrics: Metrics
    runner: Runner
    rng: random.Random  # seeds of requests that bring none

    @classmethod
    def build(cls, client: EngineClientProtocol, tokenizer: Tokenizer, info: ServerInfo) -> Context:
        files = tokenizer.files
        names = {"eos_token": files.eos_token, "bos_token": files.bos_token, "pad_token": files.pad_token}
        gate = Gate(client, info)
        metrics = Metrics(client, gate)
        return cls(
            client=client,
            tokenizer=tokenizer,
            info=info,
            template=None if files.chat_template is None else ChatTemplate(files.chat_template, names),
            gate=gate,
            metrics=metrics,
            runner=Runner(client, tokenizer, metrics),
            rng=random.Random(info.seed),
        )

    def checker(self) -> Checker:
        """Return the checks of the running engine. Errors: ApiError 503 while there is none."""
        self.gate.check_ready()
        return Checker(self.tokenizer, self.info, self.client.limits)
