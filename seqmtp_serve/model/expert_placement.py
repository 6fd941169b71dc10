"""Which rank of an expert-parallel group holds which experts: consecutive ids, as even as they come. No torch."""

from __future__ import annotations


def experts_of(rank: int, world_size: int, num_experts: int) -> range:
    """The experts of `rank`, the only ones it reads from disk or holds. Ranges of all ranks tile `0 .. num_experts`.

    With fewer experts than ranks some ranges are empty: such a rank only attends.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    return range(rank * num_experts // world_size, (rank + 1) * num_experts // world_size)


def first_experts(world_size: int, num_experts: int) -> tuple[int, ...]:
    """The first expert of each rank, and `num_experts` at the end: `world_size + 1` ascending bounds."""
    return tuple(rank * num_experts // world_size for rank in range(world_size + 1))
