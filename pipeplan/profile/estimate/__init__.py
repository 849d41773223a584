"""Estimated profiles: what each layer would cost on a GPU that is not here, from the model's own ops.

Every layer runs once on fake tensors, which have sizes and no values. What its ops read, write and compute is counted
(``recorder``), grouped as real kernels group it (``fusion``), and turned into times by a GPU's peak figures (``gpus``)
and the share of them that each category of op reaches (``efficiency``), which ``fit`` learns from other profiles.
"""
