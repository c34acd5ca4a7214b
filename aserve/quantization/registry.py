"""The quantisation schemes that checkpoints may name, loaded on first use.

A new scheme is one module with a class that satisfies ``QuantScheme`` and one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from aserve.core.errors import ModelLoadError
from aserve.quantization.method import QuantScheme

SCHEMES: Mapping[str | None, str] = {
    None: "aserve.quantization.unquantized:UnquantizedScheme",
}
"""``quant_method`` of ``config.json`` (None: absent) to "module:class"."""


def load_scheme(quant_method: str | None) -> QuantScheme:
    """Return the scheme of this name. Raises ModelLoadError when aserve does not know it."""
    if quant_method not in SCHEMES:
        known = ", ".join(name for name in SCHEMES if name) or "none; use the unquantized checkpoint"
        raise ModelLoadError(f"the model's weights are quantized with {quant_method!r}; supported: {known}")
    module, _, name = SCHEMES[quant_method].partition(":")
    scheme: QuantScheme = getattr(import_module(module), name)()
    return scheme
