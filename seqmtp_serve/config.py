"""The configuration tree: frozen, built once at the edge, passed down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from seqmtp_serve.errors import InvalidField

AUTO = "auto"  # the best backend that can run here


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which backend computes what, by its name in `model/backends/`.

    `attention` is absorbed latent attention, `prefill` its naive form, `experts` their grouped product, and `dispatch`
    carries rows to experts on other ranks.
    """

    attention: str = AUTO
    prefill: str = AUTO
    experts: str = AUTO
    dispatch: str = AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a target or proposer engine computes and what it may hold.

    `numerics` "invariant": a row's bits depend on its own prefix only, never on batch, chunking or depth; "fast" drops
    that promise. `weights` is the storage of the linear layers. `device` is `cpu`, or `cuda`, which takes a rank's own
    (`model/device.py`), or `cuda:N`; a GPU has neither `invariant` numerics nor int8 layers, and asking for them there
    is InvalidField. A page holds `page_size` positions of every layer;
    `num_pages` bounds all sequences together; `prefix_cache_pages` of them may keep texts that ended, for others that
    start alike (0: no text is shared). `max_batch` bounds the sequences of one step, `max_depth` the drafts of
    one round, `draft_top_n` the support of a sparse draft distribution. `hidden_window` and `hidden_dtype` say which
    hidden rows of a prompt a target gives its proposer, and in which form (`engine/hidden_rows.py`). `prompt_lookup`: a
    target may copy a round's drafts from the request's own text (`speculation/prompt_lookup.py`), at most `max_copied`,
    or `max_depth` if that is more.
    """

    numerics: Literal["invariant", "fast"] = "invariant"
    weights: Literal["int8", "fp32", "bf16"] = "int8"
    device: str = "cpu"
    page_size: int = 64
    num_pages: int = 512
    prefix_cache_pages: int = 128
    max_model_len: int = 2048
    max_batch: int = 16
    max_depth: int = 3
    num_threads: int = 1
    draft_top_n: int = 16
    hidden_window: int = 0
    hidden_dtype: Literal["fp32", "fp16", "bf16", "int8"] = "fp32"
    prompt_lookup: bool = True
    max_copied: int = 8
    kernels: Kernels = Kernels()

    def __post_init__(self) -> None:
        """Refuse what nobody has a kernel, or evidence, for. Says everything that has to change at once."""
        changes = []
        if self.device != "cpu" and self.weights == "int8":
            changes.append("weights to bf16 or fp32 (the int8 products are kernels of a CPU)")
        if self.device != "cpu" and self.numerics == "invariant":
            changes.append("numerics to fast (no GPU was shown to give a row the same bits in every batch)")
        if self.device == "cpu" and self.weights == "bf16" and self.numerics == "invariant":
            changes.append("numerics to fast (bf16 products have no tiles)")
        if changes:
            raise InvalidField(f"on {self.device} set {', and '.join(changes)}", param="engine.device")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How a coordinator fills steps, and how long it waits for whom.

    `step_tokens` bounds the rows of one step. It must leave room for a prefill beside a full batch of verify rows, so
    that neither can starve the other; InvalidField otherwise. `max_copied` drafts of a round may be copied where
    `max_depth` is less, but for requests that ask for less depth than that: copies take no pass of the module.
    """

    max_batch: int = 16  # sequences running at once, all cohorts together
    max_waiting: int = 256  # queued sequences before Overloaded
    max_waiting_tokens: int = 262_144  # tokens they have to prefill, before Overloaded; 0: no bound
    step_tokens: int = 512  # rows of one step
    prefill_chunk: int = 256  # prompt rows of one sequence in one step
    cohorts: int = 1  # batches in flight: while one verifies, another drafts and commits
    max_depth: int = 3
    depth_policy: Literal["static", "auto"] = "static"
    max_copied: int = 0
    step_deadline_ms: float = 30_000.0
    lease_s: float = 30.0
    retry_first_s: float = 0.05  # back-off between repeats of a store or target call
    retry_max_s: float = 1.0
    submit_wait_s: float = 5.0  # for the store, before a request is turned away with NotReady
    store_wait_s: float = 120.0  # for the store, before running streams end with StoreUnreachable
    target_wait_s: float = 60.0  # for a target group, before waiting streams end with NotReady

    def __post_init__(self) -> None:
        """Refuse a tree under which a sequence could wait for ever."""
        for name in ("max_batch", "step_tokens", "prefill_chunk", "cohorts"):
            if getattr(self, name) < 1:
                raise InvalidField(f"{name} must be at least 1", param=name)
        if min(self.max_depth, self.max_waiting, self.max_waiting_tokens) < 0:
            raise InvalidField("max_depth and max_waiting cannot be negative", param="max_depth")
        if self.step_tokens <= self.max_batch * (self.max_depth + 1):
            message = "step_tokens must exceed max_batch * (max_depth + 1): prefill needs rows beside a full batch"
            raise InvalidField(message, param="step_tokens")


def copied_limit(asked: int, max_depth: int, max_copied: int) -> int:
    """Drafts of a round that may be copied, of a request that asked for so many: `max_copied`, if it left it to us."""
    return asked if asked < max_depth else max(max_depth, max_copied)
