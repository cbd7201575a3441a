"""A small sparse autoencoder (SAE), trained on states that stay on the engine's device, and then served.

`lm.activations` gives shuffled batches of one layer's states, with their documents. No file is written, and no state passes the
host. The SAE explains most of their variance by a few features. One of them tells texts about the sea from texts about an
office. It is then set while the model writes, by `SetFeature`.

Reference: Bricken et al., "Towards Monosemanticity: Decomposing Language Models With Dictionary Learning" (2023),
https://transformer-circuits.pub/2023/monosemantic-features

Usage: python examples/train_sae.py
"""

import itertools

import torch

from pymllm_interp import LM, SAE, Capture, SamplingParams
from pymllm_interp.interventions import SetFeature

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
EPOCHS, FEATURES = 8, 256


def corpus() -> list[str]:
    """Texts about the sea, and as many about an office."""
    pairs = itertools.product((SEA, OFFICE), FRAMES, range(len(SEA)))
    return [frame.format(words[i], words[i - 1]) for words, frame, i in pairs]


class TrainedSAE(torch.nn.Module):
    """``relu((x - b_dec) @ W_enc + b_enc) @ W_dec + b_dec``, around the mean and the scale of a first batch [rows, width]."""

    def __init__(self, first: torch.Tensor) -> None:
        super().__init__()
        self.scale = (first - first.mean(0)).norm(dim=-1).mean().item()
        directions = torch.nn.functional.normalize(torch.randn(FEATURES, first.shape[1], device=first.device), dim=-1)
        self.W_dec = torch.nn.Parameter(directions)
        self.W_enc = torch.nn.Parameter(directions.T.clone())
        self.b_enc = torch.nn.Parameter(torch.zeros(FEATURES, device=first.device))
        self.b_dec = torch.nn.Parameter(first.mean(0) / self.scale)

    def forward(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and the reconstruction, of states that were divided by the scale."""
        features = torch.relu((states - self.b_dec) @ self.W_enc + self.b_enc)
        return features, features @ self.W_dec + self.b_dec

    def served(self) -> SAE:
        """The same SAE for states as they are, as pymllm-interp serves it."""
        found = {name: tensor.detach().cpu() for name, tensor in self.named_parameters()}
        found["b_dec"] = found["b_dec"] * self.scale
        found["W_dec"] = found["W_dec"] * self.scale
        found["W_enc"] = found["W_enc"] / self.scale
        return SAE(**found, site=SITE)


def main() -> tuple[float, str, str]:
    torch.manual_seed(0)
    texts = corpus()
    with LM("demo") as lm:
        states = Capture(
            SITE, positions=slice(1, None), missing="skip", dtype="float32"
        )  # the first token's is an outlier
        batches = lm.activations(texts, states, rows=64, shuffle=256)
        sae: TrainedSAE | None = None
        for _ in range(EPOCHS):
            lost = total = 0.0
            counts = torch.zeros(FEATURES)
            for batch in batches:
                if sae is None:
                    sae = TrainedSAE(batch.rows)
                    optimizer = torch.optim.Adam(sae.parameters(), lr=3e-3)
                x = batch.rows / sae.scale
                features, found = sae(x)
                loss = (found - x).square().sum(-1).mean() + 0.02 * (features * sae.W_dec.norm(dim=-1)).sum(-1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                lost += (found - x).square().sum().item()
                total += (x - x.mean(0)).square().sum().item()
                sign = (batch.documents < len(texts) // 2).float() * 2 - 1
                counts += (sign @ features.detach()).cpu()
        assert sae is not None
        explained, sea = 1 - lost / total, int(counts.argmax())
        lm.saes["sea"] = sae.served()
        params = SamplingParams(temperature=0, max_tokens=24)
        largest = sae(batch.rows / sae.scale)[0][:, sea].max().item()
        edits = [[], [SetFeature("sea", {sea: 3 * largest})]]
        prompt = "This morning I went to"
        plain, edited = [out.text for out in lm.generate([prompt] * 2, params, interventions=edits)]
    print(
        f"{len(texts)} texts, {EPOCHS} epochs: {explained:.0%} of the variance of {SITE} explained by {FEATURES} features"
    )
    print(f"feature {sea} as it is: {prompt}{plain}\nfeature {sea} set: {prompt}{edited}")
    return explained, plain, edited


if __name__ == "__main__":
    main()
