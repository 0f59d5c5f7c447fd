"""Assembles what an engine speculates with: the model's drafter, the recorded steps, the speculator and its costs.

Knows the configuration and every part of speculation. Called by core/build.py.
"""

from torch import Tensor

from headrace.config import Config, SchedulerConfig
from headrace.core.draft_graphs import MOST_ROWS, ROW_SIZES, TOKEN_SIZES, DraftGraphs
from headrace.core.execute import Executor
from headrace.core.models.base import Model
from headrace.core.mtp_drafter import MtpDrafter
from headrace.core.speculation.ngram_drafter import NgramDrafter
from headrace.core.speculator import Speculator
from headrace.core.step_timer import time_steps
from headrace.ipc.limits import MAX_DRAFTS

# Sizes that are timed at start where no step is recorded: on a CPU.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def model_depth(config: Config, model: Model) -> int:
    """Tokens that the model's own drafter looks ahead; 0 = it has none, or shall not."""
    wanted = config.speculation.drafters
    return config.speculation.draft_tokens if wanted in ("auto", "mtp") and model.mtp else 0


def num_draft_graphs(config: Config) -> int:
    """At most, on a card."""
    return 0 if config.speculation.drafters == "off" else 2 * (len(TOKEN_SIZES) + len(ROW_SIZES))


def add_drafter(
    config: Config,
    executor: Executor,
    model: Model,
    pool: Tensor,
    *,
    limits: SchedulerConfig,
    max_model_len: int,
    largest_only: bool,
) -> DraftGraphs | None:
    """Give the executor the model's drafter, and on a card recorded steps with drafts.

    Args:
        largest_only: see DraftGraphs.
    """
    if config.speculation.drafters == "off":
        return None
    drafter = None
    depth = model_depth(config, model)
    if depth and model.mtp is not None:
        drafter = MtpDrafter(
            model.mtp,
            pool,
            executor.sampler,
            depth=depth,
            num_slots=limits.max_num_seqs + 1,
            vocab_size=model.spec.vocab_size,
            max_model_len=max_model_len,
        )
        executor.use_drafter(drafter)
    if not pool.is_cuda:
        return None
    graphs = DraftGraphs(
        model,
        pool,
        executor.sampler,
        drafter,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.cache.block_size,
        largest_only=largest_only,
    )
    executor.use_draft_graphs(graphs)
    return graphs


def make_speculator(config: Config, model: Model) -> Speculator | None:
    """None where nothing shall be drafted."""
    wanted = config.speculation.drafters
    if wanted == "off":
        return None
    return Speculator(
        [NgramDrafter()] if wanted in ("auto", "ngram") else [],
        ahead=model_depth(config, model),
        limit=MAX_DRAFTS,
        exact=config.engine.deterministic,
    )


def weigh(
    config: Config,
    speculator: Speculator,
    executor: Executor,
    model: Model,
    graphs: DraftGraphs | None,
    *,
    limits: SchedulerConfig,
    max_model_len: int,
) -> None:
    """Time the engine's steps, so that drafts are verified only where they pay."""
    slots, budget = limits.max_num_seqs, limits.max_num_batched_tokens
    most_rows = min(slots, MOST_ROWS) if graphs is not None else slots
    tokens = graphs.token_sizes if graphs is not None else [size for size in TOKENS if size <= budget]
    drafter = executor.drafter
    if drafter is not None:
        drafter.gives_up = False
    costs = time_steps(
        executor,
        rows=[*(size for size in ROWS if size < slots), slots],
        drafting_rows=[*(size for size in ROWS if size < most_rows), most_rows],
        tokens=tokens,
        ahead=model_depth(config, model),
        spare_slot=slots,
        block_size=config.cache.block_size,
        max_model_len=max_model_len,
        padded=graphs is not None,
    )
    if drafter is not None:
        drafter.gives_up = True
    speculator.use_costs(costs)
