"""SAELens' own trainer over `lm.activations`, and its SAE served. Runs where `sae_lens` is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from pymllm_interp import LM, SAE, Capture, SamplingParams
from pymllm_interp.captures import Features
from pymllm_interp.interventions import SetFeature

pytest.importorskip("sae_lens", reason="SAELens is not installed")
pytestmark = pytest.mark.slow
SITE, ROWS, STEPS = "resid_post.12", 32, 60


@pytest.mark.parametrize("kind", ["standard", "topk"])
def test_its_trainer_takes_the_batches_and_its_sae_is_served(kind: str, tmp_path: Path) -> None:
    lens, config, trainer = (
        import_module(name) for name in ("sae_lens", "sae_lens.config", "sae_lens.training.sae_trainer")
    )
    torch.manual_seed(0)
    with LM("demo") as lm:
        sizes = {"d_in": lm.hidden_size, "d_sae": 256, "dtype": "float32", "device": "cpu"}
        if kind == "standard":
            sae = lens.StandardTrainingSAE(lens.StandardTrainingSAEConfig(**sizes, l1_coefficient=1e-3))
        else:
            sae = lens.TopKTrainingSAE(lens.TopKTrainingSAEConfig(**sizes, k=8))
        samples = ROWS * STEPS
        cfg = config.SAETrainerConfig(
            total_training_samples=samples, train_batch_size_samples=ROWS, device="cpu", lr=3e-3, lr_end=3e-4, n_checkpoints=0,
            checkpoint_path=None, save_final_checkpoint=False, dead_feature_window=1000, feature_sampling_window=2000,
            lr_scheduler_name="constant", lr_warm_up_steps=0, lr_decay_steps=0, n_restart_cycles=1, adam_beta1=0.9,
            adam_beta2=0.999, autocast=False, logger=config.LoggingConfig(log_to_wandb=False),
        )  # fmt: skip
        texts = ["The sea was calm.", "Nobody was at the office.", "They set sail at dawn."] * 8
        batches = lm.activations(texts, SITE, rows=ROWS, shuffle=64)
        rows = torch.cat([batch.rows for batch in batches]).float()
        before = (sae(rows) - rows).pow(2).mean().item()
        provider = batches.tensors(epochs=None)
        trainer.SAETrainer(cfg, sae, data_provider=provider).fit()
        provider.close()
        after = (sae(rows) - rows).pow(2).mean().item()
        assert after < 0.5 * before and batches.epoch > 1
        sae.save_inference_model(tmp_path)
        lm.saes["trained"] = SAE.load(tmp_path, site=SITE)
        found = lm.generate(
            ["The sea"], SamplingParams(max_tokens=0), capture=[Capture(SITE, reduce=Features("trained", top_k=4))]
        )
        states = lm.generate(["The sea"], SamplingParams(max_tokens=0), capture=[SITE])[0].activations[SITE]
        theirs = sae.encode(states.float()).topk(4)
        torch.testing.assert_close(found[0].activations[SITE].float(), theirs.values, rtol=1e-3, atol=1e-3)
        feature = int(theirs.indices[-1, 0])
        params = SamplingParams(temperature=0, max_tokens=4)
        assert lm.generate(["The sea"], params, interventions=[SetFeature("trained", {feature: 50.0})])[0].token_ids
