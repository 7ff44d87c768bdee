"""Steps that no fixed size holds whole, but that two hold: one the requests that decode or draft, one the prompts.

Their rows cross edges as those of any step: in the order of the plan, padding last.
"""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

from rocm_serve.config import graphs as sizes
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.messages import Plan


def parts_of(
    plan: Plan, decode: DecodeSteps | DraftSteps | None, prompts: PromptSteps | None
) -> tuple[Plan, Plan] | None:
    """Return the plans of decoding works and of prompts, without news of requests; None where it is not in parts.

    Plan and sizes alone decide, so every rank of a stage says the same, with graphs and without; edges do not depend
    on it.
    """
    works = plan.work
    count = sum([work.recurrent for work in works])  # they come first
    if decode is None or prompts is None or not 0 < count < len(works) or count > sizes.PARTS_DECODES:
        return None
    if prompts.takes(plan):
        return None
    decoded = replace(plan, work=works[:count], new=(), released=())
    prompted = replace(plan, work=works[count:], new=(), released=())
    return (decoded, prompted) if decode.takes(decoded) and prompts.takes(prompted) else None


def num_rows(plan: Plan) -> int:
    """Return the rows of a plan, without padding."""
    return sum([work.num_rows for work in plan.work])


def joined_rows(first_TH: Tensor, count: int, second_TH: Tensor, more: int, rows: int) -> Tensor:
    """Return [rows, H]: `count` rows of one part, `more` of the other, and zeros."""
    out_TH = first_TH.new_empty((rows, first_TH.shape[1]))
    out_TH[:count] = first_TH[:count]
    out_TH[count : count + more] = second_TH[:more]
    out_TH[count + more :] = 0
    return out_TH
