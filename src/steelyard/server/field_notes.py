"""What each field of a request means, in a few words, for the API's description; limits are those that sampling checks.

A field that is not here is described by its struct. Names mean the same in every body that has them.
"""

from __future__ import annotations

from typing import Any

from steelyard.core.sampling import COUNT_RANGES, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, VALUE_RANGES

NOTES = {
    "model": "what is served here, or left out",
    "messages": "the conversation, oldest first",
    "prompt": "a text, token ids, or a list of either",
    "input": "a text, token ids, or a list of items",
    "priority": "lower goes first, under --scheduling-policy priority",
    "cache_salt": "narrows who shares the prompt's cached KV",
    "ttft_deadline_ms": "from arrival to the first token; later is a 504",
    "deadline_ms": "from arrival to the end: a 504 before the first token, after it the finish reason deadline",
    "ttft_slo_ms": "target for the first token, under --scheduling-policy slo",
    "tpot_slo_ms": "target for each further token, under --scheduling-policy slo",
    "user": "no effect",
    "stream": "answer as events, as tokens come",
    "stream_options": "include_usage: a last event with the usage",
    "n": "choices for each prompt",
    "best_of": "choices made, of which the n most probable are shown",
    "max_tokens": "most tokens to make; default: 16 for completions, else what context and pool allow",
    "max_completion_tokens": "the same as max_tokens",
    "max_output_tokens": "most tokens to make",
    "min_tokens": "no end before so many, unless a grammar has to end",
    "temperature": "0: the most probable token, always; default 1",
    "top_p": "only the most probable tokens that have this much probability together",
    "top_k": "only so many most probable tokens; 0 or -1: all",
    "min_p": "only tokens at least this share of the most probable one's probability",
    "seed": "of the draws; choice i uses seed + i",
    "stop": f"texts that end the output: at most {MAX_STOP_STRINGS}, of {MAX_STOP_STRING_CHARS} characters",
    "stop_token_ids": "tokens that end the output",
    "include_stop_str_in_output": "show what ended the output",
    "ignore_eos": "go on at the model's end of text",
    "skip_special_tokens": "leave special tokens out of the text; default true",
    "presence_penalty": "taken from the logit of what was generated once",
    "frequency_penalty": "taken from the logit for each time it was generated",
    "repetition_penalty": "divides the logits of all that came before; 1: none",
    "logit_bias": "token id: what is added to its logit, -100 to 100",
    "logprobs": "natural logarithms of probability: how many of the best, or, in chat, whether",
    "top_logprobs": "so many of the best at each position, with logprobs",
    "prompt_logprobs": "the same for the prompt's tokens; without stream",
    "return_token_ids": "token ids beside the text",
    "return_ledger": "the request's account beside the answer",
    "response_format": "text, json_object or json_schema",
    "structured_outputs": "one of json, json_object, regex, choice, grammar",
    "metadata": "no effect, but that /v1/responses gives it back",
    "store": "keep the answer for GET /v1/responses/{id}; elsewhere no effect",
    "service_tier": "no effect",
    "echo": "the prompt before the text",
    "add_special_tokens": "begin the prompt as the tokenizer does",
    "suffix": "not supported",
    "add_generation_prompt": "end the prompt where the assistant speaks; default true",
    "continue_final_message": "go on with the last message",
    "chat_template_kwargs": "what the chat template is given besides",
    "tools": "functions the model may call",
    "tool_choice": "auto, none, required, or one function",
    "parallel_tool_calls": "more than one call in an answer",
    "stop_in_reasoning": "stop texts count in the reasoning too",
    "thinking_token_budget": "thinking is closed after so many tokens",
    "safety_identifier": "no effect",
    "prompt_cache_key": "no effect",
    "encoding_format": "float or base64",
    "dimensions": "only so many of the vector's first values",
    "pooling": "of the last token, or the mean of all",
    "normalize": "to length 1; default true",
    "instructions": "a system message before the input",
    "previous_response_id": "goes on from a kept answer",
}


def annotate(schema: dict[str, Any]) -> None:
    """Add words and limits to a body's properties, where they are not said by its types."""
    for name, field in schema["properties"].items():
        if name in NOTES:
            field.setdefault("description", NOTES[name])
        low, high = COUNT_RANGES.get(name) or VALUE_RANGES.get(name) or (None, None)
        for kind in field.get("anyOf", [field]):
            if low is not None and kind.get("type") in ("integer", "number"):
                kind["minimum"], kind["maximum"] = low, high
                if name == "top_p":
                    kind["exclusiveMinimum"] = kind.pop("minimum")
