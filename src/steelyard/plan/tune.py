"""Advice: a value for each serving parameter, why, and what it trades, computed from the same plan as all else."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from steelyard.errors import StartError
from steelyard.plan.capacity import Capacity
from steelyard.plan.captures import Buckets
from steelyard.plan.costs import decode
from steelyard.plan.explain import CONSTRAINTS
from steelyard.plan.formats import UNSERVED
from steelyard.plan.fragmentation import block_choices
from steelyard.plan.memory import GIB
from steelyard.plan.models import PlannedModel
from steelyard.plan.planner import Options, Plan, make_plan
from steelyard.plan.service import Service

SERVED_DTYPES = ("float32", "bfloat16", "float16")
"""Formats that the server's --dtype converts to."""
BUDGETS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Advice:
    """One parameter. `flag` and `argument` None: no flag of `steelyard serve` sets it."""

    parameter: str
    value: str
    reason: str
    trade: str
    flag: str | None = None
    argument: str | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """All advice, the plan it was computed with, and the command to start with; "" where one device is not enough."""

    advice: tuple[Advice, ...]
    plan: Plan
    command: str


def tune(model: PlannedModel, name: str, options: Options) -> Tuned:
    """Advice for a load. Raises StartError where the load is missing, or nothing meets the targets."""
    if options.load is None:
        raise StartError("tune needs a load: give --rate, --input and --output, or --trace", param="rate")
    longest = model.shape.max_position
    if options.load.whole_len > longest:
        raise StartError(
            f"requests of {options.load.whole_len:,.0f} tokens (--input and --output) are beyond the {longest:,} that "
            f"{model.shape.name} is made for",
            param="input",
        )
    tp = _smallest_tp(model, options)
    options = replace(options, tp=tp)
    options = replace(options, max_num_batched_tokens=_best_budget(model, options))
    plan = make_plan(model, replace(options, max_num_seqs=4096))
    service, found = plan.service, plan.capacity
    assert service is not None and found is not None
    seqs = _num_seqs(service, found)
    plan = make_plan(model, replace(options, max_num_seqs=seqs))
    service, found = plan.service, plan.capacity
    assert service is not None and found is not None
    advice = (
        _tensor_parallel(plan, tp),
        _model_len(plan),
        Advice(
            "max_num_seqs",
            str(seqs),
            f"the load keeps {found.limit.decoding:.0f} requests decoding at the capacity of a replica, a quarter is "
            "left for bursts; more would not run faster",
            "higher: fewer requests wait, each token takes longer, more memory for logits",
            "--max-num-seqs",
            str(seqs),
        ),
        _token_budget(plan, found),
        _share(plan),
        _block_size(plan),
        _waiting_window(found),
        _dtype(plan),
        _kv_dtype(plan),
        _graphs(plan, found),
    )
    words = ["steelyard", "serve", name]
    for line in advice:
        if line.flag:
            words += [line.flag] + ([line.argument] if line.argument else [])
    return Tuned(advice, plan, shlex.join(words) if tp == 1 else "")


def _smallest_tp(model: PlannedModel, options: Options) -> int:
    """The given size if it is not 1, else the smallest that fits the model and meets the targets with one request."""
    if options.tp > 1:
        return options.tp
    last: StartError | None = None
    for tp in (1, 2, 4, 8):
        try:
            plan = make_plan(model, replace(options, tp=tp, max_num_seqs=4096))
        except StartError as error:
            last = error
            continue
        if plan.capacity is not None:
            return tp
        last = StartError(f"{model.shape.name} does not fit {tp} x {options.device.name}", param="device")
    assert last is not None
    raise last


def _best_budget(model: PlannedModel, options: Options) -> int:
    """The token budget with the highest capacity within the targets; the smallest of those within 1 % of it."""
    rates: dict[int, float] = {}
    for budget in BUDGETS:
        try:
            plan = make_plan(model, replace(options, max_num_batched_tokens=budget, max_num_seqs=min(4096, budget)))
        except StartError:
            continue
        if plan.capacity is not None:
            rates[budget] = plan.capacity.replica_capacity
    if not rates:
        return options.max_num_batched_tokens
    best = max(rates.values())
    return min(b for b, rate in rates.items() if rate >= 0.99 * best)


def _num_seqs(service: Service, found: Capacity) -> int:
    """What the capacity needs and a quarter more, in eights, within what the KV pool holds."""
    point = found.limit
    need = (point.decoding + point.rate * point.prefill_s) * 1.25
    held = max(service.max_sequences(found.load), 1)
    return min(max(8, -(-int(need + 1) // 8) * 8), max(held, 1), 4096)


def _tensor_parallel(plan: Plan, tp: int) -> Advice:
    budget = plan.budget
    reason = f"weights of {budget.weights_bytes / 1e9:.1f} GB a device leave {budget.kv_bytes / 1e9:.1f} GB for KV"
    if plan.capacity and plan.capacity.replicas > 1:
        reason += f"; the load needs {plan.capacity.replicas} replicas, and replicas share nothing"
    trade = "more devices in one replica: less time per token and more KV, against all-reduces in every layer"
    return Advice("tensor_parallel_size", str(tp), reason, trade)


def _model_len(plan: Plan) -> Advice:
    load = plan.options.load
    assert load is not None
    need = int(load.whole_len * (4 if load.service_cv else 1))
    value = min(max(1024, 1 << (need - 1).bit_length()), plan.model.shape.max_position, plan.max_context)
    reason = f"requests of {load.whole_len:,.0f} tokens, rounded up; the model allows {plan.model.shape.max_position:,}"
    trade = "higher: longer requests are accepted, and one of them may take the pool of many"
    return Advice("max_model_len", str(value), reason, trade, "--max-model-len", str(value))


def _token_budget(plan: Plan, found: Capacity) -> Advice:
    value = plan.options.max_num_batched_tokens
    point = found.limit
    reason = (
        "the smallest budget within 1 % of the best capacity; a step with prompt takes "
        f"{point.mixed_step_s * 1e3:.1f} ms, one without {point.decode_step_s * 1e3:.1f} ms, one that prompts fill "
        f"{point.full_step_s * 1e3:.1f} ms"
    )
    trade = "higher: prompts finish in fewer steps (TTFT); lower: the gap they cause between others' tokens is shorter"
    return Advice("max_num_batched_tokens", str(value), reason, trade, "--max-num-batched-tokens", str(value))


def _share(plan: Plan) -> Advice:
    value, budget = plan.options.share, plan.budget
    reason = f"leaves {budget.reserve_bytes / 1e9:.1f} GB of {budget.total_bytes / 1e9:.0f} for peaks nobody planned"
    if plan.capacity and plan.capacity.constraints[0].name == "kv_memory":
        reason += "; KV memory binds here, so 0.95 would serve more if the device is not shared"
    trade = "higher: more KV blocks; too high: another process or a fragmented allocator ends in out of memory"
    return Advice("gpu_memory_utilization", f"{value:g}", reason, trade, "--gpu-memory-utilization", f"{value:g}")


def _block_size(plan: Plan) -> Advice:
    load = plan.options.load
    assert load is not None
    size = plan.options.block_size
    whole = max(round(load.whole_len), 1)
    attention = plan.model.shape.layers[0].attention
    run = attention.kv_elements_per_token(plan.setup.tp) * plan.setup.kv_dtype_bytes
    choices = {c.block_size: c for c in block_choices(range(max(whole // 2, 1), whole + whole // 2 + 1), run)}
    here = choices.get(size) or block_choices([whole], run, [size])[0]
    small = choices[16]
    reason = (
        f"wastes {here.waste_share:.1%} of the pool ({small.waste_share:.1%} at 16) and reads "
        f"{here.run_bytes / 1024:,.0f} KiB a block and layer in one run"
    )
    trade = f"larger: longer reads and shorter tables; a shared prefix loses {here.hit_loss:.1f} tokens on average"
    return Advice("block_size", str(size), reason, trade, "--block-size", str(size))


def _waiting_window(found: Capacity) -> Advice:
    point = found.limit
    reason = (
        f"continuous batching lets a request join at the next step, {point.full_step_s * 1e3:.1f} ms away at most (a "
        f"step that prompts fill, at capacity; the mean is {point.step_s * 1e3:.1f} ms): waiting gains nothing"
    )
    trade = "only static or dynamic batching needs a window: longer fills batches, and every request waits for it"
    return Advice("waiting window", "0 ms", reason, trade)


def _dtype(plan: Plan) -> Advice:
    setup, service = plan.setup, plan.service
    assert service is not None and plan.capacity is not None
    value = setup.weights.name
    gain = _gain(plan, dtype="fp8") if setup.device.fp8_flops and setup.weights.body in ("BF16", "F16") else None
    reason = f"as the checkpoint has them, {setup.weights.bits_per_parameter():g} bits a weight"
    if gain is not None:
        reason += f"; fp8 weights would serve {gain:.2f} x, but this server has none"
    given = plan.options.dtype
    flag = "--dtype" if given in SERVED_DTYPES else None
    if given is not None and flag is None:
        reason += (
            f"; this server has no {value} weights"
            if value in UNSERVED
            else "; the server loads weights as their checkpoint has them, so bring one in this format"
        )
    trade = "fewer bits: less to read and more room for KV; check quality beside the speed"
    return Advice("dtype", value, reason, trade, flag, given)


def _kv_dtype(plan: Plan) -> Advice:
    binding = CONSTRAINTS[plan.capacity.constraints[0].name] if plan.capacity else ""
    gain = _gain(plan, kv_cache_dtype="fp8") if plan.setup.kv_dtype_bytes == 2 else None
    reason = f"{binding} binds"
    if gain is not None:
        reason += f"; fp8 KV would serve {gain:.2f} x" + (", worth trying" if gain > 1.15 else ", not worth its error")
    value = {1: "fp8", 2: "bfloat16", 4: "float32"}[plan.setup.kv_dtype_bytes]
    flag = "--kv-cache-dtype" if value == "fp8" else None
    trade = "fp8: half the KV bytes, errors that grow with context length"
    return Advice("kv_cache_dtype", value, reason, trade, flag, value)


def _gain(plan: Plan, **changed: str) -> float | None:
    """Capacity of a replica with changed options over the plan's; None where it cannot be computed."""
    assert plan.capacity is not None
    try:
        other = make_plan(plan.model, replace(plan.options, **changed))  # type: ignore[arg-type]
    except StartError:
        return None
    return other.capacity.replica_capacity / plan.capacity.replica_capacity if other.capacity else None


LAUNCH_S = 5e-6
"""Host time per kernel launch outside a graph, for a fast host; slow hosts take four times as long."""
KERNELS_PER_LAYER = 8


def _graphs(plan: Plan, found: Capacity) -> Advice:
    service = plan.service
    assert service is not None
    batch = max(round(found.point.decoding), 1)
    context = max(round(found.load.mean_context), 1)
    device_s = service.roofline.floor(decode(batch, context)).seconds
    host_s = LAUNCH_S * KERNELS_PER_LAYER * plan.model.shape.num_layers
    reason = (
        f"a decode step needs {device_s * 1e3:.2f} ms of the device and some {host_s * 1e3:.2f} ms of launches, "
        f"{host_s / device_s:.0%} of it; a graph launches once{_captured(plan.buckets)}"
    )
    trade = f"eager: starts faster, saves {plan.budget.graphs_bytes / GIB:.1f} GiB of graphs, pays every launch"
    if plan.options.enforce_eager:
        return Advice("graphs", "off", f"as asked for; {reason}", trade, "--enforce-eager")
    return Advice("graphs", "on", reason, trade)


def _captured(buckets: Buckets) -> str:
    """The sizes that a start captures, which follow from other flags: there is none for them."""
    if not buckets.num_graphs:
        return ""
    rows, tokens = (f"{len(s)} sizes ({_listed(s)})" for s in (buckets.decode, buckets.mixed))
    return (
        f". {buckets.num_graphs} are captured: {rows} of decode rows, with two ways to sample each, as "
        f"--max-num-seqs sets them, and {tokens} of tokens of steps with prompt"
    )


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes if len(sizes) <= 6 else (*sizes[:4], "...", sizes[-1])))
