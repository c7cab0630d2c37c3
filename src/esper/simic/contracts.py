"""What simic relies on of a host, without importing kasmina: satisfied structurally."""

from esper.leyline.protocols import (
    GrowingProtocol,
    SeedSlotProtocol,
    SeedStateProtocol,
    SlottedHostProtocol,
)

__all__ = ["GrowingProtocol", "SeedSlotProtocol", "SeedStateProtocol", "SlottedHostProtocol"]
