"""Harvesting: the hidden states of many texts on disk, and a linear probe trained on them.

Each text is one forward pass, and passes are batched. The states of one layer go to a folder of safetensors shards. A killed run
resumes when it is started again. The probe reads rows in random order, as training a sparse autoencoder would. It classifies the
last token's state: is the text about the sea or about an office?

Reference: Alain and Bengio, "Understanding intermediate layers using linear classifier probes" (2016),
https://arxiv.org/abs/1610.01644

Usage: python examples/harvest.py [folder]
"""

import itertools
import sys
import tempfile
from pathlib import Path

import torch

from pymllm_interp import LM
from pymllm_interp.harvest import Harvest, open_harvest

SEA = ("ocean", "wave", "sailor", "whale", "ship", "harbour")
OFFICE = ("desk", "meeting", "clerk", "printer", "manager", "letter")
FRAMES = (
    "The {} was old.",
    "Everyone saw the {} there.",
    "I remember a {} and a {}.",
    "What a large {}!",
    "She drew the {}.",
)
SITE = "resid_post.12"


def corpus() -> list[tuple[str, int]]:
    """(text, 1 for the sea, 0 for an office), in turn."""
    pairs = itertools.product(FRAMES, range(len(SEA)))
    return [(frame.format(words[i], words[i - 1]), words is SEA) for frame, i in pairs for words in (SEA, OFFICE)]


def probe(harvest: Harvest, labels: torch.Tensor) -> float:
    """Train on the last tokens of four texts in five. Returns the accuracy on the others."""
    rows, documents = harvest[SITE], harvest.document_ids()[:]
    last = torch.cat([documents[1:] != documents[:-1], torch.tensor([True])]).nonzero()[:, 0]  # by document
    held_out = torch.arange(len(labels)) % 10 >= 8
    training, testing = (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]
    mean = rows[last[training]].mean(0)
    weight = torch.zeros_like(mean, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.01)
    for _ in range(100):
        batch = training[torch.randperm(len(training))[:32]]
        loss = torch.nn.functional.soft_margin_loss((rows[last[batch]] - mean) @ weight, labels[batch] * 2 - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    said = (rows[last[testing]] - mean) @ weight > 0
    return (said == labels[testing].bool()).float().mean().item()


def main(folder: str | None = None) -> float:
    torch.manual_seed(0)
    texts, labels = zip(*corpus(), strict=True)
    with tempfile.TemporaryDirectory() as temporary, LM("demo") as lm:
        out = Path(folder or temporary) / "states"
        result = lm.harvest(texts, capture=[SITE], out=out, shard_bytes=1 << 18)
        again = lm.harvest(texts, capture=[SITE], out=out, shard_bytes=1 << 18)  # complete already: nothing is computed
        assert again.new_documents == 0
        accuracy = probe(open_harvest(out), torch.tensor(labels, dtype=torch.float32))
    print(f"{result.documents} texts, {result.tokens} tokens, {result.bytes / 1e6:.1f} MB in {result.shards} shards")
    print(f"sea or office, from the last token's state of texts that the probe has not seen: {accuracy:.0%} right")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
