"""`Reconstruct`: an SAE's reconstruction in place of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...kernels import edit_codes as codes
from ...kernels.edit_codes import OpWords
from ..positions import Positions
from ..registry import op
from ..saes.sae import SAE
from ..site import Site
from .op import Gate, Missing
from .sae_op import SAEOp


@op
@dataclass(frozen=True, eq=False)
class Reconstruct(SAEOp):
    """Replace the state by an SAE's reconstruction: ``decode(encode(state))``, as SAEBench splices an SAE in.

    A transcoder's reconstruction of the state at `site_out` is made of the state at `site`. A `SetFeature` by the same SAE directly
    behind it sets features before they are decoded. With ``error=True`` the part that the SAE does not reconstruct is added again.
    So the op changes no bit, and only a `SetFeature` behind it acts.

    On CUDA, passes reconstruct the SAEs of ``LM(..., saes={"name": sae}, reconstruct=["name"])``. Such an op by an autoencoder is
    the first at its site.

    Args:
        sae: An `SAE`, or a name in `lm.saes`.
        error: Whether the reconstruction error is kept.
        site: A site's name, or None: the site that the SAE writes.
        positions: "all", "prompt", "generated", "image", "image[0]", "text", indexes, a mask, a range, a slice, or `Generated`.
        when: A `Gate` that decides row by row; None acts on every row.
        missing: "error" or "skip", for positions that a prompt does not have.

    Raises:
        ValueError: an SAE without a site, or a crosscoder.
    """

    sae: SAE | str
    error: bool = False
    site: Site | str | None = field(
        default=None, metadata={"description": "the site; null: the one that the SAE writes"}
    )
    positions: Positions = "all"
    when: Gate | None = None
    missing: Missing = "error"

    def __post_init__(self) -> None:
        self._check("error", isinstance(self.error, bool), "True or False")
        super().__post_init__()

    @property
    def identity(self) -> bool:
        """Whether ``error``."""
        return self.error

    @property
    def encodes(self) -> SAE | None:
        """The SAE."""
        return self.sae if isinstance(self.sae, SAE) else None

    def act(self, x: Tensor, selected: Tensor, ordinals: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """The reconstructed states."""
        read = self.given(vectors)
        assert isinstance(self.sae, SAE)
        return self.sae.to(x.device).reconstruct(x) if read is None else read[:, self.columns]

    def words(self) -> OpWords:
        """Table words of RECONSTRUCT."""
        return OpWords(codes.RECONSTRUCT, rank=0)
