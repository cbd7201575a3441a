"""`verbalize`: a model reads states, and answers in words.

Each state is put into a template in place of a placeholder, and the reader generates from there. Activation oracles (Karvonen et
al. 2025, arXiv 2512.15674) add states to the stream behind an early layer, under a LoRA adapter. Natural-language autoencoders
replace the placeholder's embedding. See docs/guides/verbalize.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..client.calls.model import ClientModel
from ..core.pass_parts import PromptEmbeds, vector_keys
from ..core.sampling_params import SamplingParams
from ..hooks.captures.spec import Capture
from ..hooks.interventions.specs import Patch, Steer
from ..utils.arguments import PromptError, shown
from ..utils.tables import Shown, Table

Norm = Literal["match"] | float | None
EMBED = "embed"


@dataclass(frozen=True, repr=False, eq=False)
class Readings(Shown, Sequence[list[str]]):
    """The readings of states: ``readings[i]`` has the texts of state i, one for each sample.

    Attributes:
        outputs: `RequestOutput` of each state.
        token_ids: token ids of the template.
        positions: positions of its placeholders.
    """

    outputs: list[Any]
    token_ids: list[int]
    positions: list[int]

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return [one.text for one in self.outputs[index].outputs]

    @property
    def texts(self) -> list[str]:
        """The first sample of each state."""
        return [out.text for out in self.outputs]

    def rows(self) -> list[dict[str, Any]]:
        """A dict for each sample, as ``pandas.DataFrame`` takes them: state, sample, text, tokens, finish_reason."""
        return [
            {"state": i, "sample": one.index, "text": one.text, "tokens": len(one.token_ids), "finish_reason": one.finish_reason}
            for i, out in enumerate(self.outputs) for one in out.outputs
        ]  # fmt: skip

    def __repr__(self) -> str:
        return f"Readings({len(self)} states, {len(self[0]) if len(self) else 0} samples each)"

    def table(self) -> Table:
        """A row for each sample."""
        return Table(
            "readings", ("state", "sample", "text"), [(r["state"], r["sample"], r["text"]) for r in self.rows()]
        )


@dataclass(frozen=True)
class _Reader:
    """The model that reads, its adapter, and the template.

    Attributes:
        token_ids: token ids of the template.
        positions: positions of its placeholders.
    """

    lm: Any
    lora: str | None
    token_ids: list[int]
    positions: list[int]

    def width(self, site: str) -> int:
        """Width of the states that the site takes."""
        spec = self.lm.model_spec
        return spec.embedding_size if site == EMBED else spec.hidden_size

    def prefill(self, token_ids: list[int], capture: Sequence[Capture] = ()) -> Any:
        """The output of a pass over tokens. The prefix cache then has their KV."""
        params = SamplingParams(temperature=0.0, max_tokens=0)
        return self.lm.generate([token_ids], params, capture=list(capture), lora=self.lora, progress=False)[0]


def verbalize(
    lm: Any,
    states: Any,
    *,
    template: Any,
    reader: Any,
    placeholder: str | int,
    site: str,
    norm: Norm,
    replace: bool | None,
    max_tokens: int,
    samples: int,
    progress: bool | None,
    sampling: Mapping[str, Any],
) -> Readings:
    """The readings of states. See `LM.verbalize`.
    Raises PromptError, ValueError: a template without the placeholder, or states, a site or a norm that the reader cannot take."""
    if "n" in sampling:
        raise ValueError(f"n={shown(sampling['n'])}: samples= is the number of readings of each state")
    further: dict[str, Any] = {"temperature": 0.0 if samples == 1 else 1.0, **sampling}
    params = SamplingParams(max_tokens=max_tokens, n=samples, **further)
    found, replace = _reader(lm, reader, template, placeholder), site == EMBED if replace is None else replace
    vectors = _checked(states, found, site)
    if norm is not None and norm != "match" and not (isinstance(norm, int | float) and 0 < norm < float("inf")):
        raise ValueError(f"norm={shown(norm)}: expected None, 'match' or a length above 0")
    if site == EMBED and not replace:
        raise ValueError(
            "site='embed' replaces the placeholder's embedding: leave out replace=False, or name a later site"
        )
    if site != EMBED and replace and norm == "match":
        raise ValueError(
            f"norm='match' at {site!r} is added to the state that it is matched with: leave out replace=True"
        )
    if norm is not None and not bool((lengths := vectors.norm(dim=-1)).all()):
        raise ValueError(f"state {int((lengths == 0).nonzero()[0, 0])} is zero: norm={norm!r} cannot rescale it")
    if isinstance(norm, int | float):
        vectors = vectors * (norm / vectors.norm(dim=-1, keepdim=True))
    if len(vectors) > 1 and found.positions[0] >= found.lm.backend.facts.page_size:
        found.prefill(found.token_ids[: found.positions[0]])  # once for all
    if site == EMBED:
        prompts = list(_embedded(found, vectors, norm == "match"))
        outs = found.lm.generate(prompts, params, lora=found.lora, progress=progress)
        return Readings(outs, found.token_ids, found.positions)
    outs, most = [], max(1, found.lm.backend.facts.settings["max_intervention_vectors"] // len(found.positions))
    for part in vectors.split(most):
        ops = [[_op(site, own, found.positions, norm, replace)] for own in part]
        prompts = [found.token_ids] * len(ops)
        outs += found.lm.generate(prompts, params, interventions=ops, lora=found.lora, progress=progress)
    return Readings(outs, found.token_ids, found.positions)


def fve(states: torch.Tensor, reconstructed: torch.Tensor, normalize: bool = True) -> float:
    """Fraction of variance explained by reconstructions: ``1 - |states - reconstructed|^2 / |states - mean|^2``.

    Args:
        states, reconstructed: [n, width], n of at least 2.
        normalize: rescale each row to length 1 before, so that directions count.

    Raises:
        ValueError: other shapes, complex numbers, or states without variance.
    """
    if states.shape != reconstructed.shape or states.dim() != 2:
        raise ValueError(
            f"states {list(states.shape)} and reconstructed {list(reconstructed.shape)}: expected [n, width]"
        )
    if states.is_complex() or reconstructed.is_complex():
        raise ValueError(f"states of {states.dtype} and reconstructed of {reconstructed.dtype}: expected real numbers")
    wanted, got = states.double().cpu(), reconstructed.double().cpu()
    if normalize:
        wanted, got = (torch.nn.functional.normalize(x, dim=-1) for x in (wanted, got))
    variance = (wanted - wanted.mean(0)).square().sum()
    if not variance > 0:
        raise ValueError("the states have no variance to explain: give several that differ")
    return float(1 - (wanted - got).square().sum() / variance)


def _reader(lm: Any, reader: Any, template: Any, placeholder: str | int) -> _Reader:
    found, lora = (lm, reader) if reader is None or isinstance(reader, str) else (reader, None)
    if not isinstance(found, ClientModel):
        raise PromptError(f"reader={shown(reader)}: expected the name of a LoRA adapter, an LM, or None")
    token_ids, token = found.token_ids(template, "the template"), placeholder
    if isinstance(placeholder, str):
        if found.tokenizer is None:
            raise PromptError("placeholder: the reader has no tokenizer: give a token id")
        own = found.tokenizer(placeholder, add_special_tokens=False)["input_ids"]
        if len(own) != 1:
            raise PromptError(
                f"placeholder={placeholder!r} is {len(own)} tokens of the reader: expected a text of one, or its id"
            )
        (token,) = own
    positions = [i for i, one in enumerate(token_ids) if one == token]
    if not positions:
        raise PromptError(f"the template has no placeholder {placeholder!r} among its {len(token_ids)} tokens")
    return _Reader(found, lora, token_ids, positions)


def _checked(states: Any, reader: _Reader, site: str) -> torch.Tensor:
    """States [n, placeholders, width] float32: on the reader's device if its engine takes them from there, else on the CPU."""
    try:
        given = states if isinstance(states, torch.Tensor) else torch.stack([torch.as_tensor(one) for one in states])
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(f"states: expected a tensor, or vectors of one width: {error}") from None
    if given.layout is not torch.strided or given.is_meta or given.is_complex():
        raise PromptError(f"states: expected real numbers in a dense tensor, not {given.dtype}, {given.layout}")
    count, width = len(reader.positions), reader.width(site)
    stays = site == EMBED and given.device == reader.lm.backend.facts.own_device
    vectors = given.detach().float().to(given.device if stays else "cpu")
    if count == 1 and vectors.shape[-1:] == (width,) and vectors.dim() in (1, 2):
        vectors = vectors.reshape(-1, 1, width)
    if vectors.dim() != 3 or vectors.shape[1:] != (count, width):
        shape = f"[n, {width}]" if count == 1 else f"[n, {count}, {width}]: the template has {count} placeholders"
        raise PromptError(f"states {list(given.shape)}: expected {shape}")
    if not given.is_floating_point() or not bool(vectors.isfinite().all()):
        raise PromptError("states: expected real numbers, without NaN and infinity")
    return vectors


def _embedded(reader: _Reader, vectors: torch.Tensor, match: bool) -> Iterator[dict[str, Any]]:
    """The template with each state in place of the placeholders' embeddings."""
    if match:
        capture = Capture(EMBED, positions=reader.positions)
        own = reader.prefill(reader.token_ids, [capture]).activations[EMBED].float().to(vectors.device)
        vectors = torch.nn.functional.normalize(vectors, dim=-1) * own.norm(dim=-1, keepdim=True)
    vectors = vectors.to(reader.lm.dtype, copy=True)
    keys = [None] * len(vectors) if vectors.device.type == "cpu" else vector_keys(vectors)
    for rows, own_keys in zip(vectors, keys, strict=True):
        yield {"prompt_token_ids": reader.token_ids, "embeds": PromptEmbeds(reader.positions, rows, own_keys)}


def _op(site: str, vectors: torch.Tensor, positions: list[int], norm: Norm, replace: bool) -> Patch | Steer:
    """The op that puts vectors [placeholders, width] into the stream."""
    vectors = vectors[0] if len(vectors) == 1 else vectors
    if replace:
        return Patch(site, vectors, positions=positions)
    return Steer(site, vectors, positions=positions, norm="match" if norm == "match" else "none")
