__version__ = "0.1.0"

TORCH_FROM, TORCH_BELOW = "2.13", "2.16"
"""The releases of torch with which this version was tested, as setup.cfg has them."""
