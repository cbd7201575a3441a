"""Write a tiny random model, and what transformer-lens makes of its states, to tests/golden/lenses.

transformer-lens runs in an environment of its own:

    python -m venv tlenv
    tlenv/bin/pip install torch==2.13.0 transformer-lens==4.3
    tlenv/bin/python tests/golden/make_lenses.py

The model's folder has config.json and model.safetensors; jacobian.pt is a file of `JacobianLens.save`; expected.safetensors holds
`tokens`, `logit` [1 + layers, positions, vocab] of the logit lens, and `jacobian` [layers, positions, vocab] of the Jacobian lens.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import JacobianLens
from transformer_lens.tools.analysis.logit_lens import logit_lens
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

OUT = Path(__file__).parent / "lenses"
WIDTH, LAYERS, VOCAB = 16, 3, 40


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1, 0.1)
    model.save_pretrained(OUT / "model")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0", bos_token="w0", eos_token="w0"
    )
    tokenizer.save_pretrained(OUT / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(OUT / "model")
    bridge = TransformerBridge.boot_transformers(str(OUT / "model"), hf_model=model, tokenizer=tokenizer, device="cpu")
    tokens = torch.randint(0, VOCAB, (1, 9))
    expected = {"tokens": tokens[0]}
    found = logit_lens(bridge, tokens, positions=None)
    print(found.labels, found.readout.values.shape)
    expected["logit"] = found.readout.values.reshape(
        -1, tokens.shape[1], VOCAB
    )  # the embeddings first, then each layer's output
    matrices = {layer: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for layer in range(LAYERS - 1)}
    lens = JacobianLens(matrices, n_prompts=1, d_model=WIDTH)
    lens.save(str(OUT / "jacobian.pt"), dtype=torch.float32)
    found = lens.readout(bridge, tokens, layers=range(LAYERS), return_full_logits=True)
    expected["jacobian"] = torch.stack([found.lens_logits[layer] for layer in range(LAYERS)])
    save_file({name: tensor.detach().contiguous() for name, tensor in expected.items()}, OUT / "expected.safetensors")


if __name__ == "__main__":
    main()
