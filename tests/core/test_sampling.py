"""Each value is checked, the message names its field and limit, and what is valid passes."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.core.sampling import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams
from steelyard.errors import InvalidRequest

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 5.0),
        ("temperature", NAN),
        ("temperature", INF),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", 2.0),
        ("min_p", -0.1),
        ("top_k", -5),
        ("top_k", True),
        ("top_k", 2**31),
        ("max_tokens", 2**31),
        ("min_tokens", 2**31),
        ("repetition_penalty", 1e-46),
        ("n", 0),
        ("n", 100_000),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("logprobs", 1000),
        ("prompt_logprobs", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop", ("a",) * (MAX_STOP_STRINGS + 1)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, NAN),)),
        ("logit_bias", tuple((i, 0.0) for i in range(MAX_LOGIT_BIAS + 1))),
    ],
)
def test_p13_a_value_out_of_range_is_refused_and_the_field_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field and caught.value.message.startswith(f"{field}:")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
        {"temperature": 2.0, "min_p": 1.0, "top_p": 1e-9},
        {"seed": -(2**63), "n": 128},
        {"seed": 2**64 - 1},
        {"max_tokens": 1, "min_tokens": 1},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": ((0, -100.0), (5, 100.0))},
    ],
)
def test_the_ends_of_each_range_are_valid(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"min_tokens: .*between 0 and 4, got 5"):
        SamplingParams(max_tokens=4, min_tokens=5)


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-30])
def test_p07_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize("params", [SamplingParams(stop_token_ids=(999_999,)), SamplingParams(logit_bias=((-1, 1.0),))])
def test_p01_p03_token_ids_outside_the_vocabulary_are_refused(params: SamplingParams) -> None:
    with pytest.raises(InvalidRequest, match="token id must be between 0 and 999"):
        params.check_vocab(1000)
    SamplingParams(stop_token_ids=(999,)).check_vocab(1000)


def test_choice_i_has_seed_plus_i_modulo_two_to_the_64() -> None:
    choice = SamplingParams(n=4, temperature=0.5).for_choice(3, 2**64 - 1)
    assert (choice.n, choice.seed, choice.temperature) == (1, 2, 0.5)
