"""Sampling: from logits to tokens and their log probabilities."""

from ..core.structured.structured_outputs import StructuredOutputs
from ..core.structured.token_constraint import ConstraintError, ConstraintSpec, TokenConstraint
from .bitmasks import BitmaskRows, TokenMasks, allow_only
from .logprobs import LogprobTensors, gather_logprobs, prompt_logprobs
from .noise import uniform_noise
from .penalties import PenaltyBatch
from .rejection_sampler import RejectionSampler, VerifiedTokens
from .sampler import LogitBias, Sampler, SamplerOutput, SamplingBatch
from .sampling_request import SamplingRequest

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
    "StructuredOutputs",
    "TokenConstraint",
    "TokenMasks",
    "VerifiedTokens",
    "allow_only",
    "gather_logprobs",
    "prompt_logprobs",
    "uniform_noise",
]
