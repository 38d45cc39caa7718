"""What a step is charged to tenants, and what steps are predicted to cost: the step ledger as a scheduler needs it.

device time of a step = tenants' shares + computed again + engine (padding, overhead)
                        '- charged ---'   '--------- nobody's: the system's --------'
"""

from __future__ import annotations

from collections.abc import Mapping

from steelyard.ledger.book import Stay, StepBook, StepEntry


def tenant_charges(entry: StepEntry, stays: Mapping[int, Stay]) -> dict[str, tuple[int, int]]:
    """(nanoseconds, tokens) of each tenant in a step, without what was computed once before."""
    rows = entry.rows
    fresh = rows.num_new - rows.num_again
    charged_ns = entry.shares_ns * fresh // rows.num_new
    found: dict[str, tuple[int, int]] = {}
    for ticket, amount_ns, num_tokens in zip(rows.owners.tolist(), charged_ns.tolist(), fresh.tolist()):
        tenant = stays[ticket].tenant
        before_ns, before_tokens = found.get(tenant, (0, 0))
        found[tenant] = (before_ns + amount_ns, before_tokens + num_tokens)
    return found


class LearnedCost:
    """Predictions from the rates that explain the last steps (`ledger.rates`); 0 before there are any.

    max_tokens  of a step: a longer prompt is computed in several, and each reads the weights
    """

    def __init__(self, book: StepBook, max_tokens: int) -> None:
        self._book = book
        self._max_tokens = max_tokens

    def step_ns(self, num_tokens: int, num_rows: int, context_tokens: int) -> int:
        """A step of `num_tokens` in all, of which `num_rows` are decodes over `context_tokens`."""
        rates = self._book.rates
        rows_ns = rates.context_ns * context_tokens + rates.row_ns * num_rows
        return round(rates.products_ns + rates.token_ns * num_tokens + rows_ns)

    def recompute_ns(self, num_tokens: int) -> int:
        """A prompt of `num_tokens` alone, in full steps."""
        rates = self._book.rates
        num_steps = -(-num_tokens // self._max_tokens)
        pairs = num_tokens * (num_tokens + 1) // 2
        return round(rates.products_ns * num_steps + rates.token_ns * num_tokens + rates.pair_ns * pairs)

    def swap_ns(self, num_tokens: int) -> int:
        """Not known from steps: never cheaper than computing again."""
        return self.recompute_ns(num_tokens)
