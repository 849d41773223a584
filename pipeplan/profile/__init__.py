"""What each layer costs on each device, and how it is found out.

Types and file here need no torch. ``measure`` runs layers on this machine (``chain``, ``passes``, ``sampling``,
``held``, ``routing``), ``resume`` goes on where it stopped (``kept``), ``sharing`` deals layers out among ranks,
``estimate`` is for GPUs that are not here. ``merge`` puts profiles together, ``states`` counts what an optimizer
keeps, ``confidence`` says how far to trust a measurement; ``links`` and ``draft`` are about the cluster.
"""

from pipeplan.profile.file import profile_digest, read_profile, write_profile
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation

__all__ = [
    "LayerProfile",
    "LayerTimes",
    "Profile",
    "Recomputation",
    "profile_digest",
    "read_profile",
    "write_profile",
]
