"""`lm.classify` and `lm.score`: labels, rewards and scores of pairs, by classification heads or by embeddings."""

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
from ..chat import RenderedPrompt
from ..completion import RequestOutput
from ..notebook.signatures import names_options
from ..prompts import as_prompts, captures_in, names_of, refuse_captures
from ..request_options import RequestOptions, check_options
from .calls import encode, read_prompt
from .labels import NO_HEAD, Labels, has_types, logits_capture, pair_of, pairs_of

if TYPE_CHECKING:
    from ..calls.model import ClientModel


@dataclass(frozen=True, repr=False)
class ClassOutput(Shown):
    """A prompt and its labels."""

    prompt: str | None
    prompt_token_ids: list[int]
    label: str
    """The likeliest label."""
    probs: torch.Tensor
    """[labels] float32: after the model's activation, a softmax by default."""
    logits: torch.Tensor
    """[labels] float32, before it."""
    activations: Activations
    """Captured states, and the logits."""
    receipt: Any
    monitors: Mapping[str, MonitorScores] = field(default_factory=dict)
    """Name of a monitor -> its scores."""

    def __repr__(self) -> str:
        return f"ClassOutput(label={self.label!r}, probs={shown(self.probs)})"

    def table(self) -> Table:
        """The prompt, its label and probabilities."""
        prompt = str(self.prompt_token_ids) if self.prompt is None else self.prompt
        rows = [("prompt", prompt), ("label", self.label), ("probs", [round(p, 4) for p in self.probs.tolist()])]
        return Table("classification", ("", ""), rows)


@names_options()
def classify(
    self: ClientModel,
    prompts: Any,
    *,
    activation: bool = True,
    truncate_prompt_tokens: int | None = None,
    progress: bool | None = None,
    **options: Unpack[RequestOptions],
) -> list[ClassOutput]:
    """Labels of prompts, by the classification head of a ...ForSequenceClassification checkpoint, at the last token.

    Args:
        prompts, progress, options: see `generate`. A conversation ends without the beginning of an answer.
        activation: False: `probs` are the logits.
        truncate_prompt_tokens: see `encode`.

    Raises:
        PromptError, ValueError: the model has no such head, or a prompt that cannot be served; nothing was scheduled then.
        RequestError, TimeoutError: as `encode`.
    """
    check_options("lm.classify", options)
    labels = _labels(self)
    most = self.backend.facts.pooler.most_tokens(truncate_prompt_tokens, self.limits.max_model_len)
    given = as_prompts(prompts)
    read = [read_prompt(self, one, "", most, name)[0] for one, name in zip(given, names_of(given), strict=True)]
    outs = _logits(self, read, options, progress)
    return [_classified(labels, activation, *each) for each in zip(read, outs, strict=True)]


@names_options()
def score(
    self: ClientModel,
    texts: Any,
    others: Any = None,
    *,
    activation: bool | None = None,
    truncate_prompt_tokens: int | None = None,
    progress: bool | None = None,
    **options: Unpack[RequestOptions],
) -> list[float]:
    """Rewards of prompts, or scores of pairs of texts.

    With a head of one label, a prompt's score is its logit. A pair's is the activation of it, by default a sigmoid. Without a
    head, pairs have the cosine of their embeddings.

    Args:
        texts: prompts; or texts of pairs: one for all `others`, or as many.
        others: second texts of pairs; None: `texts` are prompts.
        activation: whether the model's activation is applied. None: of pairs only.
        truncate_prompt_tokens: see `encode`.
        progress, options: see `generate`.

    Returns:
        a score for each prompt or pair.

    Raises:
        PromptError, ValueError: a head of several labels, or a prompt that cannot be served; nothing was scheduled then.
        RequestError, TimeoutError: as `encode`.
    """
    check_options("lm.score", options)
    refuse_captures("lm.score()", options, "it returns numbers; lm.classify and lm.encode return captured states")
    facts = self.backend.facts
    first = as_prompts(texts)
    if others is not None and Labels.of(facts.hf_config.to_dict(), facts.tasks) is None:
        pairs = pairs_of(first, as_prompts(others))
        how: Any = {
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "normalize": True,
            "progress": progress,
            **options,
        }
        outs = encode(self, [text for pair in pairs for text in pair], **how)
        return [float(a.data @ b.data) for a, b in zip(outs[::2], outs[1::2], strict=True)]
    labels = _labels(self)
    labels.check_one()
    most = facts.pooler.most_tokens(truncate_prompt_tokens, facts.limits.max_model_len)
    if others is None:
        read = [read_prompt(self, one, "", most, name)[0] for one, name in zip(first, names_of(first), strict=True)]
    else:
        read = [_pair(self, *pair, most, f"pair {i}") for i, pair in enumerate(pairs_of(first, as_prompts(others)))]
    outs = _logits(self, read, options, progress)
    return [labels.score(out.activations["logits"][0].numpy(), activation, others is not None) for out in outs]


def _labels(lm: ClientModel) -> Labels:
    facts = lm.backend.facts
    found = Labels.of(facts.hf_config.to_dict(), facts.tasks)
    if found is None:
        raise PromptError(NO_HEAD)
    return found


def _pair(lm: ClientModel, first: Any, second: Any, most: int | None, what: str) -> RenderedPrompt:
    for text in (first, second):
        if not isinstance(text, str):
            raise PromptError(
                f"{what} holds {shown(text)}: two texts are expected; lm.score takes token ids of a pair as a prompt"
            )
    facts = lm.backend.facts
    ids = pair_of(lm.tokenizer, first, second, what, most, typed=has_types(facts.hf_config.to_dict(), facts.tasks))
    return read_prompt(lm, ids, "", most, what)[0]


def _logits(
    lm: ClientModel, read: Sequence[RenderedPrompt], options: RequestOptions, progress: bool | None
) -> list[RequestOutput]:
    """The outputs of prompts, with the logits at their last token."""
    captures = captures_in(options, len(read))
    encoder = lm.model_spec.bidirectional
    options["capture"] = [[Capture(**logits_capture(encoder)), *others] for others in captures]
    handles = lm._requests.submit(list(read), PREFILL, options, prompt_logits=encoder)
    outs = wait_for(handles, progress=progress)
    for name, out in zip(names_of(read), outs, strict=True):
        if out.finish_reason == "timeout":
            raise TimeoutError(f"{name} ran into its timeout")
    return outs


def _classified(labels: Labels, activation: bool, read: RenderedPrompt, out: RequestOutput) -> ClassOutput:
    logits = out.activations["logits"][0]
    probs = torch.from_numpy(labels.probs(logits.numpy(), activation))
    label = labels.names[int(logits.argmax())]
    return ClassOutput(
        read.text, out.prompt_token_ids, label, probs, logits, out.activations, out.receipt, out.monitors
    )
