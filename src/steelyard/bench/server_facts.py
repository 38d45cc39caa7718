"""What a server says it is and runs with. Nothing is asked of its engine."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.bench.scrape import Page, fetch, labelled
from steelyard.bench.target import Client


async def server_facts(client: Client, page: Page) -> dict[str, Any]:
    """What the server says of itself: models, version, cache configuration. Parts it does not have are left out."""
    found: dict[str, Any] = {}
    for name, path in (("models", "/v1/models"), ("version", "/version"), ("server_info", "/server_info")):
        status, text = await fetch(client, path)
        if status == 200:
            try:
                found[name] = msgspec.json.decode(text)
            except msgspec.DecodeError:
                continue
    for name in ("vllm:cache_config_info", "steelyard:config_info"):
        for labels, _ in page.get(name, ()):
            found.setdefault("config", {}).update({k: v for k, v in labels.items() if k != "model_name"})
    states = labelled(page, "steelyard:kv_blocks", "state")
    if states:
        found["kv_blocks_total"] = states.get("total")
    return found


def model_of(facts: dict[str, Any]) -> tuple[str | None, str | None, int | None]:
    """(model id, owner, longest context) of the first model the server lists."""
    models = facts.get("models")
    data = models.get("data") if isinstance(models, dict) else None
    if not data:
        return None, None, None
    card = data[0]
    return card.get("id"), card.get("owned_by"), card.get("max_model_len")
