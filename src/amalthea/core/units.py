"""Figures as people read them."""

from __future__ import annotations

GIB = 1024**3


def format_count(count: float) -> str:
    """`951_875_000_000` → `951.9 B`; powers of a thousand."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f}"


def format_si(value: float, unit: str) -> str:
    """`27.1e12, "FLOP"` → `27.1 TFLOP`; powers of a thousand, as rates and links are given."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def format_bytes(num_bytes: float) -> str:
    """`1536` → `1.5 KiB`; powers of 1024."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(num_bytes) >= 1024**power:
            return f"{num_bytes / 1024**power:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """`3725` → `1 h 02 min`; `75` → `1 min 15 s`; `8.25` → `8.2 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
