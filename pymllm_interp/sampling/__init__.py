"""Sampling: from logits to tokens and their log probabilities."""

from .logprobs import LogprobTensors, gather_logprobs, prompt_logprobs
from .noise import uniform_noise
from .penalties import PenaltyBatch
from .rejection_sampler import RejectionSampler, VerifiedTokens
from .sampler import Sampler, SamplerOutput
from .sampling_batch import LogitBias, SamplingBatch
from .sampling_request import SamplingRequest
from .token_constraint import BitmaskRows, ConstraintError, ConstraintSpec, TokenConstraint, TokenMasks, allow_only

__all__ = [
    "BitmaskRows",
    "ConstraintError",
    "ConstraintSpec",
    "LogitBias",
    "LogprobTensors",
    "PenaltyBatch",
    "RejectionSampler",
    "Sampler",
    "SamplerOutput",
    "SamplingBatch",
    "SamplingRequest",
    "TokenConstraint",
    "TokenMasks",
    "VerifiedTokens",
    "allow_only",
    "gather_logprobs",
    "prompt_logprobs",
    "uniform_noise",
]
