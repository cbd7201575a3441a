"""Samples of audio files, and their resampling, with numpy only: a server's HTTP process reads files without torch."""

from __future__ import annotations

import io
import wave
from math import ceil, gcd
from typing import Any

import numpy as np

from ...utils.arguments import PromptError, shown
from ...utils.extras import library_of_extra

FULL_SCALE = {1: 128, 2: 1 << 15, 3: 1 << 23, 4: 1 << 31}
"""Bytes of an integer sample -> its value at full scale."""
CROSSINGS, ROLLOFF = 6, 0.99
"""Zero crossings of the resampling filter on each side, and its share of the lower Nyquist frequency, as in torchaudio."""
MAX_VALUES, BLOCK = 3600 * 2 * 48_000, 1 << 20
"""Most values of all channels of a compressed file (an hour in stereo), and values of a read. A megabyte may hold billions of
them.
"""
LOWEST_RATE = 1000
"""Fewest samples a second: resampling multiplies a file of a lower one."""
MAX_CHUNKS = 64
"""Most chunks of a WAV file before its samples. Each has an object in Python's reader."""
MAX_FILTER = 1 << 22
"""Most values of a resampling filter. Rates without a common divisor need more."""


def samples_of(file: bytes, what: str, seconds: float) -> tuple[np.ndarray, int]:
    """(samples [n] float32, sampling rate) of a file. Channels become their mean. Files other than WAV need soundfile.

    Args:
        seconds: length of the longest audio that is read.

    Raises:
        PromptError: no such file, a damaged or an empty one, a longer one, or soundfile is not installed.
    """
    return _of_wav(file, what, seconds) if file[:4] == b"RIFF" else _of_others(file, what, seconds)


def _of_wav(file: bytes, what: str, seconds: float) -> tuple[np.ndarray, int]:
    at, chunks = 12, 0
    while at < len(file) and file[at : at + 4] != b"data":
        size = int.from_bytes(file[at + 4 : at + 8], "little")
        at, chunks = at + 8 + size + size % 2, chunks + 1
        if chunks > MAX_CHUNKS:
            raise PromptError(f"{what} is a WAV file with more than {MAX_CHUNKS} chunks before its samples")
    try:
        with wave.open(io.BytesIO(file)) as opened:
            channels, width, rate = opened.getparams()[:3]
            frame = channels * width
            _check_length(min(opened.getnframes(), len(file) // max(frame, 1)), rate, what, seconds)
            data = opened.readframes(len(file) // max(frame, 1))
    except (wave.Error, EOFError, ValueError, RuntimeError, ZeroDivisionError) as error:
        if isinstance(error, PromptError):
            raise
        raise PromptError(f"{what} is no WAV file of integer samples ({error}): convert it") from None
    if width not in FULL_SCALE or not channels or not data or len(data) % frame:
        raise PromptError(
            f"{what} is a WAV file with {channels} channels of {8 * width} bits, or with a part of a sample"
        )
    values = np.frombuffer(data, np.uint8).reshape(-1, width)
    if width == 1:
        values = values ^ 0x80  # the only width without a sign
    words = np.zeros((len(values), 4), np.uint8)
    words[:, 4 - width :] = values
    found = (words.view("<i4") / np.float32(1 << 31)).astype(np.float32).reshape(-1, channels)
    return found.mean(1, dtype=np.float32), rate


def _of_others(file: bytes, what: str, seconds: float) -> tuple[np.ndarray, int]:
    try:
        with library_of_extra("audio files other than WAV", "soundfile", "audio"):
            import soundfile  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise PromptError(f"{what}: {error}") from None
    library: Any = soundfile
    try:
        with library.SoundFile(io.BytesIO(file)) as opened:
            _check_length(opened.frames, opened.samplerate, what, seconds)
            if (values := opened.frames * opened.channels) > MAX_VALUES:
                raise PromptError(f"{what} has {values} samples in all channels; at most {MAX_VALUES} are read")
            blocks = opened.blocks(max(BLOCK // opened.channels, 1), dtype="float32", always_2d=True)
            return np.concatenate([block.mean(1, dtype=np.float32) for block in blocks]), opened.samplerate
    except (library.LibsndfileError, RuntimeError, ValueError, MemoryError) as error:
        if isinstance(error, PromptError):
            raise
        raise PromptError(f"{what} is no audio file that is read here ({str(error)[:200]})") from None


def _check_length(frames: int, rate: int, what: str, seconds: float) -> None:
    if rate < LOWEST_RATE or frames < 1:
        raise PromptError(
            f"{what} has {frames} samples, at {rate} a second: expected audio of {LOWEST_RATE} or more a second"
        )
    if frames > seconds * rate:
        raise PromptError(f"{what} has {frames / rate:.1f} s of audio; at most {seconds:g} s are read")


def resampled(samples: np.ndarray, rate: Any, wanted: int, what: str) -> np.ndarray:
    """Samples [n] float32 at another sampling rate: sinc interpolation with a Hann window, as in torchaudio.

    Raises:
        PromptError: a rate that is no whole number, or has too small a divisor in common with the wanted one.
    """
    if type(rate) is not int and not isinstance(rate, np.integer | float):
        raise PromptError(f"{what}: the sampling rate is {shown(rate)}: expected a number such as {wanted}")
    if not LOWEST_RATE <= rate < 1 << 32 or rate != int(rate):
        raise PromptError(f"{what}: audio of {shown(rate)} samples a second: resample it to {wanted}")
    rate = int(rate)
    if rate == wanted:
        return samples
    divisor = gcd(rate, wanted)
    old, new = rate // divisor, wanted // divisor
    base = min(old, new) * ROLLOFF
    width = ceil(CROSSINGS * old / base)
    if (2 * width + old) * new > MAX_FILTER:
        raise PromptError(f"{what}: audio of {rate} samples a second: resample it to {wanted}")
    times = (np.arange(-width, width + old) / old - np.arange(new)[:, None] / new) * base
    times = times.clip(-CROSSINGS, CROSSINGS)
    kernel = np.sinc(times) * np.cos(times * np.pi / CROSSINGS / 2) ** 2 * (base / old)
    padded = np.pad(samples, (width, width + old))
    frames = np.lib.stride_tricks.sliding_window_view(padded, 2 * width + old)[::old]
    return (frames @ kernel.T.astype(np.float32)).reshape(-1)[: ceil(new * len(samples) / old)]
