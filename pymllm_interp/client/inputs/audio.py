"""`AudioReader`: makes the features of audio that Whisper's encoder reads, by its own extractor in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from ...core.pass_parts import EncoderInput
from ...utils.arguments import PromptError
from ..prompt_batch import FEATURES, MEDIA, is_audio
from .sound import resampled, samples_of
from .speech import SpeechTokens

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of an extractor."""
SETTINGS = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft", "padding_value", "dither")
"""Settings of the extractor that change features."""


class AudioReader:
    """Reads audio for one model, on the threads of its callers.

    Args:
        config: the model's config.
        tokens: special tokens of its decoder.
        settings: settings of the extractor; those left out are Whisper's.
        sent: whether a server makes the features, of samples at the model's rate.
    """

    def __init__(
        self, config: PretrainedConfig, tokens: SpeechTokens, settings: Mapping[str, Any], sent: bool = False
    ) -> None:
        from transformers import WhisperFeatureExtractor  # takes long

        self.tokens, self._positions, self._sent = tokens, config.max_source_positions, sent
        self._shape = [config.num_mel_bins, 2 * config.max_source_positions]
        self._extractor = made = WhisperFeatureExtractor(**{"feature_size": config.num_mel_bins, **settings})
        if "chunk_length" not in settings:
            made.n_samples, made.nb_max_frames = self._shape[1] * made.hop_length, self._shape[1]

    @classmethod
    def of(cls, config: PretrainedConfig, folder: Path | None, tokens: SpeechTokens) -> AudioReader:
        """The reader of a model, with the settings of its folder."""
        if folder is None or not any((folder / name).is_file() for name in FILES):
            return cls(config, tokens, {})
        from transformers import WhisperFeatureExtractor

        found = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        return cls(config, tokens, {name: getattr(found, name) for name in SETTINGS if hasattr(found, name)})

    @property
    def rate(self) -> int:
        """Samples a second."""
        return self._extractor.sampling_rate

    @property
    def seconds(self) -> float:
        """Length of the longest audio."""
        return self._extractor.n_samples / self.rate

    def to_json(self) -> dict[str, Any]:
        """Description for clients."""
        made = self._extractor
        settings = {name: getattr(made, name) for name in SETTINGS}
        if made.n_samples != made.chunk_length * made.sampling_rate:
            del settings["chunk_length"]
        return {"rate": self.rate, "seconds": self.seconds, "settings": settings, "tokens": asdict(self.tokens)}

    @classmethod
    def of_json(cls, config: PretrainedConfig, info: Mapping[str, Any]) -> AudioReader:
        """The reader that a server tells of (`to_json`)."""
        return cls(config, SpeechTokens(**info["tokens"]), info["settings"], sent=True)

    def read(self, prompt: Any, what: str) -> EncoderInput:
        """The encoder's input.

        Args:
            prompt: ``{"multi_modal_data": {"audio": ...}}``, of (samples, rate), samples at the model's rate, or a file's bytes;
                or ``{"input_features": ...}``.

        Raises:
            PromptError: no audio, several, of another shape or kind, too long, empty, or with NaN or infinity.
        """
        if not is_audio(prompt):
            raise PromptError(
                f"{what} has no audio, which the model reads: pass multi_modal_data={{'audio': (samples, rate)}}"
            )
        given = prompt.get(FEATURES)
        if given is None:
            samples = self._samples(prompt[MEDIA], what)
            if self._sent:
                return EncoderInput.of(torch.from_numpy(samples), self._positions)
            given = self._extractor(samples, sampling_rate=self.rate, return_tensors="pt")[FEATURES]
        try:
            features = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise PromptError(f"{what}: input_features is a {type(given).__name__}: expected a tensor") from None
        if features.ndim == 3 and len(features) == 1:
            features = features[0]
        if list(features.shape) != self._shape or not features.is_floating_point():
            raise PromptError(
                f"{what} has input_features {list(features.shape)} of {features.dtype}: expected {self._shape} of floats"
            )
        if not bool(features.isfinite().all()):
            raise PromptError(f"{what} has input_features with NaN or infinity")
        return EncoderInput.of(features.detach().to("cpu", torch.float32), self._positions)

    def _samples(self, media: Mapping[str, Any], what: str) -> np.ndarray:
        """Samples [n] float32 at the model's rate."""
        audio = media["audio"]
        if isinstance(audio, list) and len(audio) == 1 and not isinstance(audio[0], float | int):
            audio = audio[0]
        if set(media) != {"audio"}:
            raise PromptError(f"{what}: {MEDIA} has {', '.join(map(repr, media))[:200]}: expected one audio")
        if isinstance(audio, bytes):
            audio = samples_of(audio, what, self.seconds)
        samples, rate = audio if isinstance(audio, tuple) and len(audio) == 2 else (audio, self.rate)
        values = resampled(_checked(samples, what), rate, self.rate, what)
        if len(values) > self._extractor.n_samples:
            raise PromptError(
                f"{what} has {len(values) / self.rate:.2f} s of audio; the model reads {self.seconds:g} s at a time: cut it"
            )
        return values


def _checked(samples: Any, what: str) -> np.ndarray:
    """Samples [n] float32."""
    try:
        given = samples.detach().cpu().numpy() if isinstance(samples, torch.Tensor) else np.asarray(samples)
    except (TypeError, ValueError):
        raise PromptError(f"{what}: the audio is a {type(samples).__name__}: expected samples [n] of floats") from None
    if given.dtype.kind != "f" or given.ndim != 1 or not len(given):
        raise PromptError(
            f"{what}: audio {list(given.shape)} of {given.dtype}: expected one channel of samples [n], floats from -1 to 1"
        )
    if not np.isfinite(given).all():
        raise PromptError(f"{what}: audio with NaN or infinity")
    return given.astype(np.float32)
