"""`PrefixSharing`: the tokens that a request shares through the prefix cache, and those that it must compute.

| request | shares |
|---|---|
| plain | everything, with all |
| with interventions | pages before its first edit with all; later ones with requests that make the same edits there |
| with embeddings or images in its prompt | pages before the first one with all; later ones with requests of the same ones |
| with interventions in the vision tower | the same, with requests that make the same edits there |
| to an encoder-decoder model | as above, with requests of the same encoder input |
| with an adapter | as above, with requests of the same adapter |
| with a `cache_salt` | everything, with requests of the same salt |
| of a server's client | as above, with requests of the same client |
| with captures, gates or `prompt_logprobs` | as above; computes from the first position that is asked for |
| with a `depth`: its passes end early | starts from pages as above; its own pages, with requests of equal depth |
| traced, with a step of its own, with gradients | nothing: what a block does to its KV is not known |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ..core.image_input import image_namespaces
from ..core.request import Request
from ..mem_cache.radix_cache import Match, Node, RadixCache, RadixKey
from ..models.weights.model_state import ModelState

PLAIN, EDITED, EMBEDDED, IMAGES, SALTED, PRIVATE = "plain", "edited", "embedded", "images", "salted", "private"
"""Kinds of namespaces, in `Engine.stats`."""
PROCESS = uuid4().hex
"""Request ids are of this process, and namespaces go to files that others read."""


@dataclass(eq=False)
class Prefix:
    """A request's part of the prefix cache.

    Attributes:
        key: its tokens and namespaces; None if it shares nothing.
        kind: kind of its namespaces.
        namespaces: namespaces of the key, without that of a depth.
        node: node of the tree that it holds, while it has pages.
        reason: reason that the last `match` stopped; "" at the end of the tree.
        num_known: pages that the tree had then, in models with recurrent states.
    """

    key: RadixKey | None
    kind: str
    namespaces: Sequence[tuple[int, Any]] = ()
    node: Node | None = None
    reason: str = ""
    num_known: int = 0


class PrefixSharing:
    """The rules of sharing, and their counts.

    Args:
        tree: tree of the shared pages.
        model: an edit of it drops the tree; None: nothing is shared.
        why_off: reason that nothing is shared, or "".

    Attributes:
        num_recomputed: tokens that were computed though their KV was in the tree, or had been before a preemption.
    """

    def __init__(self, tree: RadixCache, model: ModelState | None, why_off: str = "") -> None:
        self.tree, self._model, self._why_off = tree, model, why_off
        self.num_recomputed = 0
        self._version = 0 if model is None else model.version
        self._asked: Counter[str] = Counter()
        self._cached: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def prefix_of(self, request: Request) -> Prefix:
        """The request's part, made when it is first asked for."""
        if request.prefix is None:
            request.prefix = self._prefix_of(request)
        return request.prefix

    def _prefix_of(self, request: Request) -> Prefix:
        if self._model is None or request.is_whole or request.exclusive or request.differentiable:
            return Prefix(None, PRIVATE)
        namespaces: list[tuple[int, Any]] = []
        kind, size = PLAIN, self.tree.page_size
        if request.declared is not None:
            namespaces = request.declared.kv_edits.namespaces(size, request.max_total_tokens)
            if namespaces and namespaces[0][0] * size < request.prompt_len:
                kind = EDITED
        if request.embeds is not None:
            kind, namespaces = EMBEDDED, _joined(namespaces, request.embeds.namespaces(size))
        if request.images:
            kind, namespaces = IMAGES, _joined(namespaces, image_namespaces(request.images, size, request.image_edits))
        if request.encoder is not None:
            own = f"{PROCESS} {request.request_id}" if request.private_encoder else ""
            namespaces = _salted(namespaces, "encoder", (request.encoder.content, own))
        if (adapted := self._model.namespace(request.adapter)) is not None:
            namespaces = _salted(namespaces, "adapter", adapted)
        if request.cache_salt is not None:
            kind, namespaces = SALTED, _salted(namespaces, "salt", request.cache_salt)
        if request.cache_owner is not None:
            namespaces = _salted(namespaces, "owner", request.cache_owner)
        return Prefix(RadixKey(request.prompt_token_ids, size, namespaces), kind, namespaces)

    def model_changed(self) -> bool:
        """Whether the model was edited since the last call. Then the tree's KV is stale."""
        if self._model is None:
            return False
        version, self._version = self._version, self._model.version
        return version != self._version

    def match(self, request: Request, most: int | None = None) -> Match | None:
        """The pages that the request can start with; None if it shares nothing.

        Args:
            most: upper bound of their number.
        """
        prefix, size = self.prefix_of(request), self.tree.page_size
        if prefix.key is None:
            return None
        self.complete(request, prefix.key)
        limit, reason = self._reusable(request)
        num_pages = limit // size if most is None else min(most, limit // size)
        if request.depth is not None:
            # Kept pages come first, with the KV of all layers. Computed ones lack some, so they get another namespace.
            whole = self._matched(request, prefix.key.renamed(prefix.namespaces), num_pages)
            prefix.key = prefix.key.renamed(_of_depth(prefix.namespaces, request.depth, len(whole.pages)))
        match = self._matched(request, prefix.key, num_pages)
        prefix.reason = reason if len(match.pages) == limit // size else ""
        return match

    def limit_of(self, request: Request) -> int:
        """Positions of the request that need not be computed."""
        return self._reusable(request)[0]

    def _matched(self, request: Request, key: RadixKey, num_pages: int) -> Match:
        """The match of a key, without pages inside of an edit of K and V."""
        match = self.tree.match(key, num_pages)
        if request.declared is not None:
            whole = request.declared.whole_pages(len(match.pages), self.tree.page_size)
            return match if whole == len(match.pages) else self.tree.match(key, whole)
        return match

    @staticmethod
    def complete(request: Request, key: RadixKey) -> None:
        """Add the tokens to the key that were generated since."""
        if (missing := request.prompt_len + len(request.output_token_ids) - key.num_tokens) > 0:
            key.append(request.output_token_ids[-missing:])

    @staticmethod
    def _reusable(request: Request) -> tuple[int, str]:
        """(positions that need not be computed, reason that further ones must be)."""
        limit, seen = request.num_tokens - 1, request.computed_once
        if request.all_logits and seen < request.prompt_len:
            return min(limit, seen), "logits of the prompt"
        if request.params.skip_reading_prefix_cache:
            return 0, "skip_reading_prefix_cache"
        if request.declared is not None:
            first, why = request.declared.first_observed(seen)
            if first is not None and first < limit:
                return first, why
        return limit, ""

    def admitted(self, request: Request, num_cached: int) -> None:
        """Count a request that starts with this many tokens of the tree."""
        prefix = self.prefix_of(request)
        if request.num_preemptions:
            self.num_recomputed += max(request.computed_once - num_cached, 0)
            return
        self._asked[prefix.kind] += request.num_tokens
        self._cached[prefix.kind] += num_cached
        request.num_cached_tokens = num_cached
        if prefix.key is None:
            if self._model is not None:
                self._reasons["a trace"] += 1
        elif prefix.reason:
            size = self.tree.page_size
            known = self.tree.match(prefix.key, (request.num_tokens - 1) // size)
            missed = len(known.pages) * size - num_cached
            self.num_recomputed += missed
            if missed:
                self._reasons[prefix.reason] += 1
                request.not_reused = f"{missed} tokens: {prefix.reason}"

    def may_insert(self, request: Request) -> bool:
        """Whether the request's pages may enter the tree."""
        prefix: Prefix | None = request.prefix
        return (
            prefix is not None
            and prefix.key is not None
            and prefix.node is not None
            and self.tree.is_current(prefix.node)
        )

    def stats(self) -> dict[str, Any]:
        """Token counts: asked for and found by kind of namespace, recomputed, evicted. Also counts of requests by
        reason for no reuse.

        `off` is the reason that requests share nothing, or "".
        """
        size, asked, cached = self.tree.page_size, dict(self._asked), dict(self._cached)
        return {
            "off": self._why_off,
            "hit_rate": {kind: cached.get(kind, 0) / tokens for kind, tokens in asked.items()},
            "asked_tokens": asked,
            "cached_tokens": cached,
            "recomputed_tokens": self.num_recomputed,
            "evicted_tokens": self.tree.num_evicted * size,
            "kept_tokens": self.tree.num_pages * size,
            "not_reused": dict(self._reasons),
        }


def _joined(ones: list[tuple[int, Any]], others: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """The namespaces of pages with a namespace in each of two lists."""
    found: list[tuple[int, Any]] = []
    changes = sorted([(page, 0, own) for page, own in ones] + [(page, 1, own) for page, own in others])
    now: list[Any] = [None, None]
    for page, which, own in changes:
        now[which] = own
        if found and found[-1][0] == page:
            found.pop()
        found.append((page, None if now == [None, None] else tuple(now)))
    return found


def _salted(namespaces: list[tuple[int, Any]], kind: str, salt: Hashable) -> list[tuple[int, Any]]:
    """The same namespaces, with a salt in that of the first page: no other page of the tree follows it.

    Args:
        kind: kind of the salt. Salts of different kinds differ.
    """
    first = namespaces[0][1] if namespaces and namespaces[0][0] == 0 else None
    rest = [entry for entry in namespaces if entry[0] > 0]
    if not rest or rest[0][0] > 1:
        rest.insert(0, (1, first))
    return [(0, (kind, salt, first)), *rest]


def _of_depth(namespaces: Sequence[tuple[int, Any]], depth: int, first: int) -> list[tuple[int, Any]]:
    """The namespaces of a request with a depth. Pages from `first` on are for requests of equal depth."""
    before = [entry for entry in namespaces if entry[0] <= first]
    own = [(first, before[-1][1] if before else None), *(entry for entry in namespaces if entry[0] > first)]
    return [*(entry for entry in before if entry[0] < first), *((page, ("depth", depth, name)) for page, name in own)]
