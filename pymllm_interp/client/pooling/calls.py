"""`lm.encode`: embeddings of prompts, by requests that capture states and generate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ...hooks.captures.activations import Activations
from ...hooks.captures.spec import Capture
from ...hooks.monitors.scores import MonitorScores
from ...utils.arguments import PromptError, shown
from ...utils.tables import Shown, Table
from ..calls.requests import wait_for
from ..calls.traced_prompts import PREFILL
from ..chat import RenderedPrompt, is_conversation, render
from ..completion import RequestOutput
from ..notebook.signatures import names_options
from ..prompts import as_prompts, captures_in, names_of
from ..request_options import RequestOptions, check_options
from .labels import check_types, has_types
from .pooling import Pooling

if TYPE_CHECKING:
    from ..calls.model import ClientModel


@dataclass(frozen=True, repr=False)
class PooledOutput(Shown):
    """A prompt and its embedding."""

    prompt: str | None
    """The prompt's text, with the model's text before it, if it was text or a conversation."""
    prompt_token_ids: list[int]
    data: torch.Tensor
    """[size] float32 on the CPU; [rows, size] with pooling "step" and "all"."""
    activations: Activations
    """Captured states."""
    receipt: Any
    """Applied interventions and execution of its steps (`core.receipt.Receipt`)."""
    monitors: Mapping[str, MonitorScores] = field(default_factory=dict)
    """Name of a monitor -> its scores."""
    num_cached_tokens: int = 0
    """Prompt tokens with KV in the prefix cache."""

    def __repr__(self) -> str:
        prompt = "" if self.prompt is None else f"prompt={shown(self.prompt)}, "
        return f"PooledOutput({prompt}prompt_tokens={len(self.prompt_token_ids)}, data={shown(self.data)})"

    def table(self) -> Table:
        """The prompt, and the shape of its embedding."""
        prompt = str(self.prompt_token_ids) if self.prompt is None else self.prompt
        rows = [("prompt", prompt), ("prompt tokens", len(self.prompt_token_ids)), ("data", list(self.data.shape))]
        rows += [("intervention", applied) for applied in self.receipt.interventions]
        return Table("embedding", ("", ""), rows)


@names_options()
def encode(
    self: ClientModel,
    prompts: Any,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate_prompt_tokens: int | None = None,
    step_tag_id: int | None = None,
    returned_token_ids: Sequence[int] | None = None,
    progress: bool | None = None,
    **options: Unpack[RequestOptions],
) -> list[PooledOutput]:
    """Embeddings of prompts, pooled from the last hidden states by the running engine. Nothing is generated.

    Args:
        prompts, progress: see `generate`. A conversation ends without the beginning of an answer.
        pooling: "last", "mean", "cls", "max", "weightedmean", "mean_sqrt_len_tokens"; "all" for all rows; "step" for those at
            `step_tag_id`. None: as the model's `modules.json` says, else "last", or "cls" for encoders.
        normalize: whether rows have length 1. None: as `modules.json` says, else True.
        dimensions: first values of a row to keep, for models that were trained so. They are normalised again.
        prompt_name: name of a text of the model that stands before each prompt, such as "query". None: its default.
        prompt: the text itself.
        truncate_prompt_tokens: tokens to keep, by the tokenizer's side; -1: as many as the model reads. None refuses more.
        step_tag_id: token that ends a step, with pooling "step".
        returned_token_ids: tokens of which "step" returns the probabilities among each other, in place of states; with
            normalize=False the logits.
        options: see `generate`.

    Raises:
        PromptError, ValueError: a prompt or an argument that cannot be served; nothing was scheduled then.
        RequestError: a request failed.
        TimeoutError: a request ran into its timeout.
    """
    check_options("lm.encode", options)
    facts = self.backend.facts
    if facts.spec.source is not None:
        raise PromptError(
            f"{facts.architecture} is an encoder-decoder model, of which nothing is pooled: capture its states"
        )
    how = Pooling(
        facts.pooler, facts.pooled_site, facts.spec.hidden_size, facts.limits.vocab_size, pooling, normalize, dimensions,
        step_tag_id, returned_token_ids,
    )  # fmt: skip
    before = facts.pooler.prompt_text(prompt, prompt_name)
    most = facts.pooler.most_tokens(truncate_prompt_tokens, facts.limits.max_model_len)
    given = as_prompts(prompts)
    if not (prompt is None and prompt_name is None) and not all(isinstance(one, str) for one in given):
        raise PromptError("prompt and prompt_name stand before texts: token ids and conversations are read as they are")
    read = [read_prompt(self, one, before, most, name) for one, name in zip(given, names_of(given), strict=True)]
    return pooled_outputs(self, how, read, options, progress)


def pooled_outputs(
    lm: ClientModel, how: Pooling, read: list[tuple[RenderedPrompt, int]], options: RequestOptions, progress: bool | None
) -> list[PooledOutput]:  # fmt: skip
    """Submit prompts, and pool their captured states.

    Args:
        read: prompts, each with a number of first tokens that are not pooled.
    """
    captures = captures_in(options, len(read))
    own: list[Capture] = []
    for (prompt, skipped), name in zip(read, names_of(read), strict=True):
        try:
            own.append(Capture(**how.capture(prompt.token_ids, skipped)))
        except PromptError as error:
            raise PromptError(f"{name}: {error}") from None
    options["capture"] = [
        others if any(_has_all_rows(one, spec.site) for one in others) else [spec, *others]
        for spec, others in zip(own, captures, strict=True)
    ]
    requests = lm._requests
    prompts = [prompt for prompt, _ in read]
    outs = wait_for(requests.submit(prompts, PREFILL, options, prompt_logits=how.reads_logits), progress=progress)
    return [_pooled(how, *each) for each in zip(outs, own, read, names_of(read), strict=True)]


def _pooled(
    how: Pooling, out: RequestOutput, spec: Capture, read: tuple[RenderedPrompt, int], name: str
) -> PooledOutput:
    if out.finish_reason == "timeout":
        raise TimeoutError(f"{name} ran into its timeout")
    rows, positions = out.activations[spec.site].float(), spec.positions
    if spec.reduce is None and isinstance(positions, tuple | list) and len(rows) > len(positions):
        rows = rows[torch.tensor(positions)]  # of the caller's capture, which has all
    elif spec.reduce is not None and len(rows) > 1:
        rows = rows[read[1] :]
    data = torch.from_numpy(how.pooled(rows.numpy(), read[1]))
    return PooledOutput(
        read[0].text, out.prompt_token_ids, data, out.activations, out.receipt, out.monitors, out.num_cached_tokens
    )


def _has_all_rows(spec: Capture, site: Any) -> bool:
    """Whether a caller's capture has all states that are pooled: two captures of a site would be refused."""
    whole = spec.reduce is None and spec.heads is None and spec.dtype in (None, torch.float32) and not spec.stays
    return whole and str(spec.site) == str(site) and spec.positions in ("all", "prompt")


def read_prompt(lm: ClientModel, prompt: Any, before: str, most: int | None, what: str) -> tuple[RenderedPrompt, int]:
    """The prompt's token ids, and the number of first tokens that are not pooled."""
    pooler, skipped = lm.backend.facts.pooler, 0
    if isinstance(prompt, str):
        found = pooler.read(lm.tokenizer, prompt, before, what, most)
        rendered, skipped = lm._requests.read(RenderedPrompt(found.text, found.token_ids), what), found.skipped
    elif is_conversation(prompt):
        rendered = lm._requests.read(render(lm.tokenizer, prompt, what, add_generation_prompt=False), what)
    else:
        rendered = lm._requests.read(prompt, what)
    if most is not None and len(rendered.token_ids) > most:
        if rendered.embeds is not None:
            raise PromptError(f"{what} has embeddings, and truncate_prompt_tokens is of tokens: leave it out")
        left = getattr(lm.tokenizer, "truncation_side", "right") == "left"
        rendered = rendered._replace(token_ids=rendered.token_ids[-most:] if left else rendered.token_ids[:most])
    pooler.check_length(len(rendered.token_ids), what)
    if rendered.text is not None and has_types(lm.backend.facts.hf_config.to_dict(), lm.backend.facts.tasks):
        check_types(lm.tokenizer, rendered.token_ids, None, what)
    return rendered, skipped
