"""What each layer costs on each device: types and file here (no torch); measuring in ``measure``."""

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
