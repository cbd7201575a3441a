"""The radix tree against a dictionary of all sequences that were inserted, under random operations."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pymllm_interp.mem_cache.radix_cache import Match, Node, RadixCache, RadixKey

PAGE = 4
Namespaces = list[tuple[int, str | None]]


def key_of(tokens: list[int], namespaces: Namespaces | None = None) -> RadixKey:
    return RadixKey(tokens, PAGE, namespaces or [])


def pages_of(count: int, first: int = 1) -> list[int]:
    return list(range(first, first + count))


def filled(tokens: list[int], namespaces: Namespaces | None = None) -> RadixCache:
    tree = RadixCache(PAGE)
    key = key_of(tokens, namespaces)
    assert tree.insert(tree.root, key, 0, pages_of(len(tokens) // PAGE)) == []
    return tree


def test_a_match_ends_at_the_first_page_that_differs() -> None:
    tree, tokens = filled(list(range(24))), list(range(24))
    for place in range(24):
        other = [*tokens[:place], 999, *tokens[place + 1 :]]
        assert tree.match(key_of(other), 6).pages == pages_of(place // PAGE)
    assert tree.match(key_of(tokens), 4).pages == pages_of(4)
    assert tree.match(key_of(tokens + [1] * 8), 8).pages == pages_of(6)


def test_pages_of_other_namespaces_never_meet() -> None:
    tokens = list(range(24))
    tree = filled(tokens, [(2, "a"), (4, None)])
    found = {
        "plain": tree.match(key_of(tokens), 6),
        "same": tree.match(key_of(tokens, [(2, "a"), (4, None)]), 6),
        "longer": tree.match(key_of(tokens, [(2, "a")]), 6),
        "other": tree.match(key_of(tokens, [(2, "b"), (4, None)]), 6),
        "from the start": tree.match(key_of(tokens, [(0, "a")]), 6),
    }
    lengths = {name: len(match.pages) for name, match in found.items()}
    assert lengths == {"plain": 2, "same": 6, "longer": 4, "other": 2, "from the start": 0}
    tree.check_integrity([])


def test_a_held_page_is_not_evicted_and_the_least_recently_used_goes_first() -> None:
    tree = filled([0] * 8)
    for first, token in ((3, 1), (5, 2)):
        tree.insert(tree.root, key_of([token] * 8), 0, pages_of(2, first))
    held = tree.hold(tree.match(key_of([0] * 8), 1))
    assert tree.num_evictable == 5
    tree.release(tree.hold(tree.match(key_of([1] * 8), 2)))
    assert tree.evict(1) == [2], "the page after the held one is the oldest"
    assert tree.evict(1) == [6], "a leaf is cut from its end"
    assert tree.evict(99) == [5, 3, 4] and tree.num_pages == 1 and tree.num_evicted == 5
    tree.check_integrity([held])
    tree.release(held)
    assert tree.evict(99) == [1] and tree.num_pages == 0


def test_what_is_discarded_takes_with_it_what_follows() -> None:
    tokens = list(range(24))
    tree = filled(tokens)
    tree.insert(tree.root, key_of(tokens[:12] + [7] * 12), 0, [11, 12, 13, 14, 15, 16])
    assert sorted(tree.discard({2})) == [2, 3, 4, 5, 6, 14, 15, 16]
    assert tree.pages() == [1]
    tree.check_integrity([])


def test_after_a_reset_nothing_is_found_and_what_was_held_comes_back() -> None:
    tree, tokens = filled(list(range(24))), list(range(24))
    held = tree.hold(tree.match(key_of(tokens), 2))
    assert sorted(tree.reset()) == [3, 4, 5, 6]
    assert tree.match(key_of(tokens), 6).pages == [] and not tree.is_current(held)
    tree.insert(tree.root, key_of(tokens), 0, pages_of(6, 11))
    tree.check_integrity([held])
    assert sorted(tree.release(held)) == [1, 2] and tree.num_pages == 6
    tree.check_integrity([])


class Model:
    """Random operations on the tree, and the sequences that it should know."""

    def __init__(self, seed: int, num_pages: int) -> None:
        self.random, self.tree = random.Random(seed), RadixCache(PAGE)
        self.free = pages_of(num_pages)
        self.of_path: dict[tuple, int] = {}  # (tokens, namespaces) of a path -> its last page
        self.held: list[tuple[Node, RadixKey, list[tuple], list[int], int]] = []

    def path(self) -> tuple[RadixKey, list[tuple]]:
        """A key, and for each of its pages all that its KV depends on."""
        count = self.random.randint(1, 8)
        pages = [tuple([self.random.randrange(2)] * PAGE) for _ in range(count)]
        marks = [self.random.choice([None, None, None, "a", "b"]) for _ in range(count)]
        namespaces = [(i, mark) for i, mark in enumerate(marks) if i == 0 or mark != marks[i - 1]]
        key = key_of([token for page in pages for token in page], namespaces)
        return key, [tuple(zip(pages[: i + 1], marks[: i + 1], strict=True)) for i in range(count)]

    def alloc(self, count: int) -> list[int] | None:
        if count > len(self.free):
            self.drop(self.tree.evict(count - len(self.free)))
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def drop(self, pages: list[int]) -> None:
        self.free += pages
        gone = set(pages)
        self.of_path = {path: page for path, page in self.of_path.items() if page not in gone}

    def check_match(self, match: Match, paths: list[tuple]) -> None:
        known = 0
        while known < len(paths) and paths[known] in self.of_path:
            known += 1
        assert match.pages == [self.of_path[path] for path in paths[:known]]

    def begin(self) -> None:
        """A request: it holds what is known, and gets pages for the rest."""
        key, paths = self.path()
        match = self.tree.match(key, len(paths))
        self.check_match(match, paths)
        node, known = self.tree.hold(match), len(match.pages)
        own = self.alloc(len(paths) - known)
        if own is None:
            self.tree.release(node)
            return
        if self.random.random() < 0.7:
            some = self.random.randint(0, len(own))
            node, taken = self.tree.extend(node, key, known, own[:some])
            self.of_path |= dict(zip(paths[known : known + taken], own[:taken], strict=True))
            known, own = known + taken, own[taken:]
        self.held.append((node, key, paths, own, known))

    def end(self) -> None:
        node, key, paths, own, first = self.held.pop(self.random.randrange(len(self.held)))
        count = self.random.randint(0, len(own))
        entering, rest = own[:count], own[count:]
        returned = self.tree.insert(node, key, first, entering)
        for path, page in zip(paths[first:], entering, strict=False):
            assert (page in returned) == (path in self.of_path)
            self.of_path.setdefault(path, page)
        self.tree.release(node)
        self.free += returned + rest


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_keep_the_tree_equal_to_a_dictionary(seed: int) -> None:
    num_pages = 20 + seed * 3
    model = Model(seed, num_pages)
    for _ in range(400):
        roll = model.random.random()
        if roll < 0.5:
            model.begin()
        elif roll < 0.9 and model.held:
            model.end()
        elif roll < 0.95:
            model.drop(model.tree.evict(model.random.randint(0, 6)))
        elif not model.held and model.tree.pages():
            model.drop(model.tree.discard({model.random.choice(model.tree.pages())}))
        model.tree.check_integrity([node for node, *_ in model.held])
        assert sorted(model.tree.pages()) == sorted(model.of_path.values())
        own = [page for *_, pages, _ in model.held for page in pages]
        assert len(model.free) + len(own) + model.tree.num_pages == num_pages
        for node, _, paths, _, known in model.held:
            above = [page for each in reversed(list(node.path())) for page in each.pages]
            assert above == [model.of_path[path] for path in paths[:known]], "a held page is gone"
    assert model.tree.num_evicted > 0


def test_the_eviction_order_does_not_grow_with_the_requests() -> None:
    tree, key = filled([5] * 16), key_of([5] * 16)
    for _ in range(1000):
        tree.release(tree.hold(tree.match(key, 4)))
    assert len(tree._leaves) < 100
    assert sorted(tree.evict(4)) == pages_of(4)


def lose_a_page(tree: RadixCache, node: Node) -> None:
    node.pages.pop()


def own_a_page_twice(tree: RadixCache, node: Node) -> None:
    node.pages[0] = node.pages[1]


def forget_a_holder(tree: RadixCache, node: Node) -> None:
    node.holders -= 1


def miscount(tree: RadixCache, node: Node) -> None:
    tree.num_evictable += 1


def hang_on_another_edge(tree: RadixCache, node: Node) -> None:
    node.tokens = b"\1" * len(node.tokens)


@pytest.mark.parametrize("damage", [lose_a_page, own_a_page_twice, forget_a_holder, miscount, hang_on_another_edge])
def test_check_integrity_sees(damage: Callable[[RadixCache, Node], None]) -> None:
    tree = filled(list(range(24)))
    node = tree.hold(tree.match(key_of(list(range(24))), 3))
    tree.check_integrity([node])
    damage(tree, node)
    with pytest.raises(AssertionError):
        tree.check_integrity([node])
