"""From a name to an exchange, and all exchanges of a model at once."""

from __future__ import annotations

from collections.abc import Iterable

from rocm_serve.errors import UserError
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.all_gather import AllGatherExchange
from rocm_serve.parallel.exchange.contract import ExchangeSpec, ExpertExchange
from rocm_serve.parallel.exchange.local import LocalExchange
from rocm_serve.parallel.exchange.mori import MoriExchange, MoriSetup, MoriWorld
from rocm_serve.parallel.exchange.torch_a2a import TorchExchange


def make_exchange(
    spec: ExchangeSpec, comm: Comm, *, row_multiple: int, mori: MoriWorld | None = None
) -> ExpertExchange:
    """Build one exchange of the ranks of `comm`, a stage's tensor-parallel group. Called by all of them."""
    if spec.ep < 1 or comm.size % spec.ep:
        raise UserError(f"--ep {spec.ep} does not divide the {comm.size} tensor-parallel ranks of a stage")
    if spec.name == "local":
        return LocalExchange(spec, comm)
    if spec.name == "torch":
        return TorchExchange(spec, comm, row_multiple)
    if spec.name == "all_gather":
        return AllGatherExchange(spec, comm, row_multiple)
    if spec.name == "mori":
        if spec.ep != comm.size:
            raise UserError(f"mori sends rows to whole experts: --ep {comm.size} (= --tp), not --ep {spec.ep}")
        assert mori is not None, "MORI is started before its exchanges are built"
        return MoriExchange(spec, comm, row_multiple, mori)
    raise UserError(f"there is no expert exchange {spec.name!r}; legal: local, torch, all_gather, mori")


class Exchanges:
    """The exchanges of a model's layers, one for each distinct spec, built in the order given.

    `specs` are those of the whole model, the draft's included, and the same on every rank of every stage: MORI waits
    for all ranks of the world whenever an op is built, so a stage builds what it does not use, too, and none may be
    built later, when the stages wait for each other's rows. `mori`: needed if any spec's name is that.
    """

    def __init__(
        self, specs: Iterable[ExchangeSpec], comm: Comm, *, row_multiple: int, mori: MoriSetup | None = None
    ) -> None:
        distinct = list(dict.fromkeys(specs))
        of_mori = [spec for spec in distinct if spec.name == "mori"]
        self._world = None
        if of_mori:
            assert mori is not None, "the exchange mori needs a MoriSetup"
            self._world = MoriWorld(mori, of_mori)
        self._built = {
            spec: make_exchange(spec, comm, row_multiple=row_multiple, mori=self._world) for spec in distinct
        }

    def of(self, spec: ExchangeSpec) -> ExpertExchange:
        return self._built[spec]

    def close(self) -> None:
        """Give back what the exchanges hold outside this process's own memory. Every rank calls it, at the end."""
        for exchange in self._built.values():
            if isinstance(exchange, MoriExchange):
                exchange.close()
        self._built.clear()
        if self._world is not None:
            self._world.close()
            self._world = None
