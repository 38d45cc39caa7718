"""The device table, and devices from a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.cli.main import main
from steelyard.errors import StartError
from steelyard.plan.device import DEVICES, GIB, Ceilings, ceilings_toml, find_device, read_device

TABLE = {  # bf16 TFLOP/s, fp8 TFLOP/s, GB/s, GB as sold, ridge
    "A100-40": (312, None, 1555, 40, 201),
    "A100-80": (312, None, 2039, 80, 153),
    "H100": (989.4, 1978.9, 3350, 80, 295),
    "H100-PCIe": (756, 1513, 2000, 80, 378),
    "H200": (989.4, 1978.9, 4800, 141, 206),
    "B200": (2250, 4500, 8000, 180, 281),
    "GB200": (2500, 5000, 8000, 186, 312),
    "L4": (60.5, 121, 300, 24, 202),
    "L40": (181, 362, 864, 48, 210),
    "L40S": (362, 733, 864, 48, 419),
    "RTX-4090": (165.2, 330.3, 1008, 24, 164),
    "MI300X": (1307, 2615, 5300, 192, 247),
    "MI325X": (1307, 2615, 6000, 256, 218),
    "TPU-v5e": (197, None, 820, 16, 240),
}


@pytest.mark.parametrize("name", TABLE)
def test_datasheet_values_and_ridge(name: str) -> None:
    bf16, fp8, bandwidth, label, ridge = TABLE[name]
    device = find_device(name)
    assert device.bf16_flops == bf16 * 1e12
    assert device.fp8_flops == (None if fp8 is None else fp8 * 1e12)
    assert device.bandwidth == bandwidth * 1e9
    assert device.label_gb == label
    assert device.ridge() == pytest.approx(ridge, abs=0.6)


def test_peaks_are_dense_not_sparse() -> None:
    """The sparse number of a 16-bit peak equals the dense 8-bit one: a table with both equal has mixed them."""
    for device in DEVICES.values():
        if device.fp8_flops:
            assert 1.95 < device.fp8_flops / device.bf16_flops < 2.05


def test_memory_is_what_drivers_report_neither_decimal_gb_nor_gib() -> None:
    h200 = find_device("H200")
    assert 139.7 < h200.memory_bytes / GIB < 140.5
    assert 141e9 < h200.memory_bytes < 141 * GIB
    assert find_device("H100").memory_bytes == 81_559 * 2**20
    assert round(find_device("L4").memory_bytes / GIB, 2) == 22.49


def test_names_are_forgiving_and_a_wrong_one_lists_the_known() -> None:
    assert find_device("h200-sxm") is find_device("H200") is find_device("NVIDIA H200")
    with pytest.raises(StartError, match=r"--device must be one of .*H200.*'H300'") as caught:
        find_device("H300")
    assert caught.value.param == "device"


def test_a_custom_device_survives_its_own_toml(tmp_path: Path) -> None:
    measured = find_device("H200").with_ceilings(Ceilings(700e12, 530e12, 3.4e12, 4.1e12, 4.26e12, 3e-4))
    path = tmp_path / "mine.toml"
    path.write_text(ceilings_toml(measured))
    again = find_device(str(path))
    assert again.ceilings is not None and measured.ceilings is not None
    assert again.ceilings.matmul_flops == pytest.approx(700e12)
    assert again.ceilings.step_s == pytest.approx(3e-4)
    assert (again.bandwidth, again.memory_bytes, again.fp8_flops) == pytest.approx(
        (measured.bandwidth, measured.memory_bytes, measured.fp8_flops)
    )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("bandwidth_gb_per_s = 1\nmemory_gib = 1", "bf16_tflops"),
        ("bf16_tflops = -1\nbandwidth_gb_per_s = 1\nmemory_gib = 1", "bf16_tflops"),
        ("bf16_tflops = 1\nbandwidth_gb_per_s = 'fast'\nmemory_gib = 1", "bandwidth_gb_per_s"),
        ("bf16_tflops = 1\nbandwidth_gb_per_s = 1\nmemory_gib = true", "memory_gib"),
        ("bf16_tflops = 1\nbandwidth_gb_per_s = 1\nmemory_gib = 1\nspeed = 3", "speed"),
        ("bf16_tflops = 1\nbandwidth_gb_per_s = 1\nmemory_gib = 1\n[measured]\nmatmul_tflops = 1", "attention_tflops"),
        ("bf16_tflops = 1\nbandwidth_gb_per_s = 1\nmemory_gib = 1\nmeasured = 2", "measured"),
        ("bf16_tflops = 1\nbandwidth_gb_per_s = 1\nmemory_gib = 1\n[measured]\ndoubts = 'x'", "doubts"),
    ],
)
def test_a_bad_device_file_names_its_field(tmp_path: Path, text: str, field: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(StartError, match=field) as caught:
        read_device(path)
    assert caught.value.param == field


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"none\.toml"):
        find_device(str(tmp_path / "none.toml"))
    path = tmp_path / "bad.toml"
    path.write_text("= nonsense")
    with pytest.raises(StartError, match=r"bad\.toml.*TOML"):
        find_device(str(path))


def test_what_was_doubtful_when_measuring_is_said_by_every_later_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doubt = 'the machine was busy ("load" 9)'
    measured = replace(find_device("H200"), doubts=(doubt,)).with_ceilings(
        Ceilings(700e12, 530e12, 3.4e12, 4.1e12, 4.26e12, 3e-4)
    )
    path = tmp_path / "mine.toml"
    path.write_text(ceilings_toml(measured))
    assert read_device(path).doubts == (doubt,)
    load = "--rate 1 --input 100 --output 100"
    for topic in ("", f"compare --to device={path}", f"tune {load}", "cache", "waste"):
        word, _, flags = topic.partition(" ")
        device = "H200" if word == "compare" else str(path)
        assert main(["plan", *([word] if word else []), "llama-3-8b", "--device", device, *flags.split()]) == 0
        said = capsys.readouterr()
        assert (said.out + said.err).count(doubt) == 1, topic
        assert ("in doubt: see the notes" in said.out) == (word == "")
