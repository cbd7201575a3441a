"""Other engines as `measure` takes them. They are imported where they are used, and are no dependency."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any

from .traffic import TokenStream


def check_vllm() -> None:
    """Raises ImportError where vLLM is not installed."""
    if find_spec("vllm") is None:
        raise ImportError("vLLM is not installed: install it, or use --engine ours")


class VllmEngine:
    """vLLM's offline engine, stepped by the calling thread. `vllm.LLM` has its default settings, without prefix cache and
    tokenizer.

    A request that is due during a step is added after the step.

    Args:
        model: a folder or a hub id.
        dtype, load_format: as in vLLM; "dummy" makes random weights.
        options: further arguments of `vllm.LLM`.
    """

    def __init__(self, model: str, dtype: str = "auto", load_format: str = "auto", **options: Any) -> None:
        check_vllm()
        import vllm  # pyright: ignore[reportMissingImports]

        settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False, **options}
        self.name = f"vLLM {vllm.__version__}"
        self._vllm, self._engine = vllm, vllm.LLM(model, dtype=dtype, load_format=load_format, **settings).llm_engine
        config = self._engine.model_config
        self.vocab_size, self.max_model_len = config.get_vocab_size(), config.max_model_len
        self._streams: dict[str, TokenStream] = {}
        self._numbers = count()

    def submit(self, streams: Sequence[TokenStream]) -> None:
        """Start requests, one after the other."""
        delta = self._vllm.sampling_params.RequestOutputKind.DELTA
        for stream in streams:
            params = self._vllm.SamplingParams(
                temperature=0, max_tokens=stream.new_tokens, ignore_eos=True, detokenize=False, output_kind=delta
            )
            request_id = str(next(self._numbers))
            self._streams[request_id] = stream
            self._engine.add_request(request_id, {"prompt_token_ids": stream.prompt}, params)

    def serve(self, until: float | None) -> None:
        """Step until then; sleep where there is nothing to do."""
        while until is None or time.perf_counter() < until:
            if not self._engine.has_unfinished_requests():
                if until is not None:
                    time.sleep(max(0.0, until - time.perf_counter()))
                return
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                self._streams[output.request_id].times += [now] * len(output.outputs[0].token_ids)

    def execution(self) -> Mapping[str, int]:
        """Nothing: vLLM does not count its steps by kind."""
        return {}

    def shutdown(self) -> None:
        """End vLLM's process, which has the memory of the device."""
        self._engine.engine_core.shutdown()
