"""The one place where units change: milliseconds and gigabytes outside, nanoseconds and bytes inside."""

from __future__ import annotations

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
BYTES_PER_GB = 1_000_000_000  # decimal, as on GPU data sheets


def ns_from_ms(value: float) -> int:
    """Return whole nanoseconds."""
    return round(value * NS_PER_MS)


def ms_from_ns(value: float) -> float:
    """Return milliseconds."""
    return value / NS_PER_MS


def ns_from_us(value: float) -> int:
    """Return whole nanoseconds."""
    return round(value * NS_PER_US)


def us_from_ns(value: float) -> float:
    """Return microseconds."""
    return value / NS_PER_US


def bytes_from_gb(value: float) -> int:
    """Return whole bytes; one GB is 10^9 bytes."""
    return round(value * BYTES_PER_GB)


def gb_from_bytes(value: float) -> float:
    """Return decimal gigabytes."""
    return value / BYTES_PER_GB


def format_gb(value_bytes: int) -> str:
    """Return gigabytes, below one megabytes, and below a tenth of one kilobytes."""
    value = gb_from_bytes(value_bytes)
    if value_bytes == 0:
        return "0"
    if value >= 1:
        return f"{value:,.2f} GB"
    return f"{value * 1e3:.1f} MB" if value >= 1e-4 else f"{value * 1e6:.3g} kB"
