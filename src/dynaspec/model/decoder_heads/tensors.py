"""A decoder head's tensors under one set of names, whichever project has written them."""

from __future__ import annotations

from pathlib import Path

from dynaspec.model.head_tensors import HeadTensors, open_tensors

_BARE = ("lm_head.", "d2t", "t2d")


def decoder_head_tensors(directory: Path, under: str = "") -> HeadTensors:
    """Tensors under the names of ``speculators``.

    Args:
        under: beginning of the names, as they are stored, of the tensors to read; others may be there.

    Raises:
        CheckpointError: no weights, or a file that cannot be read.
    """
    return open_tensors(directory, "a head with its config").only(under).renamed(_own_name)


def _own_name(name: str) -> str:
    if not name.startswith(_BARE):
        name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
