"""What is asked of a GPU before a kernel is chosen or compiled for it: a value, so that the GPU need not be here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steelyard.errors import StartError

SHARED_BYTES = {
    (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (9, 0): 232_448,
    (10, 0): 232_448, (10, 3): 232_448, (12, 0): 101_376, (12, 1): 101_376,
}  # fmt: skip
"""Shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, "Compute Capabilities")."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """capability: (major, minor) of its compute capability."""

    capability: tuple[int, int]
    name: str

    @property
    def arch(self) -> str:
        """As compilers write it: sm_90."""
        return f"sm_{self.number}"

    @property
    def number(self) -> int:
        """As Triton writes it: 90."""
        return 10 * self.capability[0] + self.capability[1]


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU behind a device of this machine, None for any other device."""
    if device.type != "cuda":
        return None
    return Gpu(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


def gpu_of_arch(arch: str) -> Gpu:
    """A GPU that is elsewhere, by its architecture. Raises StartError for one whose limits are not known here."""
    known = {Gpu(capability, "").arch: capability for capability in SHARED_BYTES}
    if arch not in known:
        raise StartError(f"--arch must be one of {', '.join(known)}, got {arch!r}", param="arch")
    return Gpu(known[arch], arch)
