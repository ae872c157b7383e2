"""The model, its caches and its buffers on one device: carries out plans and gives back tokens."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from tetrad.config.engine_config import EngineConfig
from tetrad.core.engine_core import Drawn
from tetrad.core.plan import StepPlan
from tetrad.errors import DeviceLostError
from tetrad.models.step import Rows
from tetrad.runner.sampler import SampledToken, SamplingRow

logger = logging.getLogger(__name__)


class ModelRunner:
    """Loads the weights, allocates the caches, and turns each plan into tokens.

    What it knows of a request came with the request's admission; between steps it keeps what was drawn.
    """

    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.config = config

    @torch.no_grad()
    def execute(self, plan: StepPlan) -> list[Drawn]:
        """Run one step. One result for each segment with wanted rows, in order.

        Raises:
            DeviceLostError: the device answers no more.
        """
        try:
            rows = self.begin(plan)
            logits = self.forward(rows)
            self.table.advance(rows)
            return self.draw(plan, logits)
        except Exception as error:
            self._check_device(error)
            raise

    def begin(self, plan: StepPlan) -> Rows:
        """Take in what the plan changes; the rows to compute."""
        self.pools.copy(plan.block_copies, plan.request_copies)
        for request in plan.leaves:
            self._sampling.pop(request, None)
        for admission in plan.admissions:
            self._sampling[admission.request] = SamplingRow(
                admission.sampling, admission.prompt_token_ids, list(admission.output_token_ids), admission.seed
            )
        return self.table.apply(plan)

    def forward(self, rows: Rows) -> Tensor:
        """The model's logits fp32 [S, vocabulary] of the wanted rows, padding included."""
        return self.model(self.model.metadata(rows), self.caches)

    def draw(self, plan: StepPlan, logits: Tensor) -> list[Drawn]:
        """Draw the next tokens, and put them into the request table."""
        wanted = [segment for segment in plan.segments if segment.wanted]
        assert all(segment.wanted == 1 for segment in wanted), "nobody drafts yet"
        states = [self._sampling[segment.request] for segment in wanted]
        tokens = self.sampler.sample(logits[: len(wanted)], states)
        drawn = [(segment.request, token.token_id) for segment, token in zip(wanted, tokens, strict=True)]
        for state, token in zip(states, tokens, strict=True):
            if token.error is None:
                state.output_token_ids.append(token.token_id)
        self.table.draw([pair for pair in drawn if pair[1] >= 0])
        return [_drawn(token) for token in tokens]

    def _check_device(self, error: Exception) -> None:
        """Tell a device that answers no more from a step that failed."""
        if self.config.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.config.device)
        except Exception as lost:
            raise DeviceLostError(f"the device is lost ({lost}); build the engine anew") from error


def _drawn(token: SampledToken) -> Drawn:
    if token.error is not None:
        return Drawn(error=token.error)
    logprobs = () if token.logprobs is None else (token.logprobs,)
    return Drawn((token.token_id,), logprobs)
