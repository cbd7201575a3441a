"""Image patching: which patches of a picture carry the answer?

A clean picture and one without its square give different answers. `lm.patch_sweep` runs the second one once for each patch, with
the state at that patch's token replaced by the clean picture's. Where the clean answer returns, the patch carries it. The vision
tower runs once for each picture. A knockout cuts the last token's view of the image: how much of the answer passes there?

The model is tiny and random, so the script runs anywhere and shows how, not what. Give the folder of a Qwen2.5-VL for a real one.

Usage: python examples/image_patches.py [FOLDER] [--save heat.png]
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from pymllm_interp import LM, plots
from pymllm_interp.interventions import Knockout

START, END, PAD = 30, 31, 32
"""Token ids of the tiny model around an image, and of an image."""
TEXT = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
TOWER = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1],
}  # fmt: skip


def save_tiny_model(folder: str) -> None:
    """A random Qwen2.5-VL without a tokenizer: prompts are token ids and pictures."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config=TEXT, vision_config=TOWER, image_token_id=PAD, video_token_id=33, vision_start_token_id=START,
        vision_end_token_id=END,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.mul_(4)
    model.save_pretrained(folder)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }  # fmt: skip
    (Path(folder) / "preprocessor_config.json").write_text(json.dumps(settings))


def patched(lm: LM, clean: Any, corrupted: Any, layer: int) -> torch.Tensor:
    """Change of the clean answer's logit by the state of each of the image's tokens: [tokens]."""
    whole, without = lm.forward([clean, corrupted])
    answer = int((whole.logits[-1] - without.logits[-1]).argmax())
    sweep = lm.patch_sweep(
        corrupted, clean, site="resid_post", layers=[layer], positions="image", metric=lambda logits: logits[:, answer]
    )
    (blind,) = lm.forward([clean], interventions=[Knockout("*", from_=-1, to="image")])
    print(f"logit of the answer: {sweep.source:+.3f}; last token blind to the image: {blind.logits[-1, answer]:+.3f}")
    return sweep.effects[0]


def main(folder: str | None = None, save: str | None = None, layer: int = 0) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as tiny:
        if folder is None:
            save_tiny_model(folder := tiny)
        with LM(folder, kv_cache_tokens=4096) as lm:
            side = lm.cfg.vision_config.patch_size * lm.cfg.vision_config.spatial_merge_size
            rows, columns = 4, 6
            grey = Image.new("RGB", (columns * side, rows * side), "grey")
            square = grey.copy()
            ImageDraw.Draw(square).rectangle([3 * side, side, 5 * side - 1, 3 * side - 1], fill="red")
            ids = [1, lm.cfg.vision_start_token_id, lm.cfg.image_token_id, lm.cfg.vision_end_token_id, 2, 3]
            clean, corrupted = (
                {"prompt_token_ids": ids, "multi_modal_data": {"image": picture}} for picture in (square, grey)
            )
            effect = patched(lm, clean, corrupted, layer).reshape(rows, columns)
    print(f"change of the answer's logit by the state of each patch at layer {layer}:")
    for row in effect.tolist():
        print("  ".join(f"{value:+.3f}" for value in row))
    if save is not None:
        plots.image_heatmap(effect, square, title="patches that carry the answer").save(save)
    return effect


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--save", dest="file", metavar="FILE", help="a heat map over the picture: .html or .png")
    parser.add_argument("--layer", type=int, default=0)
    given = parser.parse_args()
    main(given.folder, given.file, given.layer)
