"""Probes: functions from a state to a number. The device computes dot products with directions, and the host the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.edit_codes import MAX_SCORES
from ...utils.arguments import is_whole, shown
from ..interventions.set_feature import encoder_rows
from ..saes.sae import SAE
from ..site import is_several
from ..spec import Spec, is_number
from ..vectors.files import Source, content_hash

ProbeSource = Annotated[Any, "probe"]
"""Anything that `probe_of` converts."""
Activation = Literal["identity", "relu", "gelu", "silu", "tanh", "sigmoid"]
_MODULES: dict[type[nn.Module], Activation] = {
    nn.Identity: "identity", nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid",
}  # fmt: skip
_SKLEARN: dict[str, Activation] = {"identity": "identity", "relu": "relu", "tanh": "tanh", "logistic": "sigmoid"}
EXPECTED = (
    "a vector or its name, a Probe, a FeatureProbe, a torch.nn.Linear, a Sequential of two with an activation between, or a linear "
    "model or a pipeline of scikit-learn"
)


@dataclass(frozen=True, eq=False)
class Probe(Spec):
    """A linear probe, a linear classifier, or an MLP with one hidden layer.

        Probe(w)                                                     # w @ x
        Probe(W, b, output="softmax", index=2)                       # probability of class 2
        Probe(W1, b1, activation="relu", out_weight=w2, out_bias=b2) # w2 @ relu(W1 @ x + b1) + b2

    Args:
        weight: Tensor [n, width], or [width] for n = 1; or a name in `lm.vectors`. n is at most `MAX_SCORES`.
        bias: n numbers, or one for all rows.
        activation: Activation of the hidden layer; "identity" without one. GELU is the exact one.
        out_weight: Second layer: n numbers, or [classes, n]. None: no second layer.
        out_bias: Bias of the second layer: a number for each class, or one for all.
        output: "linear": the value as it is; "sigmoid" or "softmax": a probability.
        index: Number of the class that gives the score.

    Raises:
        ValueError: shapes that do not fit each other, more than `MAX_SCORES` rows, or numbers that are not finite.
    """

    weight: Source = field(repr=False, metadata={"rows": True})
    bias: Any = field(default=0.0, repr=False)
    activation: Activation = "identity"
    out_weight: Any = field(default=None, repr=False)
    out_bias: Any = field(default=0.0, repr=False)
    output: Literal["linear", "sigmoid", "softmax"] = "linear"
    index: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.weight, nn.Module):
            given = type(self.weight).__name__
            raise ValueError(f"Probe: weight is a {given}: Monitor(site, module, ...) takes a module itself")
        super().__post_init__()
        for part in ("bias", "out_weight", "out_bias"):
            self._set(part, _numbers(getattr(self, part), f"Probe: {part}"))
        if not self.named:
            self._check_shapes()

    def _check_shapes(self) -> None:
        rows = len(self.weight)
        if rows > MAX_SCORES:
            raise ValueError(f"Probe: weight has {rows} rows; at most {MAX_SCORES} are held")
        self._check("bias", len(self.bias) in (1, rows), f"{rows} numbers, one for each row of weight")
        classes = rows
        if self.out_weight is not None:
            second = self._second_layer
            classes = len(second)
            self._check("out_weight", second.shape[1] == rows, f"[classes, {rows}], as weight has {rows} rows")
            self._check("out_bias", len(self.out_bias) in (1, classes), f"{classes} numbers, one for each class")
        self._check("index", is_whole(self.index) and 0 <= self.index < classes, f"from 0 to {classes - 1}")
        if self.output == "softmax":
            self._check("output", classes > 1, "'linear' or 'sigmoid', as there is one class")

    @property
    def directions(self) -> Tensor:
        """[n, width] float32 on the CPU: directions of the dot products."""
        return self.weight

    @cached_property
    def _second_layer(self) -> np.ndarray:
        return np.atleast_2d(np.array(self.out_weight, dtype=np.float32))

    @cached_property
    def _biases(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.bias, dtype=np.float32), np.array(self.out_bias, dtype=np.float32)

    def scores(self, dots: np.ndarray) -> np.ndarray:
        """[rows] float32 scores of dot products [rows, n] with `directions`."""
        bias, out_bias = self._biases
        values = activated(dots + bias, self.activation)
        if self.out_weight is not None:
            values = values @ self._second_layer.T + out_bias
        if self.output == "softmax":
            values = np.exp(values - values.max(-1, keepdims=True))
            return values[:, self.index] / values.sum(-1)
        values = values[:, self.index]
        return activated(values, "sigmoid") if self.output == "sigmoid" else values


@dataclass(frozen=True, eq=False)
class FeatureProbe(Spec):
    """The activation of a feature of an SAE: ``sae.encode(x)[feature]``.

    Args:
        sae: An SAE, or its name in `lm.saes`.
        feature: Number of the feature.

    Raises:
        ValueError: a feature that the SAE does not have, an SAE that normalizes its input, or a top-k SAE.
    """

    sae: SAE | str
    feature: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("feature", is_whole(self.feature) and self.feature >= 0, "a whole number from 0 on")
        sae = self.sae
        if isinstance(sae, str):
            return
        self._check("sae", isinstance(sae, SAE), "an SAE, or a name in lm.saes")
        self._check("feature", self.feature < sae.d_sae, f"from 0 to {sae.d_sae - 1}")
        whole = sae.architecture in ("topk", "abstopk", "matching_pursuit")
        if whole or sae.normalization != "none" or (sae.site is not None and is_several(sae.site)):
            why = "top-k, so one feature depends on all" if whole else "a crosscoder, or normalizing its input"
            raise ValueError(f"FeatureProbe: the SAE is {why}: capture Features(sae), and read the scores from it")

    @cached_property
    def _rows(self) -> tuple[Tensor, np.ndarray]:
        """(encoder's column [1, width], numbers n0 to n3 of `SetFeature.table`)."""
        assert isinstance(self.sae, SAE), "a name is resolved when a request is submitted"
        self._content()  # which notes the SAE's version
        encoder, numbers = encoder_rows(self.sae, [self.feature])
        return encoder.float(), numbers[0].float().numpy()

    @property
    def directions(self) -> Tensor:
        """[1, width] float32 on the CPU."""
        return self._rows[0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The encoder's column."""
        if isinstance(self.sae, SAE):
            yield "sae", self.directions

    def _hash_of(self, name: str, value: Any) -> Any:
        if name == "sae" and isinstance(value, SAE):
            return content_hash(self.directions).hex(), self._rows[1].tobytes()
        return super()._hash_of(name, value)

    def scores(self, dots: np.ndarray) -> np.ndarray:
        """[rows] float32 scores of dot products [rows, 1]."""
        gain, shift, active, threshold = self._rows[1][:4]
        dot = dots[:, 0]
        return np.where(dot + active > threshold, np.maximum(gain * dot + shift, 0), 0).astype(np.float32)


def activated(values: np.ndarray, activation: Activation) -> np.ndarray:
    """`values` after an activation, float32."""
    match activation:
        case "relu":
            return np.maximum(values, 0)
        case "tanh":
            return np.tanh(values)
        case "identity":
            return values
        case "sigmoid":
            return (0.5 * (1 + np.tanh(0.5 * values))).astype(np.float32)
    found = torch.from_numpy(np.ascontiguousarray(values))
    return (nn.functional.gelu(found) if activation == "gelu" else nn.functional.silu(found)).numpy()


def probe_of(given: Any, who: str) -> Probe | FeatureProbe:
    """A probe from what users have: see `EXPECTED`.
    Raises ValueError: another object, a model with several outputs, or one with another shape."""
    if isinstance(given, Probe | FeatureProbe):
        return given
    if isinstance(given, nn.Module):
        return _of_modules(given, who)
    if hasattr(given, "steps") and hasattr(given, "named_steps"):
        return _of_pipeline(given, who)
    if hasattr(given, "coef_") or hasattr(given, "coefs_"):
        return _of_sklearn(given, who)
    if isinstance(given, str | Tensor | Sequence | np.ndarray) or hasattr(given, "__array__"):
        found = Probe(given)
        if not found.named and len(found.weight) > 1:
            raise ValueError(
                f"{who}: the probe has {len(found.weight)} rows: Probe(weight, index=...) says which is the score"
            )
        return found
    raise ValueError(f"{who}: probe={shown(given)}; expected {EXPECTED}")


def _of_modules(module: nn.Module, who: str) -> Probe:
    parts = list(module) if isinstance(module, nn.Sequential) else [module]
    parts = [part for part in parts if not isinstance(part, nn.Dropout)]
    output: Literal["linear", "sigmoid"] = "linear"
    if len(parts) > 1 and isinstance(parts[-1], nn.Sigmoid):
        output, parts = "sigmoid", parts[:-1]
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    hidden = [part for part in parts if type(part) in _MODULES]
    fits = len(parts) == 1 or (len(parts) == 3 and isinstance(parts[0], nn.Linear) and type(parts[1]) in _MODULES)
    if not fits or len(linear) + len(hidden) != len(parts) or not isinstance(parts[-1], nn.Linear):
        raise ValueError(f"{who}: the probe is {type(module).__name__}; expected {EXPECTED}")
    if isinstance(hidden[0] if hidden else None, nn.GELU) and hidden[0].approximate != "none":
        raise ValueError(f"{who}: the probe's GELU is approximate={hidden[0].approximate!r}; only 'none' is computed")
    _check_outputs(linear[-1].out_features, who)
    bias, out_bias = (0.0 if part.bias is None else part.bias.tolist() for part in (linear[0], linear[-1]))
    if len(linear) == 1:
        return Probe(linear[0].weight, bias, output=output)
    return Probe(
        linear[0].weight,
        bias,
        _MODULES[type(hidden[0])],
        linear[1].weight.detach().flatten().tolist(),
        out_bias,
        output,
    )


def _of_pipeline(pipeline: Any, who: str) -> Probe:
    """A pipeline of scalers and a model: the scaling becomes part of the weights."""
    *scalers, (_, model) = pipeline.steps
    probe = _of_sklearn(model, who)
    weight, bias = probe.weight.double(), torch.tensor(probe.bias).double()
    for _, scaler in reversed(scalers):
        if scaler in (None, "passthrough"):
            continue
        if type(scaler).__name__ != "StandardScaler":
            raise ValueError(
                f"{who}: the probe's pipeline has a {type(scaler).__name__}; expected StandardScaler and a model"
            )
        if scaler.scale_ is not None:
            weight = weight / torch.as_tensor(scaler.scale_)
        if scaler.mean_ is not None:
            bias = bias - weight @ torch.as_tensor(scaler.mean_)
    others = {name: getattr(probe, name) for name in ("activation", "out_weight", "out_bias", "output", "index")}
    return Probe(weight, bias.expand(len(weight)).tolist(), **others)


def _of_sklearn(model: Any, who: str) -> Probe:
    output: Literal["linear", "sigmoid"] = "sigmoid" if hasattr(model, "predict_proba") else "linear"
    if hasattr(model, "coefs_"):
        if len(model.coefs_) != 2:
            raise ValueError(f"{who}: the probe has {len(model.coefs_) - 1} hidden layers; expected one")
        (first, second), (bias, out_bias) = model.coefs_, model.intercepts_
        _check_outputs(second.shape[1], who)
        return Probe(
            first.T, bias.tolist(), _SKLEARN[model.activation], second[:, 0].tolist(), out_bias.tolist(),
            "sigmoid" if model.out_activation_ == "logistic" else "linear",
        )  # fmt: skip
    weight = np.atleast_2d(model.coef_)
    _check_outputs(len(weight), who)
    return Probe(weight, np.atleast_1d(model.intercept_).tolist(), output=output)


def _check_outputs(count: int, who: str) -> None:
    if count != 1:
        raise ValueError(
            f"{who}: the probe has {count} outputs: Probe(weight, bias, output='softmax', index=...) says which class is the score"
        )


def _numbers(given: Any, what: str) -> Any:
    """A number, or lists of numbers, as tuples of finite floats."""
    if given is None:
        return None
    listed = given.tolist() if hasattr(given, "tolist") else given
    if is_number(listed):
        listed = [listed]
    if isinstance(listed, list | tuple) and 0 < len(listed) <= MAX_SCORES:
        if all(is_number(number) and abs(number) <= torch.finfo(torch.float32).max for number in listed):
            return tuple(map(float, listed))
        if all(isinstance(row, list | tuple) and len(row) == len(listed[0]) for row in listed):
            return tuple(_numbers(row, what) for row in listed)
    raise ValueError(f"{what}={shown(given)}; expected 1 to {MAX_SCORES} finite numbers")
