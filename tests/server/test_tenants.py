"""The tenants file: what it may say, and that a mistake in it is one line that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.cli.main import main
from steelyard.errors import InvalidRequest, StartError
from steelyard.server.errors import Unauthorized
from steelyard.server.tenants import Tenant, hash_key, load_tenants, read_keys

KEY = hash_key("sk-one")


def write(folder: Path, text: str) -> Path:
    path = folder / "tenants.toml"
    path.write_text(text)
    return path


def test_a_key_finds_its_tenant_and_a_printed_one_works_when_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "acme"]) == 0
    key, _, lines = capsys.readouterr().out.partition("\n\n")
    tenants = load_tenants(write(tmp_path, lines + 'weight = 2.5\nlabel = "a"\n'), ["sk-operator"])
    acme = tenants.identify(f"Bearer {key}".encode())
    assert (acme.name, acme.weight, acme.label, acme.operator) == ("acme", 2.5, "a", False)
    assert tenants.identify(b"bearer sk-operator").operator
    with pytest.raises(Unauthorized):
        tenants.identify(f"Bearer {key}x".encode())
    assert key not in lines


def test_what_lost_a_key_is_to_be_forgotten_and_nothing_else(tmp_path: Path) -> None:
    table = '[[tenant]]\nname = "{}"\nkeys = [{}]\n'
    keys = [f'"{hash_key(f"sk-{i}")}"' for i in range(6)]
    first = [("a", keys[0]), ("b", f"{keys[1]}, {keys[2]}"), ("c", keys[3])]
    second = [("a", f"{keys[0]}, {keys[4]}"), ("b", keys[1]), ("d", keys[5])]
    texts = ["".join(table.format(*row) for row in rows) for rows in (first, second)]
    before = load_tenants(write(tmp_path, texts[0]), ["sk-operator"])
    after = load_tenants(write(tmp_path, texts[1]), ["sk-operator"], before.server_key)
    assert before.revoked_in(after) == [before.namespace(before.all[name]) for name in "bc"]
    assert after.namespace(after.all["a"]) == before.namespace(before.all["a"])
    assert after.revoked_in(after) == []


def test_without_keys_everybody_is_the_operator() -> None:
    tenants = load_tenants(None, [])
    assert tenants.open
    assert tenants.identify(None).operator


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[tenant]]\nkeys = []", "at least one of keys"),
        (f'[[tenant]]\nkeys = ["{KEY}"]', "needs a name"),
        ('[[tenant]]\nname = "a"\nkeys = ["sk-plain"]', "sha256:"),
        ('[[tenant]]\nname = "a"\nkeys = 5', "at least one of keys"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\nttft_slo_ms = inf', "ttft_slo_ms cannot be inf"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\npriority = -2\nmin_priority = -1', "below its min_priority"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\nwieght = 1', "wieght is not a field"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\nweight = 0', "weight cannot be 0"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\nmax_concurrent_requests = true', "max_concurrent_requests"),
        (f'[[tenant]]\nname = "a"\nkeys = ["{KEY}"]\n[[tenant]]\nname = "b"\nkeys = ["{KEY}"]', "a key is there twice"),
        ("tenant = 5", "[[tenant]] tables"),
        ("other = 5", "[[tenant]] tables"),
        ("[[tenant", "tenants.toml"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(StartError, match="--tenants") as caught:
        load_tenants(write(tmp_path, text), [])
    assert named in caught.value.message


def test_a_key_file_has_a_key_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# of the gateway\nsk-a\n\n  sk-b \n")
    assert read_keys(path) == ["sk-a", "sk-b"]
    path.write_text("# none\n")
    with pytest.raises(StartError, match="no key"):
        read_keys(path)
    with pytest.raises(StartError, match="missing"):
        read_keys(tmp_path / "missing")


@pytest.mark.parametrize(
    ("tenant", "lowest"),
    [
        (Tenant("a"), 0),
        (Tenant("a", priority=-3), -3),
        (Tenant("a", priority=4), 0),
        (Tenant("a", min_priority=2, priority=4), 2),
        (Tenant("a", operator=True, min_priority=-7), -7),
        (Tenant("a", operator=True), None),
    ],
)
def test_a_tenant_goes_no_further_forward_than_it_may(tenant: Tenant, lowest: int | None) -> None:
    tenant.check_priority(-(2**63) if lowest is None else lowest)
    if lowest is not None:
        with pytest.raises(
            InvalidRequest, match=f"priority: must be at least {lowest} for this tenant, got {lowest - 1}"
        ):
            tenant.check_priority(lowest - 1)
