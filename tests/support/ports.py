"""Free TCP ports on the loopback address."""

import random
import socket

_FIRST, _LAST = 15_000, 22_000  # with 10,000 added still below the ephemeral range of Linux (32768 and up)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_ports(count: int, shadow: int = 0) -> list[int]:
    """`count` different ports that nobody listens on; with `shadow`, port + shadow is free as well.

    A port is free when this returns and may be taken later; the range lies below the ephemeral one, so that
    no outgoing connection takes it by chance.
    """
    candidates = list(range(_FIRST, _LAST))
    random.SystemRandom().shuffle(candidates)
    found: list[int] = []
    for port in candidates:
        if _is_free(port) and (not shadow or _is_free(port + shadow)):
            found.append(port)
            if len(found) == count:
                return found
    raise RuntimeError(f"fewer than {count} free ports between {_FIRST} and {_LAST}")
