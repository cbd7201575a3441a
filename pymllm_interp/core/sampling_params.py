"""Sampling parameters, with vLLM's names and defaults."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property, wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from ..utils.arguments import check_names, shown
from . import unsupported
from .limits import MAX_LISTED
from .structured.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from .structured.token_constraint import ConstraintSpec

MAX_LOGPROBS = 64
MAX_BAD_WORDS, MAX_BAD_WORD_CHARS = 1024, 256
BEGIN = -1
"""Stands for the end of the prompt in the token ids of a bad word."""
MAX_N = 16384
MAX_TOKEN_IDS = 1024
"""Most entries of `logit_bias`, and of `stop_token_ids`."""
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 4096
"""Most stop strings, and most characters of all of them. Each new token is compared with them."""
ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "eos_token_id": "stop_token_ids"}
"""transformers' names, which the `with` form of generate accepts -> names of this class."""
_BANS = "here it is bad_words, for words; logit_bias={token_id: -1e4} keeps a token out"
ELSEWHERE = {
    **{alias: f"here it is {name}" for alias, name in ALIASES.items()},
    "max_completion_tokens": "here it is max_tokens",
    "max_length": "here it is max_tokens, of new tokens alone",
    "do_sample": "here it is temperature: 0 is greedy, 1.0 samples",
    "num_return_sequences": "here it is n",
    "stop_strings": "here it is stop",
    "top_logprobs": "here it is logprobs",
    **dict.fromkeys(("num_beams", "use_beam_search", "best_of", "length_penalty", "early_stopping"), unsupported.BEAMS),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens"), _BANS),
    **unsupported.OF_REQUESTS,
}
"""Parameter name of transformers, vLLM or OpenAI -> advice."""
_Class = TypeVar("_Class")


def _explained(cls: type[_Class]) -> type[_Class]:
    """A dataclass with errors for other projects' keywords, which name the equivalent here."""
    init, known = cls.__init__, [spec.name for spec in fields(cls)]  # pyright: ignore[reportArgumentType]

    @wraps(init)
    def __init__(self: _Class, *args: Any, **given: Any) -> None:
        check_names(cls.__name__, given, known, ELSEWHERE)
        init(self, *args, **given)

    cls.__init__ = __init__
    return cls


@_explained
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request. Names and defaults are vLLM's.

    Raises:
        TypeError: an unknown name; the message gives the equivalent.
        ValueError: a value out of range; the message has its name, the allowed range and the value.
    """

    n: int = 1
    """Completions for each prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with a probability of at least `top_p`: in (0, 1]."""
    top_k: int = 0
    """Keep this many tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Drop tokens below this fraction of the most likely one: in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output: above 0."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token stands in the output: in [-2, 2]."""
    presence_penalty: float = 0.0
    """Subtracted from tokens that stand in the output: in [-2, 2]."""
    seed: int | None = None
    """Equal seeds and equal logits give equal tokens, whatever else is in the batch."""
    stop: str | list[str] | tuple[str, ...] | None = None
    """Strings that end the generation; they are cut from the text."""
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    """Token ids that end the generation, beside the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Generate past the end-of-sequence token."""
    max_tokens: int | None = 16
    """New tokens at most; None is as many as the context holds. 0 processes only the prompt, for its log probabilities or captures.
    """
    min_tokens: int = 0
    """Minimum number of new tokens before EOS or a stop."""
    logprobs: int | None = None
    """Log probabilities of this many tokens at each step, and of the sampled one."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    """Tokens that may be sampled; None: all."""
    bad_words: list[str] | tuple[str, ...] | None = None
    """Words that are not generated: the last token of each is not sampled after the others. With and without a space before."""
    truncate_prompt_tokens: int | None = None
    """Keep this many of the prompt's last tokens; -1 keeps those that fit the context beside max_tokens."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text, and that of a token which ended the generation."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, whatever the prefix cache has of it."""
    constraint: ConstraintSpec | None = None
    """Makes the constraint of each completion: the tokens that may come next (core/structured/token_constraint.py)."""
    structured_outputs: StructuredOutputs | dict[str, Any] | None = None
    """The form of the text: a JSON schema, a pattern, choices or a grammar (docs/engine/structured.md). A dict has its fields."""
    speculate: bool | None = None
    """False: no drafts (docs/engine/speculative.md). None: drafts if the engine has a drafter, and the request allows
    them. True: refuse the request if it cannot have drafts. The tokens are the same in any case."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"SamplingParams({spec.name}={value}): a finite number is expected")
        for name in ("n", "top_k", "min_tokens"):
            self._check(name, _is_whole(getattr(self, name)), "a whole number")
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"):
            self._check(name, getattr(self, name) is None or _is_whole(getattr(self, name)), "a whole number, or None")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            self._check(name, isinstance(value, Real) and not isinstance(value, bool), "a number")
        self._check_sizes()
        strings = self.stop is None or isinstance(self.stop, str) or _all(self.stop, lambda text: isinstance(text, str))
        self._check("stop", strings, "a string, or a list of strings")
        self._check("stop_token_ids", self.stop_token_ids is None or _token_ids(self.stop_token_ids), "token ids")
        biases = self.logit_bias is None or (
            isinstance(self.logit_bias, dict)
            and all(_is_whole(token) and isinstance(bias, Real) for token, bias in self.logit_bias.items())
        )
        self._check("logit_bias", biases, "a dict from token id to number")
        self._check_token_sets()
        object.__setattr__(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.constraint is not None and self.structured_outputs is not None:
            raise ValueError("SamplingParams: constraint and structured_outputs are two constraints: give one of them")
        self._check("speculate", self.speculate in (None, True, False), "True, False or None")
        self._check("n", 1 <= self.n <= MAX_N, f"at least 1, and at most {MAX_N}")
        self._check("temperature", self.temperature >= 0, "0 (greedy) or above")
        self._check("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        self._check("top_k", self.top_k >= -1 and self.top_k == int(self.top_k), "-1 or 0 (all tokens), or a count")
        self._check("min_p", 0 <= self.min_p <= 1, "from 0 to 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "above 0")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2")
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 0, "at least 0, or None")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            self._check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or 0 <= value <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or None")
        for token, bias in (self.logit_bias or {}).items():
            if not math.isfinite(bias):
                raise ValueError(f"SamplingParams(logit_bias={{{token}: {bias}}}): a finite number is expected")
        if any(not text for text in self.stop_strings):
            raise ValueError("SamplingParams(stop=...): an empty stop string would end every generation at once")

    def _check_token_sets(self) -> None:
        allowed, words, kept = self.allowed_token_ids, self.bad_words, self.truncate_prompt_tokens
        self._check(
            "allowed_token_ids",
            allowed is None or (_token_ids(allowed) and len(allowed) > 0),
            "at least one token id",
        )
        self._check("bad_words", words is None or _all(words, lambda word: isinstance(word, str)), "a list of strings")
        for word in words or ():
            if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                raise ValueError(
                    f"SamplingParams(bad_words=[{word[:40]!r}]): expected 1 to {MAX_BAD_WORD_CHARS} characters, not only spaces"
                )
        self._check("truncate_prompt_tokens", kept is None or kept == -1 or kept >= 1, "-1, at least 1, or None")
        makes = self.constraint is None or callable(getattr(self.constraint, "make", None))
        self._check("constraint", makes, "an object with make(vocab_size), which returns a TokenConstraint, or None")

    def _check_sizes(self) -> None:
        """Refuse long lists before they are walked."""
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_TOKEN_IDS), ("logit_bias", self.logit_bias, MAX_TOKEN_IDS),
            ("stop", stops, MAX_STOPS), ("bad_words", self.bad_words, MAX_BAD_WORDS),
            ("allowed_token_ids", self.allowed_token_ids, MAX_LISTED),
        ):  # fmt: skip
            if isinstance(value, list | tuple | dict) and len(value) > most:
                raise ValueError(f"SamplingParams({name}=...): {len(value)} entries; expected at most {most}")
        characters = sum(len(text) for text in stops if isinstance(text, str)) if isinstance(stops, list | tuple) else 0
        if characters > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"SamplingParams(stop=...): {characters} characters; expected at most {MAX_STOP_CHARACTERS} in all"
            )

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"SamplingParams({name}={shown(getattr(self, name))}): expected {expected}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The value of `stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @cached_property
    def plain(self) -> bool:
        """Whether the most likely token is taken, and nothing else is asked for."""
        changed = self.penalised or self.logit_bias or self.min_tokens > 0 or self.allowed_token_ids or self.bad_words
        return self.greedy and self.logprobs is None and not changed

    @cached_property
    def allowed(self) -> array[int]:
        """`allowed_token_ids`, each once, as int64."""
        return array("q", dict.fromkeys(self.allowed_token_ids or ()))

    @cached_property
    def token_ranges(self) -> dict[str, tuple[int, int]]:
        """The lowest and the highest token id of each field that names some."""
        found = {name: getattr(self, name) for name in ("logit_bias", "stop_token_ids", "allowed_token_ids")}
        return {name: (min(ids), max(ids)) for name, ids in found.items() if ids}

    @cached_property
    def penalised(self) -> bool:
        """Whether the tokens so far change the next one's logits."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(values: object) -> bool:
    """Whether a list has whole numbers only. Of a list of plain ints, which may be as long as a vocabulary, none is looked at in
    Python.
    """
    return isinstance(values, list | tuple) and (set(map(type, values)) <= {int} or all(map(_is_whole, values)))


def _all(values: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(values, list | tuple) and all(holds(value) for value in values)
