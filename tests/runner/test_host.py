"""The host tier's copies: whole blocks, every `out` before every `in`, and the step's stream behind them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from steelyard.core.step import Swap
from steelyard.errors import StartError
from steelyard.runner import host as host_module
from steelyard.runner.host import HostPool, SideQueue, runs, slots_in
from tests.equality.llama_rig import Cell, check_greedy, prompts, request, tiny_llama
from tests.runner.test_device_runner import serve


def pools() -> list[torch.Tensor]:
    """Two groups of 8 and 4 blocks with a null block each; every block's numbers are its own."""
    return [torch.arange(9.0).repeat_interleave(6).view(9, 3, 2), torch.arange(5.0).repeat_interleave(4).view(5, 4)]


def test_neighbours_on_both_sides_are_one_copy() -> None:
    swaps = [Swap(0, 5, 3, True), Swap(0, 3, 1, True), Swap(0, 4, 2, True), Swap(0, 6, 9, True), Swap(1, 7, 10, True)]
    assert runs(swaps) == [(0, 3, 1, 3), (0, 6, 9, 1), (1, 7, 10, 1)]
    assert runs([]) == []


@pytest.mark.parametrize(("piece_bytes", "num_pieces"), [(1 << 30, [1, 1]), (3 * 24, [2, 1]), (1, [4, 2])])
def test_blocks_go_out_before_others_come_into_their_places(piece_bytes: int, num_pieces: list[int]) -> None:
    device = pools()
    tier = HostPool(device, (4, 2), piece_bytes=piece_bytes)
    assert [len(pieces) for pieces in tier.pieces] == num_pieces and tier.num_slots == (4, 2)
    tier.swap([Swap(0, 1, 4, True), Swap(0, 2, 1, True), Swap(1, 3, 2, True)])
    device[0][1:3], device[1][3] = -1.0, -1.0
    tier.swap([Swap(0, 7, 3, True), Swap(0, 7, 4, False), Swap(0, 8, 1, False), Swap(1, 1, 2, False)])
    assert [float(b[0, 0]) for b in device[0]] == [0, -1, -1, 3, 4, 5, 6, 1, 2]
    assert [float(b[0]) for b in device[1]] == [0, 3, 2, -1, 4]
    assert float(next(tier._run(0, 3, 1))[0, 0, 0]) == 7 and torch.equal(device[0][7], torch.ones(3, 2))


def test_neighbours_in_different_pieces_are_a_copy_a_piece() -> None:
    device = pools()
    tier = HostPool(device, (8, 4), piece_bytes=3 * 24)
    tier.swap([Swap(0, 1 + i, 1 + i, True) for i in range(8)])
    assert [int(b[0, 0]) for piece in tier.pieces[0] for b in piece] == list(range(1, 9))
    device[0][1:] = 0.0
    tier.swap([Swap(0, 1 + i, 1 + i, False) for i in range(1, 7)])
    assert [int(b[0, 0]) for b in device[0]] == [0, 0, 2, 3, 4, 5, 6, 7, 0]


def test_memory_that_the_host_does_not_have_is_refused_with_the_numbers() -> None:
    with pytest.raises(StartError, match=r"--swap-space.*bytes of host memory cannot be had"):
        HostPool(pools(), (1 << 50, 1), piece_bytes=1 << 60)


class Log(TorchDispatchMode):
    """Operators in the order they run; those that allocate are named as such."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in ("slice", "alias"):
            self.log.append(name)
        return func(*args, **(kwargs or {}))


class FakeStream:
    """Stands for both streams; tells the log what it is asked to do."""

    device = torch.device("cpu")

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def wait_event(self, event: FakeEvent) -> None:
        assert event.recorded_on == ["side"] * len(event.recorded_on) and event.recorded_on
        self.log.append(f"{self.name} waits")


class FakeEvent:
    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.recorded_on: list[str] = []

    def record(self, stream: FakeStream) -> None:
        self.recorded_on.append(stream.name)
        self.log.append("done")


def test_the_step_waits_for_copies_on_a_stream_of_their_own_and_nothing_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    cuda = host_module.torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device: FakeStream(log, "side"))
    monkeypatch.setattr(cuda, "Event", lambda: FakeEvent(log))
    monkeypatch.setattr(cuda, "stream", on_stream)
    monkeypatch.setattr(cuda, "current_stream", lambda device: FakeStream(log, "compute"))
    device = pools()
    tier = HostPool(device, (4, 2), SideQueue(torch.device("cpu")))
    for _ in range(2):
        log.clear()
        with Log(log):
            tier.swap([Swap(0, 3, 1, True), Swap(0, 4, 2, True), Swap(1, 1, 1, True), Swap(0, 6, 1, False)])
        assert log == ["on side", "copy_", "copy_", "copy_", "done", "off side", "compute waits"]
    log.clear()
    tier.swap([])
    assert log == [], "a step without swaps does nothing"


def test_slots_are_in_proportion_to_the_blocks_and_none_is_refused() -> None:
    device = pools()
    total = 8 * 24 + 4 * 16
    assert slots_in(total, device) == (8, 4) and slots_in(total // 2, device) == (4, 2)
    assert slots_in(10 * total, device) == (80, 40)
    with pytest.raises(StartError, match=r"--swap-space.*64"):
        slots_in(10, device)
    tier = HostPool(device, (4, 2))
    assert tier.num_slots == (4, 2) and tier.nbytes == 4 * 24 + 2 * 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("host")
    return folder, tiny_llama(folder)


def test_a_runner_with_fixed_buffers_swaps_and_goes_on(
    model: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, oracle = model
    requests = [request(f"r{i}", p, max_tokens=36) for i, p in enumerate(prompts((20, 33, 16, 31)))]
    cell = Cell(block_size=4, num_blocks=36, overlap=True, swap_space_bytes=1 << 22)
    ran, _ = serve(monkeypatch, folder, cell, requests)
    check_greedy(oracle, ran)
    counters = ran.scheduler.counters
    assert counters.swaps_in > 0 and counters.recomputed_tokens == 0 and ran.simulation.max_in_flight == 2
