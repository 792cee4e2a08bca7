"""mhcgen turns a short spec into the GPU kernels of a model with hyper-connections."""

__version__ = "0.1.0"
