"""The shadow KV runner: obeys plans as a model's runner would, and fails at once where a plan is wrong.

    slot     (position, token, chain)       chain = mix(chain of the position before, token), from the row's secret
    attention at position p: walk the block table; every slot it can see must hold exactly the row's own history
    next token = mix(chain, seed): wrong KV that escaped the walk would still change the text

A stale table, a skipped copy, a block freed too early, a write to a shared block or another tenant's KV raises
ShadowError. So does a swap that a side stream could not make at once: a step not yet collected uses its block. Steps
run when launched and are revealed when collected, as on a device with a stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.step import (
    POOLED,
    MemoryTerms,
    RowEnter,
    RowOut,
    RowWork,
    RunnerCaps,
    StepPlan,
    StepResult,
    StepTiming,
    TokenLogprobs,
    Want,
)

_MASK = 2**64 - 1
_Slot = tuple[int, int, int]
_EMPTY: _Slot = (-1, -1, -1)
_Block = tuple[int, int]


class ShadowError(AssertionError):
    """A plan would have made a real runner read or write wrong KV."""


@dataclass(slots=True)
class _Row:
    """A line of the device tables: tokens, what each position's slot must hold, block tables, computed length."""

    epoch: int
    tokens: list[int]
    prompt_len: int
    seed: int
    num_top: int
    secret: int
    tables: list[list[int]]
    computed_len: int
    history: list[_Slot] = field(default_factory=list)
    failed: str = ""

    def know(self, end: int) -> None:
        """Extend the history to positions [0, end)."""
        history = self.history
        while len(history) < end:
            position = len(history)
            before = history[-1][2] if history else self.secret
            history.append((position, self.tokens[position], _mix(before, self.tokens[position])))


class ShadowRunner:
    """Implements core.step.Runner. `secret_of` gives the tenant a row belongs to, as a number mixed into its KV.

    fail   called with (plan, work) before each row's work; a message fails that row
    step_ns  device time each step claims, on `clock`
    """

    def __init__(
        self,
        caps: RunnerCaps,
        *,
        secret_of: Callable[[RowEnter], int] = lambda enter: 0,
        fail: Callable[[StepPlan, RowWork], str | None] = lambda plan, work: None,
        clock: Callable[[], int] = lambda: 0,
        step_ns: Callable[[StepPlan], int] = lambda plan: 0,
    ) -> None:
        self._caps = caps
        self._secret_of = secret_of
        self._fail = fail
        self._clock = clock
        self._step_ns = step_ns
        self._rows: dict[int, _Row] = {}
        self._kv: list[list[list[_Slot]]] = [
            [[_EMPTY] * caps.block_size for _ in range(num_blocks + 1)] for num_blocks in caps.num_blocks
        ]
        self._holders: list[Counter[int]] = [Counter() for _ in caps.groups]
        self._pending: deque[StepResult] = deque()
        self._host: list[dict[int, list[_Slot]]] = [{} for _ in caps.groups]
        self._in_use: deque[tuple[set[_Block], set[_Block]]] = deque()  # of steps not collected: (written, read)
        self.num_copies = 0
        self.num_swaps = 0

    @property
    def caps(self) -> RunnerCaps:
        return self._caps

    def launch(self, plan: StepPlan) -> StepResult:
        """Run the step now; the result is the handle, and is only to be read through `collect`."""
        self._apply(plan)
        for work in plan.work:
            self._copy_drafts(work)
        self._expect(plan.num_tokens <= self._caps.max_batched_tokens, f"{plan.num_tokens} tokens in a step")
        self._check_writes(plan)
        for work in plan.work:
            self._attend(work, self._rows[work.row], 0, work.start)
        rows: list[RowOut] = []
        failed: list[tuple[int, str]] = []
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        pooled: dict[int, tuple[float, ...]] = {}
        for work in plan.work:
            row = self._rows[work.row]
            row.failed = row.failed or self._fail(plan, work) or ""
            if row.failed:
                failed.append((work.row, row.failed))
                continue
            out = self._compute(work)
            rows.append(out)
            if Want.PROMPT_LOGPROBS in work.want:
                prompt_logprobs[work.row] = self._prompt_logprobs(work)
            if work.want & POOLED:
                pooled[work.row] = self._pooled(work)
        launch_ns, device_ns = self._clock(), self._step_ns(plan)
        timing = StepTiming(launch_ns, launch_ns + device_ns, device_ns)
        result = StepResult(plan.id, tuple(rows), timing, prompt_logprobs, pooled, tuple(failed))
        self._pending.append(result)
        self._in_use.append(self._used(plan) if self._caps.num_host_blocks else (set(), set()))
        return result

    def sample(self, step: StepResult, masks: dict[int, Any]) -> None:
        raise ShadowError("the shadow runner knows no grammar masks")

    def collect(self, step: StepResult) -> StepResult:
        self._expect(bool(self._pending) and self._pending[0] is step, "steps are collected in launch order")
        self._in_use.popleft()
        return self._pending.popleft()

    def memory(self) -> MemoryTerms:
        return MemoryTerms(total_bytes=0)

    # the plan's differences

    def _apply(self, plan: StepPlan) -> None:
        for leaving in plan.leave:
            self._expect(leaving in self._rows, f"row {leaving} leaves and is not there")
            for holders, table in zip(self._holders, self._rows.pop(leaving).tables):
                holders.subtract(table)
        for enter in plan.enter:
            self._expect(enter.row not in self._rows, f"row {enter.row} is taken")
            self._expect(0 <= enter.row < self._caps.max_rows, f"row {enter.row} does not exist")
            self._expect(0 <= enter.start < len(enter.tokens), f"row {enter.row} has nothing to compute")
            self._rows[enter.row] = self._new_row(enter)
        for edit in plan.edits:
            row = self._rows[edit.row]
            table, end = row.tables[edit.group], edit.first_index + len(edit.block_ids)
            self._expect(edit.first_index <= len(table), f"row {edit.row}: a hole in the table")
            self._expect(all(0 <= b <= self._caps.num_blocks[edit.group] for b in edit.block_ids), "no such block")
            self._holders[edit.group].subtract(table[edit.first_index : end])
            table[edit.first_index : end] = edit.block_ids
            self._holders[edit.group].update(edit.block_ids)
        self._swap(plan)
        for copy in plan.copies:
            self.num_copies += 1
            blocks = self._kv[copy.group]
            blocks[copy.dst_block] = list(blocks[copy.src_block])

    def _swap(self, plan: StepPlan) -> None:
        """All reads of `out`, then all writes of `in`, as two batches: no block or slot twice in either."""
        outs, ins = [s for s in plan.swaps if s.out], [s for s in plan.swaps if not s.out]
        self._expect(plan.swaps == (*outs, *ins), "a swap in before a swap out")
        for swaps in (outs, ins):
            places = {(s.group, s.host_slot if s.out else s.device_block) for s in swaps}
            self._expect(len(places) == len(swaps), "two swaps into one place")
        for swap in plan.swaps:
            self.num_swaps += 1
            num_slots, block = self._caps.num_host_blocks[swap.group], (swap.group, swap.device_block)
            self._expect(1 <= swap.host_slot <= num_slots, f"no such host slot: {swap}")
            self._expect(swap.device_block != 0, f"the null block: {swap}")
            busy = any(block in written or (not swap.out and block in read) for written, read in self._in_use)
            self._expect(not busy, f"a step in flight uses the block: {swap}")
            blocks, slots = self._kv[swap.group], self._host[swap.group]
            if swap.out:
                slots[swap.host_slot] = list(blocks[swap.device_block])
            else:
                self._expect(swap.host_slot in slots, f"nothing was put there: {swap}")
                blocks[swap.device_block] = list(slots[swap.host_slot])

    def _used(self, plan: StepPlan) -> tuple[set[_Block], set[_Block]]:
        """Blocks that the step's rows write, and that they read."""
        written, read, size = set[_Block](), set[_Block](), self._caps.block_size
        for work in plan.work:
            first, end = work.start // size, -(-(work.start + work.num_new) // size)
            for g, (group, table) in enumerate(zip(self._caps.groups, self._rows[work.row].tables)):
                visible = 0 if group.window is None else max(0, work.start - group.window + 1) // size
                written |= {(g, b) for b in table[first:end]}
                read |= {(g, b) for b in table[visible:end]}
        return written, read

    def _new_row(self, enter: RowEnter) -> _Row:
        return _Row(
            epoch=enter.epoch,
            tokens=list(enter.tokens),
            prompt_len=enter.prompt_len,
            seed=enter.sampling.seed or 0,
            num_top=enter.sampling.logprobs or 0,
            secret=self._secret_of(enter),
            tables=[[] for _ in self._caps.groups],
            computed_len=enter.start,
        )

    # the forward

    def _check_writes(self, plan: StepPlan) -> None:
        """A row writes only to blocks that it alone has in its table."""
        size = self._caps.block_size
        self._expect(len({w.row for w in plan.work}) == len(plan.work), "a row twice in one step")
        for work in plan.work:
            row = self._rows[work.row]
            first, last = work.start // size, (work.start + work.num_new - 1) // size
            for holders, table in zip(self._holders, row.tables):
                self._expect(last < len(table), f"row {work.row}: no block for position {work.start}")
                for block_id in table[first : last + 1]:
                    self._expect(block_id != 0, f"row {work.row} writes to the null block")
                    self._expect(holders[block_id] == 1, f"row {work.row} writes to block {block_id}, which is shared")

    def _compute(self, work: RowWork) -> RowOut:
        row, end = self._rows[work.row], work.start + work.num_new
        self._expect(work.num_new >= 1, f"row {work.row}: a step of no tokens")
        self._expect(work.start == row.computed_len, f"row {work.row}: starts at {work.start}, not {row.computed_len}")
        self._expect(end <= len(row.tokens), f"row {work.row}: position {end - 1} has no token")
        self._expect(end < self._caps.max_model_len + 1, f"row {work.row}: beyond the context length")
        row.know(end)
        size = self._caps.block_size
        for blocks, table in zip(self._kv, row.tables):
            for position in range(work.start, end):
                blocks[table[position // size]][position % size] = row.history[position]
        self._attend(work, row, work.start, end)
        row.computed_len = end
        if Want.TOKEN not in work.want:
            return RowOut(work.row, row.epoch, ())
        self._expect(end == len(row.tokens), f"row {work.row}: samples in the middle of its tokens")
        ids = self._sample(row, work.num_drafts)
        row.computed_len = end - work.num_drafts + len(ids) - 1
        row.tokens[row.computed_len - len(ids) + 1 :] = ids
        del row.history[row.computed_len :]
        logprobs = tuple(self._logprobs(token, row.num_top) for token in ids)
        return RowOut(work.row, row.epoch, ids, logprobs if Want.TOP_LOGPROBS in work.want else None)

    def _copy_drafts(self, work: RowWork) -> None:
        """Guesses stand behind the known tokens while the step is computed."""
        if not work.num_drafts:
            return
        tokens = self._rows[work.row].tokens
        end = work.draft_from + work.num_drafts
        self._expect(self._caps.checks_drafts, "this runner checks no drafts")
        self._expect(len(tokens) == work.start + 1 == work.start + work.num_new - work.num_drafts, "not a decode")
        self._expect(end <= len(tokens), f"row {work.row}: guesses from where nothing is")
        tokens += tokens[work.draft_from : end]

    def _sample(self, row: _Row, num_drafts: int) -> tuple[int, ...]:
        """The next token, and while it is the one that was guessed, the one after it."""
        ids: list[int] = []
        for at in range(len(row.tokens) - num_drafts, len(row.tokens) + 1):
            ids.append(_mix(row.history[at - 1][2], row.seed) % self._caps.vocab_size)
            if at < len(row.tokens) and row.tokens[at] != ids[-1]:
                break
        return tuple(ids)

    def _attend(self, work: RowWork, row: _Row, begin: int, end: int) -> None:
        """Read what the work's queries can see of positions [begin, end).

        What lies before the work is read before any row writes: it must come from an earlier step.
        """
        if row.failed:
            return
        row.know(end)
        size = self._caps.block_size
        for group, blocks, table in zip(self._caps.groups, self._kv, row.tables):
            first = 0 if group.window is None else max(0, work.start - group.window + 1)
            at = begin
            while at < end:
                if group.keep_first <= at < first:
                    at = first
                    continue
                stop = min(end, at - at % size + size)
                if at < first:
                    stop = min(stop, group.keep_first)
                block_id = table[at // size]
                self._expect(block_id != 0, f"row {work.row}: position {at} is in the null block")
                found, expected = blocks[block_id][at % size : at % size + stop - at], row.history[at:stop]
                if found != expected:
                    raise ShadowError(f"row {work.row}: positions from {at} have {found}, not {expected}")
                at = stop

    def _prompt_logprobs(self, work: RowWork) -> tuple[TokenLogprobs, ...]:
        row = self._rows[work.row]
        last = min(work.start + work.num_new, row.prompt_len - 1)
        return tuple(self._logprobs(row.tokens[p + 1], 0) for p in range(work.start, last))

    def _pooled(self, work: RowWork) -> tuple[float, ...]:
        """(token, position) of the last new position, or their means over the new ones."""
        last = work.start + work.num_new
        first = work.start if Want.POOL_MEAN in work.want else last - 1
        tokens = self._rows[work.row].tokens[first:last]
        return (sum(tokens) / len(tokens), (first + last - 1) / 2)

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        top = tuple(((token + i) % self._caps.vocab_size, -1.0 - i) for i in range(num_top))
        return TokenLogprobs(-1.0 - token / self._caps.vocab_size, top)

    @staticmethod
    def _expect(holds: bool, message: str) -> None:
        if not holds:
            raise ShadowError(message)


def _mix(state: int, value: int) -> int:
    """A 64-bit mix (splitmix64's finalizer, Steele et al. 2014) of two integers."""
    z = (state * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
