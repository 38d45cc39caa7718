"""Flags of the servers that cases run on, and the text the scripted one is made to say."""

from __future__ import annotations

RIG = ("--block-size", "16", "--max-num-seqs", "8", "--max-model-len", "2048", "--dtype", "float32")
CONFIGURATIONS = {
    "plain": ("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "512"),
    "solo": ("--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "512", "--no-enable-prefix-caching"),
    "tight": ("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "12"),
    "chunked": ("--max-num-batched-tokens", "32", "--num-gpu-blocks-override", "49"),
    "narrow": (
        *("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "512", "--max-num-seqs", "2"),
        *("--max-num-queued-tokens", "500"),
    ),
    "priority": (
        *("--max-num-batched-tokens", "256", "--num-gpu-blocks-override", "24"),
        *("--scheduling-policy", "priority"),
    ),
}

POLICIES = {
    "fcfs": (),
    "priority": ("--scheduling-policy", "priority"),
    "fair": ("--scheduling-policy", "fair"),
    "slo": ("--scheduling-policy", "slo", "--ttft-slo-ms", "500", "--tpot-slo-ms", "50"),
}
"""The cases of sections S and K hold under each; the slow tier has those beside the first."""

SCRIPTED = {
    10: "one two STOP three",
    11: "xyz ab",
    12: "\U0001f44d\U0001f3fd 日本語 हिन्दी",
    13: "a\n\nb\r\n\r\ndata: c\n\n",
    14: "STOP and STOP",
}
"""What the scripted server answers to a prompt of this one token; then the end of the text."""
