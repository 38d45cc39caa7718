"""A plan for people: each number with its label, and the formula with the values put in. No layout."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.plan.capacity import Capacity
from steelyard.plan.memory import GIB, blocks_per_sequence
from steelyard.plan.planner import Plan
from steelyard.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. `text` is how it is shown, `formula` how it came about."""

    section: str
    label: str
    text: str
    formula: str


def figures(plan: Plan) -> list[Figure]:
    """Every headline number of a plan, in the order in which they build on each other."""
    found = [*_device(plan), *_model(plan), *_kv(plan), *_memory(plan)]
    if plan.capacity is not None:
        found += _capacity(plan, plan.capacity)
    return found


def gib(size: float) -> str:
    return f"{size / GIB:,.2f} GiB"


def _few(value: float) -> str:
    return f"{value:.3g}" if value < 10 else f"{value:,.0f}"


def _peaks_formula(plan: Plan) -> str:
    device = plan.setup.device
    if device.ceilings is not None and device.bf16_flops <= device.ceilings.matmul_flops:
        return "as measured: no datasheet is known"
    return "dense, from the datasheet; memory as the driver reports it"


def rate_text(flops: float) -> str:
    """FLOP/s in the unit that suits: a processor's are too few for tera."""
    return f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.1f} GFLOP/s"


def _device(plan: Plan) -> list[Figure]:
    device, weights = plan.setup.device, plan.setup.weights
    kind = weights.compute_kind
    flops = rate_text(device.flops(kind))
    peak = f"{flops}, {device.bandwidth / 1e9:,.0f} GB/s, {gib(device.memory_bytes)}"
    ridge, critical = device.ridge(kind), device.critical_batch(weights.bits_per_parameter() / 8, kind)
    formula = f"{flops} / {device.bandwidth / 1e9:,.0f} GB/s"
    rows = f"ridge x bytes a weight / 2 FLOPs = {ridge:.1f} x {weights.bits_per_parameter() / 8:g} / 2"
    return [
        Figure("device", "peaks", peak, _peaks_formula(plan)),
        Figure("device", "ridge", f"{_few(ridge)} FLOPs a byte", formula),
        Figure(
            "device",
            "critical batch",
            f"{_few(critical)} rows",
            f"{rows}: from there on products are bound by arithmetic",
        ),
    ]


def _model(plan: Plan) -> list[Figure]:
    shape, setup = plan.model.shape, plan.setup
    bits = setup.weights.bits_per_parameter()
    found = [Figure("model", "parameters", f"{shape.parameters:,}", parameters_formula(shape))]
    if shape.is_sparse:
        experts = next(layer.experts for layer in shape.layers if layer.experts)
        formula = (
            f"all but the experts that a token leaves out: {experts.num_per_token} of {experts.num_experts} are used"
        )
        found.append(Figure("model", "active parameters", f"{shape.active_parameters:,}", formula))
    stored = plan.model.stored_bytes if plan.options.dtype is None and setup.tp == 1 else None
    if stored is not None:
        formula = "the sizes of all tensors on disk"
    else:
        formula = f"matrices at {bits:g} bits ({setup.weights.body}), embedding and head {setup.weights.ends}, "
        formula += f"norms and biases {setup.weights.vectors}"
        formula += f", experts {setup.weights.experts}" if shape.is_sparse and setup.weights.experts else ""
        formula += f"; on the fullest of {setup.tp} ranks" if setup.tp > 1 else ""
    weights = plan.budget.weights_bytes
    found.append(Figure("model", "weights", f"{weights / 1e9:,.2f} GB ({gib(weights)})", formula))
    return found


def parameters_formula(shape: ModelShape) -> str:
    """Where a model's parameters are, group by group, with the numbers."""
    ends = sum(w.num_elements for w in shape.decoder.ends)
    kinds: dict[int, int] = {}
    for layer in shape.layers:
        kinds[layer.parameters] = kinds.get(layer.parameters, 0) + 1
    layers = " + ".join(f"{n} layers x {size:,}" for size, n in kinds.items())
    tied = ", head tied" if shape.decoder.tied else " and head"
    return f"{layers} + {ends:,} (embedding of {shape.vocab_size:,} x {shape.hidden_size:,}{tied}, final norm)"


def _kv(plan: Plan) -> list[Figure]:
    shape, size, tp = plan.model.shape, plan.setup.kv_dtype_bytes, plan.setup.tp
    attention = shape.layers[0].attention
    if shape.is_latent:
        rope = attention.latent_dim - attention.latent_rank
        formula = (
            f"layers x (latent + rotary key) x bytes = {shape.num_layers} x ({attention.latent_rank} + {rope}) x {size}"
        )
    else:
        formula = "2 x layers x KV heads x head dim x bytes = "
        formula += f"2 x {shape.num_layers} x {shape.num_kv_heads} x {shape.head_dim} x {size}"
    found = [Figure("kv", "KV per token", f"{shape.kv_bytes_per_token(size):,} bytes", formula)]
    windows = [g for g in shape.kv_groups() if g.window is not None]
    if windows:
        said = ", ".join(f"{g.num_layers} layers keep {g.window:,} tokens" for g in windows)
        beyond = shape.kv_bytes_per_token_beyond(size)
        found.append(Figure("kv", "KV per token beyond", f"{beyond:,} bytes", f"the layers without a window; {said}"))
    context = plan.context_len
    whole = shape.kv_bytes_per_sequence(context, size)
    formula = f"{context:,} tokens x {shape.kv_bytes_per_token(size):,}"
    if windows:
        formula = "sum over layers of min(context, window) x bytes per token and layer"
    found.append(Figure("kv", f"KV of {context:,} tokens", gib(whole), formula))
    lengths = (512, 2048, 8192, 32768, 131072)
    label = " / ".join(f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths)
    sizes = " / ".join(f"{shape.kv_bytes_per_sequence(n, size) / GIB:.3g}" for n in lengths)
    found.append(Figure("kv", label, f"{sizes} GiB", "the same for other lengths"))
    if tp > 1:
        rank = shape.kv_bytes_per_sequence(context, size, tp)
        held = (
            "a latent is on every rank" if shape.is_latent else f"max({shape.num_kv_heads} KV heads / {tp}, 1) a rank"
        )
        found.append(Figure("kv", "  on each rank", gib(rank), held))
    return found


def _memory(plan: Plan) -> list[Figure]:
    budget, options, terms = plan.budget, plan.options, plan.budget.terms()
    less = " - ".join(f"{terms[k] / GIB:.2f}" for k in ("weights", "context", "activations", "graphs", "communication"))
    formula = (
        f"{options.share:g} x {budget.total_bytes / GIB:.2f} - {less} (weights, context, activations, graphs, links)"
    )
    found = [Figure("memory", "KV pool", gib(budget.kv_bytes), formula)]
    if not plan.fits:
        return found
    blocks = " + ".join(f"{n:,} x {size:,} B" for n, size in zip(plan.num_blocks, plan.pools.block_bytes))
    formula = f"{blocks}, blocks of {options.block_size} tokens, one more of each for the null block"
    found.append(Figure("memory", "blocks", f"{sum(plan.num_blocks):,}", formula))
    needs = blocks_per_sequence(plan.pools.groups, options.block_size, plan.context_len)
    ways = " and ".join(f"{have:,} // {need:,}" for have, need in zip(plan.num_blocks, needs))
    label = f"sequences of {plan.context_len:,}"
    found.append(Figure("memory", label, f"{plan.max_sequences:,}", f"blocks // blocks a sequence holds: {ways}"))
    limit = plan.model.shape.max_position
    formula = "one sequence alone in the pool, whatever the model's own limit"
    beyond = f"; the model ends at {limit:,}" if plan.max_context > limit else ""
    found.append(Figure("memory", "longest context", f"{plan.max_context:,} tokens{beyond}", formula))
    return found


def _capacity(plan: Plan, found: Capacity) -> list[Figure]:
    lines = [*_load_lines(plan, found), *_latency_lines(found), *_throughput_lines(found)]
    if plan.price is not None:
        cost = f"{plan.price.per_million_input:.4g} / {plan.price.per_million_output:.4g}"
        how = (
            "device hours at the capacity within targets; prompts pay for their share of device time, outputs the rest"
        )
        lines.append(("per million in / out", cost, how))
    return [Figure("capacity", *line) for line in lines]


def _load_lines(plan: Plan, found: Capacity) -> list[tuple[str, str, str]]:
    load, point = found.load, found.point
    limit, rate, steps = found.replica_capacity, found.replica_rate, load.decode_steps
    many = f"{found.replicas} x {plan.setup.tp} devices" if plan.setup.tp > 1 else f"{found.replicas}"
    within = "within the targets" if found.slo.ttft_s or found.slo.tpot_s else "(no --ttft and no --tpot to keep)"
    needs = f"ceil({load.rate:g} requests/s / {limit:.3g} requests/s that one serves)"
    little = f"rate x decode steps x time per token = {point.rate:.3g} x {steps:g} x {point.tpot_s:.4g} s"
    return [
        ("one replica serves", f"{limit:.3g} requests/s {within}", _ladder(found)),
        ("replicas", many, needs),
        ("utilisation", f"{found.utilisation:.0%} of what they serve", f"{rate:.3g} / {limit:.3g} requests/s"),
        ("running batch", f"{point.decoding:.1f}", f"{little}; found as a fixed point"),
        ("KV in use", f"{found.kv_share:.0%}", "requests in flight over sequences of their mean length that fit"),
    ]


def _latency_lines(found: Capacity) -> list[tuple[str, str, str]]:
    point, seen, steps = found.point, found.latency, found.load.decode_steps
    alone, mixed = point.decode_step_s * 1e3, point.mixed_step_s * 1e3
    own = f"{point.chunks_per_prompt:.3g} steps of {mixed:.1f} ms, and half a step until they begin"
    ttft = " / ".join(f"{t * 1e3:.1f}" for t in (seen.ttft_s, seen.ttft_p90_s, seen.ttft_p99_s))
    formula = f"queue {seen.wait_s * 1e3:.2f} ms + prefill {point.prefill_s * 1e3:.1f} ms ({own})"
    slo = found.slo
    target = f"; target {slo.ttft_s * 1e3:g} ms for {slo.attainment:.0%} of requests" if slo.ttft_s else ""
    lines = [("TTFT mean / p90 / p99", f"{ttft} ms{target}", formula)]
    if steps:
        formula = f"mean step: {alone:.2f} ms decoding alone, {mixed:.2f} ms beside a prompt; prompts take "
        target = f"; target {slo.tpot_s * 1e3:g} ms" if slo.tpot_s else ""
        tpot = f"{seen.tpot_s * 1e3:.2f} ms{target}"
        lines.append(("TPOT", tpot, formula + f"{point.prefill_share:.0%} of the device"))
        worst = f"{point.full_step_s * 1e3:.2f} ms"
        lines.append(("worst gap", worst, "between two tokens of a request: a step whose token budget prompts fill"))
    lines.append(("E2E mean", f"{seen.e2e_s:.3g} s", f"TTFT + {steps:g} x TPOT"))
    return lines


def _throughput_lines(found: Capacity) -> list[tuple[str, str, str]]:
    seen, load = found.latency, found.load
    met = f"requests within every target: {seen.attainment:.1%} of those served"
    law = f"{seen.little.in_flight:.4g} in flight; rate x latency = {seen.little.rate * seen.little.latency_s:.4g}"
    knee = (
        "there a row costs as much as its share of weights and fixed costs: a percent more rows, half of one more out"
    )
    output = f"{found.output_tokens_per_s:,.0f} tokens/s"
    return [
        ("output", output, f"requests served x {load.output_len:g}, all replicas"),
        ("goodput", f"{found.goodput:.3g} requests/s", met),
        ("binds", _binds(found), "the limit that allows the smallest rate; removing it helps up to the next one's"),
        ("knee", f"batch {found.knee_batch:,}", knee),
        ("Little's law", f"off by {seen.little.residual:.1e}", law),
    ]


CONSTRAINTS = {
    "kv_memory": "KV memory",
    "max_num_seqs": "--max-num-seqs",
    "tpot": "the TPOT target",
    "ttft": "the TTFT target",
    "device_time": "device time",
}
"""What binds, in words, by the name that programs read."""


def _binds(found: Capacity) -> str:
    first, *rest = found.constraints
    words = (
        f"{CONSTRAINTS[first.name]}, at {first.rate:.3g} requests/s a replica and {first.decoding:.0f} rows decoding"
    )
    return f"{words}; next {CONSTRAINTS[rest[0].name]}, at {rest[0].rate:.3g}" if rest else words


def _ladder(found: Capacity) -> str:
    rates = ", ".join(f"{CONSTRAINTS[c.name]} {c.rate:.3g}" for c in found.constraints)
    return f"the smallest of what each limit alone allows: {rates}"
