"""The model, its caches and its buffers on one device: carries out plans and gives back tokens."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from tetrad import bundled
from tetrad.cache.groups import CacheSizes, format_bytes
from tetrad.cache.pools import CachePools
from tetrad.config import memory
from tetrad.config.cpu_threads import with_cpu_threads
from tetrad.config.engine_config import EngineConfig
from tetrad.core.engine_core import Drawn
from tetrad.core.plan import StepPlan
from tetrad.errors import ConfigError, DeviceLostError
from tetrad.geometry import blocks_for
from tetrad.models.caches import layer_caches
from tetrad.models.checkpoint.dummy import fill_dummy
from tetrad.models.checkpoint.reader import load_checkpoint
from tetrad.models.deepseek_v4 import DeepseekV4
from tetrad.models.step import Rows
from tetrad.runner.request_table import RequestTable
from tetrad.runner.sampler import SampledToken, Sampler, SamplingRow
from tetrad.torch_settings import undisturbed

logger = logging.getLogger(__name__)


class ModelRunner:
    """Loads the weights, allocates the caches, and turns each plan into tokens.

    What it knows of a request came with the request's admission; between steps it keeps what was drawn.
    """

    @undisturbed
    def __init__(self, config: EngineConfig, *, progress: bool = False) -> None:
        self.config = config
        bundled.require_weights(config.model_path, dummy=config.load_format == "dummy")
        # the arithmetic comes before the weights, so that a wrong size is known at once
        weights = memory.check_weights(config)
        config.cache_sizes(memory.cache_memory(config, weights_to_come=weights))
        self.model = self._load(progress)
        self.sizes: CacheSizes = config.cache_sizes(memory.cache_memory(config))
        self.pools = self._allocate()
        self.caches = layer_caches(config.model, self.pools)
        self.table = RequestTable(
            requests=config.max_num_seqs,
            max_model_len_blocks=blocks_for(config.max_model_len),
            step_rows=config.max_num_batched_tokens,
            device=config.device,
        )
        self.sampler = Sampler(config.model.vocab_size)
        self.rows_in_step = 0
        self._sampling: dict[int, _Sampled] = {}
        logger.info(
            "caches: %d blocks, rings of %d requests, %d rows in a step, %s in all",
            self.sizes.blocks,
            self.sizes.requests,
            self.sizes.step_rows,
            format_bytes(self.pools.groups.total_bytes(self.sizes)),
        )

    @with_cpu_threads
    def _load(self, progress: bool) -> DeepseekV4:
        config = self.config
        try:
            with config.device:
                model = DeepseekV4(
                    config.model, config.dtype, quant=config.activation_quant, indexer_options=config.indexer
                )
            if config.load_format == "dummy":
                fill_dummy(model, config.model, config.seed or 0)
            else:
                load_checkpoint(config.model_path, config.model, model, device=config.device, progress=progress)
        except (MemoryError, RuntimeError) as error:
            if _is_lack_of_memory(error):
                raise memory.weights_not_allocated(config, error) from error
            raise
        return model.eval()

    def _allocate(self) -> CachePools:
        groups = self.config.cache_groups
        try:
            return CachePools(groups, self.sizes, self.config.device)
        except RuntimeError as error:  # torch raises nothing more exact on a CPU
            raise ConfigError(
                f"the caches take {format_bytes(groups.total_bytes(self.sizes))}, which {self.config.device} does not "
                f"have ({str(error).splitlines()[0]}); lower --kv-cache-memory-gb or --num-gpu-blocks-override"
            ) from error

    @undisturbed
    @with_cpu_threads
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
        self.rows_in_step = plan.rows
        self.pools.copy(plan.block_copies, plan.request_copies)
        for request in plan.leaves:
            self._sampling.pop(request, None)
        for admission in plan.admissions:
            drawn = list(admission.output_token_ids)
            row = SamplingRow(admission.sampling, admission.prompt_token_ids, drawn, admission.seed)
            self._sampling[admission.request] = _Sampled(row, drawn)
        return self.table.apply(plan)

    def forward(self, rows: Rows) -> Tensor:
        """The model's logits fp32 [S, vocabulary] of the wanted rows, padding included."""
        return self.model(self.model.metadata(rows), self.caches)

    def draw(self, plan: StepPlan, logits: Tensor) -> list[Drawn]:
        """Draw the next tokens, and put them into the request table."""
        wanted = [segment for segment in plan.segments if segment.wanted]
        assert all(segment.wanted == 1 for segment in wanted), "nobody drafts yet"
        states = [self._sampling[segment.request] for segment in wanted]
        tokens = self.sampler.sample(logits[: len(wanted)], [state.row for state in states])
        drawn = [(segment.request, token.token_id) for segment, token in zip(wanted, tokens, strict=True)]
        for state, token in zip(states, tokens, strict=True):
            if token.error is None:
                state.drawn.append(token.token_id)
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


class _Sampled(NamedTuple):
    """How a request samples, and what it has drawn: the list that ``row`` reads."""

    row: SamplingRow
    drawn: list[int]


def _drawn(token: SampledToken) -> Drawn:
    if token.error is not None:
        return Drawn(error=token.error)
    logprobs = () if token.logprobs is None else (token.logprobs,)
    return Drawn((token.token_id,), logprobs)


def _is_lack_of_memory(error: Exception) -> bool:
    # torch raises nothing more exact than RuntimeError on a CPU
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
