"""`GenerationDefaults`: how a request is generated where its caller does not say.

A model's generation_config.json has values for sampling and lengths. A traced generation (`with lm.generate(...)`) follows them as
transformers' `generate` does. A call (`lm.generate(prompts)`) follows them as vLLM does: they are the sampling parameters of
requests without any.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from transformers import GenerationConfig, PretrainedConfig

from ..core.sampling_params import ALIASES, ELSEWHERE, SamplingParams
from ..utils.arguments import PromptError, check_names
from .request_options import SAMPLING, TRACE_OPTIONS

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
NEW_TOKENS = 20
"""transformers' default length of a generation, in new tokens."""
TOP_K = 50
"""transformers' default `top_k` for sampling."""
FILTERS = ("temperature", "top_k", "top_p", "min_p")
"""Values that matter when a generation samples. `repetition_penalty` matters in greedy ones too."""
FOLLOWED = (
    *FILTERS, "repetition_penalty", "do_sample", "max_new_tokens", "max_length", "min_new_tokens", "min_length",
)  # fmt: skip
"""Values that requests follow."""
IGNORED = {"pad_token_id", "use_cache"}
"""Arguments that change nothing here: nothing is padded, and the cache is always used."""
NOT_FOLLOWED: Mapping[str, Any] = {
    "num_beams": 1, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None, "stop_strings": None, "guidance_scale": 1, "watermarking_config": None,
    "penalty_alpha": None, "dola_layers": None, "max_time": None, "num_return_sequences": 1, "remove_invalid_values": False,
}  # fmt: skip
"""Values of the file that are not supported -> the value that changes nothing."""
OF_SPEECH = ("suppress_tokens", "begin_suppress_tokens")
"""Values that Whisper's requests follow (`SpeechTokens.banned`)."""


class Lengths(NamedTuple):
    """Bounds of a generation, in new tokens."""

    max_tokens: int
    min_tokens: int


@dataclass(frozen=True)
class GenerationDefaults:
    """A model's default sampling parameters.

    Attributes:
        values: non-null values of generation_config.json. Empty with generation_config="none".
        eos_token_ids: the model's end-of-sequence ids.
    """

    values: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    own_eos: bool = False
    """`values` has a caller's end-of-sequence ids."""

    @classmethod
    def of(cls, setting: str, hf_config: PretrainedConfig, folder: Path | None) -> GenerationDefaults:
        """The defaults for LM(generation_config=...). Values that differ from the neutral ones are logged.

        Args:
            setting: "auto", the model's own file; "none", only its end-of-sequence ids; or a folder with another file.
            hf_config: has the values if the model has no such file.
            folder: the model's, or None.

        Raises:
            FileNotFoundError, ValueError: the folder has no generation_config.json, or a damaged one.
        """
        if setting not in ("auto", "none"):
            folder = Path(setting).expanduser()
            if not (folder / FILE).is_file():
                hint = "; vLLM's 'vllm' is 'none' here" if setting == "vllm" else ""
                raise FileNotFoundError(
                    f"generation_config={setting!r}: no {setting}/{FILE}; expected 'auto', 'none', or a folder with that file{hint}"
                )
        if folder is not None and (folder / FILE).is_file():
            try:
                config = GenerationConfig.from_pretrained(folder)
            except (AttributeError, LookupError, TypeError, RecursionError) as error:
                raise ValueError(f"{folder / FILE}: transformers cannot read it: {error!r}") from error
        else:
            config = GenerationConfig.from_model_config(hf_config)
        eos = config.eos_token_id or getattr(hf_config, "eos_token_id", None)
        ids = frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)
        if setting == "none":
            return cls({}, ids)
        found = cls({name: value for name, value in config.to_dict().items() if value is not None}, ids)
        found._log(
            FILE if setting == "auto" else f"{setting}/{FILE}", OF_SPEECH if hf_config.model_type == "whisper" else ()
        )
        return found

    def overlaid(self, config: GenerationConfig | None) -> GenerationDefaults:
        """These defaults with the values of a caller's config in front, as in transformers. None changes nothing.
        Raises TypeError: no GenerationConfig."""
        if config is None:
            return self
        if not isinstance(config, GenerationConfig):
            raise TypeError(
                f"generation_config is a {type(config).__name__}: a transformers GenerationConfig is expected"
            )
        given = {name: value for name, value in config.to_diff_dict().items() if value is not None}
        return GenerationDefaults({**self.values, **given}, self.eos_token_ids, "eos_token_id" in given)

    def _log(self, origin: str, followed: Sequence[str]) -> None:
        """Log applied and ignored values: they change tokens without a word in the caller's code."""
        if self.sampling_params != SamplingParams():
            logger.warning(
                "%s sets the default sampling parameters %s; LM(..., generation_config='none') ignores them",
                origin,
                ", ".join(f"{name}={value!r}" for name, value in self._of_calls.items()),
            )
        ignored = {name: self.values.get(name, same) for name, same in NOT_FOLLOWED.items() if name not in followed}
        if unlike := [f"{name}={value!r}" for name, value in ignored.items() if value != NOT_FOLLOWED[name]]:
            logger.warning("%s has values that are not supported, and not followed: %s", origin, ", ".join(unlike))

    @property
    def followed(self) -> dict[str, Any]:
        """The values that requests follow."""
        return {name: self.values[name] for name in FOLLOWED if name in self.values}

    @property
    def _of_calls(self) -> dict[str, Any]:
        """The file's values that vLLM follows, by names of `SamplingParams`."""
        names = ("repetition_penalty", *FILTERS, "max_new_tokens")
        return {ALIASES.get(name, name): self.values[name] for name in names if name in self.values}

    @cached_property
    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of calls without any, as in vLLM: the file's `do_sample` does not count."""
        return SamplingParams(**self._of_calls)

    def fitting(self, room: int) -> SamplingParams:
        """`sampling_params` of a request.

        Args:
            room: positions of the context after the prompt. A length that no caller asked for is cut to them.
        """
        params = self.sampling_params
        if params.max_tokens is None or not 0 < room < params.max_tokens:
            return params
        return replace(params, max_tokens=room)

    def lengths(self, prompt_len: int, room: int, what: str = "the prompt") -> Lengths:
        """Bounds of a traced generation without any, as in transformers: 20 new tokens, unless the file says otherwise.

        Args:
            room: positions of the context after the prompt.

        Raises:
            PromptError: the prompt is as long as the file's `max_length`, which counts prompt and new tokens.
        """
        values, most = self.values, NEW_TOKENS
        if "max_new_tokens" in values:
            most = values["max_new_tokens"]
        elif "max_length" in values:
            most = values["max_length"] - prompt_len
            if most < 1:
                raise PromptError(
                    f"{what} has {prompt_len} tokens, and the model's {FILE} has max_length={values['max_length']}, prompt "
                    "included: pass max_new_tokens"
                )
        least = values.get("min_new_tokens", max(values.get("min_length", 0) - prompt_len, 0))
        return Lengths(max(1, min(most, room)), least)

    def of_trace(self, kwargs: Mapping[str, Any], lengths: Lengths) -> SamplingParams:
        """SamplingParams of a traced generation, from transformers' and vLLM's names.

        Greedy, unless `do_sample` (the caller's or the file's) or a `temperature` asks for sampling. Sampling has
        transformers' `top_k` of 50.

        Args:
            kwargs: the caller's keywords.
            lengths: bounds used if the caller gives none.

        Raises:
            TypeError: a name that is neither's.
        """
        given = {name: value for name, value in kwargs.items() if value is not None and name not in IGNORED}
        if self.own_eos:
            given.setdefault("eos_token_id", self.values["eos_token_id"])
        check_names("lm.generate", given, [*SAMPLING, *TRACE_OPTIONS], ELSEWHERE)
        if "eos_token_id" in given:
            given.setdefault("ignore_eos", True)  # it replaces the model's
        for alias, name in ALIASES.items():
            if alias in given:
                if name in given:
                    raise TypeError(f"{alias} and {name} are the same: pass one of them")
                given[name] = given.pop(alias)
        if isinstance(given.get("stop_token_ids"), int):
            given["stop_token_ids"] = [given["stop_token_ids"]]
        do_sample = given.pop("do_sample", None)
        if do_sample is None:
            do_sample = given["temperature"] != 0 if "temperature" in given else self.values.get("do_sample", False)
        defaults: dict[str, Any] = {"max_tokens": lengths.max_tokens}
        followed = ("repetition_penalty", *FILTERS) if do_sample else ("repetition_penalty",)
        if do_sample:
            defaults["top_k"] = TOP_K
        else:
            given["temperature"] = 0.0
        defaults |= {name: self.values[name] for name in followed if name in self.values}
        merged = defaults | given
        merged.setdefault("min_tokens", min(lengths.min_tokens, merged["max_tokens"]))
        return SamplingParams(**merged)
