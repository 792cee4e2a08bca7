"""The runtime of generated packages: compiles kernels, owns the mailbox, launches.

These modules are part of every generated package, where they import nothing outside it
but torch and the CuTe DSL.
"""

from .arguments import BoundaryOutput
from .host import FusedBoundary
from .loader import load, load_emulated

__all__ = ["BoundaryOutput", "FusedBoundary", "load", "load_emulated"]
