"""lm-eval's `LM` over an engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from ..client.calls.lm_arguments import with_tuning
from ..client.chat import render
from ..client.detokenizer import decode
from ..core.sampling_params import SamplingParams
from ..lm import LM
from .scoring import interventions_of, score

_PER_CALL = 256
"""Requests that are submitted at once, so that a progress bar moves and lm-eval's cache fills."""


@register_model("pymllm_interp", "pymllm-interp")
class HarnessLM(TemplateLM):
    """A model for ``lm_eval.simple_evaluate(model=...)``: log likelihoods and generations, with interventions.

    Positions of interventions are positions of a generation. In log likelihoods, the context is the prompt and the
    continuation is the generated text.

    Args:
        model: an `LM`, which stays the caller's, or the name of one.
        interventions: interventions of each request: `Steer` and other ops, or dicts in the JSON form of the HTTP API.
        max_length: tokens of one scored sequence; None: the most that the engine takes.
        max_gen_toks: new tokens of tasks without a limit.
        add_bos_token: whether texts are encoded with special tokens; None: as the tokenizer does.
        batch_size, max_batch_size, device: ignored arguments of lm-eval. The engine batches requests.
        options: options of `LM`, if `model` is a name.

    Raises:
        ValueError: the model has no tokenizer.
    """

    backend = "causal"

    def __init__(
        self,
        model: LM | str = "demo",
        interventions: Any = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.interventions = interventions_of(interventions)
        self.lm = LM(model, device=device or "auto", **with_tuning(**options)) if isinstance(model, str) else model
        if self.lm.tokenizer is None:
            raise ValueError("the model has no tokenizer: lm-eval needs one")
        self.tokenizer = self.lm.tokenizer
        self.max_length = max_length or self.lm.limits.max_model_len - 1
        self.max_gen_toks, self.add_bos_token = max_gen_toks, add_bos_token

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, and comes before one without a context."""
        ids = self.tokenizer.eos_token_id
        return 0 if ids is None else ids

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context: BOS, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name for lm-eval's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's template writes it."""
        found = render(
            self.tokenizer, chat_history, "the conversation", add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return found.text or ""

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids. A text that begins with BOS gets no other."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
            bos = self.tokenizer.bos_token
            if bos and string.startswith(bos):
                add_special_tokens = False
        return self.tokenizer.encode(
            string, **({} if add_special_tokens is None else {"add_special_tokens": add_special_tokens})
        )

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for batch in _batches(requests):
                pairs = [self._fitting(context, continuation) for _, context, continuation in batch]
                for (key, _, _), result in zip(batch, score(self.lm, pairs, self.interventions), strict=True):
                    found.append((result.logprob, result.is_greedy))
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, found[-1])
                bar.update(len(batch))
        return found

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The end of the context with which the continuation fits in the model's."""
        room = self.max_length + 1 - len(continuation)
        if not continuation:
            raise ValueError("a continuation has no tokens: it must not merge with the last token of its context")
        if room < 1:
            raise ValueError(f"a continuation of {len(continuation)} tokens: the model takes {self.max_length}")
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log likelihood of each whole text. Texts beyond the model's context are split into disjoint windows."""
        windows, owners = [], []
        for index, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to a stop string."""
        texts: list[str] = []
        eos = decode(self.tokenizer, [self.eot_token_id])
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for batch in _batches(requests):
                prompts, params = zip(*(self._generation(request.args, eos) for request in batch), strict=True)
                outs = self.lm.generate(list(prompts), list(params), interventions=self.interventions or None)
                for request, out in zip(batch, outs, strict=True):
                    texts.append(out.text)
                    self.cache_hook.add_partial("generate_until", request.args, out.text)
                bar.update(len(batch))
        return texts

    def _generation(self, args: Any, eos: str) -> tuple[list[int], SamplingParams]:
        context, given = args
        options: Any = normalize_gen_kwargs(given, self.max_gen_toks)
        stop = [text for text in handle_stop_sequences(options.pop("until", None), eos=eos) if text]
        new = options.pop("max_gen_toks")
        room = self.lm.limits.max_model_len - new
        if room < 1:
            raise ValueError(
                f"max_gen_toks={new}: the model takes {self.lm.limits.max_model_len} tokens, prompt and new ones"
            )
        if not options.pop("do_sample", False):
            options["temperature"] = 0.0
        return self.tok_encode(context)[-room:], SamplingParams(max_tokens=new, stop=stop or None, **options)


def _batches(items: Sequence[Any]) -> Iterable[Sequence[Any]]:
    return (items[start : start + _PER_CALL] for start in range(0, len(items), _PER_CALL))
