"""What the sizes of a server are where no flag gives them, by kind of device. The runner takes these and plans do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Defaults:
    """Named as the flags of `steelyard serve`; gpu_memory_utilization is a share of the device's memory."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    gpu_memory_utilization: float


ON_GPU = Defaults(max_num_seqs=1024, max_num_batched_tokens=8192, block_size=64, gpu_memory_utilization=0.9)
ON_CPU = Defaults(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, gpu_memory_utilization=0.3)
BY_DEVICE = {"cuda": ON_GPU, "cpu": ON_CPU}
