"""The attentions that can be measured against each other, behind one call: q, k, v in, output out.

    naive        the whole score matrix, three operators: what every other one is compared with
    sdpa-*       torch's scaled_dot_product_attention held to one of its backends
    steelyard    the serving backend of this device over paged KV (forward only)
    steelyard-train   flash_attention, contiguous, with a gradient (needs Triton)
    flashinfer   FlashInfer's ragged prefill, where it is installed

q [B, N, H, D]; k, v [B, K, Hk, D]. An attention that cannot take a case says why: `Unsupported`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from steelyard.kernels.attention import Attention, AttnSpec, Batch, KvLayer
from steelyard.kernels.cpu_attention import CpuAttention
from steelyard.perf.attention_cases import AttentionCase

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
Prepare = Callable[[AttentionCase, torch.device], Forward]

SDPA = {
    "sdpa-math": SDPBackend.MATH,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
NO_GRADIENT = frozenset({"steelyard", "flashinfer"})
BLOCK_SIZE = {"cuda": 64, "cpu": 16}


class Unsupported(Exception):
    """This attention cannot run this case here; the message is the reason."""


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in q's dtype, with S and P in memory."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
    if causal and q.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, backend: SDPBackend) -> Tensor:
    """torch's operator with exactly one backend allowed; it raises RuntimeError where that one cannot."""
    grouped = q.shape[2] != k.shape[2]
    square = q.shape[1] == k.shape[1]
    bias = causal_lower_right(q.shape[1], k.shape[1]) if causal and not square and q.shape[1] > 1 else None
    with sdpa_kernel(backend):
        out: Tensor = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=bias,
            is_causal=causal and square and q.shape[1] > 1,
            enable_gqa=grouped,
        )
    return out.transpose(1, 2)


def prepare(name: str, case: AttentionCase, device: torch.device) -> Forward:
    """The named attention, ready for a case. Raises Unsupported with the reason."""
    if name == "naive":
        return partial(naive, causal=case.causal)
    if name in SDPA:
        if device.type == "cpu" and name not in ("sdpa-math", "sdpa-flash"):
            raise Unsupported("torch has no such backend on a CPU")
        return partial(sdpa, causal=case.causal, backend=SDPA[name])
    return OTHERS[name](case, device)


def _train(case: AttentionCase, device: torch.device) -> Forward:
    if importlib.util.find_spec("triton") is None:
        raise Unsupported("Triton is not installed")
    if device.type != "cuda":
        raise Unsupported("Triton kernels need a GPU (their interpreter is for tests)")
    module = importlib.import_module("steelyard.kernels.flash_autograd")
    return partial(module.flash_attention, spec=module.FlashSpec(causal=case.causal))


def _serving(case: AttentionCase, device: torch.device) -> Forward:
    """Paged KV: the pool is filled once from k, v of the first call; each call then only attends."""
    backend, block_size = _serving_backend(case, device), BLOCK_SIZE[device.type]
    blocks = -(-case.num_k // block_size)
    shape = (case.batch * blocks + 1, 2, case.num_kv_heads, block_size, case.head_dim)
    batch, spec = paged_batch(case, block_size, device), AttnSpec(scale=case.head_dim**-0.5, causal=case.causal)
    backend.prepare(batch)
    pools: dict[int, KvLayer] = {}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k.data_ptr() not in pools:
            pools[k.data_ptr()] = _paged(k, v, shape)
        out = torch.empty_like(q).flatten(0, 1)
        backend.forward(q.flatten(0, 1), None, None, pools[k.data_ptr()], batch, spec, out)
        return out.view(q.shape)

    return forward


def _serving_backend(case: AttentionCase, device: torch.device) -> Attention:
    if device.type == "cpu":
        return CpuAttention()
    if case.dtype == torch.float32:
        raise Unsupported("the Triton backend is for 16-bit tensors")
    if not case.causal and case.num_q > 1:
        raise Unsupported("serving prefill is causal")
    configs = importlib.import_module("steelyard.kernels.triton_configs")
    attention = importlib.import_module("steelyard.kernels.triton_attention")
    shape = configs.AttentionShape(
        case.num_heads, case.num_kv_heads, case.head_dim, BLOCK_SIZE["cuda"], case.batch, case.batch * case.num_q,
        dtype=case.dtype,
    )  # fmt: skip
    backend: Attention = attention.TritonAttention(shape, device)
    return backend


def paged_batch(case: AttentionCase, block_size: int, device: torch.device) -> Batch:
    """A step in which every row of `case` brings its num_q new tokens; blocks are handed out in order from 1."""
    blocks = -(-case.num_k // block_size)
    table = torch.arange(1, case.batch * blocks + 1, dtype=torch.int32, device=device).view(case.batch, blocks)
    position = torch.arange(case.num_k - case.num_q, case.num_k, device=device)
    slots = table[:, position // block_size].long() * block_size + position % block_size
    return Batch(
        positions=position.repeat(case.batch),
        slots=(slots.flatten(),),
        q_start=torch.arange(0, (case.batch + 1) * case.num_q, case.num_q, dtype=torch.int32, device=device),
        ctx_len=torch.full((case.batch,), case.num_k, dtype=torch.int32, device=device),
        tables=(table,),
        num_tokens=case.batch * case.num_q,
        num_decode=case.batch if case.num_q == 1 else 0,
        max_q=case.num_q,
        max_ctx=case.num_k,
    )


def _paged(k: Tensor, v: Tensor, shape: tuple[int, int, int, int, int]) -> KvLayer:
    """k, v [B, K, Hk, D] in one pool like the server's [1 + B * blocks, 2, Hk, block_size, D], null block in front."""
    batch, num_k, heads, dim = k.shape
    pool = torch.zeros(shape, dtype=k.dtype, device=k.device)
    blocks, size = (shape[0] - 1) // batch, shape[3]
    padded = torch.zeros(batch, blocks * size, 2, heads, dim, dtype=k.dtype, device=k.device)
    padded[:, :num_k] = torch.stack([k.detach(), v.detach()], 2)
    pool[1:] = padded.view(batch * blocks, size, 2, heads, dim).permute(0, 2, 3, 1, 4)
    return KvLayer(pool[:, 0], pool[:, 1], size)


def _flashinfer(case: AttentionCase, device: torch.device) -> Forward:
    if device.type != "cuda":
        raise Unsupported("FlashInfer needs a GPU")
    try:
        import flashinfer  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise Unsupported(f"FlashInfer does not import: {error}") from error
    starts = [
        torch.arange(0, (case.batch + 1) * n, n, dtype=torch.int32, device=device) for n in (case.num_q, case.num_k)
    ]
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(*starts, case.num_heads, case.num_kv_heads, case.head_dim, causal=case.causal, q_data_type=case.dtype)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = wrapper.run(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        return out.view(q.shape)

    return forward


OTHERS: dict[str, Prepare] = {"steelyard": _serving, "steelyard-train": _train, "flashinfer": _flashinfer}
NAMES = ("naive", *SDPA, *OTHERS)
