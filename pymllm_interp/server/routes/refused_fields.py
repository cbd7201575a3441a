"""Fields of OpenAI's and vLLM's requests that this server refuses, and the values with which they pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ...core import unsupported


class Refused(NamedTuple):
    """A field that is refused.

    Attributes:
        reason: reason, and the alternative.
        neutral: values that change nothing, so that clients may send them. None always is one.
    """

    reason: str
    neutral: tuple[Any, ...] = ()


_TRANSFER = "KV is not transferred between engines"
_REPETITION = "repetition is not detected: use stop, or repetition_penalty"
_REASONING = (
    "how much the model reasons is up to its template: chat_template_kwargs sets what that reads. serve --reasoning-parser splits "
    "reasoning off, for all requests"
)
_TEMPLATE = "a request brings no template: the operator gives one, with serve --chat-template"
_FUNCTIONS = "functions is OpenAI's old name: use tools"

REFUSED: dict[str, Refused] = {
    **{name: Refused(reason) for name, reason in unsupported.OF_REQUESTS.items() if name != "response_format"},
    # OpenAI's
    "audio": Refused(unsupported.MULTIMODAL),
    "best_of": Refused("there is no best_of: n draws as many completions", (1,)),
    "function_call": Refused("function_call is OpenAI's old name: use tool_choice", ("none",)),
    "functions": Refused(_FUNCTIONS, ([],)),
    "modalities": Refused(unsupported.MULTIMODAL, (["text"],)),
    "moderation": Refused("completions are not moderated"),
    "prediction": Refused(unsupported.SPECULATION),
    "prompt_cache_options": Refused("the prefix cache has no options of a request; cache_salt keeps requests apart", ({},)),
    "reasoning_effort": Refused(_REASONING),
    "suffix": Refused("suffix is not supported: the models here continue a prompt", ("",)),
    "verbosity": Refused("verbosity is not supported: ask for it in a message", ("medium",)),
    "web_search_options": Refused("there is no web search"),
    # vLLM's
    "chat_template": Refused(_TEMPLATE),
    "constraint": Refused("a constraint is Python code, which HTTP does not carry: use allowed_token_ids, or a local LM"),
    "documents": Refused("documents are not supported: put them in a message", ([],)),
    "early_stopping": Refused(unsupported.BEAMS, (False,)),
    "ec_transfer_params": Refused(_TRANSFER),
    "guided_decoding_backend": Refused(unsupported.STRUCTURED),
    "guided_json_object": Refused("use structured_outputs, with json_object", (False,)),
    "guided_whitespace_pattern": Refused("use structured_outputs, with disable_any_whitespace"),
    "include_reasoning": Refused(_REASONING, (True,)),
    "kv_transfer_params": Refused(_TRANSFER),
    "length_penalty": Refused(unsupported.BEAMS, (1,)),
    "logits_processors": Refused(unsupported.PROCESSORS, ([],)),
    "logprob_token_ids": Refused("log probabilities are of the likeliest tokens: use logprobs"),
    "max_repetition_pattern_size": Refused(_REPETITION, (0,)),
    "media_io_kwargs": Refused(unsupported.PROCESSOR, ({},)),
    "min_repetition_pattern_size": Refused(_REPETITION, (0,)),
    "mm_processor_kwargs": Refused(unsupported.PROCESSOR, ({},)),
    "repetition_detection": Refused(_REPETITION),
    "repetition_min_count": Refused(_REPETITION, (0,)),
    "request_id": Refused("use the header X-Request-Id, which is sent back and logged"),
    "return_mm_kwargs": Refused("the outputs of the image processor are not returned", (True,)),
    "return_token_offsets": Refused("offsets in a prompt's text are not reported", (False,)),
    "return_tokens_as_token_ids": Refused("use return_token_ids: token_ids of each choice", (False,)),
    "routed_experts_prompt_start": Refused(unsupported.ROUTED_EXPERTS, (0,)),
    "session_id": Refused("requests have no sessions; the prefix cache shares equal beginnings"),
    "spaces_between_special_tokens": Refused("special tokens are decoded as the tokenizer does", (True,)),
    "stream_interval": Refused("a stream has an event for each token", (1,)),
    "thinking_token_budget": Refused(_REASONING, (-1,)),
    "truncation_side": Refused("truncate_prompt_tokens keeps the last tokens", ("left",)),
    "use_beam_search": Refused(unsupported.BEAMS, (False,)),
    "vllm_xargs": Refused("there are no extensions of vLLM's", ({},)),
    "watermarking": Refused("texts are not watermarked", (False,)),
}  # fmt: skip
"""Name -> refusal. Other unknown fields are refused as unknown."""

_HERE = "use /v1/chat/completions, which has it"
OF_RESPONSES: dict[str, Refused] = REFUSED | {
    "access_programs": Refused("there are no access programs"),
    "background": Refused("a response is made while its client waits: leave background out, or use stream", (False,)),
    "background_options": Refused("there are no responses in the background", ({},)),
    "context_management": Refused("conversations are not compacted: send the items that count as input", ([],)),
    "conversation": Refused("there are no conversations: previous_response_id continues a response"),
    "image": Refused(unsupported.MULTIMODAL),
    "logprobs": Refused("use include, with 'message.output_text.logprobs', and top_logprobs", (False,)),
    "max_completion_tokens": Refused("use max_output_tokens"),
    "max_tokens": Refused("use max_output_tokens"),
    "max_tool_calls": Refused("it counts calls of built-in tools, and there are none: parallel_tool_calls=false keeps one call"),
    "messages": Refused("use input, a text or a list of items"),
    "n": Refused("a response is one: send several requests, or " + _HERE, (1,)),
    "prompt": Refused("there are no stored prompts: use instructions and input"),
    "prompt_logprobs": Refused(_HERE),
    "reasoning": Refused(
        _REASONING,
        ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}),
    ),
    "response_format": Refused("use text, with format"),
    "return_token_ids": Refused(_HERE, (False,)),
    "stream_options": Refused(
        "events are not padded, and the last one has the usage", ({}, {"include_obfuscation": False})
    ),
    "truncation": Refused("items are not left out: truncate_prompt_tokens keeps the last tokens", ("disabled",)),
}  # fmt: skip
"""`REFUSED` for /v1/responses."""


def without_neutral(given: Mapping[Any, Any], known: Iterable[str], refusals: Mapping[str, Refused]) -> dict[Any, Any]:
    """A request's fields without other servers' fields that change nothing.

    Args:
        known: fields of the request's class, which are kept.

    Raises:
        ValueError: a refused field would change something; the message has the alternative.
    """
    found, kept = {}, frozenset(known)
    for name, value in given.items():
        refused = None if name in kept else refusals.get(name)
        if refused is None:
            found[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in refused.neutral):
            raise ValueError(f"{name}: {refused.reason}")
    return found


def _same(value: Any, neutral: Any) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
