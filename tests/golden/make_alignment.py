"""Writes alignment.json: interchanges and a training by pyvene's `LowRankRotatedSpaceIntervention`.

Usage: python make_alignment.py, where pyvene is installed (0.1.8, with transformers 5.23.0 and torch 2.13.0).

The model is attribution.safetensors' Llama, with a head that reads three dimensions of the last layer's output. Labels are the
tokens of the source runs. The file has the head, the prompts, a rotation before and after the training, and the logits with it.
"""

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import json
from pathlib import Path

import pyvene
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
LAYER, RANK, POSITIONS, STEPS = 1, 3, (2, 4), 150


def model_with_subspace() -> torch.nn.Module:
    with safe_open(HERE / "attribution.safetensors", framework="pt") as file:
        config = AutoConfig.for_model(**json.loads(file.metadata()["llama"]))
        prefix = "llama/weights/"
        own = {n.removeprefix(prefix): file.get_tensor(n) for n in file.keys() if n.startswith(prefix)}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.load_state_dict(own, strict=False)
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(config.hidden_size, RANK))[0]
    model.lm_head.weight = torch.nn.Parameter(3 * torch.randn(config.vocab_size, RANK) @ basis.T)
    return model.requires_grad_(False)


def main() -> None:
    model = model_with_subspace()
    torch.manual_seed(1)
    bases, sources = torch.randint(0, 20, (96, POSITIONS[0] + 1)), torch.randint(0, 20, (96, POSITIONS[1] + 1))
    labels = model(sources).logits[:, -1].argmax(-1)
    place = {"layer": LAYER, "component": "block_output", "low_rank_dimension": RANK}
    kind = pyvene.LowRankRotatedSpaceIntervention
    search = pyvene.IntervenableModel(pyvene.IntervenableConfig([{**place, "intervention_type": kind}]), model)
    (intervention,) = search.interventions.values()
    intervention = intervention[0] if isinstance(intervention, tuple | list) else intervention

    def run() -> torch.Tensor:
        at = {"sources->base": tuple([[[position]] * len(bases)] for position in reversed(POSITIONS))}
        _, output = search({"input_ids": bases}, [{"input_ids": sources}], at)
        return output.logits[:, -1]

    def state() -> dict[str, object]:
        with torch.no_grad():
            logits = run()
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        accuracy = (logits.argmax(-1) == labels).float().mean().item()
        weight = intervention.rotate_layer.weight.detach()
        return {"rotation": weight.tolist(), "logits": logits[:8].tolist(), "loss": loss, "accuracy": accuracy}

    found = {
        "layer": LAYER, "positions": POSITIONS, "lm_head": model.lm_head.weight.tolist(), "bases": bases.tolist(),
        "sources": sources.tolist(), "labels": labels.tolist(), "before": state(),
    }  # fmt: skip
    optimizer = torch.optim.Adam(intervention.parameters(), lr=0.05)
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(run(), labels).backward()
        optimizer.step()
    found["after"] = state()
    (HERE / "alignment.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
