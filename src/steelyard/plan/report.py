"""A plan as data for programs: the JSON of `steelyard plan --json`. Keys are stable: new ones may be added."""

from __future__ import annotations

import math
from typing import Any

from steelyard.plan.capacity import Capacity
from steelyard.plan.costs import attention_traffic
from steelyard.plan.planner import Plan, StepRow


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything the plan says. Sizes in bytes, times as their names say; what is infinite or unknown is null."""
    options = plan.options
    return {
        "model": _model(plan),
        "device": _device(plan),
        "kv": _kv(plan),
        "memory": _memory(plan),
        "decode": [_step(row) for row in plan.decodes],
        "prefill": [_prefill(plan, row) for row in plan.prefills],
        "capacity": None if plan.capacity is None else _capacity(plan, plan.capacity),
        "calibration": {"source": plan.calibration.source, **plan.calibration.named()},
        "options": {
            "tensor_parallel_size": options.tp,
            "gpu_memory_utilization": options.share,
            "block_size": options.block_size,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "enforce_eager": options.enforce_eager,
        },
        "notes": list(plan.notes),
    }


def _model(plan: Plan) -> dict[str, Any]:
    shape, setup = plan.model.shape, plan.setup
    experts = next((layer.experts for layer in shape.layers if layer.experts), None)
    stored = plan.model.stored_bytes if plan.options.dtype is None else None
    return {
        "name": shape.name,
        "source": plan.model.source,
        "family": shape.decoder.family,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "read_parameters": shape.read_parameters,
        "active_read_parameters": shape.active_read_parameters,
        "weight_bytes": stored or shape.weight_bytes(setup.weights),
        "weight_bytes_per_rank": plan.budget.weights_bytes,
        "weight_format": setup.weights.name,
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.num_heads,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position": shape.max_position,
        "latent": shape.is_latent,
        "windows": [{"layers": g.num_layers, "window": g.window} for g in shape.kv_groups()],
        "experts": experts and {"total": experts.num_experts, "per_token": experts.num_per_token},
        "tied_embeddings": shape.decoder.tied,
    }


def _device(plan: Plan) -> dict[str, Any]:
    device = plan.setup.device
    ceilings = device.ceilings
    return {
        "name": device.name,
        "bf16_tflops": device.bf16_flops / 1e12,
        "fp8_tflops": device.fp8_flops and device.fp8_flops / 1e12,
        "bandwidth_gb_per_s": device.bandwidth / 1e9,
        "memory_bytes": device.memory_bytes,
        "ridge_flops_per_byte": device.ridge(),
        "critical_batch": device.critical_batch(plan.setup.weights.bits_per_parameter() / 8),
        "measured": ceilings
        and {
            "matmul_tflops": ceilings.matmul_flops / 1e12,
            "attention_tflops": ceilings.attention_flops / 1e12,
            "weights_gb_per_s": ceilings.weights_bandwidth / 1e9,
            "kv_gb_per_s": ceilings.kv_bandwidth / 1e9,
            "copy_gb_per_s": ceilings.copy_bandwidth / 1e9,
            "step_us": ceilings.step_s * 1e6,
            "doubts": list(device.doubts),
        },
    }


def _kv(plan: Plan) -> dict[str, Any]:
    shape, size, tp = plan.model.shape, plan.setup.kv_dtype_bytes, plan.setup.tp
    return {
        "dtype_bytes": size,
        "context": plan.context_len,
        "bytes_per_token": shape.kv_bytes_per_token(size),
        "bytes_per_token_beyond_windows": shape.kv_bytes_per_token_beyond(size),
        "bytes_per_token_per_rank": shape.kv_bytes_per_token(size, tp),
        "bytes_per_sequence": shape.kv_bytes_per_sequence(plan.context_len, size),
        "bytes_per_sequence_per_rank": shape.kv_bytes_per_sequence(plan.context_len, size, tp),
        "bytes_by_context": {
            str(n): shape.kv_bytes_per_sequence(n, size) for n in (512, 2048, 4096, 8192, 32768, 131072)
        },
        "block_bytes": list(plan.pools.block_bytes),
        "expected_waste_tokens": (plan.options.block_size - 1) / 2,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "total_bytes": plan.budget.total_bytes,
        "terms": plan.budget.terms(),
        "block_size": plan.options.block_size,
        "num_blocks": list(plan.num_blocks),
        "max_sequences": plan.max_sequences,
        "max_context": plan.max_context,
        "max_context_served": min(plan.max_context, plan.model.shape.max_position),
    }


def _step(row: StepRow) -> dict[str, Any]:
    per_s = row.num_tokens / row.estimate.seconds
    return {
        "batch": row.batch,
        "context": row.context_len,
        "fits": row.fits,
        "floor_ms": row.floor.ms,
        "overlapped_ms": row.time.overlapped_s * 1e3,
        "reach_ms": row.reach and row.reach.ms,
        "estimate_ms": row.estimate.ms,
        "bound": row.time.bound,
        "bound_part": row.time.bound_part,
        "tokens_per_s": per_s,
        "intensity": row.time.intensity,
        "mbu": row.mbu,
        "mfu": row.mfu,
        "parts": [
            {
                "name": p.name,
                "flops": p.cost.flops,
                "bytes": p.cost.bytes,
                "floor_ms": p.seconds * 1e3,
                "bound": p.bound,
            }
            for p in row.time.parts
        ],
    }


def _prefill(plan: Plan, row: StepRow) -> dict[str, Any]:
    naive, tiled = attention_traffic(plan.model.shape, row.num_tokens)
    found = {"tokens": row.num_tokens} | _step(row)
    return found | {"attention_naive_bytes": naive, "attention_tiled_bytes": tiled}


def _capacity(plan: Plan, found: Capacity) -> dict[str, Any]:
    seen, load, slo = found.latency, found.load, found.slo
    names = [c.name for c in found.constraints]
    return {
        "rate": load.rate,
        "input": load.input_len,
        "output": load.output_len,
        "ttft_slo_ms": slo.ttft_s and slo.ttft_s * 1e3,
        "tpot_slo_ms": slo.tpot_s and slo.tpot_s * 1e3,
        "attainment_target": slo.attainment,
        "replicas": found.replicas,
        "devices": found.replicas * plan.setup.tp,
        "feasible": found.feasible,
        "rate_per_replica": found.replica_rate,
        "max_rate_per_replica": found.replica_capacity,
        "utilisation": found.utilisation,
        "kv_utilisation": found.kv_share,
        "running_batch": found.point.decoding,
        "in_flight": seen.in_flight,
        "ttft_ms": _ms(seen.ttft_s),
        "ttft_p90_ms": _ms(seen.ttft_p90_s),
        "ttft_p99_ms": _ms(seen.ttft_p99_s),
        "tpot_ms": seen.tpot_s * 1e3 if load.decode_steps else None,
        "worst_gap_ms": found.point.full_step_s * 1e3 if load.decode_steps else None,
        "e2e_ms": _ms(seen.e2e_s),
        "attainment": seen.attainment,
        "goodput": found.goodput,
        "output_tokens_per_s": found.output_tokens_per_s,
        "input_tokens_per_s": found.input_tokens_per_s,
        "prefill_share": found.point.prefill_share,
        "token_budget_share": found.point.token_share,
        "binding": names[0],
        "next": names[1] if len(names) > 1 else None,
        "constraints": [{"name": c.name, "rate": c.rate, "decoding": c.decoding} for c in found.constraints],
        "knee_batch": found.knee_batch,
        "little": {
            "in_flight": seen.little.in_flight,
            "rate_times_latency": _finite(seen.little.rate * seen.little.latency_s),
            "residual": seen.little.residual,
        },
        "cost_per_million_input": plan.price and plan.price.per_million_input,
        "cost_per_million_output": plan.price and plan.price.per_million_output,
        "sensitivity": [{"change": c.name, "factor": _finite(c.factor)} for c in plan.changes],
    }


def _ms(seconds: float) -> float | None:
    return _finite(seconds * 1e3)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
