"""Each way a plan can be wrong is refused: a runner that lets a fault pass proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steelyard.core.sampling import SamplingParams
from steelyard.core.step import Copy, KvGroup, RowEnter, RowWork, RunnerCaps, StepPlan, Swap, TableEdit, Want
from steelyard.sim.shadow import ShadowError, ShadowRunner

CAPS = RunnerCaps(
    block_size=4,
    num_blocks=(8,),
    groups=(KvGroup(1),),
    max_rows=3,
    max_model_len=32,
    max_batched_tokens=16,
    vocab_size=50,
    overlaps=True,
    fingerprint="shadow",
    kv_layout="shadow",
)
TOKENS = (1, 2, 3, 4, 5, 6)


def enter(row: int, tokens: tuple[int, ...] = TOKENS, start: int = 0, seed: int = 0) -> RowEnter:
    return RowEnter(row, 1, tokens, len(tokens), start, SamplingParams(seed=seed))


def first_plan() -> StepPlan:
    """Row 0 computes its six tokens in blocks 1 and 2."""
    return StepPlan(1, enter=(enter(0),), edits=(TableEdit(0, 0, 0, (1, 2)),), work=(RowWork(0, 0, 6, Want.TOKEN),))


def second_row(start: int, table: tuple[int, ...], copies: tuple[Copy, ...] = (), seed: int = 0) -> StepPlan:
    """Row 1 has the same tokens, valid below `start`, and computes the rest."""
    return StepPlan(
        2,
        enter=(enter(1, start=start, seed=seed),),
        edits=(TableEdit(0, 1, 0, table),),
        copies=copies,
        work=(RowWork(1, start, 6 - start, Want.TOKEN),),
    )


def test_shared_blocks_and_a_copy_give_what_computing_gives() -> None:
    runner = ShadowRunner(CAPS)
    alone = runner.collect(runner.launch(first_plan())).rows[0].ids
    shared = runner.collect(runner.launch(second_row(4, (1, 3)))).rows[0].ids
    assert shared == alone
    again = ShadowRunner(CAPS)
    again.launch(first_plan())
    forked = again.launch(second_row(5, (1, 3), (Copy(0, 2, 3),)))
    assert forked.rows[0].ids == alone and again.num_copies == 1
    other_seed = ShadowRunner(CAPS)
    other_seed.launch(first_plan())
    assert other_seed.launch(second_row(4, (1, 3), seed=1)).rows[0].ids != alone


@pytest.mark.parametrize(
    ("plan", "error"),
    [
        (second_row(5, (1, 3)), "positions from 4 have"),  # the copy was skipped
        (second_row(5, (1, 2)), "block 2, which is shared"),
        (second_row(4, (3, 4)), "positions from 0 have"),  # a stale table
        (second_row(4, (0, 4)), "null block"),
        (second_row(4, (1, 0)), "writes to the null block"),
        (second_row(4, (1,)), "no block for position"),
        (second_row(4, (1, 9)), "no such block"),
        (replace(second_row(4, (1, 3)), work=(RowWork(1, 3, 3, Want.TOKEN),)), "shared"),
        (replace(second_row(4, (1, 3)), work=(RowWork(1, 5, 1, Want.TOKEN),)), "positions from 4|starts at 5"),
        (replace(second_row(4, (1, 3)), work=(RowWork(1, 4, 0, Want.TOKEN),)), "no tokens"),
        (replace(second_row(4, (1, 3)), work=(RowWork(1, 4, 1, Want.TOKEN),)), "middle of its tokens"),
        (replace(second_row(4, (1, 3)), work=(RowWork(1, 4, 3, Want.TOKEN),)), "has no token|no token"),
        (replace(second_row(4, (1, 3)), enter=(enter(0),)), "row 0 is taken"),
        (replace(second_row(4, (1, 3)), enter=(enter(3),)), "row 3 does not exist"),
        (replace(second_row(4, (1, 3)), leave=(2,)), "row 2 leaves and is not there"),
        (replace(second_row(4, (1, 3)), edits=(TableEdit(0, 1, 1, (3,)),)), "hole in the table"),
        (replace(second_row(4, (1, 3)), work=(RowWork(1, 4, 1, Want.NOTHING),) * 2), "twice in one step"),
    ],
)
def test_a_wrong_plan_is_refused(plan: StepPlan, error: str) -> None:
    runner = ShadowRunner(CAPS)
    runner.launch(first_plan())
    with pytest.raises((ShadowError, IndexError), match=error):
        runner.launch(plan)


def test_another_tenants_kv_is_not_ones_own() -> None:
    runner = ShadowRunner(CAPS, secret_of=lambda entered: entered.row)
    runner.launch(first_plan())
    with pytest.raises(ShadowError, match="positions from 0 have"):
        runner.launch(second_row(4, (1, 3)))


def test_a_block_that_another_row_fills_in_the_same_step_cannot_be_shared_yet() -> None:
    first, second = first_plan(), second_row(4, (1, 3))
    both = StepPlan(1, first.enter + second.enter, (), first.edits + second.edits, (), (), first.work + second.work)
    with pytest.raises(ShadowError, match="block 1, which is shared"):
        ShadowRunner(CAPS).launch(both)


def test_a_window_reads_no_further_back_than_it_reaches() -> None:
    caps = replace(CAPS, groups=(KvGroup(1, 3),))
    runner = ShadowRunner(caps)
    runner.launch(first_plan())
    slid = StepPlan(2, edits=(TableEdit(0, 0, 0, (0,)),), work=(RowWork(0, 6, 1, Want.TOKEN),))
    runner.launch(slid)
    with pytest.raises(ShadowError, match="null block"):
        runner.launch(second_row(4, (0, 3)))


def test_first_positions_that_are_kept_are_read_behind_the_window() -> None:
    runner = ShadowRunner(replace(CAPS, groups=(KvGroup(1, 2, 1),)))
    runner.launch(first_plan())
    runner.launch(StepPlan(2, work=(RowWork(0, 6, 1, Want.TOKEN),)))
    with pytest.raises(ShadowError, match="position 0 is in the null block"):
        runner.launch(StepPlan(3, edits=(TableEdit(0, 0, 0, (0,)),), work=(RowWork(0, 7, 1, Want.TOKEN),)))


def test_steps_are_collected_in_launch_order_and_a_failed_row_stays_failed() -> None:
    runner = ShadowRunner(CAPS, fail=lambda plan, work: "broken" if plan.id == 1 else None)
    one = runner.launch(first_plan())
    two = runner.launch(StepPlan(2, work=(RowWork(0, 6, 1, Want.TOKEN),)))
    with pytest.raises(ShadowError, match="launch order"):
        runner.collect(two)
    assert runner.collect(one).failed == ((0, "broken"),)
    assert runner.collect(two).failed == ((0, "broken"),) and not two.rows


def test_an_empty_step_is_legal() -> None:
    runner = ShadowRunner(CAPS)
    assert runner.collect(runner.launch(StepPlan(1))).rows == ()
    with pytest.raises(ShadowError, match="17 tokens in a step"):
        runner.launch(StepPlan(2, work=(RowWork(0, 0, 17, Want.NOTHING),)))


HOST = replace(CAPS, num_host_blocks=(4,))


def collected(*plans: StepPlan) -> ShadowRunner:
    runner = ShadowRunner(HOST)
    for plan in plans:
        runner.collect(runner.launch(plan))
    return runner


def swap_plan(*swaps: Swap) -> StepPlan:
    return StepPlan(9, swaps=swaps)


def test_a_row_that_was_swapped_out_and_in_goes_on_in_other_blocks() -> None:
    alone = collected(first_plan())
    expected = alone.collect(alone.launch(StepPlan(2, work=(RowWork(0, 6, 1, Want.TOKEN),)))).rows[0].ids
    runner = collected(first_plan())
    token = runner._rows[0].tokens[-1]
    out = StepPlan(2, leave=(0,), swaps=(Swap(0, 1, 3, True), Swap(0, 2, 1, True)))
    runner.collect(runner.launch(out))
    back = StepPlan(
        3,
        enter=(RowEnter(1, 2, (*TOKENS, token), 6, 6, SamplingParams(seed=0)),),
        edits=(TableEdit(0, 1, 0, (7, 8)),),
        swaps=(Swap(0, 7, 3, False), Swap(0, 8, 1, False)),
        work=(RowWork(1, 6, 1, Want.TOKEN),),
    )
    assert runner.collect(runner.launch(back)).rows[0].ids == expected
    assert runner.num_swaps == 4


@pytest.mark.parametrize(
    ("swaps", "says"),
    [
        ((Swap(0, 3, 1, False), Swap(0, 1, 1, True)), "in before"),
        ((Swap(0, 1, 1, True), Swap(0, 2, 1, True)), "one place"),
        ((Swap(0, 1, 1, True), Swap(0, 2, 2, True), Swap(0, 3, 1, False), Swap(0, 3, 2, False)), "one place"),
        ((Swap(0, 1, 5, True),), "no such host slot"),
        ((Swap(0, 0, 1, True),), "null block"),
        ((Swap(0, 3, 2, False),), "nothing was put there"),
    ],
)
def test_a_swap_that_cannot_be_is_refused(swaps: tuple[Swap, ...], says: str) -> None:
    runner = collected(first_plan())
    with pytest.raises(ShadowError, match=says):
        runner.launch(swap_plan(*swaps))


def test_a_block_that_a_step_in_flight_uses_is_not_swapped() -> None:
    for swap in (Swap(0, 2, 2, True), Swap(0, 1, 1, False)):
        runner = collected(first_plan(), swap_plan(Swap(0, 1, 1, True)))
        runner.launch(StepPlan(3, work=(RowWork(0, 6, 1, Want.TOKEN),)))
        with pytest.raises(ShadowError, match="in flight"):
            runner.launch(swap_plan(swap))
    runner = collected(first_plan())
    runner.launch(StepPlan(3, work=(RowWork(0, 6, 1, Want.TOKEN),)))
    runner.launch(swap_plan(Swap(0, 1, 1, True)))  # a block that is only read may be copied meanwhile
