"""Planning pipeline-parallel training of heterogeneous models for DeepSpeed."""

__version__ = "0.1.0"
