"""Rows of fn, eight elements at a time, for fused multiply-adds in FP32."""

from . import ptx
#: if plan.fn_halves == 2
from .constants import FN_ROW_BYTES, FRAGMENT_BYTES
#: else
from .constants import FN_ROW_BYTES
#: endif


def load_row(address, row):
    """Loads eight elements of a row of fn, as words."""
#: if plan.fn_halves == 2
    place = address + row * FN_ROW_BYTES
    return [*ptx.load_constant(place), *ptx.load_constant(place + FRAGMENT_BYTES)]
#: else
    return ptx.load_constant(address + row * FN_ROW_BYTES)
#: endif


def widen(words):
#: if plan.fn_halves == 2
    """Gives eight elements of fn, which are FP32."""
    return [ptx.as_float(word) for word in words]
#: else
    """Widens eight elements of fn from BF16 to FP32: exact."""
    values = []
    for word in words:
        values.append(ptx.as_float(word << 16))
        values.append(ptx.as_float(word & 0xFFFF0000))
    return values
#: endif


def dot(weights, values, total):
    """Adds the products of eight elements to a sum."""
    for weight, value in zip(weights, values, strict=True):
        total = ptx.fma(weight, value, total)
    return total
