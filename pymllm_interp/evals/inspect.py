"""inspect-ai's model provider over an engine: ``get_model("pymllm_interp/demo", interventions=[...])``.

inspect-ai finds it by the entry point of this package. On its command line: ``inspect eval task.py --model pymllm_interp/demo``.
"""

from __future__ import annotations

import json
import time
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageTool,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    TopLogprob,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from ..client.calls.lm_arguments import with_tuning
from ..client.chat import render, template_messages
from ..client.completion import CompletionOutput
from ..core.sampling_params import SamplingParams
from ..lm import LM
from .scoring import interventions_of

STOP_REASONS = {"stop": "stop", "length": "max_tokens"}
"""finish_reason -> inspect-ai's."""
_MAX_TOKENS = 2048
"""New tokens if inspect-ai gives no limit; fewer at the end of the context."""


class EngineAPI(ModelAPI):
    """A model for inspect-ai, with interventions.

    A conversation is written by the model's chat template; without one, as ``role: content`` lines.

    Args:
        model_name: model of an `LM`: "demo", a folder, a .gguf file or a hub id. With `lm`, a name for logs.
        lm: an `LM`, which stays the caller's.
        interventions: interventions of each request: `Steer` and other ops, or JSON as of the HTTP API (dicts or text).
        model_args: arguments of `LM`, without `lm`.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008
        lm: LM | None = None,
        interventions: Any = None,
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self.interventions = interventions_of(
            json.loads(interventions) if isinstance(interventions, str) else interventions
        )
        if lm is not None and model_args:
            raise TypeError(f"{', '.join(model_args)} belong to a new LM, and lm= was given")
        self._owned = lm is None
        self.lm: LM = LM(model_name, **with_tuning(**model_args)) if lm is None else lm

    async def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """The answer to a conversation. Tools are refused."""
        if tools:
            raise NotImplementedError(
                "tools: this provider has no tool calls; leave use_tools() out of the task's solver"
            )
        start = time.monotonic()
        prompt = self._prompt(input)
        params = self._params(config, len(prompt))
        (out,) = await self.lm.agenerate(
            [prompt], params, interventions=self.interventions or None, timeout=config.attempt_timeout
        )
        made = sum(len(choice.token_ids) for choice in out.outputs)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(choice, config) for choice in out.outputs],
            usage=ModelUsage(input_tokens=len(prompt), output_tokens=made, total_tokens=len(prompt) + made),
            time=time.monotonic() - start,
            metadata={"receipt": repr(out.receipt)} if self.interventions else None,
        )

    def _prompt(self, input: list[ChatMessage]) -> list[int]:
        """Token ids of a conversation."""
        messages, _ = template_messages(list(map(_message, input)), "the conversation")
        if getattr(self.lm.tokenizer, "chat_template", None):
            return render(self.lm.tokenizer, messages, "the conversation").token_ids
        return self.lm.token_ids("".join(f"{message['role']}: {message['content']}\n" for message in messages))

    def _params(self, config: GenerateConfig, prompt: int) -> SamplingParams:
        given = {
            "n": config.num_choices, "temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k,
            "seed": config.seed, "stop": config.stop_seqs, "frequency_penalty": config.frequency_penalty,
            "presence_penalty": config.presence_penalty, "logit_bias": config.logit_bias,
        }  # fmt: skip
        most = self.lm.limits.max_model_len - prompt
        new = min(_MAX_TOKENS, most) if config.max_tokens is None else config.max_tokens
        logprobs = (config.top_logprobs or 0) if config.logprobs else None
        return SamplingParams(
            max_tokens=new, logprobs=logprobs, **{name: value for name, value in given.items() if value is not None}
        )

    def _choice(self, out: CompletionOutput, config: GenerateConfig) -> ChatCompletionChoice:
        return ChatCompletionChoice(
            message=ChatMessageAssistant(content=out.text, model=self.model_name, source="generate"),
            stop_reason=STOP_REASONS.get(out.finish_reason or "", "unknown"),  # pyright: ignore[reportArgumentType]
            logprobs=None if out.logprobs is None else self._logprobs(out, config.top_logprobs or 0),
        )

    def _logprobs(self, out: CompletionOutput, top: int) -> Logprobs:
        content = []
        for token, entry in zip(out.token_ids, out.logprobs or (), strict=True):
            ranked = sorted(entry.items(), key=lambda item: item[1].rank)[:top]
            content.append(
                Logprob(
                    token=entry[token].decoded_token or "",
                    logprob=entry[token].logprob,
                    top_logprobs=[
                        TopLogprob(token=found.decoded_token or "", logprob=found.logprob) for _, found in ranked
                    ],
                )
            )
        return Logprobs(content=content)

    def connection_key(self) -> str:
        """All requests go to one engine."""
        return f"pymllm_interp/{self.model_name}"

    def max_connections(self) -> int:
        """Number of requests that a step can run."""
        return self.lm.limits.max_running

    async def aclose(self) -> None:
        """Shut the engine down, if this model made it."""
        if self._owned:
            self.lm.shutdown()


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as OpenAI's, without its reasoning."""
    content: Any = message.content
    if not isinstance(content, str):
        content = [part.model_dump() for part in content if part.type != "reasoning"]
    found = {"role": message.role, "content": content}
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if isinstance(message, ChatMessageTool):
        found["tool_call_id"] = message.tool_call_id
    return found


@modelapi(name="pymllm_interp")
def pymllm_interp() -> type[ModelAPI]:
    """Entry point of inspect-ai's registry."""
    return EngineAPI
