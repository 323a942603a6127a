"""The version of the package; ranks that run different ones refuse to plan together."""

__version__ = "0.1.0"
