"""LM: the model that users hold. Generate with it as with vLLM, trace it as with nnsight.

lm = LM("demo")
outs = lm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))

with lm.trace("The Eiffel Tower is in") as tracer:
    h = lm.model.layers[12].output.save()     # [1, tokens, hidden]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from transformers import PretrainedConfig

from ..config import ModelConfig, ServerConfig
from ..core import unsupported
from ..core.limits import EngineLimits
from ..core.model_spec import ModelSpec
from ..core.sampling_params import SamplingParams
from ..engine.engine import Engine
from ..harvest.result import HarvestResult
from ..harvest.run import run_harvest
from ..hooks.captures.spec import Capture
from ..hooks.declared import captures_for_each_prompt, for_each_prompt
from ..hooks.interventions.knockout import Intervention
from ..hooks.site import Site
from ..hooks.traces.syntax.pass_options import take_options
from ..layers.seal import seal
from ..models.weights.source import load_tokenizer
from ..runner.interp_model_runner import InterpModelRunner
from ..utils.arguments import check_names
from . import open_engines
from .activation_cache import select_sites
from .calls.forward_calls import ForwardCalls
from .calls.token_calls import TokenCalls
from .calls.toolkit_calls import ToolkitCalls
from .calls.trace_calls import TraceCalls
from .generation_defaults import GenerationDefaults
from .handle import RequestHandle
from .notebook.tab_completion import set_up_completion
from .request_factory import PREFILL, RequestFactory

ELSEWHERE = {
    "device_map": "one device holds the model, device='cuda' or 'cpu'",
    "dispatch": "the weights are always loaded; leave it out",
    "torch_dtype": "here it is dtype",
    "max_num_seqs": "here it is max_running_requests",
    "max_num_batched_tokens": "here it is max_num_tokens",
    "enforce_eager": "here it is disable_cuda_graph=True",
    "tensor_parallel_size": "one device holds the model",
    **unsupported.OPTIONS,
}
"""What nnsight's and vLLM's users write -> what to do."""


class LM(TraceCalls, ForwardCalls, ToolkitCalls, TokenCalls):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A language model, its engine, and the tree that traces are written against.

    Args:
        model: "demo", a folder (config.json and safetensors), a .gguf file, or a hub id.
        dtype: "auto" is float32 on a CPU and bfloat16 on CUDA.
        device: "auto" is CUDA where there is one.
        load_format: "dummy" makes seeded random weights; config.json is enough, and no tokenizer is needed.
        impl: "native", our implementation; "transformers", the family's own class over our KV pool; "auto": native where there is
            one, else transformers (docs/models.md).
        max_model_len: tokens of one request, prompt and new ones.
        max_running_requests: requests in one step; None derives the number from the KV pool.
        max_num_tokens: token rows in one step; longer prompts run in chunks, traced ones in a step of their own.
        kv_cache_tokens: slots of the KV pool.
        seed: of dummy weights, and of requests without a seed.
        rename: aliases for modules, as in nnsight.
        envoys: nnsight's map from module classes or paths to envoy classes.
        attn_implementation: "eager" runs traces with transformers' own attention, as if each trace said so.
        hf_config: a transformers config in place of config.json (with load_format="dummy").
        generation_config: "auto": the model's generation_config.json sets `default_sampling_params`; "none": it does not; or a
            folder with another one.
        saes: {name: an `SAE`, a file or a folder}, as `lm.saes` has them. On CUDA, `SetFeature` takes those top-k SAEs alone.
        server: further fields of `ServerConfig`, by name.

    Attributes:
        vectors: by name, for interventions that give a name in a vector's place (hooks/vectors/registry.py).
        saes: sparse autoencoders by name, for captures and interventions that give a name in place of one (hooks/saes).

    Raises:
        FileNotFoundError, ValueError: no such model, or one that cannot be served; see `models`.
        TypeError: a model that is neither a name nor a path, or a keyword that is not known.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        dtype: Any = "auto",
        device: str = "auto",
        load_format: str = "auto",
        impl: str = "auto",
        max_model_len: int | None = None,
        max_running_requests: int | None = 512,
        max_num_tokens: int | None = None,
        kv_cache_tokens: int | None = None,
        seed: int = 0,
        rename: dict[Any, Any] | None = None,
        envoys: dict[Any, Any] | None = None,
        hf_config: PretrainedConfig | None = None,
        attn_implementation: str | None = None,
        generation_config: str | PathLike[str] = "auto",
        saes: Mapping[str, Any] | None = None,
        **server: Any,
    ) -> None:
        _check_arguments(model, server)
        self.default_options = take_options({"attn_implementation": attn_implementation})
        model_config = ModelConfig(
            model=str(model), dtype=dtype, load_format=load_format, impl=impl, seed=seed, hf_config=hf_config,
            generation_config=str(generation_config), saes=saes or {},
        )  # fmt: skip
        server_config = ServerConfig(
            device=device,
            max_model_len=max_model_len,
            max_running_requests=max_running_requests,
            max_num_tokens=max_num_tokens,
            kv_cache_tokens=kv_cache_tokens,
            **server,
        )

        open_engines.wait_for_released()
        self.runner = InterpModelRunner(server_config, model_config, wrap=self.tree_maker(rename, envoys))
        engine = None
        try:
            self.engine = engine = Engine(self.runner)
            open_engines.track(engine)
            engine.start()
            self._init_client(seed)
            open_engines.release_with(self._factory, engine)  # copies of this LM (`lm.edit()`) have it, too
        except BaseException as error:
            try:
                if engine is not None:
                    engine.shutdown()  # a second Ctrl-C ends this wait; the thread then ends by itself
            finally:
                # A notebook keeps the error, which holds this frame and those below.
                self.__dict__.clear()
                engine = None
                clear_frames(error.__traceback__)
            raise

    def _init_client(self, seed: int) -> None:
        """The tokenizer, and what makes requests: all of an `LM` that its engine does not know."""
        seal(self.runner.get_model())
        assert self.runner.source is not None
        self.tokenizer = load_tokenizer(self.runner.source)
        self.hf_config: PretrainedConfig = self.runner.source.hf_config
        setting = self.runner.model_config.generation_config
        defaults = GenerationDefaults.of(setting, self.hf_config, self.runner.source.folder)
        self._factory = RequestFactory(self.runner, self.tokenizer, defaults, seed)
        self.vectors, self.saes = self._factory.vectors, self._factory.saes
        set_up_completion(type(self))

    def __repr__(self) -> str:
        """The model, its device and dtype and the engine's state; then the tree of modules."""
        return f"{self._summary()}\n{super().__repr__()}"

    def _summary(self) -> str:
        source, dtype = self.runner.source, str(self.dtype).removeprefix("torch.")
        assert source is not None
        return f"LM({source.name}, {self.runner.device}, {dtype}, engine: {self.engine.state})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an LM cannot be pickled or copied: it has an engine, with threads and device memory. Make one in each process, or "
            "serve one (pymllm-interp serve) and use LM.connect(url) in each. Outputs and their activations can be pickled"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and states, as `lm.device` says where they are."""
        return self.runner.dtype

    @property
    def cfg(self) -> PretrainedConfig:
        """The model's transformers config: `hf_config`, by TransformerLens' name for a config."""
        return self.hf_config

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self.model_spec.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.model_spec.hidden_size

    @property
    def sites(self) -> list[str]:
        """The sites that captures read, in the order of a forward pass; ``.*`` stands for the layer: "resid_post.*"."""
        found = select_sites(None, self.model_spec, self.runner.declared.limits.inner_sites, captured=False)
        kinds = [site.kind if site.layer is None else f"{site.kind}.*" for site in (*found, Site("logits"))]
        return [*dict.fromkeys(kinds), "pattern.*"] if self.model_spec.cuts_edges else list(dict.fromkeys(kinds))

    @property
    def model_fingerprint(self) -> str:
        """A hash of config, dtype and weights, as they are now: it follows edits of the weights (models/weights/model_state.py)."""
        self.engine.check_open()
        return self._factory.model_state.fingerprint()

    @property
    def weights_version(self) -> int:
        """Grows with every edit of the weights. Cheap: nothing is read from the device."""
        return self._factory.model_state.version

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of calls without any: those of the model's generation_config.json, as in vLLM."""
        return self._factory.defaults.sampling_params

    # -- harvests ----------------------------------------------------------------------

    def harvest(
        self,
        inputs: Iterable[Any],
        *,
        capture: Sequence[Capture | Site | str],
        out: str | Path,
        interventions: Sequence[Intervention] | None = None,
        shard_bytes: int = 1 << 29,
        max_length: int | None = None,
        too_long: str = "error",
        on_error: str = "raise",
        progress: bool | None = None,
    ) -> HarvestResult:
        """Write the states of a corpus to the folder `out`, as safetensors shards that `open_harvest` reads.

        Each document is one forward pass without generation; many run at once. The same call resumes a run that was killed or
        failed: it skips the documents in whole shards, and deletes all other files of the run.

        Args:
            inputs: an iterable of documents (texts or token ids), which may be lazy and endless. Or one stream of tokens (a tensor
                [n], an array, an iterable of integers), which is cut into documents of `max_length` tokens.
            capture: sites and `Capture`s. Positions and reductions are those of one pass.
            out: a new folder, or a folder of the same harvest.
            interventions: applied to each document.
            shard_bytes: upper bound of a shard, in bytes. A document is never split over shards, so a larger document makes a
                larger shard. About twice this much is held in host memory.
            max_length: upper bound of a pass, in tokens; None: max_model_len.
            too_long: what to do with a longer document: "error"; "truncate": read its beginning; "split": read it in several
                passes of `max_length` tokens, which do not attend to each other. Positions still count from the start of the
                document, so the position in the pass is ``position % max_length``.
            on_error: "raise"; "skip": leave out documents that fail, and name them in the result and the manifest.
            progress: show documents, rates and the time left on standard error: a bar on a terminal, lines elsewhere. None: no
                lines in the first seconds. False: nothing.

        Raises:
            ValueError: invalid captures, or a folder of another harvest or input.
            FileExistsError: the folder holds other files.
            HarvestError: the run stopped before the end of the input. The message names the document, and what was kept.
        """
        if self.engine.on_engine_thread:
            raise RuntimeError("a harvest cannot be run inside the block of a trace: the engine would wait for itself")
        self.engine.check_open()
        if self.edits_of(None):
            raise NotImplementedError(
                "this model has edits, and a harvest does not apply them: clear them, or declare them"
            )
        return run_harvest(
            self, inputs, capture=capture, out=out, interventions=interventions, shard_bytes=shard_bytes, max_length=max_length,
            too_long=too_long, on_error=on_error, progress=progress,
        )  # fmt: skip

    @property
    def limits(self) -> EngineLimits:
        """Upper bounds of requests and steps, as they are now."""
        return self._factory.limits

    @property
    def engine_name(self) -> str:
        """What computes: versions, device, attention backend and dtype."""
        return self._factory.engine_name

    @property
    def model_spec(self) -> ModelSpec:
        """Sites and widths of the model."""
        return self.runner.model_spec

    def token_ids(self, prompt: Any, what: str = "the prompt") -> list[int]:
        """Token ids of a prompt: a text, token ids (list or tensor), or a tokenizer's dict.

        Args:
            what: names the prompt in messages.

        Raises:
            PromptError: it is empty, of another type, or has ids outside the vocabulary.
        """
        return self._factory.tokens(prompt, what).token_ids

    def resolve_specs(
        self, capture: Sequence[Capture | Site | str], interventions: Sequence[Intervention] | None = None
    ) -> tuple[list[Capture], list[Intervention]]:
        """Captures and interventions of one prompt, with this model's vectors in place of their names.

        Raises:
            ValueError: an unknown name, or not a spec.
        """
        (captures,) = self._factory.named(captures_for_each_prompt(capture, 1))
        (declared,) = self._factory.named(for_each_prompt(interventions, 1))
        return captures, declared

    def submit_prefill(
        self,
        token_ids: list[int],
        captures: Sequence[Capture],
        interventions: Sequence[Intervention] = (),
        what: str = "the prompt",
    ) -> RequestHandle:
        """Start one forward pass over a prompt, which may fill the context. Returns at once; nothing is generated.

        Args:
            token_ids: of `token_ids`.
            captures, interventions: of `resolve_specs`.
            what: names the prompt in messages.

        Raises:
            PromptError: the prompt or its specs cannot be served.
            ValueError: the vector pool is full.
        """
        self.engine.check_open()
        (request,) = self._factory.requests(token_ids, PREFILL, what=what)
        self._factory.declare(request, interventions, captures, what)
        self._factory.hold([request])
        handle = RequestHandle(None, [request], None, self.engine)
        self._send([handle])
        return handle

    def reset_prefix_cache(self) -> None:
        """Forget the KV that the prefix cache keeps. Edits of the weights do so by themselves."""
        self.engine.reset_prefix_cache()

    @classmethod
    def connect(cls, url: str, *, api_key: str | None = None, timeout: float | None = None) -> LM:
        """The model that a server (`pymllm-interp serve`) runs, with the calls of a local `LM`.

        Outputs are equal to those of a local `LM`. Traces are sent to the server as source code, with the values that they read,
        and need a key with the right `code`; what they save comes back as tensors. `lm.lm_head(h)` works inside blocks alone.

        Args:
            url: such as "http://127.0.0.1:8000".
            api_key: where the server asks for one.
            timeout: seconds to wait for the next part of an answer; None: as long as it takes.

        Raises:
            ConnectionError: no server answers there, or it serves another version.
            PermissionError: the key is missing or not known.
        """
        remote = import_module("pymllm_interp.client.remote.remote_lm")  # above this package, which it builds on
        return remote.RemoteLM(url, api_key, timeout)

    # -- life ----------------------------------------------------------------------------

    def shutdown(self, timeout: float | None = None) -> None:
        """End what runs, and release all but the weights, which the tree shows: they go with the last reference (`del lm`).

        A second call does nothing.

        Args:
            timeout: seconds to wait for the end; None: as long as it takes. A block that waits for a lock may take for ever.

        Raises:
            TimeoutError: it takes longer. It goes on by itself.
        """
        engine = self.__dict__.get("engine")
        if engine is not None:
            engine.shutdown(timeout)

    def __enter__(self) -> LM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()


def _check_arguments(model: Any, keywords: Mapping[str, Any]) -> None:
    """Raises TypeError where `LM` cannot take them, with what it takes instead."""
    if not isinstance(model, str | PathLike):
        raise TypeError(
            f"model is a {type(model).__name__}: 'demo', a folder, a .gguf file or a hub id is expected; one that is loaded "
            "already becomes a folder by model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
        )
    known = [*ModelConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__, "rename", "attn_implementation"]
    check_names("LM", keywords, known, ELSEWHERE)
