"""Bytes that collectives send."""


def ring_bytes(kind: str, devices: int, input_bytes: int) -> float:
    """Bytes that a device sends, in the ring form of each collective."""
    others = (devices - 1) / devices
    factor = {
        "reduce-scatter": others,
        "all-to-all": others,
        "all-gather": devices - 1,
        "all-reduce": 2 * others,
        "permute": 1,
    }
    return factor[kind] * input_bytes
